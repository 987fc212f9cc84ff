"""What the samples of a run came to, per tool: how many become calls, and what a kept call costs.

Two runs of one corpus (with masks and without, say) compare by these numbers: `callsieve diff`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Measures = Mapping[str, Any]

SHARES = {
    "closed": "% of samples that close",
    "parsed": "% of samples that parse",
    "executed": "% of samples that execute",
}
KEPT = "kept calls per 1,000 tokens"


def sampling_measures(
    sample: Mapping[str, int], execute: Mapping[str, int] | None, select: Mapping[str, int] | None
) -> dict[str, Any]:
    """Measure the samples of one tool by the counts of three stages (None: not finished yet).

    `{"samples", "tokens", "closed", "never_closed", "malformed", "closed_share", "parsed_share",
      "executed_share", "kept_per_1000_tokens"}`. `tokens` are all that were drawn, those of lost
    samples too. Shares are of the samples: `closed` are calls of the tool with their end, `parsed`
    those whose arguments the tool can read, `executed` those that it answered. What is not known
    yet, or would be a share of nothing, is None.
    """
    samples, tokens = sample.get("samples", 0), sample["tokens"]
    counted = {what: sample.get(what, 0) for what in ("closed", "never_closed", "malformed")}
    parsed = execute.get("samples_parsed", 0) if execute is not None else None
    executed = execute.get("samples_executed", 0) if execute is not None else None
    kept = select.get("kept", 0) if select is not None else None
    return {
        "samples": samples,
        "tokens": tokens,
        **counted,
        "closed_share": _ratio(counted["closed"], samples),
        "parsed_share": _ratio(parsed, samples),
        "executed_share": _ratio(executed, samples),
        "kept_per_1000_tokens": _ratio(kept, tokens / 1000),
    }


def _ratio(part: int | None, whole: float) -> float | None:
    return None if part is None or not whole else round(part / whole, 4)


def measure_cells(measures: Measures | None) -> dict[str, str]:
    """Write the measures for a table; empty where one is not known."""
    own = measures or {}
    cells = {name: _percent(own.get(f"{what}_share")) for what, name in SHARES.items()}
    kept = own.get("kept_per_1000_tokens")
    return {**cells, KEPT: "" if kept is None else f"{kept:.2f}"}


def sampling_text(measures: Measures) -> str:
    """Write the measures of one tool as a sentence, as far as they are known."""
    shares = [
        f"{_percent(measures[f'{what}_share'])}% {verb}"
        for what, verb in (("closed", "close"), ("parsed", "parse"), ("executed", "execute"))
        if measures[f"{what}_share"] is not None
    ]
    text = f"{measures['samples']:,} samples of {measures['tokens']:,} tokens in all"
    text += f": {', '.join(shares)}" if shares else ""
    kept = measures["kept_per_1000_tokens"]
    return text if kept is None else f"{text}; {kept:.2f} {KEPT}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"
