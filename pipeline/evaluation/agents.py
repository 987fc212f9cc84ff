"""Strategies x benchmarks x arms in the agent loop: scores, and why the runs ended.

    rows = compare_agents({"base": Arm(policy)}, [hotpot_benchmark(path, 20)], ["cot", "react"])

Only a submitted answer is scored: a run that was stopped is wrong. In the grid world, where the
answer says nothing, the run has to have reached the goal before it finishes. Strategies that need
an evaluator (reflexion) get the verdict of the score, right or wrong, and nothing of the gold
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.agent.diagnosis import diagnose_outcomes, summarise
from pipeline.agent.environments import walk, worlds
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
from pipeline.evaluation import bfcl, fever, hotpot
from pipeline.evaluation.statistics import binomial_error

Judged = tuple[dict[str, Any], list[dict[str, Any]]]  # a row without its labels, and its runs
ONE_TURN = "one_turn"  # what stands for a strategy where there is none
Right = Callable[[EpisodeResult, str], bool]


@dataclass(frozen=True)
class Benchmark:
    """Questions with their tasks, tools and score; its name is also that of its instructions.

    `right` gets the run that counts and the gold answer.
    """

    name: str
    questions: Sequence[Question]
    tasks: Sequence[Task]
    tools: Toolbox
    right: Right
    limits: Limits


@dataclass(frozen=True)
class FunctionCalls:
    """Rows of the function-calling leaderboard: one turn each, whatever the strategies."""

    rows: Sequence[bfcl.Row]
    numbers: bfcl.Numbers = "typed"
    name: str = "bfcl"


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
        _by_answer(hotpot.exact_match),
        Limits(max_steps=hotpot.MAX_STEPS, repeats_per_tool={"Lookup": hotpot.MAX_STEPS}),
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
        _by_answer(fever.label_right),
        Limits(max_steps=fever.MAX_STEPS, repeats_per_tool={"Lookup": fever.MAX_STEPS}),
    )


def arithmetic_benchmark(questions: Sequence[Question], max_steps: int = 5) -> Benchmark:
    """Word problems with the Calculator: the number of the answer, to two decimals."""
    return Benchmark(
        "arithmetic",
        questions,
        arithmetic_tasks(questions),
        arithmetic_tools(),
        _by_answer(number_right),
        Limits(max_steps=max_steps),
    )


def library_benchmark(limit: int) -> Benchmark:
    """The library desk: the number of free copies, 8 steps."""
    questions, tasks = worlds.library_tasks(limit)
    right = _by_answer(number_right)
    return Benchmark("library", questions, tasks, EnvironmentTools([]), right, Limits(max_steps=8))


def stock_benchmark(limit: int) -> Benchmark:
    """The stock desk: yes or no, or the number of pieces to order, 6 steps."""
    questions, tasks = worlds.stock_tasks(limit)
    right = _by_answer(worlds.stock_right)
    return Benchmark("stock", questions, tasks, EnvironmentTools([]), right, Limits(max_steps=6))


def grid_benchmark(limit: int) -> Benchmark:
    """The grid world: to stand on the goal and finish, 40 steps."""
    questions, tasks = walk.grid_tasks(limit)
    limits = Limits(max_steps=walk.MAX_STEPS, repeats_per_tool={"move": walk.MAX_STEPS})
    return Benchmark("grid", questions, tasks, EnvironmentTools([]), walk.at_goal, limits)


def _by_answer(right: Callable[[str | None, str], bool]) -> Right:
    return lambda run, gold: right(run.answer, gold)


def compare_agents(
    arms: Mapping[str, Arm],
    benchmarks: Sequence[Benchmark | FunctionCalls],
    strategies: Sequence[str] | Mapping[str, Strategy],
    settings: Settings | None = None,
    *,
    on_run: Callable[[dict[str, Any]], object] | None = None,
    on_event: Sink | None = None,
) -> list[dict[str, Any]]:
    """Run every combination and return one row each; see `_row` for the fields.

    Function calls have one row per arm, with `outcomes` besides (`bfcl` says which).

    `strategies` are names of the table, or strategies of one's own by name. `on_run` gets a
    `run_row` for every run that counts, for a traces file; `on_event` gets every event as it
    happens. The limits are the benchmark's.
    """
    own = strategies if isinstance(strategies, Mapping) else dict.fromkeys(strategies)
    rows = []
    for arm_name, arm in arms.items():
        for benchmark in benchmarks:
            ways = {ONE_TURN: None} if isinstance(benchmark, FunctionCalls) else own
            for name, strategy in ways.items():
                labels = {"arm": arm_name, "benchmark": benchmark.name, "strategy": name}
                if isinstance(benchmark, FunctionCalls):
                    row, runs = _called(benchmark, arm, settings or Settings(), on_event)
                else:
                    chosen = _settings(settings or Settings(), benchmark, arm)
                    results = _results(name, strategy, arm, benchmark, chosen, on_event)
                    row, runs = _judged(benchmark, results)
                rows.append({**labels, **row})
                if on_run is not None:
                    for run in runs:
                        on_run({**labels, **run})
    return rows


def _settings(settings: Settings, benchmark: Benchmark, arm: Arm) -> Settings:
    return replace(settings, limits=benchmark.limits, inline_calls=arm.inline_calls)


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
        return benchmark.right(run, gold[task.task_id])

    return run_strategy(
        name,
        benchmark.tasks,
        arm.policy,
        benchmark.tools,
        settings,
        strategy=strategy,
        family=benchmark.name,
        evaluator=evaluator,
        on_event=on_event,
    )


def _judged(benchmark: Benchmark, results: Sequence[StrategyResult]) -> Judged:
    """The figures of one strategy, and its runs with their verdicts."""
    verdicts = [
        benchmark.right(result.final, question.gold)
        for result, question in zip(results, benchmark.questions, strict=True)
    ]
    finals = [result.final for result in results]
    steps = [result.steps for result in results]
    tokens = [result.tokens_in + result.tokens_out for result in results]
    runs = [run_row(run, right) for run, right in zip(finals, verdicts, strict=True)]
    return _row(finals, verdicts, steps, tokens), runs


def _called(
    benchmark: FunctionCalls, arm: Arm, settings: Settings, on_event: Sink | None
) -> Judged:
    """The same for function calls, with the outcomes."""
    asked = bfcl.ask_rows(
        benchmark.rows,
        arm.policy,
        numbers=benchmark.numbers,
        tool_choice=settings.tool_choice,
        on_event=on_event,
    )
    verdicts, finals = [verdict for verdict, _ in asked], [run for _, run in asked]
    right, tokens = [verdict.right for verdict in verdicts], [run.tokens for run in finals]
    row = _row(finals, right, [1] * len(finals), tokens)
    runs = [
        {"outcome": verdict.outcome, "reason": verdict.reason, **run_row(run, verdict.right)}
        for verdict, run in asked
    ]
    row["outcomes"] = bfcl.outcomes(verdicts)
    row["diagnosis"] += diagnose_outcomes([(v.outcome, v.reason) for v in verdicts])
    return row, runs


def _row(
    finals: Sequence[EpisodeResult],
    verdicts: Sequence[bool],
    steps: Sequence[int],
    tokens: Sequence[int],
) -> dict[str, Any]:
    """Score, standard error, cost per question, exit reasons of the runs that count, diagnosis."""
    count, right = len(finals), sum(verdicts)
    summary = summarise(finals)
    return {
        "n": count,
        "right": right,
        "accuracy": right / count if count else 0.0,
        "standard_error": binomial_error(right, count),
        "steps_per_question": _mean(steps),
        "tokens_per_question": _mean(tokens),
        "exit_reasons": summary.exit_reasons,
        "calls": summary.calls,
        "errors": summary.errors,
        "flags": summary.flags,
        "diagnosis": list(summary.diagnosis),
    }


def _mean(values: Iterable[int]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0
