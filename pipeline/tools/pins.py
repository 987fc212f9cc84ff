"""Definitions of remote tools, pinned: what a server offered once is what it must offer again.

The lock file is JSON: server -> {"hash", "tools": {name: definition}}. A server that is new is
pinned as it is; a changed definition raises `DefinitionsChanged` until its hash is accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.errors import ConfigError

Definitions = Mapping[str, Mapping[str, Any]]


class DefinitionsChanged(ConfigError):
    """A server's tools are not those that were pinned; the run stops until that is accepted."""


def check_pins(lock: Path, server: str, definitions: Definitions, accept: str | None) -> str:
    """Compare with the lock file, pin what is new or accepted; return the hash of `definitions`.

    `accept` is (the beginning of) a hash that the user has looked at. Raises DefinitionsChanged
    with what changed, and ConfigError for a lock file that cannot be read.
    """
    found = hash_definitions(definitions)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{lock}.lock"):
        pinned = _read(lock)
        entry = pinned.get(server)
        if entry is not None and entry["hash"] == found:
            return found
        if entry is not None and not (accept and len(accept) >= 8 and found.startswith(accept)):
            changes = "; ".join(_changes(entry["tools"], definitions))
            raise DefinitionsChanged(
                f"MCP server {server!r} offers other tools than those pinned in {lock}: {changes}. "
                f"If that is what you want, set `accept: {found[:12]}` for this server"
            )
        pinned[server] = {"hash": found, "tools": {k: dict(v) for k, v in definitions.items()}}
        temporary = lock.with_name(f"{lock.name}.{os.getpid()}.tmp")
        text = json.dumps(pinned, ensure_ascii=False, indent=2, sort_keys=True)
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, lock)
    return found


def pinned_tools(lock: Path, server: str) -> dict[str, Any]:
    """The definitions of a server's tools as pinned, by name; empty when it is not."""
    tools: dict[str, Any] = _read(lock).get(server, {}).get("tools", {})
    return tools


def pinned_names(lock: Path, server: str) -> list[str]:
    """The tools of a server as pinned; empty when it is not."""
    return list(pinned_tools(lock, server))


def is_pinned(lock: Path, server: str, accept: str | None) -> bool:
    """Whether a server is pinned, with the definitions that `accept` names if it names any."""
    entry = _read(lock).get(server)
    return entry is not None and (not accept or entry["hash"].startswith(accept))


def hash_definitions(definitions: Definitions) -> str:
    """One hash of all names, descriptions, schemas and annotations of a server."""
    text = json.dumps(definitions, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _read(lock: Path) -> dict[str, Any]:
    if not lock.exists():
        return {}
    try:
        pinned = json.loads(lock.read_text(encoding="utf-8"))
        for entry in pinned.values():
            entry["hash"], entry["tools"]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(f"{lock}: is no lock file of MCP definitions ({error!r})") from None
    return dict(pinned)


def _changes(before: Definitions, now: Definitions) -> list[str]:
    changes = [f"new tool {name!r}" for name in sorted(now.keys() - before.keys())]
    changes += [f"tool {name!r} is gone" for name in sorted(before.keys() - now.keys())]
    for name in sorted(now.keys() & before.keys()):
        keys = sorted(
            key
            for key in now[name].keys() | before[name].keys()
            if now[name].get(key) != before[name].get(key)
        )
        if keys:
            changes.append(f"{name!r} changed its {', '.join(keys)}")
    return changes
