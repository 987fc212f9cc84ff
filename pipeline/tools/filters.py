"""Corpus filters: does a document look as if the tool could help in it (method, section 8).

They are cheap and run before any model. Each answers True for "keep".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from itertools import product
from typing import Any

from pipeline.tools.calendar import parse_date

NUMBER_WINDOW = 100  # tokens: how far apart the three numbers may stand
CHUNK_TOKENS = 10  # of a foreign chunk
KEPT_SHARE = 0.01  # of the documents with three numbers and nothing else

_TOKEN = re.compile(
    r"(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?)(?P<percent>\s?%)?"
    r"|\w+|[^\w\s]"
)
_STATED_RESULT = re.compile(
    r"(?:=|\b(?:equals|equal\s+to|total\s+of|average\s+of))\s*[$€£]?\s?[-−]?\.?[0-9]", re.IGNORECASE
)
_URL_DATE = re.compile(
    r"(?<![0-9])(?P<year>(?:19|20)[0-9]{2})(?P<sep>[-/_.]?)(?P<month>[0-9]{1,2}|[a-z]{3,9})"
    r"(?P=sep)(?P<day>[0-9]{1,2})(?![0-9])",
    re.IGNORECASE,
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_QUANTITY = re.compile(
    r"[0-9]\s*(?:km|kilomet\w+|met(?:re|er)s?|cm|mm|miles?|feet|foot|ft|inch\w*|yards?|kg|kilograms?"
    r"|grams?|pounds?|lbs?|ounces?|oz|tonn?es?|lit(?:re|er)s?|gallons?|ml|acres?|hectares?|°\s?[CF]"
    r"|degrees|km/h|mph|knots?|joules?|calories|kwh|watts?|hours?|minutes?|seconds?)\b",
    re.IGNORECASE,
)


def corpus_filter(tool_name: str, document: Mapping[str, Any], seed: int) -> bool:
    """Whether a document (`text`, `doc_id`, `date`, `url`) is offered to a tool.

    Tools without a filter of their own (search, QA, a user's function, MCP) take every document.
    """
    text = str(document.get("text") or "")
    match tool_name.lower():
        case "calculator":
            return calculator_filter(text, str(document.get("doc_id") or ""), seed)
        case "calendar":
            return calendar_filter(document.get("date"), document.get("url"))
        case "mt":
            return translation_filter(text)
        case "units":
            return units_filter(text)
        case "python":
            return len(numbers_in(text)) >= 2
    return True


def calculator_filter(text: str, doc_id: str, seed: int) -> bool:
    """Keep a text with a sum in it, or with a stated result, or 1 % of those with three numbers.

    (i) three numbers within 100 tokens of which one is the result of + - * / on the two others;
    (ii) `=`, `equals`, `equal to`, `total of` or `average of` before a number;
    (iii) at least three numbers, and then a share that depends on (seed, doc_id) alone.
    """
    if _STATED_RESULT.search(text):
        return True
    numbers = numbers_in(text)
    if len(numbers) < 3:
        return False
    return holds_result(numbers) or _draw(doc_id, seed) < KEPT_SHARE


@dataclass(frozen=True)
class NumberInText:
    """A number, as a share too where it is a percentage; `token` is its place in the text."""

    token: int
    values: tuple[Decimal, ...]


def numbers_in(text: str) -> list[NumberInText]:
    """The numbers of a text in their order; words and marks count as tokens between them."""
    numbers = []
    for token, match in enumerate(_TOKEN.finditer(text)):
        digits = match["number"]
        if digits and len(digits) <= 20:
            value = Decimal(digits.replace(",", ""))
            values = (value, value / 100) if match["percent"] else (value,)
            numbers.append(NumberInText(token, values))
    return numbers


def holds_result(numbers: Sequence[NumberInText], window: int = NUMBER_WINDOW) -> bool:
    """Whether one of three different numbers within `window` tokens is computed from two others.

    `a - b = c` is `b + c = a` and `a / b = c` is `b * c = a`, so sums and products of pairs are
    all that is looked up; a quotient also counts when it is given rounded to two decimals.
    """
    places: dict[Decimal, list[int]] = {}
    for index, number in enumerate(numbers):
        for value in number.values:
            places.setdefault(value, []).append(index)
    fractions = any(value != value.to_integral_value() for value in places)
    for first, left in enumerate(numbers):
        for second in range(first + 1, len(numbers)):
            right = numbers[second]
            if right.token - left.token >= window:
                break
            for a, b in product(left.values, right.values):
                results = [a + b, a * b, *(_rounded_quotients(a, b) if fractions else ())]
                thirds = (third for result in results for third in places.get(result, ()))
                for third in thirds:
                    distinct = third not in (first, second)
                    if distinct and _within(numbers, (first, second, third), window):
                        return True
    return False


def _rounded_quotients(a: Decimal, b: Decimal) -> list[Decimal]:
    """`a / b` and `b / a` to two decimals, unless that is a whole number: mostly coincidence."""
    rounded = []
    for dividend, divisor in ((a, b), (b, a)):
        if divisor and dividend / divisor < 10**20:
            quotient = (dividend / divisor).quantize(Decimal("0.01"), ROUND_HALF_UP)
            if quotient != quotient.to_integral_value():
                rounded.append(quotient)
    return rounded


def _within(numbers: Sequence[NumberInText], indices: Sequence[int], window: int) -> bool:
    tokens = [numbers[index].token for index in indices]
    return max(tokens) - min(tokens) < window


def _draw(doc_id: str, seed: int) -> float:
    """A number in [0, 1) that depends on the seed and the document alone."""
    digest = hashlib.blake2b(f"calculator-filter\0{seed}\0{doc_id}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") / 2**64


def calendar_filter(stated: object, url: object) -> bool:
    """Keep a document with a date that can be read, from its metadata or its URL."""
    return parse_date(stated) is not None or date_from_url(url) is not None


def date_from_url(url: object) -> str | None:
    """The ISO date in a URL such as `/2023/01/30/` or `/2023/jan/30/`; None without a real one."""
    if not isinstance(url, str):
        return None
    for match in _URL_DATE.finditer(url):
        month = match["month"].lower()
        if not month.isdigit():
            if month[:3] not in _MONTHS or not match["sep"]:
                continue
            number = _MONTHS.index(month[:3]) + 1
        elif not match["sep"] and len(month + match["day"]) != 4:
            continue
        else:
            number = int(month)
        try:
            return date(int(match["year"]), number, int(match["day"])).isoformat()
        except ValueError:
            continue
    return None


def units_filter(text: str) -> bool:
    """Keep a text with a quantity: a number in front of a unit."""
    return _QUANTITY.search(text) is not None


def translation_filter(text: str, detect: Callable[[str], str | None] | None = None) -> bool:
    """Keep a text with a chunk of 10 tokens in another language between English ones.

    `detect` names the language of a chunk (`en`, `es`, ...) or None when unsure; the default is
    py3langid (extra `mt`).
    """
    tokens = text.split()
    chunks = [
        " ".join(tokens[start : start + CHUNK_TOKENS])
        for start in range(0, len(tokens), CHUNK_TOKENS)
    ]
    if len(chunks) < 3:
        return False
    detect = detect or _default_detector()
    seen_english = seen_foreign = False
    for chunk in chunks:
        language = detect(chunk)
        if language == "en":
            if seen_foreign:
                return True
            seen_english = True
        elif language is not None and seen_english:
            seen_foreign = True
    return False


@cache
def _default_detector() -> Callable[[str], str | None]:
    from pipeline.tools.language import detect_language

    return detect_language
