"""Readers: what the sources of a configuration hold, record by record, in a fixed order.

A reader yields a `Record` or, for input that cannot be one, a `Reject`; it never holds more than
one record (Parquet: one small batch) in memory.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import Source
from pipeline.errors import ConfigError, WorkError
from pipeline.paths import find, find_all

SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet")
EXCERPT = 200  # characters of a rejected record that are kept
_BATCH = 256  # rows of a Parquet file that are in memory together


@dataclass(frozen=True, slots=True)
class Record:
    """One text with what is known about it; `line` counts from 1 (rows for Parquet)."""

    text: str
    date: Any
    url: str | None
    source: str
    file: str
    line: int
    other_fields: str = ""  # what there is in place of the date field that the source names


@dataclass(frozen=True, slots=True)
class Reject:
    """Input that was left out, and why."""

    file: str
    line: int
    reason: str
    excerpt: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands."""

    source: str
    file: str


def open_sources(sources: Iterable[Source], max_bytes: int) -> Iterator[Record | Reject]:
    """Read all sources, one after the other.

    The files are looked up at once, so a missing one is reported before anything is read.
    Raises ConfigError for a file that is missing, unreadable, of an unknown kind, or without the
    field that should hold the text, or a `date_field` of one's own.
    """
    streams: list[Iterator[Record | Reject]] = []
    for source in sources:
        if source.dataset is not None:
            rows = iter(open_dataset(source.dataset, source.split))
            stream = _read_dataset(rows, source, max_bytes)
        else:
            stream = _read_files(files_of(source), source, max_bytes)
        streams.append(_with_fields(itertools.islice(stream, source.limit), source))
    return itertools.chain.from_iterable(streams)


def _with_fields(stream: Iterator[Record | Reject], source: Source) -> Iterator[Record | Reject]:
    """Pass on what a source holds.

    Raises ConfigError at its end when the text field was never filled, or when the date field has
    another name than the default and no record has it.
    """
    first: Reject | None = None
    undated: Record | None = None
    filled = dated = False
    for item in stream:
        if isinstance(item, Reject) and item.reason == "missing_text_field":
            first = first or item
        else:
            filled = True
            if isinstance(item, Record) and item.other_fields:
                undated = undated or item
            elif isinstance(item, Record):
                dated = True
        yield item
    if first is not None and not filled:
        raise _without_text(first.file, source, f"no record has it filled; {first.excerpt}")
    if undated is not None and not dated:
        raise _without_date(undated.file, source, f"no record has it; {undated.other_fields}")


def _without_text(file: str, source: Source, what: str) -> ConfigError:
    return ConfigError(
        f"corpus.sources: {file}: `text_field` = {source.text_field!r}: {what}; name the one that "
        "holds the text"
    )


def _without_date(file: str, source: Source, what: str) -> ConfigError:
    return ConfigError(
        f"corpus.sources: {file}: `date_field` = {source.date_field!r}: {what}; name the one that "
        "holds the date, or leave `date_field` out"
    )


def _lacks_date(source: Source, fields: Iterable[Any]) -> bool:
    """Whether a date field of one's own is not among the fields; the default one is optional."""
    return source.date_field not in (None, Source.date_field, *fields)


def _read_files(files: Iterable[Path], source: Source, max_bytes: int) -> Iterator[Record | Reject]:
    for path in files:
        yield from read_file(path, source, max_bytes)


def files_of(source: Source) -> list[Path]:
    """Return the files of a source in the order of their names."""
    pattern = str(source.path)
    found = find_all(pattern)
    if find(pattern).is_dir():
        raise ConfigError(
            f"corpus.sources: path {pattern!r} is a folder; give a glob such as "
            f"{pattern.rstrip('/')}/*.jsonl, or `dataset: {pattern}` for a data set folder"
        )
    files = [path for path in found if not path.is_dir()]
    if not files:
        raise ConfigError(f"corpus.sources: no file matches {pattern!r}")
    for path in files:
        kind_of(path)
    return files


def kind_of(path: Path) -> str:
    """Return the suffix that says how a file is read, `.gz` aside."""
    name = path.name.lower()
    packed = name.endswith(".gz")
    kind = next((suffix for suffix in SUFFIXES if name.removesuffix(".gz").endswith(suffix)), None)
    if kind is None or (packed and kind == ".parquet"):
        raise ConfigError(
            f"corpus.sources: {path}: unknown kind of file; allowed are {', '.join(SUFFIXES)} "
            "(.gz for all but Parquet)"
        )
    return kind


def read_file(path: Path, source: Source, max_bytes: int) -> Iterator[Record | Reject]:
    """Read one file. Raises ConfigError when it cannot be read to its end."""
    # The name, not the path: a document keeps its id when the folder moves.
    place = Place(source.name or path.name, str(path))
    kind = kind_of(path)
    try:
        if kind == ".parquet":
            yield from _read_parquet(path, source, place, max_bytes)
            return
        with _open(path) as stream:
            if kind == ".txt":
                yield _read_text(stream, place, max_bytes)
            elif kind == ".jsonl":
                yield from _read_jsonl(stream, source, place, max_bytes)
            else:
                yield from _read_csv(stream, source, place, max_bytes)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise ConfigError(f"corpus.sources: {path} cannot be read: {error}") from error


def _open(path: Path) -> IO[bytes]:
    if path.name.lower().endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


def _read_text(stream: IO[bytes], place: Place, max_bytes: int) -> Record | Reject:
    raw = stream.read(max_bytes + 1)
    if len(raw) > max_bytes:
        return _reject(place, 1, "too_long", raw)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return _reject(place, 1, "not_utf8", raw)
    return record_of({"text": text}, Source(path=place.file), place, 1, max_bytes)


def _read_jsonl(
    stream: IO[bytes], source: Source, place: Place, max_bytes: int
) -> Iterator[Record | Reject]:
    for number, raw in _lines(stream, max_bytes):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if len(raw) > max_bytes:
            yield _reject(place, number, "too_long", raw)
        elif not raw.strip():
            yield _reject(place, number, "empty", raw)
        elif b"\0" in raw:
            yield _reject(place, number, "nul_byte", raw)
        else:
            yield _read_json(raw, source, place, number, max_bytes)


def _read_json(
    raw: bytes, source: Source, place: Place, number: int, max_bytes: int
) -> Record | Reject:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return _reject(place, number, "not_utf8", raw)
    except (ValueError, RecursionError):  # ValueError also: an integer of thousands of digits
        return _reject(place, number, "bad_json", raw)
    if not isinstance(row, dict):
        return _reject(place, number, "not_an_object", raw)
    return record_of(row, source, place, number, max_bytes)


def _lines(stream: IO[bytes], max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines; of a line over `max_bytes` only the beginning, one byte over it."""
    number = 0
    while line := stream.readline(max_bytes + 1):
        number += 1
        rest = line
        while len(rest) > max_bytes and not rest.endswith(b"\n"):
            rest = stream.readline(max_bytes + 1)
        yield number, line


def _read_csv(
    stream: IO[bytes], source: Source, place: Place, max_bytes: int
) -> Iterator[Record | Reject]:
    csv.field_size_limit(max_bytes)
    lines = _CsvLines(stream, max_bytes)
    reader = csv.DictReader(lines)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            reason = "too_long" if "limit" in str(error) else "bad_csv"
            yield Reject(place.file, lines.number, reason, str(error))
            continue
        if row is None:
            return
        if source.text_field not in row:
            raise _without_text(place.file, source, f"no such column; {_listed(row)}")
        if _lacks_date(source, row):
            raise _without_date(place.file, source, f"no such column; {_listed(row)}")
        yield record_of(row, source, place, lines.number, max_bytes)


class _CsvLines:
    """The lines of a CSV file; `number` is that of the last one.

    Bytes that are not UTF-8 become lone surrogates, which `record_of` rejects row by row.
    """

    def __init__(self, stream: IO[bytes], max_bytes: int) -> None:
        self.number = 0
        self._max_bytes = max_bytes
        self._lines = _lines(stream, max_bytes)

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        self.number, raw = next(self._lines)
        if len(raw) > self._max_bytes:
            raise csv.Error(f"line over the limit of {self._max_bytes} bytes")
        if self.number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        return raw.decode("utf-8", "surrogateescape")


def _read_parquet(
    path: Path, source: Source, place: Place, max_bytes: int
) -> Iterator[Record | Reject]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if source.text_field not in names:
            raise _without_text(place.file, source, f"no such column; {_listed(names)}")
        if _lacks_date(source, names):
            raise _without_date(place.file, source, f"no such column; {_listed(names)}")
        columns = [name for name in _fields(source) if name in names]
        row_number = 0
        for batch in file.iter_batches(batch_size=_BATCH, columns=columns):
            for index in range(batch.num_rows):
                row_number += 1
                row = {name: _value(batch.column(name)[index]) for name in columns}
                yield record_of(row, source, place, row_number, max_bytes)


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:  # Arrow does not check the bytes of a string column
        return scalar.cast(pa.binary()).as_py()


def _read_dataset(
    rows: Iterator[Mapping[str, Any]], source: Source, max_bytes: int
) -> Iterator[Record | Reject]:
    name = str(source.dataset)
    place = Place(source.name or (Path(name).name if Path(name).exists() else name), name)
    for number in itertools.count(1):
        try:
            row = next(rows, None)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise WorkError(
                f"data set {name!r} broke off at row {number}: {error}; run the same command again"
            ) from error
        if row is None:
            return
        yield record_of(row, source, place, number, max_bytes)


def open_dataset(name: str, split: str) -> Any:
    """Stream a Hugging Face data set: an id, a folder of files, or a folder of `save_to_disk`.

    Raises ConfigError when it cannot be opened.
    """
    import datasets

    folder = Path(name)
    try:
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(name)
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    raise ValueError(f"no split {split!r}; there is {', '.join(loaded)}")
                loaded = loaded[split]
            return loaded.to_iterable_dataset()
        return datasets.load_dataset(name, split=split, streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"corpus.sources: data set {name!r} (split {split!r}) cannot be opened: {error}"
        ) from error


def _fields(source: Source) -> list[str]:
    names = (source.text_field, source.date_field, source.url_field)
    return list(dict.fromkeys(name for name in names if name))


def _listed(names: Iterable[Any]) -> str:
    return "there is " + ", ".join(str(name) for name in names if name is not None)


def record_of(
    row: Mapping[str, Any], source: Source, place: Place, line: int, max_bytes: int
) -> Record | Reject:
    """Take text, date and URL out of a row, or say why that is not possible."""
    text = row.get(source.text_field)
    if text is None:
        return _reject(place, line, "missing_text_field", _listed(row))
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError:
            return _reject(place, line, "not_utf8", text)
    if not isinstance(text, str):
        return _reject(place, line, "not_text", repr(text)[:EXCERPT])
    if "\0" in text:
        return _reject(place, line, "nul_byte", text)
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:  # a lone surrogate
        return _reject(place, line, "not_utf8", text)
    if size > max_bytes:
        return _reject(place, line, "too_long", text)
    date = row.get(source.date_field) if source.date_field else None
    url = row.get(source.url_field) if source.url_field else None
    url = url if isinstance(url, str) and url and _encodes(url) else None
    others = _listed(row) if _lacks_date(source, row) else ""
    return Record(text, date, url, place.source, place.file, line, others)


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _reject(place: Place, line: int, reason: str, content: str | bytes) -> Reject:
    content = content[:EXCERPT]
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    return Reject(place.file, line, reason, content.decode("utf-8", "backslashreplace"))
