"""The configuration: frozen dataclasses read strictly from YAML.

An unknown key, a wrong type or an impossible value is refused with its path and what is allowed.
Fields marked `SPEED` change how fast a stage runs and never its output, so they are left out of
the fingerprints that decide what is stale.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Gt, Interval, Le, MinLen
from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline.calls import CallSyntax, EmptyResult, Rendering
from pipeline.errors import ConfigError
from pipeline.paths import find
from pipeline.refusals import Example, refusals, shown

SPEED = {"speed_only": True}
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Positive = Annotated[int, Gt(0)]
Count = Annotated[int, Ge(0)]
Share = Annotated[float, Interval(ge=0.0, le=1.0)]
Number = Annotated[float, Ge(0.0)]
ToolEntry = Annotated[Mapping[str, Any], Example("{name: Calculator}")]


@dataclass(frozen=True)
class Source:
    """Where documents come from: files (a glob) or a Hugging Face data set (id or folder)."""

    __pydantic_config__ = STRICT

    path: str | None = None  # file or glob: .txt .jsonl .csv .parquet (also .gz for text and JSONL)
    dataset: str | None = None  # data set id on a hub, or the folder of one
    split: str = "train"
    text_field: str = "text"
    date_field: str | None = "date"  # another name than this one has to be there
    url_field: str | None = "url"
    limit: Positive | None = None  # read only so many records of this source
    name: str | None = None  # how the source is called in `documents.source`; default: the file


@dataclass(frozen=True)
class Corpus:
    """What is read and how it is cut."""

    __pydantic_config__ = STRICT

    sources: Annotated[tuple[Annotated[Source, Example("{path: texts/*.jsonl}")], ...], MinLen(1)]
    max_words: Positive = 200  # longer documents are split at sentence ends
    min_words: Positive = 8  # shorter pieces are rejected (reason `too_short`)
    max_bytes: Positive = 10_000_000  # a single record over this is rejected (reason `too_long`)
    limit: Positive | None = None  # stop after so many documents
    licence: str = "unknown"  # named on the data set card


@dataclass(frozen=True)
class Model:
    """The language model: a folder, a GGUF file (or its folder + `gguf_file`), or a hub id."""

    __pydantic_config__ = STRICT

    path: str
    gguf_file: str | None = None
    # Measured on 136 calls with SmolLM2-135M: bfloat16 scores twice as fast on a CPU with bf16
    # instructions, moves a gain by 0.026 nats on average (0.106 at most), and flips 2 decisions at
    # tau_f 0.3, both within 0.03 of it. It also lets the batch size change sampled calls.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"  # auto = cuda when there is one, else cpu


@dataclass(frozen=True)
class CallFormat:
    """How a call is written; recorded with every artefact."""

    __pydantic_config__ = STRICT

    rendering: Rendering = "text"
    empty_result: EmptyResult = "arrow"

    @property
    def syntax(self) -> CallSyntax:
        return CallSyntax(self.rendering, self.empty_result)


@dataclass(frozen=True)
class SampleOverride:
    """Values of `sample` for one tool."""

    __pydantic_config__ = STRICT

    tau_s: Share | None = None
    k: Positive | None = None
    m: Positive | None = None


@dataclass(frozen=True)
class Sample:
    """Sampling of candidate calls (method, section 2); the paper's symbols."""

    __pydantic_config__ = STRICT

    tau_s: Share = 0.05  # a position is a candidate when p(<API>) is above this
    k: Positive = 5  # at most this many positions per document and tool
    m: Positive = 5  # samples per position
    temperature: Annotated[float, Gt(0.0)] = 1.0
    max_new_tokens: Positive = 32  # a call that has not closed by then is dropped
    constrain: bool = False  # mask tokens that cannot lead to a well-formed call
    numbers: Literal["free", "from_context"] = "free"  # Calculator: only numbers written before i
    words: Literal["free", "from_context"] = "free"  # text arguments: only words written before i
    lookahead_prompt: Literal["full", "hidden"] = "full"  # hidden: arguments see no text after i
    per_tool: Mapping[str, SampleOverride] = field(default_factory=dict)
    max_rows: Positive = field(default=128, metadata=SPEED)  # rows that decode together
    token_budget: Positive = field(default=4096, metadata=SPEED)  # tokens per prefill batch

    def of(self, tool: str) -> tuple[float, int, int]:
        """Return (tau_s, k, m) of one tool."""
        own = self.per_tool.get(tool, SampleOverride())
        return (
            self.tau_s if own.tau_s is None else own.tau_s,
            self.k if own.k is None else own.k,
            self.m if own.m is None else own.m,
        )


@dataclass(frozen=True)
class Execute:
    """Running the tools."""

    __pydantic_config__ = STRICT

    workers: Positive = field(default=2, metadata=SPEED)
    cache: bool = field(default=True, metadata=SPEED)  # keep results between runs, per run folder


@dataclass(frozen=True)
class Score:
    """The weighted losses (method, section 4)."""

    __pydantic_config__ = STRICT

    # Between the prepended call z and the text. Measured on SmolLM2-135M (36 true and 60 wrong
    # calculator calls): how well the gain tells them apart (AUC), mean gain of the true ones:
    # "\n" .9991, 0.85; "" .9986, 0.86; "\n\n" .9981, 0.82; " " .9977, 0.83.
    separator: str = "\n"
    horizon: Positive = 5  # n of w~_t = max(0, 1 - t/n)
    tail: Literal["fixed", "renormalise"] = "fixed"
    null_share: Share = 1.0  # share of the calls also scored with another call's result
    token_budget: Positive = field(default=4096, metadata=SPEED)


@dataclass(frozen=True)
class FalseKeepRate:
    """Ask for a rate of calls kept by chance instead of a threshold."""

    __pydantic_config__ = STRICT

    false_keep_rate: Annotated[float, Interval(gt=0.0, lt=1.0)]


TauF = Number | FalseKeepRate


@dataclass(frozen=True)
class Select:
    """Which calls are kept (method, sections 4 and 5)."""

    __pydantic_config__ = STRICT

    tau_f: TauF = 0.3
    per_tool: Mapping[str, TauF] = field(default_factory=dict)  # tau_f of single tools
    lookahead: Literal["reject", "allow"] = "reject"
    max_calls_per_document: Positive | None = None
    max_calls_per_tool: Positive = 25_000

    def tau_of(self, tool: str) -> float | FalseKeepRate:
        return self.per_tool.get(tool, self.tau_f)


@dataclass(frozen=True)
class Augment:
    """Building the data set."""

    __pydantic_config__ = STRICT

    validation_share: Annotated[float, Interval(ge=0.0, lt=1.0)] = 0.1
    traces: str | None = None  # train on the right runs of this traces file instead of on calls


@dataclass(frozen=True)
class Finetune:
    """Plain language-model training on the augmented texts (method, section 6)."""

    __pydantic_config__ = STRICT

    learning_rate: Annotated[float, Gt(0.0)] = 1e-5
    batch_size: Positive = 128  # sequences per optimiser step, over all devices
    max_steps: Positive = 2_000
    epochs: Annotated[float, Gt(0.0)] | None = None  # stop earlier, after so many passes
    warmup_share: Share = 0.1
    weight_decay: Number = 0.0
    max_length: Positive = 1_024
    eval_every: Positive = 500
    mask_results: bool = False  # no loss on the tokens of results
    call_weight: Annotated[float, Gt(0.0)] = 1.0  # weight of the loss on call tokens
    gradient_checkpointing: bool = field(default=False, metadata=SPEED)
    tokens_per_micro_batch: Positive = field(default=4_096, metadata=SPEED)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


AgentBenchmark = Literal["arithmetic", "hotpot", "fever", "library", "stock", "grid", "bfcl"]


@dataclass(frozen=True)
class AgentLoop:
    """The arms in the agent loop: strategies x benchmarks (`callsieve agent evaluate`: a model)."""

    __pydantic_config__ = STRICT

    strategies: Annotated[tuple[str, ...], MinLen(1)] = ("standard", "react")
    benchmarks: tuple[AgentBenchmark, ...] = ("arithmetic",)
    limit: Positive = 20  # questions per benchmark
    protocol: Literal["react", "chat"] = "react"  # how a strategy writes its calls, if it has any
    hotpot_file: str | None = None  # a HotpotQA distractor file; also the pages for fever
    fever_file: str | None = None
    bfcl_file: str | None = None  # rows of the leaderboard, one turn each: no strategy, in chat
    bfcl_answers: str | None = None  # their answers; irrelevance has none
    bfcl_category: Literal["simple", "multiple", "parallel", "irrelevance"] | None = None
    bfcl_numbers: Literal["typed", "value"] = "typed"  # value: 5.0 may stand for the integer 5
    constrain: bool = False  # mask tokens that cannot lead to a well-formed action
    tool_choice: Literal["auto", "required"] = "auto"  # required: the first turn has to call a tool


@dataclass(frozen=True)
class Evaluate:
    """Generation with live calls for the four arms (method, section 7)."""

    __pydantic_config__ = STRICT

    questions: tuple[str, ...] = ()  # JSONL files or globs
    limit: Positive | None = None  # questions per kind
    call_k: Positive = 10  # the opening token fires when it is among the k most likely
    max_calls: Count = 1  # calls per input
    constrain: bool = False  # mask tokens that cannot lead to a well-formed call
    max_new_tokens: Positive = 48
    held_out_documents: Count = 100  # for perplexity
    agents: AgentLoop | None = None  # also compare the arms in the agent loop
    max_rows: Positive = field(default=64, metadata=SPEED)


@dataclass(frozen=True)
class Config:
    """One run, every value."""

    __pydantic_config__ = STRICT

    name: Annotated[str, MinLen(1)]
    corpus: Corpus
    model: Annotated[Model, Example("{path: tiny}")]
    tools: Annotated[tuple[ToolEntry, ...], MinLen(1)]
    seed: Annotated[int, Ge(0), Le(2**31 - 1)] = 0
    shards: Positive = 4  # shard files per stage
    prompts: str = "data/prompts"  # folder with one prompt file per tool
    gain_floor: Number | None = None
    """Calls that provably gain less are dropped before they cost anything; no `tau_f` may go below.
    None: nothing is dropped early, every loss of every call is stored."""
    call_format: CallFormat = CallFormat()
    sample: Sample = Sample()
    execute: Execute = Execute()
    score: Score = Score()
    select: Select = Select()
    augment: Augment = Augment()
    finetune: Finetune = Finetune()
    evaluate: Evaluate = Evaluate()

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of the tools, as calls write them (a user's function goes by its own name).

        Raises ConfigError for settings that are not those of a tool.
        """
        from pipeline.tools.catalogue import declared_names  # which names there are, tools know

        return tuple(declared_names(self.tools))


_ADAPTER = TypeAdapter(Config)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes `1e-5` for text, because it has no point; here it is a number.

    A key that stands twice in a mapping is refused: the first of the two would be lost.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.YAMLError(
                    f"the key `{key.value}` stands twice, in line {lines[key.value]} and in {line}"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Puts text that looks like such a number in quotes."""


_EXPONENT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def load_yaml(text: str) -> Any:
    """Read one YAML document; raises yaml.YAMLError."""
    return yaml.load(text, _Loader)  # a SafeLoader: plain values only


def load_config(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Read a YAML file, apply `section.key = value` overrides, check everything.

    Raises ConfigError naming file, key, value and what is allowed.
    """
    raw = _read_mapping(Path(path))
    for key, value in overrides:
        _override(raw, key, value)
    return parse_config(raw, str(path))


def load_tools(path: str | Path) -> list[Any]:
    """Read only the `tools:` of a YAML file, for commands that need nothing else of it."""
    tools = _read_mapping(Path(path)).get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{path}: `tools` has to be a list such as [{{name: Calculator}}]")
    return tools


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        raw = load_yaml(find(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        where = str(error).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"{path}: not YAML: {where}") from None
    if not isinstance(raw, dict):
        what = "is empty" if raw is None else f"is no mapping but {shown(raw)}"
        raise ConfigError(
            f"{path}: {what}; a configuration is a mapping with at least `name`, `corpus`, "
            "`model` and `tools` (configs/quickstart.yaml is one to copy)"
        )
    return raw


def parse_config(raw: Mapping[str, Any], origin: str = "config") -> Config:
    """Check a raw mapping and return the frozen configuration."""
    try:
        config = _ADAPTER.validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        found = [*refusals(error.errors(), Config), *_wrong_tools(raw.get("tools"))]
        raise _refused(origin, found) from None
    _check_together(config, origin)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as plain YAML/JSON values."""
    return TypeAdapter(type(config)).dump_python(config, mode="json")


def dump_config(config: Config) -> str:
    """Write a configuration as YAML, every value."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def fingerprint_values(section: Any) -> dict[str, Any]:
    """Return the values of a section that can change its output (all but the `SPEED` ones)."""
    values = to_dict(section)
    for item in dataclasses.fields(section):
        if item.metadata.get("speed_only"):
            values.pop(item.name)
    return values


def _override(raw: dict[str, Any], key: str, value: str) -> None:
    node = raw
    parts = key.split(".")
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--{key}: `{part}` is not a section")
        node = child
    try:
        node[parts[-1]] = load_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{key} {value}: not a YAML value: {error}") from None


def _refused(origin: str, lines: Iterable[str]) -> ConfigError:
    return ConfigError("\n".join(f"{origin}: {line}" for line in lines))


def _check_together(config: Config, origin: str) -> None:
    """Refuse values that are possible alone and impossible together."""
    tools = list(_wrong_tools(config.tools))
    found = [*_wrong_name(config.name), *_wrong_sources(config.corpus), *tools]
    found += _wrong_numbers(config)
    if not tools:
        found += _wrong_names(config)
    if found:
        raise _refused(origin, found)


def _wrong_name(name: str) -> Iterator[str]:
    """A run is kept in `runs/NAME`, so its name has to be that of one folder."""
    if not re.fullmatch(r"[\w .-]+", name) or not name.strip() or name in {".", ".."}:
        yield (
            f"`name` = {name!r}: it names the folder of the run; allowed are letters, "
            "digits, `.`, `_`, `-` and spaces, but not `.` or `..` alone (to keep the run "
            "elsewhere, give --run-dir)"
        )


def _wrong_sources(corpus: Corpus) -> Iterator[str]:
    for index, source in enumerate(corpus.sources):
        if (source.path is None) == (source.dataset is None):
            yield f"`corpus.sources.{index}`: give either `path` or `dataset`"
    if corpus.min_words > corpus.max_words:
        yield (
            f"`corpus.min_words` {corpus.min_words} is above `corpus.max_words` {corpus.max_words}"
        )


def _wrong_tools(entries: Any) -> Iterator[str]:
    """What the tools refuse of their entries; what is no list of mappings is told elsewhere."""
    from pipeline.tools.catalogue import declared_names  # which settings there are, tools know

    for index, entry in enumerate(entries if isinstance(entries, list | tuple) else ()):
        try:
            declared_names([entry] if isinstance(entry, Mapping) else [], index)
        except ConfigError as error:
            yield from str(error).splitlines()


def _wrong_numbers(config: Config) -> Iterator[str]:
    for key in ("numbers", "words"):
        if getattr(config.sample, key) == "from_context" and not config.sample.constrain:
            yield f"`sample.{key}: from_context` needs `sample.constrain: true`"


def _wrong_names(config: Config) -> Iterator[str]:
    """What is said of tools by their names."""
    names = config.tool_names
    if len({name.lower() for name in names}) != len(names):
        yield f"`tools`: each tool once, found {', '.join(names)}"
    for key, section in (("sample", config.sample.per_tool), ("select", config.select.per_tool)):
        for name in section:
            if name not in names:
                yield f"`{key}.per_tool.{name}`: no such tool; `tools` has {', '.join(names)}"
    floor = config.gain_floor
    for name in dict.fromkeys(names):
        tau = config.select.tau_of(name)
        if floor is not None and isinstance(tau, float | int) and tau < floor:
            yield (
                f"tau_f {tau} of {name} is below `gain_floor` {floor}: calls between the two were "
                "dropped before scoring; lower `gain_floor` too"
            )
