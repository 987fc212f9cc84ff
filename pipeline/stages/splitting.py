"""Cutting long documents at sentence ends.

Pieces are slices of the text: nothing but white space at the cuts is lost. Covered: abbreviations,
initials, decimal numbers, list numbers, closing quotes and brackets, full-width punctuation. A
sentence that is longer than a whole piece is cut between words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# A word, for counting: a run without white space, at most 40 long, so that base64 or a script
# written without spaces cannot hide a page in one word; each CJK character counts as one.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]{{1,40}}")

_BOUNDARY = re.compile(
    r"(?P<end>[.!?…]+[\"'”’»)\]]*)\s+(?=[\"'“‘«(\[¿¡]*[^\sa-z])"  # a mark, then no small letter
    r"|[。！？]+[」』”’）]*\s*"
    r"|\s*\n\s*\n\s*"  # a blank line
)

_ABBREVIATION = re.compile(
    r"mrs?|ms|mx|dr|prof|rev|hon|pres|gov|sen|rep|gen|col|maj|capt|cmdr|lt|sgt|cpl|st|sr|jr"
    r"|messrs|mme|mlle|nos?|figs?|eqs?|vols?|ch|sec|pp?|art|al|cf|vs|viz|ca|approx|est|dept|inc"
    r"|ltd|co|corp|bros|univ|assn|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|mon|tues?|wed"
    r"|thu(?:rs?)?|fri|sat|sun|mt|ft|ave|blvd|rd|hwy|etc|ph\.d",
    re.IGNORECASE,
)
_LAST_TOKEN = re.compile(r"[^\s(\[\"'“‘«]*$")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")  # J in "J. Smith", U.S, p.m, e.g
_LIST_NUMBER = re.compile(r"(?:^|\n)\s*(?:\d{1,3}|[a-z])$")


def count_words(text: str) -> int:
    """Count the words of a text the way `split_text` does."""
    return len(_WORD.findall(text))


def sentence_ends(text: str) -> Iterator[int]:
    """Yield the indices at which the next sentence begins, without 0 and the end of the text."""
    for match in _BOUNDARY.finditer(text):
        if match.end() >= len(text) or match.end() == 0:
            continue
        end = match.group("end")
        if end is not None and end.startswith(".") and _is_abbreviation(text, match.start()):
            continue
        yield match.end()


def _is_abbreviation(text: str, period: int) -> bool:
    before = text[max(0, period - 30) : period]
    found = _LAST_TOKEN.search(before)
    token = found.group() if found else ""
    if _ABBREVIATION.fullmatch(token) or (_INITIALS.fullmatch(token) and token != "I"):
        return True
    return _LIST_NUMBER.search(before) is not None


def split_text(text: str, max_words: int) -> list[str]:
    """Cut a text into pieces of at most `max_words` words, of about equal length.

    Raises ValueError when `max_words` is not positive.
    """
    if max_words < 1:
        raise ValueError(f"max_words = {max_words}: must be at least 1")
    total = count_words(text)
    if total <= max_words:
        return [text.strip()] if text.strip() else []
    pieces = []
    begin = position = words = 0
    for end, length in _units(text, max_words):
        # Aim at equal pieces: a greedy fill leaves a stub at the end that is too short to keep.
        goal = -(-total // -(-total // max_words))
        if words and (words + length > max_words or words >= goal):
            pieces.append(text[begin:position].strip())
            total -= words
            begin, words = position, 0
        words += length
        position = end
    pieces.append(text[begin:].strip())
    return [piece for piece in pieces if piece]


def _units(text: str, max_words: int) -> Iterator[tuple[int, int]]:
    """Yield (end, words) of the sentences, those over `max_words` cut between words."""
    begin = 0
    for end in [*sentence_ends(text), len(text)]:
        spans = [match.span() for match in _WORD.finditer(text, begin, end)]
        if len(spans) > max_words:
            step = -(-len(spans) // -(-len(spans) // max_words))
            for first in range(0, len(spans) - step, step):
                yield spans[first + step][0], step
                spans_left = len(spans) - first - step
            yield end, spans_left
        else:
            yield end, len(spans)
        begin = end
