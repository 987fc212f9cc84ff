"""Arguments of a call: the linear form in text, the dictionary, and the check against the schema.

Linear form, chosen so that it always parses back exactly:
- a tool with one required string takes the raw text: `WikiSearch(capital of France)`;
- a tool without arguments takes nothing: `Calendar()`;
- any other takes `name=value` pairs whose values are JSON: `convert(amount=3, unit="km")`.
Raw text that could be read in another way (unbalanced brackets, outer spaces, line breaks) is
written as a `name="..."` pair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from pipeline.calls import TEXT, parse_call
from pipeline.tools.base import ToolError, ToolSpec

MAX_CHARACTERS = 20_000

_NAME = re.compile(r"\s*([^\W\d][\w.\-]*)\s*=\s*")
_COMMA = re.compile(r"\s*,")
# What would end or open a call; written as \uXXXX inside the quotes of a pair.
_DELIMITERS = re.compile(r"[\[\]→]|(?<=-)>|<(?=/?API>)|<(?=\|)")


def parse_arguments(spec: ToolSpec, text: str) -> dict[str, Any]:
    """Read the linear form; raises ToolError of kind bad_arguments naming what is wrong.

    Values are not checked against the schema here: see `check_arguments`.
    """
    if len(text) > MAX_CHARACTERS:
        raise ToolError("bad_arguments", f"the arguments have over {MAX_CHARACTERS} characters")
    text = text.strip()
    properties = spec.parameters.get("properties", {})
    raw_name = raw_argument(spec)
    if raw_name is not None:
        pairs = _pairs_or_error(text)
        named = isinstance(pairs, dict) and raw_name in pairs and pairs.keys() <= properties.keys()
        return pairs if named and isinstance(pairs, dict) else {raw_name: text}
    if not text:
        return {}
    if not properties and not spec.parameters.get("additionalProperties", True):
        raise ToolError("bad_arguments", f"{spec.name} takes no arguments, got {text[:80]!r}")
    pairs = _pairs_or_error(text)
    if isinstance(pairs, str):
        raise ToolError("bad_arguments", f"{pairs}; write {linear_template(spec)}")
    return pairs


def render_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
    """Write arguments in the linear form; `parse_arguments` gives them back exactly."""
    raw_name = raw_argument(spec)
    if raw_name is not None and arguments.keys() == {raw_name}:
        raw = arguments[raw_name]
        if isinstance(raw, str) and _survives_raw(spec, raw):
            return raw
    return ", ".join(f"{name}={_dump(value)}" for name, value in arguments.items())


def raw_argument(spec: ToolSpec) -> str | None:
    """The name of the argument that may be written raw: the only required one, if a string."""
    required = spec.parameters.get("required", [])
    if len(required) != 1:
        return None
    declared = spec.parameters.get("properties", {}).get(required[0], {})
    return str(required[0]) if declared.get("type") == "string" else None


def linear_template(spec: ToolSpec) -> str:
    """How a call of the tool is written, for messages and listings."""
    raw_name = raw_argument(spec)
    if raw_name is not None:
        return f"{spec.name}({raw_name})"
    properties = spec.parameters.get("properties", {})
    pairs = []
    for name, declared in properties.items():
        kind = declared.get("type") if isinstance(declared, dict) else None
        pairs.append(f'{name}="..."' if kind == "string" else f"{name}=...")
    return f"{spec.name}({', '.join(pairs)})"


def check_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """Raise ToolError of kind bad_arguments that names every violation of the schema."""
    validator = Draft202012Validator(spec.parameters)
    errors = sorted(validator.iter_errors(dict(arguments)), key=lambda error: list(error.path))
    violations = [part for error in errors for part in _explain(error)]
    try:
        canonical_arguments(arguments).encode("utf-8")
    except UnicodeEncodeError:
        violations.append("a string holds half of a surrogate pair")
    if violations:
        raise ToolError("bad_arguments", f"{spec.name}: " + "; ".join(violations))


def canonical_arguments(arguments: Mapping[str, Any]) -> str:
    """One text per set of arguments, whatever their order: the key of the cache."""
    return json.dumps(
        dict(arguments), ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
    )


def _explain(error: ValidationError) -> list[str]:
    where = ".".join(str(part) for part in error.path)
    schema = error.schema if isinstance(error.schema, dict) else {}
    if error.validator == "required" and isinstance(error.instance, dict):
        # One error per missing name; its own message quotes the name only.
        missing = error.message.split("'")[1]
        return [f"missing required argument {(where + '.' + missing).lstrip('.')!r}"]
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        allowed = schema.get("properties", {})
        unknown = [name for name in error.instance if name not in allowed]
        listed = ", ".join(allowed) or "none"
        return [f"unknown argument {name!r} (allowed: {listed})" for name in unknown]
    message = error.message if len(error.message) <= 200 else error.message[:199] + "…"
    return [f"argument {where!r}: {message}" if where else message]


def _survives_raw(spec: ToolSpec, raw: str) -> bool:
    """Whether raw text stays one line, ends where it should, and reads back as itself."""
    if not raw or any(character in raw for character in "\n\r\x0b\x0c\x85\u2028\u2029"):
        return False
    if _DELIMITERS.search(raw) or any(marker.strip() in raw for marker in (TEXT.open, TEXT.close)):
        return False
    call = parse_call(f"T({raw})")
    if call is None or call.arguments != raw or call.end != len(raw) + 3:
        return False
    name = raw_argument(spec)
    return len(raw) <= MAX_CHARACTERS and parse_arguments(spec, raw) == {name: raw}


def _dump(value: Any) -> str:
    """JSON on one line, with the delimiters of a call escaped where they stand in a string."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        for separator in "\x85\u2028\u2029":
            text = text.replace(separator, f"\\u{ord(separator):04x}")
        return _DELIMITERS.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_dump(str(k))}: {_dump(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_dump(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _pairs_or_error(text: str) -> dict[str, Any] | str:
    """Read `name=value, ...` with JSON values; a string says why it cannot be read."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    pairs: dict[str, Any] = {}
    at = 0
    while True:
        match = _NAME.match(text, at)
        if match is None:
            return f"expected name=value at {text[at : at + 40]!r}"
        name = match.group(1)
        if name in pairs:
            return f"argument {name!r} is given twice"
        try:
            pairs[name], at = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            return f"the value of {name!r} is not JSON: {text[match.end() : match.end() + 40]!r}"
        if not text[at:].strip():
            return pairs
        comma = _COMMA.match(text, at)
        if comma is None:
            return f"expected a comma at {text[at : at + 40]!r}"
        at = comma.end()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
