"""Interleaved measurements: our path and its baselines in turn, in one process, on the same work.

A pair is one run of ours and one of a baseline right after each other, in changing order, so that
whatever else the machine does hits both. What counts is the median of the pairs' ratios. The same
ratio in CPU seconds stands beside the machine: on one that others use too it is the steadier one.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

UNITS = {
    "ingest": "documents",
    "sample": "samples",
    "score": "candidates",
    "train": "tokens",
    "agent": "episodes",
}
Timed = Callable[[], float]
"""Does the work once; returns how much of it was done, in the unit of the bench (`UNITS`)."""


@dataclass(frozen=True)
class Rate:
    """Work per second by the clock, and per second of CPU time (all threads together)."""

    per_s: float
    per_cpu_s: float


@dataclass(frozen=True)
class Comparison:
    """Ours against one baseline; ratios above 1 mean that ours is faster."""

    baseline: str
    ours: tuple[Rate, ...]
    theirs: tuple[Rate, ...]
    agrees: bool

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs by the clock, pair by pair."""
        return [a.per_s / b.per_s for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def cpu_ratio(self) -> float:
        """The median of the ratios in CPU seconds of this process."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return statistics.median(a.per_cpu_s / b.per_cpu_s for a, b in pairs)

    def as_dict(self) -> dict[str, Any]:
        """What `bench --json` prints of it."""
        return {
            "baseline": self.baseline,
            "ratio_median": round(statistics.median(self.ratios), 3),
            "ratio_min": round(min(self.ratios), 3),
            "ratio_max": round(max(self.ratios), 3),
            "ours_per_s": round(statistics.median(own.per_s for own in self.ours), 3),
            "baseline_per_s": round(statistics.median(own.per_s for own in self.theirs), 3),
            "agrees": self.agrees,
            "pairs": len(self.ratios),
        }


def timed(work: Timed) -> Rate:
    """Run once; returns work per second."""
    synchronise()
    began, cpu_began = time.perf_counter(), time.process_time()
    done = work()
    synchronise()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return Rate(done / seconds, done / max(cpu, 1e-9))


def rates(paths: Mapping[str, Timed], pairs: int) -> dict[str, list[Rate]]:
    """Work per second of every path, `pairs` times, the order turned by one each time."""
    names = list(paths)
    found: dict[str, list[Rate]] = {name: [] for name in names}
    for pair in range(pairs):
        turn = pair % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(timed(paths[name]))
            print(f"pair {pair + 1}: {name}: {found[name][-1].per_s:.3g}/s", file=sys.stderr)
    return found


def compare(
    ours: Timed, baselines: Mapping[str, Timed], agrees: Mapping[str, bool], pairs: int
) -> list[Comparison]:
    """Measure ours against every baseline in interleaved pairs."""
    found = rates({"ours": ours, **baselines}, pairs)
    return [
        Comparison(
            name,
            tuple(found["ours"]),
            tuple(found[name]),
            agrees[name],
        )
        for name in baselines
    ]


def growth(work: Callable[[int], object], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Time per document for growing numbers of documents, and its ratio to the first."""
    rows: list[dict[str, Any]] = []
    for documents in sizes:
        synchronise()
        began = time.perf_counter()
        work(documents)
        synchronise()
        rows.append(growth_row(documents, (time.perf_counter() - began) / documents, rows))
    return rows


def growth_row(
    documents: int, seconds_each: float, before: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One row of a growth table."""
    first = before[0]["seconds_per_document"] if before else seconds_each
    return {
        "documents": documents,
        "seconds_per_document": seconds_each,
        "ratio_to_first": round(seconds_each / first, 3),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(0) if cuda else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),  # others compete for the cores: read ratios only
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def synchronise() -> None:
    """Wait for the device, so that a clock measures the work and not its start."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def document(
    name: str,
    comparisons: Sequence[Comparison],
    ceiling_share: float | None,
    growth: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The document of one bench."""
    return {
        "name": name,
        "machine": {
            **machine(),
            "cpu_ratio_median": {own.baseline: round(own.cpu_ratio, 3) for own in comparisons},
        },
        "comparisons": [comparison.as_dict() for comparison in comparisons],
        "ceiling_share": None if ceiling_share is None else round(ceiling_share, 3),
        "growth": list(growth),
    }
