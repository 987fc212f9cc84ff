"""The training loop: plain language-model loss, packed, with accelerate.

    accelerate launch -m pipeline finetune CONFIG --run-dir D      # several devices
    callsieve finetune CONFIG --run-dir D                          # one

Weights and optimiser are fp32; the passes run under bf16 autocast where the device does that well.
The loss of a step is normalised by the weights of all its targets, so it does not matter how the
step is cut into micro-batches. What is a target is looked up on the host, so a device is waited for
once per step. The order of the data depends on the seed alone, and the random
numbers of a step (dropout) on the seed and the step, so a run that was killed and continued gives
the same losses as one that was not. Not covered: sharded weights (FSDP).
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from pipeline.config import Finetune
from pipeline.errors import WorkError
from pipeline.lm import liger, segments
from pipeline.lm.cross_entropy import cross_entropy
from pipeline.lm.direct_gradients import Copies, direct_gradients
from pipeline.lm.forward import LanguageModel, on_device
from pipeline.lm.packing import Example, Packed, epoch_order, pack

log = logging.getLogger(__name__)

SAVE_STATE_EVERY_S = 180.0
MAX_GRADIENT_NORM = 1.0

Texts = Sequence[Sequence[Example]]  # a text is one example, or several when it is long


@dataclass(frozen=True)
class Trained:
    """What came out: `folder` holds the best checkpoint; perplexities are of the validation."""

    folder: Path
    steps: int
    best_step: int
    perplexity_before: float | None
    perplexity: float | None
    tokens: int
    seconds: float


@dataclass
class Progress:
    """What has to survive a kill, besides weights and optimiser."""

    step: int = 0
    best_step: int = 0
    best_perplexity: float | None = None
    perplexity_before: float | None = None
    tokens: int = 0
    seconds: float = 0.0


class PackedLoss(nn.Module):
    """A causal model as a function from a packed micro-batch to its weighted summed loss."""

    def __init__(self, model: Any, tokenizer: Any, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast
        self.copies: Copies | None = None  # see `direct_gradients`
        self.liger = liger.available(model.device) and liger.adopt(model)
        self.split_head = LanguageModel(model, tokenizer).split_head
        self.shares_rows = segments.keeps_apart(model)
        self.segments = self.shares_rows and model.device.type == "cpu" and segments.fits(model)
        if not self.shares_rows:
            log.warning("this model does not keep examples of a row apart: each gets its own row")

    def forward(self, ids: Tensor, positions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Sum of weight * -log p(target) in nats; all inputs are (B, L) and may lie on the host."""
        device = self.model.device
        places = weights.flatten().nonzero()[:, 0]
        targets, weights = targets.flatten()[places], weights.flatten()[places]
        # whether one kernel for targets of one weight will do
        plain = self.liger and len(weights) > 0 and bool((weights == weights[0]).all())
        ids, positions = on_device(ids, device), on_device(positions, device)
        places, targets = on_device(places, device), on_device(targets, device)
        weights = on_device(weights, device)
        inputs = {"input_ids": ids, "use_cache": False}
        if self.shares_rows:
            inputs["position_ids"] = positions
        # checkpointed layers run again in the backward pass, where the segments are forgotten
        within = self.segments and not _is_checkpointing(self.model)
        with (
            torch.autocast(device.type, self.autocast, enabled=self.autocast is not None),
            segments.attending_within(self.model, positions) if within else nullcontext(),
        ):
            if not self.split_head:
                logits = self.model(**inputs).logits.flatten(0, 1).index_select(0, places).float()
                losses = nn.functional.cross_entropy(logits, targets, reduction="none")
                return (losses * weights).sum()
            hidden = self.model.base_model(**inputs).last_hidden_state
            hidden = hidden.flatten(0, 1).index_select(0, places)
            head = self.model.get_output_embeddings()
            bias = getattr(head, "bias", None)
            if plain:
                return liger.summed_loss(hidden, head.weight, bias, targets) * weights[0]
        dtype = self.autocast or head.weight.dtype
        return cross_entropy(hidden, head.weight, bias, targets, weights, dtype, self.copies)


def _is_checkpointing(model: Any) -> bool:
    name = "is_activation_checkpointing"  # its name since 5.24
    return bool(getattr(model, name if hasattr(model, name) else "is_gradient_checkpointing"))


def autocast_dtype(wanted: str, device: torch.device) -> torch.dtype | None:
    """The dtype of the passes: bf16 where the hardware multiplies it fast, None = fp32.

    On CPUs that is AMX or AVX512-BF16 (1.6 times the tokens per second of fp32 on a Zen 4 core).
    """
    if wanted != "auto":
        return torch.bfloat16 if wanted == "bfloat16" else None
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else None
    has: dict[str, bool] = (
        getattr(torch.cpu, "get_capabilities", dict)() if device.type == "cpu" else {}
    )
    return torch.bfloat16 if has.get("amx_bf16") or has.get("avx512_bf16") else None


def learning_rate(step: int, steps: int, peak: float, warmup_share: float) -> float:
    """Linear warm-up to `peak` over the first share of the steps, then linear decay to 0."""
    warmup = round(steps * warmup_share)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (steps - step) / max(steps - warmup, 1)


def count_steps(settings: Finetune, texts: int) -> int:
    """Optimiser steps of a run over `texts` texts."""
    per_epoch = math.ceil(texts / settings.batch_size)
    if settings.epochs is None:
        return settings.max_steps
    return min(settings.max_steps, max(math.ceil(settings.epochs * per_epoch), 1))


def texts_of_step(step: int, settings: Finetune, texts: int, seed: int) -> list[int]:
    """Which texts an optimiser step sees; the last step of an epoch may see fewer."""
    epoch, index = divmod(step, math.ceil(texts / settings.batch_size))
    order = epoch_order(seed, epoch, texts)
    return order[index * settings.batch_size : (index + 1) * settings.batch_size]


def train(
    model: Any,
    tokenizer: Any,
    texts: Texts,
    validation: Texts,
    settings: Finetune,
    *,
    accelerator: Accelerator,
    folder: Path,
    save: Callable[[Any, Path, Progress], None],
    seed: int = 0,
    fingerprint: str = "",
    on_event: Callable[..., None] = lambda event, **values: None,
    bar: Any = None,
    save_state_every_s: float = SAVE_STATE_EVERY_S,
) -> Trained:
    """Train `model` on `texts`, keep the checkpoint with the lowest validation perplexity.

    `folder` is for the loop's own files: the state to continue from and the best checkpoint,
    written by `save(model, folder, progress)`. A state with another `fingerprint` is not used.
    Raises WorkError when there is nothing to train on or the loss is no longer a number.
    """
    if not texts:
        raise WorkError("no text to train on: the data set has an empty train split")
    steps = count_steps(settings, len(texts))
    device = accelerator.device
    model.float().to(device)
    if settings.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)  # its name since 5.24
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    own = PackedLoss(model, tokenizer, autocast_dtype(settings.dtype, device))
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain},
    ]
    optimizer: Any = torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        weight_decay=0.0,
        fused=device.type in {"cpu", "cuda"},
    )
    loss_of, optimizer = accelerator.prepare(own, optimizer)

    with ExitStack() as stack:
        if device.type == "cpu" and accelerator.num_processes == 1:
            direct = direct_gradients(model, own.autocast or torch.float32)
            own.copies = stack.enter_context(direct)
        progress = _load_state(folder, model, optimizer, fingerprint) or Progress()
        budget = settings.tokens_per_micro_batch
        if progress.step == 0 and validation and progress.perplexity_before is None:
            progress.perplexity_before = _perplexity(loss_of, validation, budget, accelerator)
            on_event("dev", step=0, perplexity=progress.perplexity_before)
        if bar is not None:
            bar.total, bar.n = steps, progress.step
            bar.refresh()
        saved_at = time.monotonic()
        loss_of.train()
        while progress.step < steps:
            began = time.monotonic()
            step = progress.step
            torch.manual_seed(seed * 1_000_003 + step)
            chosen = texts_of_step(step, settings, len(texts), seed)
            examples = [example for index in chosen for example in texts[index]]
            rate = learning_rate(step, steps, settings.learning_rate, settings.warmup_share)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, tokens, budget = _accumulate(loss_of, optimizer, examples, budget, accelerator)
            if not math.isfinite(loss):
                raise WorkError(
                    f"the training loss is {loss} at step {step + 1}; lower "
                    "`finetune.learning_rate` or set `finetune.dtype: float32`"
                )
            norm = accelerator.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
            if own.copies is not None:
                own.copies.written()
            optimizer.zero_grad(set_to_none=own.copies is None)
            seconds = time.monotonic() - began
            progress.step += 1
            progress.tokens += tokens
            progress.seconds += seconds
            on_event(
                "train",
                step=progress.step,
                loss=loss,
                learning_rate=rate,
                gradient_norm=float(norm),
                tokens=tokens,
                tokens_per_s=round(tokens / seconds, 1),
            )
            if bar is not None:
                bar.set_postfix_str(
                    f"loss {loss:.3f}, {tokens / seconds:,.0f} tokens/s", refresh=False
                )
                bar.update(1)

            last = progress.step == steps
            if last or progress.step % settings.eval_every == 0:
                perplexity = None
                if validation:
                    perplexity = _perplexity(loss_of, validation, budget, accelerator)
                    on_event("dev", step=progress.step, perplexity=perplexity)
                    loss_of.train()
                best = progress.best_perplexity
                if perplexity is None or best is None or perplexity < best:
                    progress.best_perplexity, progress.best_step = perplexity, progress.step
                    _save_best(folder, model, progress, save, accelerator)
            due = progress.step % settings.eval_every == 0
            if not last and (due or time.monotonic() - saved_at > save_state_every_s):
                _save_state(folder, model, optimizer, progress, fingerprint, accelerator)
                saved_at = time.monotonic()
    if not validation:
        log.warning("no validation text: the last checkpoint is kept, not the best one")
    return Trained(
        _best_folder(folder, progress.best_step),
        progress.step,
        progress.best_step,
        progress.perplexity_before,
        progress.best_perplexity,
        progress.tokens,
        progress.seconds,
    )


def _accumulate(
    loss_of: Any, optimizer: Any, examples: Sequence[Example], budget: int, accelerator: Accelerator
) -> tuple[float, int, int]:
    """Gradients of one optimiser step; returns (mean loss, tokens, the budget that fitted).

    Every process takes its share of the micro-batches; the mean is over the weights of all.
    Out of memory halves the budget and starts the step again (on a single device).
    """
    total = sum(weight for example in examples for weight in example.weights)
    # gradients are averaged over the processes, the loss is a sum over them
    share = accelerator.num_processes / total
    while True:
        batches = pack(examples, budget, accelerator.unwrap_model(loss_of).shares_rows)
        own = _share(batches, accelerator)
        summed = torch.zeros((), device=accelerator.device)
        try:
            for index, batch in enumerate(own):
                last = index == len(own) - 1
                with nullcontext() if last else accelerator.no_sync(loss_of):
                    loss = _loss(loss_of, batch, share)
                    accelerator.backward(loss)
                summed += loss.detach()
        except torch.OutOfMemoryError:
            if accelerator.num_processes > 1 or budget <= max(len(e) for e in examples):
                raise
            budget //= 2
            log.warning("out of memory: `tokens_per_micro_batch` is now %d", budget)
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            continue
        summed = accelerator.reduce(summed, reduction="sum")
        return (
            float(summed) / accelerator.num_processes,
            sum(batch.tokens for batch in batches),
            budget,
        )


def _share(batches: list[Packed], accelerator: Accelerator) -> list[Packed]:
    """This process's micro-batches: equally many everywhere, filled up with weightless ones."""
    count = accelerator.num_processes
    rest = -len(batches) % count
    empty = [Packed(b.ids, b.positions, b.targets, b.weights * 0, 0) for b in batches[:1] * rest]
    return [*batches, *empty][accelerator.process_index :: count]


def _loss(loss_of: Any, batch: Packed, scale: float = 1.0) -> Tensor:
    loss: Tensor = loss_of(batch.ids, batch.positions, batch.targets, batch.weights * scale)
    return loss


@torch.no_grad()
def _perplexity(loss_of: Any, texts: Texts, budget: int, accelerator: Accelerator) -> float:
    """exp of the mean loss over all targets, with the weights of training."""
    examples = [example for text in texts for example in text]
    loss_of.eval()
    summed = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    shares_rows = accelerator.unwrap_model(loss_of).shares_rows
    for batch in _share(pack(examples, budget, shares_rows), accelerator):
        summed += _loss(loss_of, batch).double()
    summed = accelerator.reduce(summed, reduction="sum")
    return math.exp(float(summed) / sum(w for e in examples for w in e.weights))


# -- files of the loop ----------------------------------------------------------------------------


def _best_folder(folder: Path, step: int) -> Path:
    return folder / f"best-{step:07d}"


def _save_best(
    folder: Path,
    model: Any,
    progress: Progress,
    save: Callable[[Any, Path, Progress], None],
    accelerator: Accelerator,
) -> None:
    """Write the best checkpoint under a temporary name and rename it."""
    if accelerator.is_main_process:
        target = _best_folder(folder, progress.step)
        temporary = target.with_suffix(".tmp")
        for leftover in (temporary, target):
            shutil.rmtree(leftover, ignore_errors=True)
        save(model, temporary, progress)
        os.replace(temporary, target)
    accelerator.wait_for_everyone()


def _save_state(
    folder: Path,
    model: Any,
    optimizer: Any,
    progress: Progress,
    fingerprint: str,
    accelerator: Accelerator,
) -> None:
    """Write everything that continuing needs, atomically; then drop older best checkpoints."""
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / "state.tmp"
        state = {
            "fingerprint": fingerprint,
            "progress": vars(progress),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        try:
            torch.save(state, temporary)
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)
            raise WorkError(f"{temporary}: the state cannot be written: {error}") from error
        os.replace(temporary, folder / "state.pt")
        for other in folder.glob("best-*"):
            if other != _best_folder(folder, progress.best_step):
                shutil.rmtree(other, ignore_errors=True)
    accelerator.wait_for_everyone()


def _load_state(folder: Path, model: Any, optimizer: Any, fingerprint: str) -> Progress | None:
    path = folder / "state.pt"
    if not path.is_file():
        return None
    state = torch.load(path, map_location="cpu", weights_only=True)
    progress = Progress(**state["progress"])
    best = _best_folder(folder, progress.best_step)
    if state["fingerprint"] != fingerprint or (progress.best_step and not best.is_dir()):
        return None
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return progress
