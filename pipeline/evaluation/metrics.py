"""Whether a generated answer is right (method, section 9), without its calls.

- arithmetic: the first number, or where it begins an equation, the number after `=`;
- lookup: one of the answers within the first 20 words;
- date: one of the answers within the first 10 words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal

from pipeline.evaluation.questions import Question

WORDS = {"lookup": 20, "date": 10}

_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_FIRST = re.compile(rf"(?<![\w.]){_NUMBER}")
_GAP = r"[^\S\n]*"  # white space on one line
_EQUATION = re.compile(rf"{_GAP}(?:[-+*/x×÷^]{_GAP}\$?{_NUMBER}{_GAP})+={_GAP}\$?({_NUMBER})")


def is_correct(question: Question, text: str) -> bool:
    """Judge the text that a model wrote after the prompt, calls taken out."""
    if question.kind == "arithmetic":
        found = first_number(text)
        return found is not None and any(found == first_number(a) for a in question.answers)
    words = WORDS[question.kind]
    return any(within_words(answer, text, words) for answer in question.answers)


def first_number(text: str) -> Decimal | None:
    """The first number of a text, or the right side of the equation that it begins.

    >>> first_number(" 1,250.50 euros, and 3 more"), first_number("37 * 24 = 888")
    (Decimal('1250.50'), Decimal('888'))
    """
    match = _FIRST.search(text)
    if match is None:
        return None
    equation = _EQUATION.match(text, match.end())
    return Decimal((equation.group(1) if equation else match.group()).replace(",", ""))


def within_words(answer: str, text: str, words: int) -> bool:
    """Whether the answer stands, as whole words, within the first so many words of the text.

    Case, accents and punctuation do not matter.
    """
    wanted, written = _words(answer), _words(" ".join(text.split()[:words]))
    starts = range(len(written) - len(wanted) + 1)
    return bool(wanted) and any(written[i : i + len(wanted)] == wanted for i in starts)


def _words(text: str) -> Sequence[str]:
    plain = unicodedata.normalize("NFKD", text.casefold())
    return re.findall(r"\w+", "".join(c for c in plain if not unicodedata.combining(c)))
