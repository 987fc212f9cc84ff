"""How values on the command line are read, the longer options, and what all commands share.

Nothing heavy is imported here: `--help` has to answer at once.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError


def shards(text: str) -> tuple[int, int] | int:
    try:
        if "/" not in text:
            return int(text)
        i, n = (int(part) for part in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form i/n, e.g. 0/4") from None
    if not 0 <= i < n:
        raise argparse.ArgumentTypeError(f"{text!r}: i goes from 0 to n-1")
    return i, n


def positive(text: str) -> int:
    """Read a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    """Read a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, e.g. 90")
    return value


def overrides(rest: Sequence[str]) -> list[tuple[str, str]]:
    """Read `--section.key value` and `--section.key=value`."""
    found, waiting = [], list(rest)
    while waiting:
        item = waiting.pop(0)
        if not item.startswith("--"):
            raise ConfigError(f"unrecognised argument {item!r}; values go as --section.key VALUE")
        key, equals, value = item[2:].partition("=")
        if key == "json":
            raise ConfigError(
                "--json: this command has none; `callsieve status RUN_DIR --json` and "
                "`callsieve show RUN_DIR --json` print what a run made as JSON"
            )
        if not equals:
            if not waiting:
                raise ConfigError(f"{item}: the value is missing")
            value = waiting.pop(0)
        found.append((key, value))
    return found


def day(text: str) -> str:
    """Read a date such as 2023-01-30."""
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date, e.g. 2023-01-30") from None


def add_evaluate(evaluate: argparse.ArgumentParser) -> None:
    """Add what `agent evaluate` asks, of whom, and by which rules."""
    evaluate.add_argument("model", help="a model folder, a hub id, or the address of an endpoint")
    evaluate.add_argument(
        "--benchmarks",
        default="arithmetic",
        metavar="A,B",
        help="arithmetic, hotpot, fever, library, stock, grid, bfcl; bfcl is one turn "
        "per row, whatever the strategies",
    )
    evaluate.add_argument(
        "--strategies", default="standard,react", metavar="A,B", help="e.g. standard,cot,act,react"
    )
    evaluate.add_argument(
        "--protocol",
        choices=("react", "chat"),
        default="react",
        help="how the strategies with calls write them (bfcl: always chat)",
    )
    evaluate.add_argument(
        "--limit", type=positive, default=20, metavar="N", help="questions per benchmark"
    )
    evaluate.add_argument(
        "--constrain", action="store_true", help="calls cannot be malformed (a local model only)"
    )
    evaluate.add_argument(
        "--tool-choice",
        choices=("auto", "required"),
        default="auto",
        help="required: the first turn has to call a tool",
    )
    _add_inline_calls(evaluate)
    files = evaluate.add_argument_group("files of the benchmarks")
    files.add_argument(
        "--questions",
        default="data/questions/*.jsonl",
        metavar="GLOB",
        help="arithmetic: files with questions of this kind",
    )
    files.add_argument(
        "--hotpot-file", metavar="FILE", help="a HotpotQA distractor file; fever reads its pages"
    )
    files.add_argument("--fever-file", metavar="FILE", help="claims with their labels, JSONL")
    files.add_argument("--bfcl-file", metavar="FILE", help="rows of the leaderboard, JSONL")
    files.add_argument(
        "--bfcl-answers", metavar="FILE", help="their answers (all kinds but irrelevance)"
    )
    files.add_argument(
        "--bfcl-category",
        choices=("simple", "multiple", "parallel", "irrelevance"),
        help="which kind of rows the file holds; irrelevance: calling is wrong",
    )
    files.add_argument(
        "--bfcl-numbers",
        choices=("typed", "value"),
        default="typed",
        help="typed: 5 where a float is wanted, never 5.0 where an integer is; "
        "value: numbers are compared by value",
    )
    evaluate.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write every run with its verdict as JSONL, as in 08-evaluation/agent-traces.jsonl "
        "(the right ones are training text: augment --from-traces FILE)",
    )


def _add_inline_calls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--inline-calls",
        action="store_true",
        help="also answer Toolformer calls, [Tool(arguments) ->, inside the thoughts of react "
        "(for a model that callsieve tuned)",
    )


def add_limits(run: argparse.ArgumentParser) -> None:
    """Add to `agent run` what bounds a run, and what its calls and its answer may look like."""
    run.add_argument(
        "--approvals",
        type=Path,
        metavar="FILE",
        help="YAML that says which calls with effects outside may run: `default: deny` and "
        "`rules:` of tool patterns with allow, deny or ask, e.g. `git.*: ask` (without a file "
        "every such call is asked for on the terminal)",
    )
    run.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="end the run when so many tokens were read and written, all turns together; looked "
        "at before each turn",
    )
    run.add_argument(
        "--max-seconds",
        type=seconds,
        metavar="S",
        help="end the run after so many seconds; looked at before each turn",
    )
    run.add_argument(
        "--answer",
        metavar="FORM",
        help="the form that the answer must have: number, integer, date (2023-01-30), a FILE.json "
        "that holds a JSON Schema, or a /REGULAR EXPRESSION/ for all of it. An answer of another "
        "form goes back to the model; with --constrain it is forced (not in inline)",
    )
    _add_inline_calls(run)
    run.add_argument(
        "--constrain",
        action="store_true",
        help="calls cannot be malformed: once one begins (Action: in react, <tool_call> in chat, "
        "[ in inline) only tokens that lead to a call of a tool on offer, with arguments of its "
        "schema, are let through; a local model only. The values may still be wrong",
    )


# -- what all commands share -----------------------------------------------------------------------


def add_verb(verbs: Any, name: str, run: Callable[[Any], int | None], about: str) -> Any:
    """Add a command with the function that runs it; returns its parser."""
    parser = verbs.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    parser.set_defaults(run=run)
    return parser


def add_json(parser: Any) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(value, ensure_ascii=False, indent=1, default=str))


def tool_list(config: str | None, names: str | None = None) -> list[Any]:
    """The tools of a configuration, or those that need no settings."""
    from pipeline.config import load_tools
    from pipeline.context import load_generate
    from pipeline.tools.catalogue import BUILT_IN, build_tools

    if config is not None:
        entries: list[Any] = load_tools(config)
    else:
        entries = [{"name": name} for name in ("Calculator", "Calendar", "WikiSearch")]
    if names:
        wanted = [name.strip() for name in names.split(",") if name.strip()]
        known = {name.lower(): {"name": name} for name in BUILT_IN}
        known |= {str(entry["name"]).lower(): entry for entry in entries}
        entries = [known.get(name.lower(), {"name": name}) for name in wanted]
    return build_tools(entries, load_generate)


def load_silently() -> None:
    """No bar while weights are loaded: what a command shows is a text, and it begins with it."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
