"""The stages in their order, and how they run over shards.

A stage is done for a shard when the shard's marker carries the fingerprint that the configuration
asks for. The fingerprint of a stage covers its own settings, its inputs and the fingerprint of the
stage before it, so a changed value makes exactly the stages that depend on it stale.

Stages with a model are imported when they run: the others, and the commands that only look at a
run, do without its libraries.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from pipeline.agent.templates import chat_instead, check_template
from pipeline.config import AgentLoop, Config, Model, parse_config, to_dict
from pipeline.context import Context, closing_resources
from pipeline.errors import ConfigError, WorkError
from pipeline.evaluation.agent_settings import check_agents
from pipeline.fingerprints import fingerprints
from pipeline.lm.prompts import load_prompt
from pipeline.manifest import has_settings, working_folder, write_settings
from pipeline.progress import line_written
from pipeline.records import (
    Candidate,
    Document,
    ExecutedCall,
    ScoredCall,
    SelectedCall,
    from_table,
    to_table,
)
from pipeline.report.funnel import build_funnel
from pipeline.report.page import write_report
from pipeline.shards import SHARD_FOLDERS, RunFolder, read_json, write_json
from pipeline.stages import augment, execute, ingest, select
from pipeline.tools.catalogue import parse_tool_config, pin_servers

log = logging.getLogger(__name__)
Shards = tuple[int, int]
"""(i, n): this process does the shards whose number is i modulo n."""


@dataclass(frozen=True)
class Plan:
    """What a command is going to do: the stages in order, and which are stale."""

    todo: tuple[str, ...]
    stale: tuple[str, ...]
    changed: tuple[str, ...]


# -- one shard of each stage ---------------------------------------------------------------------


def _documents(context: Context, index: int) -> list[Document]:
    return from_table(context.folder.read_part("ingest", index, context.config.shards), Document)


def _read(context: Context, stage: str, index: int, record: type) -> list[Any]:
    return from_table(context.folder.read_part(stage, index, context.config.shards), record)


def _ingest(context: Context, shards: Shards) -> None:
    ingest.run(context)


def _sample(context: Context, shards: Shards) -> None:
    from pipeline.stages import sample

    def one(index: int) -> Iterator[Candidate]:
        return sample.run(_documents(context, index), context)

    _each_shard(context, shards, Candidate, one)


def _execute(context: Context, shards: Shards) -> None:
    def one(index: int) -> Iterator[ExecutedCall]:
        candidates = _read(context, "sample", index, Candidate)
        return execute.run(candidates, _documents(context, index), context)

    _each_shard(context, shards, ExecutedCall, one)


def _score(context: Context, shards: Shards) -> None:
    from pipeline.stages import score

    pool = score.result_pool(context) if context.config.score.null_share else {}

    def one(index: int) -> Iterator[ScoredCall]:
        calls = _read(context, "execute", index, ExecutedCall)
        return score.run(calls, _documents(context, index), pool, context)

    _each_shard(context, shards, ScoredCall, one)


def _select(context: Context, shards: Shards) -> None:
    found = select.thresholds(context)
    everything = (
        (_read(context, "score", index, ScoredCall), _documents(context, index))
        for index in range(context.config.shards)
    )
    reasons = select.decide(everything, found, context)

    def one(index: int) -> Iterator[SelectedCall]:
        return select.run(_read(context, "score", index, ScoredCall), reasons, context)

    extra = {
        "tau_f": {tool: own.tau_f for tool, own in found.items()},
        "false_keep_rate": {tool: own.false_keep_rate for tool, own in found.items()},
    }
    _each_shard(context, (0, 1), SelectedCall, one, extra)


def _augment(context: Context, shards: Shards) -> None:
    augment.run(context)


def _finetune(context: Context, shards: Shards) -> None:
    from pipeline.stages import finetune

    context.resources.pop("lm", None)  # training loads its own copy
    finetune.run(context)


def _evaluate(context: Context, shards: Shards) -> None:
    from pipeline.stages import evaluate

    evaluate.run(context)


STAGES: tuple[tuple[str, Callable[[Context, Shards], None]], ...] = (
    ("ingest", _ingest),  # corpus -> documents
    ("sample", _sample),  # documents -> candidate calls
    ("execute", _execute),  # candidates -> results of real tools
    ("score", _score),  # results -> three losses and the gain
    ("select", _select),  # gains -> kept calls
    ("augment", _augment),  # kept calls -> data set
    ("finetune", _finetune),  # data set -> tuned model and its control
    ("evaluate", _evaluate),  # models -> the four arms
)
STAGE_NAMES = tuple(name for name, _ in STAGES)
_ON_DEVICE = ("sample", "score", "finetune", "evaluate")


def _each_shard(
    context: Context,
    shards: Shards,
    record: type,
    one: Callable[[int], Iterator[Any]],
    extra: dict[str, Any] | None = None,
) -> None:
    """Do the unfinished shards that belong to this process, each with its marker."""
    config, folder, stage = context.config, context.folder, context.stage
    for index in range(config.shards):
        if index % shards[1] != shards[0]:
            continue
        if folder.done(stage, index, config.shards, context.fingerprint):
            continue
        began = time.monotonic()
        context.take_counts()
        context.part = f" {index + 1}/{config.shards}" if config.shards > 1 else ""
        table = to_table(one(index), record)
        marker = {
            "fingerprint": context.fingerprint,
            "seconds": round(time.monotonic() - began, 3),
            "counts": context.take_counts(),
            **(extra or {}),
        }
        folder.write_part(stage, index, config.shards, table, marker)
        folder.log("shard", stage=stage, shard=index, rows=table.num_rows, **_brief(marker))
    context.part = ""


def _brief(marker: dict[str, Any]) -> dict[str, Any]:
    return {"seconds": marker["seconds"]}


# -- a run ---------------------------------------------------------------------------------------


def check(config: Config) -> None:
    """Refuse settings that would only fail later: tools, prompts."""
    tools = [parse_tool_config(tool, f"tools.{n}") for n, tool in enumerate(config.tools)]
    if config.sample.constrain:
        pin_servers(tools)  # the masks follow the pinned definitions
    wrong = []
    for name in config.tool_names:
        try:
            load_prompt(config.prompts, name, config.call_format.syntax)
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))


def plan(config: Config, folder: RunFolder, first: str | None, last: str | None) -> Plan:
    """Work out what there is to do between two stages; raises ConfigError for a wrong folder."""
    before = saved_config(folder)
    if before is not None and before.name != config.name:
        raise ConfigError(
            f"{folder.path}: holds the run {before.name!r}, this configuration is "
            f"{config.name!r}; give another --run-dir (nothing was changed)"
        )
    wanted = fingerprints(config)
    start = STAGE_NAMES.index(first) if first else 0
    end = STAGE_NAMES.index(last) + 1 if last else len(STAGE_NAMES)
    todo, stale = [], []
    for name in STAGE_NAMES[:end]:
        if config.augment.traces is not None and name in SHARD_FOLDERS:
            continue  # the data set comes from runs of the agent loop
        complete, outdated = _state(config, folder, name, wanted[name])
        if outdated:
            stale.append(name)
        if complete:
            continue
        if STAGE_NAMES.index(name) < start:
            raise WorkError(
                f"`{name}` is not done in {folder.path} for this configuration; "
                f"run it first (callsieve run CONFIG --run-dir {folder.path})"
            )
        todo.append(name)
    changed = _changes(before, config) if before is not None else []
    return Plan(tuple(todo), tuple(stale), tuple(changed))


def _state(config: Config, folder: RunFolder, stage: str, wanted: str) -> tuple[bool, bool]:
    """(all of it is done, some of it belongs to other settings)."""
    if stage not in SHARD_FOLDERS:
        marker = read_json(folder.stage_marker(stage))
        done = marker is not None and marker.get("fingerprint") == wanted
        return done, marker is not None and not done
    markers = [folder.read_marker(stage, *part) for part in folder.parts(stage)]
    outdated = any(marker and marker.get("fingerprint") != wanted for marker in markers)
    done = all(folder.done(stage, i, config.shards, wanted) for i in range(config.shards))
    return done and not outdated, outdated


def saved_config(folder: RunFolder) -> Config | None:
    """The configuration that a run folder was last used with."""
    path = folder.path / "config.yaml"
    if not path.is_file():
        return None
    try:
        return parse_config(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    except (yaml.YAMLError, ConfigError):
        log.warning("%s: written by another version; everything is checked again", path)
        return None


def wanted_fingerprints(folder: RunFolder) -> dict[str, str]:
    """The fingerprints that a run's own settings ask for, wherever the question is asked from.

    Their relative paths start where the run was last worked on. Raises ConfigError or OSError where
    the fingerprints cannot be told, because a file or the model is not there.
    """
    config = saved_config(folder)
    if config is None:
        raise ConfigError(f"{folder.path / 'config.yaml'}: written by another version")
    with contextlib.chdir(working_folder(folder)):
        return fingerprints(config)


def _changes(before: Config, now: Config) -> list[str]:
    """`section.key: old -> new` for every value that differs."""

    def flat(value: Any, prefix: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return {
                k: v
                for key, item in value.items()
                for k, v in flat(item, f"{prefix}.{key}" if prefix else str(key)).items()
            }
        return {prefix: value}

    old, new = flat(to_dict(before), ""), flat(to_dict(now), "")
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def run(
    config: Config,
    folder: RunFolder,
    *,
    first: str | None = None,
    last: str | None = None,
    shards: Shards = (0, 1),
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Plan:
    """Run the stages that are not done yet; says first what a changed configuration makes stale.

    Where everything is done nothing has to be written: a finished run can lie in a read-only place.
    """
    check(config)
    if config.evaluate.agents is not None:
        check_agents(config.evaluate.agents)
    todo = plan(config, folder, first, last)
    if "evaluate" in todo.todo and config.evaluate.agents is not None:
        _check_loop(config.model, config.evaluate.agents)
    device = _device(config, todo)
    _announce(todo, folder, say)
    if todo.todo:
        folder.path.mkdir(parents=True, exist_ok=True)
        with _alone(folder, shared=shards[1] > 1):
            write_settings(config, folder, device)
            _do(todo, config, folder, shards, say)
    elif not has_settings(config, folder):
        try:
            with _alone(folder, shared=shards[1] > 1):
                write_settings(config, folder, device)
        except OSError as error:
            say(f"{folder.path}: config.yaml and manifest.json are left as they were: {error}")
    if last is not None and (later := plan(config, folder, None, None).stale):
        say(f"stale now: {', '.join(later)} (`callsieve run` redoes them)")
    return todo


def _check_loop(model: Model, agents: AgentLoop) -> None:
    """Refuse, before hours of work, files and a tokenizer that the agent loop could not use."""
    from pipeline.evaluation.agent_arms import benchmark_named

    for name in agents.benchmarks:
        benchmark_named(name, agents, [])
    instead = chat_instead(agents)
    if instead is not None:
        check_template(model, instead)


def _do(
    todo: Plan, config: Config, folder: RunFolder, shards: Shards, say: Callable[[str], None]
) -> None:
    """Do the stages of a plan, one after the other, and write the report."""
    wanted = fingerprints(config)
    context = Context(config, folder, "", "")
    with closing_resources(context):
        for name, work in STAGES:
            if name not in todo.todo:
                continue
            if shards[1] > 1 and name not in ("sample", "execute", "score"):
                say(f"{name}: not a stage for --shards; run it once, without the option")
                break
            _begin(context, name, wanted[name], fresh=shards[1] == 1)
            if shards[1] > 1 and name == "score":
                _need_all(context, "execute", wanted["execute"])
            began = time.monotonic()
            say(f"{name} ...")
            line_written()
            work(context, shards)
            seconds = time.monotonic() - began
            funnel = build_funnel(folder)
            write_json(folder.path / "funnel.json", funnel)
            folder.log("stage", stage=name, seconds=round(seconds, 3))
            say(f"{name} done in {seconds:.1f} s{_outcome(name, funnel)}")
        if shards[1] == 1:
            write_report(folder)


def _outcome(stage: str, funnel: dict[str, Any]) -> str:
    """What a stage left: documents, or calls per tool."""
    if stage in ("ingest", "augment"):
        found = funnel["corpus" if stage == "ingest" else "dataset"].get("documents", 0)
        return f": {found:,} document{'' if found == 1 else 's'}"
    step = {"sample": "candidates", "execute": "executed", "score": "scored", "select": "kept"}
    left = {
        tool: own["count"]
        for tool, steps in funnel["tools"].items()
        for own in steps
        if own["step"] == step.get(stage)
    }
    if not left:
        return ""
    if not any(left.values()):
        return f": nothing {step[stage]}; the report and `callsieve show` say why"
    return f": {step[stage]} " + ", ".join(f"{tool} {count}" for tool, count in left.items())


def _announce(todo: Plan, folder: RunFolder, say: Callable[[str], None]) -> None:
    if todo.stale:
        for change in todo.changed:
            say(f"changed: {change}")
        if not todo.changed:
            say("changed: a source file, a prompt, a tool, the model, or Callsieve's own settings")
        say(f"stale, will be redone: {', '.join(todo.stale)}")
    if not todo.todo:
        say(f"{folder.path}: everything is done")


def _begin(context: Context, stage: str, fingerprint: str, fresh: bool) -> None:
    """Point the context at a stage and clear what other settings left of it."""
    context.stage, context.fingerprint = stage, fingerprint
    context.take_counts()
    config, folder = context.config, context.folder
    complete, outdated = _state(config, folder, stage, fingerprint)
    if outdated and not complete and fresh:
        folder.clear(stage)
    if fresh:  # nobody else writes here: what a killed process was writing is waste
        for place in (folder.path, folder.stage(stage)):
            for leftover in place.glob("*.tmp"):
                if leftover.is_file():
                    leftover.unlink()


def _need_all(context: Context, stage: str, fingerprint: str) -> None:
    config, folder = context.config, context.folder
    missing = [
        i for i in range(config.shards) if not folder.done(stage, i, config.shards, fingerprint)
    ]
    if missing:
        raise WorkError(
            f"`{stage}` still lacks shards {missing}: `score` draws its null results from all of "
            "them; run this command again when the others are done"
        )


@contextlib.contextmanager
def _alone(folder: RunFolder, shared: bool) -> Iterator[None]:
    """One whole run at a time in a folder (shard processes share it among themselves)."""
    with (folder.path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WorkError(f"{folder.path}: another command is running in this folder") from None
        yield


def _device(config: Config, todo: Plan) -> str | None:
    """The device that the work needs; None where there is none for it.

    Raises ConfigError when it does not answer.
    """
    if not set(_ON_DEVICE).intersection(todo.todo):
        return None
    import torch

    from pipeline.lm.checkpoint import pick_device

    device = pick_device(config.model.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return f"{device} {name}".strip()
