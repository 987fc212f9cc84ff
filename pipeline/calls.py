"""The text form of a call: render it, find its end, read it back, make a result harmless.

A call is `c = (tool, arguments)`; `e(c)` and `e(c, r)` are its two texts (method, section 1).
Everything here works on plain text; token ids are the business of `pipeline.lm.tokens`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Rendering = Literal["text", "special"]
EmptyResult = Literal["arrow", "bare"]

_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.\-]*)\(")


@dataclass(frozen=True)
class CallSyntax:
    """The three delimiters of a call and the form of `e(c, eps)`."""

    rendering: Rendering = "text"
    empty_result: EmptyResult = "arrow"

    @property
    def open(self) -> str:
        """`<API>`."""
        return " [" if self.rendering == "text" else "<API>"

    @property
    def close(self) -> str:
        """`</API>`."""
        return "]" if self.rendering == "text" else "</API>"

    @property
    def arrow(self) -> str:
        """The sign between a call and its result."""
        return "->" if self.rendering == "text" else "→"

    @property
    def markers(self) -> tuple[str, ...]:
        """The delimiters that are added to the vocabulary (`special` only)."""
        return (self.open, self.close, self.arrow) if self.rendering == "special" else ()


TEXT = CallSyntax()


@dataclass(frozen=True)
class ParsedCall:
    """A call read from text; `end` is the index after its closing parenthesis."""

    tool: str
    arguments: str
    end: int


def call_pieces(
    tool: str, arguments: str, result: str | None, syntax: CallSyntax = TEXT
) -> list[str]:
    """Split `e(c)` (result None) or `e(c, r)` into the pieces that are tokenised one by one.

    The borders are where generation stops and goes on: after the opening delimiter the model
    writes the call, after the arrow the program inserts the result and the closing delimiter.
    """
    head = f"{tool}({arguments})"
    if result is None:
        return [syntax.open, head, syntax.close]
    return [syntax.open, f"{head} {syntax.arrow}", f" {result}{syntax.close}"]


def render(tool: str, arguments: str, result: str | None = None, syntax: CallSyntax = TEXT) -> str:
    """Write a call as text: `e(c)` without a result, `e(c, r)` with one.

    >>> render("Calculator", "37 * 24", "888")
    ' [Calculator(37 * 24) -> 888]'
    """
    return "".join(call_pieces(tool, arguments, result, syntax))


def empty_call_pieces(tool: str, arguments: str, syntax: CallSyntax = TEXT) -> list[str]:
    """Pieces of `e(c, eps)`: with the arrow and an empty result, or `bare` (method, section 5)."""
    return call_pieces(tool, arguments, "" if syntax.empty_result == "arrow" else None, syntax)


def scan_balanced(text: str, start: int, opening: str = "(", closing: str = ")") -> int | None:
    """Return the index of the bracket that closes the one before `start`, or None.

    Brackets nest; a pair of double quotes hides brackets between them. Single quotes do not
    (they are apostrophes more often than not).
    """
    depth = 1
    position = start
    while position < len(text):
        char = text[position]
        if char == '"':
            other = _closing_quote(text, position)
            if other is not None:
                position = other
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def _closing_quote(text: str, start: int) -> int | None:
    position = start + 1
    while position < len(text):
        if text[position] == "\\":
            position += 1
        elif text[position] == '"':
            return position
        position += 1
    return None


def parse_call(text: str) -> ParsedCall | None:
    """Read `Tool(arguments)` at the start of `text`; None when there is no complete call."""
    match = _NAME.match(text)
    if match is None:
        return None
    end = scan_balanced(text, match.end())
    if end is None:
        return None
    return ParsedCall(match.group(1), text[match.end() : end].strip(), end + 1)


def read_sample(text: str, tool: str, syntax: CallSyntax = TEXT) -> str | Literal[False] | None:
    """Read what a model wrote after the opening delimiter, as far as it is known.

    Returns the arguments when the call is complete (closed, or followed by the arrow), False when
    no continuation can make it a call of `tool` on one line, and None while it is open.
    The end is recognised on text, so a token such as `)]` or `],` ends a call as well.
    """
    body = text.lstrip(" ")
    head = f"{tool}("
    if not body.startswith(head[: len(body)]) or "\n" in body:
        return False
    if len(body) <= len(head):
        return None
    end = scan_balanced(body, len(head))
    if end is None:
        return None
    rest = body[end + 1 :].lstrip(" ")
    if rest.startswith((syntax.close, syntax.arrow)):
        return body[len(head) : end].strip()
    if syntax.close.startswith(rest) or syntax.arrow.startswith(rest):
        return None
    return False


def holds_call_syntax(text: str, tools: Iterable[str], syntax: CallSyntax = TEXT) -> bool:
    """Tell whether a plain text already holds something of the form `[KnownTool(`."""
    names = "|".join(re.escape(tool) for tool in tools)
    pattern = rf"(\[|<API>)\s*({names})\s*\("
    return re.search(pattern, text, re.IGNORECASE) is not None or any(
        marker in text for marker in syntax.markers
    )


def neutralise(text: str, limit: int) -> tuple[str, bool]:
    """Make an untrusted result harmless: one line, no delimiter, no control character, capped.

    Returns the text and whether it was cut at `limit` characters.
    """
    for delimiter, harmless in _HARMLESS:
        text = delimiter.sub(harmless, text)
    text = "".join(" " if unicodedata.category(c) in _CONTROL else c for c in text)
    text = " ".join(text.split())
    if len(text) <= limit:
        return text, False
    return text[: max(limit - 1, 0)].rstrip() + "…", True


_CONTROL = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
# In this order, and whole runs at once: what one replacement leaves must not be a delimiter again.
_HARMLESS = [
    (re.compile(pattern), harmless)
    for pattern, harmless in (
        (r"\[", "("),
        (r"\]", ")"),
        (r"<\|+", "<"),
        (r"\|+>", ">"),
        (r"<(/?API)>", r"(\1)"),
        (r"→", "-"),
        (r"->+", "-"),
    )
]
