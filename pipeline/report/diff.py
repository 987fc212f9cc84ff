"""What two runs sample and keep differently, and which settings differ: `callsieve diff A B`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.config import to_dict
from pipeline.errors import WorkError
from pipeline.report.funnel import build_funnel
from pipeline.report.rows import COLUMNS, run_config, with_context
from pipeline.report.sampling import measure_cells
from pipeline.report.terminal import call_text, plain
from pipeline.shards import RunFolder

NOT_SAMPLED = "not_sampled"
_PRINTED = 10  # calls per side on a terminal


def diff_runs(a: RunFolder, b: RunFolder) -> dict[str, Any]:
    """Compare the decisions and settings of two runs, as a JSON document.

    `{"run_a", "run_b", "settings": [{"key", "a", "b"}], "kept": {"a", "b", "both"},
      "tools": {tool: {"both", "only_a", "only_b"}}, "sampling": {tool: {"a", "b"}},
      "only_a": [call], "only_b": [call]}`; `sampling` holds what the samples came to
    (`sampling.sampling_measures`, None for a tool that a run has not sampled); a call
    has all columns, its context and `reason_in_other`: why the other run did not keep it
    (`not_sampled` where it does not know the call). The largest gains come first.
    Raises WorkError when a run has not selected yet.
    """
    calls_a, calls_b = _calls(a), _calls(b)
    kept_a = {name for name, call in calls_a.items() if call["kept"]}
    kept_b = {name for name, call in calls_b.items() if call["kept"]}
    tools: dict[str, Counter[str]] = {}
    for name in sorted(kept_a | kept_b):
        side = "both" if name in kept_a & kept_b else "only_a" if name in kept_a else "only_b"
        call = calls_a.get(name) or calls_b[name]
        tools.setdefault(call["tool"], Counter(both=0, only_a=0, only_b=0))[side] += 1
    return {
        "run_a": a.path.name,
        "run_b": b.path.name,
        "settings": _settings(a, b),
        "kept": {"a": len(kept_a), "b": len(kept_b), "both": len(kept_a & kept_b)},
        "tools": {tool: dict(counts) for tool, counts in sorted(tools.items())},
        "sampling": _sampling(a, b),
        "only_a": _only(a, kept_a - kept_b, calls_a, calls_b),
        "only_b": _only(b, kept_b - kept_a, calls_b, calls_a),
    }


def _calls(folder: RunFolder) -> dict[str, dict[str, Any]]:
    if not folder.parts("select"):
        raise WorkError(f"{folder.path}: has not selected any call yet; run `select` first")
    rows = folder.read_all("select", list(COLUMNS)).to_pylist()
    return {row["call_id"]: row for row in rows}


def _sampling(a: RunFolder, b: RunFolder) -> dict[str, dict[str, Any]]:
    left, right = build_funnel(a)["sampling"], build_funnel(b)["sampling"]
    return {
        tool: {"a": left.get(tool), "b": right.get(tool)} for tool in dict.fromkeys([*left, *right])
    }


def _only(
    folder: RunFolder,
    names: set[str],
    own: Mapping[str, dict[str, Any]],
    other: Mapping[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    rows = [
        {**own[name], "reason_in_other": other[name]["reason"] if name in other else NOT_SAMPLED}
        for name in names
    ]
    rows.sort(key=lambda row: (-(row["gain"] or 0.0), row["call_id"]))
    return with_context(folder, rows)


def _settings(a: RunFolder, b: RunFolder) -> list[dict[str, Any]]:
    left, right = _flat(to_dict(run_config(a))), _flat(to_dict(run_config(b)))
    return [
        {"key": key, "a": left.get(key), "b": right.get(key)}
        for key in dict.fromkeys([*left, *right])
        if key != "name" and left.get(key) != right.get(key)
    ]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Name every value of nested settings by its path."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in items:
        found.update(_flat(item, f"{path}.{key}" if path else key))
    return found


def print_diff(document: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a comparison (`diff_runs`)."""
    console = console or Console()
    a, b = plain(document["run_a"]), plain(document["run_b"])
    table = Table(title=Text("settings that differ"), title_justify="left", box=None)
    for name in ("setting", f"A: {a}", f"B: {b}"):
        table.add_column(Text(name), overflow="fold")
    for row in document["settings"]:
        table.add_row(Text(plain(row["key"])), Text(plain(row["a"])), Text(plain(row["b"])))
    console.print(table if document["settings"] else "the settings are the same")
    kept = document["kept"]
    console.print(f"kept: {kept['a']:,} in A, {kept['b']:,} in B, {kept['both']:,} in both")
    for tool, counts in document["tools"].items():
        only = f"{counts['only_a']:,} only in A, {counts['only_b']:,} only in B"
        console.print(Text(f"{plain(tool)}: {counts['both']:,} in both, {only}"))
    if document["sampling"]:
        console.print(_sampling_table(document["sampling"]))
    for side, name in (("only_a", "A"), ("only_b", "B")):
        rows = document[side]
        if rows:
            console.print(Text(f"\nonly in {name} ({len(rows):,})", style="bold"))
        for row in rows[:_PRINTED]:
            console.print(call_text(row))
            reason = row["reason_in_other"].replace("_", " ")
            console.print(Text(f"gain {row['gain']:.3f}  in the other run: {reason}", style="dim"))
        if len(rows) > _PRINTED:
            console.print(f"... and {len(rows) - _PRINTED:,} more (--json lists all)", style="dim")


def _sampling_table(sampling: Mapping[str, Any]) -> Table:
    table = Table(title=Text("what the samples came to"), title_justify="left", box=None)
    table.add_column("tool")
    table.add_column("measure")
    for name in ("A", "B"):
        table.add_column(name, justify="right")
    for tool, sides in sampling.items():
        a, b = measure_cells(sides["a"]), measure_cells(sides["b"])
        for n, measure in enumerate(a):
            table.add_row(Text(plain(tool) if n == 0 else ""), measure, a[measure], b[measure])
    return table
