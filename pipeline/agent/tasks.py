"""The records of a run: the task, the settings of the loop, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pipeline.agent.checks import GoalCheck, Guardrail, OutputForm
from pipeline.agent.limits import ExitReason, Limits
from pipeline.agent.toolbox import Toolbox
from pipeline.agent.trace import Event
from pipeline.agent.turns import Message


@dataclass(frozen=True)
class Task:
    """One question. `memory` holds lessons of earlier trials, shown before the question.

    `document` is handed to the tools (`date` as ISO or None, `doc_id`). `tools` makes the toolbox
    of one run, for environments that keep a state; it overrides the common one.
    """

    question: str
    task_id: str = "0"
    heading: str = "Question"
    memory: tuple[str, ...] = ()
    seed: int = 0
    document: Mapping[str, Any] = field(default_factory=dict)
    tools: Callable[[], Toolbox] | None = None


@dataclass(frozen=True)
class Settings:
    """How the loop runs; the defaults are those of `callsieve agent run`.

    `tool_choice` is auto, none, required (the first turn must call) or the name of a tool that
    the first turn must call. `thoughts=False` keeps thoughts out of the state (the strategy act).
    `prefixes` makes a completion model begin its turn with `Thought:` or `Action:`.
    `inline_calls` answers Toolformer calls within a turn of `react`.
    """

    protocol: str = "react"
    instructions: str = ""
    limits: Limits = field(default_factory=Limits)
    tool_choice: str = "auto"
    thoughts: bool = True
    prefixes: bool = False
    inline_calls: bool = False
    observation_limit: int = 2000
    max_new_tokens: int = 256
    temperature: float = 0.0
    output: OutputForm | None = None
    goal_check: GoalCheck | None = None
    guardrail: Guardrail | None = None
    handoff_tools: frozenset[str] = frozenset()
    fatal_kinds: frozenset[str] = frozenset({"unavailable"})
    force_final_answer: bool = False


@dataclass(frozen=True)
class EpisodeResult:
    """What came of a run. Only `answer` is ever scored, and only when the run is `finished`.

    `forced_answer` is one that was demanded at the step limit. `context_sent` adds up, over the
    turns, the messages that the model was sent. `calls` counts executed calls per tool, `errors`
    what went wrong per tool and kind, `flags` what the parser noticed.
    """

    task_id: str
    question: str
    heading: str
    protocol: str
    exit_reason: ExitReason
    answer: str | None
    forced_answer: str | None
    steps: int
    tokens_in: int
    tokens_out: int
    context_sent: int
    calls: dict[str, int]
    errors: dict[str, dict[str, int]]
    flags: dict[str, int]
    detail: str | None
    seconds: float
    messages: tuple[Message, ...]
    events: tuple[Event, ...]

    @property
    def tokens(self) -> int:
        """Tokens in both directions."""
        return self.tokens_in + self.tokens_out

    @property
    def finished(self) -> bool:
        """Whether an answer was submitted."""
        return self.exit_reason == "finished"

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON, the state with it, the events (a trace of their own) not."""
        values = {k: v for k, v in vars(self).items() if k not in ("messages", "events")}
        return {**values, "tokens": self.tokens, "messages": [m.as_dict() for m in self.messages]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpisodeResult:
        """Read a result back from `as_dict`; its events are empty."""
        known = {
            f.name: values[f.name] for f in fields(cls) if f.name not in ("messages", "events")
        }
        messages = tuple(Message.from_dict(message) for message in values["messages"])
        return cls(**known, messages=messages, events=())
