"""Calls that cannot be malformed: grammar masks while sampling and decoding (llguidance).

At every step the tokens that cannot continue a well-formed call get probability 0 and the rest is
renormalised (mask and renormalise). This is not the model's distribution given that the call is
well formed, which would also weigh what follows; it is the usual constrained decoding, and the
filter judges whatever it yields by the same losses. It secures the form of a call and not its
content: the arguments are checked by the tool all the same.

Every argument is bounded (a text by characters, a number by digits, a list by items), so that a
call always comes to its end, whatever the model is.

With `numbers: from_context` a calculator call may use only numbers that stand in the text before
its position, and with `words: from_context` a search only words that stand there in a row: then no
look-ahead leak can be sampled at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits
from torch import Tensor

from pipeline.calls import CallSyntax
from pipeline.errors import ConfigError

MAX_NUMBERS = 12  # the nearest ones before the position
MAX_TEXT = 60  # characters of a free text argument
MAX_STRING = 200  # characters of a string in JSON that names no bound of its own
MAX_ITEMS = 6  # items of a list in JSON that names no bound of its own
MAX_VALUE = 10**9
# [0-9] everywhere: `\d` would also match the digits of other scripts, which no tool reads.
_NUMBER = re.compile(r"(?<![\w.,])[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?!\w)\s?%?")
_NEVER = r"\[\]()<>→\"\\\x00-\x1f\x7f"  # in a free text: delimiters, quotes, control characters
_FREE_TEXT = rf"/[^{_NEVER} ]([^{_NEVER}]{{0,{MAX_TEXT - 2}}}[^{_NEVER} ])?/"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Part = tuple[str, dict[str, str]]  # what a Lark rule says, and the rules it refers to
Schemas = Mapping[str, Mapping[str, Any]]  # the schema of the arguments of each tool
_INTEGER = r"-?(0|[1-9][0-9]{0,8})"
# The defaults end a turn of free text with an error where a vocabulary of 49,152 tokens meets it.
_LIMITS = LLParserLimits(initial_lexer_fuel=20_000_000, step_lexer_fuel=20_000_000)


class CallGrammar:
    """Compiles grammars for one tokenizer and makes a fresh mask per row."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = llguidance.hf.from_tokenizer(tokenizer)
        self.vocabulary = self.tokenizer.vocab_size
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def mask(self, grammar: str) -> RowMask:
        """A mask for one row; raises ConfigError when the grammar cannot be compiled."""
        return RowMask(self._compiled(grammar).deep_copy(), self.vocabulary)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.tokenizer, grammar, limits=_LIMITS)
        if matcher.is_error():
            raise ConfigError(f"call grammar: {matcher.get_error()}\n{grammar}")
        return matcher


class RowMask:
    """Which tokens may follow, for one row: asked with all tokens that the grammar has to do with
    (after the opening delimiter, or after the prompt)."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.consumed = 0

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Return a bool tensor (V,), True where the text can go on; EOS where it can end."""
        self._consume(tokens)
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        if self.matcher.is_error():
            raise ConfigError(f"call grammar: {self.matcher.get_error()}")
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self.vocabulary]).bool()

    def may_end(self, tokens: Sequence[int]) -> bool:
        """Whether the text is whole as it stands."""
        self._consume(tokens)
        return bool(self.matcher.is_accepting())

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether the text is whole and nothing may follow."""
        return self.may_end(tokens) and bool(self.matcher.is_stopped())

    def _consume(self, tokens: Sequence[int]) -> None:
        new = list(tokens[self.consumed :])
        if new and not self.matcher.consume_tokens(new):
            raise AssertionError(f"tokens {new} were masked and drawn all the same")
        self.consumed = len(tokens)


def lark(start: str, rules: Mapping[str, str]) -> str:
    """Write a Lark grammar: what `start` says, and the other rules by name."""
    return "".join(f"{name}: {rule}\n" for name, rule in {"start": start, **rules}.items())


def _sampled(tool: str, arguments: Part, syntax: CallSyntax) -> str:
    head, tail = json.dumps(f"{tool}("), json.dumps(f"){syntax.close}")
    return lark(f"{head} {arguments[0]} {tail}", arguments[1])


def tool_calls(schemas: Schemas, ends: tuple[str, str], close: str, text: str = _FREE_TEXT) -> Part:
    """Grammar of a call of any of the tools in linear form, then `close`.

    `ends` are the brackets around the arguments; `text` is the terminal of a bare text.
    """
    calls, rules = [], {}
    for name, schema in schemas.items():
        arguments = _expression(None) if name == "Calculator" else _linear(schema, None, text)
        calls.append(f"{json.dumps(name + ends[0])} {arguments[0]}")
        rules.update(arguments[1])
    return f"({' | '.join(calls)}) {json.dumps(ends[1] + close)}", rules


def live_grammar(schemas: Schemas, syntax: CallSyntax) -> str:
    """Grammar of what follows the opening token while decoding: `Tool(arguments) ->`."""
    return lark(*tool_calls(schemas, ("(", ")"), f" {syntax.arrow}"))


def expression_grammar(tool: str, numbers: Sequence[str] | None, syntax: CallSyntax) -> str:
    """Grammar of a calculator call: `a op b`, up to four numbers, one level of parentheses.

    `numbers` None: any number; else only these.
    """
    return _sampled(tool, _expression(numbers), syntax)


def _expression(numbers: Sequence[str] | None) -> Part:
    choice = (
        " | ".join(json.dumps(number) for number in numbers)
        if numbers
        else r"/[0-9]{1,9}(\.[0-9]{1,4})?%?/"
    )
    return "expr", {
        "expr": 'num (op num){1,3} | "(" num (op num){1,2} ")" op num',
        "op": '" + " | " - " | " * " | " / "',
        "num": choice,
    }


def text_grammar(tool: str, before: str | None, syntax: CallSyntax) -> str:
    """Grammar of a call with one text: any short text, or words that stand in `before` in a row."""
    return _sampled(tool, _text(before, _FREE_TEXT), syntax)


def _text(before: str | None, free: str) -> Part:
    if before is None:
        return free, {}
    words = re.sub(r"[\[\]()<>\"\\]", " ", before)
    quoted = json.dumps({"substring_words": " ".join(words.split())}, ensure_ascii=False)
    # the words alone would also allow no word at all, and spaces around them
    some = rf"/\w(.{{0,{MAX_TEXT - 2}}}[^ ])?/"
    return "TEXT", {"TEXT": f"WORDS & {some}", "WORDS": f"%regex {quoted}"}


def empty_grammar(tool: str, syntax: CallSyntax) -> str:
    """Grammar of a call without arguments."""
    return _sampled(tool, ("", {}), syntax)


def schema_grammar(
    tool: str, schema: Mapping[str, Any], before: str | None, syntax: CallSyntax
) -> str:
    """Grammar of a call in linear form from the JSON Schema of its arguments.

    One required string is written bare; several arguments as `name="value", n=3` in the schema's
    order, optional ones after the required.
    """
    return _sampled(tool, _linear(schema, before, _FREE_TEXT), syntax)


def _linear(schema: Mapping[str, Any], before: str | None, free: str) -> Part:
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = [name for name in properties if name in schema.get("required", ())]
    if not properties:
        return "", {}
    only = properties[required[0]] if len(properties) == 1 and required else {}
    if only.get("type") == "string" and "enum" not in only:
        return _text(before, free)
    pairs = {
        name: f"{json.dumps(f'{name}=')} {_value(value, schema)}"
        for name, value in properties.items()
    }
    optional = [pairs[name] for name in properties if name not in required]

    def after(others: Sequence[str]) -> str:
        return "".join(f' (", " {pair})?' for pair in others)

    if required:
        line = ' ", " '.join(pairs[name] for name in required) + after(optional)
    else:  # whichever comes first has no comma before it
        starts = (pair + after(optional[n + 1 :]) for n, pair in enumerate(optional))
        line = f"({' | '.join(starts)})?"
    return line, {}


def _value(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "(" + " | ".join(json.dumps(json.dumps(v)) for v in schema["enum"]) + ")"
    match schema.get("type"):
        case "integer":
            return f"/{_INTEGER}/"
        case "number":
            return rf"/{_INTEGER}(\.[0-9]{{1,6}})?/"
        case "boolean":
            return '("true" | "false")'
        case None | "string" if not _COMBINED & schema.keys():
            return rf'"\"" {_FREE_TEXT} "\""'
        case _:
            named = {key: root[key] for key in _NAMED & root.keys()}
            return json_rule({**named, **schema}, {"pattern": f"^{_FREE_TEXT[1:-1]}$"})


_NAMED = {"$defs", "definitions"}  # where a schema keeps those that `$ref` names
_COMBINED = {"$ref", "anyOf", "oneOf", "allOf", "const", "enum"}


def json_rule(schema: Any, text: Mapping[str, Any] | None = None) -> str:
    """A Lark rule for JSON on one line that fits a schema, with bounds where it has none.

    `text` are the keywords that bound a string. Keywords that llguidance does not know are left to
    the validation of the arguments.
    """
    bounded = _bounded(schema, text or {"maxLength": MAX_STRING})
    return "%json " + json.dumps({"x-guidance": {**_COMPACT, "lenient": True}, **bounded})


def _bounded(schema: Any, text: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(schema, Mapping) or not schema.keys() & {"type", "properties", *_COMBINED}:
        return {"type": "string", **text}  # anything goes, so a short text does
    node: dict[str, Any] = dict(schema)
    for key in ("properties", *_NAMED):
        if key in node:
            node[key] = {name: _bounded(value, text) for name, value in node[key].items()}
    for key in ("anyOf", "oneOf", "prefixItems"):
        if key in node:
            node[key] = [_bounded(value, text) for value in node[key]]
    kinds = node.get("type", "object" if "properties" in node else [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        _bound(node, kind, text)
    return node


def _bound(node: dict[str, Any], kind: str, text: Mapping[str, Any]) -> None:
    """Put bounds into the schema `node` for values of the type `kind`."""
    if kind == "string" and not node.keys() & {"enum", "const", "pattern", "format", "maxLength"}:
        node.update(text)
    elif kind in ("integer", "number"):
        low = node.get("minimum", node.get("exclusiveMinimum"))
        high = node.get("maximum", node.get("exclusiveMaximum"))
        if low is None:
            node["minimum"] = -MAX_VALUE if high is None else min(-MAX_VALUE, high - 1)
        if high is None:
            node["maximum"] = MAX_VALUE if low is None else max(MAX_VALUE, low + 1)
        if kind == "number":
            node.setdefault("multipleOf", 1e-4)  # that is, so many decimals
    elif kind == "array":
        node["items"] = _bounded(node.get("items"), text)
        node.setdefault("maxItems", max(MAX_ITEMS, node.get("minItems", 0)))
    elif kind == "object":
        others = node.get("additionalProperties", "properties" not in node)
        node["additionalProperties"] = others and _bounded(others, text)
        if others and not node.get("properties"):
            node.setdefault("maxProperties", max(MAX_ITEMS, node.get("minProperties", 0)))


def numbers_before(before: str) -> list[str]:
    """The different numbers of the text before a position, the nearest first, without commas."""
    found: dict[str, None] = {}
    for match in reversed(list(_NUMBER.finditer(before))):
        found.setdefault(match.group().replace(",", "").replace(" ", "").strip(), None)
    return list(found)[:MAX_NUMBERS]
