"""Observations are data: what a tool returned is made harmless before a model reads it."""

from __future__ import annotations

import re
import unicodedata

from pipeline.calls import neutralise

_CONTROL_TOKENS = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|</?s>|</?(?:tool_call|tool_response|tools|think|API)>"
    r"|\[/?INST\]|\[TOOL_CALLS\]|<</?SYS>>|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>",
    re.IGNORECASE,
)
_MARKERS = re.compile(
    r"^(?=[ \t*#]*(?:thought|action|observation|final answer|question|answer)[ \t]*\d*[ \t]*\**:)",
    re.IGNORECASE | re.MULTILINE,
)


def harmless(text: str, limit: int, *, one_line: bool = False) -> str:
    """Neutralise control tokens and protocol markers, and cap the size with a visible mark.

    A line that looks like the protocol becomes a quotation (`> Action: ...`); the brackets of a
    control token become round. `one_line` is for results inside running text, where the
    delimiters of a call are neutralised too. `limit` counts characters of the result.
    """
    if one_line:
        return neutralise(text[: 20 * limit], limit)[0]
    shown = text[:limit]
    shown = "".join(c for c in shown if c in "\n\t" or unicodedata.category(c) not in _INVISIBLE)
    # Twice: taking invisible characters or one token out may have put another one together.
    for _ in range(2):
        shown = _CONTROL_TOKENS.sub(lambda found: _round(found.group()), shown)
    shown = _MARKERS.sub("> ", shown)
    if len(text) > limit:
        shown = f"{shown} … [cut: {limit} of {len(text)} characters shown]"
    return shown


def _round(token: str) -> str:
    return "(" + token.strip("<>|[]") + ")"


_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn"}
