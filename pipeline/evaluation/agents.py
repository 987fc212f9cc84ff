"""Strategies x benchmarks x arms in the agent loop: scores, and why the runs ended.

    rows = compare_agents({"base": Arm(policy)}, [hotpot_benchmark(path, 20)], ["cot", "react"])

Only a submitted answer is scored: a run that was stopped is wrong. Strategies that need an
evaluator (reflexion) get the verdict of the score, right or wrong, and nothing of the gold answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.agent.diagnosis import summarise
from pipeline.agent.environments.arithmetic import (
    arithmetic_tasks,
    arithmetic_tools,
    number_right,
)
from pipeline.agent.environments.encyclopedia import Question, make_tasks
from pipeline.agent.limits import Limits
from pipeline.agent.policies import Policy
from pipeline.agent.strategies import Strategy, StrategyResult, run_strategy
from pipeline.agent.tasks import EpisodeResult, Settings, Task
from pipeline.agent.toolbox import EnvironmentTools, Toolbox
from pipeline.agent.trace import Sink
from pipeline.agent.transcripts import run_row
from pipeline.evaluation import fever, hotpot
from pipeline.evaluation.statistics import binomial_error

Right = Callable[[str | None, str], bool]


@dataclass(frozen=True)
class Benchmark:
    """Questions with their tasks, tools and score; `family` names its instruction files."""

    name: str
    questions: Sequence[Question]
    tasks: Sequence[Task]
    tools: Toolbox
    right: Right
    limits: Limits
    family: str


@dataclass(frozen=True)
class Arm:
    """A policy, and whether its own inline calls are answered within a turn."""

    policy: Policy
    inline_calls: bool = False


def hotpot_benchmark(path: Path, limit: int | None = None) -> Benchmark:
    """HotpotQA over the paragraphs of its own file: exact match, 7 steps."""
    questions, encyclopedia = hotpot.load_hotpot(path)
    chosen = questions[:limit]
    return Benchmark(
        "hotpot",
        chosen,
        make_tasks(chosen, encyclopedia),
        EnvironmentTools([]),
        hotpot.exact_match,
        Limits(max_steps=hotpot.MAX_STEPS, repeats_per_tool={"Lookup": hotpot.MAX_STEPS}),
        "hotpot",
    )


def fever_benchmark(claims: Path, pages: Path, limit: int | None = None) -> Benchmark:
    """FEVER claims over the paragraphs of a HotpotQA file: label accuracy, 5 steps."""
    questions = fever.load_fever(claims, limit)
    _, encyclopedia = hotpot.load_hotpot(pages)
    return Benchmark(
        "fever",
        questions,
        make_tasks(questions, encyclopedia),
        EnvironmentTools([]),
        fever.label_right,
        Limits(max_steps=fever.MAX_STEPS, repeats_per_tool={"Lookup": fever.MAX_STEPS}),
        "fever",
    )


def arithmetic_benchmark(questions: Sequence[Question], max_steps: int = 5) -> Benchmark:
    """Word problems with the Calculator: the number of the answer, to two decimals."""
    return Benchmark(
        "arithmetic",
        questions,
        arithmetic_tasks(questions),
        arithmetic_tools(),
        number_right,
        Limits(max_steps=max_steps),
        "arithmetic",
    )


def compare_agents(
    arms: Mapping[str, Arm],
    benchmarks: Sequence[Benchmark],
    strategies: Sequence[str] | Mapping[str, Strategy],
    settings: Settings | None = None,
    *,
    on_run: Callable[[dict[str, Any]], object] | None = None,
    on_event: Sink | None = None,
) -> list[dict[str, Any]]:
    """Run every combination and return one row each; see `_row` for the fields.

    `strategies` are names of the table, or strategies of one's own by name. `on_run` gets a
    `run_row` for every run that counts, for a traces file; `on_event` gets every event as it
    happens. The limits are the benchmark's.
    """
    own = strategies if isinstance(strategies, Mapping) else dict.fromkeys(strategies)
    rows = []
    for arm_name, arm in arms.items():
        for benchmark in benchmarks:
            chosen = replace(
                settings or Settings(), limits=benchmark.limits, inline_calls=arm.inline_calls
            )
            for name, strategy in own.items():
                results = _results(name, strategy, arm, benchmark, chosen, on_event)
                verdicts = [
                    benchmark.right(result.answer, question.gold)
                    for result, question in zip(results, benchmark.questions, strict=True)
                ]
                labels = {"arm": arm_name, "benchmark": benchmark.name, "strategy": name}
                rows.append({**labels, **_row(results, verdicts)})
                if on_run is not None:
                    for result, right in zip(results, verdicts, strict=True):
                        on_run(run_row(result.final, right, **labels))
    return rows


def _results(
    name: str,
    strategy: Strategy | None,
    arm: Arm,
    benchmark: Benchmark,
    settings: Settings,
    on_event: Sink | None,
) -> list[StrategyResult]:
    gold = {question.question_id: question.gold for question in benchmark.questions}

    def evaluator(task: Task, run: EpisodeResult) -> bool:
        return benchmark.right(run.answer, gold[task.task_id])

    return run_strategy(
        name,
        benchmark.tasks,
        arm.policy,
        benchmark.tools,
        settings,
        strategy=strategy,
        family=benchmark.family,
        evaluator=evaluator,
        on_event=on_event,
    )


def _row(results: Sequence[StrategyResult], verdicts: Sequence[bool]) -> dict[str, Any]:
    """Score, standard error, cost per question, exit reasons of the runs that count, diagnosis."""
    count, right = len(results), sum(verdicts)
    summary = summarise([result.final for result in results])
    return {
        "n": count,
        "right": right,
        "accuracy": right / count if count else 0.0,
        "standard_error": binomial_error(right, count),
        "steps_per_question": _mean(result.steps for result in results),
        "tokens_per_question": _mean(r.tokens_in + r.tokens_out for r in results),
        "exit_reasons": summary.exit_reasons,
        "calls": summary.calls,
        "errors": summary.errors,
        "flags": summary.flags,
        "diagnosis": list(summary.diagnosis),
    }


def _mean(values: Iterator[int]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0
