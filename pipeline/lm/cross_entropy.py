"""Cross-entropy of an output layer without the logits of the whole batch in memory.

Loss and gradients are made together, chunk by chunk, in the forward pass: the logits of a chunk
are computed once and thrown away, so the backward pass only multiplies by the incoming gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.lm.direct_gradients import Copies, gradient_of
from pipeline.lm.packed_weights import product

CHUNK_LOGITS = 2**24  # logits that exist at the same time: 64 MiB in fp32
# The gradient of the table is read and written once per chunk, which on a GPU has to be worth it.
CUDA_CHUNK_LOGITS = 2**26


def cross_entropy(
    hidden_ND: Tensor,
    table_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    weights_N: Tensor,
    dtype: torch.dtype,
    copies: Copies | None = None,
) -> Tensor:
    """Weighted sum of -log p(target) in nats, a fp32 scalar.

    Products run in `dtype`; softmax and sums run in fp32. With `copies` (on a CPU, see
    `direct_gradients`) the gradients of table and bias are added to their `grad` at once, so the
    result has to be the loss itself: its backward pass raises ValueError for another slope than 1.
    """
    with torch.autocast(hidden_ND.device.type, enabled=False):
        needed = torch.is_grad_enabled()
        loss: Tensor = _CrossEntropy.apply(
            hidden_ND, table_VD, bias_V, targets_N, weights_N, dtype, needed, copies
        )
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        table: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        dtype: torch.dtype,
        needed: bool,
        copies: Copies | None,
    ) -> Tensor:
        own = table.to(dtype) if copies is None else copies.of(table)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needed else None
        grad_table = _gradient(table, copies) if needed else None
        grad_bias = _gradient(bias, copies) if needed and bias is not None else None
        room = CUDA_CHUNK_LOGITS if hidden.is_cuda else CHUNK_LOGITS
        chunk = max(room // table.shape[0], 1)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            rows = hidden[part].to(dtype)
            logits = _logits(rows, own, bias, copies)
            highest = logits.amax(-1, keepdim=True)
            target, weight = targets[part, None], weights[part, None].float()
            picked = logits.gather(1, target) - highest
            total = logits.sub_(highest).exp_().sum(-1, keepdim=True)
            loss += ((total.log() - picked) * weight).sum()
            if grad_hidden is None or grad_table is None:
                continue
            slope = logits.mul_(weight / total)  # d loss / d logits = (p - onehot) * weight
            slope.scatter_add_(1, target, -weight)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            grad_hidden[part], low = _back(slope, own, hidden.dtype, copies)
            _add_outer(grad_table, low, rows, copies)
        if copies is not None:
            grad_table = grad_bias = None
        elif grad_table is not None:
            grad_table = grad_table.to(table.dtype)
        ctx.added = copies is not None
        ctx.save_for_backward(grad_hidden, grad_table, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if ctx.added and grad != 1:
            raise ValueError("gradients were added already: only the loss itself goes backward")
        found = [None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors]
        return (*found, None, None, None, None, None)


def _gradient(weight: Tensor, copies: Copies | None) -> Tensor:
    """Where the gradient of a weight is added up."""
    if copies is None:
        return torch.zeros_like(weight, dtype=torch.float32)
    return gradient_of(weight)


def _logits(rows: Tensor, own: Tensor, bias: Tensor | None, copies: Copies | None) -> Tensor:
    """Logits (N, V) in fp32, in memory that may be written to."""
    if copies is None or own.dtype == torch.float32:
        logits = product(rows, own.T).float()
    else:
        shape = len(rows), len(own)
        low = copies.scratch("low", shape, own.dtype)
        logits = copies.scratch("logits", shape, torch.float32)
        logits.copy_(torch.mm(rows, own.T, out=low))
    return logits if bias is None else logits.add_(bias.float())


def _back(
    slope: Tensor, own: Tensor, dtype: torch.dtype, copies: Copies | None
) -> tuple[Tensor, Tensor]:
    """The gradient of the hidden states, and `slope` in the dtype of the products."""
    if copies is None or own.dtype == torch.float32:
        low = slope.to(own.dtype)
    else:
        low = copies.scratch("low", slope.shape, own.dtype).copy_(slope)
    return product(low, own).to(dtype), low


def _add_outer(grad: Tensor, slope: Tensor, rows: Tensor, copies: Copies | None) -> None:
    """Add the gradient of the table."""
    if slope.dtype == torch.float32:
        grad.addmm_(slope.T, rows)
    elif copies is None:
        grad += slope.T @ rows
    else:
        grad += torch.mm(slope.T, rows, out=copies.scratch("table", grad.shape, slope.dtype))
