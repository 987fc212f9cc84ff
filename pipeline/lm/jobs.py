"""What is asked of the generation engine, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipeline.calls import CallSyntax

if TYPE_CHECKING:
    from pipeline.lm.grammar import RowMask

MALFORMED, NEVER_CLOSED = "malformed", "never_closed"


class Executed(Protocol):
    """What came of a tool call; exactly one of `result` and `error_kind` is set."""

    @property
    def result(self) -> str | None: ...
    @property
    def error_kind(self) -> str | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def seconds(self) -> float: ...


@dataclass(frozen=True)
class LiveCalls:
    """How calls are made while text is generated.

    `execute(tool, arguments, index of the prompt)` runs one; its result must be harmless already
    (the executor sees to that). Not `enabled`: the opening token has probability 0. `mask` makes
    the grammar of one call, from after the opening token to the arrow (`lm.grammar.live_grammar`);
    its own bounds then take the place of `max_call_tokens`.
    """

    syntax: CallSyntax
    tools: Sequence[str]
    execute: Callable[[str, str, int], Executed]
    call_k: int = 10
    max_calls: int = 1
    enabled: bool = True
    max_call_tokens: int = 64  # a call that has not reached its arrow by then ends as text
    mask: Callable[[], RowMask] | None = None


@dataclass(frozen=True)
class MadeCall:
    """A call that the model made; `start` and `end` are characters of the generated text.

    `error_kind` is `malformed` or `never_closed` (then `arguments` is what was written and the
    text stays), or what the tool reported (then an empty result was inserted).
    """

    tool: str
    arguments: str
    result: str | None
    error_kind: str | None
    error: str | None
    start: int
    end: int
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether it was a well-formed call that reached a tool."""
        return self.error_kind not in (MALFORMED, NEVER_CLOSED)


@dataclass(frozen=True)
class Generation:
    """What was generated for a prompt.

    `finish` is eos, stop (a stop string, not part of the text), length, or context (the model can
    read no more). `tokens_out` counts what the model wrote, `tokens_inserted` the results.
    """

    text: str
    tokens_in: int
    tokens_out: int
    calls: list[MadeCall]
    finish: str
    tokens_inserted: int = 0

    @property
    def plain(self) -> str:
        """The text without its calls."""
        text = self.text
        for call in reversed([call for call in self.calls if call.complete]):
            text = text[: call.start] + text[call.end :]
        return text


@dataclass(frozen=True)
class Job:
    """A prompt and how it is to be continued; `generation.generate` says what the fields mean."""

    prompt: str | Sequence[int]
    max_new_tokens: int
    stop: Sequence[str] = ()
    temperature: float = 0.0
    seed: int = 0
    mask: RowMask | None = None
    fires: tuple[int, int] | None = (
        None  # (token, k): chosen once, where it is among the k likeliest
    )


Source = Callable[[Sequence[tuple[Job, Generation]], bool], Sequence[Job]]
