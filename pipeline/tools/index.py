"""A search index as one SQLite file: built once, streaming, and shared by any number of processes.

The file is built under a temporary name and then renamed; it never changes in place. It knows a
fingerprint of its sources' contents and of its settings, so a changed source builds a new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.errors import ConfigError
from pipeline.paths import cache_folder, folder_of
from pipeline.progress import counted
from pipeline.tools.articles import (
    ArticleFields,
    Passage,
    content_digests,
    read_articles,
    resolve_sources,
    split_passages,
)

_FORMAT = 1  # of the file; a change rebuilds
Digests = Mapping[str, tuple[int, int, str]]
# Fills an open index with passages; may write files beside it, named by the fingerprint.
Fill = Callable[[sqlite3.Connection, Iterator[Passage], str], None]


@dataclass(frozen=True)
class IndexSettings:
    """What decides the contents of an index. `engine` and `extra` belong to the search tool."""

    engine: str
    sources: tuple[str, ...]
    fields: ArticleFields
    passage_words: int
    extra: tuple[str, ...] = ()

    def listed(self) -> list[Any]:
        fields = [self.fields.title, self.fields.text]
        return [_FORMAT, self.engine, *fields, self.passage_words, *self.extra]


def default_index(settings: IndexSettings) -> Path:
    """The index file in the user's cache folder."""
    sources = [
        s if s.startswith("hf:") else os.path.abspath(folder_of(s) / s) for s in settings.sources
    ]
    name = _hash([sources, settings.listed()])[:16]
    return cache_folder() / f"{settings.engine}-{name}.sqlite"


def build_index(settings: IndexSettings, index: Path, fill: Fill) -> Path:
    """Build the index unless one of exactly these contents and settings is there; return its path.

    Several processes may call it at the same time: one builds, the others wait. Progress goes to
    stderr. Raises ConfigError for a missing source, a bad record, or a file that is no index.
    """
    resolved = resolve_sources(settings.sources)
    index.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{index}.lock"):
        stored = read_meta(index)
        known = json.loads(stored.get("digests", "{}"))
        known = {path: (row[0], row[1], row[2]) for path, row in known.items()}
        digests = content_digests(resolved, known)
        # Of the contents in their order, not of names and times: a copied source is the same.
        contents = [digest for _, _, digest in digests.values()]
        fingerprint = _hash([settings.listed(), contents])
        if stored.get("fingerprint") != fingerprint:
            passages = _passages(settings, resolved)
            _write(index, passages, fill, digests, fingerprint, ", ".join(settings.sources))
    return index


def _write(
    index: Path,
    passages: Iterator[Passage],
    fill: Fill,
    digests: Digests,
    fingerprint: str,
    described: str,
) -> None:
    temporary = index.with_name(f"{index.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    connection = sqlite3.connect(temporary, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)")
        fill(connection, passages, fingerprint)
        meta = {"fingerprint": fingerprint, "digests": json.dumps(digests, ensure_ascii=False)}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
        (count,) = connection.execute("SELECT count(*) FROM passages").fetchone()
        connection.close()
        if count == 0:
            raise ConfigError(f"{described}: no article with text in it")
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, index)
    finally:
        connection.close()
        temporary.unlink(missing_ok=True)


def _passages(settings: IndexSettings, resolved: Sequence[Path | str]) -> Iterator[Passage]:
    articles = read_articles(resolved, settings.fields)
    for article in counted(articles, "articles", "index"):
        for passage in split_passages(article, settings.passage_words):
            yield Passage(_storable(passage.title), _storable(passage.text))


def _storable(text: str) -> str:
    """Without control characters (searches mark matches with them) and half surrogate pairs."""
    text = "".join(character if character >= " " else " " for character in text)
    return text.encode(errors="replace").decode()


def read_meta(index: Path) -> dict[str, str]:
    """The index's own description; empty for a missing file.

    Raises ConfigError for a file that is no index: `index` may point at something precious.
    """
    if not index.exists():
        return {}
    connection = sqlite3.connect(f"{index.resolve().as_uri()}?mode=ro", uri=True)
    try:
        return dict(connection.execute("SELECT key, value FROM meta").fetchall())
    except sqlite3.DatabaseError:
        raise ConfigError(f"{index}: exists and is no search index; name another file") from None
    finally:
        connection.close()


class ReadOnlyIndex:
    """Connections to an index file: one per thread and process, so no lock is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()

    def connection(self) -> sqlite3.Connection:
        """This thread's connection."""
        if getattr(self._local, "owner", None) != os.getpid():
            uri = f"{self.path.resolve().as_uri()}?mode=ro&immutable=1"
            self._local.connection = sqlite3.connect(uri, uri=True)
            self._local.owner = os.getpid()
        connection: sqlite3.Connection = self._local.connection
        return connection


def _hash(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
