"""The data set card: README.md of `06-dataset`, with the YAML header that a hub reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from pipeline.config import Config, FalseKeepRate, Source, to_dict
from pipeline.report.funnel import build_funnel, explain
from pipeline.shards import RunFolder, read_json, write_text

_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
_COLUMNS = """\
| column | meaning |
|---|---|
| `id` | hash of source and text |
| `text` | the document as it was read |
| `text_augmented` | the same text with the calls and their results |
| `calls` | list of calls in order of position: `tool`, `arguments`, `result`, `char_start` (index \
into `text`, in code points, before which the call stands), `loss_none`, `loss_call`, \
`loss_result` (weighted losses in nats without a call, with the call alone, with call and \
result), `gain` = min(loss_none, loss_call) - loss_result |
"""


def write_card(
    path: Path,
    config: Config,
    folder: RunFolder,
    counts: Mapping[str, Mapping[str, int]],
    example: Any,
    content: str,
) -> None:
    """Write the card; `counts` are those of the stage, `example` is a row of the data set.

    `content` is a hash of the data files.
    """
    write_text(path, card_text(config, folder, counts, example, content))


def card_text(
    config: Config,
    folder: RunFolder,
    counts: Mapping[str, Mapping[str, int]],
    example: Any,
    content: str,
) -> str:
    """Return the card: header, how to load, columns, how it was made, funnel, licence, example."""
    own = counts["*"]
    sections = [
        "---\n" + _header(config, own, content) + "---",
        f"# {config.name}",
        _about(config, own),
        "## How to load",
        "```python\nfrom datasets import load_dataset\n\n"
        'dataset = load_dataset("path/to/06-dataset")\n'
        'print(dataset["train"][0]["text_augmented"])\n```',
        f"{own['train']} rows in `train`, {own['validation']} in `validation`; which of the two a "
        "text belongs to depends on its `id` alone.",
        "## Columns",
        _COLUMNS.strip(),
        "## How it was made",
        _settings_table(config, folder),
        "## Funnel",
        _funnel_table(folder, counts),
        "## Source and licence",
        "\n".join(f"- `{_code(source_name(source))}`" for source in config.corpus.sources),
        f"Licence of the source texts: `{_code(config.corpus.licence)}`. The texts are theirs; "
        "the calls were added.",
        "## Example",
        _fenced(example.text) + "\n\nbecomes\n\n" + _fenced(example.text_augmented),
    ]
    return "\n\n".join(sections) + "\n"


def _about(config: Config, own: Mapping[str, int]) -> str:
    if config.augment.traces is not None:
        return f"{own['augmented']} runs of the agent loop that ended with the right answer."
    return (
        f"{own['augmented']} texts with {own['calls']} calls of {', '.join(config.tool_names)}. A "
        "language model wrote the calls itself and each one was kept because its result makes the "
        "model better at predicting the tokens that follow (Toolformer, Schick et al. 2023, arXiv "
        "2302.04761)."
    )


def _header(config: Config, counts: Mapping[str, int], content: str) -> str:
    size = next((name for limit, name in _SIZES if counts["augmented"] < limit), "n>1M")
    files = [
        {"split": split, "path": f"data/{split}-*.parquet"}
        for split in ("train", "validation")
        if counts[split]
    ]
    # `load_dataset` names its cache by this header and not by the files: without the hash every
    # run would be given the rows of the first one that was ever loaded.
    default = {"config_name": "default", "data_files": files, "description": f"content {content}"}
    header = {
        "pretty_name": config.name,
        "license": config.corpus.licence.lower(),
        "task_categories": ["text-generation"],
        "size_categories": [size],
        "tags": ["tool-use", "toolformer", "callsieve"],
        "configs": [default],
    }
    return yaml.safe_dump(header, sort_keys=False, allow_unicode=True)


def _settings_table(config: Config, folder: RunFolder) -> str:
    manifest = read_json(folder.path / "manifest.json") or {}
    rows = [("model", public_path(config.model.path)), ("model dtype", config.model.dtype)]
    rows += [
        (key.replace("_", " "), manifest[key])
        for key in ("model_fingerprint", "tokenizer_fingerprint")
        if isinstance(manifest.get(key), str)
    ]
    rows += [
        ("form of a call", f"{config.call_format.rendering}, e(c, eps): "
         f"{config.call_format.empty_result}"),
        ("seed", str(config.seed)),
    ]  # fmt: skip
    for tool in config.tool_names:
        tau_s, k, m = config.sample.of(tool)
        rows.append((f"{tool}: tau_s, k, m", f"{tau_s:g}, {k}, {m}"))
        rows.append((f"{tool}: tau_f", threshold_text(config.select.tau_of(tool))))
    for section in ("sample", "score", "select"):
        for key, value in to_dict(getattr(config, section)).items():
            if key not in ("tau_s", "k", "m", "tau_f", "per_tool", "max_rows", "token_budget"):
                rows.append((f"{section}.{key}", repr(value) if value == "\n" else str(value)))
    lines = [f"| {_cell(name)} | `{_code(value)}` |" for name, value in rows]
    return "\n".join(["| setting | value |", "|---|---|", *lines])


def _funnel_table(folder: RunFolder, counts: Mapping[str, Mapping[str, int]]) -> str:
    funnel = build_funnel(folder)
    corpus = funnel["corpus"]
    lines = ["| tool | step | count | left out before it |", "|---|---|---|---|"]
    left = _left_text(corpus.get("left", {}))
    lines.append(f"| all | documents | {corpus.get('documents', 0)} | {left} |")
    for tool, steps in funnel["tools"].items():
        for step in steps:
            left = _left_text(step["left"])
            name = step["step"].replace("_", " ")
            lines.append(f"| {_cell(tool)} | {name} | {step['count']} | {left} |")
    without = counts["*"].get("without_calls", 0)
    lines.append(
        f"| all | texts in this data set | {counts['*']['augmented']} | without a call: {without} |"
    )
    return "\n".join(lines)


def _left_text(left: Mapping[str, int]) -> str:
    return "; ".join(f"{_cell(explain(what))}: {n}" for what, n in left.items())


def threshold_text(tau: float | FalseKeepRate) -> str:
    """Write a threshold, given or asked for by its false-keep rate."""
    if isinstance(tau, FalseKeepRate):
        return f"so that {tau.false_keep_rate:g} of the kept calls are kept by chance"
    return f"{tau:g}"


def source_name(source: Source) -> str:
    """Name a source without saying where it lies on this machine."""
    return source.name or public_path(str(source.path or source.dataset))


def public_path(path: str) -> str:
    """Shorten an absolute path to its last part; a hub id or a relative path stays."""
    pure = PurePath(path)
    return pure.name if pure.is_absolute() or ".." in pure.parts else path


def _code(text: object) -> str:
    return str(text).replace("`", "'").replace("|", "\\|").replace("\n", " ")


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _fenced(text: str) -> str:
    """Fence a text with more back-ticks than it holds in a row."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
