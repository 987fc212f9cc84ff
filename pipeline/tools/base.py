"""What a tool is: a specification, one method, and failures that are data.

A tool is any object with a `spec` and a `run` method. It knows no model (one that needs a model
is given it) and no call syntax; the executor validates its arguments, bounds its time, and
neutralises and caps its result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ConfigDict

from pipeline.errors import ConfigError

# How the configuration of a tool is read: no unknown key, no silent conversion.
STRICT = ConfigDict(extra="forbid", strict=True)

# Every value that `error_kind` can take, in one place. A tool raises ToolError with one of them.
ERROR_KINDS: dict[str, str] = {
    "division_by_zero": "a division (or a negative power) of zero",
    "syntax": "the argument is not an expression that the tool can read",
    "not_allowed": "the argument uses something that the tool does not offer",
    "too_large": "a number, an expression or a result beyond the tool's bounds",
    "bad_arguments": "the arguments do not fit the tool's JSON Schema or linear form",
    "unknown_tool": "no tool of that name is in the catalogue",
    "bad_date": "the document's date cannot be read as a date",
    "no_result": "the tool ran and found nothing",
    "unsupported": "the request is well formed but not offered (a language pair, a unit)",
    "exception": "the tool's own code raised an exception",
    "tool_error": "a remote tool answered that the call failed",
    "timeout": "the tool ran past its time limit and was stopped",
    "crash": "the worker process died while it ran the tool",
    "network": "the tool could not reach its service, after the retries",
    "unavailable": "the server behind the tool is gone",
    "refused": "the approval policy does not allow the call",
}

# Failures that say nothing about the arguments: never cached, so that a later run tries again.
TRANSIENT_KINDS = frozenset({"timeout", "crash", "network", "unavailable", "refused", "exception"})

# Failures of arguments that the tool could not read at all.
UNREADABLE_KINDS = frozenset({"bad_arguments", "syntax"})


class ToolError(Exception):
    """A failure of a tool: data for the pipeline, an observation for an agent.

    `kind` is a key of ERROR_KINDS, `message` one readable sentence.
    """

    def __init__(self, kind: str, message: str) -> None:
        if kind not in ERROR_KINDS:
            raise ValueError(f"unknown error kind {kind!r}. Allowed: {', '.join(ERROR_KINDS)}")
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class ToolSpec:
    """All that the pipeline and a model need to know about a tool.

    `version` changes whenever the same arguments may give another result: it is part of the
    cache's key. `result_limit` counts characters.
    """

    name: str
    version: str
    description: str
    parameters: dict[str, Any]  # JSON Schema of the arguments, always an object
    result_limit: int = 200
    timeout_s: float = 10.0
    effects: bool = False  # changes something outside: needs an approval policy
    isolated: bool = False  # runs in a worker process that can be killed
    reads_document: bool = False  # the result depends on the document's date
    cacheable: bool = True
    network: bool = False  # failures of kind `network` are tried again
    concurrency: int | None = None  # calls of this tool at the same time; None: no limit

    def schema_for_chat(self) -> dict[str, Any]:
        """The definition in the form that chat templates and OpenAI wires take."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


def schemas_of(specs: Sequence[ToolSpec]) -> dict[str, dict[str, Any]]:
    """The schema of the arguments of each tool, by its name."""
    return {spec.name: spec.parameters for spec in specs}


class Tool(Protocol):
    """The interface of every tool."""

    @property
    def spec(self) -> ToolSpec: ...

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """Answer valid `arguments`; raises ToolError. `document` holds `date` and `doc_id`."""
        ...


class MissingExtra(ConfigError):
    """An optional library is not installed; the message names the extra that brings it."""

    def __init__(self, tool: str, extra: str) -> None:
        super().__init__(
            f"{tool} needs an optional library: pip install -e '.[{extra}]' in the project's folder"
        )


def one_string(name: str, description: str) -> dict[str, Any]:
    """The JSON Schema of a tool that takes one required string."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": description}},
        "required": [name],
        "additionalProperties": False,
    }


def content_version(base: str, *parts: object) -> str:
    """`base` plus a short hash of everything else that the results depend on."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, default=str)
    return f"{base}+{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
