"""The table of the evaluated arms, from `08-evaluation/results.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_VALUES = ("mean", "value", "score", "accuracy")
_ERRORS = ("standard_error", "stderr", "se")


@dataclass(frozen=True)
class ArmsTable:
    """`rows`: (measure, one cell per arm); a cell is empty where an arm has no such measure."""

    arms: list[str]
    rows: list[tuple[str, list[str]]]


def arms_table(results: Any) -> ArmsTable:
    """Flatten `{"arms": {arm: measures}}`; nested measures are named by their path.

    A mapping with a value and its standard error is one measure. An evaluation that is not there
    or has no arms gives an empty table.
    """
    arms = results.get("arms") if isinstance(results, Mapping) else None
    if not isinstance(arms, Mapping):
        return ArmsTable([], [])
    cells = {str(arm): dict(_measures(values)) for arm, values in arms.items()}
    names = dict.fromkeys(name for own in cells.values() for name in own)
    rows = [(name, [own.get(name, "") for own in cells.values()]) for name in names]
    return ArmsTable([arm.replace("_", " ") for arm in cells], rows)


def _measures(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(values, bool):
        return
    if isinstance(values, int | float):
        yield path.replace("_", " "), number(values)
        return
    if not isinstance(values, Mapping):
        return
    value = next((key for key in _VALUES if _is_number(values.get(key))), None)
    error = next((key for key in _ERRORS if _is_number(values.get(key))), None)
    if value is not None and error is not None:
        text = f"{number(values[value])} ± {number(values[error])}"
        yield path.replace("_", " "), text
    for key, item in values.items():
        if value is None or error is None or key not in (value, error):
            yield from _measures(item, f"{path}: {key}" if path else str(key))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: float) -> str:
    """Write a number with the digits that a reader compares."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
