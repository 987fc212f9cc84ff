"""What a run ends with: funnel, best calls, near misses, the arms, where the report is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.agent.scores import LABELS, print_scores
from pipeline.report.arms import arms_table
from pipeline.report.funnel import build_funnel
from pipeline.report.rows import show_rows
from pipeline.report.terminal import plain, print_calls, print_funnel
from pipeline.shards import RunFolder, read_json

BEST, NEAR_MISSES = 5, 2
_LOOKED_AT = 1000


def print_summary(folder: RunFolder, console: Console | None = None) -> None:
    """Print what has come out of a run so far."""
    console = console or Console()
    print_funnel(build_funnel(folder), console)
    if folder.parts("select"):
        _section(folder, console, "best kept calls", "kept", BEST)
        _section(folder, console, "near misses", "below_threshold", NEAR_MISSES)
    results = read_json(folder.stage("evaluate") / "results.json")
    if results is not None:
        print_arms(results, console)
    report = folder.path / "report.html"
    if report.exists():
        console.print(Text(f"report: {report}"), soft_wrap=True)


def _section(folder: RunFolder, console: Console, title: str, reason: str, n: int) -> None:
    rows = _mixed(show_rows(folder, reason=reason, n=_LOOKED_AT), n)
    if rows:
        console.print(Text(f"\n{title}", style="bold"))
        print_calls(rows, console)


def _mixed(rows: Sequence[Mapping[str, Any]], n: int) -> list[Mapping[str, Any]]:
    """The largest gains, the tools in turn, one call per document while there are others."""
    best: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        best.setdefault(row["tool"], {}).setdefault(row["doc_id"], row)
    turns = zip_longest(*(list(own.values()) for own in best.values()))
    return [row for turn in turns for row in turn if row is not None][:n]


def print_arms(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table of the arms and the paired comparisons; nothing when there is none."""
    console = console or Console()
    found = arms_table(results)
    if not found.rows:
        return
    table = Table(title=Text("the four arms", style="bold"), title_justify="left", box=None)
    table.add_column("measure")
    for arm in found.arms:
        table.add_column(Text(plain(arm)), justify="right", no_wrap=True)
    for name, cells in found.rows:
        table.add_row(Text(plain(name)), *(Text(plain(cell)) for cell in cells))
    console.print(table)
    for item in results.get("comparisons") or ():
        if item["task"] == "overall" and item["n"]:
            pair = f"{item['first']} - {item['second']}".replace("_", " ")
            console.print(
                f"{pair}: {100 * item['difference']:+.1f} ± {100 * item['standard_error']:.1f} "
                f"points (p = {item['p_value']:.2g}, paired)"
            )
    if results.get("agents"):
        console.print(Text("in the agent loop", style="bold"))
        print_scores(results["agents"], console, ("arm", *LABELS))
