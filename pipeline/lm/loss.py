"""The weighted loss of the filter (method, section 4; paper, section 2 and appendix A).

    L_i(z) = - sum_{j>=i} w_{j-i} * log p(x_j | z, x_1..x_{j-1})        natural log

`z` is prepended to the whole text. Only the tokens i..i+horizon-1 carry weight, so a pass stops
there and only those positions get logits. Calls that prepend the same `z` share one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipeline.lm.forward import Budget, LanguageModel, on_device, right_padded

Tail = Literal["fixed", "renormalise"]
_WASTE = 0.05  # share of padding in a batch on a CPU: passes end at token i+4, so lengths differ


def loss_weights(horizon: int = 5) -> Tensor:
    """Weights w_t = w~_t / sum(w~), w~_t = max(0, 1 - t/horizon); shape (horizon,), float64.

    For the paper's horizon 5: .3333 .2667 .2 .1333 .0667.
    """
    raw = torch.clamp(1.0 - torch.arange(horizon, dtype=torch.float64) / horizon, min=0.0)
    return raw / raw.sum()


def weighted_loss(logprobs: Tensor, weights: Tensor, tail: Tail = "fixed") -> float:
    """Weighted loss of up to `horizon` token log-probabilities (n,), in nats.

    Fewer tokens (the end of a text) keep the full denominator unless `tail` is `renormalise`.
    """
    own = weights[: len(logprobs)]
    loss = -(own * logprobs.double()).sum()
    return float(loss / own.sum()) if tail == "renormalise" else float(loss)


@dataclass(frozen=True)
class LossRequest:
    """Ask for L_i(z) at several positions i of one text: `prefix` is context token + ids(z)."""

    prefix: Sequence[int]
    text: Sequence[int]
    positions: Sequence[int]


@torch.inference_mode()
def losses(
    lm: LanguageModel,
    requests: Sequence[LossRequest],
    weights: Tensor,
    tail: Tail = "fixed",
    budget: Budget | None = None,
    on_done: Callable[[int], object] = lambda n: None,
) -> list[list[float]]:
    """Return the losses of each request at its positions, in nats.

    The value does not depend on how requests are batched (fp32: 1e-4). Raises ValueError for a
    position 0 without any context before it.
    """
    horizon = len(weights)
    found: list[list[float]] = [[] for _ in requests]
    lengths = []
    for request in requests:
        if not request.prefix and 0 in request.positions:
            raise ValueError("position 0 needs a context token before it")
        end = min(max(request.positions) + horizon, len(request.text))
        lengths.append(len(request.prefix) + end)

    def work(batch: list[int]) -> None:
        rows = [[*requests[i].prefix, *requests[i].text][: lengths[i]] for i in batch]
        hidden_BLD = lm.hidden(right_padded(rows, lm.device))
        places, targets, owners = [], [], []
        for row, index in enumerate(batch):
            offset = len(requests[index].prefix)
            for i in sorted(_covered(requests[index].positions, horizon, lengths[index] - offset)):
                places.append((row, offset + i - 1))
                targets.append(rows[row][offset + i])
                owners.append((index, i))
        row_N, col_N = on_device(torch.tensor(places).T, lm.device)
        target_N = on_device(torch.tensor(targets), lm.device)
        logprobs = lm.token_logprobs(hidden_BLD[row_N, col_N], target_N).tolist()
        value = dict(zip(owners, logprobs, strict=True))
        for index in batch:
            end = lengths[index] - len(requests[index].prefix)
            for i in requests[index].positions:
                tokens = [value[index, j] for j in range(i, min(i + horizon, end))]
                own = torch.tensor(tokens, dtype=torch.float64)
                found[index].append(weighted_loss(own, weights, tail))
            on_done(1)

    (budget or Budget(4096)).run(lengths, work, _waste(lm))
    return found


def _waste(lm: LanguageModel) -> float:
    """The share of padding to allow; on other devices a large batch is worth more."""
    return _WASTE if lm.device.type == "cpu" else 1.0


def _covered(positions: Sequence[int], horizon: int, end: int) -> set[int]:
    """The text positions whose tokens carry weight for any of the asked positions."""
    return {j for i in positions for j in range(i, min(i + horizon, end))}


@torch.inference_mode()
def plain_losses(
    lm: LanguageModel,
    context: int | None,
    texts: Sequence[Sequence[int]],
    weights: Tensor,
    tail: Tail = "fixed",
    budget: Budget | None = None,
) -> list[Tensor]:
    """Return L_i(eps) for every position of every text, one pass each; float64 (T,), in nats.

    Position 0 is infinite when there is no context token. Shared by all tools and positions.
    """
    prefix = [] if context is None else [context]
    rows = [[*prefix, *text] for text in texts]
    found: list[Tensor] = [torch.empty(0)] * len(texts)

    def work(batch: list[int]) -> None:
        ids_BL = right_padded([rows[i] for i in batch], lm.device)
        hidden_BLD = lm.hidden(ids_BL)
        counts = [len(rows[i]) - 1 for i in batch]
        parts = [
            lm.token_logprobs(hidden_BLD[row, :count], ids_BL[row, 1 : count + 1])
            for row, count in enumerate(counts)
        ]
        together = torch.cat(parts).double().cpu()  # a GPU is waited for once
        for index, logprobs in zip(batch, together.split(counts), strict=True):
            if context is None:
                logprobs = torch.cat([torch.tensor([-torch.inf], dtype=torch.float64), logprobs])
            found[index] = windowed_loss(logprobs, weights, tail)

    (budget or Budget(4096)).run([len(row) for row in rows], work, _waste(lm))
    return found


def windowed_loss(logprobs: Tensor, weights: Tensor, tail: Tail = "fixed") -> Tensor:
    """Weighted loss at every position of a text from its token log-probabilities (T,) -> (T,)."""
    horizon, length = len(weights), len(logprobs)
    padded = torch.cat([-logprobs, torch.zeros(horizon - 1, dtype=logprobs.dtype)])
    loss = (padded.unfold(0, horizon, 1) * weights).sum(1)
    if tail == "renormalise":
        present = torch.cat([torch.ones(length), torch.zeros(horizon - 1)]).double()
        loss = loss / (present.unfold(0, horizon, 1) * weights).sum(1)
    return loss
