"""What does not go together in `evaluate.agents` is refused before any work begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from pipeline.agent.strategies import STRATEGIES
from pipeline.config import AgentLoop
from pipeline.errors import ConfigError
from pipeline.evaluation.bfcl import Category
from pipeline.paths import find

FILES = ("hotpot_file", "fever_file", "bfcl_file", "bfcl_answers")
WANTED = {
    "hotpot_file": "a HotpotQA distractor file, a JSON list",
    "fever_file": "claims with their labels, JSONL",
    "bfcl_file": "rows of the leaderboard, JSONL",
    "bfcl_answers": "the answers to the rows, JSONL",
    "bfcl_category": f"one of {', '.join(get_args(Category))}",
}


def _in_configuration(key: str) -> str:
    return f"`evaluate.agents.{key}`"


def check_agents(settings: AgentLoop, named: Callable[[str], str] = _in_configuration) -> None:
    """Refuse strategies that do not exist, what does not go together, and files that are not there.

    `named` writes a key as the user gave it.
    """
    for name in settings.strategies:
        if name not in STRATEGIES:
            raise ConfigError(
                f"{named('strategies')}: {name!r}; allowed are {', '.join(STRATEGIES)}"
            )
        if STRATEGIES[name].kind == "loop" and not _fits(name, settings.protocol):
            fitting = ", ".join(own for own in STRATEGIES if _fits(own, settings.protocol))
            raise ConfigError(
                f"{named('strategies')}: {name!r} is written in react only; with "
                f"{named('protocol')} {settings.protocol} allowed are {fitting}"
            )
    for benchmark in settings.benchmarks:
        for key in _needed(benchmark, settings):
            _check_given(key, getattr(settings, key), benchmark, named)
    if "bfcl" in settings.benchmarks and settings.bfcl_category == "irrelevance":
        _check_irrelevance(settings, named)


def _check_given(key: str, value: str | None, benchmark: str, named: Callable[[str], str]) -> None:
    """Refuse a key of a benchmark that is not given, and a file that is not there."""
    if value is None:
        raise ConfigError(f"{named(key)} is missing: {benchmark} needs {WANTED[key]}")
    if key in FILES and not find(value).is_file():
        problem = "a folder; wanted is a file" if find(value).is_dir() else "no such file"
        raise ConfigError(f"{named(key)} = {value!r}: {problem}")


def _fits(strategy: str, protocol: str) -> bool:
    """Whether a strategy can be run in a protocol; those without calls have one of their own."""
    own = STRATEGIES[strategy]
    return own.kind != "loop" or own.thoughts or protocol == own.protocol


def _needed(benchmark: str, settings: AgentLoop) -> tuple[str, ...]:
    """The keys without which a benchmark cannot be run."""
    if benchmark == "bfcl":
        answers = () if settings.bfcl_category == "irrelevance" else ("bfcl_answers",)
        return ("bfcl_file", "bfcl_category", *answers)
    return {"hotpot": ("hotpot_file",), "fever": ("hotpot_file", "fever_file")}.get(benchmark, ())


def _check_irrelevance(settings: AgentLoop, named: Callable[[str], str]) -> None:
    about = f"with {named('bfcl_category')} irrelevance"
    if settings.bfcl_answers is not None:
        raise ConfigError(
            f"{named('bfcl_answers')} = {settings.bfcl_answers!r}: {about} allowed is none; no "
            "call is right there"
        )
    if settings.tool_choice == "required":
        raise ConfigError(f"{named('tool_choice')} = 'required': {about} allowed is auto")
