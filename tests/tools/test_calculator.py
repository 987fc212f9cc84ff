"""Calculator: golden cases, spellings, bounds, and random and hostile expressions."""

import json
import random
import time
import tracemalloc
from fractions import Fraction
from pathlib import Path

import pytest

from pipeline.tools.base import ERROR_KINDS, ToolError
from pipeline.tools.calculator import MAX_VALUE, Calculator, calculate, evaluate, format_value

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases/calculator.jsonl").read_text("utf-8").splitlines()
]


def outcome(expression: str) -> dict[str, str]:
    try:
        return {"result": calculate(expression)}
    except ToolError as error:
        return {"error": error.kind}


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["expression"]))
def test_reference_cases(case):
    assert {"expression": case["expression"], **outcome(case["expression"])} == case


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37*24", "888"),
        ("37 * 24 =", "888"),
        ("3x4", "12"),
        ("3 X 4", "12"),
        ("1,250 / 4", "312.5"),
        ("1,234,567 + 1", "1234568"),
        ("20% * 50", "10"),
        ("-3^2", "-9"),
        ("2^3^2", "512"),
        ("2**-1", "0.5"),
        ("9^0.5", "3"),
        ("2^0.5", "1.41"),
        ("(-1)^3", "-1"),
        ("0^0", "1"),
        ("1^1e300", "1"),
        ("5 − 7", "-2"),
        ("€2.50 + £1", "3.5"),
        ("-$3", "-3"),
        (".5 + 5.", "5.5"),
        ("1.5e3", "1500"),
        ("1.005", "1.01"),  # half away from zero on the exact value, not on a double
        ("2.675", "2.68"),
        ("-0.125", "-0.13"),
        ("-0.001", "0"),
        ("1/3 * 3", "1"),  # no step rounds
        ("0.1 * 3 - 0.3", "0"),
        ("1e300 * 1e-300", "1"),
        ("((((1))))", "1"),
        ("\t12\u00a0+ 1\n", "13"),
    ],
)
def test_spellings(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("0^-1", "division_by_zero"),
        ("5/(2-2)", "division_by_zero"),
        ("5 % 2", "syntax"),  # percent, never a remainder
        ("2(3)", "syntax"),
        ("((2)", "syntax"),
        ("2)", "syntax"),
        ("1..2", "syntax"),
        ("$ + 3", "syntax"),
        ("12 crates", "syntax"),
        ("3 + =", "syntax"),
        ("12,34", "not_allowed"),
        ("5//2", "not_allowed"),
        ("1 == 1", "not_allowed"),
        ("sqrt(4)", "not_allowed"),
        ("lambda: 1", "not_allowed"),
        ("'a'*9", "not_allowed"),
        ("[1]*9", "not_allowed"),
        ("(-8)^(1/3)", "not_allowed"),
        ("٣ + 1", "not_allowed"),
        ("1e309", "too_large"),
        ("1e999999999999", "too_large"),
        ("2^1e300", "too_large"),
        ("1.0000001^1e9", "too_large"),
        ("0.5^99999", "too_large"),
        ("9" * 400, "too_large"),
        ("1+" * 600 + "1", "too_large"),
        ("(" * 100 + "1" + ")" * 100, "too_large"),
        ("2^" * 60 + "1", "too_large"),
    ],
)
def test_failures_by_kind(expression, kind):
    assert outcome(expression) == {"error": kind}


def test_result_is_plain_even_when_large():
    assert calculate("1234567 * 1000") == "1234567000"
    assert len(calculate("10^308")) <= Calculator.spec.result_limit


def test_format_agrees_with_integer_arithmetic():
    rng = random.Random(5)
    for _ in range(2_000):
        value = Fraction(rng.randint(-(10**6), 10**6), rng.randint(1, 9_999))
        text = format_value(value)
        assert abs(Fraction(text) - value) <= Fraction(1, 200)
        assert text == str(int(text)) if "." not in text else not text.endswith("0")


def random_sum(rng: random.Random, depth: int = 0) -> str:
    """A well-formed expression in Python's own syntax."""
    if depth > 3 or rng.random() < 0.3:
        return rng.choice([str(rng.randint(0, 999)), f"{rng.randint(0, 99)}.{rng.randint(0, 99)}"])
    left, right = random_sum(rng, depth + 1), random_sum(rng, depth + 1)
    joined = f"{left}{rng.choice([' + ', '-', ' * ', '/'])}{right}"
    return f"({joined})" if rng.random() < 0.5 else joined


def test_random_sums_agree_with_an_exact_reference():
    import re

    rng = random.Random(11)
    compared = 0
    for _ in range(1_000):
        expression = random_sum(rng)
        exact = re.sub(r"[0-9]+(\.[0-9]+)?", lambda number: f"F('{number.group()}')", expression)
        try:
            reference = eval(exact, {"F": Fraction})  # our own generated text
        except ZeroDivisionError:
            assert outcome(expression) == {"error": "division_by_zero"}
            continue
        assert evaluate(expression) == reference, expression
        compared += 1
    assert compared > 800


HOSTILE = [
    "9", "99999999", "1e308", "1e-308", "0", ".5", "1,000", "1,,0", "$", "%", "(", ")", "((((",
    "**", "^", "^-", "*", "/", "//", "+", "-", "--", " ", "x", "X", "÷", "×", "=", "==",
    "__import__", "os", "'", '"', "\\", "[", "]", "->", "→", "<API>", "\x00", "\n", "é", "٣",
    "\ud800", "e", "1e5", "7/0", "lambda", ":", ",", ";", "#", "True", "million", "√", "∞",
    "NaN", "0x1F", "1_000", "9**9**9",
]  # fmt: skip


def hostile(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return random_sum(rng)
    pieces = [rng.choice(HOSTILE) for _ in range(rng.randint(0, 60))]
    return "".join(pieces) * (rng.randint(1, 30) if rng.random() < 0.05 else 1)


def run_hostile(count: int) -> None:
    """No crash, no hang, no large allocation; every answer is a number or a known kind."""
    rng = random.Random(2)
    kinds: dict[str, int] = {}
    slowest = 0.0
    tracemalloc.start()
    for _ in range(count):
        expression = hostile(rng)
        start = time.process_time()
        got = outcome(expression)
        slowest = max(slowest, time.process_time() - start)
        kind = got.get("error", "result")
        kinds[kind] = kinds.get(kind, 0) + 1
        if "result" in got:
            assert abs(Fraction(got["result"])) <= MAX_VALUE
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kinds.keys() <= ERROR_KINDS.keys() | {"result"}
    assert kinds.keys() >= {"result", "syntax", "not_allowed", "too_large", "division_by_zero"}
    assert peak < 50_000_000
    assert slowest < 0.5


def test_hostile_expressions():
    run_hostile(3_000)


@pytest.mark.slow
def test_hostile_expressions_in_full():
    run_hostile(100_000)


@pytest.mark.parametrize(
    "expression",
    [
        "1/3" + "+1/7^50" * 100,
        "1/7^300" * 90,
        "^".join(["1.1"] * 38),
        "(1/3)^0.333" + "*(2/7)^0.77" * 60,
        "1e-300^0.5" + "+1e-300^0.4" * 60,
        "0." + "1" * 900,
        "%" + "1%" * 400,
        "1" + "%" * 900,
    ],
)
def test_expensive_expressions_stay_cheap(expression):
    start = time.process_time()
    outcome(expression)
    assert time.process_time() - start < 0.5
