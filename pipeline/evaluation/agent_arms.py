"""The arms of a run in the agent loop: what `evaluate` adds when `evaluate.agents` is set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.agent.engine import local_policy
from pipeline.agent.environments.encyclopedia import Question as AgentQuestion
from pipeline.agent.strategies import STRATEGIES
from pipeline.agent.tasks import Settings
from pipeline.agent.trace import Event
from pipeline.config import AgentLoop, Config
from pipeline.errors import ConfigError
from pipeline.evaluation.agents import (
    Arm,
    Benchmark,
    arithmetic_benchmark,
    compare_agents,
    fever_benchmark,
    hotpot_benchmark,
)
from pipeline.evaluation.questions import Question, spread
from pipeline.lm.forward import LanguageModel


def check_agents(settings: AgentLoop) -> None:
    """Refuse strategies that do not exist and benchmarks whose files are not named or not there."""
    for name in settings.strategies:
        if name not in STRATEGIES:
            raise ConfigError(
                f"`evaluate.agents.strategies`: {name!r}; allowed are {', '.join(STRATEGIES)}"
            )
    needs = {"hotpot": ("hotpot_file",), "fever": ("hotpot_file", "fever_file")}
    for benchmark in settings.benchmarks:
        for key in needs.get(benchmark, ()):
            value = getattr(settings, key)
            if value is None or not Path(value).is_file():
                raise ConfigError(
                    f"`evaluate.agents.{key}` = {value!r}: {benchmark} needs this file"
                )


def run_agents(
    config: Config,
    arm: str,
    lm: LanguageModel,
    questions: list[Question],
    on_end: Callable[[int], object] = lambda n: None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run one arm through benchmarks x strategies: rows with scores, and one trace per run.

    Only the arm `tuned` has its own inline calls answered within a thought, opened as `evaluate`
    opens them (`call_k`); the others (and the tuned model in `tuned_disabled`) work with the
    actions of the loop alone. Every turn is made to begin with `Thought:` or `Action:`. `on_end` is
    called for each run that is over.
    """
    settings = config.evaluate.agents
    assert settings is not None
    traces: list[dict[str, Any]] = []

    def note(event: Event) -> None:
        if event["event"] == "exit":
            on_end(1)

    inline_calls = arm == "tuned"
    policy = local_policy(
        lm.model,
        lm.tokenizer,
        constrain=settings.constrain,
        fires=(config.call_format.syntax, config.evaluate.call_k) if inline_calls else None,
    )
    rows = compare_agents(
        {arm: Arm(policy, inline_calls)},
        [_benchmark(name, settings, questions) for name in settings.benchmarks],
        settings.strategies,
        Settings(prefixes=True, tool_choice=settings.tool_choice),
        on_run=traces.append,
        on_event=note,
    )
    return rows, traces


def _benchmark(name: str, settings: AgentLoop, questions: list[Question]) -> Benchmark:
    if name == "hotpot":
        return hotpot_benchmark(Path(str(settings.hotpot_file)), settings.limit)
    if name == "fever":
        claims, pages = Path(str(settings.fever_file)), Path(str(settings.hotpot_file))
        return fever_benchmark(claims, pages, settings.limit)
    own = [question for question in questions if question.kind == "arithmetic"]
    chosen = spread(own, settings.limit)
    asked = [AgentQuestion(q.id, f"{q.prompt} ...", q.answers[0]) for q in chosen]
    return arithmetic_benchmark(asked)
