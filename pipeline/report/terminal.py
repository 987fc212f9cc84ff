"""Funnel, calls and status for people, on a terminal.

Texts come from documents, models and tools: they are shown as plain text, never as mark-up, and
their control characters do not reach the terminal.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.report.funnel import explain
from pipeline.report.sampling import sampling_text

_STATE_STYLE = {"done": "green", "partial": "yellow", "stale": "red", "waiting": "dim"}
_SHOWN = 100  # code points of context on each side of a call


def print_funnel(funnel: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a funnel (`funnel.build_funnel`): what was left after each step, per tool."""
    console = console or Console()
    corpus = funnel["corpus"]
    if corpus:
        console.print(Text(corpus_text(corpus)))
    for tool, steps in funnel["tools"].items():
        table = Table(title=Text(plain(tool), style="bold"), title_justify="left", box=None)
        table.add_column("step", no_wrap=True)
        table.add_column("count", justify="right", no_wrap=True)
        table.add_column("left out before it", style="dim", overflow="fold")
        for step in steps:
            name, count = step["step"].replace("_", " "), f"{step['count']:,}"
            style = "bold" if step["step"] == "kept" else ""
            table.add_row(
                Text(name, style), Text(count, style), Text(left_text(step["left"]))
            )  # fmt: skip
        console.print(table)
        if tool in funnel["sampling"]:
            console.print(Text(f" {sampling_text(funnel['sampling'][tool])}"))
    dataset = funnel["dataset"]
    if dataset:
        console.print(
            f"data set: {dataset.get('augmented', 0):,} texts with {dataset.get('calls', 0):,} "
            f"calls; {dataset.get('without_calls', 0):,} texts without a call left out"
        )


def corpus_text(corpus: Mapping[str, Any]) -> str:
    """Write in one line what became of the records that were read."""
    parts = [f"{corpus.get('read', 0):,} read, {corpus.get('documents', 0):,} documents"]
    if corpus["left"]:
        items = sorted(corpus["left"].items(), key=lambda item: -item[1])
        reasons = (f"{plain(explain(what)).removeprefix('rejected, ')} {n:,}" for what, n in items)
        parts.append(f"left out: {', '.join(reasons)}")
    if corpus.get("bad_date"):
        parts.append(f"{explain('bad_date')}: {corpus['bad_date']:,}")
    return f"corpus: {'; '.join(parts)}"


def left_text(left: Mapping[str, int]) -> str:
    """Write counts per reason in one line, the largest first."""
    items = sorted(left.items(), key=lambda item: -item[1])
    return "; ".join(f"{plain(explain(what))}: {n:,}" for what, n in items)


def print_calls(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print calls (`rows.show_rows`) in their context, each with all its losses."""
    console = console or Console()
    if not rows:
        console.print("no call matches")
    whole = not console.is_terminal  # a line of a file is not cut where a terminal's would be
    for row in rows:
        console.print(call_text(row), soft_wrap=whole)
        console.print(_facts(row), style="dim", soft_wrap=whole)
        console.print()


def call_text(row: Mapping[str, Any]) -> Text:
    """Return a call within its sentence."""
    color = "green" if row["kept"] else "yellow" if row["error_kind"] is None else "red"
    text = Text(plain(row["context_before"][-_SHOWN:]).lstrip())
    text.append(f" [{plain(row['tool'])}({plain(row['arguments'])})", style=f"bold {color}")
    if row["result"] is not None:
        text.append(f" -> {plain(row['result'])}", style=f"bold {color}")
    text.append("]", style=f"bold {color}")
    text.append(plain(row["context_after"][:_SHOWN]).rstrip())
    return text


def _facts(row: Mapping[str, Any]) -> Text:
    losses = (
        ("gain", row["gain"]),
        ("L(eps)", row["loss_none"]),
        ("L(call)", row["loss_call"]),
        ("L(call, result)", row["loss_result"]),
        ("gain with another result", row["gain_null"]),
        ("p(<API>)", row["p_api"]),
    )
    parts = [str(row["reason"] or "not selected yet").replace("_", " ")]
    parts += [f"{name} {value:.3f}" for name, value in losses if value is not None]
    if row["error_kind"]:
        parts.append(f"{row['error_kind']}: {row['error']}")
    parts.append(f"call {row['call_id']}")
    return Text(plain("  ".join(parts)))


def print_status(status: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the state of a run (`status.status_document`)."""
    console = console or Console()
    table = Table(title=Text(plain(status["name"]), style="bold"), title_justify="left", box=None)
    table.add_column("stage")
    table.add_column("state")
    for name in ("shards", "rows", "time", "still about"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in status["stages"]:
        state = stage["state"]
        table.add_row(
            stage["stage"],
            Text(state, style=_STATE_STYLE[state]),
            f"{stage['done']}/{stage['shards']}",
            f"{stage['rows']:,}",
            duration(stage["seconds"]) if stage["done"] else "",
            duration(stage["estimate_s"]) if state == "partial" else "",
        )
    console.print(table)
    for tool, measures in status["funnel"]["sampling"].items():
        console.print(Text(f"{plain(tool)}: {sampling_text(measures)}"))


def duration(seconds: float) -> str:
    """Write a duration in two units at most.

    >>> duration(3.21), duration(75), duration(7_380)
    ('3.2 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def plain(text: object) -> str:
    """Make text safe for one place on a terminal: white space as blanks, controls as `·`."""
    return "".join(
        " " if char.isspace() else "·" if _is_control(char) else char for char in str(text)
    )


def _is_control(char: str) -> bool:
    joiner = char in "\u200c\u200d"  # part of how some scripts and emoji are written
    return not joiner and unicodedata.category(char) in {"Cc", "Cf", "Cs", "Co", "Cn"}


def print_generation(prompt: str, made: Any, console: Console | None = None) -> None:
    """Print a continued text (`generation.Generation`), its calls coloured, then each call.

    Where it is no terminal, the text is written exactly as it is.
    """
    console = console or Console()
    if not console.is_terminal:
        console.file.write(f"{prompt}{made.text}\n")
        print_outcomes(made, console)
        return
    text = Text(plain(prompt), style="dim")
    position = 0
    for call in sorted(made.calls, key=lambda c: c.start):
        text.append(plain(made.text[position : call.start]))
        text.append(plain(made.text[call.start : call.end]), style=call_style(call))
        position = call.end
    text.append(plain(made.text[position:]))
    console.print(text)
    print_outcomes(made, console)


def call_style(call: Any) -> str:
    """The colour of a call in a generated text."""
    return "bold green" if call.error_kind is None else "bold red"


def print_outcomes(made: Any, console: Console) -> None:
    """Print what came of each call of a generated text."""
    for call in made.calls:
        outcome = call.result if call.error_kind is None else f"{call.error_kind}: {call.error}"
        console.print(
            Text(plain(f"{call.tool}({call.arguments}) -> {outcome}"), style="dim"), soft_wrap=True
        )
