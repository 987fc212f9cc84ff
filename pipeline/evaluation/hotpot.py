"""HotpotQA (distractor files): questions, their paragraphs as an encyclopedia, EM and F1.

Reads both shapes of a context: `{"title": [...], "sentences": [[...]]}` and
`[[title, [sentences]], ...]`. Answers are compared as in the official script: case, punctuation
and articles do not count; yes, no and noanswer are right or wrong as a whole.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.agent.environments.encyclopedia import Encyclopedia, Question
from pipeline.errors import ConfigError

MAX_STEPS = 7  # of the ReAct paper


def load_hotpot(path: Path) -> tuple[list[Question], Encyclopedia]:
    """Read the questions, and one encyclopedia out of the paragraphs of all of them.

    Raises ConfigError for a file of another shape.
    """
    pages: dict[str, list[str]] = {}
    questions = []
    try:
        for row in json.loads(path.read_text(encoding="utf-8")):
            identity = str(row.get("id") or row["_id"])
            questions.append(Question(identity, row["question"], row["answer"]))
            for title, sentences in _paragraphs(row["context"]):
                pages.setdefault(title, sentences)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ConfigError(f"{path} is not a HotpotQA distractor file: {problem!r}") from None
    return questions, Encyclopedia(pages)


def _paragraphs(context: Any) -> list[tuple[str, list[str]]]:
    if isinstance(context, dict):
        return list(zip(context["title"], context["sentences"], strict=True))
    return [(title, sentences) for title, sentences in context]


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
