"""Run a causal model and compute only what is asked for: hidden states, then chosen logits.

The output layer is a fifth of a 135M model, so logits are made for the needed positions only.
Models whose logits are not simply `output layer(last hidden state)` are found by a trial at load
time and take the plain path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.lm.packed_weights import packed

log = logging.getLogger(__name__)
T = TypeVar("T")
ENOUGH = 512  # tokens that keep the cores of a CPU as busy as any larger batch


@dataclass
class LanguageModel:
    """A causal model with its tokenizer and the token that stands before every text."""

    model: Any
    tokenizer: Any
    trunk: Any = field(init=False)
    head: Any = field(init=False)
    split_head: bool = field(init=False)

    def __post_init__(self) -> None:
        self.trunk = self.model.base_model
        self.head = self.model.get_output_embeddings()
        self.split_head = self._head_is_plain()
        if not self.split_head:
            log.warning("this model's logits need its whole forward pass; scoring will be slower")

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def max_length(self) -> int:
        """How many tokens the model can read at once (a huge number where no limit is known)."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 1 << 30)

    @torch.inference_mode()
    def _head_is_plain(self) -> bool:
        if self.head is None or self.trunk is self.model:
            return False
        ids = torch.tensor([[5, 7, 9]], device=self.device)
        full = self.model(ids, use_cache=False).logits
        try:
            own = self.head(self.trunk(ids, use_cache=False).last_hidden_state)
        except (AttributeError, TypeError, RuntimeError):
            return False
        return own.shape == full.shape and torch.allclose(own, full, atol=1e-4, rtol=1e-4)

    def hidden(self, ids_BL: Tensor, **options: Any) -> Tensor:
        """Return what `logits` takes: hidden states, or full logits on the plain path."""
        with packed(self.model):
            if self.split_head:
                return self.trunk(ids_BL, use_cache=False, **options).last_hidden_state
            return self.model(ids_BL, use_cache=False, **options).logits

    def logits(self, chosen_ND: Tensor) -> Tensor:
        """Return fp32 logits (N, V) of chosen rows of `hidden`."""
        if not self.split_head:
            return chosen_ND.float()
        with packed(self.model):
            return self.head(chosen_ND).float()

    def token_logprobs(self, chosen_ND: Tensor, targets_N: Tensor, chunk: int = 1024) -> Tensor:
        """Return log p(target) in nats (N,), fp32, without holding all logits at once."""
        out = []
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            logits = self.logits(chosen_ND[part])
            out.append(-functional.cross_entropy(logits, targets_N[part], reduction="none"))
        return torch.cat(out) if out else torch.empty(0, device=chosen_ND.device)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device; a copy to CUDA is not waited for."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def right_padded(rows: Sequence[Sequence[int]], device: torch.device, pad: int = 0) -> Tensor:
    """Stack rows of ids (B, L), padded on the right, where a causal model never looks."""
    length = max(len(row) for row in rows)
    ids = np.full((len(rows), length), pad, dtype=np.int64)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    return on_device(torch.from_numpy(ids), device)


def forbid(logits_BV: Tensor, allowed: Sequence[Tensor | None]) -> None:
    """Give probability 0 to what a row's mask (bool, up to V) leaves out, in place; None: all may.

    One copy to the device for all rows.
    """
    if all(mask is None for mask in allowed):
        return
    blocked = torch.zeros(logits_BV.shape, dtype=torch.bool)
    for row, mask in zip(blocked, allowed, strict=True):
        if mask is not None:
            row[: len(mask)] = ~mask
            row[len(mask) :] = True
    logits_BV.masked_fill_(on_device(blocked, logits_BV.device), -torch.inf)


def by_budget(lengths: Sequence[int], budget: int, waste: float = 1.0) -> list[list[int]]:
    """Group indices into batches of similar length whose padded size stays within the budget.

    A batch of `ENOUGH` tokens or more takes no row that would make its share of padding larger than
    `waste`.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    used = 0  # tokens of the last batch
    for index in order:
        longest = lengths[batches[-1][0]] if batches else 0
        size = longest * (len(batches[-1]) + 1) if batches else 0
        padded = size - used - lengths[index]
        full = size > budget or (size - longest >= ENOUGH and padded > waste * size)
        if batches and not full:
            batches[-1].append(index)
            used += lengths[index]
        else:
            batches.append([index])
            used = lengths[index]
    return batches


@dataclass
class Budget:
    """Tokens per batch; halves when the device runs out of memory and stays there."""

    tokens: int

    def run(
        self, lengths: Sequence[int], work: Callable[[list[int]], T], waste: float = 1.0
    ) -> list[T]:
        """Call `work(indices)` on batches within the budget; out of memory halves the budget.

        `waste` is the share of padding that is allowed, see `by_budget`.
        """
        results: list[T] = []
        waiting = by_budget(lengths, self.tokens, waste)
        while waiting:
            batch = waiting.pop(0)
            try:
                results.append(work(batch))
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                self.tokens = max(self.tokens // 2, 1)
                log.warning("out of memory: token budget is now %d", self.tokens)
                left = sorted([*batch, *(i for other in waiting for i in other)])
                regrouped = by_budget([lengths[i] for i in left], self.tokens, waste)
                waiting = [[left[i] for i in group] for group in regrouped]
        return results
