"""Calls of a run with the text around them: what `callsieve show` and the report look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config import Config, load_config
from pipeline.errors import ConfigError, WorkError
from pipeline.records import REASONS, SelectedCall
from pipeline.shards import RunFolder

CONTEXT = 200  # code points shown on each side of a call
CALL_STAGES = ("select", "score", "execute", "sample")  # the one that knows most comes first
COLUMNS = tuple(field.name for field in dataclasses.fields(SelectedCall))
SORTS = (
    "gain", "gain_null", "p_api", "loss_none", "loss_call", "loss_result", "sample_count",
    "seconds", "position",
)  # fmt: skip


def run_config(folder: RunFolder) -> Config:
    """Read the resolved configuration of a run. Raises ConfigError when this is no run folder."""
    path = folder.path / "config.yaml"
    if not path.exists():
        raise ConfigError(f"{folder.path}: not a run folder (it has no config.yaml)")
    return load_config(path)


def calls_table(folder: RunFolder) -> pa.Table | None:
    """Read the calls of the furthest stage that has finished a shard; None when there are none."""
    stage = next((stage for stage in CALL_STAGES if folder.parts(stage)), None)
    return folder.read_all(stage) if stage else None


def show_rows(
    folder: RunFolder,
    *,
    tool: str | None = None,
    reason: str | None = None,
    sort: str = "gain",
    n: int = 10,
    call: str | None = None,
) -> list[dict[str, Any]]:
    """Return up to `n` calls as JSON-able rows, the largest `sort` first.

    A row has every column of the contract (None where its stage has not run) and
    `context_before`, `context_after`: the text on both sides of the call. `call` is a call id or
    its beginning; `position` sorts by document and place.
    Raises ConfigError for an unknown tool, reason, sort or call, WorkError when there is no call.
    """
    table = calls_table(folder)
    if table is None:
        raise WorkError(f"{folder.path}: no call has been sampled yet; `callsieve run` goes on")
    chosen = _sorted(_chosen(table, tool, reason, call), sort)
    rows = chosen.slice(0, n).to_pylist()
    return with_context(folder, [{name: row.get(name) for name in COLUMNS} for row in rows])


def _chosen(
    table: pa.Table, tool: str | None, reason: str | None, call: str | None
) -> pa.Table:  # fmt: skip
    if call is not None:
        found = table.filter(pc.starts_with(table["call_id"], call))
        if not found.num_rows or not call:
            raise ConfigError(f"--call {call}: no call of this run has that id")
        return found
    if tool is not None:
        names = sorted(pc.unique(table["tool"]).to_pylist())
        name = next((name for name in names if name.lower() == tool.lower()), None)
        if name is None:
            raise ConfigError(
                f"--tool {tool}: no call of it; there are calls of {', '.join(names)}"
            )
        table = table.filter(pc.field("tool") == name)
    if reason is not None:
        if reason not in REASONS:
            raise ConfigError(f"--reason {reason}: allowed are {', '.join(REASONS)}")
        if "reason" not in table.column_names:
            raise WorkError("no reason is known before the stage `select` has run")
        table = table.filter(pc.field("reason") == reason)
    return table


def what_there_is(folder: RunFolder) -> dict[str, dict[str, int]]:
    """How many calls a run has: per tool and reason (`not selected yet` before `select`)."""
    table = calls_table(folder)
    if table is None:
        return {}
    if "reason" not in table.column_names:
        table = table.append_column("reason", pa.array(["not selected yet"] * table.num_rows))
    found: dict[str, dict[str, int]] = {}
    for row in table.group_by(["tool", "reason"]).aggregate([([], "count_all")]).to_pylist():
        found.setdefault(row["tool"], {})[row["reason"]] = row["count_all"]
    return {tool: dict(sorted(found[tool].items())) for tool in sorted(found)}


def _sorted(table: pa.Table, sort: str) -> pa.Table:
    if sort not in SORTS:
        raise ConfigError(f"--sort {sort}: allowed are {', '.join(SORTS)}")
    place = [("doc_id", "ascending"), ("char_start", "ascending"), ("call_id", "ascending")]
    by_value = sort != "position" and sort in table.column_names
    keys = [(sort, "descending"), *place] if by_value else place
    return table.take(pc.sort_indices(table, sort_keys=keys))


def with_context(folder: RunFolder, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `context_before` and `context_after` to rows of calls."""
    texts = texts_of(folder, {row["doc_id"] for row in rows})
    for row in rows:
        text, start = texts.get(row["doc_id"], ""), row["char_start"]
        row["context_before"] = text[max(0, start - CONTEXT) : start]
        row["context_after"] = text[start : start + CONTEXT]
    return rows


def texts_of(folder: RunFolder, doc_ids: set[str]) -> Mapping[str, str]:
    """Return the texts of some documents."""
    wanted = pa.array(sorted(doc_ids), pa.string())
    texts: dict[str, str] = {}
    for index, count in folder.parts("ingest"):
        table = pq.read_table(
            folder.part("ingest", index, count),
            columns=["doc_id", "text"],
            filters=pc.field("doc_id").isin(wanted),
        )
        texts.update(zip(table["doc_id"].to_pylist(), table["text"].to_pylist(), strict=True))
    return texts
