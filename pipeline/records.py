"""What flows between the stages, and the Arrow schema of each file."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

import pyarrow as pa

_ARROW: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    list[str]: pa.list_(pa.string()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One text of the corpus; `tools` names the tools whose corpus filter it passed."""

    doc_id: str
    text: str
    date: str | None
    url: str | None
    source: str
    tools: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A sampled call: where it would stand (`char_start`, in code points) and why it was sampled.

    `p_api` is p(<API> | P(x), x_1..x_{i-1}); `loss_none` is L_i(eps), in nats.
    """

    call_id: str
    doc_id: str
    tool: str
    char_start: int
    token_index: int
    arguments: str
    sample_count: int
    p_api: float
    loss_none: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutedCall(Candidate):
    """A candidate with what the tool answered; exactly one of `result`, `error_kind` is set."""

    result: str | None
    error_kind: str | None
    error: str | None
    seconds: float
    cached: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredCall(ExecutedCall):
    """The three losses in nats; None where a bound already proved that the call cannot be kept.

    `gain_null` is the gain with another call's result. Without `loss_call` it is its upper bound
    L(eps) - L+, which then lies below the floor.
    """

    loss_call: float | None
    loss_result: float | None
    gain: float | None
    gain_null: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedCall(ScoredCall):
    """The decision; `reason` is one of `REASONS`."""

    kept: bool
    reason: str


REASONS = (
    "kept",
    "below_threshold",
    "lookahead_leak",
    "duplicate",
    "conflict",
    "over_cap",
    "tool_error",
)


def schema_of(record: type) -> pa.Schema:
    """Build the Arrow schema of a record class from its annotations."""
    hints = get_type_hints(record)
    fields = []
    for field in dataclasses.fields(record):
        hint = hints[field.name]
        options = [a for a in getattr(hint, "__args__", ()) if a is not type(None)]
        optional = hint not in _ARROW
        fields.append(pa.field(field.name, _ARROW[options[0] if optional else hint], optional))
    return pa.schema(fields)


def to_table(rows: Iterable[Any], record: type) -> pa.Table:
    """Turn records into an Arrow table with the record's own schema."""
    schema = schema_of(record)
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for row in rows:
        for name in schema.names:
            columns[name].append(getattr(row, name))
    return pa.table(columns, schema=schema)


def from_table(table: pa.Table, record: type) -> list[Any]:
    """Turn an Arrow table back into records."""
    names = [field.name for field in dataclasses.fields(record)]
    return [record(**row) for row in table.select(names).to_pylist()]


def extend(row: Any, record: type, **values: Any) -> Any:
    """Make the next stage's record out of this one and its new values."""
    known = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
    return record(**{**known, **values})


def stable_hash(*parts: object) -> str:
    """Hash any values into 16 hex digits that never depend on the process or the machine."""
    text = "\x1f".join(str(part) for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def call_id(doc_id: str, tool: str, char_start: int, arguments: str) -> str:
    """Name a call by what it is and where it stands."""
    return stable_hash(doc_id, tool, char_start, arguments)


def plain(record: Any) -> Mapping[str, Any]:
    """Return a record as a dictionary, for JSON."""
    return dataclasses.asdict(record)
