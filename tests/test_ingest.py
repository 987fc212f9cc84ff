"""Ingest on real files of every kind, good and bad."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

from pipeline.cli import main
from pipeline.config import parse_config
from pipeline.context import Context
from pipeline.errors import ConfigError, WorkError
from pipeline.records import Document, from_table, stable_hash
from pipeline.shards import RunFolder
from pipeline.stages import ingest
from pipeline.stages.ingest import SeenHashes, iso_date
from pipeline.stages.splitting import count_words, sentence_ends, split_text

TEXT = "The farmer sold 12 crates of 24 apples each, so 288 apples left the farm"  # 15 words


def ingest_context(
    folder: Path, sources: list[dict[str, Any]], tools: str = "WikiSearch", shards: int = 2,
    **corpus: Any,
) -> Context:  # fmt: skip
    config = parse_config(
        {
            "name": "test",
            "corpus": {"sources": sources, **corpus},
            "model": {"path": "none"},
            "tools": [{"name": tool} for tool in tools.split()],
            "shards": shards,
        }
    )
    run = folder / "run"
    run.mkdir(exist_ok=True)
    return Context(config, RunFolder(run), "ingest", "print")


def run_ingest(folder: Path, *args: Any, **values: Any) -> tuple[list[Document], list[dict]]:
    context = ingest_context(folder, *args, **values)
    ingest.run(context)
    return documents_of(context.folder), rejects_of(context.folder)


def documents_of(folder: RunFolder) -> list[Document]:
    return from_table(folder.read_all("ingest"), Document)


def rejects_of(folder: RunFolder) -> list[dict[str, Any]]:
    lines = (folder.path / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def counts_of(folder: RunFolder) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for index, count in folder.parts("ingest"):
        for tool, counts in folder.read_marker("ingest", index, count)["counts"].items():
            for what, n in counts.items():
                own = total.setdefault(tool, {})
                own[what] = own.get(what, 0) + n
    return total


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
    return path


# -- readers ------------------------------------------------------------------------------------


def write_kind(folder: Path, kind: str, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Write rows as one kind of source and return the source."""
    path = folder / f"corpus{kind}"
    match kind:
        case ".jsonl":
            write_jsonl(path, rows)
        case ".jsonl.gz":
            path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
        case ".csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case "folder":
            (folder / "hub").mkdir()
            write_jsonl(folder / "hub" / "train.jsonl", rows)
            return {"dataset": str(folder / "hub"), "name": "same"}
        case "saved":
            datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
            return {"dataset": str(folder / "saved"), "name": "same"}
    return {"path": str(path), "name": "same"}


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".csv", ".parquet", "folder", "saved"])
def test_every_kind_of_source_gives_the_same_documents(tmp_path: Path, kind: str) -> None:
    rows = [
        {"text": f'{TEXT}, "said" number {n}.\nNäxt líne 日本', "date": "2021-03-04", "url": "u"}
        for n in range(5)
    ]
    found, rejects = run_ingest(tmp_path, [write_kind(tmp_path, kind, rows)])
    assert rejects == []
    assert sorted(d.text for d in found) == [row["text"] for row in rows]
    assert {(d.date, d.url, d.source) for d in found} == {("2021-03-04", "u", "same")}
    assert {d.doc_id for d in found} == {stable_hash("same", row["text"]) for row in rows}


def test_text_files_are_one_document_each_in_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(f"{TEXT} {name}.\n", encoding="utf-8")
    found, _ = run_ingest(tmp_path, [{"path": str(tmp_path / "*.txt")}], shards=1)
    assert [(d.text, d.source) for d in found] == [
        (f"{TEXT} a.", "a.txt"), (f"{TEXT} b.", "b.txt"), (f"{TEXT} c.", "c.txt")
    ]  # fmt: skip


def test_every_source_is_read_with_its_own_settings(tmp_path: Path) -> None:
    rows = [{"a": f"{TEXT} a{n}.", "b": f"{TEXT} b{n}."} for n in range(3)]
    path = str(write_jsonl(tmp_path / "c.jsonl", rows))
    sources = [
        {"path": path, "text_field": "a", "name": "first", "limit": 2},
        {"path": path, "text_field": "b", "name": "second"},
    ]
    found, rejects = run_ingest(tmp_path, sources, shards=1)
    assert [(d.source, d.text[-3:-1]) for d in found] == [
        ("first", "a0"), ("first", "a1"), ("second", "b0"), ("second", "b1"), ("second", "b2")
    ]  # fmt: skip
    assert rejects == []


def test_id_does_not_depend_on_where_the_corpus_lies(tmp_path: Path) -> None:
    ids = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "c.jsonl", [{"text": TEXT}])
        found, _ = run_ingest(tmp_path / name, [{"path": str(tmp_path / name / "c.jsonl")}])
        ids.append(found[0].doc_id)
    assert ids[0] == ids[1]


def test_file_with_glob_characters_in_its_name_is_found(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "part[1].jsonl", [{"text": TEXT}])
    found, _ = run_ingest(tmp_path, [{"path": str(path)}])
    assert len(found) == 1


# -- bad input ----------------------------------------------------------------------------------


def test_bad_lines_are_rejected_with_their_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = {"text": TEXT}
    lines: list[tuple[bytes, str | None]] = [
        (b"\xef\xbb\xbf" + json.dumps(good).encode(), None),  # a byte order mark is no mistake
        (b'{"text": "cut off', "bad_json"),
        (b'["a", "list"]', "not_an_object"),
        (b"[" * 100_000, "bad_json"),
        (b'{"text": "caf\xe9"}', "not_utf8"),
        (rb'{"text": "lone \ud800 surrogate"}', "not_utf8"),
        (b'{"text": "raw \x00 byte"}', "nul_byte"),
        (rb'{"text": "escaped \u0000 byte"}', "nul_byte"),
        (b"", "empty"),
        (b'{"text": " \\n "}', "empty"),
        (b'{"text": "far too short"}', "too_short"),
        (b'{"text": "' + b"long " * 50_000 + b'"}', "too_long"),
        (b'{"body": "no text here"}', "missing_text_field"),
        (b'{"text": null}', "missing_text_field"),
        (b'{"text": 42}', "not_text"),
        (b'{"text": ["a"]}', "not_text"),
        (json.dumps({"text": f"{TEXT} [wikisearch (farm)] ok."}).encode(), "call_syntax"),
        (json.dumps(good).encode(), "duplicate_document"),
        (json.dumps({"text": f"{TEXT} [see note] (a)."}).encode(), None),
    ]
    path.write_bytes(b"\n".join(line for line, _ in lines))
    context = ingest_context(tmp_path, [{"path": str(path)}], max_bytes=200_000)
    ingest.run(context)
    found, rejects = documents_of(context.folder), rejects_of(context.folder)
    assert len(found) == 2
    expected = [(str(path), n, reason) for n, (_, reason) in enumerate(lines, 1) if reason]
    assert [(r["file"], r["line"], r["reason"]) for r in rejects] == expected
    assert all(len(r["excerpt"]) <= 1000 for r in rejects)
    assert "wikisearch (farm" in rejects[-2]["excerpt"]
    counts = counts_of(context.folder)["*"]
    assert counts["read"] == len(lines)
    assert counts["rejected:not_utf8"] == 2 and counts["duplicate_document"] == 1
    left_out = [n for what, n in counts.items() if what.startswith(("rejected:", "duplicate"))]
    assert sum(left_out) + counts["documents"] == counts["read"]


def test_line_over_the_limit_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    giant = '{"text": "' + "x" * 5_000 + '"}'
    path.write_text(f"{giant}\n{json.dumps({'text': TEXT})}\n", encoding="utf-8")
    found, rejects = run_ingest(tmp_path, [{"path": str(path)}], max_bytes=400)
    assert [d.text for d in found] == [TEXT]
    assert [(r["line"], r["reason"]) for r in rejects] == [(1, "too_long")]


def test_bad_rows_of_csv_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        f'text,date\n"{TEXT}",\ncaf\xe9,\n'.encode("latin-1") + b'"' + b"long " * 900 + b'",\nx\n'
    )
    binary = pa.array([TEXT.encode(), b"caf\xe9", None, b"short"], pa.binary())
    invalid = pa.StringArray.from_buffers(4, binary.buffers()[1], binary.buffers()[2],
                                          binary.buffers()[0])  # fmt: skip
    pq.write_table(pa.table({"text": invalid}), tmp_path / "b.parquet")
    sources = [{"path": str(tmp_path / "a.csv")}, {"path": str(tmp_path / "b.parquet")}]
    found, rejects = run_ingest(tmp_path, sources, max_bytes=4_000)
    assert [d.source for d in found] == ["a.csv", "b.parquet"]
    assert [(Path(r["file"]).name, r["line"], r["reason"]) for r in rejects] == [
        ("a.csv", 3, "not_utf8"),
        ("a.csv", 4, "too_long"),
        ("a.csv", 5, "too_short"),
        ("b.parquet", 2, "not_utf8"),
        ("b.parquet", 3, "missing_text_field"),
        ("b.parquet", 4, "too_short"),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: {"path": str(f / "nothing-*.jsonl")}, r"no file matches .*nothing-\*\.jsonl"),
        (lambda f: {"path": str(f)}, "is a folder; give a glob"),
        (lambda f: {"path": __file__}, r"unknown kind of file; allowed are \.txt, \.jsonl"),
        (lambda f: {"dataset": str(f / "no-such")}, "data set .*no-such.* cannot be opened"),
    ],
)
def test_source_that_cannot_be_read_is_refused_before_anything_is_written(
    tmp_path: Path, make: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_ingest(tmp_path, [make(tmp_path)])
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("kind", [".csv", ".jsonl", ".jsonl.gz", ".parquet", "folder", "saved"])
def test_a_corpus_without_the_text_field_is_refused_by_name(
    tmp_path: Path, kind: str, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_kind(
        tmp_path, kind, [{"body": f"{TEXT} {n}.", "written": "2020"} for n in "abc"]
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    raw = tiny.raw_config(inputs, model={"path": str(tmp_path / "model")})
    for limit in (None, 2):
        raw["corpus"]["sources"] = [{**source, "limit": limit}]
        (tmp_path / "c.yaml").write_text(json.dumps(raw))
        command = ["ingest", str(tmp_path / "c.yaml"), "--run-dir", str(tmp_path / "run")]
        assert main(command) == 2
        said = capsys.readouterr().err
        assert str(source.get("path") or source["dataset"]) in said
        assert "`text_field` = 'text'" in said and "there is body, written; name the one" in said
    raw["corpus"]["sources"] = [{**source, "text_field": "body"}]
    (tmp_path / "c.yaml").write_text(json.dumps(raw))
    assert main(command) == 0


@pytest.mark.parametrize("kind", [".csv", ".jsonl", ".parquet", "folder", "saved"])
def test_a_date_field_that_is_not_there_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    rows = [{"text": f"{TEXT} {n}.", "written": "2020-01-02"} for n in "abc"]
    source = write_kind(tmp_path, kind, rows)
    with pytest.raises(ConfigError) as refused:
        run_ingest(tmp_path, [{**source, "date_field": "published"}])
    assert str(source.get("path") or source["dataset"]) in str(refused.value)
    assert "`date_field` = 'published'" in str(refused.value)
    assert "there is text, written; name the one" in str(refused.value)
    for field, date in (("written", "2020-01-02"), ("date", None), (None, None)):
        found, _ = run_ingest(tmp_path, [{**source, "date_field": field}])
        assert [d.date for d in found] == [date] * 3


def test_a_date_field_that_one_record_has_is_enough(tmp_path: Path) -> None:
    rows = [{"text": f"{TEXT} a."}, {"text": f"{TEXT} b.", "when": "2020-01-02"}]
    path = write_jsonl(tmp_path / "c.jsonl", rows)
    found, _ = run_ingest(tmp_path, [{"path": str(path), "date_field": "when"}], shards=1)
    assert [d.date for d in found] == [None, "2020-01-02"]


@pytest.mark.parametrize("kind", [".jsonl", ".csv", "saved"])
@pytest.mark.parametrize("setting", ["date_field", "url_field"])
def test_a_field_of_ones_own_that_is_not_there_is_noticed_before_the_end(
    tmp_path: Path, kind: str, setting: str
) -> None:
    """Also where `corpus.limit` ends the reading, after one source or in the middle of another."""
    rows = [{"text": f"{TEXT} {n}.", "written": "2020-01-02"} for n in "abcdef"]
    source = write_kind(tmp_path, kind, rows)
    whole = write_jsonl(tmp_path / "whole.jsonl", [{"text": f"{TEXT} of 9."}])
    for sources in ([source], [{"path": str(whole)}, source]):
        sources = [*sources[:-1], {**sources[-1], setting: "there"}]
        for limit in (3, None):
            with pytest.raises(ConfigError, match=f"`{setting}` = 'there': no .*there is text"):
                run_ingest(tmp_path, sources, limit=limit)
        sources[-1][setting] = "written"
        assert run_ingest(tmp_path, sources, limit=3)[0]


def test_a_field_counts_in_the_records_that_were_read(tmp_path: Path) -> None:
    rows = [{"text": f"{TEXT} {n}.", **({"when": "2020-01-02"} if n == "c" else {})} for n in "abc"]
    source = {"path": str(write_jsonl(tmp_path / "c.jsonl", rows)), "date_field": "when"}
    with pytest.raises(ConfigError, match="no record that was read has it; there is text; name"):
        run_ingest(tmp_path, [source], limit=2)
    with pytest.raises(ConfigError, match="no record that was read has it"):
        run_ingest(tmp_path, [{**source, "limit": 2}])
    assert len(run_ingest(tmp_path, [source], limit=3)[0]) == 3


@pytest.mark.parametrize(("name", "content"), [("c.jsonl", ""), ("c.csv", ""), ("c.csv", "text\n")])
def test_an_empty_file_is_called_empty(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(WorkError, match=rf"no document left: .*{name} is empty"):
        run_ingest(tmp_path, [{"path": str(tmp_path / name)}])


@pytest.mark.parametrize("name", ["broken.jsonl.gz", "broken.parquet"])
def test_broken_file_is_named_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    whole = gzip.compress(os.urandom(50_000).hex().encode())
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
        run_ingest(tmp_path, [{"path": str(tmp_path / name)}])
    assert [p for p in (tmp_path / "run").rglob("*") if p.is_file()] == []


def test_wrong_split_of_a_data_set_is_refused(tmp_path: Path) -> None:
    source = write_kind(tmp_path, "saved", [{"text": TEXT}])
    datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": TEXT}])).save_to_disk(
        tmp_path / "splits"
    )
    source = {"dataset": str(tmp_path / "splits"), "split": "dev"}
    with pytest.raises(ConfigError, match=r"no split 'dev'; there is train"):
        run_ingest(tmp_path, [source])


def test_no_document_left_says_why(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "short"}, {"text": "also"}, {"body": TEXT}])
    with pytest.raises(WorkError, match="3 read, left out: 2 too_short, 1 missing_text_field"):
        run_ingest(tmp_path, [{"path": str(path)}])
    assert len(rejects_of(RunFolder(tmp_path / "run"))) == 3
    assert not list((tmp_path / "run" / "01-documents").iterdir())


def test_no_document_for_any_tool_says_so(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "word " * 20}, {"text": "other " * 20}])
    with pytest.raises(WorkError, match="2 documents, filtered out: Calculator 2, Calendar 2"):
        run_ingest(tmp_path, [{"path": str(path)}], tools="Calculator Calendar")


# -- dates and filters --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2021-03-04", "2021-03-04"),
        ("2021-03-04T23:30:00+02:00", "2021-03-04"),
        ("2021/03/04", "2021-03-04"),
        ("4 March 2021", "2021-03-04"),
        ("Mar 4, 2021", "2021-03-04"),
        ("Thu, 04 Mar 2021 10:00:00 GMT", "2021-03-04"),
        ("03/04/2021", None),  # March or April
        ("2021-02-30", None),
        ("2021", None),
        ("soon", None),
        (20210304, None),
    ],
)
def test_iso_date(value: Any, expected: str | None) -> None:
    assert iso_date(value) == expected


def test_dates_come_from_the_record_else_from_the_url(tmp_path: Path) -> None:
    import datetime

    table = pa.table(
        {
            "text": [f"{TEXT} {n}." for n in range(3)],
            "date": [datetime.datetime(2020, 5, 6, 7, 8), None, None],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    rows = [
        {"text": f"{TEXT} a.", "date": "yesterday", "url": "https://x.example/2019/07/08/news"},
        {"text": f"{TEXT} b.", "date": " ", "url": 7},
        {"text": f"{TEXT} c.", "date": "yesterday"},
    ]
    write_jsonl(tmp_path / "b.jsonl", rows)
    sources = [{"path": str(tmp_path / "a.parquet")}, {"path": str(tmp_path / "b.jsonl")}]
    context = ingest_context(tmp_path, sources, shards=1)
    ingest.run(context)
    found = documents_of(context.folder)
    assert [d.date for d in found] == ["2020-05-06", None, None, "2019-07-08", None, None]
    assert counts_of(context.folder)["*"]["bad_date"] == 2


def test_documents_name_the_tools_whose_filter_they_pass(tmp_path: Path) -> None:
    rows = [
        {"text": f"{TEXT}.", "date": "2021-03-04"},
        {"text": "Nothing to compute stands in this sentence about a green hill."},
    ]
    path = write_jsonl(tmp_path / "c.jsonl", rows)
    context = ingest_context(tmp_path, [{"path": str(path)}], "Calculator Calendar WikiSearch")
    ingest.run(context)
    found = sorted(documents_of(context.folder), key=lambda d: d.text, reverse=True)
    assert [d.tools for d in found] == [["Calculator", "Calendar", "WikiSearch"], ["WikiSearch"]]
    counts = counts_of(context.folder)
    assert counts["Calculator"] == {"documents": 1, "filtered": 1}
    assert counts["WikiSearch"] == {"documents": 2}


# -- splitting ----------------------------------------------------------------------------------


def sentences(text: str) -> list[str]:
    cuts = [0, *sentence_ends(text), len(text)]
    return [text[a:b].strip() for a, b in itertools.pairwise(cuts)]


def test_sentences_end_where_a_reader_would_end_them() -> None:
    expected = [
        "Dr. J. Smith of the U.S. Army paid 3.5 million.",
        "He left at 5 p.m. on Monday, i.e. late.",
        '"Really?" she asked.',
        "See Fig. 3 and p. 12 (approx. 4.2 km).",
        "That was in 2019.",
        "The end…",
        "1. First item.",
        "这是一个句子。",
        "另一个句子！",
        "So do I.",
        "We left.",
    ]
    assert sentences("\n".join(expected)) == expected
    assert sentences("A heading\n\nand its text") == ["A heading", "and its text"]


def test_pieces_lose_nothing_but_white_space_and_keep_the_limit() -> None:
    sentence = "Mr. Grey paid 3.50 for it. Then\tall of the others left!\n\n"
    text = sentence * 40 + "word " * 90 + "x" * 3_000 + " 字" * 70
    for limit in (1, 2, 7, 30, 200):
        pieces = split_text(text, limit)
        assert max(count_words(piece) for piece in pieces) <= limit
        position = 0
        for piece in pieces:
            start = text.index(piece, position)
            assert text[position:start].strip() == ""
            position = start + len(piece)
        assert text[position:].strip() == ""


def test_pieces_are_of_about_equal_length() -> None:
    text = "This is a sentence of seven words. " * 30  # 210 words
    assert [count_words(piece) for piece in split_text(text, 200)] == [105, 105]


def test_long_documents_are_split_and_counted(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(
        " ".join(f"Sentence {n} of the book has eight words." for n in range(100)), encoding="utf-8"
    )
    context = ingest_context(tmp_path, [{"path": str(tmp_path / "long.txt")}], max_words=100)
    ingest.run(context)
    found = documents_of(context.folder)
    counts = counts_of(context.folder)["*"]
    assert len(found) == counts["split"] == counts["documents"] == 9 and counts["read"] == 1
    assert all(d.text.startswith("Sentence ") and d.text.endswith("words.") for d in found)


# -- shards, limits, interruption ---------------------------------------------------------------


def test_document_n_goes_to_shard_n_modulo_shards(tmp_path: Path) -> None:
    rows = [{"text": f"{TEXT} {n}."} for n in range(10)]
    path = write_jsonl(tmp_path / "c.jsonl", rows)
    context = ingest_context(tmp_path, [{"path": str(path)}], shards=3)
    ingest.run(context)
    assert context.folder.parts("ingest") == [(0, 3), (1, 3), (2, 3)]
    for shard in range(3):
        marker = context.folder.read_marker("ingest", shard, 3)
        texts = context.folder.read_part("ingest", shard, 3)["text"].to_pylist()
        assert texts == [row["text"] for row in rows[shard::3]]
        assert marker["rows"] == len(texts) and marker["fingerprint"] == "print"
        assert context.folder.done("ingest", shard, 3, "print")


def test_more_shards_than_documents_leaves_empty_shards(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": TEXT}])
    context = ingest_context(tmp_path, [{"path": str(path)}], shards=4)
    ingest.run(context)
    sizes = [context.folder.read_part("ingest", n, 4).num_rows for n in range(4)]
    assert sizes == [1, 0, 0, 0]


def test_limit_stops_after_so_many_documents(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": f"{TEXT} {n}."} for n in range(50)])
    found, _ = run_ingest(tmp_path, [{"path": str(path)}], limit=7)
    assert len(found) == 7


def test_many_buffers_are_written_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "_BUFFERED_CHARACTERS", 5_000)
    rows = [{"text": f"{TEXT} {n}."} for n in range(200)]
    path = write_jsonl(tmp_path / "c.jsonl", rows)
    found, _ = run_ingest(tmp_path, [{"path": str(path)}], shards=1)
    assert [d.text for d in found] == [row["text"] for row in rows]


def test_seen_hashes_is_a_set() -> None:
    import random

    draw = random.Random(3)
    values = [draw.randrange(2**64) >> draw.choice([0, 40, 56]) for _ in range(5_000)]
    seen, reference = SeenHashes(), set[int]()
    for value in values:
        assert seen.add(value) == (value not in reference)
        reference.add(value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_is_full_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": f"{TEXT} {n}."} for n in range(4)])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ingest.pq.ParquetWriter, "write_table", full)
    with monkeypatch.context() as patched:  # a writer closes itself later too
        patched.setattr(ingest.pq.ParquetWriter, "close", full)
        with pytest.raises(OSError, match="No space left"):
            run_ingest(tmp_path, [{"path": str(path)}])
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_killed_ingest_leaves_nothing_visible_and_starts_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": f"{TEXT} {n}."} for n in range(400)])
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from test_ingest import ingest, ingest_context
        add = ingest._ShardWriters.add
        def killed(self, document):
            add(self, document)
            if self.total == 300:
                os.kill(os.getpid(), signal.SIGKILL)
        ingest._ShardWriters.add = killed
        ingest._BUFFERED_CHARACTERS = 10_000
        ingest.run(ingest_context(Path(sys.argv[1]), [{"path": sys.argv[2]}]))
        """
    )
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.getcwd()}"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(path)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = RunFolder(tmp_path / "run")
    assert folder.parts("ingest") == [] and not list(folder.stage("ingest").glob("*.parquet"))
    found, _ = run_ingest(tmp_path, [{"path": str(path)}])
    assert len(found) == 400
    assert not list(folder.path.rglob("*.tmp"))
