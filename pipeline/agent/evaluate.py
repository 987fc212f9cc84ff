"""`callsieve agent evaluate MODEL`: one model on benchmarks x strategies, without a run folder.

callsieve agent evaluate MODEL --benchmarks library,stock,grid --strategies act,react
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, get_args

from rich.console import Console

from pipeline.agent.command import check_inline_calls, is_address, make_policy
from pipeline.agent.scores import print_scores
from pipeline.agent.tasks import Settings
from pipeline.agent.templates import chat_instead, loops
from pipeline.agent.trace import Event, TraceFile
from pipeline.arguments import print_json
from pipeline.config import AgentBenchmark, AgentLoop
from pipeline.errors import ConfigError, WorkError
from pipeline.evaluation.agent_arms import benchmark_named
from pipeline.evaluation.agent_settings import check_agents
from pipeline.evaluation.agents import Arm, Benchmark, FunctionCalls, compare_agents
from pipeline.evaluation.questions import Question, load_questions
from pipeline.paths import find_all
from pipeline.progress import progress


def evaluate_model(args: argparse.Namespace) -> None:
    """Run `callsieve agent evaluate`; the table, or with `json` the rows, goes to stdout.

    Raises ConfigError for options that cannot work, before a model is loaded, and WorkError when
    the model could not be asked: the rows are printed, and their scores are not the model's.
    """
    settings = read_settings(args)
    check_agents(settings, _option)
    check_inline_calls(args.inline_calls, settings.protocol)
    benchmarks = _benchmarks(settings, args.questions)
    for text in _idle(settings, args.inline_calls):
        print(f"callsieve: {text}", file=sys.stderr)
    instead = chat_instead(settings, _option)
    policy = make_policy(args.model, settings.protocol, settings.constrain, instead)
    prefixes = not is_address(args.model)
    loop = Settings(settings.protocol, prefixes=prefixes, tool_choice=settings.tool_choice)
    with TraceFile(args.trace) if args.trace else nullcontext() as trace:
        rows = _rows(
            {args.model: Arm(policy, args.inline_calls)},
            benchmarks,
            settings.strategies,
            loop,
            trace,
        )
    if args.json:
        print_json(rows)
    else:
        print_scores(rows, Console())
    _need_answers(rows)


def _rows(
    arms: Mapping[str, Arm],
    benchmarks: Sequence[Benchmark | FunctionCalls],
    strategies: Sequence[str],
    loop: Settings,
    trace: TraceFile | None,
) -> list[dict[str, Any]]:
    """Run every combination; how many runs are over is told on stderr."""
    rows: list[dict[str, Any]] = []
    with progress(None, "runs", "evaluate") as bar:

        def note(event: Event) -> None:
            if event["event"] == "exit":
                bar.update()

        for benchmark in benchmarks:
            for names in _turns(benchmark, strategies):
                bar.set_description(" ".join((benchmark.name, *names)))
                rows += compare_agents(arms, [benchmark], names, loop, on_run=trace, on_event=note)
    return rows


def read_settings(args: argparse.Namespace) -> AgentLoop:
    """The options as the settings that `evaluate.agents` has in a configuration."""
    benchmarks = _names(args.benchmarks, "--benchmarks")
    allowed = get_args(AgentBenchmark)
    for name in benchmarks:
        if name not in allowed:
            raise ConfigError(f"--benchmarks: {name!r}; allowed are {', '.join(allowed)}")
    return AgentLoop(
        strategies=_names(args.strategies, "--strategies"),
        benchmarks=benchmarks,  # type: ignore[arg-type]  # checked above
        limit=args.limit,
        protocol=args.protocol,
        hotpot_file=args.hotpot_file,
        fever_file=args.fever_file,
        bfcl_file=args.bfcl_file,
        bfcl_answers=args.bfcl_answers,
        bfcl_category=args.bfcl_category,
        bfcl_numbers=args.bfcl_numbers,
        constrain=args.constrain,
        tool_choice=args.tool_choice,
    )


def _names(text: str, option: str) -> tuple[str, ...]:
    """The names of a comma list, each once, in their order."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"{option} {text!r}: expected names with commas between them")
    return names


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _idle(settings: AgentLoop, inline_calls: bool) -> list[str]:
    """What to say of options that change nothing with these benchmarks and strategies."""
    if loops(settings):
        return []
    given = {
        "--tool-choice required": settings.tool_choice == "required",
        "--constrain": settings.constrain,
    }
    idle = [] if "bfcl" in settings.benchmarks else [name for name in given if given[name]]
    texts = [
        f"{name} changes nothing: no tool can be called with --strategies "
        f"{','.join(settings.strategies)}"
        for name in idle
    ]
    if inline_calls:
        texts.append("--inline-calls changes nothing: no turn is one of react in the loop")
    return texts


def _benchmarks(settings: AgentLoop, pattern: str) -> list[Benchmark | FunctionCalls]:
    questions: list[Question] = []
    if "arithmetic" in settings.benchmarks:
        if not find_all(pattern):
            raise ConfigError(f"--questions {pattern!r}: matches no file")
        questions = [q for q in load_questions([pattern]) if q.kind == "arithmetic"]
        if not questions:
            raise ConfigError(f"--questions {pattern!r}: no question of the kind arithmetic in it")
    return [benchmark_named(name, settings, questions) for name in settings.benchmarks]


def _turns(
    benchmark: Benchmark | FunctionCalls, strategies: Sequence[str]
) -> list[tuple[str, ...]]:
    """What is asked together: one strategy, or the one turn that has none."""
    return [()] if isinstance(benchmark, FunctionCalls) else [(name,) for name in strategies]


def _need_answers(rows: Sequence[dict[str, Any]]) -> None:
    """Raise WorkError where the model could not be asked."""
    lost = sum(row["exit_reasons"].get("model_error", 0) for row in rows)
    if lost:
        raise WorkError(
            f"{lost} of {sum(row['n'] for row in rows)} runs ended as model_error: they count as "
            "wrong, and say nothing about the model"
        )
