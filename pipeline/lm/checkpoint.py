"""Load and save causal language models: a folder, a GGUF file, or a hub id.

Not covered: quantised inference; a GGUF file is dequantised into ordinary weights.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.calls import CallSyntax
from pipeline.config import Config, Model
from pipeline.errors import ConfigError, WorkError
from pipeline.lm.files import locate
from pipeline.lm.tokens import check_tokenizer, encode_piece
from pipeline.shards import write_json

_EXTRA = "callsieve.json"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
# A marker that is new to the vocabulary starts from the row of the sign it stands for.
_MARKER_MODEL = {"<API>": " [", "</API>": "]", "→": "->"}


def pick_device(wanted: str) -> torch.device:
    """Resolve `auto` to cuda where a CUDA device answers, else cpu."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(
            f"`model.device` = {wanted!r}: allowed are auto, cpu, cuda, cuda:N"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"`model.device` = {wanted!r}: no CUDA device answers; use cpu or auto")
    return device


def load_tokenizer(settings: Model) -> Any:
    """Load the tokenizer of a model; a model without one is refused."""
    source, options = locate(settings)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"`model.path` = {settings.path!r}: no usable tokenizer: {_first_line(error)}; put "
            "tokenizer.json and tokenizer_config.json next to the weights"
        ) from None
    if tokenizer is None or not getattr(tokenizer, "is_fast", False) or len(tokenizer) < 2:
        raise ConfigError(
            f"`model.path` = {settings.path!r}: the tokenizer gives no character offsets; a fast "
            "tokenizer (tokenizer.json) is needed"
        )
    return tokenizer


def load_model(settings: Model) -> tuple[Any, Any]:
    """Load (model in eval mode on its device, tokenizer).

    Raises ConfigError when the model or its tokenizer is missing or unusable.
    """
    device = pick_device(settings.device)
    if device.type == "cpu" and sys.platform == "linux":
        _keep_freed_memory()
    tokenizer = load_tokenizer(settings)
    source, options = locate(settings)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, settings.dtype), **options
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"`model.path` = {settings.path!r}: {_first_line(error)}") from None
    _forget_quantisation(model)
    model.eval()
    return model.to(device), tokenizer  # type: ignore[arg-type]


def _keep_freed_memory() -> None:
    """Let glibc give freed tensors to the next ones instead of handing them back to the system.

    Every tensor of some megabytes would otherwise come as fresh zeroed pages: with a 135M model on
    two cores that is a tenth of the CPU time of training.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def load_for_run(config: Config) -> tuple[Any, Any]:
    """Load the model of a run, with the call markers added where the rendering needs them.

    Raises ConfigError when a call does not survive the tokenizer.
    """
    model, tokenizer = load_model(config.model)
    add_markers(model, tokenizer, config.call_format.syntax)
    check_tokenizer(tokenizer, config.call_format.syntax, config.tool_names)
    return model, tokenizer


@torch.no_grad()
def add_markers(model: Any, tokenizer: Any, syntax: CallSyntax) -> None:
    """Add the delimiters of the `special` rendering to vocabulary and embeddings.

    Each new row is the mean of the rows of the sign that it stands for, so the three differ.
    """
    new = [marker for marker in syntax.markers if marker not in tokenizer.get_vocab()]
    if not new:
        return
    rows = {marker: encode_piece(tokenizer, _MARKER_MODEL[marker]) for marker in new}
    tokenizer.add_tokens(new, special_tokens=False)
    model.resize_token_embeddings(
        max(len(tokenizer), model.get_input_embeddings().weight.shape[0]), mean_resizing=False
    )
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        for marker, like in rows.items():
            target = tokenizer.convert_tokens_to_ids(marker)
            table.weight[target] = table.weight[like].mean(0)


def save_checkpoint(model: Any, tokenizer: Any, folder: Path, extra: Mapping[str, Any]) -> None:
    """Save an ordinary checkpoint that `AutoModelForCausalLM.from_pretrained(folder)` loads.

    `extra` is written to `callsieve.json` beside it: how the model writes its calls. Raises
    WorkError when it cannot be written; a checkpoint that was in the folder is then left as it was.
    """
    _forget_quantisation(model)
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        write_json(temporary / _EXTRA, dict(extra))
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(temporary.iterdir(), key=lambda file: file.name == _EXTRA):
            os.replace(file, folder / file.name)
    except (OSError, SafetensorError) as error:
        raise WorkError(f"{folder}: the checkpoint cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_extra(folder: str | Path) -> dict[str, Any]:
    """Read `callsieve.json` of a checkpoint; empty when it is not one of ours."""
    path = Path(folder) / _EXTRA
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _forget_quantisation(model: Any) -> None:
    """A dequantised GGUF model still carries the marks that make `save_pretrained` refuse."""
    model.hf_quantizer = None
    if hasattr(model, "quantization_method"):
        model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
