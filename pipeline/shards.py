"""The run folder: shard files, completion markers, fingerprints, metrics.

A shard is written under a temporary name and renamed; its marker (`.json`) is written last and is
the only proof that the shard is done. A killed stage therefore leaves either nothing or a whole
shard, and the same command goes on with the rest.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import WorkError

SHARD_FOLDERS = {
    "ingest": "01-documents",
    "sample": "02-candidates",
    "execute": "03-executed",
    "score": "04-scored",
    "select": "05-selected",
}
STAGE_FOLDERS = {
    **SHARD_FOLDERS,
    "augment": "06-dataset",
    "finetune": "07-model",
    "evaluate": "08-evaluation",
}


@dataclass(frozen=True)
class RunFolder:
    """Paths and files of one run."""

    path: Path

    def stage(self, stage: str) -> Path:
        return self.path / STAGE_FOLDERS[stage]

    def part(self, stage: str, index: int, count: int) -> Path:
        return self.stage(stage) / f"part-{index:05d}-of-{count:05d}.parquet"

    def marker(self, stage: str, index: int, count: int) -> Path:
        return self.part(stage, index, count).with_suffix(".json")

    def stage_marker(self, stage: str) -> Path:
        """Marker of a stage that is not sharded (augment, finetune, evaluate)."""
        return self.stage(stage) / "done.json"

    # -- shards ---------------------------------------------------------------------------------

    def write_part(
        self, stage: str, index: int, count: int, table: pa.Table, marker: Mapping[str, Any]
    ) -> None:
        """Write one shard and then its marker; `marker` must hold `fingerprint`."""
        target = self.part(stage, index, count)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            pq.write_table(table, temporary, compression="zstd")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        write_json(self.marker(stage, index, count), {"rows": table.num_rows, **marker})

    def read_part(self, stage: str, index: int, count: int) -> pa.Table:
        return pq.read_table(self.part(stage, index, count))

    def read_marker(self, stage: str, index: int, count: int) -> dict[str, Any] | None:
        return read_json(self.marker(stage, index, count))

    def done(self, stage: str, index: int, count: int, fingerprint: str) -> bool:
        """Tell whether a shard is complete and belongs to this configuration."""
        marker = self.read_marker(stage, index, count)
        return (
            marker is not None
            and marker.get("fingerprint") == fingerprint
            and self.part(stage, index, count).exists()
        )

    def parts(self, stage: str) -> list[tuple[int, int]]:
        """Return (index, count) of the complete shards of a stage, in order."""
        found = []
        for marker in sorted(self.stage(stage).glob("part-*-of-*.json")):
            _, index, _, count = marker.stem.split("-")
            found.append((int(index), int(count)))
        return found

    def read_all(self, stage: str, columns: list[str] | None = None) -> pa.Table:
        """Read all complete shards of a stage as one table."""
        parts = [self.part(stage, index, count) for index, count in self.parts(stage)]
        if not parts:
            raise WorkError(f"{self.stage(stage)}: no finished shard yet; run `{stage}` first")
        return pa.concat_tables([pq.read_table(part, columns=columns) for part in parts])

    def clear(self, stage: str) -> None:
        """Remove everything a stage has written."""
        shutil.rmtree(self.stage(stage), ignore_errors=True)

    # -- metrics --------------------------------------------------------------------------------

    def log(self, event: str, **values: Any) -> None:
        """Append one line to `metrics.jsonl`."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **values})
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name and rename it: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text under a temporary name and rename it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Read JSON; None when the file does not exist or is not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def add_counts(total: dict[str, int], more: Mapping[str, int]) -> None:
    """Merge counts per reason."""
    for key, value in more.items():
        total[key] = total.get(key, 0) + value


def merge_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up counts per reason over shards."""
    total: dict[str, int] = {}
    for item in counts:
        add_counts(total, item)
    return total
