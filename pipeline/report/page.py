"""report.html: one self-contained page about a run, finished or not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config import Config, dump_config
from pipeline.report.agents_section import agents_section
from pipeline.report.arms import arms_table
from pipeline.report.charts import gain_histogram
from pipeline.report.funnel import EXPLANATIONS, build_funnel, explain
from pipeline.report.gains import GainSummary, gain_summaries
from pipeline.report.html import document, options, safe, tiles
from pipeline.report.rows import calls_table, run_config, with_context
from pipeline.report.sampling import sampling_text
from pipeline.report.status import status_document
from pipeline.report.terminal import duration
from pipeline.shards import RunFolder, read_json, write_text

KEPT_SHOWN = 60  # calls per tool
OTHERS_SHOWN = 20  # calls per tool and reason, the nearest misses first
UNDECIDED = "not selected yet"


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` of a run and return its path. Raises ConfigError for no run folder."""
    path = folder.path / "report.html"
    write_text(path, report_html(folder))
    return path


def report_html(folder: RunFolder) -> str:
    """Return the page."""
    config = run_config(folder)
    calls = calls_table(folder)
    funnel = build_funnel(folder)
    summaries = gain_summaries(folder, config, calls)
    results = read_json(folder.stage("evaluate") / "results.json")
    body = [
        _heading(folder, config),
        _tiles(funnel, summaries),
        _funnels(funnel),
        _gains(summaries),
        _arms(results),
        agents_section(results, folder.stage("evaluate") / "agent-traces.jsonl"),
        _calls(folder, calls),
        _settings(folder, config),
    ]
    return document(config.name, "\n".join(part for part in body if part))


# -- sections -----------------------------------------------------------------------------------


def _heading(folder: RunFolder, config: Config) -> str:
    stages = status_document(folder)["stages"]
    unfinished = [s for s in stages if s["state"] != "done"]
    seconds = sum(stage["seconds"] for stage in stages)
    state = "finished"
    if unfinished:
        first = unfinished[0]
        state = f"not finished: {first['stage']} has {first['done']} of {first['shards']} shards"
    return (
        f"<header><h1>{safe(config.name)}</h1><p class=soft>Model {safe(config.model.path)}, "
        f"tools {safe(', '.join(config.tool_names))}, seed {config.seed}. The run is {state} "
        f"({duration(seconds)} of work).</p></header>"
    )


def _tiles(funnel: Mapping[str, Any], summaries: Sequence[GainSummary]) -> str:
    def total(step: str) -> int:
        return sum(
            row["count"] for steps in funnel["tools"].values() for row in steps
            if row["step"] == step
        )  # fmt: skip

    by_chance = sum(s.passing_by_chance / s.null_share for s in summaries if len(s.nulls))
    passing = sum(summary.passing for summary in summaries)
    rate = f"{min(1.0, by_chance / passing):.0%}" if passing and _has_null(summaries) else "unknown"
    figures = [
        (f"{funnel['corpus'].get('documents', 0):,}", "documents"),
        (f"{total('candidates'):,}", "calls sampled"),
        (f"{total('executed'):,}", "answered by a tool"),
        (f"{total('kept'):,}", "kept"),
        (rate, "kept by chance (estimate)"),
        (f"{funnel['dataset'].get('augmented', 0):,}", "texts in the data set"),
    ]
    return tiles(figures)


def _has_null(summaries: Iterable[GainSummary]) -> bool:
    return any(len(summary.nulls) for summary in summaries)


def _funnels(funnel: Mapping[str, Any]) -> str:
    corpus = funnel["corpus"]
    parts = ["<section><h2>Funnel</h2>"]
    if corpus:
        left = _left(corpus["left"]) or "none left out"
        parts.append(
            f"<p>{corpus.get('read', 0):,} records read, {corpus.get('documents', 0):,} documents; "
            f"<span class=soft>{left}</span></p>"
        )
    for tool, steps in funnel["tools"].items():
        parts.append(f"<h3>{safe(tool)}</h3><div class=panel>{_funnel_table(steps)}</div>")
        if tool in funnel["sampling"]:
            parts.append(f"<p>{safe(sampling_text(funnel['sampling'][tool]))}.</p>")
    if not funnel["tools"]:
        parts.append("<p>Nothing has been read yet.</p>")
    return "".join(parts) + "</section>"


def _funnel_table(steps: Sequence[Mapping[str, Any]]) -> str:
    top = math.log1p(max((step["count"] for step in steps), default=1) or 1)
    rows = []
    for step in steps:
        name = step["step"]
        last = ' class="last"' if name == "kept" else ""
        width = 100 * math.log1p(step["count"]) / top
        rows.append(
            f'<tr{last}><td title="{safe(EXPLANATIONS.get(name, ""))}">'
            f"{safe(name.replace('_', ' '))}</td><td class=number>{step['count']:,}</td>"
            f'<td class=meter><div style="width:{width:.1f}%"></div></td>'
            f"<td class=soft>{_left(step['left'])}</td></tr>"
        )
    return (
        "<table class=funnel><thead><tr><th>step<th class=number>count<th class=meter>(logarithmic)"
        f"<th>left out before it</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _left(left: Mapping[str, int]) -> str:
    items = sorted(left.items(), key=lambda item: -item[1])
    return safe("; ".join(f"{explain(what)}: {n:,}" for what, n in items))


def _gains(summaries: Sequence[GainSummary]) -> str:
    if not summaries:
        return ""
    parts = [
        "<section><h2>Gains</h2><p>How much the result of a call lowers the weighted loss of the "
        "next tokens, against the better of no call and a call without a result.</p>"
        '<p class="legend"><span><i class=real></i>calls</span><span><i class=pass></i>over the '
        "threshold</span><span><i class=chance></i>by chance: the same calls, each with the "
        "result of another</span></p>"
    ]
    for summary in summaries:
        parts.append(
            f"<h3>{safe(summary.tool)}</h3><div class=panel>{gain_histogram(summary)}</div>"
            f"<p>{_chance(summary)}</p>"
        )
    return "".join(parts) + "</section>"


def _chance(summary: GainSummary) -> str:
    if summary.tau_f is None:
        return "No threshold: not selected yet, or none reaches the wanted false-keep rate."
    text = f"{summary.passing:,} of {len(summary.gains):,} calls reach tau_f {summary.tau_f:.3g}"
    if not len(summary.nulls):
        return f"{text}; how many by chance is unknown (no call has another's result to try)."
    text += f"; {summary.passing_by_chance:,} of {len(summary.nulls):,} would by another's result"
    if summary.false_keep_rate is None:
        return f"{text}."
    return f"{text}: estimated false-keep rate {summary.false_keep_rate:.1%}."


def _arms(results: Any) -> str:
    table = arms_table(results)
    if not table.rows:
        return ""
    head = "".join(f"<th class=number>{safe(arm)}" for arm in table.arms)
    rows = []
    for name, cells in table.rows:
        values = "".join(f"<td class=number>{safe(cell)}</td>" for cell in cells)
        rows.append(f"<tr><td>{safe(name)}</td>{values}</tr>")
    return (
        "<section><h2>The tuned model and its controls</h2><div class=panel><table><thead><tr>"
        f"<th>measure{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


# -- calls --------------------------------------------------------------------------------------


def _calls(folder: RunFolder, calls: pa.Table | None) -> str:
    if calls is None or not calls.num_rows:
        return "<section><h2>Calls</h2><p>No call has been sampled yet.</p></section>" + _controls(
            [], [], hidden=True
        )
    rows = with_context(folder, _chosen(calls))
    tools = list(dict.fromkeys(row["tool"] for row in rows))
    reasons = list(dict.fromkeys(row.get("reason") or UNDECIDED for row in rows))
    return (
        f"<section><h2>Calls</h2><p class=soft>Of {calls.num_rows:,} calls, per tool the "
        f"{KEPT_SHOWN} kept ones with the largest gains and the {OTHERS_SHOWN} nearest misses per "
        "reason; <code>callsieve show</code> lists all.</p>"
        f"{_controls(tools, reasons)}{''.join(map(_call, rows))}</section>"
    )


def _chosen(calls: pa.Table) -> list[dict[str, Any]]:
    """Pick the calls that the page shows: kept ones first, then the reasons by size."""
    order = [("call_id", "ascending")]
    if "gain" in calls.column_names:
        order.insert(0, ("gain", "descending"))
    calls = calls.take(pc.sort_indices(calls, sort_keys=order))
    if "reason" not in calls.column_names:
        groups = [(UNDECIDED, calls)]
    else:
        sizes = {v["values"]: v["counts"] for v in pc.value_counts(calls["reason"]).to_pylist()}
        names = sorted(sizes, key=lambda name: (name != "kept", -sizes[name]))
        groups = [(name, calls.filter(pc.field("reason") == name)) for name in names]
    rows: list[dict[str, Any]] = []
    for name, group in groups:
        limit = KEPT_SHOWN if name in ("kept", UNDECIDED) else OTHERS_SHOWN
        for tool in sorted(pc.unique(group["tool"]).to_pylist()):
            rows += group.filter(pc.field("tool") == tool).slice(0, limit).to_pylist()
    return rows


def _controls(tools: Sequence[str], reasons: Sequence[str], hidden: bool = False) -> str:
    return (
        f'<div class=controls data-items=".call" data-noun=calls{" hidden" if hidden else ""}>'
        f"<label>tool<select id=tool>{options(tools)}</select></label>"
        f"<label>decision<select id=reason>{options(reasons)}</select></label>"
        '<label>text<input id=words type=search placeholder="words to look for"></label>'
        '<span class=soft role=status></span></div>'
    )  # fmt: skip


def _call(row: Mapping[str, Any]) -> str:
    reason = row.get("reason") or UNDECIDED
    kind = "kept" if reason == "kept" else "failed" if row.get("error_kind") else "left"
    result = f" → {safe(row['result'])}" if row.get("result") is not None else ""
    return (
        f'<article class="call {kind}" data-tool="{safe(row["tool"])}" '
        f'data-reason="{safe(reason)}"><div class=context>{safe(row["context_before"])} '
        f"<mark>{safe(row['tool'])}({safe(row['arguments'])}){result}</mark>"
        f"{safe(row['context_after'])}</div><div class=facts>"
        f"<span class=reason>{safe(reason.replace('_', ' '))}</span>{_facts(row)}</div></article>"
    )


def _facts(row: Mapping[str, Any]) -> str:
    facts = [
        (name, row.get(column))
        for name, column in (
            ("gain", "gain"),
            ("L(ε)", "loss_none"),
            ("L(call)", "loss_call"),
            ("L(call, result)", "loss_result"),
            ("gain with another result", "gain_null"),
            ("p(API)", "p_api"),
        )
    ]
    spans = [f"<span>{name} <b>{v:.3f}</b></span>" for name, v in facts if v is not None]
    if row.get("error_kind"):
        spans.append(f"<span>{safe(row['error_kind'])}: {safe(row.get('error'))}</span>")
    spans.append(f"<span>call <code>{safe(row['call_id'])}</code></span>")
    return "".join(spans)


def _settings(folder: RunFolder, config: Config) -> str:
    manifest = read_json(folder.path / "manifest.json")
    rows = ""
    if isinstance(manifest, dict):
        cells = (f"<tr><td>{safe(k)}</td><td>{safe(v)}</td></tr>" for k, v in manifest.items())
        rows = f"<table><tbody>{''.join(cells)}</tbody></table>"
    return (
        "<section><h2>Settings</h2><div class=panel><details><summary>Every value of this run"
        f"</summary><pre>{safe(dump_config(config))}</pre>{rows}</details></div></section>"
    )
