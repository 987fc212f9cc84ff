"""Runs as text: for reflections, and right ones as documents for training."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.agent import chat
from pipeline.agent.parse import protocol_named
from pipeline.agent.tasks import EpisodeResult
from pipeline.agent.turns import Message
from pipeline.errors import ConfigError
from pipeline.records import stable_hash


def traces_to_documents(
    runs: Iterable[EpisodeResult], right: Iterable[bool], source: str = "traces"
) -> list[dict[str, Any]]:
    """Turn the runs that ended right into documents for training, duplicates once.

    A document is the run as the model would continue it: question, turns, results. Instructions,
    lessons of earlier trials, nudges, and anything an evaluator knows (gold answers, rewards) are
    not in it. A run that was nudged, stopped or refused is left out: its text would teach the
    mistake as well. The fields are those of `records.Document`.
    """
    documents: dict[str, dict[str, Any]] = {}
    for run, is_right in zip(runs, right, strict=True):
        if not is_right or not run.finished or any(m.kind == "nudge" for m in run.messages):
            continue
        text = trace_text(run)
        doc_id = stable_hash(source, text)
        documents[doc_id] = {
            "doc_id": doc_id,
            "text": text,
            "date": None,
            "url": None,
            "source": source,
            "tools": sorted(run.calls),
        }
    return list(documents.values())


def trace_text(run: EpisodeResult) -> str:
    """Write one run as text in the form of its protocol."""
    state = [message for message in run.messages if message.role != "system"]
    heading = "" if run.protocol in ("chat", "inline") else f"{run.heading}: "
    body = [Message("user", heading + run.question), *state[1:]]
    if run.protocol == "chat":
        return "\n".join(_chat_line(message) for message in body)
    return protocol_named(run.protocol).render(body).strip()


def _chat_line(message: Message) -> str:
    if message.role == "tool":
        return f"<tool_response>\n{message.content}\n</tool_response>"
    return chat.assistant_text(message) if message.role == "assistant" else message.content


def write_runs(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write `run_row`s as JSON lines; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            count += 1
    return count


def run_row(run: EpisodeResult, right: bool, **labels: Any) -> dict[str, Any]:
    """Make the line of a traces file: labels (arm, strategy, benchmark), verdict, run."""
    return {**labels, "right": right, "run": run.as_dict()}


def documents_from_runs(path: Path, source: str = "traces") -> list[dict[str, Any]]:
    """Read a traces file and return the documents of its right runs.

    Raises ConfigError naming the line that is not a `run_row`.
    """
    runs, right = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            runs.append(EpisodeResult.from_dict(row["run"]))
            right.append(bool(row["right"]))
        except (ValueError, KeyError, TypeError) as problem:
            message = f"{path}:{number} is not a run with its verdict: {problem!r}"
            raise ConfigError(message) from None
    return traces_to_documents(runs, right, source)
