"""FEVER: claims to be called SUPPORTS, REFUTES or NOT ENOUGH INFO; label accuracy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline.agent.environments.encyclopedia import Question
from pipeline.errors import ConfigError
from pipeline.evaluation.benchmark_files import need, need_id, need_text, read_objects

MAX_STEPS = 5  # of the ReAct paper
LABELS = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")


def load_fever(path: Path, limit: int | None = None) -> list[Question]:
    """Read claims with their labels, all of them checked, and return the first `limit`.

    Raises ConfigError naming the line and the key of what is no such claim.
    """
    seen: set[str] = set()
    return [_claim(row, where, seen) for where, row in read_objects(path)][:limit]


def _claim(row: dict[str, Any], where: str, seen: set[str]) -> Question:
    identity = need_id(row, "id", where, seen)
    claim = need_text(row, "claim", where)
    label = need(row, "label", where, f"one of {', '.join(LABELS)}")
    if label not in LABELS:
        raise ConfigError(f"{where}: `label` = {label!r}; allowed are {', '.join(LABELS)}")
    return Question(identity, claim, label, heading="Claim")


def evidence_titles(path: Path) -> set[str]:
    """The titles of all pages that the claims' evidence names."""
    titles = set()
    for where, row in read_objects(path):
        for group in need(row, "evidence", where, "a list of groups"):
            titles |= {_title(str(item[2])) for item in group if item[2]}
    return titles


def _title(name: str) -> str:
    for code, sign in (("_", " "), ("-LRB-", "("), ("-RRB-", ")"), ("-COLON-", ":")):
        name = name.replace(code, sign)
    return name


def read_label(answer: str | None) -> str | None:
    """Return the label that an answer states, or None; more than one is none."""
    if answer is None:
        return None
    text = " ".join(re.findall(r"[A-Z]+", answer.upper()))
    patterns = {
        "SUPPORTS": r"\bSUPPORT(S|ED)?\b",
        "REFUTES": r"\bREFUTE(S|D)?\b",
        "NOT ENOUGH INFO": r"\bNOT ENOUGH INFO(RMATION)?\b",
    }
    stated = [label for label, pattern in patterns.items() if re.search(pattern, text)]
    return stated[0] if len(stated) == 1 else None


def label_right(answer: str | None, gold: str) -> bool:
    """Tell whether the answer states the gold label and no other."""
    return read_label(answer) == gold
