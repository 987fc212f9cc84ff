"""Bench `ingest`: the streaming stage against datasets.load_dataset with the same cuts in a map.

Documents per second are compared in this process; peak resident memory is that of a fresh process
per size (`python -m pipeline.bench.ingest FILE`), the imports included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.bench import material
from pipeline.bench.measure import compare, document, growth_row
from pipeline.calls import holds_call_syntax
from pipeline.config import Config, parse_config
from pipeline.context import Context
from pipeline.errors import WorkError
from pipeline.records import stable_hash
from pipeline.shards import RunFolder
from pipeline.stages import ingest
from pipeline.stages.splitting import count_words, split_text
from pipeline.tools.filters import corpus_filter

TOOLS = ("Calculator", "Calendar", "WikiSearch")


def run(model: str, pairs: int, documents: int | None, tokens: int | None) -> dict[str, Any]:
    """Measure; 2,000 short documents by default (`model` plays no part; `tokens` are words)."""
    count = documents or 2000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {n: write_corpus(folder, n, tokens) for n in (count, 4 * count, 16 * count)}
        source = files[count]
        turns = iter(range(1_000_000))

        def fresh() -> Path:
            return folder / f"turn-{next(turns)}"

        wanted = _ids(_ours(source, fresh()))
        agrees = {"datasets.load_dataset and map": _theirs(source, fresh()) == wanted}

        def ours() -> float:
            _ours(source, fresh())
            return count

        def theirs() -> float:
            _theirs(source, fresh())
            return count

        comparisons = compare(ours, {"datasets.load_dataset and map": theirs}, agrees, pairs)
        rows: list[dict[str, Any]] = []
        for n, file in files.items():
            seconds, mib = _alone(file, fresh())
            rows.append({**growth_row(n, seconds / n, rows), "peak_memory_mib": round(mib, 1)})
    return document("ingest", comparisons, None, rows)


def write_corpus(folder: Path, count: int, words: int | None) -> Path:
    """A JSONL file of `count` documents, some of them twice."""
    path = folder / f"corpus-{count}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        source, text = _texts(words), ""
        for n in range(count):
            if n % 10 != 9:  # every tenth one repeats the one before
                text = f"{next(source)} It is number {n} of the list."
            file.write(json.dumps({"text": text, "date": "2021-03-04"}, ensure_ascii=False) + "\n")
    return path


def _texts(words: int | None) -> Iterator[str]:
    source = material.texts()
    for text in source:
        while words is not None and len(text.split()) < words:
            text = f"{text} {next(source)}"
        yield text


def config(source: Path) -> Config:
    """The settings of the stage."""
    return parse_config(
        {
            "name": "bench",
            "corpus": {"sources": [{"path": str(source), "name": "bench"}]},
            "model": {"path": "none"},
            "tools": [{"name": tool} for tool in TOOLS],
        }
    )


def _ours(source: Path, folder: Path) -> RunFolder:
    """The stage itself."""
    run_folder = RunFolder(folder)
    folder.mkdir()
    ingest.run(Context(config(source), run_folder, "ingest", "bench"))
    return run_folder


def _ids(folder: RunFolder) -> dict[str, list[str]]:
    table = folder.read_all("ingest", ["doc_id", "tools"])
    return dict(zip(table["doc_id"].to_pylist(), table["tools"].to_pylist(), strict=True))


def _theirs(source: Path, folder: Path) -> dict[str, list[str]]:
    """Load, split, filter, drop duplicates, write: with datasets. Returns doc_id -> tools."""
    import datasets

    settings = config(source)
    datasets.disable_progress_bars()

    def cut(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        rows: dict[str, list[Any]] = {"doc_id": [], "text": [], "date": [], "tools": []}
        for text, date in zip(batch["text"], batch["date"], strict=True):
            date = ingest.iso_date(date)
            if holds_call_syntax(text, TOOLS, settings.call_format.syntax):
                continue
            for piece in split_text(text, settings.corpus.max_words):
                if count_words(piece) < settings.corpus.min_words:
                    continue
                doc_id = stable_hash("bench", piece)
                values = {"doc_id": doc_id, "text": piece, "date": date, "url": None}
                passed = [tool for tool in TOOLS if corpus_filter(tool, values, settings.seed)]
                for key, value in (("doc_id", doc_id), ("text", piece), ("date", date)):
                    rows[key].append(value)
                rows["tools"].append(passed)
        return rows

    data = datasets.load_dataset(
        "json", data_files=str(source), split="train", cache_dir=str(folder / "cache")
    )
    data = data.map(cut, batched=True, remove_columns=data.column_names)
    seen: set[str] = set()

    def is_new(row: Mapping[str, Any]) -> bool:
        new = row["doc_id"] not in seen
        seen.add(row["doc_id"])
        return new

    data = data.filter(is_new)
    data.to_parquet(str(folder / "documents.parquet"))
    return dict(zip(data["doc_id"], data["tools"], strict=True))


# -- memory --------------------------------------------------------------------------------------


def _alone(source: Path, folder: Path) -> tuple[float, float]:
    """(seconds, peak resident MiB) of the stage in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.bench.ingest", str(source), str(folder)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    return found["seconds"], found["peak_mib"]


def main(source: str, folder: str) -> None:
    """Ingest one file and print what it took."""
    began = time.perf_counter()
    _ours(Path(source), Path(folder))
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "peak_mib": _peak_mib()}))


def _peak_mib() -> float:
    """Peak resident memory of this process (getrusage would count the parent's before exec)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise WorkError("no VmHWM in /proc/self/status: peak memory is measured on Linux only")


if __name__ == "__main__":
    main(*sys.argv[1:])
