"""The table of models in the agent loop: scores, cost, why runs ended, tools, where to look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.agent.trace import printable

Row = Mapping[str, Any]
LABELS = ("benchmark", "strategy")


def print_scores(rows: Sequence[Row], console: Console, labels: Sequence[str] = LABELS) -> None:
    """Print the rows of `evaluation.agents.compare_agents`; `labels` say which columns name one."""
    table = Table(box=None)
    for title in labels:
        table.add_column(title)
    for title in ("n", "% right", "steps", "tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("ended by")
    for row in rows:
        cells = [*(str(row[label]) for label in labels), *_cells(row)]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)
    for row in rows:
        name = " ".join(str(row[label]) for label in labels)
        if tools := _tools(row):
            console.print(Text(printable(f"{name}: {tools}")))
        for sentence in row["diagnosis"]:
            console.print(Text(printable(f"{name}: {sentence}"), "dim"))


def _cells(row: Row) -> list[str]:
    """One line; of function calls the outcomes are told, not why their one turn ended."""
    reasons = row.get("outcomes", row["exit_reasons"])
    return [
        str(row["n"]),
        f"{100 * row['accuracy']:.1f} ± {100 * row['standard_error']:.1f}",
        f"{row['steps_per_question']:.1f}",
        f"{row['tokens_per_question']:.0f}",
        _counts(reasons),
    ]


def _tools(row: Row) -> str:
    """Calls that were executed and errors, per tool."""
    named = sorted({*row["calls"], *row["errors"]})
    return "; ".join(
        f"{tool} {row['calls'].get(tool, 0)} calls" + _failed(row["errors"].get(tool, {}))
        for tool in named
    )


def _failed(kinds: Mapping[str, int]) -> str:
    return f", errors: {_counts(kinds)}" if kinds else ""


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
