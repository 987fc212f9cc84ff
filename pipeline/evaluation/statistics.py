"""Errors, paired comparisons, and the table of the arms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ARM_TITLES = {
    "base": "base",
    "control": "control (texts without calls)",
    "tuned_disabled": "tuned, calls disabled",
    "tuned": "tuned",
}


def binomial_error(correct: int, n: int) -> float:
    """Standard error of a share."""
    return math.sqrt(correct * (n - correct) / n**3) if n else 0.0


def perplexity_of(losses: Sequence[float], tokens: Sequence[int]) -> tuple[float, float]:
    """Perplexity over documents (summed loss in nats and tokens of each) and its standard error.

    The error is a bootstrap over documents, 1,000 draws from a fixed seed.
    """
    loss, count = np.asarray(losses), np.asarray(tokens)
    draws = np.random.default_rng(0).integers(0, len(loss), (1000, len(loss)))
    samples = np.exp(loss[draws].sum(1) / count[draws].sum(1))
    return float(np.exp(loss.sum() / count.sum())), float(samples.std(ddof=1))


def compare(first: Sequence[bool], second: Sequence[bool]) -> dict[str, Any]:
    """Compare two arms on the same questions: the difference first - second, paired.

    `p_value` is McNemar's exact test, two-sided, on the questions that only one arm gets right.
    """
    n = len(first)
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    apart = only_first + only_second
    difference = (only_first - only_second) / n if n else 0.0
    variance = (apart - (only_first - only_second) ** 2 / n) / n**2 if n else 0.0
    tail = sum(math.comb(apart, i) for i in range(min(only_first, only_second) + 1))
    return {
        "n": n,
        "difference": difference,
        "standard_error": math.sqrt(max(variance, 0.0)),
        "only_first": only_first,
        "only_second": only_second,
        "p_value": min(1.0, 2 * tail / 2**apart),
    }


def print_arms(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print accuracy with its standard error, call rate and perplexity of every arm."""
    arms = results.get("arms") or {}
    if not arms:
        return
    console = console or Console()
    table = Table(title=f"{results.get('questions', 0)} questions", title_justify="left")
    table.add_column("arm")
    kinds = list(dict.fromkeys(kind for arm in arms.values() for kind in arm["tasks"]))
    for kind in kinds:
        table.add_column(f"{kind} (%)", justify="right")
    for title in ("with a call (%)", "failed calls", "perplexity"):
        table.add_column(title, justify="right")
    for name, arm in arms.items():
        cells = [_accuracy(arm["tasks"].get(kind)) for kind in kinds]
        overall = arm.get("overall") or {}
        calls, failed = overall.get("calls", 0), overall.get("failed_calls", 0)
        rate = f"{100 * overall.get('call_rate', 0.0):.0f}"
        table.add_row(
            ARM_TITLES.get(name, name),
            *cells,
            rate if name == "tuned" or calls else "-",
            f"{failed} of {calls}" if calls else "-",
            _plus_minus(arm.get("perplexity"), arm.get("perplexity_standard_error"), 2),
        )
    console.print(table)
    for item in results.get("comparisons") or ():
        if item["task"] == "overall" and item["n"]:
            console.print(
                f"{item['first']} - {item['second']}: {100 * item['difference']:+.1f} ± "
                f"{100 * item['standard_error']:.1f} points (p = {item['p_value']:.2g}, paired)"
            )


def _accuracy(task: Mapping[str, Any] | None) -> str:
    if not task or not task["n"]:
        return "-"
    return _plus_minus(100 * task["accuracy"], 100 * task["standard_error"], 1)


def _plus_minus(value: float | None, error: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + (f" ± {error:.{digits}f}" if error is not None else "")
