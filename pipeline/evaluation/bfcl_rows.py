"""Rows and answers of the function-calling leaderboard, read from its files and checked.

What no model could answer right is refused: functions that cannot be offered, answers that name
what is not on offer, rows without an answer, rows of another category. Every refusal is a
ConfigError that names file, line, key and what is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pipeline.errors import ConfigError
from pipeline.evaluation.benchmark_files import kind_of, need, need_id, need_text, read_objects

Role = Literal["system", "user", "assistant"]
Call = dict[str, dict[str, list[Any]]]  # function -> argument -> accepted values

_ROLES = get_args(Role)
_TYPES = (
    *("any", "array", "boolean", "dict", "float", "integer"),
    *("null", "number", "object", "string", "tuple"),
)
_WANTED_QUESTION = '[[{"role": "user", "content": "..."}]]'
_WANTED_TRUTH = 'a list of calls, [{"function": {"argument": [accepted values]}}]'


@dataclass(frozen=True)
class RawRow:
    """A row as it stands in the file, without its answer; `where` is `file:line`."""

    where: str
    row_id: str
    messages: tuple[tuple[Role, str], ...]  # role, content
    functions: tuple[dict[str, Any], ...]  # each with description and parameters


def read_rows(path: Path, category: str) -> list[RawRow]:
    """Read the questions and the functions on offer; raises ConfigError for what is no such row."""
    seen: set[str] = set()
    rows = [_row(raw, where, seen) for where, raw in read_objects(path)]
    for row in rows:
        if category == "simple" and len(row.functions) > 1:
            problem = f"`function` holds {len(row.functions)} functions"
            raise ConfigError(f"{row.where}: {problem}; {_other(category, 'multiple')}")
    return rows


def read_answers(path: Path, rows: Sequence[RawRow], category: str) -> list[tuple[Call, ...]]:
    """Read the accepted calls of every row, in the order of the rows; more answers do no harm.

    Raises ConfigError for an answer that is missing or that no call could match.
    """
    seen: set[str] = set()
    given = {need_id(raw, "id", where, seen): (where, raw) for where, raw in read_objects(path)}
    answers = []
    for row in rows:
        if row.row_id not in given:
            raise ConfigError(f"{path}: no answer for row {row.row_id} ({row.where})")
        where, raw = given[row.row_id]
        answers.append(_calls(raw, where, row))
        if category != "parallel" and len(answers[-1]) > 1:
            problem = f"`ground_truth` holds {len(answers[-1])} calls"
            raise ConfigError(f"{where}: {problem}; {_other(category, 'parallel')}")
    if category == "parallel" and all(len(calls) == 1 for calls in answers):
        fits = "simple" if all(len(row.functions) == 1 for row in rows) else "multiple"
        raise ConfigError(f"{path}: every row has one call; {_other(category, fits)}")
    return answers


def _other(category: str, fits: str) -> str:
    return f"that is not the category {category}, {fits} would fit"


def _row(raw: Mapping[str, Any], where: str, seen: set[str]) -> RawRow:
    identity = need_id(raw, "id", where, seen)
    messages = _messages(need(raw, "question", where, _WANTED_QUESTION), where)
    functions = need(raw, "function", where, "a list of functions")
    if not isinstance(functions, list) or not functions:
        found = "an empty list" if functions == [] else kind_of(functions)
        raise ConfigError(f"{where}: `function` is {found}; wanted is a list of functions")
    offered = tuple(_function(one, f"function[{n}]", where) for n, one in enumerate(functions))
    return RawRow(where, identity, messages, offered)


def _messages(turns: Any, where: str) -> tuple[tuple[Role, str], ...]:
    """The messages of the one turn."""
    if not isinstance(turns, list) or not all(isinstance(turn, list) for turn in turns):
        raise ConfigError(f"{where}: `question` is no list of lists; wanted is {_WANTED_QUESTION}")
    if len(turns) > 1:
        raise ConfigError(f"{where}: `question` has {len(turns)} turns; wanted is a single one")
    if not turns or not turns[0]:
        raise ConfigError(f"{where}: `question` has no message; wanted is {_WANTED_QUESTION}")
    return tuple(_message(one, f"question[0][{n}]", where) for n, one in enumerate(turns[0]))


def _message(message: Any, key: str, where: str) -> tuple[Role, str]:
    _mapping(message, key, where)
    allowed = ", ".join(_ROLES)
    role = need(message, "role", f"{where}: {key}", f"one of {allowed}")
    if role not in _ROLES:
        raise ConfigError(f"{where}: `{key}.role` = {role!r}; allowed are {allowed}")
    return role, need_text(message, "content", f"{where}: {key}")


def _function(function: Any, key: str, where: str) -> dict[str, Any]:
    """A function with its description (or an empty one) and its parameters (or none)."""
    _mapping(function, key, where)
    need_text(function, "name", f"{where}: {key}")
    description = function.get("description") or ""
    if not isinstance(description, str):
        found = kind_of(description)
        raise ConfigError(f"{where}: `{key}.description` is {found}; wanted is a text")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    _mapping(parameters, f"{key}.parameters", where)
    whole = {"type": "dict", "properties": {}, **parameters}
    if whole["type"] not in ("dict", "object"):
        kind = whole["type"]
        raise ConfigError(f"{where}: `{key}.parameters.type` = {kind!r}; allowed are dict, object")
    _check_schema(whole, f"{key}.parameters", where)
    return {**function, "description": description, "parameters": whole}


def _check_schema(schema: Any, key: str, where: str) -> None:
    """Refuse a type that is not known, and required names that are no property, at any depth."""
    _mapping(schema, key, where)
    kinds = schema.get("type", "any")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            raise ConfigError(f"{where}: `{key}.type` = {kind!r}; allowed are {', '.join(_TYPES)}")
    if schema.get("items") is not None:
        _check_schema(schema["items"], f"{key}.items", where)
    if "properties" in schema:  # the leaderboard has objects that require, and declare nothing
        _mapping(schema["properties"], f"{key}.properties", where)
        for name, inner in schema["properties"].items():
            _check_schema(inner, f"{key}.properties.{name}", where)
        _check_required(schema, key, where)


def _check_required(schema: Mapping[str, Any], key: str, where: str) -> None:
    required = schema.get("required", [])
    if not isinstance(required, list):
        found = kind_of(required)
        raise ConfigError(f"{where}: `{key}.required` is {found}; wanted is a list of names")
    for name in required:
        if not isinstance(name, str) or name not in schema["properties"]:
            known = ", ".join(schema["properties"]) or "none"
            raise ConfigError(
                f"{where}: `{key}.required` names {name!r}, which is no property; there are: "
                f"{known}"
            )


def _mapping(value: Any, key: str, where: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: `{key}` is {kind_of(value)}; wanted is an object")


def _calls(raw: Mapping[str, Any], where: str, row: RawRow) -> tuple[Call, ...]:
    calls = need(raw, "ground_truth", where, _WANTED_TRUTH)
    if not isinstance(calls, list) or not calls:
        found = "an empty list" if calls == [] else kind_of(calls)
        raise ConfigError(f"{where}: `ground_truth` is {found}; wanted is {_WANTED_TRUTH}")
    for number, call in enumerate(calls):
        _check_call(call, f"ground_truth[{number}]", where, row)
    return tuple(calls)


def _check_call(call: Any, key: str, where: str, row: RawRow) -> None:
    """Refuse an accepted call that the functions on offer do not allow."""
    if not isinstance(call, dict) or len(call) != 1:
        found = f"an object of {len(call)} keys" if isinstance(call, dict) else kind_of(call)
        raise ConfigError(f"{where}: `{key}` is {found}; wanted is one function with its arguments")
    ((name, arguments),) = call.items()
    offered = {function["name"]: function["parameters"] for function in row.functions}
    if name not in offered:
        raise ConfigError(
            f"{where}: `{key}` names the function {name!r}, which row {row.row_id} does not "
            f"offer; there are: {', '.join(offered)}"
        )
    _mapping(arguments, f"{key}.{name}", where)
    for argument, values in arguments.items():
        if argument not in offered[name]["properties"]:
            known = ", ".join(offered[name]["properties"]) or "none"
            raise ConfigError(
                f"{where}: `{key}.{name}` names {argument!r}, which is no parameter; there are: "
                f"{known}"
            )
        _check_values(values, f"{key}.{name}.{argument}", where)
    for argument in offered[name].get("required", []):
        need(arguments, argument, f"{where}: {key}.{name}", "a list of accepted values")


def _check_values(values: Any, key: str, where: str) -> None:
    if not isinstance(values, list) or not values:
        found = "an empty list" if values == [] else kind_of(values)
        raise ConfigError(f"{where}: `{key}` is {found}; wanted is a list of accepted values")
    for value in values:
        _check_inner(value, key, where)


def _check_inner(value: Any, key: str, where: str) -> None:
    """Refuse an accepted object whose own keys have no lists of accepted values."""
    if isinstance(value, dict):
        for name, values in value.items():
            _check_values(values, f"{key}.{name}", where)
    if isinstance(value, list):
        for one in value:
            _check_inner(one, key, where)
