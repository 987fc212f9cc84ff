"""Trace files, read: `callsieve agent run --trace FILE`, and `agent-traces.jsonl` of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.report.episodes import Episode, Start, cut, read_event, read_run

WANTED = (
    "wanted is a file of `callsieve agent run --trace` (an event a line) or agent-traces.jsonl "
    "(a run a line)"
)


@dataclass
class Trace:
    """The runs of a file in the order in which they began; `cut_line` is a last line that ends in
    the middle, as a killed run leaves it."""

    episodes: list[Episode] = field(default_factory=list)
    cut_line: int | None = None


def read_trace(path: Path) -> Trace:
    """Read a trace file.

    Raises ConfigError, with file and line, for what is not JSONL or no trace, and for a file with
    nothing in it. A last line that is cut off is no error when a whole one stands before it.
    """
    trace = Trace()
    running: dict[str, Episode] = {}
    for number, line in _lines(path):
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as problem:
            if trace.episodes and not line.endswith(b"\n"):
                trace.cut_line = number
                break
            raise ConfigError(f"{path}:{number}: not JSON ({problem}); {WANTED}") from None
        try:
            _take(value, trace, running)
        except ValidationError as problem:
            first = problem.errors()[0]
            where = "".join(f"`{part}` " for part in first["loc"])
            raise ConfigError(f"{path}:{number}: {where}{first['msg']}; {WANTED}") from None
        except (KeyError, TypeError):
            raise ConfigError(f"{path}:{number}: no line of a trace; {WANTED}") from None
    if not trace.episodes:
        raise ConfigError(f"{path}: nothing in it; {WANTED}")
    for episode in running.values():
        episode.close()
    return trace


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _take(value: Any, trace: Trace, running: dict[str, Episode]) -> None:
    """Take one line: a whole run, or an event of one that is running or begins here."""
    if not isinstance(value, dict) or "event" not in value:
        trace.episodes.append(read_run(value))
        return
    event = read_event(value)
    episode = running.get(event.task_id)
    if isinstance(event, Start) or episode is None:
        question, protocol = (
            (event.question, event.protocol) if isinstance(event, Start) else ("", "react")
        )
        episode = running[event.task_id] = Episode(cut(question), event.task_id, protocol)
        trace.episodes.append(episode)
    episode.add(event)
    if episode.result is not None:
        del running[event.task_id]
