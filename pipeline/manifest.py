"""What a run folder says of itself: `config.yaml`, every value, and `manifest.json`.

The manifest names versions, the model and its fingerprint, the device, and the fingerprints of the
stages; it also knows where the run was last worked on, so that its relative paths can be followed.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from pipeline import __version__
from pipeline.config import Config, dump_config
from pipeline.fingerprints import fingerprints
from pipeline.lm.files import model_fingerprint
from pipeline.shards import RunFolder, read_json, write_json, write_text

_LIBRARIES = ("torch", "transformers", "datasets", "accelerate", "numpy")


def working_folder(folder: RunFolder) -> Path:
    """Where a run was last worked on; the current folder where that is not known or gone.

    It is kept relative to the run, so that a project can be moved or copied with its runs.
    """
    known = (read_json(folder.path / "manifest.json") or {}).get("working_folder")
    there = folder.path.resolve() / known if known else Path.cwd()
    return there if there.is_dir() else Path.cwd()


def has_settings(config: Config, folder: RunFolder) -> bool:
    """Whether a run folder tells of these settings already, as last used from this folder."""
    written = folder.path / "config.yaml"
    manifest = read_json(folder.path / "manifest.json") or {}
    return (
        written.is_file()
        and written.read_text(encoding="utf-8") == dump_config(config)
        and manifest.get("working_folder") == _from_run(folder)
        and manifest.get("fingerprints") == fingerprints(config)
    )


def _from_run(folder: RunFolder) -> str:
    """The current folder as seen from the run, so that a project can move with its runs."""
    return os.path.relpath(Path.cwd().resolve(), folder.path.resolve())


def write_settings(config: Config, folder: RunFolder, device: str | None) -> None:
    """Write `config.yaml` and `manifest.json`; without a device, that of the work before stays."""
    write_text(folder.path / "config.yaml", dump_config(config))
    path = folder.path / "manifest.json"
    model = model_fingerprint(config.model)
    manifest = {
        "callsieve": __version__,
        "working_folder": _from_run(folder),
        "git_revision": _git_revision(),
        "python": platform.python_version(),
        **{library: version(library) for library in _LIBRARIES},
        "model": config.model.path,
        "model_fingerprint": model,
        "tokenizer_fingerprint": model,
        "seed": config.seed,
        "device": device or (read_json(path) or {}).get("device"),
        "dtype": config.model.dtype,
        "fingerprints": fingerprints(config),
    }
    write_json(path, manifest)


def _git_revision() -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
