"""Bench `train`: our packed loop against transformers.Trainer with padded batches.

Both start from the same weights and see the same texts in the same order with the same optimiser,
learning rates, clipping and dtype; a step's loss is the mean over its tokens on both sides, so the
two loss curves have to coincide. The rate counts the tokens of the texts, without padding.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from pipeline.bench import material
from pipeline.bench.measure import Comparison, Rate, document
from pipeline.config import Finetune
from pipeline.lm.packing import Example, make_examples
from pipeline.lm.training import (
    MAX_GRADIENT_NORM,
    autocast_dtype,
    learning_rate,
    texts_of_step,
    train,
)

BATCH = 4  # configs/quickstart.yaml
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-3}  # of a step's loss, in nats


@dataclass(frozen=True)
class _Run:
    losses: list[float]
    rate: Rate


def run(model: str, pairs: int, documents: int | None, tokens: int | None) -> dict[str, Any]:
    """Measure; 8 texts (2 steps) by default, whole or of `tokens` tokens."""
    start, tokenizer = material.load(model)
    count = documents or 2 * BATCH
    texts = _texts(start, tokenizer, count, tokens)
    settings = Finetune(
        learning_rate=5e-4, batch_size=min(BATCH, count), epochs=1, eval_every=1_000_000
    )
    dtype = autocast_dtype(settings.dtype, start.device) or torch.float32
    found: list[tuple[_Run, _Run]] = []
    for pair in range(pairs):
        if pair % 2:
            theirs = _trainer(start, texts, settings, dtype)
            ours = _ours(start, tokenizer, texts, settings)
        else:
            ours = _ours(start, tokenizer, texts, settings)
            theirs = _trainer(start, texts, settings, dtype)
        found.append((ours, theirs))
    agrees = all(_close(a.losses, b.losses, TOLERANCE[dtype]) for a, b in found)
    comparison = Comparison(
        "transformers.Trainer, padded batches",
        tuple(ours.rate for ours, _ in found),
        tuple(theirs.rate for _, theirs in found),
        agrees,
    )
    return document("train", [comparison], None, [])


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


def _ours(
    start: Any, tokenizer: Any, texts: Sequence[Sequence[Example]], settings: Finetune
) -> _Run:
    """Our loop, with nothing written to disk."""
    model = copy.deepcopy(start)
    losses: list[float] = []
    cpu_began, cpu = time.process_time(), 0.0

    def on_event(event: str, **values: Any) -> None:
        nonlocal cpu
        if event == "train":
            losses.append(values["loss"])
            cpu = time.process_time() - cpu_began

    with tempfile.TemporaryDirectory() as folder:
        trained = train(
            model,
            tokenizer,
            texts,
            [],
            settings,
            accelerator=Accelerator(cpu=start.device.type == "cpu"),
            folder=Path(folder),
            save=lambda model, target, progress: target.mkdir(parents=True),
            on_event=on_event,
        )
    return _Run(losses, Rate(trained.tokens / trained.seconds, trained.tokens / cpu))


# -- baseline ------------------------------------------------------------------------------------


class _InOrder(Trainer):
    """A Trainer that takes the texts as they lie."""

    def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class _Clock(TrainerCallback):
    """The losses, and the seconds from the first step to the last."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.began = self.seconds = self.cpu_began = self.cpu = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began, self.cpu_began = time.perf_counter(), time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self.began
        self.cpu = time.process_time() - self.cpu_began

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
    order = [
        index for step in range(steps) for index in texts_of_step(step, settings, len(texts), 0)
    ]
    rows = [{"input_ids": example.ids} for index in order for example in texts[index]]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True
    )
    rates = LambdaLR(
        optimizer,
        lambda step: learning_rate(min(step, steps - 1), steps, 1.0, settings.warmup_share),
    )
    clock = _Clock()
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
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    tokens = sum(len(row["input_ids"]) for row in rows)
    return _Run(clock.losses, Rate(tokens / clock.seconds, tokens / clock.cpu))


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
