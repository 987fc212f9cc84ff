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
# [0-9] everywhere: `\d` would also match the digits of other scripts, which no tool reads.
_NUMBER = re.compile(r"(?<![\w.,])[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?!\w)\s?%?")
_NEVER = r"\[\]()<>→\"\\\x00-\x1f\x7f"  # in a free text: delimiters, quotes, control characters
_FREE_TEXT = rf"/[^{_NEVER} ]([^{_NEVER}]{{0,{MAX_TEXT - 2}}}[^{_NEVER} ])?/"
_INTEGER = r"-?(0|[1-9][0-9]{0,8})"


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
    head, tail = json.dumps(f"{tool}("), json.dumps(f"){syntax.close}")
    return "\n".join([f"start: {head} {arguments} {tail}", *rules]) + "\n"


def expression_grammar(tool: str, numbers: Sequence[str] | None, syntax: CallSyntax) -> str:
    """Grammar of a calculator call: `a op b`, up to four numbers, one level of parentheses.

    `numbers` None: any number; else only these.
    """
    choice = (
        " | ".join(json.dumps(number) for number in numbers)
        if numbers
        else r"/[0-9]{1,9}(\.[0-9]{1,4})?%?/"
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
        return _lark(tool, "TEXT", syntax, f"TEXT: {_FREE_TEXT}")
    words = re.sub(r"[\[\]()<>\"\\]", " ", before)
    quoted = json.dumps({"substring_words": " ".join(words.split())}, ensure_ascii=False)
    # the words alone would also allow no word at all, and spaces around them
    some = rf"/\w(.{{0,{MAX_TEXT - 2}}}[^ ])?/"
    return _lark(tool, "TEXT", syntax, f"TEXT: WORDS & {some}", f"WORDS: %regex {quoted}")


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
    only = properties[required[0]] if len(properties) == 1 and required else {}
    if only.get("type") == "string" and "enum" not in only:
        return text_grammar(tool, before, syntax)
    pairs = {
        name: f"{json.dumps(f'{name}=')} {_value(value)}" for name, value in properties.items()
    }
    optional = [pairs[name] for name in properties if name not in required]

    def after(others: Sequence[str]) -> str:
        return "".join(f' (", " {pair})?' for pair in others)

    if required:
        line = ' ", " '.join(pairs[name] for name in required) + after(optional)
    else:  # whichever comes first has no comma before it
        starts = (pair + after(optional[n + 1 :]) for n, pair in enumerate(optional))
        line = f"({' | '.join(starts)})?"
    return _lark(tool, line, syntax)


def _value(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "(" + " | ".join(json.dumps(json.dumps(v)) for v in schema["enum"]) + ")"
    match schema.get("type"):
        case "integer":
            return f"/{_INTEGER}/"
        case "number":
            return rf"/{_INTEGER}(\.[0-9]{{1,6}})?/"
        case "boolean":
            return '("true" | "false")'
        case _:
            return rf'"\"" {_FREE_TEXT} "\""'


def numbers_before(before: str) -> list[str]:
    """The different numbers of the text before a position, the nearest first, without commas."""
    found: dict[str, None] = {}
    for match in reversed(list(_NUMBER.finditer(before))):
        found.setdefault(match.group().replace(",", "").replace(" ", "").strip(), None)
    return list(found)[:MAX_NUMBERS]
