"""Calls that cannot be malformed: grammar masks while sampling (llguidance).

At every step the tokens that cannot continue a well-formed call get probability 0 and the rest is
renormalised (mask and renormalise). This is not the model's distribution given that the call is
well formed, which would also weigh what follows; it is the usual constrained decoding, and the
filter judges whatever it yields by the same losses.

With `numbers: from_context` a calculator call may use only numbers that stand in the text before
its position, and with `words: from_context` a search only words that stand there in a row: then no
look-ahead leak can be sampled at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from pipeline.calls import CallSyntax
from pipeline.errors import ConfigError

MAX_NUMBERS = 12  # the nearest ones before the position
MAX_TEXT = 60  # characters of a free text argument
_NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)\s?%?")
_FREE_TEXT = r"/[^\[\]()<>\"\\\n\r\t ]([^\[\]()<>\"\\\n\r\t]{0,%d}[^\[\]()<>\"\\\n\r\t ])?/"


class CallGrammar:
    """Compiles grammars for one tokenizer and makes a fresh mask per row."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = llguidance.hf.from_tokenizer(tokenizer)
        self.vocabulary = self.tokenizer.vocab_size

    def mask(self, grammar: str) -> RowMask:
        """A mask for one row; raises ConfigError when the grammar cannot be compiled."""
        matcher = LLMatcher(self.tokenizer, grammar)
        if matcher.is_error():
            raise ConfigError(f"call grammar: {matcher.get_error()}\n{grammar}")
        return RowMask(matcher, self.vocabulary)


class RowMask:
    """Which tokens may follow, for one row: called with all tokens after the opening delimiter."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.consumed = 0

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Return a bool tensor (V,), True where the call can go on."""
        new = list(tokens[self.consumed :])
        if new and not self.matcher.consume_tokens(new):
            raise AssertionError(f"tokens {new} were masked and drawn all the same")
        self.consumed = len(tokens)
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self.vocabulary]).bool()


def _lark(tool: str, arguments: str, syntax: CallSyntax, *rules: str) -> str:
    gap = " " if syntax.rendering == "special" else ""
    head, tail = json.dumps(f"{gap}{tool}("), json.dumps(f"){gap}{syntax.close}")
    return "\n".join([f"start: {head} {arguments} {tail}", *rules]) + "\n"


def expression_grammar(tool: str, numbers: Sequence[str] | None, syntax: CallSyntax) -> str:
    """Grammar of a calculator call: `a op b`, up to four numbers, one level of parentheses.

    `numbers` None: any number; else only these.
    """
    choice = (
        " | ".join(json.dumps(number) for number in numbers)
        if numbers
        else r"/\d{1,9}(\.\d{1,4})?%?/"
    )
    return _lark(
        tool,
        "expr",
        syntax,
        'expr: num (op num){1,3} | "(" num (op num){1,2} ")" op num',
        'op: " + " | " - " | " * " | " / "',
        f"num: {choice}",
    )


def text_grammar(tool: str, before: str | None, syntax: CallSyntax) -> str:
    """Grammar of a call with one text: any short text, or words that stand in `before` in a row."""
    if before is None:
        return _lark(tool, "TEXT", syntax, f"TEXT: {_FREE_TEXT % (MAX_TEXT - 2)}")
    words = re.sub(r"[\[\]()<>\"\\]", " ", before)
    quoted = json.dumps({"substring_words": " ".join(words.split())}, ensure_ascii=False)
    return _lark(tool, "TEXT", syntax, f"TEXT: %regex {quoted}")


def empty_grammar(tool: str, syntax: CallSyntax) -> str:
    """Grammar of a call without arguments."""
    return _lark(tool, "", syntax)


def schema_grammar(
    tool: str, schema: Mapping[str, Any], before: str | None, syntax: CallSyntax
) -> str:
    """Grammar of a call in linear form from the JSON Schema of its arguments.

    One required string is written bare; several arguments as `name="value", n=3` in the schema's
    order, optional ones after the required.
    """
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = [name for name in properties if name in schema.get("required", ())]
    if not properties:
        return empty_grammar(tool, syntax)
    if len(properties) == 1 and required and properties[required[0]].get("type") == "string":
        return text_grammar(tool, before, syntax)
    parts = [f"{json.dumps(f'{name}=')} {_value(properties[name])}" for name in required]
    line = ' ", " '.join(parts)
    for name in properties:
        if name not in required:
            comma = '", " ' if line else ""
            line += f" ({comma}{json.dumps(f'{name}=')} {_value(properties[name])})?"
    return _lark(tool, line, syntax)


def _value(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "(" + " | ".join(json.dumps(json.dumps(v)) for v in schema["enum"]) + ")"
    match schema.get("type"):
        case "integer":
            return r"/-?\d{1,9}/"
        case "number":
            return r"/-?\d{1,9}(\.\d{1,6})?/"
        case "boolean":
            return '("true" | "false")'
        case _:
            return r'"\"" ' + _FREE_TEXT % (MAX_TEXT - 2) + r' "\""'


def numbers_before(before: str) -> list[str]:
    """The different numbers of the text before a position, the nearest first, without commas."""
    found: dict[str, None] = {}
    for match in reversed(list(_NUMBER.finditer(before))):
        found.setdefault(match.group().replace(",", "").replace(" ", "").strip(), None)
    return list(found)[:MAX_NUMBERS]
