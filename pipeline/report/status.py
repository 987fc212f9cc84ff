"""How far a run has come: shards, rows, seconds and an estimate per stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.errors import ConfigError
from pipeline.report.funnel import build_funnel
from pipeline.report.rows import run_config
from pipeline.shards import SHARD_FOLDERS, STAGE_FOLDERS, RunFolder, read_json


def status_document(
    folder: RunFolder, fingerprints: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the state of a run as a JSON document.

    `{"run", "name", "stages": [{"stage", "state", "done", "shards", "stale", "rows", "seconds",
    "estimate_s"}], "funnel"}`; `state` is waiting, partial, done or stale. `seconds` is the time
    of the finished shards; `estimate_s` what the others will take at the same pace (None while
    nothing of the stage is finished). `fingerprints` are those that the current configuration
    asks for; without them nothing is called stale.
    """
    config = run_config(folder)
    stages = [
        _stage_status(folder, stage, config.shards, (fingerprints or {}).get(stage))
        for stage in STAGE_FOLDERS
    ]
    return {
        "run": folder.path.name,
        "name": config.name,
        "stages": stages,
        "funnel": build_funnel(folder),
    }


def wanted(folder: RunFolder, say: Callable[[str], None]) -> dict[str, str] | None:
    """The fingerprints that the run's own settings ask for; says why where they are unknown."""
    from pipeline import runner  # which reports too

    try:
        return runner.wanted_fingerprints(folder)
    except (ConfigError, OSError) as error:
        say(f"what is stale cannot be told: {error}")
        return None


def warn_of_stale(folder: RunFolder, stage: str, say: Callable[[str], None]) -> None:
    """Say where what a stage has made no longer fits the settings of the run."""
    stages = status_document(folder, wanted(folder, say))["stages"]
    if any(own["stage"] == stage and own["state"] == "stale" for own in stages):
        again = f"callsieve {stage} {folder.path / 'config.yaml'} --run-dir {folder.path}"
        say(
            f"{stage} is stale: this is what it made before the settings changed; "
            f"`{again}` makes it anew"
        )


def _stage_status(
    folder: RunFolder, stage: str, shards: int, fingerprint: str | None
) -> dict[str, Any]:
    if stage in SHARD_FOLDERS:
        found = [folder.read_marker(stage, index, shards) for index in range(shards)]
    else:
        shards, found = 1, [read_json(folder.stage_marker(stage))]
    markers = [marker for marker in found if marker is not None]
    fresh = [m for m in markers if fingerprint in (None, m.get("fingerprint"))]
    seconds = sum(float(marker.get("seconds", 0.0)) for marker in fresh)
    left = shards - len(fresh)
    estimate = round(seconds / len(fresh) * left, 1) if fresh else None
    return {
        "stage": stage,
        "state": _state(len(fresh), len(markers) - len(fresh), shards),
        "done": len(fresh),
        "shards": shards,
        "stale": len(markers) - len(fresh),
        "rows": sum(int(marker.get("rows", 0)) for marker in fresh),
        "seconds": round(seconds, 1),
        "estimate_s": estimate,
    }


def _state(fresh: int, stale: int, shards: int) -> str:
    if fresh == shards:
        return "done"
    if fresh:
        return "partial"
    return "stale" if stale else "waiting"
