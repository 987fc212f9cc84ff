"""The arms of a run in the agent loop: what `evaluate` adds when `evaluate.agents` is set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.agent.engine import local_policy
from pipeline.agent.environments.encyclopedia import Question as AgentQuestion
from pipeline.agent.tasks import Settings
from pipeline.agent.trace import Event
from pipeline.config import AgentLoop, Config
from pipeline.evaluation.agents import (
    Arm,
    Benchmark,
    FunctionCalls,
    arithmetic_benchmark,
    compare_agents,
    fever_benchmark,
    grid_benchmark,
    hotpot_benchmark,
    library_benchmark,
    stock_benchmark,
)
from pipeline.evaluation.bfcl import load_rows
from pipeline.evaluation.questions import Question, spread
from pipeline.lm.forward import LanguageModel
from pipeline.paths import find


def run_agents(
    config: Config,
    arm: str,
    lm: LanguageModel,
    questions: list[Question],
    on_end: Callable[[int], object] = lambda n: None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run one arm through benchmarks x strategies: rows with scores, and one trace per run.

    Only the arm `tuned` has its own inline calls answered within a thought (of `react`), opened as
    `evaluate` opens them (`call_k`); the others (and the tuned model in `tuned_disabled`) work with
    the actions of the loop alone. Every turn of `react` is made to begin with `Thought:` or
    `Action:`. `on_end` is called for each run that is over.
    """
    settings = config.evaluate.agents
    assert settings is not None
    traces: list[dict[str, Any]] = []

    def note(event: Event) -> None:
        if event["event"] == "exit":
            on_end(1)

    inline_calls = arm == "tuned" and settings.protocol == "react"
    policy = local_policy(
        lm.model,
        lm.tokenizer,
        constrain=settings.constrain,
        fires=(config.call_format.syntax, config.evaluate.call_k) if inline_calls else None,
    )
    rows = compare_agents(
        {arm: Arm(policy, inline_calls)},
        [benchmark_named(name, settings, questions) for name in settings.benchmarks],
        settings.strategies,
        Settings(settings.protocol, prefixes=True, tool_choice=settings.tool_choice),
        on_run=traces.append,
        on_event=note,
    )
    return rows, traces


def benchmark_named(
    name: str, settings: AgentLoop, questions: list[Question]
) -> Benchmark | FunctionCalls:
    """Read or draw the questions of a benchmark; arithmetic takes them from `questions`."""
    made = {"library": library_benchmark, "stock": stock_benchmark, "grid": grid_benchmark}
    if name in made:
        return made[name](settings.limit)
    if name == "hotpot":
        return hotpot_benchmark(_file(settings.hotpot_file), settings.limit)
    if name == "fever":
        claims, pages = _file(settings.fever_file), _file(settings.hotpot_file)
        return fever_benchmark(claims, pages, settings.limit)
    if name == "bfcl":
        return _function_calls(settings)
    own = [question for question in questions if question.kind == "arithmetic"]
    chosen = spread(own, settings.limit)
    asked = [AgentQuestion(q.id, f"{q.prompt} ...", q.answers[0]) for q in chosen]
    return arithmetic_benchmark(asked)


def _function_calls(settings: AgentLoop) -> FunctionCalls:
    assert settings.bfcl_category is not None
    answers = None if settings.bfcl_answers is None else _file(settings.bfcl_answers)
    rows = load_rows(_file(settings.bfcl_file), answers, settings.bfcl_category)
    return FunctionCalls(rows[: settings.limit], settings.bfcl_numbers)


def _file(value: str | None) -> Path:
    assert value is not None  # see `check_agents`
    return find(value)
