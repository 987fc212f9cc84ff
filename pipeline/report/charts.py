"""Charts of the report as inline SVG; colours come from the style sheet of the page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from pipeline.report.gains import GainSummary

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 30, 40
BINS = 48


@dataclass(frozen=True)
class Axes:
    """Where a gain and a count lie in the drawing; counts are on the scale log(1 + count)."""

    low: float
    high: float
    top: float

    def x(self, gain: float) -> float:
        return LEFT + (gain - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)

    def y(self, count: float) -> float:
        share = math.log1p(count) / math.log1p(self.top)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def gain_histogram(summary: GainSummary) -> str:
    """Draw the gains as bars, the gains by chance as a line, the threshold as a vertical line.

    The counts are on a logarithmic axis, for the calls that are kept are the rare ones. Values
    outside of the axis are counted in its first and last bar.
    """
    edges = _edges(summary)
    real = _counts(summary.gains, edges)
    null = _counts(summary.nulls, edges)
    if len(summary.nulls):
        null = null * (len(summary.gains) / len(summary.nulls))
    axes = Axes(float(edges[0]), float(edges[-1]), max(float(real.max()), float(null.max()), 10.0))
    label = escape(f"Gains of {summary.tool}: {len(summary.gains)} calls, {summary.passing} pass")
    drawing = [
        _count_axis(axes),
        _gain_axis(axes),
        _bars(real, edges, axes, summary.tau_f),
        _steps(null, edges, axes) if len(summary.nulls) else "",
        _threshold(axes, summary.tau_f) if summary.tau_f is not None else "",
    ]
    return (
        f'<svg class="histogram" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(drawing)}</svg>"
    )


def _edges(summary: GainSummary) -> NDArray[np.float64]:
    """Cut the axis into bars; the threshold is the border of two, so no bar is on both sides."""
    values = np.concatenate([summary.gains, summary.nulls])
    low, high = (float(v) for v in np.percentile(values, [0.5, 99.8]))
    border = 0.0 if summary.tau_f is None else summary.tau_f
    low, high = min(low, border - 0.1), max(high, border + 0.1)
    width = (high - low) / BINS
    first, last = math.floor((low - border) / width), math.ceil((high - border) / width) + 1
    return border + width * np.arange(first, last + 1, dtype=np.float64)


def _counts(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = np.clip(values, edges[0], edges[-1])
    return np.histogram(clipped, edges)[0].astype(np.float64)


def _bars(
    counts: NDArray[np.float64], edges: NDArray[np.float64], axes: Axes, tau_f: float | None
) -> str:
    bars = []
    for index, count in enumerate(counts):
        if count:
            left, right, top = axes.x(edges[index]), axes.x(edges[index + 1]), axes.y(count)
            over = tau_f is not None and (edges[index] + edges[index + 1]) / 2 >= tau_f
            bars.append(
                f'<rect class="{"bar over" if over else "bar"}" x="{left + 0.5:.1f}" '
                f'y="{top:.1f}" width="{right - left - 1:.1f}" height="{axes.y(0) - top:.1f}">'
                f"<title>gain {edges[index]:.2f} to {edges[index + 1]:.2f}: {int(count)} calls"
                "</title></rect>"
            )
    return "".join(bars)


def _steps(counts: NDArray[np.float64], edges: NDArray[np.float64], axes: Axes) -> str:
    points = [f"M{axes.x(edges[0]):.1f} {axes.y(0):.1f}"]
    for index, count in enumerate(counts):
        points.append(f"V{axes.y(count):.1f}H{axes.x(edges[index + 1]):.1f}")
    return f'<path class="null" d="{"".join(points)}V{axes.y(0):.1f}"/>'


def _threshold(axes: Axes, tau_f: float) -> str:
    at = axes.x(tau_f)
    anchor, shift = ("end", -5) if at > WIDTH * 0.8 else ("start", 5)
    return (
        f'<line class="tau" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 20}" y2="{axes.y(0):.1f}"/>'
        f'<text class="tau" x="{at + shift:.1f}" y="{TOP - 11}" text-anchor="{anchor}">'
        f"tau_f {tau_f:.2f}</text>"
    )


def _count_axis(axes: Axes) -> str:
    marks = [f'<text class="axis" x="{LEFT - 6}" y="{TOP - 14}" text-anchor="end">calls</text>']
    for count in [0, *(10**power for power in range(12) if 10**power <= axes.top)]:
        at = axes.y(count)
        marks.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="axis" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{count:,}</text>'
        )
    return "".join(marks)


def _gain_axis(axes: Axes) -> str:
    span = axes.high - axes.low
    unit = 10 ** math.floor(math.log10(span / 4))
    step = next(unit * m for m in (1, 2, 5, 10) if span / (unit * m) <= 9)
    base = HEIGHT - BOTTOM
    marks = [
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" '
        'text-anchor="middle">gain in nats</text>'
    ]
    for index in range(math.ceil(axes.low / step), math.floor(axes.high / step) + 1):
        at = axes.x(index * step)
        marks.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>'
            f'<text class="axis" x="{at:.1f}" y="{base + 17}" text-anchor="middle">'
            f"{index * step:g}</text>"
        )
    return "".join(marks)
