"""The text form of a call: written, found, read back, made harmless; and the prompts' files."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from pipeline.calls import (
    TEXT,
    CallSyntax,
    call_pieces,
    empty_call_pieces,
    holds_call_syntax,
    neutralise,
    parse_call,
    read_sample,
    render,
    scan_balanced,
)
from pipeline.errors import ConfigError
from pipeline.lm.prompts import load_prompt
from pipeline.tools.calculator import calculate
from pipeline.tools.executor import Executor

ROOT = Path(__file__).parents[1]
SPECIAL = CallSyntax("special")


# -- writing --------------------------------------------------------------------------------------


def test_the_two_renderings() -> None:
    assert render("Calculator", "37 * 24", "888") == " [Calculator(37 * 24) -> 888]"
    assert render("Calculator", "37 * 24") == " [Calculator(37 * 24)]"
    assert render("Calendar", "", "Today is Monday.") == " [Calendar() -> Today is Monday.]"
    called = render("Calculator", "37 * 24", "888", SPECIAL)
    assert called == "<API>Calculator(37 * 24) → 888</API>"
    assert render("Calculator", "37 * 24", None, SPECIAL) == "<API>Calculator(37 * 24)</API>"
    assert TEXT.markers == () and SPECIAL.markers == ("<API>", "</API>", "→")


def test_call_without_a_result_in_both_forms() -> None:
    arrow = empty_call_pieces("Calculator", "1 + 1", CallSyntax("text", "arrow"))
    assert "".join(arrow) == " [Calculator(1 + 1) -> ]"
    bare = empty_call_pieces("Calculator", "1 + 1", CallSyntax("text", "bare"))
    assert "".join(bare) == " [Calculator(1 + 1)]"


def test_pieces_border_where_generation_stops_and_goes_on() -> None:
    """The model writes up to the arrow; what follows is inserted by the program."""
    with_result = call_pieces("T", "a", "r")
    without = empty_call_pieces("T", "a")
    assert with_result == [" [", "T(a) ->", " r]"]
    assert with_result[:2] == without[:2]
    assert without[2] == " ]"


@pytest.mark.parametrize("syntax", [TEXT, SPECIAL])
@pytest.mark.parametrize(
    "arguments", ["37 * 24", "", "(1 + 2) * (3 - 4)", 'q="a ) b", n=3', "What's this?", "a [b] c"]
)
def test_what_is_written_reads_back(syntax: CallSyntax, arguments: str) -> None:
    for result in (None, "888", "a (b) c"):
        text = render("Tool", arguments, result, syntax).removeprefix(syntax.open)
        call = parse_call(text)
        assert call is not None and (call.tool, call.arguments) == ("Tool", arguments)
        assert text[: call.end] == f"Tool({arguments})"
        assert read_sample(text, "Tool", syntax) == arguments


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Calculator(37 * 24)]", "37 * 24"),
        (" Calculator(37 * 24)] and more", "37 * 24"),
        ("Calculator(37 * 24) ]", "37 * 24"),
        ("Calculator(37 * 24) -> 999] 888", "37 * 24"),  # the model's own result is not used
        ("Calculator(37 * 24)->", "37 * 24"),
        ("Calculator( 37 )]", "37"),
        ("Calculator()]", ""),
        ("Calculator((1 + 2) * 3)], so", "(1 + 2) * 3"),
        ('Calculator("a)b")]', '"a)b"'),
        # still open
        ("", None),
        ("Calc", None),
        ("Calculator(", None),
        ("Calculator(37 * 24", None),
        ("Calculator((1 + 2)", None),
        ("Calculator(37 * 24)", None),
        ("Calculator(37 * 24) ", None),
        ("Calculator(37 * 24) -", None),
        # hopeless
        ("Calendar", False),
        ("calculator(1)]", False),
        ("the map]", False),
        ("Calculator 37", False),
        ("Calculator(37\n * 24)]", False),
        ("\nCalculator(37)]", False),
        ("Calculator(37) and so", False),
        ("Calculator(37)) ]", False),
    ],
)
def test_samples_as_far_as_they_are_known(text: str, wanted: Any) -> None:
    found = read_sample(text, "Calculator")
    assert found == wanted and type(found) is type(wanted)


def test_samples_with_added_markers() -> None:
    assert read_sample("Calculator(1)</API>", "Calculator", SPECIAL) == "1"
    assert read_sample(" Calculator(1) </API>", "Calculator", SPECIAL) == "1"
    assert read_sample("Calculator(1) → 5", "Calculator", SPECIAL) == "1"
    assert read_sample("Calculator(1)</AP", "Calculator", SPECIAL) is None
    assert read_sample("Calculator(1)]", "Calculator", SPECIAL) is False


def test_every_beginning_of_a_call_is_open_until_it_is_complete() -> None:
    whole = 'Calculator(2 * (3 + 4), "x)")]'
    for cut in range(len(whole)):
        assert read_sample(whole[:cut], "Calculator") is None
    assert read_sample(whole, "Calculator") == '2 * (3 + 4), "x)"'


def test_the_first_bracket_of_a_document_is_not_the_end_of_a_call() -> None:
    text = " [Calculator(a[0] * (2 + 3)) -> 5] see [1] and (2)] there"
    call = parse_call(text[2:])
    assert call is not None and call.arguments == "a[0] * (2 + 3)"
    assert text[2 + call.end :].startswith(" -> 5]")
    assert read_sample(text[2:], "Calculator") == "a[0] * (2 + 3)"


def test_balanced_brackets() -> None:
    assert scan_balanced("a(b)c)d", 0) == 5
    assert scan_balanced('a")"b)', 0) == 5
    assert scan_balanced('a"\\")"b)', 0) == 7
    assert scan_balanced('say "it)', 0) == 7  # a quote without an end hides nothing
    assert scan_balanced("it's (1)", 0) is None
    assert scan_balanced("a]b", 0, "[", "]") == 1


@pytest.mark.parametrize(
    "text", ["", "Calculator", "Calculator(", "(1)", "3x(1)", "Calc ulator(1)"]
)
def test_no_call(text: str) -> None:
    assert parse_call(text) is None


def test_documents_that_already_hold_calls() -> None:
    tools = ["Calculator", "WikiSearch"]
    for text in ("so [Calculator(3)", "so [ calculator (3)", "<API>WikiSearch(x)</API>"):
        assert holds_call_syntax(text, tools)
    for text in ("so [Calendar(3)", "so [see Calculator(3)]", "Calculator(3)", "[1] (2)"):
        assert not holds_call_syntax(text, tools)
    assert holds_call_syntax("a → b", tools, SPECIAL) and not holds_call_syntax("a → b", tools)


# -- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "harmless"),
    [
        ("888", "888"),
        ("Rome [1] is -> big", "Rome (1) is - big"),
        ("a] b <API>x</API> → c", "a) b (API)x(/API) - c"),
        ("one\ntwo\r\n three\t four", "one two three four"),
        ("a\u200bb\u202ec\x00d\x1b[31m", "a b c d (31m"),
        ("<|endoftext|> <|im_end|>", "<endoftext> <im_end>"),
        ("café “日本” 😀", "café “日本” 😀"),
        ("  ", ""),
        # what one replacement leaves behind must not be a delimiter again
        ("-->>", "--"),
        ("→>", "-"),
        ("-|>", "-"),
        ("<|API|>", "(API)"),
        ("<<||>>", "<<>>"),
    ],
)
def test_results_are_made_harmless(result: str, harmless: str) -> None:
    assert neutralise(result, 100) == (harmless, False)


def test_no_mixture_of_signs_leaves_a_delimiter() -> None:
    delimiters = ("[", "]", "->", "→", "<API>", "</API>", "<|", "|>", "\n", "\x00", "\u200b")
    parts = [*delimiters, "-", ">", "<", "|", "/", "API", "a", " "]
    draw = random.Random(0)
    for _ in range(20_000):
        text = "".join(draw.choices(parts, k=draw.randrange(1, 9)))
        harmless, _ = neutralise(text, 60)
        assert not any(sign in harmless for sign in delimiters), (text, harmless)
        assert neutralise(harmless, 60) == (harmless, False)


def test_long_results_are_cut_and_say_so() -> None:
    assert neutralise("a" * 10, 10) == ("a" * 10, False)
    assert neutralise("a" * 11, 10) == ("a" * 9 + "…", True)
    assert neutralise("one two three", 9) == ("one two…", True)
    for limit in range(1, 14):
        cut, was_cut = neutralise("one two three", limit)
        assert len(cut) <= limit and was_cut == (limit < 13)


# -- prompts --------------------------------------------------------------------------------------


def write(folder: Path, text: str, tool: str = "Calculator") -> None:
    (folder / f"{tool}.txt").write_text(text, encoding="utf-8")


def test_a_prompt_is_used_as_written(tmp_path: Path) -> None:
    text = (
        r"C:\new\table \1 \g<0> {x} {{y}} {0} %s %(a)d $HOME ${x}"
        "\n\nInput:\nOf 90 pens [1] 45.\n\nOutput:\nOf 90 pens [1] [Calculator(90 - (40 + 5))] 45."
    )
    write(tmp_path, text)
    prompt = load_prompt(tmp_path, "Calculator", TEXT)
    assert prompt.head == text and prompt.tool == "Calculator"
    special = load_prompt(tmp_path, "Calculator", SPECIAL).head
    assert special == text.replace(
        " [Calculator(90 - (40 + 5))]", "<API>Calculator(90 - (40 + 5))</API>"
    )


def test_bad_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Calculator\.txt: no prompt for the tool Calculator"):
        load_prompt(tmp_path, "Calculator", TEXT)
    write(tmp_path, "Add calls such as [Calendar()] and [Calculator(1 + (2)].")
    with pytest.raises(ConfigError, match="shows no call"):
        load_prompt(tmp_path, "Calculator", TEXT)
    (tmp_path / "Calculator.txt").write_bytes(b"[Calculator(1)] \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_prompt(tmp_path, "Calculator", TEXT)


def demonstrations(tool: str) -> Iterator[tuple[str, str, str]]:
    """(input, arguments, what follows the call) of each call in the project's own prompt."""
    text = (ROOT / "data" / "prompts" / f"{tool}.txt").read_text(encoding="utf-8")
    _, *pairs = text.split("Input:\n")
    for pair in pairs:
        plain, _, called = pair.partition("\n\nOutput:\n")
        called = called.strip()
        without, at = called, 0
        while (at := called.find(f" [{tool}(", at)) >= 0:
            call = parse_call(called[at + 2 :])
            assert call is not None
            end = at + 2 + call.end
            assert called[end] == "]"
            without = without.replace(called[at : end + 1], "", 1)
            yield plain.strip(), call.arguments, called[end + 1 :]
            at = end
        assert without == plain.strip()  # an output is its input with calls in it


def test_the_calculator_reads_its_own_demonstrations() -> None:
    seen = list(demonstrations("Calculator"))
    assert len(seen) >= 3
    for _, arguments, after in seen:
        assert after.lstrip().replace(",", "").startswith(calculate(arguments)), arguments


@pytest.mark.parametrize("tool", ["Calculator", "Calendar", "WikiSearch"])
def test_demonstrations_of_every_prompt_can_be_executed(tool: str, inputs: Path) -> None:
    from pipeline.tools.catalogue import build_tools

    tools = build_tools(tiny.raw_config(inputs)["tools"])
    seen = list(demonstrations(tool))
    assert len(seen) >= 3
    with Executor(tools) as executor:
        for plain, arguments, _ in seen:
            done = executor.execute(tool, arguments, {"date": "2020-05-04", "doc_id": "d"})
            assert done.error_kind in (None, "no_result"), (arguments, done.error)
            for number in re.findall(r"\d+", arguments):
                assert number in plain.replace(",", "")  # the instruction asks for no other
