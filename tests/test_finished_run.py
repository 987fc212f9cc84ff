"""A finished run: looking at it loads no model library, and it can lie in a read-only place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from pipeline import runner
from pipeline.config import parse_config
from pipeline.lm.checkpoint import save_checkpoint
from pipeline.shards import RunFolder, read_json

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run up to the data set; `c.yaml` in it is its configuration."""
    folder = tmp_path_factory.mktemp("finished")
    lm = tiny.taught_lm("llama", "bytes")
    save_checkpoint(lm.model, lm.tokenizer, folder / "model", {})
    raw = tiny.raw_config(inputs, model={"path": str(folder / "model"), "device": "cpu"})
    (folder / "c.yaml").write_text(yaml.safe_dump(raw))
    runner.run(parse_config(raw), RunFolder(folder), last="augment", say=lambda text: None)
    return folder


def python(program: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


# -- quick ----------------------------------------------------------------------------------------

LOADED = """
import io, json, sys
from pipeline.cli import main
heavy = ("torch", "transformers", "datasets")
sys.stdin = io.StringIO("Final Answer: 3")
codes = []
for command in json.loads(sys.argv[1]):
    code = main(command)
    codes.append((" ".join(command), code, [name for name in heavy if name in sys.modules]))
print(json.dumps(codes), file=sys.stderr)
"""


def test_commands_without_a_model_load_no_library_of_models(run: Path) -> None:
    configured = [str(run / "c.yaml"), "--run-dir", str(run)]
    commands = [
        ["status", str(run)],
        ["show", str(run), "-n", "1"],
        ["diff", str(run), str(run)],
        ["export", str(run), "--format", "jsonl"],
        ["report", str(run)],
        ["tools", "list"],
        ["tools", "call", "Calculator", "400 / 1400"],
        ["agent", "parse", "--protocol", "react"],
        ["execute", *configured],
        ["select", *configured, "--select.tau_f", "0.01"],
        ["select", *configured],
        ["augment", *configured],
        ["run", *configured, "--until", "augment"],
    ]
    done = python(LOADED, json.dumps(commands))
    found = json.loads(done.stderr.splitlines()[-1])
    assert [(name, code, heavy) for name, code, heavy in found if code or heavy] == []


def test_a_device_is_asked_for_only_where_work_needs_one(run: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((run / "c.yaml").read_text())
    config["model"]["device"] = "cuda:x"
    device = read_json(run / "manifest.json")["device"]
    assert device.startswith("cpu")
    runner.run(parse_config({**config, "select": {"tau_f": 0.01}}), RunFolder(run), last="select")
    assert read_json(run / "manifest.json")["device"] == device
    with pytest.raises(ValueError, match=r"`model.device` = 'cuda:x'"):
        runner.run(parse_config({**config, "seed": 1}), RunFolder(run), last="sample")


# -- read-only ------------------------------------------------------------------------------------

READ_ONLY = """
import os, sys
from pipeline.cli import main

folder, code = os.path.realpath(sys.argv[1]), int(sys.argv[2])

def refuse(event, args):
    writes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
    if event == "open":
        writes = isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writes and os.path.realpath(str(args[0])).startswith(folder + os.sep):
        raise OSError(code, os.strerror(code), args[0])

sys.addaudithook(refuse)
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize(("code", "words"), [(13, "Permission denied"), (30, "Read-only file")])
def test_a_finished_run_in_a_read_only_folder_is_shown(code: int, words: str, run: Path) -> None:
    config = str(run / "c.yaml")
    command = ["run", config, "--run-dir", str(run), "--until", "augment"]
    assert python(READ_ONLY, "/nowhere", "1", *command).returncode == 0  # writes what is stale

    done = python(READ_ONLY, str(run), str(code), *command)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"{run}: everything is done\n"
    assert "kept" in done.stdout and f"report: {run}/report.html" in done.stdout

    other = python(READ_ONLY, str(run), str(code), *command, "--execute.workers", "2")
    assert other.returncode == 0, other.stderr
    assert "config.yaml and manifest.json are left as they were" in other.stderr
    assert words in other.stderr and other.stdout == done.stdout

    changed = python(READ_ONLY, str(run), str(code), *command, "--select.tau_f", "0.02")
    assert changed.returncode == 1 and words in changed.stderr
    assert "Traceback" not in changed.stderr and not changed.stdout


def test_settings_that_no_stage_depends_on_are_noted_in_a_finished_run(run: Path) -> None:
    raw: dict[str, Any] = yaml.safe_load((run / "c.yaml").read_text())
    runner.run(parse_config(raw), RunFolder(run), last="augment")
    before = (run / "config.yaml").stat().st_mtime_ns
    runner.run(parse_config(raw), RunFolder(run), last="augment")
    assert (run / "config.yaml").stat().st_mtime_ns == before
    runner.run(parse_config({**raw, "execute": {"workers": 2}}), RunFolder(run), last="augment")
    assert "workers: 2" in (run / "config.yaml").read_text()
