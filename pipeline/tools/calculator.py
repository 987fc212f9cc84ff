"""Calculator: exact arithmetic over the ways in which people and models write sums.

Own tokenizer and recursive-descent parser; nothing is ever handed to `eval`. Values are
fractions, so no step rounds: the result is rounded once, to two decimals, half away from zero.
Sizes are bounded before each operation, so no expression can take long or much memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, Literal

from pipeline.tools.base import STRICT, ToolError, ToolSpec, one_string

MAX_CHARACTERS = 1000
MAX_DEPTH = 40  # nested brackets and chained powers; far below the interpreter's own limit
MAX_VALUE = 10**308  # about the range of a double
MAX_BITS = 4096  # numerator and denominator of an intermediate value

_NUMBER = re.compile(
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?P<fraction>\.[0-9]*)?"
    r"(?:[eE](?P<exponent>[+-]?[0-9]+))?"
)
_WORD = re.compile(r"[^\W\d]\w*")
_SPELLINGS = str.maketrans(
    {"×": "*", "÷": "/", "·": "*", "⋅": "*", "∗": "*", "−": "-", "–": "-", "∕": "/"}
)
_CURRENCIES = "$€£¥"
_DIGITS = tuple("0123456789.")
_FOREIGN_OPERATORS = ("//", "==", "!=", "<=", ">=", "<<", ">>", "&&", "||")


@dataclass(frozen=True)
class CalculatorConfig:
    """The Calculator has no settings."""

    __pydantic_config__ = STRICT

    name: Literal["Calculator"] = "Calculator"


class Calculator:
    """Adds, subtracts, multiplies, divides and raises to powers; see `calculate`."""

    spec = ToolSpec(
        name="Calculator",
        version="1",
        description=(
            "Works out an arithmetic expression with + - * / ^, brackets, percentages and "
            "amounts of money, exactly, and rounds the result once to two decimals. "
            "Example: 400 / 1400 gives 0.29."
        ),
        parameters=one_string("expression", "The sum to work out, for example 18 + 12 * 3"),
        result_limit=320,  # longer than any result: a number that is cut would be a wrong number
        timeout_s=5.0,
    )

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """The result of `arguments["expression"]` as a plain number."""
        return calculate(arguments["expression"])


def calculate(expression: str) -> str:
    """Evaluate `expression` and return it rounded to two decimals, without thousands separators.

    Reads `37*24`, `1,250 / 4`, `12 x 3`, `7 × 6 ÷ 2`, `3^2`, `3**2`, `20% * 50`, `$3.50 * 4` and a
    trailing ` =`. `%` always means percent, never a remainder; powers bind to the right.
    Raises ToolError of kind division_by_zero, syntax, not_allowed or too_large.
    """
    return format_value(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The exact value of `expression`; raises ToolError as `calculate` does."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError("too_large", f"the expression has over {MAX_CHARACTERS} characters")
    text = expression.translate(_SPELLINGS).strip()
    if text.endswith("=") and not text.endswith("=="):
        text = text[:-1].rstrip()
    if not text:
        raise ToolError("syntax", "the expression is empty")
    return _Parser(text).parse()


def format_value(value: Fraction) -> str:
    """`value` with at most two decimals, half away from zero, no trailing zeros, no `-0`."""
    hundredths = (abs(value.numerator) * 200 + value.denominator) // (2 * value.denominator)
    whole, rest = divmod(hundredths, 100)
    digits = f"{whole}.{rest:02d}".rstrip("0").rstrip(".")
    return f"-{digits}" if value < 0 and hundredths else digits


class _Parser:
    """Recursive descent: sum > product > sign > power > percent > atom."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def parse(self) -> Fraction:
        value = self.sum()
        if self.peek():
            raise self.unexpected_after_operand()
        return value

    def peek(self, length: int = 1) -> str:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + length]

    def sum(self) -> Fraction:
        value = self.product()
        while (operator := self.peek()) in ("+", "-") and operator:
            self.at += 1
            right = self.product()
            value = _bounded(value + right if operator == "+" else value - right)
        return value

    def product(self) -> Fraction:
        value = self.sign()
        while operator := self.product_operator():
            right = self.sign()
            if operator == "*":
                value = _bounded(value * right)
            elif right == 0:
                raise ToolError("division_by_zero", "division by zero")
            else:
                value = _bounded(value / right)
        return value

    def product_operator(self) -> str:
        character = self.peek()
        if character in ("*", "/") and self.peek(2) not in ("**", "//"):
            self.at += 1
            return character
        if character in ("x", "X") and character:
            word = _WORD.match(self.text, self.at)
            # `3x4` and `3 x 4`, but not the start of a word.
            if word and re.fullmatch(r"[xX][0-9]*", word.group()):
                self.at += 1
                return "*"
        return ""

    def sign(self) -> Fraction:
        negative = False
        while (character := self.peek()) in ("+", "-") and character:
            negative ^= character == "-"
            self.at += 1
        value = self.power()
        return -value if negative else value

    def power(self) -> Fraction:
        base = self.percent()
        operator = "**" if self.peek(2) == "**" else "^" if self.peek() == "^" else ""
        if not operator:
            return base
        self.at += len(operator)
        self.enter()
        exponent = self.sign()
        self.depth -= 1
        return _power(base, exponent)

    def percent(self) -> Fraction:
        value = self.atom()
        while self.peek() == "%":
            self.at += 1
            value = _bounded(value / 100)
        return value

    def atom(self) -> Fraction:
        character = self.peek()
        if character and character in _CURRENCIES:
            self.at += 1
            character = self.peek()
            if character not in _DIGITS:
                raise ToolError("syntax", "a currency sign must stand before a number")
        if character == "(":
            self.at += 1
            self.enter()
            value = self.sum()
            self.depth -= 1
            if self.peek() != ")":
                raise self.unexpected_after_operand()
            self.at += 1
            return value
        return self.number()

    def number(self) -> Fraction:
        match = _NUMBER.match(self.text, self.at)
        if match is None or not (match["whole"] or len(match["fraction"] or "") > 1):
            raise self.unexpected_operand()
        self.at = match.end()
        exponent = match["exponent"] or "0"
        if len(exponent) > 5 or abs(int(exponent)) > 1000:
            raise ToolError("too_large", f"the exponent of {match.group()[:40]!r} is too large")
        digits = (match["whole"] or "0").replace(",", "")
        return _bounded(Fraction(f"{digits}{match['fraction'] or ''}e{exponent}"))

    def enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ToolError("too_large", f"nested more than {MAX_DEPTH} deep")

    def unexpected_operand(self) -> ToolError:
        """Something that is no number stands where a number must."""
        character = self.peek()
        if not character:
            return ToolError("syntax", "the expression ends where a number is expected")
        if character in "*/^%)=,+-":
            if character in "*/" and self.peek(2) in ("//", "**"):
                return ToolError("not_allowed", f"{self.peek(2)!r} is not offered here")
            return ToolError("syntax", f"{character!r} stands where a number is expected")
        word = _WORD.match(self.text, self.at)
        found = word.group() if word else character
        return ToolError("not_allowed", f"{found[:40]!r}: only numbers and + - * / ^ are offered")

    def unexpected_after_operand(self) -> ToolError:
        """Something that is no operator stands behind a number or a bracket."""
        character = self.peek()
        if not character:
            return ToolError("syntax", "a bracket is not closed")
        found = self.text[self.at : self.at + 40]
        side_by_side = character.isalnum() or character in "_.()=" + _CURRENCIES
        if side_by_side and self.peek(2) != "==":
            return ToolError("syntax", f"an operator is expected before {found!r}")
        found = self.peek(2) if self.peek(2) in _FOREIGN_OPERATORS else character
        return ToolError("not_allowed", f"{found!r}: only numbers and + - * / ^ are offered")


def _bounded(value: Fraction) -> Fraction:
    """`value`, unless it left the bounds. Operands are in bounds, so one step cannot explode."""
    if abs(value) > MAX_VALUE:
        raise ToolError("too_large", "a value is over 1e308")
    if value.denominator.bit_length() > MAX_BITS:
        raise ToolError("too_large", f"an exact value needs over {MAX_BITS} bits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """`base` to the `exponent`, its size estimated before anything is computed."""
    if base == 0 and exponent < 0:
        raise ToolError("division_by_zero", "zero to a negative power")
    if base in (0, 1) or exponent == 0:
        return Fraction(1) if exponent == 0 else base
    if exponent.denominator != 1:
        return _fractional_power(base, exponent)
    if base == -1:
        return base if exponent % 2 else -base
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent) > MAX_BITS or abs(exponent) > MAX_BITS:
        raise ToolError("too_large", "the power is too large")
    return _bounded(base ** int(exponent))


def _fractional_power(base: Fraction, exponent: Fraction) -> Fraction:
    """A root, to fifty digits: it has no exact value, and the result keeps two decimals."""
    if base < 0:
        raise ToolError("not_allowed", "a fractional power of a negative number is not real")
    size = _log10(base) * float(min(max(exponent, Fraction(-(10**6))), Fraction(10**6)))
    if size > 308.5:
        raise ToolError("too_large", "the power is too large")
    if size < -308.5:
        return Fraction(0)
    context = Context(prec=50 + max(0, math.ceil(size)))
    decimal_base = context.divide(Decimal(base.numerator), Decimal(base.denominator))
    decimal_exponent = context.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
    return _bounded(Fraction(context.power(decimal_base, decimal_exponent)))


def _log10(value: Fraction) -> float:
    return math.log10(value.numerator) - math.log10(value.denominator)
