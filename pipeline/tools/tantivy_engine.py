"""BM25 by tantivy (extra `tantivy`): the faster engine behind WikiSearch, for large collections.

The passages lie in the SQLite index file; tantivy's own files lie in a folder beside it, named by
the contents.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.tools.articles import Passage
from pipeline.tools.base import MissingExtra
from pipeline.tools.index import ReadOnlyIndex, read_meta

_HEAP_BYTES = 64 * 2**20
# Words of the title count so often, as with FTS5's column weights. Two fields would not do: their
# scores add up, and a word in a short title would outweigh every other word of the query.
_TITLE_WEIGHT = 3


class TantivyEngine:
    """Finds passages by their words; opened once, safe for many threads."""

    def __init__(self, index: Path) -> None:
        self.passages = ReadOnlyIndex(index)
        self.fingerprint = read_meta(index).get("fingerprint", "")
        self.path = _folder(index, self.fingerprint)
        self._index: Any = None
        self._owner = 0

    def find(self, terms: list[str], limit: int, marks: tuple[str, str]) -> list[Passage]:
        """The best passages by BM25, words like the terms between `marks`, best first."""
        index = self._opened()
        # Words only, so there is nothing to escape.
        query = index.parse_query(" ".join(f'"{term}"' for term in terms), ["text"])
        searcher = index.searcher()
        connection = self.passages.connection()
        like = "|".join(re.escape(_stem(term)) for term in terms)
        pattern = re.compile(rf"\b(?:{like})\w*", re.IGNORECASE)
        found = []
        for score, address in searcher.search(query, limit, count=False).hits:
            row = searcher.doc(address)["id"][0]
            title, text = connection.execute(
                "SELECT title, text FROM passages WHERE id = ?", (row,)
            ).fetchone()
            marked = pattern.sub(lambda match: f"{marks[0]}{match.group()}{marks[1]}", text)
            found.append(Passage(title, marked, score))
        return found

    def _opened(self) -> Any:
        if self._index is None or self._owner != os.getpid():
            index = _tantivy().Index(_schema(), path=str(self.path))
            _register(index)
            self._index, self._owner = index, os.getpid()
        return self._index


def fill_tantivy(
    index: Path, connection: sqlite3.Connection, passages: Iterator[Passage], fingerprint: str
) -> None:
    """Write passages into the SQLite file and into tantivy's folder; drop folders of before."""
    target = _folder(index, fingerprint)
    temporary = target.with_name(f"{target.name}.tmp")
    for path in index.parent.glob(f"{index.name}.*.tantivy*"):
        shutil.rmtree(path)
    temporary.mkdir(parents=True)
    tantivy = _tantivy()
    engine = tantivy.Index(_schema(), path=str(temporary))
    _register(engine)
    writer = engine.writer(_HEAP_BYTES, 1)  # one thread: the same order of equal scores each time
    connection.execute("CREATE TABLE passages (id INTEGER PRIMARY KEY, title TEXT, text TEXT)")
    connection.execute("BEGIN")
    for row, passage in enumerate(passages):
        connection.execute(
            "INSERT INTO passages VALUES (?, ?, ?)", (row, passage.title, passage.text)
        )
        document = tantivy.Document()
        document.add_unsigned("id", row)
        document.add_text("text", f"{passage.title} " * _TITLE_WEIGHT + passage.text)
        writer.add_document(document)
    connection.execute("COMMIT")
    writer.commit()
    writer.wait_merging_threads()
    temporary.rename(target)


def _folder(index: Path, fingerprint: str) -> Path:
    return index.with_name(f"{index.name}.{fingerprint}.tantivy")


def _tantivy() -> Any:
    try:
        import tantivy
    except ImportError:
        raise MissingExtra("WikiSearch with the engine tantivy", "tantivy") from None
    return tantivy


def _schema() -> Any:
    builder = _tantivy().SchemaBuilder()
    builder.add_unsigned_field("id", stored=True)
    builder.add_text_field("text", tokenizer_name="folded")
    return builder.build()


def _register(index: Any) -> None:
    """The tokenizer of both fields: lower case, no accents, English stems, as in FTS5."""
    tantivy = _tantivy()
    analyzer = (
        tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
        .filter(tantivy.Filter.lowercase())
        .filter(tantivy.Filter.ascii_fold())
        .filter(tantivy.Filter.stemmer("english"))
        .build()
    )
    index.register_tokenizer("folded", analyzer)


def _stem(term: str) -> str:
    """The beginning that other forms of a word share, roughly; only snippets depend on it."""
    return term if len(term) < 5 else term[: max(4, len(term) - 3)]
