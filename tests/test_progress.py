"""Progress: a bar on a terminal, whole lines at a low rate in a log."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import yaml
from tqdm import tqdm

from pipeline import progress as module
from pipeline import runner
from pipeline.context import Context
from pipeline.progress import Lines, counted, line_written, progress
from pipeline.records import Candidate
from pipeline.shards import RunFolder


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(Lines, "_written", 0.0)
    return made


def work(clock: Clock, seconds: float, n: int, total: int | None = None) -> None:
    with progress(total, "calls", "execute") as bar:
        for _ in range(n):
            clock.now += seconds
            bar.update()


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    work(clock, seconds=1, n=2510, total=2510)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "execute: 20 of 2,510 calls in 20 s"
    assert lines[-1] == "execute: 2,510 of 2,510 calls in 2510 s"
    assert len(lines) == 2510 // 20 + 1


def test_short_bars_share_the_lines_of_a_log(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    work(clock, seconds=5, n=3)
    assert capsys.readouterr().err == ""  # the stage itself says how it ended
    for _ in range(10):
        work(clock, seconds=25, n=1)  # a shard each
    assert capsys.readouterr().err == "execute: 1 calls in 25 s\n" * 10


def test_many_bars_that_are_short_are_told_of_too(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(8):
        work(clock, seconds=5, n=3)  # 15 s each: every other one stands in the log
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["execute: 1 calls in 5 s", "execute: 3 calls in 15 s"] * 4
    line_written()  # as a stage does when it begins
    work(clock, seconds=5, n=3)
    assert capsys.readouterr().err == ""


def test_a_line_tells_what_a_bar_would(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress(None, "steps", "finetune")
    bar.set_description("finetune tuned")
    bar.total, bar.n = 2000, 7
    bar.set_postfix_str("loss 1.234, 900 tokens/s", refresh=False)
    clock.now += 30
    bar.update(1)
    expected = "finetune tuned: 8 of 2,000 steps in 30 s, loss 1.234, 900 tokens/s\n"
    assert capsys.readouterr().err == expected
    bar.set_postfix(left_out=3, refresh=False)
    clock.now += 20
    bar.refresh()
    assert capsys.readouterr().err.endswith("in 50 s, left out 3\n")
    assert list(counted("abc", "letters", "index")) == ["a", "b", "c"]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress(3, "calls", "execute") as bar:
        assert isinstance(bar, tqdm)


def test_a_bar_names_its_shard(inputs: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(tiny.make_config(inputs), shards=3)
    context = Context(config, RunFolder(tmp_path), "sample", "print")
    named = []

    def one(index: int) -> Iterator[Candidate]:
        with context.progress(1, "documents") as bar:
            assert isinstance(bar, Lines)
            named.append(bar._about)
        yield from ()

    runner._each_shard(context, (0, 1), Candidate, one)
    assert named == ["sample 1/3", "sample 2/3", "sample 3/3"]


def test_the_log_of_a_run_holds_whole_lines(inputs: Path, tmp_path: Path) -> None:
    """Also where a model is loaded and an index is built, which have bars of their own."""
    lm = tiny.make_lm("llama", "bytes")
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    raw = tiny.raw_config(inputs, model={"path": str(tmp_path / "model"), "device": "cpu"})
    raw["tools"][2]["index"] = str(tmp_path / "index.sqlite")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**raw, "sample": {"k": 1, "m": 1}}))
    command = [sys.executable, "-m", "pipeline", "run", str(tmp_path / "c.yaml"), "--run-dir"]
    done = subprocess.run(
        [*command, str(tmp_path / "run"), "--until", "execute"], capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert b"\r" not in done.stderr and b"\x1b" not in done.stderr
    starts = [line.split()[0] for line in done.stderr.decode().splitlines()]
    assert starts == ["ingest", "ingest", "sample", "sample", "execute", "execute"]
    assert b"s: 6 documents\n" in done.stderr
