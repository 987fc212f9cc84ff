"""The `react` protocol: `Thought:`, `Action: name[argument]`, `Observation:`, `Final Answer:`.

`parse` reads one turn of a model (Yao et al. 2023, arXiv 2210.03629; prefixes may be numbered as
in the paper). It reads what the model wrote and nothing else: an observation that the model wrote
itself ends the turn, and an argument is found by a balanced scan, never by the first bracket.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pipeline.agent.turns import Call, Message, Turn
from pipeline.calls import scan_balanced

STOP: tuple[str, ...] = ("\nObservation", "\nQuestion:")
# In words: small models copy a form that is shown, placeholders and all.
HINT = (
    "Write one line that begins with Action: and names a tool, with its argument in square "
    "brackets; or Finish, with the answer in square brackets."
)
FINISH_FORM = "If nothing is left to do, write Action: Finish with the answer in square brackets."

_MARKER = re.compile(
    r"^[ \t]*[*#]*[ \t]*(?P<word>thought|action|observation|final answer|question)"
    r"[ \t]*\d*[ \t]*\**:\**[ \t]*",
    re.IGNORECASE | re.MULTILINE,
)
_ACTION_HEAD = re.compile(r"`?\s*(?P<name>[^\W\d][\w.\-]*)\s*\[")
_LATE_ACTION = re.compile(r"\bAction(?: \d+)?: ?(?=[^\W\d][\w.\-]*\[)")
_LATE_ANSWER = re.compile(r"\bFinal Answer: ?(?=\S)")
_NO_ACTION = re.compile(r"\W*(none|n/?a|no action( needed)?|nothing)?\W*$", re.IGNORECASE)


@dataclass(frozen=True)
class _Piece:
    """A recognised part of the turn; `end` is where it stops in the text."""

    kind: str  # action, broken, none, finish, answer
    end: int
    name: str = ""
    argument: str = ""


def parse(text: str, tools: Collection[str] | None = None) -> Turn:
    """Read one turn; with `tools`, a bare line `name[argument]` of a known tool is an action."""
    kept, flags = _cut(text)
    pieces = list(_pieces(kept)) or list(_unmarked(kept, tools))
    return _decide(kept, pieces, flags)


def render(messages: Sequence[Message]) -> str:
    """Write the state as one transcript, ready to be continued with the next turn."""
    parts: list[str] = []
    joined = True  # whether the next piece continues the same line
    for message in messages:
        content = message.content
        if message.kind == "observation" or message.kind == "nudge":
            content = f"Observation: {content}"
        glue = "" if joined or message.kind == "inline" else "\n"
        if parts and messages[0].role == "system" and len(parts) == 1:
            glue = "\n\n"
        parts.append(glue + content)
        joined = message.kind == "inline"
    return "".join(parts) + ("" if joined else "\n")


def _cut(text: str) -> tuple[str, list[str]]:
    """Drop what follows an observation of the model's own, or a question of its own."""
    for marker in _MARKER.finditer(text):
        word = marker["word"].lower()
        if word == "observation":
            return text[: marker.start()], ["self_observation"]
        if word == "question":
            return text[: marker.start()], []
    return text, []


def _pieces(text: str) -> Iterator[_Piece]:
    position = 0
    while marker := _MARKER.search(text, position):
        position = marker.end()
        word = marker["word"].lower()
        if word == "action":
            piece = _action(text, marker.end())
            position = max(position, piece.end)
            yield piece
        elif word == "final answer":
            following = _MARKER.search(text, marker.end())
            end = following.start() if following else len(text)
            yield _Piece("answer", end, argument=text[marker.end() : end].strip())
            position = end


def _unmarked(text: str, tools: Collection[str] | None) -> Iterator[_Piece]:
    """Find what stands without its own line or prefix, in the order of how clear it is."""
    if late := _LATE_ACTION.search(text):
        yield _action(text, late.end())
        return
    if answer := _LATE_ANSWER.search(text):
        yield _Piece("answer", len(text), argument=text[answer.end() :].strip())
        return
    known = {name.lower() for name in tools or ()} | {"finish"}
    for line in re.finditer(r"^[ \t]*(?=[^\W\d][\w.\-]*\[)", text, re.MULTILINE):
        piece = _action(text, line.end())
        if piece.kind == "finish" or (piece.kind == "action" and piece.name.lower() in known):
            yield piece
            return


def _action(text: str, start: int) -> _Piece:
    line_end = text.find("\n", start)
    line_end = len(text) if line_end < 0 else line_end
    head = _ACTION_HEAD.match(text, start)
    if head is None:
        kind = "none" if _NO_ACTION.match(text[start:line_end]) else "broken"
        return _Piece(kind, line_end)
    end = close_bracket(text, head.end())
    if end is None:
        return _Piece("broken", len(text), name=head["name"])
    argument = text[head.end() : end].strip()
    kind = "finish" if head["name"].lower() == "finish" else "action"
    return _Piece(kind, end + 1, head["name"], argument)


def _decide(text: str, pieces: list[_Piece], flags: list[str]) -> Turn:
    """Choose what counts: an action before a final answer, the first action before the others."""
    acts = [piece for piece in pieces if piece.kind in ("action", "finish", "broken")]
    answers = [piece for piece in pieces if piece.kind == "answer" and piece.argument]
    if acts:
        first, later = acts[0], acts[1:]
        if answers or any(piece.kind == "finish" for piece in later):
            flags.append("discarded_answer")
        if any(piece.kind != "finish" for piece in later):
            flags.append("discarded_action")
        kept = text[: first.end].strip()
        if first.kind == "broken":
            problem = (
                f"the action {first.name} is never closed"
                if first.name
                else "the action has no name[argument]"
            )
            return _failure(kept, flags, problem)
        if first.kind == "finish":
            if not first.argument:
                return _failure(kept, flags, "Finish[] holds no answer")
            return Turn(kept, answer=first.argument, flags=tuple(flags))
        return Turn(kept, calls=(Call(first.name, first.argument),), flags=tuple(flags))
    if answers:
        return Turn(text[: answers[0].end].strip(), answer=answers[0].argument, flags=tuple(flags))
    if any(piece.kind == "none" for piece in pieces):
        return Turn(text.strip(), flags=(*flags, "ask_finish_form"))
    return _failure(text.strip(), flags, "no action and no final answer in it")


def _failure(text: str, flags: list[str], problem: str) -> Turn:
    return Turn(text, flags=(*flags, "parse_failure"), errors=(problem,))


def close_bracket(text: str, start: int) -> int | None:
    """Return the index of the `]` that closes the bracket before `start`, or None.

    Brackets nest and do not count within a quoted string. A quote that cannot be one (an
    apostrophe, inches, one that is never closed on its line) is an ordinary character; if reading
    quotes leaves the bracket open, the text is read once more without them.
    """
    depth, position = 1, start
    while position < len(text):
        char = text[position]
        if char in "\"'":
            position = _quote_end(text, position)
        elif char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return scan_balanced(text.replace('"', " "), start, "[", "]")


def _quote_end(text: str, start: int) -> int:
    """Return the index of the last character of the quoted string, or `start` for an apostrophe."""
    quote = text[start]
    before = text[start - 1] if start else " "
    prefixed = re.search(r"(?<!\w)[bfru]{1,2}$", text[max(0, start - 3) : start], re.IGNORECASE)
    if before.isalnum() and not prefixed:
        return start
    if text.startswith(quote * 3, start):
        end = text.find(quote * 3, start + 3)
        return end + 2 if end >= 0 else start
    position = start + 1
    while position < len(text) and text[position] != "\n":
        if text[position] == "\\":
            position += 1
        elif text[position] == quote:
            return position
        position += 1
    return start
