"""Cross-entropy of an output layer without the logits of the whole batch in memory.

Loss and gradients are made together, chunk by chunk, in the forward pass: the logits of a chunk
are computed once and thrown away, so the backward pass only multiplies by the incoming gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
) -> Tensor:
    """Weighted sum of -log p(target) in nats, a fp32 scalar.

    Products run in `dtype`; softmax and sums run in fp32.
    """
    with torch.autocast(hidden_ND.device.type, enabled=False):
        loss: Tensor = _CrossEntropy.apply(
            hidden_ND, table_VD, bias_V, targets_N, weights_N, dtype, torch.is_grad_enabled()
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
    ) -> Tensor:
        own = table.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needed else None
        grad_table = torch.zeros_like(table, dtype=torch.float32) if needed else None
        grad_bias = (
            torch.zeros_like(bias, dtype=torch.float32) if needed and bias is not None else None
        )
        room = CUDA_CHUNK_LOGITS if hidden.is_cuda else CHUNK_LOGITS
        chunk = max(room // table.shape[0], 1)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            rows = hidden[part].to(dtype)
            logits = (rows @ own.T).float()
            if bias is not None:
                logits += bias.float()
            total = torch.logsumexp(logits, dim=-1, keepdim=True)
            target, weight = targets[part, None], weights[part, None].float()
            loss += ((total - logits.gather(1, target)) * weight).sum()
            if grad_hidden is None or grad_table is None:
                continue
            slope = logits.sub_(total).exp_()  # d loss / d logits = (p - onehot) * weight
            slope.scatter_add_(1, target, torch.full_like(target, -1, dtype=slope.dtype))
            slope *= weight
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(dtype)
            grad_hidden[part] = (slope @ own).to(hidden.dtype)
            if dtype == torch.float32:
                grad_table.addmm_(slope.T, rows)
            else:
                grad_table += slope.T @ rows
        if grad_table is not None:
            grad_table = grad_table.to(table.dtype)
        ctx.save_for_backward(grad_hidden, grad_table, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        found = [None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors]
        return (*found, None, None, None, None)
