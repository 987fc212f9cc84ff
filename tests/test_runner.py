"""Runs: the same rows after a kill and over any number of shards; what a change makes stale."""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import cli, fingerprints, runner
from pipeline.config import Config, parse_config
from pipeline.errors import ConfigError, WorkError
from pipeline.lm.checkpoint import save_checkpoint
from pipeline.lm.tiny import make_tiny_model
from pipeline.refusals import sections_in
from pipeline.shards import SHARD_FOLDERS, RunFolder, merge_counts, read_json
from pipeline.tools import catalogue

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that was taught to write calls, as a checkpoint."""
    folder = tmp_path_factory.mktemp("models") / "taught"
    lm = tiny.taught_lm("llama", "bytes")
    save_checkpoint(lm.model, lm.tokenizer, folder, {})
    return folder


@pytest.fixture(scope="session")
def raw(inputs: Path, model_folder: Path) -> dict[str, Any]:
    """Settings of a run with something to do in every stage."""
    return tiny.raw_config(
        inputs,
        model={"path": str(model_folder), "device": "cpu"},
        shards=3,
        sample={"constrain": True, "max_new_tokens": 40},
    )


@pytest.fixture(scope="session")
def finished(raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run up to the data set that nothing has disturbed (copy it before changing it)."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "finished")
    run(parse_config(raw), folder)
    return folder


def run(config: Config, folder: RunFolder, **options: Any) -> tuple[runner.Plan, list[str]]:
    said: list[str] = []
    plan = runner.run(config, folder, **{"last": "augment", "say": said.append, **options})
    return plan, said


def changed(raw: dict[str, Any], **changes: Any) -> Config:
    own = copy.deepcopy(raw)
    for path, value in changes.items():
        node = own
        *sections, key = path.split("__")
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return parse_config(own)


def rows(folder: RunFolder, stage: str) -> list[pa.Table]:
    """The tables of a stage, shard by shard, without what a clock or a cache says."""
    tables = [folder.read_part(stage, *part) for part in folder.parts(stage)]
    return [
        t.drop_columns([c for c in ("seconds", "cached") if c in t.column_names]) for t in tables
    ]


def counts(folder: RunFolder, stage: str) -> dict[str, dict[str, int]]:
    """The counts of a stage over its shards."""
    if stage in SHARD_FOLDERS:
        markers = [folder.read_marker(stage, *part) or {} for part in folder.parts(stage)]
    else:
        markers = [read_json(folder.stage_marker(stage))]
    tools = {tool for marker in markers for tool in marker["counts"]}
    return {t: merge_counts(m["counts"].get(t, {}) for m in markers) for t in sorted(tools)}


def dataset(folder: RunFolder) -> dict[str, bytes]:
    data = folder.stage("augment") / "data"
    return {path.name: path.read_bytes() for path in sorted(data.iterdir())}


def assert_same(one: RunFolder, other: RunFolder) -> None:
    for stage in SHARD_FOLDERS:
        assert one.parts(stage) == other.parts(stage)
        for mine, yours in zip(rows(one, stage), rows(other, stage), strict=True):
            assert mine.equals(yours), stage
        assert counts(one, stage) == counts(other, stage)
    assert dataset(one) == dataset(other)
    assert counts(one, "augment") == counts(other, "augment")


def test_the_run_is_worth_comparing(finished: RunFolder) -> None:
    table = finished.read_all("select", ["tool", "reason", "gain_null"])
    assert set(table["tool"].to_pylist()) == {"Calculator", "Calendar", "WikiSearch"}
    assert {"kept", "below_threshold"} <= set(table["reason"].to_pylist())
    assert any(gain is not None for gain in table["gain_null"].to_pylist())
    assert all(t.num_rows > 0 for stage in SHARD_FOLDERS for t in rows(finished, stage))


# -- killed and run again -------------------------------------------------------------------------


def run_and_die(config: Config, folder: RunFolder, stage: str, renamed: int) -> None:
    """Run, and die by SIGKILL in place of the given rename among the files of a stage."""
    replace, seen = os.replace, 0
    place = str(folder.stage(stage))

    def count(source: Any, target: Any) -> None:
        nonlocal seen
        seen += str(target).startswith(place)
        if seen == renamed:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = count  # type: ignore[assignment]
    run(config, folder)


# Of 3 shards with a marker each: after one whole shard; between the second one and its marker.
# Ingest writes 3 shards, then the markers; augment one folder, then its marker.
MIDDLE = {"ingest": 2, "sample": 3, "execute": 3, "score": 3, "select": 3, "augment": 1}
NO_MARKER = {"ingest": 5, "sample": 4, "execute": 4, "score": 4, "select": 4, "augment": 2}


@pytest.mark.parametrize("kills", [MIDDLE, NO_MARKER], ids=["middle", "before the marker"])
def test_killed_in_every_stage_and_run_again(
    kills: dict[str, int], raw: dict[str, Any], finished: RunFolder, tmp_path: Path
) -> None:
    """One folder is killed once in each stage; the same command ends with identical rows."""
    config, folder = parse_config(raw), RunFolder(tmp_path / "run")
    processes = multiprocessing.get_context("fork")
    for stage, renamed in kills.items():
        child = processes.Process(target=run_and_die, args=(config, folder, stage, renamed))
        child.start()
        child.join(120)
        assert child.exitcode == -signal.SIGKILL, stage
        todo = runner.plan(config, folder, None, "augment").todo
        assert todo[0] == stage, "it died in another stage"
        if stage in SHARD_FOLDERS and stage != "ingest":
            assert folder.parts(stage) == [(0, 3)]  # what was whole is kept
    plan, _ = run(config, folder)
    assert plan.todo == ("augment",)
    assert_same(folder, finished)
    assert not list(folder.path.rglob("*.tmp"))  # nothing half-written is left
    _, said = run(config, folder)
    assert said == [f"{folder.path}: everything is done"]


def in_process(work: Callable[[], int]) -> int:
    """Do something in a process of its own; return its exit code."""
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(work()))
    child.start()
    child.join(120)
    assert child.exitcode is not None
    return child.exitcode


# Runs commands one after the other, each in a process of its own that dies by SIGKILL in place of
# the n-th rename to a name that ends so; prints their exit codes. Nothing has been computed before
# the processes part, and the libraries are imported once.
COMMANDS = """
import json, os, signal, sys
import pipeline.runner, pipeline.stages.evaluate, pipeline.stages.finetune
from pipeline.cli import main

def dying(ending, left, command):
    replace = os.replace
    def count(source, target):
        nonlocal left
        left -= str(target).endswith(ending)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
    os.replace = count
    return main(command)

codes = []
for ending, left, command in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os._exit(dying(ending, left, command))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""

# Where a command is killed, in each stage: after some of its work is done.
DEATHS = (
    ("05-selected/part-00002-of-00003.parquet", 1),
    ("06-dataset/done.json", 1),
    (".training/tuned/state.pt", 2),
    (".arms/control.json", 1),
)


@pytest.mark.slow
def test_a_command_killed_in_each_later_stage_ends_with_the_same_files(
    raw: dict[str, Any], finished: RunFolder, tmp_path: Path
) -> None:
    question = {"id": "q", "kind": "arithmetic", "prompt": "12 + 24 is", "answer": "36"}
    (tmp_path / "q.jsonl").write_text(json.dumps(question) + "\n")
    own = {
        **raw,
        "finetune": {"max_steps": 4, "eval_every": 1, "batch_size": 2, "learning_rate": 1e-3},
        "evaluate": {"questions": [str(tmp_path / "q.jsonl")], "max_new_tokens": 8},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(own))
    whole, killed = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "killed")
    for folder in (whole, killed):
        shutil.copytree(finished.path, folder.path)
        folder.clear("select")
        folder.clear("augment")

    command = ["run", str(tmp_path / "c.yaml"), "--run-dir"]
    deaths = [(*where, [*command, str(killed.path)]) for where in DEATHS]
    ends = [("nowhere", 1, [*command, str(folder.path)]) for folder in (killed, whole)]
    program = [sys.executable, "-c", COMMANDS, json.dumps([*deaths, *ends])]
    done = subprocess.run(program, capture_output=True, text=True)
    codes = json.loads(done.stdout.splitlines()[-1])
    assert codes == [-signal.SIGKILL] * len(deaths) + [0, 0], done.stderr
    assert_same(killed, whole)
    names = ["model.safetensors", "control/model.safetensors", "tokenizer.json", "config.json"]
    for name in names:
        mine, its = (folder.stage("finetune") / name for folder in (killed, whole))
        assert mine.read_bytes() == its.read_bytes(), name
    for name in ("results.json", "traces.jsonl"):
        mine, its = (folder.stage("evaluate") / name for folder in (killed, whole))
        assert mine.read_text() == its.read_text(), name
    left = {path.name for path in killed.path.rglob("*")}
    assert left == {path.name for path in whole.path.rglob("*")}


def with_files_of(size: int, work: Callable[[], int]) -> int:
    """Do something where no file can grow over `size` bytes: a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return work()


def test_a_disk_that_is_full_at_the_checkpoint(
    raw: dict[str, Any], finished: RunFolder, tmp_path: Path, capfd: Any
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, folder.path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw))
    command = ["finetune", str(tmp_path / "c.yaml"), "--run-dir", str(folder.path)]
    command += ["--finetune.max_steps", "2", "--finetune.batch_size", "2"]
    assert in_process(lambda: with_files_of(100_000, lambda: cli.main(command))) == 1
    err = capfd.readouterr().err
    assert "the checkpoint cannot be written" in err and "too large" in err
    assert not list(folder.path.rglob("*.tmp/*"))  # half a checkpoint would fill the disk further


def test_a_checkpoint_that_cannot_be_replaced_stays(tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.nn.init.zeros_(model.get_input_embeddings().weight)

    def save() -> int:
        try:
            save_checkpoint(model, tokenizer, folder, {"new": True})
        except WorkError:
            return 3
        return 0

    assert in_process(lambda: with_files_of(50_000, save)) == 3
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_finished_shards_are_not_done_again(
    raw: dict[str, Any], finished: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, folder.path)
    folder.marker("score", 1, 3).unlink()
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("part-*")}
    plan, _ = run(parse_config(raw), folder)
    assert plan.todo == ("score",)  # the same inputs: what comes after stays as it is
    again = {path for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert again == {folder.part("score", 1, 3)}
    assert_same(folder, finished)


def test_a_torn_marker_counts_as_none(
    raw: dict[str, Any], finished: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, folder.path)
    marker = folder.marker("execute", 2, 3)
    marker.write_text(marker.read_text()[:20])
    run(parse_config(raw), folder)
    assert_same(folder, finished)


# -- shards ---------------------------------------------------------------------------------------


def test_one_and_four_shards(raw: dict[str, Any], tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path / str(n)) for n in (1, 4)]
    for folder, n in zip(folders, (1, 4), strict=True):
        run(changed(raw, shards=n), folder)
        assert [len(folder.parts(stage)) for stage in SHARD_FOLDERS] == [n] * 5
    one, four = folders
    for stage in SHARD_FOLDERS:
        key = "doc_id" if stage == "ingest" else "call_id"
        whole, parts = (pa.concat_tables(rows(f, stage)).sort_by(key) for f in (one, four))
        assert whole.schema == parts.schema and whole.num_rows == parts.num_rows > 0
        for name in whole.column_names:
            mine, yours = whole[name].to_pylist(), parts[name].to_pylist()
            if pa.types.is_floating(whole.schema.field(name).type):
                assert [v is None for v in mine] == [v is None for v in yours]
                mine, yours = ([v or 0.0 for v in side] for side in (mine, yours))
                assert mine == pytest.approx(yours, abs=1e-4), name
            else:
                assert mine == yours, name
        assert counts(one, stage) == counts(four, stage)
    names = ["id", "text_augmented"]
    read = [pq.read_table(f.stage("augment") / "data", columns=names) for f in folders]
    assert read[0].equals(read[1])


def test_processes_that_share_the_shards(
    raw: dict[str, Any], finished: RunFolder, tmp_path: Path
) -> None:
    """A job array: ingest once, then i/n of each stage by different processes."""
    config, folder = parse_config(raw), RunFolder(tmp_path / "run")
    run(config, folder, last="ingest")
    for i in (1, 0):
        _, said = run(config, folder, last="execute", shards=(i, 2))
        assert "execute ..." in said
    assert sorted(folder.parts("execute")) == [(0, 3), (1, 3), (2, 3)]
    run(config, folder)
    assert_same(folder, finished)


def test_score_waits_for_all_shards_of_execute(raw: dict[str, Any], tmp_path: Path) -> None:
    config, folder = parse_config(raw), RunFolder(tmp_path / "run")
    run(config, folder, last="ingest")
    run(config, folder, last="execute", shards=(0, 2))
    with pytest.raises(WorkError, match=r"`execute` still lacks shards \[1\]"):
        run(config, folder, last="score", shards=(0, 2))


# -- what a change makes stale --------------------------------------------------------------------


def test_a_changed_threshold_redoes_select_and_later_only(
    raw: dict[str, Any], finished: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, folder.path)
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*.json")}
    gains = sorted(g for g in folder.read_all("score")["gain"].to_pylist() if g is not None)
    tau = round(gains[-2], 6)
    plan, said = run(changed(raw, select__tau_f=tau), folder)
    assert plan.todo == plan.stale == ("select", "augment")
    assert said[:2] == [
        f"changed: select.tau_f: 0.0 -> {tau}", "stale, will be redone: select, augment"
    ]  # fmt: skip
    for stage in ("ingest", "sample", "execute", "score"):
        for part in folder.parts(stage):
            assert (
                folder.marker(stage, *part).stat().st_mtime_ns
                == before[folder.marker(stage, *part)]
            )
    assert counts(folder, "select") != counts(finished, "select")
    # and back again: the same rows as ever
    run(parse_config(raw), folder)
    assert_same(folder, finished)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"seed": 5}, "ingest"),
        ({"shards": 2}, "ingest"),
        ({"corpus__max_words": 50}, "ingest"),
        ({"call_format__empty_result": "bare"}, "ingest"),
        ({"sample__k": 4}, "sample"),
        ({"sample__per_tool": {"Calculator": {"m": 1}}}, "sample"),
        ({"sample__constrain": False}, "sample"),
        ({"gain_floor": 0.0}, "sample"),
        ({"score__horizon": 4}, "sample"),  # L_i(eps) is computed there
        ({"score__tail": "renormalise"}, "sample"),
        ({"model__dtype": "bfloat16"}, "sample"),
        ({"score__separator": " "}, "score"),
        ({"score__null_share": 0.5}, "score"),
        ({"select__lookahead": "allow"}, "select"),
        ({"select__per_tool": {"Calendar": 1.0}}, "select"),
        ({"augment__validation_share": 0.3}, "augment"),
        ({"corpus__licence": "CC0-1.0"}, "augment"),
        ({"finetune__learning_rate": 1e-3}, "finetune"),
        ({"evaluate__max_calls": 2}, "evaluate"),
        # speed changes nothing
        ({"sample__max_rows": 3, "sample__token_budget": 77, "score__token_budget": 5}, None),
        ({"execute__workers": 7, "execute__cache": False, "evaluate__max_rows": 3}, None),
        ({"finetune__tokens_per_micro_batch": 77}, None),
    ],
    ids=str,
)
def test_first_stage_that_depends_on_a_value(
    raw: dict[str, Any], changes: dict[str, Any], first: str | None
) -> None:
    before = runner.fingerprints(parse_config(raw))
    after = runner.fingerprints(changed(raw, **changes))
    stale = [name for name in runner.STAGE_NAMES if before[name] != after[name]]
    order = runner.STAGE_NAMES
    assert stale == list(order[order.index(first) :] if first else ())


def test_changed_files_are_noticed(raw: dict[str, Any], inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs, tmp_path / "in")
    own = json.loads(json.dumps(raw).replace(str(inputs), str(tmp_path / "in")))
    claims, pages = tmp_path / "claims.jsonl", tmp_path / "pages.json"
    claims.write_text("{}\n")
    pages.write_text("[]")
    files = {"fever_file": str(claims), "hotpot_file": str(pages)}
    own.setdefault("evaluate", {})["agents"] = {"benchmarks": ["fever"], **files}
    config = parse_config(own)

    def stale_after(change: Any) -> str:
        before = runner.fingerprints(config)
        change()
        after = runner.fingerprints(config)
        return next(name for name in runner.STAGE_NAMES if before[name] != after[name])

    prompt, corpus = tmp_path / "in/prompts/Calendar.txt", tmp_path / "in/corpus.jsonl"
    articles = tmp_path / "in/articles.jsonl"
    assert stale_after(lambda: prompt.write_text(prompt.read_text() + " ")) == "sample"
    assert stale_after(lambda: corpus.write_text(corpus.read_text() + "\n")) == "ingest"
    assert stale_after(lambda: articles.write_text(articles.read_text() + "\n")) == "execute"
    assert stale_after(lambda: claims.write_text("{}\n{}\n")) == "evaluate"
    assert stale_after(lambda: pages.write_text("[{}]")) == "evaluate"


@pytest.fixture
def project(
    raw: dict[str, Any], inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, RunFolder]:
    """A folder `one` whose settings name its files by relative paths, and a run that lies in it."""
    shutil.copytree(inputs, tmp_path / "one/in")
    monkeypatch.chdir(tmp_path / "one")
    own = json.loads(json.dumps(raw).replace(str(inputs), "in"))
    run(parse_config(own), RunFolder(Path("runs/tiny")), last="execute")
    return tmp_path / "one", RunFolder(tmp_path / "one/runs/tiny")


def states(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """What `callsieve status` says of the first three stages, and on stderr."""
    assert cli.main(["status", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    return [stage["state"] for stage in json.loads(out)["stages"][:3]], err


def test_status_is_the_same_wherever_it_is_asked_from(
    project: tuple[Path, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    one, folder = project
    done = (["done"] * 3, "")
    assert states(Path("runs/tiny"), capsys) == done
    monkeypatch.chdir(tmp_path)
    assert states(folder.path, capsys) == done
    # another project with other files of the same names, and with a copy of the run
    shutil.copytree(one, tmp_path / "two", copy_function=shutil.copyfile)  # other times
    (tmp_path / "two/in/corpus.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path / "two")
    assert states(folder.path, capsys) == done
    assert states(Path("runs/tiny"), capsys) == (["stale"] * 3, "")
    shutil.copyfile(one / "in/corpus.jsonl", "in/corpus.jsonl")
    assert states(Path("runs/tiny"), capsys) == done
    (one / "in/corpus.jsonl").write_text("{}\n")
    assert states(folder.path, capsys) == (["stale"] * 3, "")


def test_nothing_is_called_stale_where_the_files_are_not(
    project: tuple[Path, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    moved = tmp_path / "deeper/down/run"
    shutil.copytree(project[1].path, moved)
    found, err = states(moved, capsys)
    assert found == ["done"] * 3
    assert "what is stale cannot be told" in err and "prompts/Calculator.txt" in err


def test_a_missing_source_leaves_what_was_made_of_it(project: tuple[Path, RunFolder]) -> None:
    one, folder = project
    config = runner.saved_config(folder)
    assert config is not None
    (one / "in/corpus.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"no file matches 'in/corpus\.jsonl'"):
        run(config, folder)
    assert len(folder.parts("ingest")) == 3


def test_a_large_file_is_read_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALLSIEVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "_LARGE_BYTES", 4)
    path = tmp_path / "large"
    read: list[Path] = []
    hashed = fingerprints._read
    monkeypatch.setattr(fingerprints, "_read", lambda p: read.append(p) or hashed(p))

    def asked() -> str:  # as by a command of its own
        fingerprints._content_hash.cache_clear()
        return fingerprints.content_hash(path)

    path.write_bytes(b"12345")
    first = asked()
    assert asked() == first and len(read) == 1
    path.write_bytes(b"12346")
    os.utime(path, ns=(1, 1))
    assert asked() != first and len(read) == 2


FUNCTION = '''
def Rates(currency: str) -> str:
    """Tells a rate.

    Args:
        currency: Code of the currency.
    """
    return {"CHF": "0.94"}[currency]
'''


def with_tools(raw: dict[str, Any], inputs: Path, folder: Path, *tools: dict[str, Any]) -> Any:
    """Settings with more tools; their prompts are written."""
    own = json.loads(json.dumps(raw).replace(str(inputs), str(folder)))
    shutil.copytree(inputs, folder, dirs_exist_ok=True)
    own["tools"] += tools
    for name in parse_config(own).tool_names[3:]:
        shutil.copy(folder / "prompts/WikiSearch.txt", folder / f"prompts/{name}.txt")
    return own


def first_stale(before: dict[str, str], after: dict[str, str]) -> str | None:
    return next((name for name in runner.STAGE_NAMES if before[name] != after[name]), None)


@pytest.mark.parametrize(
    ("old", "new", "constrained"),
    [
        ("currency: str", "currency: int", "sample"),
        ("(currency: str)", "(currency: str, year: int = 2024)", "sample"),
        ("Code of the currency.", 'A code. (choices: ["CHF", "NOK"])', "sample"),
        ("\ndef ", "\nfrom typing import Literal as str\n\ndef ", "sample"),
        ("0.94", "0.95", "execute"),  # no argument has changed
        ("    return", "    # a comment\n    return", "execute"),
    ],
)
def test_a_changed_signature_redoes_sample_where_masks_follow_it(
    raw: dict[str, Any], inputs: Path, tmp_path: Path, old: str, new: str, constrained: str
) -> None:
    path = tmp_path / "rates.py"
    path.write_text(FUNCTION)
    entry = {"name": "Function", "function": f"{path}:Rates"}
    own = with_tools(raw, inputs, tmp_path / "in", entry)
    configs = [parse_config(own), changed(own, sample__constrain=False)]
    before = [runner.fingerprints(config) for config in configs]
    assert old in FUNCTION
    path.write_text(FUNCTION.replace(old, new))
    after = [runner.fingerprints(config) for config in configs]
    assert first_stale(before[0], after[0]) == constrained
    assert first_stale(before[1], after[1]) == "execute"


def test_changed_articles_of_a_search_within_qa_redo_execute(
    raw: dict[str, Any], inputs: Path, tmp_path: Path
) -> None:
    articles = tmp_path / "in/own.jsonl"
    search = {"name": "WikiSearch", "sources": [str(articles)], "index": str(tmp_path / "index")}
    entry = {"name": "QA", "reader": {"kind": "causal", "model": "m"}, "search": search}
    config = parse_config(with_tools(raw, inputs, tmp_path / "in", entry))
    articles.write_text("{}\n")
    before = runner.fingerprints(config)
    articles.write_text("{}\n{}\n")
    assert first_stale(before, runner.fingerprints(config)) == "execute"


def test_changed_schemas_of_a_server_redo_sample_where_masks_follow_them(
    raw: dict[str, Any], inputs: Path, tmp_path: Path
) -> None:
    lock = tmp_path / "lock.json"

    def pin(argument: dict[str, Any], other: str = "string", description: str = "Echoes.") -> None:
        schemas = {"echo": argument, "other": {"type": other}}
        tools = {
            name: {"description": description, "inputSchema": {"properties": {"a": schema}}}
            for name, schema in schemas.items()
        }
        lock.write_text(json.dumps({"odd": {"hash": "0", "tools": tools}}))

    pin({"type": "string"})
    entry = {"name": "MCP", "server": "odd", "command": ["x"], "lock": str(lock), "tools": ["e*"]}
    own = with_tools(raw, inputs, tmp_path / "in", entry)
    config, free = parse_config(own), changed(own, sample__constrain=False)
    before, before_free = runner.fingerprints(config), runner.fingerprints(free)
    pin({"type": "string"}, other="integer", description="Echoes!")
    assert runner.fingerprints(config) == before  # nothing that a mask depends on
    for argument in ({"type": "integer"}, {"type": "string", "enum": []}, {}):
        pin(argument)
        assert first_stale(before, runner.fingerprints(config)) == "sample"
        assert runner.fingerprints(free) == before_free


# -- settings that a later version adds -----------------------------------------------------------


@pytest.mark.parametrize("off", [None, False, [], {}], ids=repr)
def test_an_added_setting_that_is_off_makes_nothing_stale(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch, off: Any
) -> None:
    config = parse_config(raw)
    before, values = runner.fingerprints(config), fingerprints.fingerprint_values

    def added(value: Any) -> dict[str, str]:
        def more(section: Any) -> dict[str, Any]:
            own = values(section)
            return {**own, "added": value} if section is config.score else own

        monkeypatch.setattr(fingerprints, "fingerprint_values", more)
        return runner.fingerprints(config)

    assert added(off) == before
    for value in (True, 0, 0.0, "", "free", [None], {"a": 1}, 1.0):  # 0 and "" are values
        assert first_stale(before, added(value)) == "score", value
    assert added(off) == before  # and back again


def test_another_default_in_the_code_makes_its_stage_stale() -> None:
    """A value is never left out for being the default: two versions differ in what they write."""
    for old, new in ((5, 7), (False, True), (None, 5), (5, None), ("free", "from_context"), (0, 1)):
        assert fingerprints._hash({"k": old, "m": 2}) != fingerprints._hash({"k": new, "m": 2})
    assert fingerprints._hash({"a": {"b": None}}) == fingerprints._hash({"a": {"b": None, "c": {}}})
    assert fingerprints._hash({"a": {"b": None}}) != fingerprints._hash({})  # no section at all
    assert fingerprints._hash([None, 1]) != fingerprints._hash([1])


def test_no_setting_has_two_ways_to_be_off() -> None:
    def ways(hint: Any) -> set[str]:
        if get_origin(hint) in (Annotated, UnionType, Union):
            return {way for argument in get_args(hint) for way in ways(argument)}
        names = {type(None): "None", bool: "False", tuple: "empty", list: "empty"}
        names |= {Mapping: "empty", dict: "empty"}
        return {names[kind] for kind in (get_origin(hint) or hint,) if kind in names}

    seen, waiting = set(), [Config, *sections_in(catalogue.ToolConfig)]
    while waiting:
        section = waiting.pop()
        seen.add(section)
        for name, hint in get_type_hints(section).items():
            assert len(ways(hint)) <= 1, f"{section.__name__}.{name}: {hint}"
            waiting += [s for s in sections_in(hint) if s not in seen]
    assert len(seen) > 20


def test_a_stage_says_what_it_left_and_what_is_stale_now(
    raw: dict[str, Any], finished: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))

    def said(**changes: Any) -> str:
        lines: list[str] = []
        run(changed(raw, **changes), folder, last="select", say=lines.append)
        return "\n".join(lines)

    kept = {
        tool: steps[-1]["count"]
        for tool, steps in json.loads((folder.path / "funnel.json").read_text())["tools"].items()
    }
    counts = ", ".join(f"{tool} {count}" for tool, count in kept.items())
    assert sum(kept.values())
    none = said(select__tau_f=1e6)
    assert "s: nothing kept; the report and `callsieve show` say why" in none
    assert "stale now: augment (`callsieve run` redoes them)" in none
    again = said()
    assert f"s: kept {counts}" in again and "stale now" not in again


# -- refusals -------------------------------------------------------------------------------------


def test_a_folder_of_another_run_is_left_alone(
    raw: dict[str, Any], finished: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"holds the run 'tiny', this configuration is 'other'"):
        run(changed(raw, name="other"), finished)
    assert yaml.safe_load((finished.path / "config.yaml").read_text())["name"] == "tiny"


def test_a_stage_before_its_inputs(raw: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(WorkError, match=r"`ingest` is not done in .*run it first"):
        run(parse_config(raw), RunFolder(tmp_path / "run"), first="score")
    assert not (tmp_path / "run").exists()


def test_two_commands_in_one_folder(raw: dict[str, Any], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with (
        runner._alone(folder, shared=False),
        pytest.raises(WorkError, match="another command is running"),
    ):
        run(parse_config(raw), folder, last="ingest")


def test_a_folder_that_cannot_be_locked_is_not_called_busy(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(runner.fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="No locks available"):
        run(parse_config(raw), RunFolder(tmp_path), last="ingest")


def test_bad_settings_are_refused_before_anything_is_written(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    for changes, part in (
        ({"prompts": str(tmp_path)}, r"for the tool Calculator(.|\n)*for the tool Calendar"),
        ({"model__device": "cuda:x"}, "`model.device` = 'cuda:x'"),
        ({"model__path": str(tmp_path / "nowhere")}, "no such folder"),
        (
            {"evaluate__agents": {"benchmarks": ["hotpot"], "hotpot_file": "nowhere.json"}},
            "`evaluate.agents.hotpot_file` = 'nowhere.json'",
        ),
    ):
        with pytest.raises(ConfigError, match=part):
            run(changed(raw, **changes), RunFolder(tmp_path / "run"))
        assert not (tmp_path / "run").exists()


def test_a_benchmark_that_cannot_be_read_is_refused_before_any_work(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("[]")
    config = changed(raw, evaluate__agents={"benchmarks": ["hotpot"], "hotpot_file": str(empty)})
    with pytest.raises(ConfigError, match=r"empty\.json: .* holds no question"):
        runner.run(config, RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# -- the whole of it ------------------------------------------------------------------------------


@pytest.fixture
def at_the_top(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Relative paths of configurations start at the top of the project; no cache is shared."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CALLSIEVE_CACHE", str(tmp_path / "cache"))
    with contextlib.chdir(ROOT):
        yield


def test_smoke_configuration_runs_every_stage(
    at_the_top: None, model_folder: Path, tmp_path: Path, capfd: Any
) -> None:
    folder = RunFolder(tmp_path / "run")
    command = ["run", "configs/smoke.yaml", "--run-dir", str(folder.path)]
    command += ["--model.path", str(model_folder), "--evaluate.max_new_tokens", "6"]
    assert cli.main(command) == 0
    assert all(folder.parts(stage) for stage in SHARD_FOLDERS)
    for stage in ("augment", "finetune", "evaluate"):
        assert read_json(folder.stage_marker(stage))["fingerprint"]
    kept = counts(folder, "select")
    assert all(kept[tool].get("kept", 0) > 0 for tool in ("Calculator", "WikiSearch"))
    assert read_json(folder.path / "funnel.json")
    assert "<html" in (folder.path / "report.html").read_text(encoding="utf-8")
    # the tuned model is an ordinary checkpoint
    model = AutoModelForCausalLM.from_pretrained(folder.stage("finetune"))
    tokenizer = AutoTokenizer.from_pretrained(folder.stage("finetune"))
    ids = tokenizer("The total is", return_tensors="pt")["input_ids"]
    assert (
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1]
        > ids.shape[1]
    )
    results = read_json(folder.stage("evaluate") / "results.json")
    assert list(results["arms"]) == ["base", "control", "tuned_disabled", "tuned"]
    capfd.readouterr()
    assert cli.main(command) == 0
    assert "everything is done" in capfd.readouterr().err


def test_the_tiny_model_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    texts = [*tiny.TEXTS, *tiny.PROMPTS.values()] * 3
    folder = make_tiny_model(tmp_path / "tiny", texts, steps=25)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.bos_token == "<s>" and tokenizer.eos_token == "</s>"
    assert len(tokenizer(" [", add_special_tokens=False)["input_ids"]) == 1
    assert model.config.hidden_size == 64 and model.config.num_hidden_layers == 2
    ids = tokenizer(tiny.TEXTS[0], return_tensors="pt")["input_ids"]
    assert float(model(ids, labels=ids).loss.detach()) < 5.0  # of ln(1000) = 6.9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


# -- exit codes -----------------------------------------------------------------------------------


def test_exit_codes(
    raw: dict[str, Any], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 done, 1 the work failed, 2 wrong settings, 130 interrupted; messages go to stderr."""
    path, run_dir = tmp_path / "c.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(raw))

    def command(*more: str) -> tuple[int, str]:
        code = cli.main(["run", str(path), "--run-dir", str(run_dir), *more])
        out, err = capfd.readouterr()
        assert "Traceback" not in err and (code == 0 or not out)
        return code, err

    code, err = command("--sample.kk", "3")
    assert code == 2 and "unknown key `sample.kk`" in err
    code, err = command("--sample.k=zero")
    assert code == 2 and "`sample.k` = 'zero'" in err
    code, err = command("--from", "select", "--until", "sample")
    assert code == 2 and "--from select comes after --until sample" in err
    code, err = command("--from", "score")
    assert code == 1 and "`ingest` is not done" in err
    code, err = command("--until", "augment", "--select.tau_f", "99")
    assert code == 1 and "0 kept because" in err and "nearest misses" in err
    assert RunFolder(run_dir).parts("select")  # what is finished is kept
    code, err = command("--until", "augment")
    assert code == 0 and "changed: select.tau_f: 99" in err

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.augment, "run", interrupted)
    code, err = command("--until", "augment", "--augment.validation_share", "0.3")
    assert code == 130 and "the same command continues" in err
