"""Fingerprints of the stages: what a stage has made is stale when its fingerprint has changed.

Of files they cover what they hold, not their folders and times: a copied or checked-out file is the
same file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import AgentLoop, Config, fingerprint_values
from pipeline.errors import ConfigError
from pipeline.lm.files import model_fingerprint
from pipeline.lm.prompts import prompt_file
from pipeline.paths import cache_folder, find_all
from pipeline.shards import STAGE_FOLDERS, read_json, write_json
from pipeline.stages.reading import files_of
from pipeline.tools.articles import source_files
from pipeline.tools.catalogue import mask_inputs, parse_tool_config

_LARGE_BYTES = 64 * 2**20  # from here on a hash is remembered between commands


def fingerprints(config: Config) -> dict[str, str]:
    """The fingerprint of every stage under this configuration.

    It covers the values that can change what the stage writes (not those of speed, nor those that
    are off: `_without_off`), the files and the model that it reads, and the stage before. Raises
    ConfigError for a file that is not there.
    """
    parsed = [parse_tool_config(tool) for tool in config.tools]
    tools = [dataclasses.asdict(tool) for tool in parsed]
    functions = [str(tool.get("function", "")).partition(":")[0] or None for tool in tools]
    syntax = fingerprint_values(config.call_format)
    prompts = [
        prompt_file(config.prompts, tool).read_text(encoding="utf-8", errors="replace")
        for tool in config.tool_names
    ]
    model = [model_fingerprint(config.model), config.model.dtype]
    sources = [
        _contents(files_of(source)) for source in config.corpus.sources if source.path is not None
    ]
    corpus = fingerprint_values(config.corpus)
    licence = corpus.pop("licence")
    traces = _matching("augment.traces", [config.augment.traces])
    questions = _matching("evaluate.questions", config.evaluate.questions)
    if (agents := config.evaluate.agents) is not None:
        files = (agents.hotpot_file, agents.fever_file, agents.bfcl_file, agents.bfcl_answers)
        questions += _matching("evaluate.agents", files) + _contents(_instructions(agents))
    own: dict[str, list[Any]] = {
        "ingest": [corpus, sources, config.shards, config.seed, syntax, config.tool_names],
        "sample": [fingerprint_values(config.sample), model, prompts, config.gain_floor],
        "execute": [tools, _searched(tools), _matching("tools", functions)],
        "score": [fingerprint_values(config.score)],
        "select": [fingerprint_values(config.select)],
        "augment": [fingerprint_values(config.augment), licence, traces],
        "finetune": [fingerprint_values(config.finetune)],
        "evaluate": [fingerprint_values(config.evaluate), questions],
    }
    # the plain losses of `sample` use the weights of `score`
    own["sample"] += [config.score.horizon, config.score.tail]
    if config.sample.constrain:
        own["sample"].append(mask_inputs(parsed))
    found: dict[str, str] = {}
    before = ""
    for name in STAGE_FOLDERS:
        before = found[name] = _hash(name, before, own[name])
    return found


def _hash(*values: Any) -> str:
    text = json.dumps(_without_off(values), sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_off(value: Any) -> Any:
    """Values as JSON, without the settings that are off: None, False, or an empty list or mapping.

    So a setting that a later version adds switched off leaves every fingerprint as it was. Values
    are not compared with their defaults: another default in the code is another value, and what
    depends on it is stale. (No setting may have two ways to be off; the tests look at the types.)
    """
    if isinstance(value, Mapping):
        return {key: _without_off(item) for key, item in value.items() if not _is_off(item)}
    if isinstance(value, list | tuple):
        return [_without_off(item) for item in value]
    return value


def _is_off(value: Any) -> bool:
    empty = isinstance(value, Mapping | list | tuple) and not value
    return value is None or value is False or empty


# -- files ---------------------------------------------------------------------------------------


def _contents(files: Iterable[Path]) -> list[tuple[str, str]]:
    """Names and contents of files, to notice that a source has changed."""
    return [(path.name, content_hash(path)) for path in files]


def _matching(key: str, patterns: Sequence[str | None]) -> list[tuple[str, str]]:
    """Names and contents of the files that a setting names; None names none."""
    found: list[Path] = []
    for pattern in patterns:
        files = [path for path in find_all(pattern) if path.is_file()] if pattern else []
        if pattern and not files:
            raise ConfigError(f"`{key}`: {pattern!r} matches no file in {Path.cwd()}")
        found += files
    return _contents(found)


def _instructions(agents: AgentLoop) -> list[Path]:
    """The instruction files that the arms in the agent loop read."""
    from pipeline.agent.instructions import instruction_file
    from pipeline.agent.strategies import instruction_names

    within = agents.protocol == "react"  # the tuned arm's calls within a thought
    names = {"bfcl-chat-v1"} if "bfcl" in agents.benchmarks else set()
    try:
        for benchmark in agents.benchmarks:
            if benchmark != "bfcl":
                for strategy in agents.strategies:
                    names |= instruction_names(strategy, agents.protocol, benchmark, within)
    except ConfigError as error:
        raise ConfigError(f"`evaluate.agents.strategies`: {error}") from None
    return [instruction_file(name) for name in sorted(names)]


def _searched(tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names and contents of the files that the search tools search; QA has one inside."""
    searches = [*tools, *(tool["search"] for tool in tools if "search" in tool)]
    try:
        found = [source_files(own["sources"]) for own in searches if "sources" in own]
    except ConfigError as error:
        raise ConfigError(f"`tools`: sources: {error}") from None
    return _contents(itertools.chain.from_iterable(found))


def content_hash(path: Path) -> str:
    """The hash of a file's bytes; a file of unchanged size and time is read once."""
    status = path.stat()
    return _content_hash(path.resolve(), status.st_size, status.st_mtime_ns)


@functools.cache
def _content_hash(path: Path, size: int, time_ns: int) -> str:
    if size < _LARGE_BYTES:
        return _read(path)
    memory = cache_folder() / "digests.json"
    known = read_json(memory) or {}
    *before, remembered = known.get(str(path), [None])
    if before == [size, time_ns]:
        return str(remembered)
    found = _read(path)
    with contextlib.suppress(OSError):  # it would only have saved time
        write_json(memory, {**known, str(path): [size, time_ns, found]})
    return found


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
