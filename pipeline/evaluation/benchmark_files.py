"""Files of agent benchmarks as JSON: what is refused names the file and the line, in plain words.

A faulty file must never look like a bad model, so all of a file is checked when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def read_text(path: Path) -> str:
    """Read a UTF-8 file; raises ConfigError where there is none, or something else."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def read_objects(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Read JSONL: every object with its place `file:line`; empty lines do not count.

    Raises ConfigError for a line that is no object, and for a file without any.
    """
    text = read_text(path)
    if text.lstrip().startswith("["):
        raise ConfigError(f"{path}:1: a list; wanted is JSONL, one object per line")
    rows = []
    # not splitlines(): a text within JSON may hold other line ends, as U+2028
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            row = parse_json(line, where)
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: {kind_of(row)}; wanted is an object")
            rows.append((where, row))
    if not rows:
        raise ConfigError(f"{path}: holds no row")
    return rows


def parse_json(text: str, where: str) -> Any:
    """Parse JSON; raises ConfigError naming where it breaks off being JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        spot = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{where}: not JSON from {spot} on") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: JSON with a number too long or lists too deep") from None


def kind_of(value: Any) -> str:
    """Say what kind of JSON value this is: `a list`."""
    return _NAMES.get(type(value), "a value of another kind")


def need(row: Mapping[str, Any], key: str, where: str, wanted: str) -> Any:
    """The value of a key; raises ConfigError saying that it is missing and what is wanted."""
    if key not in row:
        raise ConfigError(f"{where}: `{key}` is missing; wanted is {wanted}")
    return row[key]


def need_text(row: Mapping[str, Any], key: str, where: str) -> str:
    """The text of a key; raises ConfigError where it is missing, empty or of another kind."""
    wanted = "a text that is not empty"
    value = need(row, key, where, wanted)
    if not isinstance(value, str) or not value.strip():
        found = "empty" if isinstance(value, str) else kind_of(value)
        raise ConfigError(f"{where}: `{key}` is {found}; wanted is {wanted}")
    return value


def need_id(row: Mapping[str, Any], key: str, where: str, seen: set[str]) -> str:
    """The id of a row as a text, added to `seen`; raises ConfigError for one that is there."""
    wanted = "a text or a whole number"
    value = need(row, key, where, wanted)
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        found = "empty" if isinstance(value, str) else kind_of(value)
        raise ConfigError(f"{where}: `{key}` is {found}; wanted is {wanted}")
    identity = str(value)
    if identity in seen:
        raise ConfigError(f"{where}: `{key}` = {identity!r} occurs twice; wanted is one row per id")
    seen.add(identity)
    return identity
