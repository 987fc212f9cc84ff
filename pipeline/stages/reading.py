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
_SETTINGS = {"text_field": "text", "date_field": "date", "url_field": "address"}


@dataclass(frozen=True, slots=True)
class Record:
    """One text with what is known about it; `line` counts from 1 (rows for Parquet)."""

    text: str
    date: Any
    url: str | None
    source: str
    file: str
    line: int
    lacks: tuple[str, ...] = ()  # settings of the source whose field is not in the record
    other_fields: str = ""  # what there is in place of it


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


class Sources:
    """The records of all sources, one after the other.

    Raises ConfigError at the end of a source that has none of the fields that it names (see
    `check`), and what `read_file` and `open_dataset` raise.
    """

    def __init__(self, sources: Iterable[Source], max_bytes: int) -> None:
        """Look up the files at once, so that a missing one is told before anything is read."""
        self._streams: list[_Watched] = []
        for source in sources:
            if source.dataset is not None:
                rows = iter(open_dataset(source.dataset, source.split))
                stream = _read_dataset(rows, source, max_bytes)
            else:
                stream = _read_files(files_of(source), source, max_bytes)
            self._streams.append(_Watched(itertools.islice(stream, source.limit), source))

    def __iter__(self) -> Iterator[Record | Reject]:
        for stream in self._streams:
            yield from stream
            stream.check()

    def check(self) -> None:
        """Refuse a source of whose records, as far as they were read, none has a field it names.

        That is the field of the text, and a `date_field` or `url_field` of one's own.
        """
        for stream in self._streams:
            stream.check()


class _Watched:
    """The stream of one source; it remembers which of the named fields were there."""

    def __init__(self, stream: Iterator[Record | Reject], source: Source) -> None:
        self._stream, self._source = stream, source
        self._textless: Reject | None = None  # the first record without the field of the text
        self._lacking: dict[str, Record] = {}  # setting: the first record without its field
        self._there: set[str] = set()

    def __iter__(self) -> Iterator[Record | Reject]:
        for item in self._stream:
            if isinstance(item, Record):
                self._note(item)
            elif item.reason == "missing_text_field":
                self._textless = self._textless or item
            else:
                self._there.add("text_field")
            yield item

    def _note(self, record: Record) -> None:
        self._there.update(name for name in _SETTINGS if name not in record.lacks)
        for name in record.lacks:
            self._lacking.setdefault(name, record)

    def check(self) -> None:
        if self._textless is not None and "text_field" not in self._there:
            what = f"no record has it filled; {self._textless.excerpt}"
            raise _without("text_field", self._textless.file, self._source, what)
        for name, record in self._lacking.items():
            if name not in self._there:
                what = f"no record that was read has it; {record.other_fields}"
                raise _without(name, record.file, self._source, what)


def _without(name: str, file: str, source: Source, what: str) -> ConfigError:
    """What to say of a field that a setting of the source names and that is not there."""
    optional = "" if name == "text_field" else f", or leave `{name}` out"
    return ConfigError(
        f"corpus.sources: {file}: `{name}` = {getattr(source, name)!r}: {what}; name the one that "
        f"holds the {_SETTINGS[name]}{optional}"
    )


def _lacks(source: Source, fields: Iterable[Any]) -> tuple[str, ...]:
    """The settings that name a field of one's own which is not there; the defaults may be missing.

    The field of the text is not among them: it has to be filled as well.
    """
    there = (None, *fields)
    return tuple(
        name
        for name in ("date_field", "url_field")
        if getattr(source, name) not in (*there, getattr(Source, name))
    )


def _check_columns(source: Source, place: Place, columns: Iterable[Any]) -> None:
    """Refuse a file whose columns lack a field that the source names."""
    there = list(columns)
    lacking = ("text_field",) if source.text_field not in there else _lacks(source, there)
    for name in lacking:
        raise _without(name, place.file, source, f"no such column; {_listed(there)}")


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
        _check_columns(source, place, row)
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
        _check_columns(source, place, names)
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
    lacks = _lacks(source, row)
    others = _listed(row) if lacks else ""
    return Record(text, date, url, place.source, place.file, line, lacks, others)


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
