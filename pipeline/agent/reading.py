"""Reading a turn that may be written in pieces: text, an inline call, its result, more text."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.agent import chat, inline
from pipeline.agent.parse import protocol_named
from pipeline.agent.policies import Reply
from pipeline.agent.tasks import Settings
from pipeline.agent.turns import Turn


class TurnReader:
    """Reads the replies of one run.

    `partial` is the turn so far while inline calls are answered within it; `interrupted` is
    running text that stopped at an arrow of its own and simply goes on.
    """

    def __init__(self, settings: Settings, names: Sequence[str]) -> None:
        self.settings, self.names = settings, names
        self.module = protocol_named(settings.protocol)
        self.partial = self.interrupted = ""
        self._inline_calls = 0

    @property
    def may_fire(self) -> bool:
        """Whether inline calls are answered, and none was made in this turn yet."""
        settings = self.settings
        wanted = settings.protocol == "inline" or (
            settings.protocol == "react" and settings.inline_calls
        )
        return wanted and not self._inline_calls

    @property
    def within_turn(self) -> bool:
        """Whether the next reply continues a turn of `react`, which then costs no step."""
        answered = self.partial != "" and self.settings.protocol != "inline"
        return answered and self._inline_calls <= self.settings.limits.max_inline_calls

    def read(self, reply: Reply) -> Turn:
        """Read one reply; the text of the turn is what this reply adds."""
        if reply.calls is not None:
            return chat.from_structured(reply.text, reply.calls)
        if self.settings.protocol == "inline":
            turn = self._running_text(reply)
        elif self.settings.protocol == "react" and self.settings.inline_calls:
            turn = self._with_inline_calls(reply.text)
        else:
            turn = self.module.parse(reply.text, self.names)
        self._note(turn)
        if not self.settings.thoughts:
            turn = _without_thought(turn)
        flags = (*turn.flags, "length_cut") if reply.finish == "length" else turn.flags
        return Turn(turn.text, turn.calls, turn.answer, flags, turn.errors)

    def insert(self, result: str) -> str:
        """Return a result the way it is inserted after its call, and remember it."""
        written = inline.result_text(self.partial, result)
        self.partial += written
        return written

    def _running_text(self, reply: Reply) -> Turn:
        before, self.interrupted = self.interrupted, ""
        turn = inline.parse(before + reply.text, self.names)
        if reply.finish == "stop" and not turn.calls:
            self.interrupted = before + reply.text + inline.STOP[0]
            return Turn(reply.text + inline.STOP[0])
        own = turn.text[len(before) :]
        return Turn(own, turn.calls, turn.answer, turn.flags, turn.errors)

    def _with_inline_calls(self, text: str) -> Turn:
        """Read a turn of `react` in which Toolformer calls may stand before the action."""
        written = inline.parse(text, self.names)
        if written.actions:
            before = self.module.parse(self.partial + written.text, self.names)
            if not before.calls and before.answer is None:
                return written
        turn = self.module.parse(self.partial + text, self.names)
        own = turn.text[len(self.partial.lstrip()) :]
        return Turn(own, turn.calls, turn.answer, turn.flags, turn.errors)

    def _note(self, turn: Turn) -> None:
        """Remember whether the turn stopped for an inline call."""
        arrow = turn.text.endswith(inline.STOP)
        inlined = self.settings.protocol == "inline" or (self.settings.inline_calls and arrow)
        if turn.calls and inlined:
            self.partial += turn.text
            self._inline_calls += 1
        else:
            self.partial, self._inline_calls = "", 0


def _without_thought(turn: Turn) -> Turn:
    """Keep only the action or the answer of a turn of `react`."""
    if turn.calls and isinstance(turn.calls[0].arguments, str):
        text = f"Action: {turn.calls[0].name}[{turn.calls[0].arguments}]"
    elif turn.answer is not None:
        text = f"Action: Finish[{turn.answer}]"
    else:
        return turn
    return Turn(text, turn.calls, turn.answer, turn.flags, turn.errors)
