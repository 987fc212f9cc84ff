"""The funnel of a run: per tool, how many were left after each step and why the rest were not.

Everything comes from the counts in the completion markers; nothing is written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.records import REASONS
from pipeline.report.sampling import sampling_measures
from pipeline.shards import SHARD_FOLDERS, RunFolder, add_counts, read_json

Counts = dict[str, dict[str, int]]  # tool -> what -> n; `*` is not tied to a tool


@dataclass(frozen=True)
class Step:
    """One row of the funnel: the count `what` of a stage; `left` are those that got no further."""

    name: str
    stage: str
    what: str
    left: tuple[str, ...] = ()


STEPS = (
    Step("documents", "ingest", "documents", ("filtered",)),
    Step(
        "fitting_documents",
        "sample",
        "fitting_documents",
        ("too_long_for_model", "no_tokens"),
    ),
    Step("positions", "sample", "positions", ("opens_already", "no_call_possible")),
    Step(
        "sampled_positions",
        "sample",
        "sampled_positions",
        ("below_tau_s", "beyond_k", "pruned_position"),
    ),
    Step("samples", "sample", "samples"),
    Step("candidates", "sample", "candidates", ("never_closed", "malformed", "merged")),
    Step("executed", "execute", "executed", ("error:",)),
    Step("scored", "score", "scored", ("pruned_call",)),
    Step("kept", "select", "kept", tuple(r for r in REASONS if r not in ("kept", "tool_error"))),
)

EXPLANATIONS = {
    "documents": "documents that passed the tool's corpus filter",
    "fitting_documents": "documents that the model can read together with the prompt",
    "positions": "token positions at which a call could stand",
    "sampled_positions": "positions at which calls were sampled",
    "samples": "texts drawn from the model",
    "candidates": "well-formed calls, equal ones merged",
    "executed": "calls that the tool answered",
    "scored": "calls with all three losses",
    "kept": "calls whose result lowers the loss enough",
    "filtered": "did not pass the corpus filter",
    "too_long_for_model": "longer, with the prompt, than the model reads",
    "no_tokens": "the tokenizer makes no token of it",
    "below_tau_s": "p(<API>) at or below tau_s",
    "opens_already": "the text goes on with an opening delimiter",
    "no_call_possible": "no call can be written from the text before",
    "beyond_k": "not among the k most likely of the document",
    "pruned_position": "no call there could gain enough",
    "never_closed": "did not close within max_new_tokens",
    "malformed": "not a call of the tool",
    "merged": "the same call again at its position",
    "pruned_call": "a bound proved that the call could not be kept",
    "below_threshold": "gain below tau_f",
    "lookahead_leak": "its arguments stand only in the text that follows",
    "duplicate": "the same call again in the document",
    "conflict": "another call at its place gains more",
    "over_cap": "over the cap on calls",
    "tool_error": "the tool could not answer",
    "read": "records read",
    "split": "pieces made out of long documents",
    "bad_date": "dates that could not be read (kept without one)",
    "duplicate_document": "the same text again",
}


def explain(what: str) -> str:
    """Say in a few words what a count of the funnel means."""
    if what.startswith("error:"):
        return f"tool error, {what.removeprefix('error:')}"
    if what.startswith("rejected:"):
        return f"rejected, {what.removeprefix('rejected:').replace('_', ' ')}"
    return EXPLANATIONS.get(what, what.replace("_", " "))


def stage_counts(folder: RunFolder, stage: str) -> Counts:
    """Add up the counts of a stage over its finished shards."""
    total: Counts = {}
    for marker in _markers(folder, stage):
        for tool, counts in marker.get("counts", {}).items():
            add_counts(total.setdefault(tool, {}), counts)
    return total


def _markers(folder: RunFolder, stage: str) -> list[Mapping[str, Any]]:
    """The markers of a stage, but not those of settings that the run has left behind."""
    manifest = read_json(folder.path / "manifest.json") or {}
    wanted = manifest.get("fingerprints", {}).get(stage)
    if stage in SHARD_FOLDERS:
        found = [folder.read_marker(stage, *part) for part in folder.parts(stage)]
    else:
        found = [read_json(folder.stage_marker(stage))]
    return [m for m in found if m is not None and wanted in (None, m.get("fingerprint"))]


def build_funnel(folder: RunFolder) -> dict[str, Any]:
    """Build the funnel of a run, finished or not, as a JSON document.

    `{"corpus": {"read", "documents", "left": {reason: n}, ...},
      "tools": {tool: [{"step", "count", "left": {reason: n}}, ...]},
      "sampling": {tool: sampling.sampling_measures},
      "dataset": {"documents", "augmented", "without_calls", "calls", "train", "validation"}}`.
    Steps of stages that have not begun are missing; `left` counts what was there at the step
    before and is not here: count before = count + left, but for `positions` and `samples`, which
    count other things than the step before.
    """
    counts = {stage: stage_counts(folder, stage) for stage in (*SHARD_FOLDERS, "augment")}
    tools = [tool for stage in SHARD_FOLDERS for tool in counts[stage] if tool != "*"]
    return {
        "corpus": _corpus(counts["ingest"].get("*", {})),
        "tools": {tool: _tool_steps(tool, counts) for tool in dict.fromkeys(tools)},
        "sampling": _sampling(folder, counts),
        "dataset": counts["augment"].get("*", {}),
    }


def _sampling(folder: RunFolder, counts: Mapping[str, Counts]) -> dict[str, Any]:
    """The measures of every tool; those of a later stage only when it has all shards."""
    shards = {stage: len(_markers(folder, stage)) for stage in ("sample", "execute", "select")}
    whole = {stage: counts[stage] for stage, n in shards.items() if n == shards["sample"]}

    def own(stage: str, tool: str) -> Mapping[str, int] | None:
        return whole[stage].get(tool, {}) if stage in whole else None

    return {
        tool: sampling_measures(sample, own("execute", tool), own("select", tool))
        for tool, sample in counts["sample"].items()
        if "tokens" in sample
    }


def _corpus(counts: Mapping[str, int]) -> dict[str, Any]:
    if not counts:
        return {}
    left = {
        what: n
        for what, n in counts.items()
        if what.startswith("rejected:") or what == "duplicate_document"
    }
    return {**{what: n for what, n in counts.items() if what not in left}, "left": left}


def _tool_steps(tool: str, counts: Mapping[str, Counts]) -> list[dict[str, Any]]:
    steps = []
    for step in STEPS:
        if not counts[step.stage]:
            break
        own = counts[step.stage].get(tool, {})
        left = {
            what: n
            for what, n in own.items()
            if n and any(what == name or _is_kind(what, name) for name in step.left)
        }
        if step.name == "kept":
            _without_pruned(left, counts["score"].get(tool, {}).get("pruned_call", 0))
        steps.append({"step": step.name, "count": own.get(step.what, 0), "left": left})
    return steps


def _is_kind(what: str, name: str) -> bool:
    return name.endswith(":") and what.startswith(name)


def _without_pruned(left: dict[str, int], pruned: int) -> None:
    """Calls without losses are below the threshold too; they have left one step earlier."""
    below = left.get("below_threshold", 0)
    if pruned and below:
        left["below_threshold"] = below - min(pruned, below)
        if not left["below_threshold"]:
            del left["below_threshold"]
