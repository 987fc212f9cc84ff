"""Grammar masks: whatever they let through is a call that parses and that its tool can read."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tiny

from pipeline.calls import TEXT, CallSyntax, parse_call, read_sample, render
from pipeline.errors import ConfigError
from pipeline.leaks import lookahead_leak
from pipeline.lm.checkpoint import add_markers
from pipeline.lm.grammar import (
    MAX_TEXT,
    CallGrammar,
    empty_grammar,
    expression_grammar,
    numbers_before,
    schema_grammar,
    text_grammar,
)
from pipeline.lm.tokens import decode_piece, encode_piece, open_token
from pipeline.stages import sample
from pipeline.tools.arguments import check_arguments, parse_arguments
from pipeline.tools.base import ToolSpec, one_string
from pipeline.tools.calculator import Calculator
from pipeline.tools.executor import Executor

ROOT = Path(__file__).parents[1]
SPECIAL = CallSyntax("special")


WORLDS = [(kind, syntax) for kind in tiny.KINDS for syntax in (TEXT, SPECIAL)]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda p: f"{p[0]}-{p[1].rendering}")
def world(request: Any) -> tuple[Any, CallGrammar, CallSyntax]:
    """A tokenizer, its grammars, and a rendering."""
    kind, syntax = request.param
    tokenizer = copy.deepcopy(tiny.make_tokenizer(kind))
    add_markers(tiny.make_model("llama", tokenizer), tokenizer, syntax)
    return tokenizer, CallGrammar(tokenizer), syntax


def draw(world: Any, grammar: str, tool: str, seed: int, most: int = 150) -> str:
    """Arguments of a call drawn blindly from what the mask allows."""
    tokenizer, grammars, syntax = world
    mask, opening = grammars.mask(grammar), open_token(tokenizer, syntax)
    choose, drawn = random.Random(seed), []
    while len(drawn) < most:
        allowed = mask(drawn).nonzero()[:, 0].tolist()
        assert allowed, "nothing may follow an unfinished call"
        drawn.append(choose.choice(allowed))
        text = decode_piece(tokenizer, opening, drawn)
        found = read_sample(text, tool, syntax)
        if isinstance(found, str):
            assert text.endswith(syntax.close) and text.count(f"{tool}(") == 1
            call = parse_call(text)
            assert call is not None and call.arguments == found
            return found
        assert found is None or text.endswith("\ufffd"), f"not a call: {text!r}"
    raise AssertionError(f"still open after {most} tokens: {text!r}")


def accepts(world: Any, grammar: str, text: str) -> bool:
    """Whether the grammar lets through the tokens of a text."""
    tokenizer, grammars, _ = world
    mask, ids = grammars.mask(grammar), encode_piece(tokenizer, text)
    return all(bool(mask(ids[:n])[token]) for n, token in enumerate(ids))


# -- sums -----------------------------------------------------------------------------------------


def test_sums_always_parse_and_execute(world: Any) -> None:
    *_, syntax = world
    with Executor([Calculator()]) as executor:
        for seed in range(25):
            arguments = draw(
                world, expression_grammar("Calculator", None, syntax), "Calculator", seed
            )
            done = executor.execute("Calculator", arguments)
            assert done.error_kind in (None, "division_by_zero"), (arguments, done.error)


def test_sums_over_numbers_of_the_text_only(world: Any) -> None:
    *_, syntax = world
    before = "In 1961 the 1,310 boxes of 12.5 kg cost 15 % of $7; Zoë had 37 left and then"
    after = " 888 of 24 were gone."
    numbers = numbers_before(before)
    assert numbers == ["37", "7", "15%", "12.5", "1310", "1961"]
    grammar = expression_grammar("Calculator", numbers, syntax)
    seen: set[str] = set()
    for seed in range(25):
        arguments = draw(world, grammar, "Calculator", seed)
        used = re.findall(r"[\d.]+%?", arguments)
        assert set(used) <= set(numbers)
        assert lookahead_leak(arguments, before + after, len(before)) is None
        seen.update(used)
    assert len(seen) >= 4
    assert not accepts(world, grammar, "Calculator(37 * 24)")
    assert accepts(world, grammar, "Calculator(37 * 7)")
    assert not accepts(world, grammar, "Calculator(37)")  # one number is no sum


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("none", []),
        ("3 and 4", ["4", "3"]),
        ("3, 4 and 3", ["3", "4"]),
        ("1,310.50 of 5 %", ["5%", "1310.50"]),
        ("B2 or 2nd or v1.2.3 and x86", []),
        ("12,5 km", ["12"]),
        ("٣ and 七 and ５", []),
        (" ".join(str(n) for n in range(40)), [str(n) for n in range(39, 27, -1)]),
    ],
)
def test_numbers_of_a_text(text: str, numbers: list[str]) -> None:
    assert numbers_before(text) == numbers


# -- texts ----------------------------------------------------------------------------------------


def test_free_texts_are_harmless(world: Any) -> None:
    *_, syntax = world
    grammar = text_grammar("WikiSearch", None, syntax)
    spec = ToolSpec("WikiSearch", "1", "", one_string("query", ""))
    for seed in range(15):
        text = draw(world, grammar, "WikiSearch", seed)
        assert 0 < len(text) <= MAX_TEXT and text == text.strip(" ")
        assert not set(text) & set('[]()<>→"\\\n\r\t\x00')
        assert parse_arguments(spec, text) == {"query": text}
    assert accepts(world, grammar, f"WikiSearch(Café Zoë, Zürich’s 2nd){syntax.close}")


def test_texts_of_words_that_stand_before(world: Any) -> None:
    *_, syntax = world
    before = 'Lyon is "a city" (big) in France.\nIt [see] lies\\on Zürich’s 日本 lake, says the'
    after = " Guide to Normandy."
    grammar = text_grammar("WikiSearch", before, syntax)
    plain = " ".join(re.sub(r'[\[\]()"\\]', " ", before).split())
    seen = set()
    for seed in range(25):
        text = draw(world, grammar, "WikiSearch", seed)
        assert text and text in plain and text == text.strip() and len(text) <= MAX_TEXT
        assert any(sign.isalnum() for sign in text)
        assert lookahead_leak(text, before + after, len(before)) is None
        seen.add(text)
    assert len(seen) >= 8
    assert accepts(world, grammar, "WikiSearch(city big in France")
    assert not accepts(world, grammar, "WikiSearch(Guide")
    assert not accepts(world, grammar, "WikiSearch(it")  # half of a word


def test_a_tool_without_arguments(world: Any) -> None:
    *_, syntax = world
    assert draw(world, empty_grammar("Calendar", syntax), "Calendar", 0) == ""


# -- schemas --------------------------------------------------------------------------------------


def spec_of(properties: dict[str, Any], required: list[str]) -> ToolSpec:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return ToolSpec("Tool", "1", "", parameters)


TYPES = {
    "n": {"type": "integer"},
    "amount": {"type": "number"},
    "unit": {"enum": ["km", "mi", 'a "b"', 3, True]},
    "round": {"type": "boolean"},
    "note": {"type": "string"},
}
PAIRS = {
    "n": "n=-30",
    "amount": "amount=2.5",
    "unit": 'unit="km"',
    "round": "round=true",
    "note": 'note="a b"',
}


@pytest.mark.parametrize(
    ("names", "required"),
    [
        (list(TYPES), list(TYPES)),
        (list(TYPES), ["n"]),
        (list(TYPES), ["note", "unit"]),
        (["n", "amount", "note"], []),  # whichever comes first has no comma before it
        (["n"], []),
        (["unit"], ["unit"]),
        (["note"], ["note"]),
        ([], []),
    ],
)
def test_schemas_give_arguments_that_fit_them(
    world: Any, names: list[str], required: list[str]
) -> None:
    *_, syntax = world
    spec = spec_of({name: TYPES[name] for name in names}, required)
    grammar = schema_grammar("Tool", spec.parameters, None, syntax)
    for seed in range(8):
        read = parse_arguments(spec, draw(world, grammar, "Tool", seed, most=600))
        check_arguments(spec, read)
        assert set(required) <= set(read) <= set(names)
    optional = [name for name in names if name not in required]
    for take in range(2 ** len(optional)):
        chosen = [name for n, name in enumerate(optional) if take >> n & 1]
        pairs = [PAIRS[name] for name in [*(n for n in names if n in required), *chosen]]
        bare = pairs == ['note="a b"'] and bool(required)
        arguments = "a b" if bare else ", ".join(pairs)
        assert accepts(world, grammar, f"Tool({arguments}){syntax.close}"), arguments
        if chosen and not required:
            assert not accepts(world, grammar, f"Tool(, {arguments}){syntax.close}")


def test_schema_of_one_enumerated_string(world: Any) -> None:
    *_, syntax = world
    spec = spec_of({"unit": {"type": "string", "enum": ["km", "mi"]}}, ["unit"])
    grammar = schema_grammar("Tool", spec.parameters, None, syntax)
    for seed in range(6):
        read = parse_arguments(spec, draw(world, grammar, "Tool", seed))
        check_arguments(spec, read)
        assert read["unit"] in ("km", "mi")


# -- what a grammar must not forbid ---------------------------------------------------------------


@pytest.mark.parametrize("tool", ["Calculator", "Calendar", "WikiSearch"])
def test_demonstrations_of_the_prompts_are_allowed(
    world: Any, tool: str, inputs: Path, tmp_path: Path
) -> None:
    """A mask that forbids what the prompt shows would force the model into another form."""
    *_, syntax = world
    prompt = (ROOT / "data" / "prompts" / f"{tool}.txt").read_text(encoding="utf-8")
    grammar = {
        "Calculator": expression_grammar("Calculator", None, syntax),
        "Calendar": empty_grammar("Calendar", syntax),
        "WikiSearch": text_grammar("WikiSearch", None, syntax),
    }[tool]
    shown = re.findall(rf"\[{tool}\(([^()]*)\)\]", prompt.split("Input:", 1)[1])
    assert len(shown) >= 3
    for arguments in shown:
        written = render(tool, arguments, None, syntax)
        assert accepts(world, grammar, written.removeprefix(syntax.open)), written


def test_a_broken_grammar_is_an_error(world: Any) -> None:
    _, grammars, _ = world
    with pytest.raises(ConfigError, match="call grammar"):
        grammars.mask('start: "a" nothing\n')


def test_masks_belong_to_their_row(world: Any) -> None:
    tokenizer, grammars, syntax = world
    grammar = expression_grammar("Calculator", ["1", "2"], syntax)
    one, other = grammars.mask(grammar), grammars.mask(grammar)
    ids = encode_piece(tokenizer, "Calculator(1")
    assert one(ids).any() and bool(other([])[ids[0]])
    with pytest.raises(AssertionError, match="masked and drawn"):
        grammars.mask(grammar)(encode_piece(tokenizer, "Calendar"))


# -- the stage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "kind"), tiny.PAIRS)
def test_constrained_samples_of_a_run(shape: str, kind: str, inputs: Path, tmp_path: Path) -> None:
    """A model that was never taught anything: all its calls execute, none looks ahead."""
    lm = tiny.make_lm(shape, kind)
    options = {
        "constrain": True, "numbers": "from_context", "words": "from_context",
        "max_new_tokens": 60, "k": 4, "m": 2,
    }  # fmt: skip
    config = tiny.make_config(inputs, sample=options)
    context = tiny.make_context(tmp_path, config, lm)
    documents = tiny.documents()
    text_of = {document.doc_id: document.text for document in documents}
    found = list(sample.run(documents, context))
    executor = context.executor()
    assert {call.tool for call in found} == {"Calculator", "Calendar", "WikiSearch"}
    for call in found:
        text = text_of[call.doc_id]
        about = {"date": "2020-05-04", "doc_id": call.doc_id}
        done = executor.execute(call.tool, call.arguments, about)
        assert done.error_kind in (None, "no_result", "division_by_zero"), (call, done.error)
        assert lookahead_leak(call.arguments, text, call.char_start) is None
        if call.tool == "Calculator":
            before = numbers_before(text[: call.char_start])
            assert set(re.findall(r"[\d.]+%?", call.arguments)) <= set(before)
    executor.close()
    for tool, counts in context.counts.items():
        assert counts.get("malformed", 0) == 0
        assert counts["positions"] + counts["no_call_possible"] == sum(
            len(lm.tokenizer(text, add_special_tokens=False)["input_ids"]) - inside(lm, text)
            for text in text_of.values()
        ), tool


def inside(lm: Any, text: str) -> int:
    """Tokens before which no call can stand: inside of a character, or the text opens a bracket."""
    ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    (opening,) = encode_piece(lm.tokenizer, " [")
    halves = sum(lm.tokenizer.decode(ids[:i]).endswith("\ufffd") for i in range(len(ids)))
    return halves + ids.count(opening)


def test_json_arguments_stay_one_line() -> None:
    grammar = schema_grammar("Tool", spec_of(TYPES, ["unit"]).parameters, None, TEXT)
    assert json.dumps(json.dumps('a "b"')) in grammar
