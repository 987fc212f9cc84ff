"""Stage `ingest`: sources -> documents, in one streaming pass.

Document n goes to shard n modulo the number of shards. Shards are written under temporary names
and appear together at the end, so a killed ingest leaves nothing and starts again. What cannot be
a document goes to `rejects.jsonl` (file, line, reason, excerpt) and is counted.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import datetime
import json
import os
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import pyarrow.parquet as pq

from pipeline import calls
from pipeline.context import Context
from pipeline.errors import WorkError
from pipeline.records import Document, schema_of, stable_hash, to_table
from pipeline.shards import write_json
from pipeline.stages.reading import EXCERPT, Record, Reject, Sources
from pipeline.stages.splitting import count_words, split_text
from pipeline.tools.filters import corpus_filter, date_from_url

_BUFFERED_CHARACTERS = 16_000_000  # of all shards together, before they are written
_DATE_FORMS = ("%Y/%m/%d", "%d %B %Y", "%B %d, %Y", "%d %b %Y", "%b %d, %Y")  # never 03/04/2021


def run(context: Context) -> None:
    """Read the sources and write every shard of `01-documents`, and `rejects.jsonl`.

    Raises ConfigError for a source that cannot be read, WorkError when no document is left.
    """
    config, folder = context.config, context.folder
    began = time.monotonic()
    sources = Sources(config.corpus.sources, config.corpus.max_bytes)
    folder.clear("ingest")
    folder.stage("ingest").mkdir(parents=True)
    with (
        _ShardWriters(context) as shards,
        _rejects_file(context) as reject,
        context.progress(config.corpus.limit, "documents") as bar,
    ):
        for document in _documents(context, sources, reject):
            shards.add(document)
            bar.update()
            if shards.total % 1000 == 0:
                bar.set_postfix(left_out=sum(_left_out(context).values()), refresh=False)
            if shards.total == config.corpus.limit:
                sources.check()  # of a source that is read to its end it is told there
                break
        _check_something_left(context, shards)
        shards.finish(time.monotonic() - began)


def _documents(
    context: Context, items: Iterable[Record | Reject], reject: Callable[[Reject], None]
) -> Iterator[Document]:
    corpus, syntax = context.config.corpus, context.config.call_format.syntax
    tools = context.config.tool_names
    seen = SeenHashes()
    for item in items:
        context.count("*", "read")
        if isinstance(item, Reject):
            reject(item)
            continue
        pieces = split_text(item.text, corpus.max_words)
        if not pieces:
            reject(_because(item, "empty", item.text))
        elif calls.holds_call_syntax(item.text, tools, syntax):
            reject(_because(item, "call_syntax", _call_excerpt(item.text)))
        else:
            date = _date_of(item, context)
            if len(pieces) > 1:
                context.count("*", "split", len(pieces))
            for piece in pieces:
                doc_id = stable_hash(item.source, piece)
                if count_words(piece) < corpus.min_words:
                    reject(_because(item, "too_short", piece))
                elif not seen.add(int(doc_id, 16)):
                    reject(_because(item, "duplicate_document", piece))
                else:
                    yield _document(context, doc_id, piece, date, item)


def _document(
    context: Context, doc_id: str, text: str, date: str | None, record: Record
) -> Document:
    values = {"doc_id": doc_id, "text": text, "date": date, "url": record.url}
    seed = context.config.seed
    passed = [tool for tool in context.config.tool_names if corpus_filter(tool, values, seed)]
    return Document(
        doc_id=doc_id, text=text, date=date, url=record.url, source=record.source, tools=passed
    )


def _because(record: Record, reason: str, content: str) -> Reject:
    return Reject(record.file, record.line, reason, content[:EXCERPT])


def _call_excerpt(text: str) -> str:
    """Show the first bracket with what stands around it."""
    found = re.search(r"\[\s*\w+\s*\(|<API>|</API>|→", text)
    begin = max(0, (found.start() if found else 0) - EXCERPT // 4)
    return text[begin : begin + EXCERPT]


# -- dates --------------------------------------------------------------------------------------


def _date_of(record: Record, context: Context) -> str | None:
    """Return the ISO date of a record: its own, else the one in its URL."""
    date = iso_date(record.date)
    if date is None and not _is_missing(record.date):
        context.count("*", "bad_date")
    return date or (date_from_url(record.url) if record.url else None)


def iso_date(value: Any) -> str | None:
    """Write a date as YYYY-MM-DD; None for what is no date or could be read in two ways.

    >>> iso_date("2021-03-04T23:59:00Z"), iso_date("4 March 2021"), iso_date("03/04/2021")
    ('2021-03-04', '2021-03-04', None)
    """
    if isinstance(value, datetime.datetime):
        return value.date().isoformat()
    if isinstance(value, datetime.date):
        return value.isoformat()
    if not isinstance(value, str) or len(value) > 64:
        return None
    text = value.strip()
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(text).date().isoformat()
    for form in _DATE_FORMS:
        with contextlib.suppress(ValueError):
            return datetime.datetime.strptime(text, form).date().isoformat()
    with contextlib.suppress(ValueError):
        return parsedate_to_datetime(text).date().isoformat()
    return None


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


# -- duplicates ---------------------------------------------------------------------------------


class SeenHashes:
    """A set of 64-bit hashes at 8 bytes each: sorted arrays, one per leading 16 bits."""

    def __init__(self) -> None:
        self._buckets: dict[int, array[int]] = {}

    def add(self, value: int) -> bool:
        """Add a hash; return False when it was there already."""
        bucket = self._buckets.setdefault(value >> 48, array("Q"))
        index = bisect.bisect_left(bucket, value)
        if index < len(bucket) and bucket[index] == value:
            return False
        bucket.insert(index, value)
        return True


# -- writing ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _rejects_file(context: Context) -> Iterator[Callable[[Reject], None]]:
    """Open `rejects.jsonl` under a temporary name; it appears when the pass has ended."""
    path = context.folder.path / "rejects.jsonl"
    temporary = context.folder.stage("ingest") / f"rejects.{os.getpid()}.tmp"
    try:
        with temporary.open("w", encoding="utf-8") as file:

            def reject(item: Reject) -> None:
                duplicate = item.reason == "duplicate_document"
                context.count("*", item.reason if duplicate else f"rejected:{item.reason}")
                file.write(json.dumps(dataclasses.asdict(item), ensure_ascii=False) + "\n")

            try:
                yield reject
            except WorkError:  # nothing left: the reasons are what the user needs
                file.flush()
                os.replace(temporary, path)
                raise
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class _ShardWriters:
    """The open shards of one ingest."""

    def __init__(self, context: Context) -> None:
        self.total = 0
        self._context = context
        self._count = count = context.config.shards
        self._targets = [context.folder.part("ingest", i, count) for i in range(count)]
        self._temporary = [path.with_suffix(f".{os.getpid()}.tmp") for path in self._targets]
        self._writers: list[pq.ParquetWriter] = []
        self._rows: list[list[Document]] = [[] for _ in range(count)]
        self._sizes = [0] * count
        self._counts: list[Counter[tuple[str, str]]] = [Counter() for _ in range(count)]

    def __enter__(self) -> _ShardWriters:
        schema = schema_of(Document)
        for path in self._temporary:
            self._writers.append(pq.ParquetWriter(path, schema, compression="zstd"))
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._temporary:  # first: a full disk lets no writer close
            path.unlink(missing_ok=True)
        for writer in self._writers:
            writer.close()

    def add(self, document: Document) -> None:
        """Append a document to its shard."""
        shard = self.total % self._count
        self.total += 1
        self._rows[shard].append(document)
        self._sizes[shard] += len(document.text) + 500  # 500: the objects around the text
        counts = self._counts[shard]
        counts["*", "documents"] += 1
        for tool in self._context.config.tool_names:
            counts[tool, "documents" if tool in document.tools else "filtered"] += 1
        if self._sizes[shard] * self._count > _BUFFERED_CHARACTERS:
            self._flush(shard)

    def tool_counts(self) -> dict[str, Counter[str]]:
        """Return the counts of all shards per tool."""
        total: dict[str, Counter[str]] = {}
        for counts in self._counts:
            for (tool, what), n in counts.items():
                total.setdefault(tool, Counter())[what] += n
        return total

    def finish(self, seconds: float) -> None:
        """Close the shards, give them their names, then write the markers."""
        for shard, writer in enumerate(self._writers):
            self._flush(shard)
            writer.close()
        for temporary, target in zip(self._temporary, self._targets, strict=True):
            os.replace(temporary, target)
        whole_pass = self._context.take_counts()  # what belongs to no document: in the first marker
        for shard in range(self._count):
            counts: dict[str, dict[str, int]] = whole_pass if shard == 0 else {}
            rows = self._counts[shard]["*", "documents"]
            for (tool, what), n in self._counts[shard].items():
                counts.setdefault(tool, {})[what] = n
            marker = {
                "rows": rows,
                "fingerprint": self._context.fingerprint,
                "seconds": round(seconds / self._count, 3),
                "counts": counts,
            }
            write_json(self._context.folder.marker("ingest", shard, self._count), marker)

    def _flush(self, shard: int) -> None:
        if self._rows[shard]:
            self._writers[shard].write_table(to_table(self._rows[shard], Document))
            self._rows[shard] = []
            self._sizes[shard] = 0


def _left_out(context: Context) -> dict[str, int]:
    """Return the counts per reason, the most frequent first."""
    counts = {
        what.removeprefix("rejected:"): n
        for what, n in context.counts.get("*", {}).items()
        if what.startswith("rejected:") or what == "duplicate_document"
    }
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _check_something_left(context: Context, shards: _ShardWriters) -> None:
    if shards.total == 0:
        left_out = _left_out(context)
        read = context.counts.get("*", {}).get("read", 0)
        if read == 0:
            places = [
                str(source.path or source.dataset) for source in context.config.corpus.sources
            ]
            verb = "is" if len(places) == 1 else "are all"
            raise WorkError(
                f"no document left: {', '.join(places)} {verb} empty (no record to read); "
                "`corpus.sources` names what is read"
            )
        reasons = ", ".join(f"{n} {reason}" for reason, n in left_out.items())
        hint = ""
        if "missing_text_field" in left_out:
            hint = "; `text_field` of the source names the field that holds the text"
        raise WorkError(
            f"no document left: {read} read, left out: {reasons or 'none'} "
            f"(each one is in rejects.jsonl){hint}"
        )
    tools = shards.tool_counts()
    if not any(tools[tool]["documents"] for tool in context.config.tool_names):
        filtered = ", ".join(f"{tool} {tools[tool]['filtered']}" for tool in tools if tool != "*")
        raise WorkError(
            f"no document left after the corpus filters: {shards.total} documents, filtered out: "
            f"{filtered}. The Calculator wants numbers that belong together, the Calendar a date"
        )
