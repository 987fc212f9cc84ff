"""The brakes: how far a run may go, and the reasons for which it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from pipeline.errors import ConfigError

ExitReason = Literal[
    "finished",
    "max_steps",
    "token_budget",
    "time_budget",
    "context_overflow",
    "repeated_action",
    "parse_failures",
    "approval_rejected",
    "guardrail",
    "handoff",
    "unexpected_stop",
    "tool_fatal",
    "model_error",
    "cancelled",
]
EXIT_REASONS: tuple[str, ...] = get_args(ExitReason)


@dataclass(frozen=True)
class Limits:
    """What one run may use; None switches a brake off.

    Tokens count both directions, as an endpoint bills them. The budgets are checked before the
    model is asked, so one turn can pass them. `max_repeats` counts how often the same action may
    be made in a row; `repeats_per_tool` overrides it for tools whose result changes.
    """

    max_steps: int = 8
    max_tokens: int | None = None
    max_seconds: float | None = None
    max_repeats: int | None = 1
    repeats_per_tool: Mapping[str, int] = field(default_factory=dict)
    stop_alternation: bool = True
    max_parse_failures: int = 3
    max_rejections: int = 3
    max_inline_calls: int = 4  # inline calls that may be answered within one turn of `react`

    def __post_init__(self) -> None:
        least = {
            "max_steps": 1,
            "max_tokens": 0,
            "max_seconds": 0,
            "max_repeats": 1,
            "max_parse_failures": 1,
            "max_rejections": 1,
            "max_inline_calls": 0,
        }
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ConfigError(f"limits.{name} is {value}; allowed: {smallest} or more")


def over_budget(limits: Limits, *, tokens: int, seconds: float) -> ExitReason | None:
    """Return the budget that is used up, time first, or None."""
    if limits.max_seconds is not None and seconds >= limits.max_seconds:
        return "time_budget"
    if limits.max_tokens is not None and tokens >= limits.max_tokens:
        return "token_budget"
    return None


@dataclass(frozen=True)
class Made:
    """The calls of one past turn: their key, the tools named, and what came back."""

    key: str
    tools: tuple[str, ...]
    results: str


def no_progress(limits: Limits, history: Sequence[Made], key: str, tools: Sequence[str]) -> bool:
    """Tell whether making `key` next would repeat the last action too often, or alternate.

    `A B A B` counts only when the two `A` brought the same result: a tool whose result changes is
    still getting somewhere.
    """
    if limits.max_repeats is not None:
        own = {name.lower(): limit for name, limit in limits.repeats_per_tool.items()}
        allowed = min((own.get(name.lower(), limits.max_repeats) for name in tools), default=1)
        in_a_row = 0
        for made in reversed(history):
            if made.key != key:
                break
            in_a_row += 1
        if in_a_row >= allowed:
            return True
    if not limits.stop_alternation or len(history) < 3:
        return False
    first, second, third = history[-3:]
    alternates = first.key == third.key and second.key == key and first.key != key
    return alternates and first.results == third.results
