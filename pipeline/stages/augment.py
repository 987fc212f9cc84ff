"""Stage `augment`: documents and kept calls -> a data set that `datasets.load_dataset` opens.

The kept calls of all tools are written into their document in order of position; documents without
any are left out and counted. Rows are in the order of their ids, and whether a row is for
validation depends on its id alone, so neither moves with the number of shards.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.agent.transcripts import documents_from_runs
from pipeline.calls import CallSyntax, render
from pipeline.config import FalseKeepRate
from pipeline.context import Context
from pipeline.errors import ConfigError, WorkError
from pipeline.records import stable_hash
from pipeline.report.card import write_card
from pipeline.report.gains import threshold
from pipeline.shards import RunFolder, write_json

CALL = pa.struct(
    [
        ("tool", pa.string()),
        ("arguments", pa.string()),
        ("result", pa.string()),
        ("char_start", pa.int64()),
        ("loss_none", pa.float64()),
        ("loss_call", pa.float64()),
        ("loss_result", pa.float64()),
        ("gain", pa.float64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("text_augmented", pa.string()),
        ("calls", pa.list_(CALL)),
    ]
)
SPLITS = ("train", "validation")
_READ_COLUMNS = ["doc_id", "call_id", *CALL.names, "kept"]
_NEAREST = 3  # near misses that are shown when nothing was kept


@dataclass(frozen=True)
class Row:
    """One document of the data set; `calls` are in order of position."""

    id: str
    text: str
    text_augmented: str
    calls: list[dict[str, Any]]


def run(context: Context) -> None:
    """Write `06-dataset`: data/train-*.parquet, data/validation-*.parquet and README.md.

    A data set of a single row has no validation split.

    Raises WorkError when no call was kept.
    """
    began = time.monotonic()
    folder, config = context.folder, context.config
    if config.augment.traces is not None:
        documents = right_runs(Path(config.augment.traces), context)
    else:
        calls = kept_calls(folder)
        if not calls:
            raise WorkError(explain_nothing_kept(context))
        documents = augmented_documents(folder, calls, config.call_format.syntax, context)
    rows = sorted(documents, key=lambda row: row.id)
    splits = split_rows(rows, config.augment.validation_share)
    for split in SPLITS:
        context.count("*", split, len(splits[split]))
    for row in rows:
        for call in row.calls:
            context.count("*", "calls")
            context.count(call["tool"], "calls")
    counts = context.take_counts()
    target = folder.stage("augment")
    for leftover in folder.path.glob(f"{target.name}.*.tmp"):
        shutil.rmtree(leftover)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        for split in SPLITS:
            if splits[split]:  # `datasets` cannot load an empty one: a single row is for train
                _write_split(temporary / "data", split, splits[split])
        content = _content_hash(temporary / "data")
        write_card(temporary / "README.md", config, folder, counts, rows[0], content)
        folder.clear("augment")
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    marker = {
        "rows": len(rows),
        "fingerprint": context.fingerprint,
        "seconds": round(time.monotonic() - began, 3),
        "counts": counts,
    }
    write_json(folder.stage_marker("augment"), marker)


def kept_calls(folder: RunFolder) -> dict[str, list[dict[str, Any]]]:
    """Return the kept calls of each document, in order of position."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for index, count in folder.parts("select"):
        table = pq.read_table(folder.part("select", index, count), columns=_READ_COLUMNS)
        for call in table.filter(pc.field("kept")).to_pylist():
            found[call["doc_id"]].append(call)
    for calls in found.values():
        calls.sort(key=lambda call: (call["char_start"], call["call_id"]))
    return dict(found)


def augmented_documents(
    folder: RunFolder,
    calls: Mapping[str, Sequence[Mapping[str, Any]]],
    syntax: CallSyntax,
    context: Context,
) -> Iterator[Row]:
    """Write the calls into their documents; documents without any are counted."""
    for index, count in folder.parts("ingest"):
        path = folder.part("ingest", index, count)
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["doc_id", "text"]):
                for document in batch.to_pylist():
                    own = calls.get(document["doc_id"], ())
                    context.count("*", "documents")
                    context.count("*", "augmented" if own else "without_calls")
                    if own:
                        text = document["text"]
                        shown = [{name: call[name] for name in CALL.names} for call in own]
                        yield Row(document["doc_id"], text, interleave(text, own, syntax), shown)


def right_runs(path: Path, context: Context) -> Iterator[Row]:
    """The runs of the agent loop that ended right, as texts; `text` keeps question and answer only.

    Raises ConfigError when the file cannot be read, WorkError when no run in it is right.
    """
    if not path.is_file():
        raise ConfigError(f"`augment.traces` = {str(path)!r}: no such file")
    found = documents_from_runs(path)
    if not found:
        raise WorkError(f"{path}: no run that ended right, nothing to train on")
    for document in found:
        lines = document["text"].splitlines()
        context.count("*", "documents")
        context.count("*", "augmented")
        context.count("*", "calls", 0)  # the actions are part of the text
        yield Row(document["doc_id"], f"{lines[0]}\n{lines[-1]}", document["text"], [])


def interleave(text: str, calls: Sequence[Mapping[str, Any]], syntax: CallSyntax) -> str:
    """Insert calls, given in order of position, with their results into a text.

    >>> call = {"tool": "Calculator", "arguments": "3 * 4", "result": "12", "char_start": 6}
    >>> interleave("It was 12.", [call], CallSyntax())
    'It was [Calculator(3 * 4) -> 12] 12.'
    """
    pieces = []
    begin = 0
    for call in calls:
        start = call["char_start"]
        pieces.append(text[begin:start])
        pieces.append(render(call["tool"], call["arguments"], call["result"], syntax))
        begin = start
    return "".join([*pieces, text[begin:]])


def split_rows(rows: Sequence[Row], validation_share: float) -> dict[str, list[Row]]:
    """Divide rows into train and validation by a hash of their ids.

    With two or more rows neither split is empty, whatever the share: the fine-tuning measures its
    perplexity on the one and learns from the other.
    """
    order = sorted(rows, key=lambda row: _draw(row.id))
    chosen = sum(_draw(row.id) < validation_share for row in order)
    chosen = min(max(chosen, 1), len(rows) - 1) if len(rows) > 1 else 0
    validation = {row.id for row in order[:chosen]}
    return {
        "train": [row for row in rows if row.id not in validation],
        "validation": [row for row in rows if row.id in validation],
    }


def _draw(doc_id: str) -> float:
    """A number in [0, 1) that belongs to a document."""
    return int(stable_hash("validation", doc_id), 16) / 2**64


def _write_split(folder: Path, split: str, rows: Sequence[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}-00000-of-00001.parquet"
    table = pa.Table.from_pylist([vars(row) for row in rows], schema=SCHEMA)
    # Small row groups: streaming and a hub's viewer read one at a time.
    pq.write_table(table, path, compression="zstd", row_group_size=1000)


def _content_hash(folder: Path) -> str:
    return stable_hash(
        *(sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir()))
    )


# -- nothing kept -------------------------------------------------------------------------------

_PLURALS = {
    "below_threshold": "below threshold",
    "lookahead_leak": "leaks",
    "duplicate": "duplicates",
    "conflict": "conflicts",
    "over_cap": "over the cap",
    "tool_error": "tool errors",
}


def explain_nothing_kept(context: Context) -> str:
    """Say why no call was kept, with the nearest misses and the way out."""
    columns = ["tool", "arguments", "result", "gain", "reason"]
    rows = context.folder.read_all("select", columns).to_pylist()
    if not rows:
        return (
            "0 kept because: no call was sampled; lower `sample.tau_s`, raise `sample.k` or give "
            "more documents (`callsieve status` and funnel.json show where they were lost)"
        )
    reasons = Counter(row["reason"] for row in rows)
    misses = sorted(
        (row for row in rows if row["reason"] == "below_threshold" and row["gain"] is not None),
        key=lambda row: -row["gain"],
    )
    parts = []
    for reason, n in reasons.most_common():
        part = f"{n} {_PLURALS.get(reason, reason)}"
        if reason == "below_threshold" and misses:
            best = misses[0]
            part += f" (best gain {best['gain']:.2f} {_threshold(context, best['tool'])})"
        parts.append(part)
    text = f"0 kept because: {', '.join(parts)}"
    if misses:
        text += "; nearest misses: " + "; ".join(_miss(row) for row in misses[:_NEAREST])
    return text


def _threshold(context: Context, tool: str) -> str:
    asked = context.config.select.tau_of(tool)
    used = threshold(context.folder, context.config, tool)
    if isinstance(asked, FalseKeepRate):
        rate = f"false_keep_rate {asked.false_keep_rate:g}"
        return f"at tau_f {used:.2f} for {rate}" if used is not None else f"and no tau_f for {rate}"
    return f"at tau_f {asked:g}"


def _miss(row: Mapping[str, Any]) -> str:
    call = render(row["tool"], row["arguments"], row["result"]).strip()
    return f"{call} gain {row['gain']:.2f}"
