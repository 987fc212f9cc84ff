"""A checkpoint with its tools: generation with live calls outside of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import AutoConfig

from pipeline.calls import CallSyntax
from pipeline.config import Model
from pipeline.lm.checkpoint import load_model, read_extra
from pipeline.lm.decoding import context_length
from pipeline.lm.files import locate
from pipeline.lm.generation import generate
from pipeline.lm.grammar import CallGrammar, live_grammar
from pipeline.lm.jobs import Generation, LiveCalls, MadeCall
from pipeline.tools.base import schemas_of
from pipeline.tools.catalogue import build_tools
from pipeline.tools.executor import Executor

log = logging.getLogger(__name__)


def live_calls(
    executor: Executor,
    documents: Mapping[int, Mapping[str, Any]],
    *,
    syntax: CallSyntax,
    call_k: int,
    max_calls: int,
    enabled: bool = True,
    masks: CallGrammar | None = None,
) -> LiveCalls:
    """Live calls to the tools of an executor; `documents` gives date and id per prompt.

    With `masks` (of the model's tokenizer) a call that has begun cannot be malformed.
    """
    grammar = "" if masks is None else live_grammar(schemas_of(executor.specs), syntax)
    return LiveCalls(
        syntax,
        [spec.name for spec in executor.specs],
        lambda tool, arguments, index: executor.execute(tool, arguments, documents[index]),
        call_k=call_k,
        max_calls=max_calls,
        enabled=enabled,
        mask=None if masks is None else lambda: masks.mask(grammar),
    )


def generate_text(
    model_path: str,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    date: str | None = None,
    call_k: int | None = None,
    max_calls: int | None = None,
    enabled: bool = True,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "auto",
    executor: Executor | None = None,
    constrain: bool = False,
    on_text: Callable[[int, str, Sequence[MadeCall]], object] | None = None,
) -> Generation:
    """Continue a prompt with the model in a folder, calling the tools that it was trained with.

    `callsieve.json` beside the weights names syntax, tools, `call_k` and `max_calls`; without it
    (or without tools in it) the text is plain. `constrain` makes malformed calls impossible;
    `executor` replaces the tools of the checkpoint;
    `on_text` is told of the text as it is written (`generation.generate`).
    Raises ConfigError when the model or one of its tools cannot be loaded.
    """
    model, tokenizer = load_model(Model(path=model_path, device=device))
    extra = read_extra(model_path)
    plain: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "on_text": on_text,
    }
    if not extra.get("syntax") or not (extra.get("tools") or executor):
        if constrain:
            log.warning("%s was not tuned to call tools: there is no call to constrain", model_path)
        return generate(model, tokenizer, [prompt], **plain)[0]
    own = executor or Executor(build_tools(extra["tools"]))
    try:
        calls = live_calls(
            own,
            {0: {"date": date, "doc_id": ""}},
            syntax=CallSyntax(**extra["syntax"]),
            call_k=extra["call_k"] if call_k is None else call_k,
            max_calls=extra["max_calls"] if max_calls is None else max_calls,
            enabled=enabled,
            masks=CallGrammar(tokenizer) if constrain else None,
        )
        return generate(model, tokenizer, [prompt], calls=calls, **plain)[0]
    finally:
        if executor is None:
            own.close()


def too_long(model: str, tokens: int) -> str:
    """Say by how much a prompt is too long: there has to be room for a token after it."""
    folder, which = locate(Model(path=model))
    room = context_length(AutoConfig.from_pretrained(folder, **which).get_text_config())
    return (
        f"the prompt has {tokens:,} tokens and {model} can read {room:,}, what it writes included: "
        f"nothing was written; shorten the prompt to {room - 1:,} tokens or fewer, or take a model "
        "that reads more"
    )
