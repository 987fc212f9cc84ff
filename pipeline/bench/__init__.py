"""`callsieve bench`: our paths against what a user could take instead, in one run.

    callsieve bench sample --model .cache/models/SmolLM2-135M-Instruct [--json]

Every bench first checks that both sides give the same results and then measures them in
interleaved pairs. One module per bench; `--model tiny` tries everything out in seconds (its
figures mean nothing).
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.bench.measure import UNITS
from pipeline.errors import ConfigError


def run_bench(
    name: str, model: str, pairs: int = 5, documents: int | None = None, tokens: int | None = None
) -> dict[str, Any]:
    """Run one bench; returns the document that `bench --json` prints.

    `documents` and `tokens` (per document) are the size of one run; None takes the bench's own.
    """
    if name not in UNITS:
        raise ConfigError(f"bench {name!r}: allowed are {', '.join(UNITS)}")
    for option, value in (("pairs", pairs), ("documents", documents), ("tokens", tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"--{option} {value}: give at least 1")
    module = import_module(f"pipeline.bench.{name}")
    if model == "tiny":
        print("tiny is a toy: its rates say nothing about a real model's", file=sys.stderr)
    _quieten()
    found: dict[str, Any] = module.run(model, pairs, documents, tokens)
    return found


def _quieten() -> None:
    """Keep what the baselines say about themselves off the terminal."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for noisy in ("ContinuousBatchingLogger", "pipeline.lm.training"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def print_bench(document: dict[str, Any]) -> None:
    """Print the document of a bench as tables."""
    console, about = Console(), document["machine"]
    pairs = max((row["pairs"] for row in document["comparisons"]), default=0)
    console.print(
        f"bench {document['name']} on {about['device']}, {about['threads']} threads, "
        f"load {about['load']}; {UNITS[document['name']]} per second, medians of {pairs} pairs"
    )
    table = Table("against", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("ours", "theirs", "ratio", "min..max", "CPU ratio", "agrees"):
        table.add_column(heading, justify="right", no_wrap=heading != "CPU ratio")
    for row in document["comparisons"]:
        table.add_row(
            row["baseline"],
            f"{row['ours_per_s']:,.1f}",
            f"{row['baseline_per_s']:,.1f}",
            f"{row['ratio_median']:.2f}x",
            f"{row['ratio_min']:.2f}..{row['ratio_max']:.2f}",
            f"{about['cpu_ratio_median'][row['baseline']]:.2f}x",
            "yes" if row["agrees"] else "[bold red]NO[/]",
        )
    console.print(table)
    if document["ceiling_share"] is not None:
        console.print(f"share of a bare forward pass: {document['ceiling_share']:.0%}")
    if document["growth"]:
        headings = (name.replace("_", " ") for name in document["growth"][0])
        grown = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in document["growth"]:
            grown.add_row(*(f"{v:.4g}" if isinstance(v, float) else f"{v:,}" for v in row.values()))
        console.print(grown)
