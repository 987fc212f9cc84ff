"""Funnel, terminal views and report.html on run folders written by hand."""

from __future__ import annotations

import io
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pages import CHROMIUM, Page, dump_dom
from rich.console import Console

from pipeline.config import dump_config, load_config, parse_config
from pipeline.context import Context
from pipeline.errors import ConfigError, WorkError
from pipeline.records import REASONS, Candidate, Document, SelectedCall, call_id, to_table
from pipeline.report.arms import arms_table
from pipeline.report.catalogue import print_tools, tools_document
from pipeline.report.diff import diff_runs, print_diff
from pipeline.report.export import chat_messages, dataset_table, export_run
from pipeline.report.funnel import build_funnel
from pipeline.report.page import KEPT_SHOWN, OTHERS_SHOWN, write_report
from pipeline.report.rows import COLUMNS, show_rows
from pipeline.report.sampling import sampling_measures
from pipeline.report.status import status_document
from pipeline.report.summary import print_summary
from pipeline.report.terminal import print_calls, print_funnel, print_status
from pipeline.shards import RunFolder, write_json
from pipeline.stages import augment
from pipeline.tools.listing import list_tools

NASTY = '<script>document.title="owned"</script><img src=x onerror="document.title=1"> "\'& [b]'
TEXT = "The farm sold 12 crates of 24 apples each, so 288 apples were gone. {} It was a fine day."


def make_documents(n: int, extra: str = "") -> list[Document]:
    return [
        Document(
            doc_id=f"{i:016x}", text=TEXT.format(f"{extra}{i}"), date=None, url=None, source="s",
            tools=["Calculator"],
        )
        for i in range(n)
    ]  # fmt: skip


def make_call(
    doc: Document, tool: str, reason: str, gain: float | None, null: float | None = 0.0,
    arguments: str = "12 * 24", result: str | None = "288",
) -> SelectedCall:  # fmt: skip
    start = doc.text.index(" 288")
    failed = reason == "tool_error"
    return SelectedCall(
        call_id=call_id(doc.doc_id, tool, start, arguments), doc_id=doc.doc_id, tool=tool,
        char_start=start, token_index=3, arguments=arguments, sample_count=1, p_api=0.125,
        loss_none=2.0, result=None if failed else result,
        error_kind="bad_arguments" if failed else None, error="not a sum" if failed else None,
        seconds=0.0, cached=False, loss_call=None if gain is None else 2.25,
        loss_result=None if gain is None else 2.0 - gain, gain=gain,
        gain_null=None if gain is None else null, kept=reason == "kept", reason=reason,
    )  # fmt: skip


def make_config(folder: RunFolder, shards: int = 2, **values: Any) -> None:
    raw = {
        "name": "test run",
        "corpus": {"sources": [{"path": "c.jsonl"}]},
        "model": {"path": "tiny"},
        "tools": [{"name": "Calculator"}, {"name": "Calendar"}],
        "shards": shards,
        **values,
    }
    (folder.path / "config.yaml").write_text(dump_config(parse_config(raw)), encoding="utf-8")


SAMPLE_COUNTS = {
    "documents": 4, "fitting_documents": 3, "too_long_for_model": 1, "positions": 200,
    "below_tau_s": 150, "opens_already": 4, "beyond_k": 20,
    "pruned_position": 10, "sampled_positions": 20, "samples": 100, "tokens": 800,
    "closed": 50, "never_closed": 30, "malformed": 20, "merged": 10, "candidates": 40,
}  # fmt: skip


def make_run(path: Path, stages: int = 5, **config: Any) -> RunFolder:
    """Write a run of two shards that has come as far as the first `stages` stages."""
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    make_config(folder, **config)
    docs = make_documents(10)
    calls = [
        make_call(docs[0], "Calculator", "kept", 1.5, 0.4),
        make_call(docs[1], "Calculator", "kept", 0.5, -0.2),
        make_call(docs[2], "Calculator", "below_threshold", 0.25, 0.1, "12 + 24", "36"),
        make_call(docs[3], "Calculator", "below_threshold", None),
        make_call(docs[4], "Calculator", "lookahead_leak", 0.9, -1.0, "288 / 24", "12"),
        make_call(docs[5], "Calculator", "tool_error", None, None, "12 **"),
        make_call(docs[6], "Calendar", "kept", 0.7, 0.0, "", "Today is Monday"),
    ]
    per_stage: list[tuple[str, list[Any], type, dict[str, dict[str, int]]]] = [
        ("ingest", docs, Document, {
            "*": {"read": 12, "documents": 5, "rejected:bad_json": 1, "duplicate_document": 1},
            "Calculator": {"documents": 4, "filtered": 1}, "Calendar": {"documents": 5}}),
        ("sample", calls, Candidate, {"Calculator": SAMPLE_COUNTS, "Calendar": {"candidates": 1}}),
        ("execute", [], SelectedCall, {"Calculator": {
            "executed": 38, "error:bad_arguments": 2,
            "samples_parsed": 47, "samples_executed": 45}}),
        ("score", [], SelectedCall, {"Calculator": {"scored": 35, "pruned_call": 3}}),
        ("select", calls, SelectedCall, {"Calculator": {
            "kept": 2, "below_threshold": 33, "lookahead_leak": 3, "tool_error": 2}}),
    ]  # fmt: skip
    for stage, rows, record, counts in per_stage[:stages]:
        for shard in range(2):
            own = [row for row in rows if int(row.doc_id, 16) % 2 == shard]
            if record is Candidate:
                own = [extend_down(row) for row in own]
            marker = {"fingerprint": "f", "seconds": 1.5, "counts": counts}
            folder.write_part(stage, shard, 2, to_table(own, record), marker)
    return folder


def extend_down(call: SelectedCall) -> Candidate:
    names = Candidate.__dataclass_fields__
    return Candidate(**{name: getattr(call, name) for name in names})


def printed(show: Any, *args: Any) -> str:
    stream = io.StringIO()
    show(*args, Console(file=stream, width=160, force_terminal=False))
    return stream.getvalue()


# -- funnel -------------------------------------------------------------------------------------


def test_funnel_adds_up_over_shards_and_explains_every_loss(tmp_path: Path) -> None:
    funnel = build_funnel(make_run(tmp_path / "run"))
    assert funnel["corpus"] == {
        "read": 24, "documents": 10, "left": {"rejected:bad_json": 2, "duplicate_document": 2}
    }  # fmt: skip
    steps = {step["step"]: step for step in funnel["tools"]["Calculator"]}
    assert [(name, step["count"]) for name, step in steps.items()] == [
        ("documents", 8), ("fitting_documents", 6), ("positions", 400),
        ("sampled_positions", 40), ("samples", 200),
        ("candidates", 80), ("executed", 76), ("scored", 70), ("kept", 4),
    ]  # fmt: skip
    for before, after in (
        ("documents", "fitting_documents"), ("positions", "sampled_positions"),
        ("samples", "candidates"), ("candidates", "executed"), ("executed", "scored"),
        ("scored", "kept"),
    ):  # fmt: skip
        left = sum(steps[after]["left"].values())
        assert steps[before]["count"] == steps[after]["count"] + left, after
    assert steps["kept"]["left"] == {"below_threshold": 60, "lookahead_leak": 6}
    assert steps["executed"]["left"] == {"error:bad_arguments": 4}
    json.dumps(funnel)


def test_funnel_of_an_unfinished_run_stops_where_the_run_stopped(tmp_path: Path) -> None:
    funnel = build_funnel(make_run(tmp_path / "run", stages=2))
    assert [step["step"] for step in funnel["tools"]["Calculator"]][-1] == "candidates"
    empty = RunFolder(tmp_path / "empty")
    assert build_funnel(empty) == {"corpus": {}, "tools": {}, "sampling": {}, "dataset": {}}


def test_funnel_leaves_out_what_was_made_with_other_settings(tmp_path: Path) -> None:
    """A stage is redone and the ones after it still have the shards of the old settings."""
    folder = make_run(tmp_path / "run")
    names = ("ingest", "sample", "execute", "score", "select")
    prints = dict.fromkeys(names, "f") | {"score": "new", "select": "new"}
    write_json(folder.path / "manifest.json", {"fingerprints": prints})
    funnel = build_funnel(folder)
    assert [step["step"] for step in funnel["tools"]["Calculator"]][-1] == "executed"
    assert funnel["sampling"]["Calculator"]["executed_share"] == 0.45
    assert funnel["sampling"]["Calculator"]["kept_per_1000_tokens"] is None


def test_building_the_funnel_writes_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    before = sorted(folder.path.rglob("*"))
    build_funnel(folder)
    assert sorted(folder.path.rglob("*")) == before


def test_printed_funnel(tmp_path: Path) -> None:
    text = printed(print_funnel, build_funnel(make_run(tmp_path / "run")))
    assert re.search(r"kept +4 +gain below tau_f: 60; its arguments .*: 6", text)
    assert re.search(
        r"fitting documents +6 +longer, with the prompt, than the model reads: 2", text
    )
    assert "24 read, 10 documents; left out: bad json 2, the same text again 2\n" in text


# -- what the samples came to --------------------------------------------------------------------


def test_measures_of_the_samples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    found = build_funnel(folder)["sampling"]
    assert found == {
        "Calculator": {
            "samples": 200, "tokens": 1600, "closed": 100, "never_closed": 60, "malformed": 40,
            "closed_share": 0.5, "parsed_share": 0.47, "executed_share": 0.45,
            "kept_per_1000_tokens": 2.5,
        }
    }  # fmt: skip
    text = "200 samples of 1,600 tokens in all: 50% close, 47% parse, 45% execute; 2.50 kept calls "
    text += "per 1,000 tokens"
    assert text in printed(print_funnel, build_funnel(folder))
    assert f"Calculator: {text}" in printed(print_status, status_document(folder))
    assert text in Page(write_report(folder)).words


def test_measures_are_shown_when_their_stage_is_whole(tmp_path: Path) -> None:
    """A share of all samples of which some were not tried yet would be too small."""
    folder = make_run(tmp_path / "run")
    folder.marker("select", 1, 2).unlink()
    (found,) = build_funnel(folder)["sampling"].values()
    assert found["executed_share"] == 0.45 and found["kept_per_1000_tokens"] is None
    folder.marker("execute", 0, 2).unlink()
    (found,) = build_funnel(folder)["sampling"].values()
    assert (found["closed_share"], found["parsed_share"]) == (0.5, None)
    text = printed(print_funnel, build_funnel(folder))
    assert "200 samples of 1,600 tokens in all: 50% close\n" in text
    assert sampling_measures({"tokens": 0}, {}, {})["closed_share"] is None  # of nothing


# -- show ---------------------------------------------------------------------------------------


def test_show_gives_all_columns_and_the_text_around(tmp_path: Path) -> None:
    rows = show_rows(make_run(tmp_path / "run"))
    assert [row["gain"] for row in rows] == [1.5, 0.9, 0.7, 0.5, 0.25, None, None]
    first = rows[0]
    assert set(first) == {*COLUMNS, "context_before", "context_after"}
    assert first["context_before"] == "The farm sold 12 crates of 24 apples each, so"
    assert first["context_after"] == " 288 apples were gone. 0 It was a fine day."
    assert first["loss_call"] == 2.25 and first["reason"] == "kept"
    json.dumps(rows)


def test_show_chooses_by_tool_reason_sort_number_and_id(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert [r["tool"] for r in show_rows(folder, tool="calendar")] == ["Calendar"]
    kept = show_rows(folder, reason="kept", n=2)
    assert [r["gain"] for r in kept] == [1.5, 0.7]
    place = show_rows(folder, sort="position", n=100)
    assert [r["doc_id"] for r in place] == sorted(r["doc_id"] for r in place)
    one = show_rows(folder, call=kept[1]["call_id"][:10])
    assert one == [kept[1]]
    assert [r["gain_null"] for r in show_rows(folder, sort="gain_null", n=2)] == [0.4, 0.1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tool": "Python"}, "--tool Python: no call of it; there are calls of Calculator, Cal"),
        ({"reason": "bad"}, "--reason bad: allowed are kept, below_threshold"),
        ({"sort": "age"}, "--sort age: allowed are gain"),
        ({"call": "zz"}, "--call zz: no call"),
    ],
)
def test_show_refuses_what_it_does_not_know(
    tmp_path: Path, values: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        show_rows(make_run(tmp_path / "run"), **values)  # type: ignore[arg-type]


def test_show_of_an_unfinished_run(tmp_path: Path) -> None:
    rows = show_rows(make_run(tmp_path / "two", stages=2))
    assert len(rows) == 7 and rows[0]["loss_none"] == 2.0
    assert {row["gain"] for row in rows} == {row["reason"] for row in rows} == {None}
    assert "not selected yet" in printed(print_calls, rows)
    with pytest.raises(WorkError, match="no call has been sampled yet"):
        show_rows(make_run(tmp_path / "one", stages=1))


def test_printed_calls_show_losses_and_never_markup_or_controls(tmp_path: Path) -> None:
    rows = show_rows(make_run(tmp_path / "run"))
    rows[0]["result"] = "[red]288[/red] \x1b[31m\u202e"
    text = printed(print_calls, rows)
    assert "so [Calculator(12 * 24) -> [red]288[/red] ·[31m·] 288 apples" in text
    assert "\x1b" not in text and "\u202e" not in text
    assert "gain 1.500  L(eps) 2.000  L(call) 2.250  L(call, result) 0.500" in text
    assert "bad_arguments: not a sum" in text


# -- status -------------------------------------------------------------------------------------


def test_status_counts_shards_rows_seconds_and_estimates(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.marker("select", 1, 2).unlink()
    status = status_document(folder)
    stages = {stage["stage"]: stage for stage in status["stages"]}
    assert list(stages) == [
        "ingest", "sample", "execute", "score", "select", "augment", "finetune", "evaluate"
    ]  # fmt: skip
    assert stages["ingest"] == {
        "stage": "ingest", "state": "done", "done": 2, "shards": 2, "stale": 0, "rows": 10,
        "seconds": 3.0, "estimate_s": 0.0,
    }  # fmt: skip
    assert (stages["select"]["state"], stages["select"]["estimate_s"]) == ("partial", 1.5)
    assert (stages["augment"]["state"], stages["augment"]["estimate_s"]) == ("waiting", None)
    text = printed(print_status, status)
    assert re.search(r"select +partial +1/2 +\d+ +1\.5 s +1\.5 s", text)
    json.dumps(status)


def test_status_calls_shards_of_another_configuration_stale(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    stages = status_document(folder, {"ingest": "f", "sample": "changed"})["stages"]
    assert [stage["state"] for stage in stages[:3]] == ["done", "stale", "done"]


def test_status_of_no_run_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run folder"):
        status_document(RunFolder(tmp_path))


# -- report.html --------------------------------------------------------------------------------


def nasty_run(path: Path) -> RunFolder:
    """A run in which every text that can be hostile is."""
    folder = make_run(path)
    make_config(folder, model={"path": f"tiny {NASTY}"})
    docs = make_documents(4, NASTY)
    calls = [
        make_call(docs[0], "Calculator", "kept", 1.0, 0.0, NASTY, NASTY),
        make_call(docs[1], "Calculator", "tool_error", None, None, f"{NASTY}\x00\x1b"),
    ]
    for stage, rows, record in (("ingest", docs, Document), ("select", calls, SelectedCall)):
        folder.write_part(stage, 0, 2, to_table(rows, record), {"fingerprint": "f"})
        folder.write_part(stage, 1, 2, to_table([], record), {"fingerprint": "f"})
    write_json(folder.path / "manifest.json", {"device": NASTY})
    return folder


def test_report_shows_funnel_gains_calls_and_settings(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run"))
    assert path == tmp_path / "run" / "report.html"
    page = Page(path)
    for words in (
        "Calculator(12 * 24) → 288", "L(call, result) 0.500", "bad_arguments: not a sum",
        "rejected, bad json: 2", "3 of 4 calls reach tau_f 0.3",
        "1 of 4 would by another's result: estimated false-keep rate 33.3%",
        "not finished: augment has 0 of 1 shards", "tau_s: 0.05",
    ):  # fmt: skip
        assert words in page.words, words
    assert len(page.all("article")) == 7
    assert len([a for a in page.all("rect") if "over" in str(a["class"]).split()]) >= 2
    options = [a["value"] for a in page.all("option")]
    assert options[:3] == ["", "Calculator", "Calendar"] and set(options[4:]) <= set(REASONS)


def test_report_escapes_every_text(tmp_path: Path) -> None:
    path = write_report(nasty_run(tmp_path / "run"))
    page = Page(path)
    assert len(page.all("script")) == 1 and page.all("img") == []
    assert page.words.count('<script>document.title="owned"</script>') >= 6
    assert not [a for _, attributes in page.tags for a in attributes if a.startswith("on")]
    raw = path.read_text(encoding="utf-8")
    assert "\x00" not in raw and "\x1b" not in raw


def test_report_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run"))
    page = Page(path)
    assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    assert not [a for _, attributes in page.tags for a in attributes if a in ("src", "href")]
    raw = path.read_text(encoding="utf-8")
    assert "@import" not in raw and "url(" not in raw
    policy = next(a["content"] for a in page.all("meta") if "http-equiv" in a)
    assert str(policy).startswith("default-src 'none'")


@pytest.mark.parametrize("stages", range(6))
def test_report_of_unfinished_runs(tmp_path: Path, stages: int) -> None:
    page = Page(write_report(make_run(tmp_path / "run", stages=stages)))
    assert len(page.all("article")) == (7 if stages in (2, 5) else 0)
    assert len(page.all("select")) == 2


def test_report_finds_the_threshold_of_a_wanted_rate(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", select={"tau_f": {"false_keep_rate": 0.4}})
    for shard in range(2):
        marker = folder.read_marker("select", shard, 2)
        marker["tau_f"] = {"Calculator": 0.5, "Calendar": None}
        write_json(folder.marker("select", shard, 2), marker)
    words = Page(write_report(folder)).words
    assert "3 of 4 calls reach tau_f 0.5;" in words
    assert "none reaches the wanted false-keep rate" in words


def test_report_estimates_from_a_share_of_the_calls(tmp_path: Path) -> None:
    words = Page(write_report(make_run(tmp_path / "run", score={"null_share": 0.5}))).words
    assert "1 of 4 would by another's result: estimated false-keep rate 66.7%" in words
    assert "50%kept by chance (estimate)" in words


def test_report_shows_the_arms(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    results = {
        "arms": {
            "base": {
                "tasks": {"arithmetic": {"accuracy": 0.125, "standard_error": 0.02, "n": 40}},
                "perplexity": 9.5,
            },
            "tuned": {"tasks": {"arithmetic": {"accuracy": 0.5, "standard_error": 0.03, "n": 40}}},
        }
    }
    write_json(folder.stage("evaluate") / "results.json", results)
    words = Page(write_report(folder)).words
    assert "12.5 ± 2.0" in words and "50.0 ± 3.0" in words and "9.50" in words


@pytest.mark.parametrize("results", [None, [], {}, {"arms": []}, {"arms": {"base": "broken"}}])
def test_arms_table_of_no_results_is_empty(results: Any) -> None:
    assert arms_table(results).rows == []


def large_run(path: Path) -> RunFolder:
    """Two tools with hundreds of calls, as a real run has them."""
    folder = make_run(path)
    draw = random.Random(5)
    docs = make_documents(400)
    calls = []
    for doc in docs:
        for tool in ("Calculator", "Calendar"):
            gain = draw.gauss(-0.1, 0.3) + (draw.random() < 0.06) * draw.expovariate(1)
            reason = "kept" if gain >= 0.3 else "below_threshold"
            call = make_call(doc, tool, reason, gain, draw.gauss(-0.3, 0.25), result="2" * 40)
            calls.append(call)
    write = folder.write_part
    write("ingest", 0, 2, to_table(docs, Document), {"fingerprint": "f", "seconds": 60.0})
    write("select", 0, 2, to_table(calls, SelectedCall), {"fingerprint": "f", "seconds": 1.0})
    return folder


def test_report_of_many_calls_shows_the_best_of_each_kind(tmp_path: Path) -> None:
    page = Page(write_report(large_run(tmp_path / "run")))
    shown = Counter((a["data-tool"], a["data-reason"]) for a in page.all("article"))
    assert shown["Calculator", "below_threshold"] == OTHERS_SHOWN
    assert 20 < shown["Calendar", "kept"] <= KEPT_SHOWN
    assert len(page.all("svg")) == 2


# -- export, diff, summary ----------------------------------------------------------------------


def augmented_run(path: Path) -> RunFolder:
    folder = make_run(path)
    config = load_config(folder.path / "config.yaml")
    augment.run(Context(config, folder, "augment", "f"))
    return folder


def test_export_jsonl_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    folder = augmented_run(tmp_path / "run")
    lines = export_run(folder, "jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    table = pq.read_table(export_run(folder, "parquet", tmp_path / "deep" / "out.parquet"))
    assert rows == table.to_pylist() and len(rows) == 3
    assert sorted(row["split"] for row in rows) == ["train", "train", "validation"]
    assert rows[0]["calls"][0]["arguments"] in rows[0]["text_augmented"]
    assert export_run(folder, "jsonl") == folder.path / "export.jsonl"


def test_export_chat_messages_are_structured_calls_around_the_text(tmp_path: Path) -> None:
    folder = augmented_run(tmp_path / "run")
    lines = export_run(folder, "chat-messages").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    source = {row["id"]: row["text"] for row in dataset_table(folder).to_pylist()}
    for row in rows:
        said = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert "".join(said) == source[row["id"]]
        assert {tool["function"]["name"] for tool in row["tools"]} == {"Calculator", "Calendar"}
    first = next(row for row in rows if "288" in str(row["messages"][2]["content"]))
    _, call, result, rest = first["messages"]
    assert call["tool_calls"][0]["function"] == {
        "name": "Calculator", "arguments": {"expression": "12 * 24"}
    }  # fmt: skip
    assert result == {
        "role": "tool", "tool_call_id": "call_1", "name": "Calculator", "content": "288"
    }  # fmt: skip
    assert rest["content"].startswith(" 288 apples")


def test_chat_messages_of_two_calls_lose_nothing() -> None:
    calls = [
        {"tool": "A", "arguments": {"x": 1}, "result": "r", "char_start": 4},
        {"tool": "B", "arguments": {}, "result": "s", "char_start": 7},
    ]
    messages = chat_messages("one two three", calls)
    assert [m["content"] for m in messages[1:]] == ["one ", "r", "two", "s", " three"]
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ["call_1", "call_2"]


def test_export_refuses_unknown_formats_and_runs_without_data_set(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="--format csv: allowed are jsonl, parquet, chat-mess"):
        export_run(folder, "csv")
    with pytest.raises(WorkError, match="no data set yet; run `augment` first"):
        export_run(folder, "jsonl")


def test_export_refuses_a_folder_as_its_file(tmp_path: Path) -> None:
    folder = augmented_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="is a folder; allowed: the file to write"):
        export_run(folder, "jsonl", tmp_path)


def test_diff_shows_calls_kept_by_one_run_only_and_settings(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", select={"tau_f": 0.7, "per_tool": {"Calendar": 0.8}})
    docs = make_documents(10)
    calls = [
        make_call(docs[0], "Calculator", "kept", 1.5),
        make_call(docs[1], "Calculator", "below_threshold", 0.5),
        make_call(docs[8], "Calculator", "kept", 2.0),
    ]
    half = {"fingerprint": "f", "counts": {"Calculator": {"kept": 2}}}
    b.write_part("select", 0, 2, to_table(calls, SelectedCall), half)
    b.write_part("select", 1, 2, to_table([], SelectedCall), {"fingerprint": "f"})
    document = diff_runs(a, b)
    assert document["settings"] == [
        {"key": "select.tau_f", "a": 0.3, "b": 0.7},
        {"key": "select.per_tool.Calendar", "a": None, "b": 0.8},
    ]
    assert document["kept"] == {"a": 3, "b": 2, "both": 1}
    assert document["tools"] == {
        "Calculator": {"both": 1, "only_a": 1, "only_b": 1},
        "Calendar": {"both": 0, "only_a": 1, "only_b": 0},
    }
    assert [(row["gain"], row["reason_in_other"]) for row in document["only_a"]] == [
        (0.7, "not_sampled"), (0.5, "below_threshold")
    ]  # fmt: skip
    assert [row["gain"] for row in document["only_b"]] == [2.0]
    assert document["sampling"]["Calculator"]["a"] == build_funnel(a)["sampling"]["Calculator"]
    text = printed(print_diff, json.loads(json.dumps(document)))
    assert re.search(
        r"Calculator +% of samples that close +50 +50 *\n +% of samples that parse", text
    )
    assert re.search(r"kept calls per 1,000 tokens +2.50 +1.25 *\n", text)
    assert "only in A (2)" in text and "in the other run: below threshold" in text


def test_diff_of_a_run_with_itself_is_empty(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    document = diff_runs(folder, folder)
    assert document["settings"] == document["only_a"] == document["only_b"] == []
    assert "the settings are the same" in printed(print_diff, document)


def test_summary_shows_best_calls_near_misses_arms_and_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    results = {"arms": {"base": {"perplexity": 9.5}, "tuned": {"perplexity": 9.25}}}
    write_json(folder.stage("evaluate") / "results.json", results)
    write_report(folder)
    text = printed(print_summary, folder)
    assert text.index("best kept calls") < text.index("near misses") < text.index("the four arms")
    assert text.count("kept  gain") == 3 and "[Calculator(12 + 24) -> 36]" in text
    assert re.search(r"perplexity +9.50 +9.25", text) and "report.html" in text
    assert "corpus: 24 read" in printed(print_summary, make_run(tmp_path / "early", stages=1))


def test_listed_tools_show_how_a_call_is_written() -> None:
    document = tools_document(list_tools([{"name": "Calculator"}, {"name": "Calendar"}]))
    assert [(tool["name"], tool["call"]) for tool in document] == [
        ("Calculator", "Calculator(expression)"), ("Calendar", "Calendar()")
    ]  # fmt: skip
    assert "Calculator(expression)" in printed(print_tools, document)
    json.dumps(document)


# -- a real browser -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_report_in_a_real_browser(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run"))
    assert "7 of 7 calls on this page" in dump_dom(path)
    filtered = dump_dom(path, "#tool=Calculator&reason=kept")
    assert "2 of 7 calls on this page" in filtered
    assert len(re.findall(r"<article[^>]* hidden", filtered)) == 5
    assert "1 of 7 calls on this page" in dump_dom(path, "#words=monday")
    nasty = dump_dom(write_report(nasty_run(tmp_path / "nasty")))
    assert "2 of 2 calls on this page" in nasty
    assert "<title>test run" in nasty and "tiny &lt;script&gt;" in nasty
