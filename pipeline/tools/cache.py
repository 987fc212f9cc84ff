"""A persistent cache of tool results in one SQLite file, safe across threads and processes."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS results (
    key BLOB PRIMARY KEY, tool TEXT, version TEXT, arguments TEXT, document TEXT,
    result TEXT, cut INTEGER, error_kind TEXT, error TEXT
) WITHOUT ROWID
"""


@dataclass(frozen=True)
class CachedResult:
    """What a tool answered: a result, or a failure that depends on the arguments alone."""

    result: str | None
    cut: bool
    error_kind: str | None
    error: str | None


@dataclass(frozen=True)
class CacheKey:
    """Everything that the answer depends on. `document` is empty unless the tool reads it."""

    tool: str
    version: str
    arguments: str
    document: str

    @property
    def digest(self) -> bytes:
        parts = (self.tool, self.version, self.arguments, self.document)
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()


class ResultCache:
    """`get` and `put`; a later run over the same calls executes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._owner = 0
        with self._lock:
            self._connect()

    def get(self, key: CacheKey) -> CachedResult | None:
        """The stored answer, or None."""
        with self._lock:
            row = self._connect().execute(
                "SELECT result, cut, error_kind, error FROM results WHERE key = ?", (key.digest,)
            )
            found = row.fetchone()
        return CachedResult(found[0], bool(found[1]), found[2], found[3]) if found else None

    def put(self, key: CacheKey, value: CachedResult) -> None:
        """Store an answer; the first of several processes wins, all would store the same."""
        row = (key.digest, key.tool, key.version, key.arguments, key.document)
        answer = (value.result, value.cut, value.error_kind, value.error)
        with self._lock:
            self._connect().execute(
                "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row + answer
            )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None and self._owner == os.getpid():
                self._connection.close()
            self._connection = None

    def _connect(self) -> sqlite3.Connection:
        # A connection must not cross a fork: each process opens its own.
        if self._connection is None or self._owner != os.getpid():
            connection = sqlite3.connect(
                self.path, timeout=60.0, isolation_level=None, check_same_thread=False
            )
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(_SCHEMA)
            self._connection, self._owner = connection, os.getpid()
        return self._connection
