"""Whether a model can be asked in the protocol `chat`: its tokenizer needs a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.agent.strategies import STRATEGIES
from pipeline.config import AgentLoop, Model
from pipeline.errors import ConfigError
from pipeline.lm.files import locate


def check_template(model: Model, instead: str) -> None:
    """Raise ConfigError for a model without a chat template; `instead` says what can be done.

    A folder is looked at without loading a library of models.
    """
    if not _has_template(model):
        raise ConfigError(
            f"{model.path}: its tokenizer has no chat template, which the protocol chat needs; "
            f"{instead}"
        )


def chat_instead(
    settings: AgentLoop, named: Callable[[str], str] = "`evaluate.agents.{}`".format
) -> str | None:
    """What can be done without a chat template; None where no run is in the protocol `chat`.

    `named` writes a key as the user gave it.
    """
    ways = []
    if "bfcl" in settings.benchmarks:
        ways.append(f"leave bfcl out of {named('benchmarks')} (it is always asked in chat)")
    if settings.protocol == "chat" and loops(settings):
        ways.append(f"use {named('protocol')} react")
    return " and ".join(ways) or None


def loops(settings: AgentLoop) -> bool:
    """Whether any run is in the loop, where tools can be called; the rows of bfcl are not."""
    in_loop = any(name != "bfcl" for name in settings.benchmarks)
    return in_loop and any(STRATEGIES[name].makes_calls for name in settings.strategies)


def _has_template(model: Model) -> bool:
    source, options = locate(model)
    folder = Path(source)
    if options or not folder.is_dir():  # a GGUF file or a hub id
        from pipeline.lm.checkpoint import load_tokenizer

        return bool(load_tokenizer(model).chat_template)
    files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
    if any(file.is_file() and file.stat().st_size for file in files):
        return True
    return bool(_settings(folder / "tokenizer_config.json").get("chat_template"))


def _settings(path: Path) -> dict[str, Any]:
    """A JSON object; what cannot be read is refused when the tokenizer is loaded."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
