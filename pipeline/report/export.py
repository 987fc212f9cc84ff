"""The augmented texts in other forms: `callsieve export RUN --format F`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ConfigError, WorkError
from pipeline.report.rows import run_config
from pipeline.shards import RunFolder, add_counts

FORMATS = {
    "jsonl": "export.jsonl",
    "parquet": "export.parquet",
    "chat-messages": "export-chat-messages.jsonl",
}
REQUEST = "Write a text. Call a tool where its result helps you to go on."
"""What the user says in `chat-messages`: a corpus text answers nobody, a chat needs a beginning."""


def export_run(folder: RunFolder, form: str, output: Path | None = None) -> Path:
    """Write the data set of a run as one file and return its path.

    - `jsonl`, `parquet`: the columns of the data set and `split`.
    - `chat-messages`: JSONL with `messages` (each call a structured tool call, its result a tool
      message) and `tools` (their schemas), as chat templates take them.

    Without `output` the file goes into the run folder. Raises ConfigError for an unknown format,
    WorkError when the run has no data set yet.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format {form}: allowed are {', '.join(FORMATS)}")
    table = dataset_table(folder)
    path = output or folder.path / FORMATS[form]
    if path.is_dir():
        raise ConfigError(f"-o {path}: is a folder; allowed: the file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        if form == "parquet":
            pq.write_table(table, temporary, compression="zstd")
        else:
            rows: Iterable[Mapping[str, Any]] = _rows(table)
            if form == "chat-messages":
                rows = _chats(rows, folder)
            with temporary.open("w", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def describe_export(folder: RunFolder, form: str, path: Path) -> str:
    """Say what a written file holds, and how it is loaded."""
    files = sorted((folder.stage("augment") / "data").glob("*.parquet"))
    counts: dict[str, int] = {}
    for file in files:
        add_counts(counts, {file.name.split("-")[0]: pq.read_metadata(file).num_rows})
    rows = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    kind, loader = ("Parquet", "parquet") if form == "parquet" else ("JSON Lines", "json")
    what = "`messages` and `tools` per text" if form == "chat-messages" else "a text per row"
    return (
        f"{sum(counts.values()):,} rows ({rows}; column `split`), {kind}, {what}\n"
        f'load it: datasets.load_dataset("{loader}", data_files="{path}")'
    )


def dataset_table(folder: RunFolder) -> pa.Table:
    """Read both splits of the data set of a run, with the column `split`."""
    files = sorted((folder.stage("augment") / "data").glob("*.parquet"))
    if not files:
        raise WorkError(f"{folder.path}: no data set yet; run `augment` first")
    tables = []
    for file in files:
        table = pq.read_table(file)
        split = file.name.split("-")[0]
        tables.append(table.add_column(1, "split", pa.array([split] * table.num_rows, pa.string())))
    return pa.concat_tables(tables)


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=1000):
        yield from batch.to_pylist()


def _chats(rows: Iterable[Mapping[str, Any]], folder: RunFolder) -> Iterator[dict[str, Any]]:
    from pipeline.tools.arguments import parse_arguments
    from pipeline.tools.catalogue import build_tools

    specs = {tool.spec.name: tool.spec for tool in build_tools(run_config(folder).tools)}
    schemas = [spec.schema_for_chat() for spec in specs.values()]
    for row in rows:
        yield {
            "id": row["id"],
            "split": row["split"],
            "messages": chat_messages(
                row["text"],
                [
                    {**call, "arguments": parse_arguments(specs[call["tool"]], call["arguments"])}
                    for call in row["calls"]
                ],
            ),
            "tools": schemas,
        }


def chat_messages(text: str, calls: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write a text and its calls, in order of position, as the messages of a chat."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": REQUEST}]
    begin = 0
    for number, call in enumerate(calls, 1):
        function = {"name": call["tool"], "arguments": call["arguments"]}
        name = f"call_{number}"
        messages += [
            {
                "role": "assistant",
                "content": text[begin : call["char_start"]],
                "tool_calls": [{"id": name, "type": "function", "function": function}],
            },
            {
                "role": "tool",
                "tool_call_id": name,
                "name": call["tool"],
                "content": call["result"],
            },
        ]
        begin = call["char_start"]
    messages.append({"role": "assistant", "content": text[begin:]})
    return messages
