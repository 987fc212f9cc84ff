"""Bench `train`: our packed loop against transformers.Trainer with padded batches.

Both start from the same weights and see the same texts in the same order with the same optimiser,
learning rates and clipping; a step's loss is the mean over its tokens on both sides, so the two
loss curves have to coincide. The rate counts the tokens of the texts, without padding, from the end
of the first step, in which optimisers and drivers make room for themselves. Where the passes of
ours run in bf16 by themselves, three comparisons are made: as both come (Trainer trains in fp32),
both in bf16, and both in fp32.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from pipeline.bench import material
from pipeline.bench.measure import Comparison, Rate, document
from pipeline.config import Finetune
from pipeline.errors import ConfigError
from pipeline.lm.packing import Example, make_examples
from pipeline.lm.training import (
    MAX_GRADIENT_NORM,
    autocast_dtype,
    learning_rate,
    texts_of_step,
    train,
)

BATCH = 4  # configs/quickstart.yaml
STEPS = 8
_DTYPES: dict[torch.dtype, Literal["float32", "bfloat16"]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-3}  # of a step's loss, in nats


@dataclass(frozen=True)
class _Run:
    losses: list[float]
    rate: Rate


def run(model: str, pairs: int, documents: int | None, tokens: int | None) -> dict[str, Any]:
    """Measure; texts for 8 steps by default, whole or of `tokens` tokens."""
    start, tokenizer = material.load(model)
    count = documents or STEPS * BATCH
    if count <= BATCH:
        raise ConfigError(f"--documents {count}; allowed: more than {BATCH} (a step takes {BATCH})")
    texts = _texts(start, tokenizer, count, tokens)
    settings = Finetune(batch_size=BATCH, epochs=1, eval_every=1_000_000)
    own = autocast_dtype(settings.dtype, start.device) or torch.float32
    dtypes = dict.fromkeys((own, torch.float32))
    sides = {("ours", dtype): functools.partial(_ours, start, tokenizer) for dtype in dtypes} | {
        ("Trainer", dtype): functools.partial(_trainer, start) for dtype in dtypes
    }
    found: dict[tuple[str, torch.dtype], list[_Run]] = {side: [] for side in sides}
    for pair in range(pairs):
        turn = pair % len(sides)
        for side in [*sides][turn:] + [*sides][:turn]:
            found[side].append(sides[side](texts, settings, side[1]))
            name, rate = f"{side[0]}, {_name(side[1])}", found[side][-1].rate
            print(f"pair {pair + 1}: {name}: {rate.per_s:.3g}/s", file=sys.stderr)
    asked = dict.fromkeys([(own, torch.float32), *((dtype, dtype) for dtype in dtypes)])
    comparisons = [_comparison(found, ours, theirs) for ours, theirs in asked]
    return document("train", comparisons, None, [])


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def _comparison(
    found: Mapping[tuple[str, torch.dtype], Sequence[_Run]], own: torch.dtype, their: torch.dtype
) -> Comparison:
    ours, theirs = found["ours", own], found["Trainer", their]
    tolerance = max(TOLERANCE[own], TOLERANCE[their])
    return Comparison(
        f"Trainer, padded, {_name(their)} (ours {_name(own)})",
        tuple(run.rate for run in ours),
        tuple(run.rate for run in theirs),
        all(_close(a.losses, b.losses, tolerance) for a, b in zip(ours, theirs, strict=True)),
    )


def _texts(model: Any, tokenizer: Any, count: int, tokens: int | None) -> list[list[Example]]:
    source = material.texts()
    found: list[list[Example]] = []
    while len(found) < count:
        text = next(source)
        while tokens is not None and len(tokenizer(text)["input_ids"]) < tokens:
            text = f"{text} {next(source)}"
        limit = 1024 if tokens is None else tokens
        found.append(make_examples(tokenizer, text, (), material.SYNTAX, max_length=limit)[:1])
    return found


def _close(ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> bool:
    return len(ours) == len(theirs) and all(
        abs(a - b) <= tolerance for a, b in zip(ours, theirs, strict=True)
    )


class _Clock:
    """The time at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def end_of_step(self) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def rate(self, tokens: Sequence[int]) -> Rate:
        """Tokens per second from the end of the first step; `tokens` of all steps."""
        (began, cpu_began), (end, cpu_end) = self.ends[0], self.ends[-1]
        return Rate(sum(tokens[1:]) / (end - began), sum(tokens[1:]) / (cpu_end - cpu_began))


def _ours(
    start: Any,
    tokenizer: Any,
    texts: Sequence[Sequence[Example]],
    settings: Finetune,
    dtype: torch.dtype,
) -> _Run:
    """Our loop, with nothing written to disk."""
    clock = _Clock()
    losses: list[float] = []
    tokens: list[int] = []

    def on_event(event: str, **values: Any) -> None:
        if event == "train":
            clock.end_of_step()
            losses.append(values["loss"])
            tokens.append(values["tokens"])

    with tempfile.TemporaryDirectory() as folder:
        train(
            copy.deepcopy(start),
            tokenizer,
            texts,
            [],
            dataclasses.replace(settings, dtype=_DTYPES[dtype]),
            accelerator=Accelerator(cpu=start.device.type == "cpu"),
            folder=Path(folder),
            save=lambda model, target, progress: target.mkdir(parents=True),
            on_event=on_event,
        )
    return _Run(losses, clock.rate(tokens))


# -- baseline ------------------------------------------------------------------------------------


class _InOrder(Trainer):
    """A Trainer that takes the texts as they lie."""

    def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class _Watch(TrainerCallback):
    """The losses, and the times of the steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.clock = _Clock()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.end_of_step()

    def on_log(self, *args: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def _trainer(
    start: Any, texts: Sequence[Sequence[Example]], settings: Finetune, dtype: torch.dtype
) -> _Run:
    """The same steps with transformers.Trainer."""
    model = copy.deepcopy(start).float()
    size = settings.batch_size
    steps = -(-len(texts) // size)
    order = [texts_of_step(step, settings, len(texts), 0) for step in range(steps)]
    examples = [[example for index in own for example in texts[index]] for own in order]
    rows = [{"input_ids": example.ids} for own in examples for example in own]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True
    )
    rates = LambdaLR(
        optimizer,
        lambda step: learning_rate(min(step, steps - 1), steps, 1.0, settings.warmup_share),
    )
    watch = _Watch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=start.device.type == "cpu",
            per_device_train_batch_size=size,
            max_steps=steps,
            bf16=dtype == torch.bfloat16,
            max_grad_norm=MAX_GRADIENT_NORM,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = _InOrder(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=_collate,
            optimizers=(optimizer, rates),
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    tokens = [sum(len(example) for example in own) for own in examples]
    return _Run(watch.losses, watch.clock.rate(tokens))


def _collate(rows: Iterable[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad to the longest row of the batch; padding has no label."""
    ids = [row["input_ids"] for row in rows]
    width = max(len(own) for own in ids)

    def padded(values: Iterable[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*own, *[fill] * (width - len(own))] for own in values])

    return {
        "input_ids": padded(ids, 0),
        "attention_mask": padded(([1] * len(own) for own in ids), 0),
        "labels": padded(ids, -100),
    }
