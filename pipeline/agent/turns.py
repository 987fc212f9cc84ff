"""The small records of the loop: a call, a parsed turn, a message of the state.

A protocol module (`react`, `chat`, `inline`, `plain`) turns the text of one turn into a `Turn`.
The loop appends `Message`s and never changes one that is already there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]
Kind = Literal["text", "observation", "inline", "nudge"]
Arguments = str | dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One requested call; `problem` says why it cannot be executed as it was written."""

    name: str
    arguments: Arguments
    call_id: str = ""
    problem: str | None = None
    raw: str = ""

    def key(self) -> str:
        """Identify the action regardless of the case of its name and the order of its keys."""
        if isinstance(self.arguments, str):
            arguments = " ".join(self.arguments.split())
        else:
            arguments = json.dumps(self.arguments, sort_keys=True, ensure_ascii=False, default=str)
        return f"{self.name.lower()}({arguments or self.raw})"


@dataclass(frozen=True)
class Turn:
    """What a turn says: `text` is the part that is kept, everything after it was discarded.

    At most one of `calls` and `answer` is set. `errors` explains what could not be read.
    """

    text: str
    calls: tuple[Call, ...] = ()
    answer: str | None = None
    flags: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def actions(self) -> tuple[Call, ...]:
        """The calls that were read without a problem."""
        return tuple(call for call in self.calls if call.problem is None)


@dataclass(frozen=True)
class Message:
    """One entry of the state; a `tool` message answers the call `call_id`."""

    role: Role
    content: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    name: str = ""
    kind: Kind = "text"

    def as_dict(self) -> dict[str, Any]:
        """Return the message for JSON, without the fields that are empty."""
        values = dataclasses.asdict(self)
        return {k: v for k, v in values.items() if v or k in ("role", "content")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Message:
        """Read a message back from `as_dict`."""
        calls = tuple(Call(**call) for call in values.get("calls", ()))
        return cls(**{**values, "calls": calls})


class ProtocolModule(Protocol):
    """What the loop needs of a protocol; each of the modules fits it."""

    STOP: tuple[str, ...]
    HINT: str

    def parse(self, text: str, tools: Collection[str] | None = None) -> Turn:
        """Read one turn."""

    def render(self, messages: Sequence[Message]) -> str:
        """Write the state as the text that a completion model continues."""


def number_calls(turn: Turn, prefix: str) -> Turn:
    """Give every call of a turn that has no id one of its own: `prefix-1`, `prefix-2`, ..."""
    calls = tuple(
        call if call.call_id else dataclasses.replace(call, call_id=f"{prefix}-{index}")
        for index, call in enumerate(turn.calls, start=1)
    )
    return dataclasses.replace(turn, calls=calls)
