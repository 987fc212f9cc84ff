"""The `inline` protocol: Toolformer calls inside running text, `[Calculator(37 * 24) -> 888]`.

A turn ends where the result has to come. The first complete call counts; what the model wrote
after it (a result of its own, more text) was written without the result and is discarded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from pipeline.agent.turns import Call, Message, Turn
from pipeline.calls import parse_call

STOP: tuple[str, ...] = ("->", "→")
HINT = "Write a call as [Tool(arguments) -> and close every bracket."

_OPEN = re.compile(r"(?:\[|<API>)(?=\s*([A-Za-z_][\w.\-]*)\()")
_ARROW = re.compile(r"\s*(->|→)")
_CLOSE = re.compile(r"\s*(\]|</API>)")


def parse(text: str, tools: Collection[str] | None = None) -> Turn:
    """Read one turn: its first call, or the text itself as the answer.

    A name that is not one of `tools` makes a call only when the arrow follows it; a bracket in
    ordinary text stays text.
    """
    known = None if tools is None else {name.lower() for name in tools}
    for opening in _OPEN.finditer(text):
        is_known = known is None or opening[1].lower() in known
        found = parse_call(text[opening.end() :])
        if found is None:
            if is_known:
                problem = f"the call of {opening[1]} is never closed"
                return Turn(text, flags=("parse_failure",), errors=(problem,))
            continue
        end = opening.end() + found.end
        arrow, close = _ARROW.match(text, end), _CLOSE.match(text, end)
        at_end = not text[end:].strip()
        if not (arrow or (is_known and (close or at_end))):
            continue
        return _turn(text, Call(found.tool, found.arguments), end, arrow, close)
    return Turn(text, answer=text.strip() or None)


def render(messages: Sequence[Message]) -> str:
    """Write the state as the running text that the model continues."""
    parts = [m.content for m in messages]
    if messages and messages[0].role == "system":
        parts[0] = f"{parts[0]}\n\n" if parts[0] else ""
    return "".join(parts)


def result_text(turn_text: str, result: str) -> str:
    """Write a result the way it follows the arrow, with the closing delimiter of its call."""
    openings = list(_OPEN.finditer(turn_text))
    special = bool(openings) and openings[-1].group().startswith("<")
    return f" {result}{' </API>' if special else ']'}"


def visible(messages: Sequence[Message]) -> str:
    """Return what the model said without its calls and their results."""
    spoken: list[str] = []
    written = ""
    for message in messages:
        if message.role != "assistant":
            continue
        written += message.content
        if message.calls:
            openings = [o for o in _OPEN.finditer(written) if parse_call(written[o.end() :])]
            spoken.append(written[: openings[-1].start()].rstrip(" ") if openings else written)
            written = ""
    return "".join([*spoken, written]).strip()


def _turn(
    text: str, call: Call, end: int, arrow: re.Match[str] | None, close: re.Match[str] | None
) -> Turn:
    mark = arrow or close
    rest = text[mark.end() :] if mark else ""
    flags: tuple[str, ...] = ()
    if arrow and rest.strip():
        flags = ("self_observation",)
    elif any(parse_call(rest[o.end() :]) for o in _OPEN.finditer(rest)):
        flags = ("discarded_action",)
    sign = arrow[1] if arrow else "->"
    return Turn(f"{text[:end]} {sign}", calls=(call,), flags=flags)
