"""Where the files of a model are, and their fingerprint; no library of models is loaded for it.

Looking at a run and selecting calls ask which model it is, and answer at once.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from pipeline.config import Model
from pipeline.errors import ConfigError
from pipeline.paths import PROJECT, find

TINY = PROJECT / ".cache/models/tiny"  # what `model.path: tiny` names
_EDGE_BYTES = 1 << 20


def locate(settings: Model) -> tuple[str, dict[str, Any]]:
    """Return what `from_pretrained` takes: a folder or id, and the GGUF file if there is one."""
    if settings.path == "tiny":
        return str(tiny_model()), {}
    path = find(Path(settings.path).expanduser())
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"`model.path` = {settings.path!r}: no such file")
        return str(path.parent), {"gguf_file": path.name}
    if not path.exists():
        if settings.path.startswith((".", "/", "~")) or settings.path.count("/") != 1:
            raise ConfigError(
                f"`model.path` = {settings.path!r}: no such folder; give one with config.json, "
                "a .gguf file, or a hub id such as owner/name"
            )
        return settings.path, {}
    if settings.gguf_file is not None:
        if not (path / settings.gguf_file).is_file():
            raise ConfigError(f"`model.gguf_file`: {path / settings.gguf_file}: no such file")
        return str(path), {"gguf_file": settings.gguf_file}
    if not (path / "config.json").is_file():
        found = [file.name for file in path.glob("*.gguf")] if path.is_dir() else []
        hint = f"; set `model.gguf_file` to one of {found}" if found else ""
        raise ConfigError(f"`model.path` = {settings.path!r}: holds no config.json{hint}")
    return str(path), {}


def tiny_model(folder: Path = TINY) -> Path:
    """Return the folder of the tiny model, making it when it is not there.

    Raises ConfigError when the bundled texts are not there.
    """
    if not (folder / "config.json").is_file():
        from pipeline.lm.tiny import bundled_texts, make_tiny_model

        print(f"making the tiny model in {folder} (once, some seconds) ...", file=sys.stderr)
        make_tiny_model(folder, bundled_texts())
    return folder


def model_fingerprint(settings: Model) -> str:
    """Name a model by its files (names, sizes, first and last MiB of each) or by its hub commit."""
    source, options = locate(settings)
    digest = hashlib.sha256(json.dumps(options).encode())
    folder = Path(source)
    if not folder.is_dir():
        return f"{source}@{_hub_commit(source)}"
    for file in sorted(folder.iterdir()):
        if file.suffix in {".safetensors", ".bin", ".json", ".gguf", ".model", ".txt"}:
            digest.update(f"{file.name}:{file.stat().st_size}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_EDGE_BYTES))
                stream.seek(max(file.stat().st_size - _EDGE_BYTES, 0))
                digest.update(stream.read(_EDGE_BYTES))
    return digest.hexdigest()[:16]


def _hub_commit(name: str) -> Any:
    from transformers import AutoConfig

    return getattr(AutoConfig.from_pretrained(name), "_commit_hash", None)
