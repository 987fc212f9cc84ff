"""The tools of a catalogue, listed: `callsieve tools list`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.report.terminal import plain
from pipeline.tools.arguments import linear_template
from pipeline.tools.listing import ListedTool


def tools_document(tools: Sequence[ListedTool]) -> list[dict[str, Any]]:
    """Describe tools as a JSON document: name, how a call is written, schema, limits, `missing`.

    `missing` says what the tool lacks to run; None where nothing is known to be missing.
    """
    return [
        {
            "name": tool.spec.name,
            "description": tool.spec.description,
            "call": linear_template(tool.spec),
            "parameters": tool.spec.parameters,
            "result_limit": tool.spec.result_limit,
            "timeout_s": tool.spec.timeout_s,
            "effects": tool.spec.effects,
            "missing": tool.missing,
        }
        for tool in tools
    ]


def print_tools(document: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print a list of tools (`tools_document`)."""
    table = Table(box=None)
    table.add_column("call", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    for tool in document:
        effects = " (has effects outside: asks for approval)" if tool["effects"] else ""
        about = Text(plain(tool["description"] + effects))
        if tool["missing"] is not None:
            about.append(plain(f" Cannot run yet: {tool['missing']}"), style="yellow")
        table.add_row(Text(plain(tool["call"]), style="bold"), about)
    (console or Console()).print(table)
