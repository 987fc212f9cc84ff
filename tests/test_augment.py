"""Augment on small hand-made run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from pipeline.calls import CallSyntax
from pipeline.config import parse_config
from pipeline.context import Context
from pipeline.errors import WorkError
from pipeline.records import Document, SelectedCall, call_id, to_table
from pipeline.shards import RunFolder, read_json
from pipeline.stages import augment

TEXT = "The farm sold 12 crates of 24 apples, so 288 apples were gone by 7 May."


def load(run: Path) -> datasets.DatasetDict:
    """Load the data set of a run; all runs of a test share one cache."""
    return datasets.load_dataset(str(run / "06-dataset"), cache_dir=str(run.parent / "cache"))


def document(n: int, text: str = TEXT) -> Document:
    return Document(
        doc_id=f"{n:016x}", text=text, date=None, url=None, source="s", tools=["Calculator"]
    )


def selected(
    doc: Document, before: str, arguments: str, result: str | None, gain: float | None,
    reason: str = "kept", tool: str = "Calculator",
) -> SelectedCall:  # fmt: skip
    start = doc.text.index(before)
    return SelectedCall(
        call_id=call_id(doc.doc_id, tool, start, arguments), doc_id=doc.doc_id, tool=tool,
        char_start=start, token_index=3, arguments=arguments, sample_count=1, p_api=0.1,
        loss_none=2.0, result=result, error_kind=None if result else "bad_arguments",
        error=None if result else "not a number", seconds=0.0, cached=False,
        loss_call=2.1 if gain is not None else None,
        loss_result=2.0 - gain if gain is not None else None, gain=gain,
        gain_null=0.0 if gain is not None else None, kept=reason == "kept", reason=reason,
    )  # fmt: skip


def make_run(
    path: Path, documents: list[Document], calls: list[SelectedCall], shards: int = 2, **config: Any
) -> Context:
    """Write a run folder that has come as far as `select`."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    for shard in range(shards):
        own = documents[shard::shards]
        ids = {doc.doc_id for doc in own}
        chosen = [call for call in calls if call.doc_id in ids]
        counts = {"*": {"documents": len(own)}}
        marker = {"fingerprint": "a", "counts": counts}
        folder.write_part("ingest", shard, shards, to_table(own, Document), marker)
        folder.write_part("select", shard, shards, to_table(chosen, SelectedCall), marker)
    raw = {
        "name": "test run",
        "corpus": {"sources": [{"path": "/somewhere/secret/corpus.jsonl"}], "licence": "CC0-1.0"},
        "model": {"path": "/somewhere/secret/tiny-model"},
        "tools": [{"name": "Calculator"}, {"name": "Calendar"}],
        "shards": shards,
        **config,
    }
    return Context(parse_config(raw), folder, "augment", "print")


def two_calls(doc: Document) -> list[SelectedCall]:
    return [
        selected(doc, " 7 May", "", "Today is 7 May", 0.9, tool="Calendar"),
        selected(doc, " 288", "12 * 24", "288", 1.5),
        selected(doc, " 24", "12 + 24", "36", -0.4, "below_threshold"),
    ]


def test_calls_of_all_tools_stand_at_their_places(tmp_path: Path) -> None:
    docs = [document(n) for n in range(3)]
    context = make_run(tmp_path / "run", docs, two_calls(docs[1]))
    augment.run(context)
    loaded = load(tmp_path / "run")
    assert {name: split.num_rows for name, split in loaded.items()} == {"train": 1}
    row = loaded["train"][0]
    assert row["text"] == TEXT
    assert row["text_augmented"] == (
        "The farm sold 12 crates of 24 apples, so [Calculator(12 * 24) -> 288] 288 apples were "
        "gone by [Calendar() -> Today is 7 May] 7 May."
    )
    assert [call["tool"] for call in row["calls"]] == ["Calculator", "Calendar"]
    assert row["calls"][0] == {
        "tool": "Calculator", "arguments": "12 * 24", "result": "288",
        "char_start": TEXT.index(" 288"), "loss_none": 2.0, "loss_call": 2.1, "loss_result": 0.5,
        "gain": 1.5,
    }  # fmt: skip
    marker = read_json(context.folder.stage_marker("augment"))
    assert marker["fingerprint"] == "print"
    assert marker["counts"]["*"] == {
        "documents": 3, "augmented": 1, "without_calls": 2, "calls": 2, "train": 1, "validation": 0
    }  # fmt: skip
    assert marker["counts"]["Calendar"] == {"calls": 1}


def test_special_rendering_and_code_points(tmp_path: Path) -> None:
    doc = document(1, "Ein 😀 und 日本: 3 mal 4 ist 12 Äpfel insgesamt.")
    call = selected(doc, " 12", "3 * 4", "12", 1.0)
    context = make_run(
        tmp_path / "run", [doc], [call], shards=1, call_format={"rendering": "special"}
    )
    augment.run(context)
    row = load(tmp_path / "run")["train"][0]
    assert row["text_augmented"] == (
        "Ein 😀 und 日本: 3 mal 4 ist<API>Calculator(3 * 4) → 12</API> 12 Äpfel insgesamt."
    )


def test_removing_the_calls_gives_back_the_text() -> None:
    doc = document(1)
    calls = [vars(c) for c in two_calls(doc) if c.kept]
    calls.sort(key=lambda call: call["char_start"])
    text = augment.interleave(TEXT, calls, CallSyntax())
    for call in calls:
        text = text.replace(f" [{call['tool']}({call['arguments']}) -> {call['result']}]", "")
    assert text == TEXT


def test_rows_and_splits_do_not_depend_on_the_number_of_shards(tmp_path: Path) -> None:
    docs = [document(n * 7919 % 1000) for n in range(200)]
    calls = [call for doc in docs for call in two_calls(doc)]
    tables = []
    for shards in (1, 4):
        context = make_run(tmp_path / str(shards), docs, calls, shards)
        augment.run(context)
        data = tmp_path / str(shards) / "06-dataset" / "data"
        tables.append({path.name: path.read_bytes() for path in sorted(data.iterdir())})
    assert tables[0] == tables[1]
    assert list(tables[0]) == ["train-00000-of-00001.parquet", "validation-00000-of-00001.parquet"]
    loaded = load(tmp_path / "4")
    ids = loaded["train"]["id"][:]
    assert ids == sorted(ids)
    assert 8 <= loaded["validation"].num_rows <= 35 and loaded["train"].num_rows > 160
    assert not set(ids) & set(loaded["validation"]["id"])


@pytest.mark.parametrize(("share", "sizes"), [(0.0, (4, 1)), (0.99, (1, 4))])
def test_neither_split_is_empty(share: float, sizes: tuple[int, int]) -> None:
    rows = [augment.Row(f"{n:016x}", "", "", []) for n in range(5)]
    splits = augment.split_rows(rows, share)
    assert (len(splits["train"]), len(splits["validation"])) == sizes


def test_split_of_a_row_does_not_depend_on_the_others() -> None:
    rows = [augment.Row(f"{n:016x}", "", "", []) for n in range(500)]
    whole = {row.id for row in augment.split_rows(rows, 0.2)["validation"]}
    half = {row.id for row in augment.split_rows(rows[::2], 0.2)["validation"]}
    assert half == whole & {row.id for row in rows[::2]}
    assert 70 < len(whole) < 130


def test_second_run_replaces_the_first(tmp_path: Path) -> None:
    docs = [document(n) for n in range(4)]
    context = make_run(tmp_path / "run", docs, [c for d in docs for c in two_calls(d)])
    stray = tmp_path / "run" / "06-dataset.1.tmp"
    stray.mkdir()
    augment.run(context)
    (tmp_path / "run" / "06-dataset" / "data" / "train-old.parquet").write_bytes(b"old")
    augment.run(context)
    assert len(list((tmp_path / "run" / "06-dataset" / "data").iterdir())) == 2
    assert not stray.exists()
    assert read_json(context.folder.stage_marker("augment"))["counts"]["*"]["augmented"] == 4


def test_each_run_is_loaded_with_its_own_rows(tmp_path: Path) -> None:
    for n in (1, 2):
        doc = document(n)
        context = make_run(tmp_path / str(n), [doc], two_calls(doc))
        augment.run(context)
        assert load(tmp_path / str(n))["train"]["id"][:] == [doc.doc_id]


def test_card_tells_what_a_stranger_needs(tmp_path: Path) -> None:
    text = "Fences ``` and | bars: 12 crates of 24 apples make 288 apples here."
    docs = [document(1, text), document(2, text)]
    calls = [selected(doc, " 288", "12 * 24", "288", 1.5) for doc in docs]
    context = make_run(tmp_path / "run", docs, calls)
    augment.run(context)
    card = (tmp_path / "run" / "06-dataset" / "README.md").read_text(encoding="utf-8")
    _, header, body = card.split("---\n", 2)
    parsed = yaml.safe_load(header)
    assert parsed["license"] == "cc0-1.0"
    assert parsed["configs"][0]["data_files"][1] == {
        "split": "validation", "path": "data/validation-*.parquet"
    }  # fmt: skip
    assert "secret" not in card
    for part in ("tiny-model", "corpus.jsonl", "load_dataset(", "| Calculator: tau_f | `0.3` |",
                 "[Calculator(12 * 24) -> 288] 288 apples", "2 texts with 2 calls"):  # fmt: skip
        assert part in body, part
    assert "\n````text\n" in body


def test_nothing_kept_says_why_and_shows_the_nearest_misses(tmp_path: Path) -> None:
    doc = document(1)
    calls = [
        selected(doc, " 288", "12 * 24", "288", 0.21, "below_threshold"),
        selected(doc, " 24", "12 + 24", "36", -0.5, "below_threshold"),
        selected(doc, " 12", "288 / 24", "12", 0.8, "lookahead_leak"),
        selected(doc, " 288", "12 ** ", None, None, "tool_error"),
    ]
    context = make_run(tmp_path / "run", [doc], calls)
    with pytest.raises(WorkError) as caught:
        augment.run(context)
    assert str(caught.value) == (
        "0 kept because: 2 below threshold (best gain 0.21 at tau_f 0.3), 1 leaks, 1 tool errors; "
        "nearest misses: [Calculator(12 * 24) -> 288] gain 0.21; "
        "[Calculator(12 + 24) -> 36] gain -0.50"
    )
    assert not context.folder.stage("augment").exists()


def test_no_call_sampled_at_all_says_so(tmp_path: Path) -> None:
    context = make_run(tmp_path / "run", [document(1)], [])
    with pytest.raises(WorkError, match=r"no call was sampled; lower `sample\.tau_s`"):
        augment.run(context)
