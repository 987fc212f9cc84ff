"""Runs of the agent loop, read from a file for showing them turn by turn.

Two kinds of lines are read: the events of `callsieve agent run --trace`, in which several runs may
be mixed, and the runs of `agent-traces.jsonl`, one a line. Texts are cut at `TEXT_SHOWN`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from pipeline.agent import inline, turns
from pipeline.agent.limits import ExitReason
from pipeline.agent.tasks import EpisodeResult
from pipeline.agent.turns import Arguments, Message

TEXT_SHOWN = 10_000  # characters of one text
ENTRIES_SHOWN = 200  # turns and results of one run
LABELS = ("benchmark", "arm", "strategy")
UNFINISHED = "unfinished"


# -- lines ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Event:
    task_id: str
    step: int


@dataclass(frozen=True)
class Start(_Event):
    event: Literal["start"]
    question: str
    protocol: str


@dataclass(frozen=True)
class Turn(_Event):
    event: Literal["turn"]
    text: str
    flags: tuple[str, ...] = ()
    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(frozen=True)
class Call(_Event):
    event: Literal["call"]
    tool: str
    arguments: Arguments
    cached: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Observation(_Event):
    event: Literal["observation"]
    tool: str
    content: str
    error_kind: str | None = None


@dataclass(frozen=True)
class Nudge(_Event):
    event: Literal["nudge"]
    content: str


@dataclass(frozen=True)
class Exit(_Event):
    event: Literal["exit"]
    exit_reason: ExitReason
    answer: str | None
    tokens_in: int
    tokens_out: int
    seconds: float
    forced_answer: str | None = None
    detail: str | None = None


Line = Start | Turn | Call | Observation | Nudge | Exit
_EVENTS: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="event")])
_RESULTS = TypeAdapter(EpisodeResult)


def read_event(value: dict[str, Any]) -> Line:
    """Read one event; raises pydantic's ValidationError."""
    return _EVENTS.validate_python(value)


# -- runs -----------------------------------------------------------------------------------------


@dataclass
class Entry:
    """A turn, a result or a nudge. `marks` are the places of inline calls in a turn's text; a
    result without a text never came."""

    kind: Literal["turn", "result", "nudge"]
    text: str | None
    step: int | None = None
    marks: list[tuple[int, int]] = field(default_factory=list)
    tool: str = ""
    call: str = ""
    failed: bool = False
    facts: list[str] = field(default_factory=list)
    continues: bool = False  # an inline result was the last: what follows goes on in the line


@dataclass
class Episode:
    """One run; `result` is what came of it, without its messages, and None while it is open."""

    question: str
    task_id: str
    protocol: str
    labels: dict[str, str] = field(default_factory=dict)
    right: bool | None = None
    outcome: str = ""  # what judged function calls came to
    note: str = ""  # what the evaluator says besides
    entries: list[Entry] = field(default_factory=list)
    left_out: int = 0
    result: EpisodeResult | None = None
    steps: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    _call: Call | None = None
    _calls: Counter[str] = field(default_factory=Counter)
    _errors: dict[str, Counter[str]] = field(default_factory=dict)
    _flags: Counter[str] = field(default_factory=Counter)

    @property
    def ended(self) -> str:
        """The outcome where calls were judged, else the exit reason, or `unfinished`."""
        return self.outcome or (self.result.exit_reason if self.result else UNFINISHED)

    def add(self, event: Line) -> None:
        """Take the next event of this run."""
        self.steps = max(self.steps, event.step)
        if isinstance(event, Turn):
            self.tokens_in += event.tokens_in
            self.tokens_out += event.tokens_out
            self._flags.update(event.flags)
            tokens = f"{event.tokens_in:,} tokens in, {event.tokens_out:,} out"
            self._turn(event.text, event.step, [tokens, *event.flags])
        elif isinstance(event, Call):
            self._call = event
        elif isinstance(event, Observation):
            self._observe(event)
        elif isinstance(event, Nudge):
            self._put(Entry("nudge", cut(event.content), event.step))
        elif isinstance(event, Exit):
            self._end(event)

    def close(self) -> None:
        """Show the call that is still waiting for its result when the file ends."""
        if self._call is not None:
            call = shown_call(self._call.tool, self._call.arguments)
            self._result(self._call.tool, call, None, False, [], self._call.step)

    def _observe(self, event: Observation) -> None:
        made, self._call = self._call, None
        facts = [f"{made.seconds:.2f} s"] if made else []
        facts += ["cached"] if made and made.cached else []
        name = "unknown" if event.error_kind == "unknown_tool" else event.tool
        if event.error_kind:
            facts.append(event.error_kind)
        if made and event.error_kind:  # a call that could not be read is not one that failed
            self._errors.setdefault(name, Counter())[event.error_kind] += 1
        if made and event.error_kind not in ("unknown_tool", "refused"):
            self._calls[name] += 1
        call = shown_call(made.tool, made.arguments) if made else ""
        self._result(event.tool, call, event.content, bool(event.error_kind), facts, event.step)

    def _turn(self, text: str, step: int | None, facts: list[str]) -> None:
        """Add what was said; what belongs to one turn of `react` becomes one entry."""
        last = self.entries[-1] if self.entries else None
        same = self.protocol != "inline" and last is not None and last.step == step
        if last is None or not same or last.kind != "turn" or last.text is None:
            self._put(Entry("turn", cut(text), step, facts=facts))
        elif len(last.text) < TEXT_SHOWN:
            last.text += ("" if last.continues else "\n") + cut(text)
            last.continues = False
            last.facts += facts
        else:
            self.left_out += 1

    def _result(
        self,
        tool: str,
        call: str,
        content: str | None,
        failed: bool,
        facts: list[str],
        step: int | None,
    ) -> None:
        """Add what came of a call; None where nothing did."""
        last = self.entries[-1] if self.entries else None
        within = last and last.kind == "turn" and last.text and last.text.endswith(inline.STOP)
        if last and within and content is not None:
            written = inline.result_text(last.text or "", cut(content))
            self._insert(last, written, tool, failed, facts)
            return
        turn = next((e.text or "" for e in reversed(self.entries) if e.kind == "turn"), "")
        if self.protocol != "chat" or "<tool_call>" in turn:
            call = ""  # the turn shows it
        shown = None if content is None else cut(content)
        self._put(Entry("result", shown, step, [], tool, call, failed, facts))

    def _insert(self, turn: Entry, written: str, tool: str, failed: bool, facts: list[str]) -> None:
        """Write an inline result into its turn and remember where the call stands."""
        text = turn.text or ""
        if len(text) >= 2 * TEXT_SHOWN:
            self.left_out += 1
            return
        start = max(text.rfind(f"{sign}{tool}(") for sign in ("[", "<API>", "<API> ", "[ "))
        turn.text = text + written
        if start >= 0:
            turn.marks.append((start, len(turn.text)))
        turn.facts += [f"{tool}: {fact}" for fact in facts] if failed else []
        turn.continues = True

    def _put(self, entry: Entry) -> None:
        if len(self.entries) >= ENTRIES_SHOWN:
            self.left_out += 1
        else:
            self.entries.append(entry)

    def _end(self, event: Exit) -> None:
        self.tokens_in, self.tokens_out = event.tokens_in, event.tokens_out
        self.result = EpisodeResult(
            task_id=self.task_id,
            question=self.question,
            heading="Question",
            protocol=self.protocol,
            exit_reason=event.exit_reason,
            answer=event.answer,
            forced_answer=event.forced_answer,
            steps=event.step,
            tokens_in=event.tokens_in,
            tokens_out=event.tokens_out,
            context_sent=0,
            calls=dict(self._calls),
            errors={tool: dict(kinds) for tool, kinds in self._errors.items()},
            flags=dict(self._flags),
            detail=event.detail,
            seconds=event.seconds,
            messages=(),
            events=(),
        )

    def say(self, messages: Iterable[Message]) -> None:
        """Take the messages of a run, whose system and first user message are not turns."""
        waiting: list[tuple[str, str, str]] = []
        for message in messages:
            if message.role == "assistant":
                waiting = [(c.call_id, c.name, _written(c)) for c in message.calls]
                self._turn(message.content, None, [])
            elif message.kind == "inline" and self.entries:
                self._insert(self.entries[-1], cut(message.content), message.name, False, [])
            elif message.role == "tool":
                own = next((call for call in waiting if call[0] == message.call_id), None)
                _, name, call = own or ("", message.name, "")
                waiting = [other for other in waiting if other is not own]
                failed = message.content.startswith(("Error (", "Not executed:"))
                self._result(name, call, message.content, failed, [], None)
            elif message.kind == "nudge":
                self._put(Entry("nudge", cut(message.content)))
        for _, name, call in waiting:
            self._result(name, call, None, False, [], None)


def read_run(value: dict[str, Any]) -> Episode:
    """Read a line of `agent-traces.jsonl`; raises pydantic's ValidationError."""
    result = _RESULTS.validate_python({**value["run"], "events": ()})
    episode = Episode(
        cut(result.question),
        result.task_id,
        result.protocol,
        {name: cut(str(value[name])) for name in LABELS if name in value},
        value.get("right") if isinstance(value.get("right"), bool) else None,
        cut(str(value.get("outcome") or "")),
        cut(str(value.get("reason") or "")),
        result=replace(result, messages=()),
        steps=result.steps,
        tokens_in=result.tokens_in,
        tokens_out=result.tokens_out,
    )
    episode.say(result.messages)
    return episode


def _written(call: turns.Call) -> str:
    """What a call of a message says; as it was written where it could not be read."""
    return cut(call.raw) if call.problem and call.raw else shown_call(call.name, call.arguments)


def shown_call(tool: str, arguments: Arguments) -> str:
    """Write a call as one text."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return cut(f"{tool}({arguments})")


def cut(text: str) -> str:
    """Cut a text at `TEXT_SHOWN` characters and say so."""
    left = len(text) - TEXT_SHOWN
    return text if left <= 0 else f"{text[:TEXT_SHOWN]} … [{left:,} more characters not shown]"


def in_turn(episodes: Sequence[Episode], key: Callable[[Episode], object]) -> Iterator[Episode]:
    """Go through runs so that each kind has its turn: the first of every kind, the second, ..."""
    kinds: dict[object, list[Episode]] = {}
    for episode in episodes:
        kinds.setdefault(key(episode), []).append(episode)
    for row in zip_longest(*kinds.values()):
        yield from (episode for episode in row if episode is not None)
