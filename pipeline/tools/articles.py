"""Where a search tool's texts come from: JSONL, Parquet, a data set folder or a hub id."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.errors import ConfigError
from pipeline.paths import find_all

_FILES = (".jsonl", ".jsonl.gz", ".parquet")
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(\s+)(?=[\"'“‘(\[]*[^\W_])")


@dataclass(frozen=True)
class Passage:
    """A piece of an article; `score` is a search's, higher is better."""

    title: str
    text: str
    score: float = 0.0


@dataclass(frozen=True)
class ArticleFields:
    """The names of the two fields of a record."""

    title: str = "title"
    text: str = "text"


def resolve_sources(sources: Sequence[str]) -> list[Path | str]:
    """Files and folders of the given paths, globs and ids; raises ConfigError for what is missing.

    A hub id is written `hf:NAME` or `hf:NAME:SPLIT`.
    """
    found: list[Path | str] = []
    for source in sources:
        if source.startswith("hf:"):
            found.append(source)
            continue
        paths = find_all(source)
        if not paths:
            raise ConfigError(
                f"{source!r}: no such file, folder or glob match; a data set of a hub is written "
                "hf:NAME"
            )
        for path in paths:
            if path.is_file() and not path.name.endswith(_FILES):
                raise ConfigError(f"{str(path)!r}: expected one of {', '.join(_FILES)} or a folder")
            found.append(path)
    if not found:
        raise ConfigError("no source is given; name files, globs, a folder or hf:NAME")
    return found


def source_files(sources: Sequence[str]) -> list[Path]:
    """All files of the given sources, those of hubs left out; raises ConfigError as above."""
    found = [source for source in resolve_sources(sources) if isinstance(source, Path)]
    return [path for source in found for path in _files_of(source)]


def content_digests(
    resolved: Sequence[Path | str], known: dict[str, tuple[int, int, str]]
) -> dict[str, tuple[int, int, str]]:
    """Size, modification time (ns) and content hash per file, in the order of the sources.

    A file whose size and time are those in `known` is not read again.
    """
    digests: dict[str, tuple[int, int, str]] = {}
    for source in resolved:
        if isinstance(source, str):
            digests[source] = (0, 0, source)
            continue
        for path in _files_of(source):
            status = path.stat()
            before = known.get(str(path))
            if before is not None and before[:2] == (status.st_size, status.st_mtime_ns):
                digests[str(path)] = before
                continue
            with path.open("rb") as file:
                content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            digests[str(path)] = (status.st_size, status.st_mtime_ns, content.hexdigest())
    return digests


def read_articles(resolved: Sequence[Path | str], fields: ArticleFields) -> Iterator[Passage]:
    """Stream the articles of all sources; raises ConfigError naming the line of a bad record."""
    for source in resolved:
        for where, record in _records(source):
            title, text = record.get(fields.title), record.get(fields.text)
            if not isinstance(title, str) or not isinstance(text, str):
                missing = fields.title if not isinstance(title, str) else fields.text
                has = ", ".join(map(str, record)) or "nothing"
                raise ConfigError(f"{where}: field {missing!r} is no text; the record has: {has}")
            if text.strip():
                yield Passage(" ".join(title.split()), " ".join(text.split()))


def split_passages(article: Passage, max_words: int) -> Iterator[Passage]:
    """Cut an article at sentence ends into pieces of about `max_words` words."""
    piece: list[str] = []
    words = 0
    for sentence in split_sentences(article.text):
        count = len(sentence.split())
        if piece and words + count > max_words:
            yield Passage(article.title, " ".join(piece))
            piece, words = [], 0
        piece.append(sentence)
        words += count
    if piece:
        yield Passage(article.title, " ".join(piece))


def split_sentences(text: str) -> list[str]:
    """Sentences of `text` by their closing marks; common short forms do not end one."""
    ends = [match.span(1) for match in _SENTENCE_END.finditer(text)]
    starts = [0, *(end for _, end in ends)]
    stops = [*(start for start, _ in ends), len(text)]
    sentences: list[str] = []
    for part in (text[start:stop] for start, stop in zip(starts, stops, strict=True)):
        if sentences and _ends_in_short_form(sentences[-1]):
            sentences[-1] = f"{sentences[-1]} {part}"
        elif part:
            sentences.append(part)
    return sentences


_ABBREVIATIONS = "mr mrs ms dr prof st mt no vs etc ca c approx e.g i.e u.s jr sr gen col lt inc co"
_SHORT_FORMS = frozenset(_ABBREVIATIONS.split())


def _ends_in_short_form(sentence: str) -> bool:
    if not sentence.endswith("."):
        return False
    last = sentence[:-1].rsplit(None, 1)[-1].strip("(\"'“‘[").lower() if sentence[:-1] else ""
    initial = len(last) == 1 and last.isalpha()
    return initial or last in _SHORT_FORMS


def _records(source: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(source, str) or source.is_dir():
        yield from _data_set_records(source)
    elif source.suffix == ".parquet":
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(source) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from ((str(source), record) for record in batch.to_pylist())
    else:
        with _open_text(source) as lines:
            yield from _jsonl_records(source, lines)


def _jsonl_records(source: Path, lines: IO[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{source}:{number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{source}:{number}: expected an object per line")
        yield f"{source}:{number}", record


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _data_set_records(source: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    if isinstance(source, Path):
        if (source / "dataset_info.json").exists() or (source / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(str(source))
            splits = loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded]
        else:
            splits = datasets.load_dataset(str(source), streaming=True).values()
    else:
        name, _, split = source.removeprefix("hf:").partition(":")
        splits = [datasets.load_dataset(name, split=split or "train", streaming=True)]
    for rows in splits:
        for record in rows:
            yield str(source), dict(record)


def _files_of(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    return sorted(path for path in source.rglob("*") if path.is_file())
