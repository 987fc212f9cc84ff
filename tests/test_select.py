"""Selection: thresholds, the look-ahead rule, duplicates, conflicts, caps, each by hand."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny

from pipeline.calibration import false_keep_rate, threshold_for
from pipeline.context import Context
from pipeline.leaks import lookahead_leak
from pipeline.records import REASONS, Document, ScoredCall, SelectedCall, call_id, to_table
from pipeline.stages import select

TEXT = "The farm sold 37 crates with 24 bottles each, so 888 bottles in all. Lyon bought 12."


def scored(
    before: str,
    arguments: str,
    gain: float | None,
    *,
    tool: str = "Calculator",
    text: str = TEXT,
    result: str | None = "888",
    gain_null: float | None = None,
    **changes: Any,
) -> ScoredCall:
    doc_id = tiny.document(text).doc_id
    start = text.index(before)
    values: dict[str, Any] = {
        "call_id": call_id(doc_id, tool, start, arguments),
        "doc_id": doc_id,
        "tool": tool,
        "char_start": start,
        "token_index": start,
        "arguments": arguments,
        "sample_count": 1,
        "p_api": 0.1,
        "loss_none": 2.0,
        "result": result,
        "error_kind": None if result is not None else "syntax",
        "error": None if result is not None else "no",
        "seconds": 0.0,
        "cached": False,
        "loss_call": 2.0 if gain is not None else None,
        "loss_result": 2.0 - gain if gain is not None else None,
        "gain": gain,
        "gain_null": gain_null,
    }
    return ScoredCall(**{**values, **changes})


def decide(
    inputs: Path,
    folder: Path,
    calls: list[ScoredCall],
    texts: tuple[str, ...] = (TEXT,),
    **changes: Any,
) -> dict[str, str]:
    """Reasons by call id, with a threshold of 0.5 unless another is given."""
    options = {"tau_f": 0.5, **changes.pop("select", {})}
    context = context_of(inputs, folder, calls, texts, select=options, **changes)
    found = select.thresholds(context)
    documents = [tiny.document(text) for text in texts]
    reasons = select.decide([(calls, documents)], found, context)
    kept = list(select.run(calls, reasons, context))
    assert [call.call_id for call in kept] == [call.call_id for call in calls]
    assert all(call.kept == (call.reason == "kept") for call in kept)
    assert all(call.reason in REASONS for call in kept)
    assert {tool: dict(Counter(c.reason for c in kept if c.tool == tool)) for tool in
            {c.tool for c in kept}} == context.counts  # fmt: skip
    return reasons


def context_of(
    inputs: Path, folder: Path, calls: list[ScoredCall], texts: tuple[str, ...], **changes: Any
) -> Context:
    config = tiny.make_config(inputs, **changes)
    context = tiny.make_context(folder, config)
    marker = {"fingerprint": "print"}
    context.folder.write_part("score", 0, 1, to_table(calls, ScoredCall), marker)
    documents = [tiny.document(text) for text in texts]
    context.folder.write_part("ingest", 0, 1, to_table(documents, Document), marker)
    return context


# -- the rule of the filter -----------------------------------------------------------------------


def test_kept_iff_the_gain_reaches_tau_f(inputs: Path, tmp_path: Path) -> None:
    calls = [
        scored(" 888", "37 * 24", 0.5),  # equal is enough
        scored(" bottles each", "37 * 24", 0.4999999),
        scored(" in all", "37 * 24", -3.0),
        scored(" so", "37 * 24", None),  # a bound proved that it gains less
        scored(" all", "37 *", None, result=None),
        scored(" Lyon", "37 + 24", 7.0),
    ]
    reasons = decide(inputs, tmp_path, calls)
    assert [reasons[call.call_id] for call in calls] == [
        "kept", "below_threshold", "below_threshold", "below_threshold", "tool_error", "kept"
    ]  # fmt: skip


def test_thresholds_of_single_tools(inputs: Path, tmp_path: Path) -> None:
    calls = [
        scored(" 888", "37 * 24", 0.6),
        scored(" bottles in", "", 0.6, tool="Calendar"),
        scored(" each", "farm", 0.6, tool="WikiSearch"),
    ]
    options = {"per_tool": {"Calendar": 0.7, "WikiSearch": 0.1}}
    reasons = decide(inputs, tmp_path, calls, select=options)
    assert [reasons[c.call_id] for c in calls] == ["kept", "below_threshold", "kept"]


# -- look-ahead -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "before", "leak"),
    [
        ("37 * 24", " 888", None),
        ("888 / 24", " 888", "888"),  # the answer itself, from the future
        ("888 / 24", " bottles in", None),  # it has been said by then
        ("37 * 24", " with 24", "24"),
        ("37 * 25", " with 24", None),  # stands nowhere: made up, not taken from the future
        ("37 * 2", " with 24", None),  # 2 is not 24
        ("12 + 1", " 888", "12"),
        ("Lyon", " 888", "lyon"),
        ("lyon's history", " 888", "lyon"),
        ("bottles in the farm", " 888", None),
        ("all of them", " 888", None),  # common words do not count
        ("Rome", " 888", None),
        ('"in all" of', " 888", "in all"),
        ('q="bottles in all", n=3', " 888", "bottles in all"),
        ("", " 888", None),
    ],
)
def test_leaks(arguments: str, before: str, leak: str | None) -> None:
    assert lookahead_leak(arguments, TEXT, TEXT.index(before)) == leak


@pytest.mark.parametrize(
    ("text", "arguments", "leak"),
    [
        ("It cost | 1,250 euros.", "1250 / 5", "1250"),
        ("It cost 1,250 euros | of 1250.", "1250 / 5", None),
        ("It is | 0.50 of it.", "0.5 * 3", "0.5"),
        ("It is | .5 of it.", "0.5 * 3", "0.5"),
        ("Agent 7 saw | agent 007.", "7 + 1", None),
        ("He saw | “The Old Mill” again.", "“The Old Mill”", "the old mill"),
        ("He saw | Zürich’s lake.", "Zürich", "zürich"),
        ("He saw ZÜRICH, | Zürich again.", "Zürich", None),
        ("In | 1961 and 1628.", "1628 - 1961", "1628"),
    ],
)
def test_leaks_in_other_spellings(text: str, arguments: str, leak: str | None) -> None:
    at = text.index("|")
    assert lookahead_leak(arguments, text.replace("|", ""), at) == leak


def test_leaks_are_rejected_unless_they_are_allowed(inputs: Path, tmp_path: Path) -> None:
    calls = [scored(" 888", "888 / 24", 3.0, result="37"), scored(" bottles each", "37 * 1", 1.0)]
    reasons = decide(inputs, tmp_path / "1", calls)
    assert [reasons[c.call_id] for c in calls] == ["lookahead_leak", "kept"]
    reasons = decide(inputs, tmp_path / "2", calls, select={"lookahead": "allow"})
    assert [reasons[c.call_id] for c in calls] == ["kept", "kept"]
    # what is below the threshold anyway is no leak
    reasons = decide(inputs, tmp_path / "3", calls, select={"tau_f": 4.0})
    assert set(reasons.values()) == {"below_threshold"}


# -- duplicates, conflicts, ties, caps ------------------------------------------------------------


def test_equal_calls_at_one_place(inputs: Path, tmp_path: Path) -> None:
    calls = [
        scored(" 888", "37*24", 1.0),
        scored(" 888", "37 * 24", 2.0),
        scored(" 888", "37 *24", 0.1),
        scored(" in all", "37*24", 1.5),  # elsewhere
    ]
    reasons = decide(inputs, tmp_path, calls)
    assert [reasons[c.call_id] for c in calls] == ["duplicate", "kept", "below_threshold", "kept"]


def test_the_largest_gain_wins_across_tools(inputs: Path, tmp_path: Path) -> None:
    calls = [
        scored(" 888", "37 * 24", 1.0),
        scored(" 888", "farm", 3.0, tool="WikiSearch"),
        scored(" 888", "", 2.0, tool="Calendar"),
        scored(" 888", "37 + 24", 0.9),
        scored(" in all", "37 + 24", 0.9),
    ]
    for order in (calls, calls[::-1]):
        folder = tmp_path / str(order is calls)
        reasons = decide(inputs, folder, order)
        assert [reasons[c.call_id] for c in calls] == [
            "conflict",
            "kept",
            "conflict",
            "conflict",
            "kept",
        ]


def test_ties_go_by_call_id_whatever_the_order(inputs: Path, tmp_path: Path) -> None:
    calls = [scored(" 888", f"37 * 24 + {n}", 1.0) for n in range(6)]
    winner = min(calls, key=lambda c: c.call_id)
    for seed in range(4):
        mixed = random.Random(seed).sample(calls, len(calls))
        reasons = decide(inputs, tmp_path / str(seed), mixed)
        assert [c.call_id for c in calls if reasons[c.call_id] == "kept"] == [winner.call_id]


def test_cap_per_document(inputs: Path, tmp_path: Path) -> None:
    other = "Of 37 and 24 make 61 in this other text."
    calls = [
        scored(" 888", "37 * 24", 1.0),
        scored(" in all", "37 * 24", 3.0),
        scored(" Lyon", "37 * 24", 2.0),
        scored(" 61", "37 + 24", 0.6, text=other),
    ]
    options = {"max_calls_per_document": 2}
    reasons = decide(inputs, tmp_path, calls, (TEXT, other), select=options)
    assert [reasons[c.call_id] for c in calls] == ["over_cap", "kept", "kept", "kept"]


def test_cap_per_tool_over_the_whole_run(inputs: Path, tmp_path: Path) -> None:
    texts = tuple(f"{TEXT} Number {n}." for n in range(5))
    gains = [1.0, 5.0, 2.0, 4.0, 3.0]
    calls = [scored(" 888", "37 * 24", g, text=t) for t, g in zip(texts, gains, strict=True)]
    calls += [scored(" in all", "", 0.6, text=texts[0], tool="Calendar")]
    reasons = decide(inputs, tmp_path, calls, texts, select={"max_calls_per_tool": 3})
    found = [reasons[c.call_id] for c in calls]
    assert found == ["over_cap", "kept", "over_cap", "kept", "kept", "kept"]


def test_what_loses_a_conflict_does_not_use_up_the_cap(inputs: Path, tmp_path: Path) -> None:
    calls = [
        scored(" 888", "37 * 24", 3.0),
        scored(" 888", "37 + 24", 2.0),
        scored(" in all", "37 * 24", 1.0),
    ]
    reasons = decide(inputs, tmp_path, calls, select={"max_calls_per_document": 2})
    assert [reasons[c.call_id] for c in calls] == ["kept", "conflict", "kept"]


def test_decisions_do_not_depend_on_shards(inputs: Path, tmp_path: Path) -> None:
    draw = random.Random(3)
    texts = tuple(f"{TEXT} Number {n}." for n in range(8))
    calls = [
        scored(before, f"37 {sign} 24", round(draw.uniform(-1, 2), 1), text=text)
        for text in texts
        for before in (" 888", " in all", " Lyon")
        for sign in "+-*/"
    ]
    config = {"select": {"tau_f": 0.5, "max_calls_per_tool": 9, "max_calls_per_document": 2}}
    context = context_of(inputs, tmp_path, calls, texts, **config)
    found = select.thresholds(context)
    documents = {tiny.document(text).doc_id: tiny.document(text) for text in texts}
    whole = select.decide([(calls, list(documents.values()))], found, context)
    ids = list(documents)
    parts = [
        ([c for c in calls if c.doc_id in ids[n::3]], [documents[i] for i in ids[n::3]])
        for n in range(3)
    ]
    assert select.decide(parts, found, context) == whole
    assert Counter(whole.values())["kept"] == 9 and len(set(whole.values())) >= 3


# -- calibration ----------------------------------------------------------------------------------


def test_false_keep_rate_by_hand() -> None:
    gains = [2.0, 1.0, 0.6, 0.5, 0.1, -1.0]
    nulls = [0.7, 0.5, 0.2, 0.0, -0.5, -2.0]
    assert false_keep_rate(gains, nulls, 0.5) == pytest.approx(2 / 4)
    assert false_keep_rate(gains, nulls, 0.6) == pytest.approx(1 / 3)
    assert false_keep_rate(gains, nulls, 1.0) == 0.0
    assert false_keep_rate(gains, nulls, 3.0) is None  # nothing is kept
    assert false_keep_rate(gains, [5.0] * 6, 0.5) == 1.0  # never above 1
    assert false_keep_rate(gains, [], 0.5) is None
    # a quarter of the calls was scored so: each stands for four
    assert false_keep_rate(gains, [0.7, -1.0], 0.5, 0.25) == pytest.approx(1.0)
    assert false_keep_rate([2.0] * 40, [0.7] + [-1.0] * 9, 0.5, 0.25) == pytest.approx(4 / 40)


def test_threshold_for_a_wanted_rate() -> None:
    gains = [2.0, 1.0, 0.6, 0.5, 0.1, -1.0]
    nulls = [0.7, 0.5, 0.2, 0.0, -0.5, -2.0]
    assert threshold_for(gains, nulls, 0.5) == 0.5
    assert threshold_for(gains, nulls, 0.4) == 0.6
    assert threshold_for(gains, nulls, 0.01) == 1.0
    assert threshold_for(gains, nulls, 0.5, floor=0.55) == 0.6
    assert threshold_for(gains, [9.0] * 6, 0.5) is None
    assert threshold_for([-1.0], [-2.0], 0.5) is None  # a gain below zero is never kept
    assert threshold_for([], [], 0.5) is None


def naive_threshold(
    gains: list[float], nulls: list[float], rate: float, floor: float, share: float
) -> float | None:
    """Every gain tried with the rate computed anew."""
    for tau in sorted({gain for gain in gains if gain >= floor}):
        estimate = false_keep_rate(gains, nulls, tau, share)
        if estimate is not None and estimate <= rate:
            return tau
    return None


def test_threshold_for_agrees_with_trying_every_gain() -> None:
    draw = random.Random(11)
    found = Counter[bool]()
    for _ in range(400):
        # of few values, so that there are ties within the lists and between them
        values = [draw.gauss(0.3, 1) for _ in range(6)] + [0.0, float("nan")]
        gains = draw.choices(values, k=draw.randrange(12))
        nulls = draw.choices([v - draw.choice((0, 0.5)) for v in values], k=draw.randrange(12))
        asked = (draw.random() ** 2, draw.choice((0.0, -1.0, values[0])), draw.choice((1.0, 0.25)))
        answer = threshold_for(gains, nulls, *asked)
        assert answer == naive_threshold(gains, nulls, *asked)
        found[answer is None] += 1
    assert min(found[True], found[False]) > 50


def test_threshold_for_does_not_compare_every_pair() -> None:
    compared = 0

    class Counted(float):
        def __lt__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return float(self) < other  # type: ignore[operator]

        def __ge__(self, other: object) -> bool:
            return not self < other

    draw, n = random.Random(3), 2000
    gains, nulls = ([Counted(draw.random()) for _ in range(n)] for _ in range(2))
    assert threshold_for(gains, [*nulls, Counted(2.0)], 1e-9) is None
    assert compared < 8 * n * 11  # n log n; every pair would be n * n = 4,000,000


def test_calibrated_threshold_in_a_run(inputs: Path, tmp_path: Path) -> None:
    texts = tuple(f"{TEXT} Number {n}." for n in range(6))
    gains = [2.0, 1.0, 0.6, 0.5, 0.1, -1.0]
    nulls = [0.7, 0.5, 0.2, 0.0, -0.5, -2.0]
    calls = [
        scored(" 888", "37 * 24", gain, text=text, gain_null=null)
        for text, gain, null in zip(texts, gains, nulls, strict=True)
    ]
    # the other tool has no null distribution: its wanted rate cannot be shown, nothing is kept
    calls.append(scored(" in all", "", 2.0, text=texts[0], tool="Calendar"))
    options = {"tau_f": {"false_keep_rate": 0.4}}
    context = context_of(inputs, tmp_path / "t", calls, texts, select=options)
    found = select.thresholds(context)
    assert found["Calculator"] == select.Threshold(0.6, pytest.approx(1 / 3))
    assert found["Calendar"] == select.Threshold(None, None)
    reasons = decide(inputs, tmp_path / "d", calls, texts, select=options)
    assert [reasons[c.call_id] for c in calls] == ["kept"] * 3 + ["below_threshold"] * 4
    fixed = select.thresholds(
        context_of(inputs, tmp_path / "f", calls, texts, select={"tau_f": 0.5})
    )
    assert fixed["Calculator"] == select.Threshold(0.5, 0.5)  # reported for given ones too


def test_records_of_a_decision_extend_those_of_the_score(inputs: Path, tmp_path: Path) -> None:
    calls = [scored(" 888", "37 * 24", 0.5)]
    context = context_of(inputs, tmp_path, calls, (TEXT,), select={"tau_f": 0.5})
    (row,) = select.run(calls, {calls[0].call_id: "kept"}, context)
    assert isinstance(row, SelectedCall)
    assert {k: v for k, v in vars(row).items() if k not in ("kept", "reason")} == vars(calls[0])
