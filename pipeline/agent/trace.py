"""Traces: every event of a run as a flat dictionary, written as JSONL or printed as it happens.

Events are `start, turn, call, observation, nudge, exit`; each carries `task_id`, `step` and its
own fields. Text that a model or a tool wrote is printed without its control characters.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from pipeline.errors import ConfigError

Event = dict[str, Any]
Sink = Callable[[Event], None]


class TraceFile:
    """Writes events as JSON lines; a context manager."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise ConfigError(f"--trace {path}: is a folder; allowed: the file to write")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")

    def __call__(self, event: Event) -> None:
        self._file.write(json.dumps(event, ensure_ascii=False, default=str) + "\n")
        self._file.flush()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._file.close()


class TracePrinter:
    """Prints events in colour to stderr as they happen."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)

    def __call__(self, event: Event) -> None:
        for line in event_lines(event):
            self.console.print(line, soft_wrap=True)


def event_lines(event: Event) -> list[Text]:
    """Render one event; nothing in it is read as markup."""
    step = f"{event['step']:>3} "
    match event["event"]:
        case "start":
            return [Text.assemble(("    ", ""), (printable(event["question"]), "bold"))]
        case "turn":
            tokens = f"  ({event['tokens_in']} in, {event['tokens_out']} out)"
            flags = " ".join(event["flags"])
            line = Text.assemble((step, "dim"), (printable(event["text"]), "cyan"), (tokens, "dim"))
            return [line, Text(f"    {flags}", "yellow")] if flags else [line]
        case "call":
            return [Text.assemble((step, "dim"), ("call ", "magenta"), printable(_shown(event)))]
        case "observation":
            style = "red" if event.get("error_kind") else "green"
            return [Text.assemble((step, "dim"), (printable(event["content"]), style))]
        case "nudge":
            return [Text.assemble((step, "dim"), (printable(event["content"]), "yellow"))]
        case "exit":
            return [_exit_line(event)]
    return []


def _shown(event: Event) -> str:
    arguments = event["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f"{event['tool']}({arguments})"


def _exit_line(event: Event) -> Text:
    style = "bold green" if event["exit_reason"] == "finished" else "bold red"
    answer = "" if event["answer"] is None else f"  answer: {printable(event['answer'])}"
    tokens = event["tokens_in"] + event["tokens_out"]
    figures = f"  {event['step']} steps, {tokens} tokens, {event['seconds']:.2f} s"
    detail = f"  {printable(event['detail'])}" if event.get("detail") else ""
    reason = (event["exit_reason"], style)
    return Text.assemble("    ", reason, (answer, "bold"), (figures, "dim"), detail)


def printable(text: str) -> str:
    """Drop control characters (terminal escapes among them), keep line breaks and tabs."""
    return "".join(
        c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs")
    )


def comparable(events: list[Event]) -> list[Event]:
    """Return the events without wall-clock times, to compare two runs."""
    return [{k: v for k, v in event.items() if k != "seconds"} for event in events]
