"""HotpotQA (distractor files): questions, their paragraphs as an encyclopedia, EM and F1.

Reads both shapes of a context: `{"title": [...], "sentences": [[...]]}` and
`[[title, [sentences]], ...]`. Answers are compared as in the official script: case, punctuation
and articles do not count; yes, no and noanswer are right or wrong as a whole.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.agent.environments.encyclopedia import Encyclopedia, Question
from pipeline.errors import ConfigError
from pipeline.evaluation.benchmark_files import (
    kind_of,
    need,
    need_id,
    need_text,
    parse_json,
    read_text,
)

MAX_STEPS = 7  # of the ReAct paper
_CONTEXT = '[["title", ["sentence", ...]], ...] or {"title": [...], "sentences": [[...]]}'


def load_hotpot(path: Path) -> tuple[list[Question], Encyclopedia]:
    """Read the questions, and one encyclopedia out of the paragraphs of all of them.

    Raises ConfigError naming the row and the key of what is of another shape.
    """
    pages: dict[str, list[str]] = {}
    questions = []
    seen: set[str] = set()
    about = f"{path}: not a HotpotQA distractor file"
    for number, row in enumerate(_read_list(path, about), start=1):
        where = f"{about}: row {number}"
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: {kind_of(row)}; wanted is an object")
        identity = need_id(row, "_id" if "_id" in row else "id", where, seen)
        answer = need_text(row, "answer", where)
        questions.append(Question(identity, need_text(row, "question", where), answer))
        for title, sentences in _paragraphs(need(row, "context", where, _CONTEXT), where):
            pages.setdefault(title, sentences)
    if not pages:
        raise ConfigError(f"{about}: no `context` holds a page; wanted is {_CONTEXT}")
    return questions, Encyclopedia(pages)


def _read_list(path: Path, about: str) -> list[Any]:
    """The rows of the file, one JSON list."""
    text = read_text(path)
    if not text.lstrip().startswith("["):
        found = "an object, or JSONL" if text.lstrip().startswith("{") else "something else"
        raise ConfigError(f"{about}: {found if text.strip() else 'empty'}; wanted is one JSON list")
    rows = parse_json(text, about)
    if not rows:
        raise ConfigError(f"{about}: holds no question")
    return list(rows)


def _paragraphs(context: Any, where: str) -> list[tuple[str, list[str]]]:
    """The pages of a context in either shape."""
    pairs = context
    if isinstance(context, dict):
        titles, pages = (need(context, key, where, "a list") for key in ("title", "sentences"))
        same = isinstance(titles, list) and isinstance(pages, list) and len(titles) == len(pages)
        pairs = [list(pair) for pair in zip(titles, pages, strict=True)] if same else None
    if not isinstance(pairs, list) or not all(_is_page(pair) for pair in pairs):
        raise ConfigError(f"{where}: `context` holds no such pages; wanted is {_CONTEXT}")
    return [(title, sentences) for title, sentences in pairs]


def _is_page(pair: Any) -> bool:
    """Whether this is a title with a list of sentences."""
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
        return False
    return isinstance(pair[1], list) and all(isinstance(sentence, str) for sentence in pair[1])


def normalise(answer: str) -> str:
    """Fold case, punctuation, articles and spaces away."""
    text = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str | None, gold: str) -> bool:
    """Tell whether the answer is the gold answer; no answer is wrong."""
    return answer is not None and normalise(answer) == normalise(gold)


def f1(answer: str | None, gold: str) -> float:
    """Word overlap as the harmonic mean of precision and recall."""
    if answer is None:
        return 0.0
    own, wanted = normalise(answer), normalise(gold)
    if own != wanted and {own, wanted} & {"yes", "no", "noanswer"}:
        return 0.0
    shared = sum((Counter(own.split()) & Counter(wanted.split())).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(own.split()), shared / len(wanted.split())
    return 2 * precision * recall / (precision + recall)
