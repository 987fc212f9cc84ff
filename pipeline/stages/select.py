"""Stage `select`: which calls are kept, and why the others are not (method, sections 4 and 5).

    callsieve select CONFIG --run-dir RUN

Cheap: no model, no tool. The reasons are given in this order: tool_error, below_threshold,
lookahead_leak, duplicate (equal call at the same place), conflict (a better call at the same
place), over_cap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.calibration import false_keep_rate, threshold_for
from pipeline.config import FalseKeepRate
from pipeline.context import Context
from pipeline.leaks import lookahead_leak
from pipeline.records import Document, ScoredCall, SelectedCall, extend


@dataclass(frozen=True)
class Threshold:
    """The tau_f used for a tool and the share of kept calls that it keeps by chance."""

    tau_f: float | None
    false_keep_rate: float | None


def thresholds(context: Context) -> dict[str, Threshold]:
    """The threshold of each tool: as given, or found from the null distribution.

    A tau_f of None keeps nothing: no threshold reaches the wanted rate.
    """
    table = context.folder.read_all("score", ["tool", "gain", "gain_null"])
    gains: dict[str, list[float]] = defaultdict(list)
    nulls: dict[str, list[float]] = defaultdict(list)
    for row in table.to_pylist():
        if row["gain"] is not None:
            gains[row["tool"]].append(row["gain"])
        if row["gain_null"] is not None:
            nulls[row["tool"]].append(row["gain_null"])
    found = {}
    share = context.config.score.null_share
    for tool in context.config.tool_names:
        wanted = context.config.select.tau_of(tool)
        tau: float | None
        if isinstance(wanted, FalseKeepRate):
            floor = context.config.gain_floor or 0.0
            tau = threshold_for(gains[tool], nulls[tool], wanted.false_keep_rate, floor, share)
        else:
            tau = float(wanted)
        rate = None if tau is None else false_keep_rate(gains[tool], nulls[tool], tau, share)
        found[tool] = Threshold(tau, rate)
    return found


def decide(
    shards: Iterable[tuple[list[ScoredCall], list[Document]]],
    found: Mapping[str, Threshold],
    context: Context,
) -> dict[str, str]:
    """Return the reason of every call of the run, by call_id.

    Whole-run rules (the cap per tool) make this one pass over all shards; only what passed the
    cheap rules is remembered.
    """
    reasons: dict[str, str] = {}
    passed: list[ScoredCall] = []
    for calls, documents in shards:
        text = {d.doc_id: d.text for d in documents}
        for call in calls:
            reason = _alone(call, text[call.doc_id], found[call.tool], context)
            reasons[call.call_id] = reason
            if reason == "kept":
                passed.append(call)
    passed = _best_of(passed, _same_call, "duplicate", reasons)
    passed = _best_of(passed, _same_place, "conflict", reasons)
    select = context.config.select
    passed = _cap(passed, lambda c: c.doc_id, select.max_calls_per_document, reasons)
    _cap(passed, lambda c: c.tool, select.max_calls_per_tool, reasons)
    return reasons


def run(
    calls: list[ScoredCall], reasons: Mapping[str, str], context: Context
) -> Iterator[SelectedCall]:
    """Write the decisions of one shard, in the order of the scored calls."""
    for call in calls:
        reason = reasons[call.call_id]
        context.count(call.tool, reason)
        yield extend(call, SelectedCall, kept=reason == "kept", reason=reason)


def _alone(call: ScoredCall, text: str, threshold: Threshold, context: Context) -> str:
    """The rules that need no other call."""
    if call.result is None:
        return "tool_error"
    # L- - L+ >= tau_f (method, section 4); no gain = a bound proved that it is too small
    if call.gain is None or threshold.tau_f is None or call.gain < threshold.tau_f:
        return "below_threshold"
    if context.config.select.lookahead == "reject" and lookahead_leak(
        call.arguments, text, call.char_start
    ):
        return "lookahead_leak"
    return "kept"


def _rank(call: ScoredCall) -> tuple[float, str]:
    """Largest gain first; ties by call id."""
    return (-(call.gain or 0.0), call.call_id)


def _same_call(call: ScoredCall) -> tuple[object, ...]:
    spelled = "".join(call.arguments.split()).replace(",", "").lower()
    return (call.doc_id, call.char_start, call.tool, spelled)


def _same_place(call: ScoredCall) -> tuple[object, ...]:
    return (call.doc_id, call.char_start)


def _best_of(
    calls: list[ScoredCall],
    group_of: Callable[[ScoredCall], tuple[object, ...]],
    reason: str,
    reasons: dict[str, str],
) -> list[ScoredCall]:
    """Keep the best call of each group; the others get the reason."""
    best: dict[tuple[object, ...], ScoredCall] = {}
    for call in sorted(calls, key=_rank):
        if best.setdefault(group_of(call), call) is not call:
            reasons[call.call_id] = reason
    return list(best.values())


def _cap(
    calls: list[ScoredCall],
    group_of: Callable[[ScoredCall], str],
    most: int | None,
    reasons: dict[str, str],
) -> list[ScoredCall]:
    """Keep the calls with the largest gains up to a number per group."""
    if most is None:
        return calls
    kept: list[ScoredCall] = []
    number: dict[str, int] = defaultdict(int)
    for call in sorted(calls, key=_rank):
        number[group_of(call)] += 1
        if number[group_of(call)] <= most:
            kept.append(call)
        else:
            reasons[call.call_id] = "over_cap"
    return kept
