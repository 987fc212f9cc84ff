"""The table of the evaluated arms, from `08-evaluation/results.json`, for the report page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ArmsTable:
    """`rows`: (measure, one cell per arm); a cell is empty where an arm has no such measure."""

    arms: list[str]
    rows: list[tuple[str, list[str]]]


def arms_table(results: Any) -> ArmsTable:
    """Accuracy per kind of question, call rate, failed calls and perplexity of every arm.

    An evaluation that is not there or has no arms gives an empty table.
    """
    arms = results.get("arms") if isinstance(results, Mapping) else None
    if not isinstance(arms, Mapping):
        return ArmsTable([], [])
    own = [measures if isinstance(measures, Mapping) else {} for measures in arms.values()]
    kinds = dict.fromkeys(kind for measures in own for kind in measures.get("tasks", {}))
    rows = []
    for kind in kinds:
        tasks = [m.get("tasks", {}).get(kind) for m in own]
        n = max(task.get("n", 0) for task in tasks if task)
        rows.append((f"{kind}, % right of {n:,}", [_accuracy(task) for task in tasks]))
    overall = [m.get("overall") or {} for m in own]
    rows += [
        ("all, % right", [_accuracy(item) for item in overall]),
        ("% of questions with a call", [_share(item.get("call_rate")) for item in overall]),
        ("calls without a result", [_failed(item) for item in overall]),
        ("held-out perplexity", [_perplexity(m) for m in own]),
    ]
    rows = [(name, cells) for name, cells in rows if any(cells)]
    return ArmsTable([str(arm).replace("_", " ") for arm in arms], rows)


def _accuracy(task: Any) -> str:
    if not task or not task.get("n"):
        return ""
    error = 100 * task["standard_error"]
    return f"{100 * task['accuracy']:.1f} ± {error:.1f}"


def _share(value: Any) -> str:
    return "" if value is None else f"{100 * value:.0f}"


def _failed(overall: Mapping[str, Any]) -> str:
    calls = overall.get("calls")
    return f"{overall['failed_calls']:,} of {calls:,}" if calls else ""


def _perplexity(measures: Mapping[str, Any]) -> str:
    value = measures.get("perplexity")
    if value is None:
        return ""
    error = measures.get("perplexity_standard_error")
    return f"{value:.2f}" + ("" if error is None else f" ± {error:.2f}")
