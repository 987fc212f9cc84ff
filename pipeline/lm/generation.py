"""Generation with live calls (method, section 7): batched, with a key/value cache.

The opening token fires when it is among the `call_k` most likely. The model then writes the call;
at the arrow it is stopped, the tool is run, ` result` and the closing delimiter are inserted, and
the model goes on. A call that is malformed or never closes stays in the text as text and is
counted. With a grammar (`LiveCalls.mask`) neither can happen: tokens that cannot continue a call
of a known tool get probability 0, the rest is renormalised, and rows outside of a call are left
alone. Rows that finish leave the batch and waiting prompts come in; what a row writes does not
depend on the others. Plain decoding (`calls=None`) is the engine of the agent loop too, which puts
in what follows from an answer while other prompts are being answered (`serve`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeline.lm.decoding import Decoder, OnText
from pipeline.lm.grammar import RowMask
from pipeline.lm.jobs import Generation, Job, LiveCalls, Source
from pipeline.lm.kept import KeptKeys
from pipeline.lm.noise import sample_key


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    temperature: float = 0.0,
    seed: int | Sequence[int] = 0,
    calls: LiveCalls | None = None,
    max_rows: int = 64,
    share_prefix: bool = True,
    kept: KeptKeys | None = None,
    masks: Sequence[RowMask | None] | None = None,
    on_done: Callable[[int, Generation], object] = lambda index, generation: None,
    on_text: OnText | None = None,
) -> list[Generation]:
    """Continue each prompt; greedy at temperature 0.

    A text gets the model's context token in front; token ids (a rendered chat) are taken as they
    are. `max_new_tokens` counts the tokens of text: those of calls are limited by
    `LiveCalls.max_call_tokens`. Stop strings are looked for in the text after the last call. Each
    prompt draws from its own random numbers: `seed` is one per prompt, or one for all (then
    combined with the index). A common beginning of the prompts is computed once. `kept` holds the
    keys of earlier calls and takes those of this one: what a prompt shares with an earlier text is
    not computed again. Texts do not depend on it.

    `on_text(index, text, calls)` is told after every token what a prompt's text is so far, up to
    the call that is being written; the last of it comes with `on_done`.

    `masks` holds one grammar or None per prompt, for plain decoding: what it forbids gets
    probability 0 and the rest is renormalised. Such a text is not cut at its length in the middle
    of what its grammar has open (unless that takes more than 1,024 tokens), and ends where nothing
    may follow.
    """
    seeds = _seeds(seed, len(prompts))
    jobs = [
        Job(prompt, max_new_tokens, tuple(stop), temperature, own, mask)
        for prompt, own, mask in zip(prompts, seeds, masks or [None] * len(prompts), strict=True)
    ]
    number = {id(job): index for index, job in enumerate(jobs)}
    made: dict[int, Generation] = {}
    batches = iter([jobs])

    def source(done: Sequence[tuple[Job, Generation]], busy: bool) -> Sequence[Job]:
        for job, generation in done:
            made[number[id(job)]] = generation
            on_done(number[id(job)], generation)
        return next(batches, [])

    serve(
        model,
        tokenizer,
        source,
        max_rows=max_rows,
        calls=calls,
        share_prefix=share_prefix,
        kept=kept,
        on_text=on_text,
    )
    return [made[index] for index in range(len(jobs))]


@torch.inference_mode()
def serve(
    model: Any,
    tokenizer: Any,
    source: Source,
    *,
    max_rows: int,
    calls: LiveCalls | None = None,
    share_prefix: bool = True,
    kept: KeptKeys | None = None,
    on_text: OnText | None = None,
) -> None:
    """Answer jobs, up to `max_rows` at a time, and those that come while others are answered.

    `source(done, busy)` is asked after every token: it takes the jobs that are done since, with
    what was generated, and gives the next ones. When nothing is left to do (not `busy`) and it
    gives none, all is over. Jobs are counted in the order in which they are given: that is the
    index in `LiveCalls.execute` and `on_text`.
    """
    training = model.training
    model.eval()
    try:
        kept = KeptKeys(limit_bytes=0) if kept is None else kept
        decoder = Decoder(kept.language_model(model, tokenizer), calls, on_text)
        decoder.run(source, max_rows, kept if share_prefix else None)
    finally:
        model.train(training)


def _seeds(seed: int | Sequence[int], count: int) -> list[int]:
    if isinstance(seed, int):
        return [sample_key(seed, "prompt", "", index, 0) for index in range(count)]
    if len(seed) != count:
        raise ValueError(f"{len(seed)} seeds for {count} prompts; give one per prompt, or one int")
    return list(seed)
