"""How many calls a threshold keeps by chance (method, section 5, "Calibrated threshold").

Every scored call is scored again with a result drawn from another call of the same tool. The share
of those that pass a threshold, over the share of real ones that do, estimates how many of the kept
calls would have been kept whatever their result said.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def false_keep_rate(
    gains: Sequence[float], nulls: Sequence[float], tau_f: float, null_share: float = 1.0
) -> float | None:
    """Estimated share of kept calls that pass `tau_f` by chance, at most 1.

    `null_share` is the share of the calls that were scored with another call's result. None when
    nothing passes or no call has been scored so.
    """
    if not nulls:
        return None
    kept = sum(gain >= tau_f for gain in gains)
    return _rate(kept, sum(null >= tau_f for null in nulls), null_share)


def threshold_for(
    gains: Sequence[float],
    nulls: Sequence[float],
    rate: float,
    floor: float = 0.0,
    null_share: float = 1.0,
) -> float | None:
    """The smallest gain >= `floor` whose estimated rate is within `rate`; None if there is none.

    Takes n log n steps: both lists are sorted once, and what passes a gain is counted by its place.
    """
    if not nulls:
        return None
    real = sorted(gain for gain in gains if gain >= floor)
    chance = sorted(null for null in nulls if null >= floor)
    for place, tau in enumerate(real):
        if place and real[place - 1] == tau:
            continue  # an equal gain: the same threshold again
        passing = len(chance) - bisect_left(chance, tau)
        estimate = _rate(len(real) - place, passing, null_share)
        if estimate is not None and estimate <= rate:
            return tau
    return None


def _rate(kept: int, by_chance: int, null_share: float) -> float | None:
    return min(1.0, by_chance / null_share / kept) if kept and null_share else None
