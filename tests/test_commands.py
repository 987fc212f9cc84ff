"""What single commands print: text as it is written, counts where nothing matches, exports."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from rich.console import Console

from pipeline.cli import main
from pipeline.config import dump_config, parse_config
from pipeline.records import SelectedCall, to_table
from pipeline.report.stream import GenerationStream
from pipeline.report.terminal import print_calls, print_generation
from pipeline.shards import RunFolder, write_json


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with three selected calls of two tools, and a data set of three texts."""
    raw = {
        "name": "small",
        "corpus": {"sources": [{"path": "c.jsonl"}]},
        "model": {"path": "tiny"},
        "tools": [{"name": "Calculator"}, {"name": "Calendar"}],
    }
    (tmp_path / "config.yaml").write_text(dump_config(parse_config(raw)))
    found = RunFolder(tmp_path)
    calls = [call("Calculator", "kept"), call("Calculator", "kept"), call("Calendar", "conflict")]
    found.write_part("select", 0, 1, to_table(calls, SelectedCall), {"fingerprint": "f"})
    data = found.stage("augment") / "data"
    data.mkdir(parents=True)
    row: dict[str, Any] = {"id": "1", "text": "a b", "text_augmented": "a b", "calls": []}
    pq.write_table(pa.Table.from_pylist([row, row]), data / "train-00000-of-00001.parquet")
    pq.write_table(pa.Table.from_pylist([row]), data / "validation-00000-of-00001.parquet")
    return found


def call(tool: str, reason: str) -> SelectedCall:
    values: dict[str, Any] = {
        field.name: None for field in dataclasses.fields(SelectedCall)
    }  # most columns may be empty
    values |= {"call_id": f"{tool}{reason}", "doc_id": "d", "tool": tool, "arguments": "1 + 1"}
    values |= {"char_start": 0, "token_index": 0, "sample_count": 1, "p_api": 0.1}
    values |= {"loss_none": 1.0, "seconds": 0.0, "cached": False}
    return SelectedCall(**{**values, "kept": reason == "kept", "reason": reason})


def test_show_without_a_match_says_what_there_is(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(folder.path), "--tool", "calendar", "--reason", "kept"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "no call matches",
        "calls of this run:",
        "  Calculator: kept 2",
        "  Calendar: conflict 1",
    ]
    assert main(["show", str(folder.path), "--reason", "over_cap", "--json"]) == 0
    assert capsys.readouterr().out.strip() == "[]"


def test_show_wants_a_number_from_one_on(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in ("0", "-3", "x"):
        with pytest.raises(SystemExit, match="2"):
            main(["show", str(folder.path), "-n", n])
        assert f"{n!r} is not a number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_export_says_what_it_wrote_and_how_to_load_it(
    form: str, folder: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["export", str(folder.path), "--format", form]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(folder.path / f"export.{form}")  # nothing but the path, for scripts
    assert "3 rows (2 train, 1 validation; column `split`)" in err
    expression = err.partition("load it: ")[2].strip().removesuffix(")")
    loaded = eval(f"{expression}, cache_dir={str(tmp_path / 'cache')!r})", {"datasets": datasets})
    assert loaded["train"].num_rows == 3


def test_a_text_is_shown_as_it_is_written_and_a_call_when_it_is_made() -> None:
    file = io.StringIO()
    shown: list[str] = []
    stream = GenerationStream("so", Console(file=file, width=30))

    def step(text: str, *calls: Any) -> None:
        stream.on_text(0, text, calls)
        shown.append(file.getvalue())

    made = SimpleNamespace(
        tool="Calculator",
        arguments="1 + 1",
        result="2",
        error_kind=None,
        error=None,
        start=2,
        end=28,
    )
    text = " a [Calculator(1 + 1) -> 2] b \u00e9."
    step(" a")
    step(" a")  # a call has begun
    step(text[:28], made)
    step(text[:30] + "\ufffd", made)  # half a character
    step(text, made)
    assert shown == ["so a", "so a", "so" + text[:28], "so" + text[:30], "so" + text]
    stream.finish(SimpleNamespace(text=text, calls=[made]))
    assert file.getvalue() == f"so{text}\nCalculator(1 + 1) -> 2\n"


def test_nothing_comes_before_the_prompt_on_a_terminal(tmp_path: Path) -> None:
    lm = tiny.make_lm("llama", "bytes")
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    command = [sys.executable, "-m", "pipeline", "generate", str(tmp_path), "The total"]
    ours, its = pty.openpty()
    with subprocess.Popen([*command, "--max-new-tokens", "2"], stdout=its, stderr=its) as process:
        os.close(its)
        shown = b""
        with contextlib.suppress(OSError):  # how a pseudo-terminal says that it was closed
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert process.returncode == 0, shown
    assert re.match(rb"(\x1b\[\d+m)*The total", shown), shown


def test_calls_are_coloured_in_the_stream() -> None:
    file = io.StringIO()
    stream = GenerationStream("", Console(file=file, force_terminal=True, color_system="standard"))
    good = SimpleNamespace(start=1, end=4, error_kind=None)
    bad = SimpleNamespace(start=5, end=8, error_kind="timeout")
    stream.on_text(0, "a[b] [c] d", [good, bad])
    assert file.getvalue() == "a\x1b[1;32m[b]\x1b[0m \x1b[1;31m[c]\x1b[0m d"


def test_what_a_model_wrote_in_a_call_does_not_steer_the_terminal() -> None:
    file = io.StringIO()
    call = SimpleNamespace(
        tool="T",
        arguments="\x1b[2J",
        result=None,
        error_kind="syntax",
        error="\x07",
        start=0,
        end=0,
    )
    GenerationStream("", Console(file=file)).finish(SimpleNamespace(text="", calls=[call]))
    assert file.getvalue().splitlines()[-1] == "T(\u00b7[2J) -> syntax: \u00b7"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "\ncallsieve: interrupted\n"),
        (OSError(28, "No space left on device"), 1, "No space left on device\n"),
        (sqlite3.OperationalError("disk I/O error"), 1, "callsieve: disk I/O error\n"),
    ],
)
def test_a_command_that_is_no_run_speaks_of_no_shards(
    error: BaseException, code: int, message: str, folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("pipeline.report.rows.show_rows", fail)
    assert main(["show", str(folder.path)]) == code
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize("older", [True, False])
def test_an_export_says_when_the_settings_have_changed_since(
    older: bool,
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("pipeline.runner.fingerprints", lambda config: {"augment": "now"})
    write_json(folder.stage_marker("augment"), {"fingerprint": "before" if older else "now"})
    assert main(["export", str(folder.path), "--format", "jsonl"]) == 0
    assert ("augment is stale" in capsys.readouterr().err) is older


@pytest.mark.parametrize("command", [["generate", "m", "x"], ["tools", "call", "Calendar", ""]])
def test_a_date_that_is_none_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--date", "yesterday"])
    assert caught.value.code == 2
    assert "'yesterday' is no date" in capsys.readouterr().err


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A tiny model that can read 16 tokens."""
    lm = tiny.make_lm("llama", "bytes")
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    config = tmp_path / "config.json"  # the model itself is shared by the tests
    written = {**json.loads(config.read_text()), "max_position_embeddings": 16}
    config.write_text(json.dumps(written))
    return tmp_path


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_prompt_that_the_model_cannot_read_is_a_failure(
    options: list[str], short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "7 " * 200
    assert main(["generate", str(short), prompt, *options]) == 1
    out, err = capsys.readouterr()
    assert "the prompt has 401 tokens" in err  # one per byte, and that of the beginning
    assert "can read 16," in err and "shorten the prompt to 15 tokens" in err
    assert ('"finish": "context"' in out) is bool(options)


def test_a_context_that_ends_in_the_text_is_no_failure(short: Path) -> None:
    assert main(["generate", str(short), "7", "--max-new-tokens", "40", "--json"]) == 0


@pytest.mark.parametrize("number", ["0", "-1"])
def test_generate_wants_a_token_at_least(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "no-such-model", "x", "--max-new-tokens", number])
    assert f"{number!r} is not a number from 1 on" in capsys.readouterr().err


def test_a_text_goes_to_a_file_exactly_as_it_is() -> None:
    file = io.StringIO()
    done = call_made(arguments="1 + 1" + " + 1" * 30)
    text = "two\n\tlines, " + "and a long one " * 10 + "[x]"
    print_generation("a  b\n", SimpleNamespace(text=text, calls=[done]), Console(file=file))
    shown = f"Calculator({done.arguments}) -> 2\n"
    assert file.getvalue() == f"a  b\n{text}\n{shown}"


def call_made(arguments: str) -> SimpleNamespace:
    return SimpleNamespace(
        tool="Calculator", arguments=arguments, result="2", error_kind=None, error=None
    )


def test_show_writes_a_call_into_one_line_of_a_file() -> None:
    row: dict[str, Any] = dict.fromkeys(
        ("gain", "loss_none", "loss_call", "loss_result", "gain_null", "p_api", "error_kind"), 0.5
    )
    row |= {"error_kind": None, "reason": "kept", "kept": True, "result": "2", "call_id": "c"}
    row |= {"tool": "Calculator", "arguments": "1 + 1", "context_after": " after " * 12}
    file = io.StringIO()
    print_calls([{**row, "context_before": "before " * 12}], Console(file=file, width=80))
    context, facts = file.getvalue().strip().splitlines()
    assert context.endswith("after") and facts.endswith("call c")


@pytest.mark.parametrize("rest", [["--json"], ["--json", "--seed", "1"], ["--json=1"]])
def test_a_run_says_where_json_is_to_be_had(
    rest: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "no-such.yaml", *rest]) == 2
    err = capsys.readouterr().err
    assert "--json: this command has none" in err and "status RUN_DIR --json" in err


def test_mt_without_apertium_says_what_else_it_can_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.tools.translate.apertium_is_there", lambda: False)
    assert main(["tools", "call", "MT", "la casa"]) == 2
    err = capsys.readouterr().err
    assert "apt-get install apertium" in err and "`backend: transformers` and a `model`" in err


@pytest.mark.parametrize(("answer", "code"), [(None, 1), ("29", 0)])
def test_a_run_of_the_loop_without_an_answer_prints_no_line(
    answer: str | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    result = SimpleNamespace(answer=answer)
    monkeypatch.setattr("pipeline.agent.command.answer_question", lambda *_, **__: result)
    assert main(["agent", "run", "no-such-model", "How much?", "--tools", "Calculator"]) == code
    assert capsys.readouterr().out == ("" if answer is None else f"{answer}\n")
