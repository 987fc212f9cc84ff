"""Training on a CPU: gradients of weights are added where they belong, in memory that stays.

    with direct_gradients(model, torch.bfloat16):
        ...  # forward and backward passes, optimiser steps; gradients are zeroed in place

Autograd makes a new tensor for each gradient of a weight, converts it (under autocast) and adds it
to another one; memory that is new each time costs more than the products of a small batch. Here a
linear layer multiplies in the wanted dtype, with a low-precision copy of its weights that is
written again after each optimiser step (`Copies.written` tells of it), and adds its gradient to
`weight.grad` at once. fp32 products go through oneDNN, which some processors run twice as fast as
torch's own. The gradients are those of autograd (fp32: 1e-5). Not for several processes: they
exchange gradients through autograd's hooks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.lm.packed_weights import product


class Copies:
    """Low-precision copies of weights, and scratch memory; both stay from step to step."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._copies: dict[int, Tensor] = {}
        self._current: set[int] = set()
        self._scratch: dict[str, Tensor] = {}

    def of(self, weight: Tensor) -> Tensor:
        """`weight` in `dtype`, as it was when `written` was last called."""
        if weight.dtype == self.dtype:
            return weight.detach()
        if id(weight) not in self._copies:
            self._copies[id(weight)] = torch.empty_like(weight, dtype=self.dtype)
        copy = self._copies[id(weight)].detach()
        if id(weight) not in self._current:
            copy.copy_(weight.detach())
            self._current.add(id(weight))
        return copy

    def written(self) -> None:
        """The weights have changed (fused optimisers leave no trace of it in them)."""
        self._current.clear()

    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of a shape that the next caller of the same name gets too."""
        known, size = self._scratch.get(name), math.prod(shape)
        if known is None or known.numel() < size or known.dtype != dtype:
            known = self._scratch[name] = torch.empty(size, dtype=dtype)
        return known[:size].view(*shape)


@contextmanager
def direct_gradients(model: Any, dtype: torch.dtype) -> Iterator[Copies]:
    """Let the linear layers and embeddings of a CPU model work as described above.

    Gradients have to be zeroed in place (`zero_grad(set_to_none=False)`).
    """
    copies = Copies(dtype)
    changed = []
    for module in model.modules():
        forward = _forward_of(module, copies)
        if forward is not None:
            module.__dict__["forward"] = forward
            changed.append(module)
    try:
        yield copies
    finally:
        for module in changed:
            del module.__dict__["forward"]


def gradient_of(weight: Tensor) -> Tensor:
    """Where the gradient of a weight is added up; zeros to begin with."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _forward_of(module: nn.Module, copies: Copies) -> Any:
    weight: Any = getattr(module, "weight", None)
    if weight is None or not weight.requires_grad or weight.dtype != torch.float32:
        return None
    if type(module) is nn.Linear:
        return lambda x: _Linear.apply(x, weight, module.bias, copies.of(weight))
    plain = type(module) is nn.Embedding and module.max_norm is None
    if plain and not module.sparse and not module.scale_grad_by_freq:
        return lambda ids: _Embedding.apply(ids, weight, module.padding_idx)
    return None


class _Linear(torch.autograd.Function):
    """y = x W^T + b with the products in the dtype of `own`, a copy of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, own: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(own.dtype)
        ctx.save_for_backward(rows, own)
        ctx.weight, ctx.bias, ctx.shape, ctx.dtype = weight, bias, x.shape, x.dtype
        y = product(rows, own.T)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, own = ctx.saved_tensors
        slope = grads[0].reshape(-1, own.shape[0]).to(own.dtype)
        gradient_of(ctx.weight).add_(product(slope.T, rows))
        if ctx.bias is not None and ctx.bias.requires_grad:
            gradient_of(ctx.bias).add_(slope.float().sum(0))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return product(slope, own).to(ctx.dtype).view(ctx.shape), None, None, None


class _Embedding(torch.autograd.Function):
    """Rows of a table; their gradients are added to the rows of `table.grad`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table, ctx.padding = table, padding
        return nn.functional.embedding(ids, table.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        own = ids.flatten()
        slopes = grads[0].reshape(len(own), -1).float()
        if ctx.padding is not None:
            counted = own != ctx.padding
            own, slopes = own[counted], slopes[counted]
        gradient_of(ctx.table).index_add_(0, own, slopes)
        return None, None, None
