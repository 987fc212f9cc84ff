"""The distribution of gains against that of gains by chance, per tool.

`gain_null` is the gain of the same call with a result drawn from another call of the tool, so its
distribution tells how many calls a threshold keeps by chance (method, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.calibration import false_keep_rate
from pipeline.config import Config, FalseKeepRate
from pipeline.shards import RunFolder


@dataclass(frozen=True)
class GainSummary:
    """Gains of one tool in nats; `tau_f` is None where there is no threshold (yet)."""

    tool: str
    gains: NDArray[np.float64]
    nulls: NDArray[np.float64]
    tau_f: float | None
    null_share: float = 1.0  # of the calls, those scored with another call's result

    @property
    def passing(self) -> int:
        """How many calls reach the threshold."""
        return 0 if self.tau_f is None else int((self.gains >= self.tau_f).sum())

    @property
    def passing_by_chance(self) -> int:
        """How many of them would reach it with a result that is not theirs."""
        return 0 if self.tau_f is None else int((self.nulls >= self.tau_f).sum())

    @property
    def false_keep_rate(self) -> float | None:
        """Estimated share of the calls over the threshold that are there by chance."""
        if self.tau_f is None or not len(self.nulls):
            return None
        return false_keep_rate(
            self.gains.tolist(), self.nulls.tolist(), self.tau_f, self.null_share
        )


def gain_summaries(folder: RunFolder, config: Config, calls: pa.Table | None) -> list[GainSummary]:
    """Return the gains of every tool that has scored calls, in the order of the configuration."""
    if calls is None or "gain" not in calls.column_names:
        return []
    found = []
    for tool in config.tool_names:
        own = calls.filter(pc.field("tool") == tool)
        gains = _numbers(own["gain"])
        if len(gains):
            tau = threshold(folder, config, tool)
            nulls, share = _numbers(own["gain_null"]), config.score.null_share
            found.append(GainSummary(tool, gains, nulls, tau, share))
    return found


def _numbers(column: pa.ChunkedArray) -> NDArray[np.float64]:
    return np.asarray(column.drop_null().to_numpy(), dtype=np.float64)


def threshold(folder: RunFolder, config: Config, tool: str) -> float | None:
    """Return the threshold of a tool: the one that was used, else the one that is asked for.

    None where it is not known yet, or where no threshold reaches the wanted false-keep rate.
    """
    for part in folder.parts("select"):
        used = (folder.read_marker("select", *part) or {}).get("tau_f", {})
        if tool in used:
            return used[tool]
    tau = config.select.tau_of(tool)
    return None if isinstance(tau, FalseKeepRate) else float(tau)
