"""Errors, paired comparisons, and the table of the arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def binomial_error(correct: int, n: int) -> float:
    """Standard error of a share."""
    return math.sqrt(correct * (n - correct) / n**3) if n else 0.0


def perplexity_of(losses: Sequence[float], tokens: Sequence[int]) -> tuple[float, float | None]:
    """Perplexity over documents (summed loss in nats and tokens of each) and its standard error.

    The error is a bootstrap over documents, 1,000 draws from a fixed seed; of one document there is
    none.
    """
    loss, count = np.asarray(losses), np.asarray(tokens)
    if len(loss) < 2:
        return float(np.exp(loss.sum() / count.sum())), None
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
