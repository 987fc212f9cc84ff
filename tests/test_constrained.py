"""Live calls under a grammar: models that were never taught anything make no malformed call."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import tiny
from jsonschema import Draft202012Validator

from pipeline.calls import TEXT
from pipeline.lm.generation import generate
from pipeline.lm.grammar import MAX_STRING, CallGrammar, json_rule, lark, live_grammar
from pipeline.lm.jobs import LiveCalls
from pipeline.lm.tokens import decode_piece, encode_piece
from pipeline.tools.base import ToolSpec, one_string, schemas_of
from pipeline.tools.calculator import Calculator
from pipeline.tools.executor import Executor

PROMPTS = ["The farm sold 37 crates of 24", "Rome", "It rained for five days and", "Box with 12"]
ORDER = {
    "type": "object",
    "properties": {
        "articles": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "size": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
        "address": {"$ref": "#/$defs/Address"},
        "unit": {"enum": ["km", "mi"]},
    },
    "required": ["articles", "size"],
    "additionalProperties": False,
    "$defs": {
        "Address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "floor": {"type": "number"}},
            "required": ["street"],
        }
    },
}


@dataclasses.dataclass(frozen=True)
class Echo:
    """A tool that answers any valid arguments."""

    spec: ToolSpec

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        return "done"


@pytest.fixture(scope="module")
def executor() -> Any:
    tools = [
        Calculator(),
        Echo(ToolSpec("Calendar", "1", "", {"type": "object", "properties": {}})),
        Echo(ToolSpec("Search", "1", "", one_string("query", ""))),
        Echo(ToolSpec("Order", "1", "", ORDER)),
    ]
    with Executor(tools) as own:
        yield own


@cache
def masks_of(tokenizer: Any) -> CallGrammar:
    return CallGrammar(tokenizer)


def live(lm: Any, executor: Any, constrain: bool, **changes: Any) -> LiveCalls:
    """Calls that fire wherever they may."""
    masks, grammar = masks_of(lm.tokenizer), live_grammar(schemas_of(executor.specs), TEXT)
    own = LiveCalls(
        TEXT,
        [spec.name for spec in executor.specs],
        lambda tool, arguments, index: executor.execute(tool, arguments),
        call_k=len(lm.tokenizer),
        max_calls=2,
        max_call_tokens=8,
        mask=(lambda: masks.mask(grammar)) if constrain else None,
    )
    return dataclasses.replace(own, **changes)


@pytest.mark.parametrize(("shape", "kind"), tiny.PAIRS)
def test_every_call_of_an_untaught_model_executes(shape: str, kind: str, executor: Any) -> None:
    lm = tiny.make_lm(shape, kind)
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "max_rows": 3}
    prompts = PROMPTS * 2
    calls = [
        call
        for made in generate(
            lm.model, lm.tokenizer, prompts, calls=live(lm, executor, True), **options
        )
        for call in made.calls
    ]
    assert len(calls) == 2 * len(prompts)
    assert len({call.tool for call in calls}) >= 3
    for call in calls:
        assert call.error_kind in (None, "division_by_zero"), call
    free = generate(lm.model, lm.tokenizer, prompts, calls=live(lm, executor, False), **options)
    assert not any(call.complete for made in free for call in made.calls)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batched_equals_single_and_other_rows_are_untouched(
    temperature: float, executor: Any
) -> None:
    lm = tiny.make_lm("llama", "bytes")
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": temperature}
    seeds = list(range(len(PROMPTS)))

    def texts(constrain: bool, rows: int, **changes: Any) -> list[Any]:
        calls = live(lm, executor, constrain, **changes)
        made = generate(
            lm.model, lm.tokenizer, PROMPTS, seed=seeds, calls=calls, max_rows=rows, **options
        )
        timeless = [[dataclasses.replace(c, seconds=0.0) for c in one.calls] for one in made]
        return [dataclasses.replace(m, calls=c) for m, c in zip(made, timeless, strict=True)]

    together = texts(True, 64)
    assert together == texts(True, 1)
    assert texts(True, 64, enabled=False) == texts(False, 64, enabled=False)
    few = dict(call_k=2, max_calls=1)
    for masked, free in zip(texts(True, 64, **few), texts(False, 64, **few), strict=True):
        if free.calls:
            assert masked.text[: free.calls[0].start] == free.text[: free.calls[0].start]
        else:
            assert masked == free


def drawn(masks: CallGrammar, tokenizer: Any, rule: str, seed: int) -> str:
    """A text drawn blindly from what a rule allows."""
    mask, choose, ids = masks.mask(lark(rule, {})), random.Random(seed), []
    while not mask.complete(ids):
        allowed = set(mask(ids).nonzero()[:, 0].tolist()) - {tokenizer.eos_token_id}
        assert len(ids) < 3000, "the rule has no bound"
        ids.append(choose.choice(sorted(allowed)))
    return decode_piece(tokenizer, encode_piece(tokenizer, ":")[0], ids)


ANYTHING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "low": {"type": "integer", "minimum": 3_000_000_000},
        "high": {"type": "number", "exclusiveMaximum": -2_000_000_000},
        "any": {},
        "list": {"type": ["array", "null"]},
        "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "kind": {"const": "x]y"},
        "type": {"type": "string", "pattern": "^[a-c]{2,4}$"},
    },
}


@pytest.mark.parametrize(
    "schema", [ORDER, ANYTHING, {**ANYTHING, "required": list(ANYTHING["properties"])}]
)
def test_json_fits_its_schema_and_comes_to_an_end(schema: dict[str, Any]) -> None:
    tokenizer = tiny.make_tokenizer("bytes")
    masks = masks_of(tokenizer)
    for seed in range(5):
        text = drawn(masks, tokenizer, json_rule(schema), seed)
        assert list(Draft202012Validator(schema).iter_errors(json.loads(text))) == [], text
        assert "\n" not in text and len(text) < 30 * MAX_STRING
