"""The look-ahead leak (method, section 5): arguments written from text that comes later.

`P(x)` shows the whole text, so a sampled call may use a number or a name that stands only after
its own position. Such a call passes the loss test and can never be written at inference.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+")
_WORD = re.compile(r"[^\W\d_][\w'’-]*")
_QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”")
_COMMON_WORDS = """
    a about above after again all also am an and any are as at be because been before being
    below between both but by can could did do does doing down during each few for from
    further had has have having he her here hers him his how i if in into is it its itself
    just many may me might more most much must my name new no nor not now of off old on once
    one only or other our out over own per same she should since so some such than that the
    their them then there these they this those through time to too two under until up upon
    us use used very was we well were what when where which while who whom whose why will
    with within without would year years you your
"""
_COMMON = frozenset(re.findall(r"\w+", _COMMON_WORDS))


def _numbers(text: str) -> set[str]:
    found = set()
    for match in _NUMBER.findall(text):
        plain = match.replace(",", "")
        plain = f"0{plain}" if plain.startswith(".") else plain
        found.add(plain.rstrip("0").rstrip(".") if "." in plain else plain.lstrip("0") or "0")
    return found


def _words(text: str) -> set[str]:
    words = {word.lower().removesuffix("'s").removesuffix("’s") for word in _WORD.findall(text)}
    return {word for word in words if len(word) > 2 and word not in _COMMON}


def lookahead_leak(arguments: str, text: str, char_start: int) -> str | None:
    """Return what the arguments take from the text after `char_start`, or None.

    That is a number, a quoted string, or a word that is not among the commonest English words,
    which stands in the text after the position and not before it.
    """
    before, after = text[:char_start], text[char_start:]
    for pair in _QUOTED.findall(arguments):
        quoted = (pair[0] or pair[1]).lower()
        if quoted in after.lower() and quoted not in before.lower():
            return quoted
    for read in (_numbers, _words):
        taken = (read(arguments) & read(after)) - read(before)
        if taken:
            return min(taken)
    return None
