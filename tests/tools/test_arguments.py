"""The linear form: what is written reads back exactly, and every violation is named."""

import json
import random

import pytest

from pipeline.calls import parse_call, read_sample
from pipeline.tools.arguments import (
    canonical_arguments,
    check_arguments,
    linear_template,
    parse_arguments,
    render_arguments,
)
from pipeline.tools.base import ToolError, ToolSpec, one_string
from pipeline.tools.calculator import Calculator
from pipeline.tools.calendar import Calendar

CONVERT = ToolSpec(
    name="time.convert_time",
    version="1",
    description="",
    parameters={
        "type": "object",
        "properties": {
            "source_timezone": {"type": "string"},
            "time": {"type": "string"},
            "n": {"type": "integer", "minimum": 1},
            "tags": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object"},
        },
        "required": ["source_timezone", "time"],
        "additionalProperties": False,
    },
)
SEARCH = ToolSpec(
    name="Find",
    version="1",
    description="",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["query"],
        "additionalProperties": False,
    },
)


def error_of(spec: ToolSpec, text: str) -> str:
    with pytest.raises(ToolError) as raised:
        check_arguments(spec, parse_arguments(spec, text))
    assert raised.value.kind == "bad_arguments"
    return raised.value.message


def test_one_string_takes_the_raw_text():
    assert parse_arguments(Calculator.spec, " 37 * 24 ") == {"expression": "37 * 24"}
    assert parse_arguments(Calculator.spec, "") == {"expression": ""}
    assert parse_arguments(SEARCH, 'the "red" [door]') == {"query": 'the "red" [door]'}
    assert parse_arguments(SEARCH, 'query="a, b", limit=3') == {"query": "a, b", "limit": 3}
    assert parse_arguments(SEARCH, "limit=3") == {"query": "limit=3"}  # no query: it is raw text


def test_no_arguments():
    assert parse_arguments(Calendar.spec, "  ") == {}
    assert "takes no arguments" in error_of(Calendar.spec, "today")


def test_pairs():
    text = 'source_timezone="Europe/Rome", time="16:30", n=3, tags=["a", "b)"], options={"x": null}'
    assert parse_arguments(CONVERT, text) == {
        "source_timezone": "Europe/Rome",
        "time": "16:30",
        "n": 3,
        "tags": ["a", "b)"],
        "options": {"x": None},
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Europe/Rome", ["expected name=value", "time.convert_time(source_timezone="]),
        ("time=16:30", ["expected a comma"]),
        ("time=noon", ["value of 'time' is not JSON"]),
        ("time=NaN", ["value of 'time' is not JSON"]),
        ('time="a", time="b"', ["'time' is given twice"]),
        ('time="a" n=3', ["expected a comma"]),
        ("tags=" + "[" * 5000, ["value of 'tags' is not JSON"]),
        ("time=" + "9" * 5000, ["value of 'time' is not JSON"]),
        ("", ["missing required argument 'source_timezone'", "'time'"]),
        (
            'n=0, tags=[1], other=2, time="x"',
            ["'source_timezone'", "'n'", "minimum", "'tags.0'", "'other' (allowed: "],
        ),
        ('source_timezone="\\ud800", time="x"', ["surrogate"]),
    ],
)
def test_every_violation_is_named(text, named):
    message = error_of(CONVERT, text)
    for part in named:
        assert part in message


PIECES = [
    *(
        "a",
        "Rome",
        " ",
        "  ",
        '"',
        "\\",
        "(",
        ")",
        "[",
        "]",
        "->",
        "→",
        "<API>",
        "</API>",
        "=",
        ",",
    ),
    *(
        "\n",
        "\t",
        "\u2028",
        "query=",
        'query="x"',
        "é",
        "日本",
        "😀",
        "{",
        "}",
        "'",
        "<|x|>",
        "\x00",
    ),
]


def random_value(rng: random.Random, depth: int = 0):
    kind = rng.randrange(7 if depth < 2 else 5)
    if kind == 0:
        return rng.choice([0, -1, 10**20, 3])
    if kind == 1:
        return rng.choice([0.1, -2.5e-8, 1e22])
    if kind == 2:
        return rng.choice([True, False, None])
    if kind == 5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {random_text(rng): random_value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return random_text(rng)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(8)))


def test_what_is_written_reads_back_exactly_and_survives_in_a_call():
    rng = random.Random(3)
    for _ in range(3_000):
        if rng.random() < 0.5:
            spec, arguments = SEARCH, {"query": random_text(rng)}
            if rng.random() < 0.3:
                arguments["limit"] = rng.randrange(9)
        else:
            spec = CONVERT
            names = list(CONVERT.parameters["properties"])
            arguments = {name: random_value(rng) for name in names if rng.random() < 0.7}
        text = render_arguments(spec, arguments)
        read = parse_arguments(spec, text)
        assert json.dumps(read) == json.dumps(arguments), text  # types too: 1 is not True
        if spec is SEARCH:  # strings only: no delimiter of a call is left in the text
            assert not any(mark in text for mark in ("[", "]", "->", "→", "<API>", "</API>"))
        # One line, and the scanner of calls finds its end.
        assert len(text.splitlines()) <= 1
        call = parse_call(f"{spec.name}({text}) -> x] rest")
        assert call is not None and call.arguments == text
        assert read_sample(f"{spec.name}({text})] rest", spec.name) == text


def test_plain_text_stays_plain():
    assert render_arguments(SEARCH, {"query": "capital of France"}) == "capital of France"
    assert render_arguments(SEARCH, {"query": "città (Italia)"}) == "città (Italia)"
    assert render_arguments(SEARCH, {"query": "a :)"}) == 'query="a :)"'
    assert render_arguments(CONVERT, {"time": "è"}) == 'time="è"'
    assert render_arguments(Calendar.spec, {}) == ""


def test_canonical_ignores_order_only():
    assert canonical_arguments({"a": 1, "b": "x"}) == canonical_arguments({"b": "x", "a": 1})
    assert canonical_arguments({"a": 1}) != canonical_arguments({"a": "1"})


def test_templates():
    assert linear_template(Calculator.spec) == "Calculator(expression)"
    assert linear_template(Calendar.spec) == "Calendar()"
    assert 'time="..."' in linear_template(CONVERT)
    assert one_string("q", "what")["required"] == ["q"]
