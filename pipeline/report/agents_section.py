"""The section "In the agent loop" of report.html: scores, cost, why runs ended, and runs.

The figures are those of `results["agents"]` (`evaluation.agents`); a field that a row does not have
is left empty. The runs are some of `08-evaluation/agent-traces.jsonl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.report.episodes import LABELS, Episode, in_turn
from pipeline.report.html import calls_text, counts, errors_text, safe, words
from pipeline.report.runs_list import runs_list
from pipeline.report.traces import read_trace

RUNS_SHOWN = 6  # per benchmark, arm and strategy; right and wrong ones and exit reasons in turn

Row = Mapping[str, Any]


def agents_section(results: Any, traces: Path) -> str:
    """Return the section; empty when the evaluation has no agents."""
    found = results.get("agents") if isinstance(results, Mapping) else None
    rows = [row for row in found or () if isinstance(row, Mapping)]
    if not rows:
        return ""
    parts = [
        "<section><h2>In the agent loop</h2><p class=soft>% right ± standard error; per question: "
        "steps, tokens in both directions, executed calls. A run that was stopped is wrong.</p>"
        '<p class="legend"><span><i class=pass></i>right</span><span><i class=real></i>finished, '
        "and wrong</span><span><i class=stop></i>stopped before an answer</span></p>"
    ]
    for benchmark in _values(rows, "benchmark"):
        own = [row for row in rows if row.get("benchmark") == benchmark]
        asked = max(int(row.get("n") or 0) for row in own)
        parts.append(
            f"<h3>{words(benchmark)}, {asked:,} questions</h3>"
            f"<div class=panel>{_scores(own)}</div><div class=panel>{_ends(own)}</div>"
            f"{_diagnosis(own)}"
        )
    return "".join([*parts, _runs(traces), "</section>"])


def _values(rows: Sequence[Row], key: str) -> list[str]:
    return list(dict.fromkeys(str(row.get(key)) for row in rows))


def _scores(rows: Sequence[Row]) -> str:
    """Strategies as rows, arms as columns."""
    arms = _values(rows, "arm")
    cells = {(str(row.get("strategy")), str(row.get("arm"))): _score(row) for row in rows}
    head = "".join(f"<th class=number>{words(arm)}" for arm in arms)
    body = []
    for strategy in _values(rows, "strategy"):
        values = (f"<td class=number>{cells.get((strategy, arm), '')}</td>" for arm in arms)
        body.append(f"<tr><td>{words(strategy)}</td>{''.join(values)}</tr>")
    return (
        f"<table class=scores><thead><tr><th>strategy{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _score(row: Row) -> str:
    cost = [
        f"{row[key]:,.{digits}f} {name}"
        for key, name, digits in (
            ("steps_per_question", "steps", 1),
            ("tokens_per_question", "tokens", 0),
        )
        if row.get(key) is not None
    ]
    if row.get("n") and "calls" in row:
        cost.append(f"{sum(row['calls'].values()) / row['n']:.1f} calls")
    error = f" ± {100 * row['standard_error']:.1f}" if "standard_error" in row else ""
    right = f"<b>{100 * row['accuracy']:.1f}{error}</b>" if "accuracy" in row else ""
    return f"{right}<div class=soft>{' · '.join(cost)}</div>"


def _ends(rows: Sequence[Row]) -> str:
    """Why the runs of every arm ended, and what it called; the arms of a strategy together."""
    strategies = _values(rows, "strategy")
    body = []
    for row in sorted(rows, key=lambda row: strategies.index(str(row.get("strategy")))):
        why = [counts(row[key]) for key in ("exit_reasons", "outcomes") if row.get(key)]
        body.append(
            f"<tr><td>{words(row.get('strategy'))}</td><td>{words(row.get('arm'))}</td>"
            f"<td class=meter>{_split(row)}</td><td>{'; '.join(why)}</td>"
            f"<td>{calls_text(row.get('calls') or {})}</td>"
            f"<td>{errors_text(row.get('errors') or {})}</td></tr>"
        )
    return (
        "<table class=ends><thead><tr><th>strategy<th>arm<th class=meter><th>ended by<th>calls"
        f"<th>errors</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _split(row: Row) -> str:
    """A bar of all runs: right, finished and wrong, stopped."""
    n, right = row.get("n") or 0, row.get("right") or 0
    reasons = row.get("exit_reasons") or {}
    if not n or not reasons:
        return ""
    wrong = max(0, reasons.get("finished", 0) - right)
    shares = (("pass", right), ("real", wrong), ("stop", max(0, n - right - wrong)))
    bars = (f'<i class={name} style="width:{100 * k / n:.1f}%"></i>' for name, k in shares if k)
    return f"<div class=split>{''.join(bars)}</div>"


def _diagnosis(rows: Sequence[Row]) -> str:
    items = [
        f"<li>{words(row.get('arm'))}, {words(row.get('strategy'))}: {safe(sentence)}</li>"
        for row in rows
        for sentence in row.get("diagnosis") or ()
    ]
    return f"<ul class=diagnosis>{''.join(items)}</ul>" if items else ""


# -- runs -----------------------------------------------------------------------------------------


def _runs(path: Path) -> str:
    if not path.is_file():
        return ""
    try:
        found = read_trace(path).episodes
    except ConfigError as error:
        return f"<h3>Runs, turn by turn</h3><p>None can be shown: {safe(error)}.</p>"
    listed, shown = runs_list(_chosen(found))
    return (
        f"<h3>Runs, turn by turn</h3><p class=soft>{shown:,} of {len(found):,}: up to {RUNS_SHOWN} "
        "per benchmark, arm and strategy, right and wrong ones and exit reasons in turn; "
        f"<code>callsieve report {safe('/'.join(path.parts[-3:]))}</code> shows more.</p>{listed}"
    )


def _chosen(episodes: Sequence[Episode]) -> list[Episode]:
    groups: dict[tuple[str, ...], list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(tuple(episode.labels.get(name, "") for name in LABELS), []).append(
            episode
        )
    mixed = (
        list(in_turn(own, lambda episode: (episode.right, episode.ended)))[:RUNS_SHOWN]
        for own in groups.values()
    )
    return [episode for own in mixed for episode in own]
