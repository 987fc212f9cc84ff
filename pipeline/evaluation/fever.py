"""FEVER: claims to be called SUPPORTS, REFUTES or NOT ENOUGH INFO; label accuracy."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pipeline.agent.environments.encyclopedia import Question
from pipeline.errors import ConfigError

MAX_STEPS = 5  # of the ReAct paper
LABELS = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")


def load_fever(path: Path, limit: int | None = None) -> list[Question]:
    """Read claims with their labels; raises ConfigError naming the line that has none."""
    questions = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines[:limit], start=1):
        try:
            row = json.loads(line)
            questions.append(Question(str(row["id"]), row["claim"], row["label"], heading="Claim"))
        except (ValueError, KeyError, TypeError):
            row = {}
        if row.get("label") not in LABELS or not row.get("claim"):
            raise ConfigError(f"{path}:{number}: a claim with a label of {', '.join(LABELS)}")
    return questions


def evidence_titles(path: Path) -> set[str]:
    """The titles of all pages that the claims' evidence names."""
    titles = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        for group in json.loads(line)["evidence"]:
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
