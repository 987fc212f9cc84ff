"""Units: conversions such as `5 miles to km`, by pint (extra `units`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pipeline.tools.base import STRICT, MissingExtra, ToolError, ToolSpec, one_string

MAX_CHARACTERS = 120

MAX_POWER = 9

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2})?|"
    r"\.[0-9]+)|(?P<word>[A-Za-zµμΩÅ°%_]+)|(?P<mark>\*\*|[-+−^/*·²³,]))"
)
# What people write and pint does not know.
_PHRASES = (
    (r"degrees?\s+(?:f|fahrenheit)\b|\bfahrenheit\b|(?<!\w)°\s*f\b", "degF"),
    (r"degrees?\s+(?:c|celsius|centigrade)\b|\bcentigrade\b|\bcelsius\b|(?<!\w)°\s*c\b", "degC"),
    (r"\bnautical\s+(miles?)\b", r"nautical_\1"),
    (r"\blight[\s-]+(years?)\b", r"light_\1"),
    (r"\b(?:fl\.?\s*oz|fluid\s+ounces?)\b", "fluid_ounce"),
    (r"\bsq\.?\s+", "square "),
    (r"\bcu\.?\s+", "cubic "),
    (r"\bu\.?s\.?\s+(?=gallon|pint|quart)", ""),
    (r"\bmetric\s+tons?\b", "metric_ton"),
)


@dataclass(frozen=True)
class UnitsConfig:
    """Units has no settings."""

    __pydantic_config__ = STRICT

    name: Literal["Units"] = "Units"


class Units:
    """Converts a quantity into another unit; see `convert`."""

    spec = ToolSpec(
        name="Units",
        version="1",
        description=(
            "Converts a quantity into another unit of length, weight, volume, time, speed, "
            "temperature, energy and so on. Example: 5 miles to km gives 8.05 km."
        ),
        parameters=one_string("conversion", "A quantity, `to`, and a unit: 5 miles to km"),
        result_limit=80,
        timeout_s=5.0,
    )

    def __init__(self) -> None:
        _registry()  # a missing library is said at start, not at the first call

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """The converted quantity, with the unit as it was asked for."""
        return convert(arguments["conversion"])


@cache
def _registry() -> Any:
    try:
        import pint
    except ImportError:
        raise MissingExtra("Units", "units") from None
    return pint.UnitRegistry(autoconvert_offset_to_baseunit=True)


def convert(text: str) -> str:
    """`5 ft 3 in to cm` -> `160.02 cm`. Parts of a quantity are added up.

    Raises ToolError of kind syntax, unsupported (an unknown unit, kilograms to metres) or
    too_large.
    """
    if len(text) > MAX_CHARACTERS:
        raise ToolError("too_large", f"the conversion has over {MAX_CHARACTERS} characters")
    quantity, wanted = _split(text)
    reader = _Reader(wanted)
    target = reader.units()
    reader.expect_end()
    total = _checked(lambda: _Reader(quantity).quantity(), text)
    converted = _checked(lambda: total.to(target), text)
    return f"{_format(float(converted.magnitude))} {' '.join(wanted.split())}"


def _split(text: str) -> tuple[str, str]:
    for separator in (" to ", " into ", " in ", " as "):
        head, found, tail = text.strip().rstrip("=?. ").rpartition(separator)
        if found and head.strip() and tail.strip():
            return head, tail.strip()
    raise ToolError("syntax", f"{text[:60]!r}: write a quantity, `to`, and a unit: 5 miles to km")


class _Reader:
    """Own small grammar; pint is asked about single names only, never given an expression.

    quantity = part, {[","|"and"], part}; part = number, units;
    units = term, {["/"|"per"|"*"|"·"], term}; term = ["square"|"cubic"], name, [power].
    """

    def __init__(self, text: str) -> None:
        for pattern, known in _PHRASES:
            text = re.sub(pattern, known, text, flags=re.IGNORECASE)
        self.text = text.strip()
        self.at = 0

    def quantity(self) -> Any:
        total = self.part()
        while self.at < len(self.text):
            if self.peek("mark") == "," or self.peek("word").lower() == "and":
                self.take()
            total = total + self.part()
        return total

    def part(self) -> Any:
        negative = False
        while (mark := self.peek("mark")) in ("-", "+", "−") and mark:
            negative ^= mark != "+"
            self.take()
        digits = self.peek("number")
        if not digits:
            raise self.unexpected("a number")
        self.take()
        number = float(digits.replace(",", ""))
        return _registry().Quantity(-number if negative else number, self.units())

    def units(self) -> Any:
        units = self.term()
        while True:
            mark, word = self.peek("mark"), self.peek("word").lower()
            if mark == "/" or word == "per":
                self.take()
                units = units / self.term()
            elif mark in ("*", "·") and mark:
                self.take()
                units = units * self.term()
            elif word and word != "and":
                units = units * self.term()
            else:
                return units

    def term(self) -> Any:
        power = {"square": 2, "cubic": 3}.get(self.peek("word").lower(), 1)
        if power > 1:
            self.take()
        name = self.peek("word")
        if not name:
            raise self.unexpected("a unit")
        self.take()
        return _unit(name) ** (power * self.power())

    def power(self) -> int:
        mark = self.peek("mark")
        if mark in ("²", "³") and mark:
            self.take()
            return 2 if mark == "²" else 3
        attached = self.at < len(self.text) and self.text[self.at].isdigit()
        if mark not in ("^", "**") and not attached:
            return 1
        if not attached:
            self.take()
        negative = self.peek("mark") in ("-", "−")
        if negative and self.peek("mark"):
            self.take()
        digits = self.peek("number")
        if not digits.isdigit() or int(digits) > MAX_POWER:
            raise self.unexpected(f"a power up to {MAX_POWER}")
        self.take()
        return -int(digits) if negative else int(digits)

    def peek(self, kind: str) -> str:
        match = _TOKEN.match(self.text, self.at)
        return (match[kind] or "") if match else ""

    def take(self) -> None:
        match = _TOKEN.match(self.text, self.at)
        assert match is not None  # only what was peeked is taken
        self.at = match.end()

    def expect_end(self) -> None:
        if self.text[self.at :].strip():
            raise self.unexpected("the end")

    def unexpected(self, wanted: str) -> ToolError:
        found = self.text[self.at : self.at + 40].strip() or "the end"
        return ToolError("syntax", f"expected {wanted}, found {found!r}")


def _unit(name: str) -> Any:
    """A unit of pint; its name as written, else in lower case."""
    import pint

    for spelling in (name, name.lower()):
        try:
            return _registry().Unit(spelling)
        except (pint.errors.PintError, AssertionError, ValueError):
            continue  # pint asserts on names such as `_`
    raise ToolError("unsupported", f"unknown unit {name[:40]!r}")


def _checked(compute: Callable[[], Any], text: str) -> Any:
    import pint

    try:
        return compute()
    except pint.errors.PintTypeError as error:  # of two dimensions, or degrees added up
        raise ToolError("unsupported", f"{text[:60]!r}: {error}") from None
    except AssertionError:  # pint's own, for some prefixed logarithmic units
        raise ToolError("unsupported", f"{text[:60]!r}: cannot be converted") from None
    except (OverflowError, ZeroDivisionError):
        raise ToolError("too_large", f"{text[:60]!r}: beyond the range of a number") from None


def _format(value: float) -> str:
    """Two decimals, or four significant digits where that would show nothing."""
    if value != value or value in (float("inf"), float("-inf")):
        raise ToolError("too_large", "the result is beyond the range of a number")
    if value == 0 or abs(value) >= 0.1:
        text = f"{value:.2f}" if abs(value) < 1e15 else f"{value:.6g}"
    else:
        text = f"{value:.4g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
