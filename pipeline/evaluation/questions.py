"""Evaluation questions: unfinished texts whose continuation is the answer.

JSONL, one object per line:
    {"id": "arith-001", "kind": "arithmetic", "prompt": "...", "answer": "888",
     "aliases": [], "date": null}
`date` (ISO or null) is "today" for the tools. Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.paths import find_all

KINDS = ("arithmetic", "date", "lookup")


@dataclass(frozen=True)
class Question:
    """One question; any of `answer` and `aliases` is right."""

    id: str
    kind: str
    prompt: str
    answer: str
    aliases: tuple[str, ...] = ()
    date: str | None = None

    @property
    def answers(self) -> tuple[str, ...]:
        return (self.answer, *self.aliases)


def load_questions(patterns: Sequence[str], limit: int | None = None) -> list[Question]:
    """Read questions from files or globs; at most `limit` per kind, spread evenly over them.

    Raises ConfigError naming file and line of what is wrong.
    """
    questions: list[Question] = []
    for pattern in patterns:
        files = find_all(pattern)
        if not files:
            raise ConfigError(f"`evaluate.questions`: {pattern!r} matches no file")
        for file in files:
            questions += _read(file)
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise ConfigError(f"`evaluate.questions`: the id {question.id!r} occurs twice")
        seen.add(question.id)
    if limit is None:
        return questions
    return [
        question
        for kind in KINDS
        for question in spread([q for q in questions if q.kind == kind], limit)
    ]


def spread(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` items, evenly spaced, in their order."""
    if len(items) <= limit:
        return list(items)
    return [items[len(items) * i // limit] for i in range(limit)]


def _read(path: Path) -> list[Question]:
    questions = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            questions.append(_parse(line, f"{path}:{number}"))
    return questions


def _parse(line: str, where: str) -> Question:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected an object, found {type(raw).__name__}")
    for key in ("id", "kind", "prompt", "answer"):
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            raise ConfigError(f"{where}: `{key}` must be a text that is not empty")
    if raw["kind"] not in KINDS:
        raise ConfigError(f"{where}: `kind` = {raw['kind']!r}: allowed are {', '.join(KINDS)}")
    aliases, date = raw.get("aliases") or [], raw.get("date")
    if not isinstance(aliases, list) or not all(isinstance(a, str) and a for a in aliases):
        raise ConfigError(f"{where}: `aliases` must be a list of texts")
    if date is not None and not isinstance(date, str):
        raise ConfigError(f"{where}: `date` must be an ISO date or null")
    # A trailing space would stand where the model writes its own.
    prompt = raw["prompt"].rstrip()
    return Question(raw["id"], raw["kind"], prompt, raw["answer"], tuple(aliases), date)
