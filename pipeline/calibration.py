"""How many calls a threshold keeps by chance (method, section 5, "Calibrated threshold").

Every scored call is scored again with a result drawn from another call of the same tool. The share
of those that pass a threshold, over the share of real ones that do, estimates how many of the kept
calls would have been kept whatever their result said.
"""

from __future__ import annotations

from collections.abc import Sequence


def false_keep_rate(
    gains: Sequence[float], nulls: Sequence[float], tau_f: float, null_share: float = 1.0
) -> float | None:
    """Estimated share of kept calls that pass `tau_f` by chance, at most 1.

    `null_share` is the share of the calls that were scored with another call's result. None when
    nothing passes or no call has been scored so.
    """
    kept = sum(gain >= tau_f for gain in gains)
    if not kept or not nulls or not null_share:
        return None
    return min(1.0, sum(null >= tau_f for null in nulls) / null_share / kept)


def threshold_for(
    gains: Sequence[float],
    nulls: Sequence[float],
    rate: float,
    floor: float = 0.0,
    null_share: float = 1.0,
) -> float | None:
    """The smallest gain >= `floor` whose estimated rate is within `rate`; None if there is none."""
    for tau in sorted({gain for gain in gains if gain >= floor}):
        estimate = false_keep_rate(gains, nulls, tau, null_share)
        if estimate is not None and estimate <= rate:
            return tau
    return None
