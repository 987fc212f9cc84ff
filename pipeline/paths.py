"""Where the files that a configuration names are: in the current folder, else among the bundled.

A relative path is looked up in the current folder, as ever. Only when nothing is there, and it
begins with the name of a folder that comes with the project, is it looked up in the project's own
folder: the bundled texts and prompts are found from anywhere, and nobody's own file is passed over.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
BUNDLED = ("data", "configs", ".cache")


def folder_of(pattern: str | Path) -> Path:
    """The folder in which a relative path or glob is looked up: the current one or the project's.

    It is the current one also where nothing is found at all.
    """
    bundled = Path(pattern).parts[:1] and Path(pattern).parts[0] in BUNDLED
    if not bundled or _is_there(pattern, Path()) or not _is_there(pattern, PROJECT):
        return Path()
    return PROJECT


def find(path: str | Path) -> Path:
    """A file or folder by its path; see `folder_of`."""
    return folder_of(path) / path


def find_all(pattern: str) -> list[Path]:
    """What a path names, or a glob matches, in the order of the names; see `folder_of`."""
    folder = folder_of(pattern)
    if (folder / pattern).exists():
        return [folder / pattern]
    return [folder / name for name in sorted(glob.glob(pattern, root_dir=folder, recursive=True))]


def cache_folder() -> Path:
    """The user's cache folder: `CALLSIEVE_CACHE`, else `callsieve` where caches are kept."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("CALLSIEVE_CACHE") or os.path.join(caches, "callsieve"))


def _is_there(pattern: str | Path, folder: Path) -> bool:
    matches = glob.iglob(str(pattern), root_dir=folder, recursive=True)
    return (folder / pattern).exists() or next(matches, None) is not None
