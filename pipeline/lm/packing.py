"""Texts as training examples, packed into rows without cross-attention and almost without padding.

Several short examples share a row. Position ids start again at 0 with each of them, which is how
transformers (with no mask and no cache) knows that they must not see each other. Padding at the
end of a row has position 0 throughout, so each padded token is an example of its own that nobody
sees and that carries no weight. A model that does not keep them apart gets one example per row.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.calls import CallSyntax
from pipeline.lm.tokens import CALL, RESULT, TEXT, PlacedCall, augmented_ids, context_token

_WIDTHS = (256, 320, 384, 448, 512, 640, 768)  # row widths that are tried
# Attention adds to the cost of a token in proportion to the row's width (it is masked, not
# skipped): as much as everything else at this width, measured on a 135M model on a CPU.
_ATTENTION_WIDTH = 2700


@dataclass(frozen=True)
class Example:
    """Tokens of one training example; `weights[j]` is the weight of the loss on `ids[j]`."""

    ids: list[int]
    weights: list[float]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Packed:
    """A micro-batch. All tensors are (B, L); `weights` 0 = the next token is no target."""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    tokens: int  # without padding


def make_examples(
    tokenizer: Any,
    text: str,
    calls: Sequence[PlacedCall],
    syntax: CallSyntax,
    *,
    max_length: int,
    call_weight: float = 1.0,
    mask_results: bool = False,
) -> list[Example]:
    """Turn a text with its calls into examples of at most `max_length` tokens.

    Each starts with the context token (BOS, else EOS); the text ends with EOS. A longer text is
    cut between tokens, never inside a call. `mask_results` takes the loss off what the tool wrote.
    """
    ids, kinds = augmented_ids(tokenizer, text, calls, syntax)
    if tokenizer.eos_token_id is not None:
        ids, kinds = [*ids, tokenizer.eos_token_id], [*kinds, TEXT]
    weight_of = {TEXT: 1.0, CALL: call_weight, RESULT: 0.0 if mask_results else 1.0}
    context = context_token(tokenizer)
    head = [] if context is None else [context]
    examples = []
    for start, end in _cuts(kinds, max_length - len(head)):
        weights = [0.0] * len(head) + [weight_of[kind] for kind in kinds[start:end]]
        weights[0] = 0.0  # nothing stands before the first token
        examples.append(Example(head + ids[start:end], weights))
    return [example for example in examples if any(example.weights)]


def _cuts(kinds: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Borders of pieces of at most `room` tokens that keep a call in one piece where it fits."""
    if room < 1:
        raise ValueError("`finetune.max_length` must leave room for at least one token of text")
    start = 0
    while start < len(kinds):
        end = min(start + room, len(kinds))
        if end < len(kinds):
            border = end
            while border > start and kinds[border] != TEXT and not _opens(kinds, border):
                border -= 1
            end = border if border > start else end
        yield start, end
        start = end


def _opens(kinds: Sequence[int], index: int) -> bool:
    return kinds[index] == CALL and kinds[index - 1] != CALL


def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    """The order of the texts in one epoch; depends on nothing but these numbers."""
    return [int(i) for i in np.random.default_rng([seed, epoch]).permutation(size)]


def fill_rows(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Spread examples over rows of at most `limit` tokens, equally full; returns indices.

    Of several row widths the cheapest is taken: padded cells times what attention adds. A row is
    longer than the limit only where a single example is.
    """
    total, limit = sum(lengths), max(limit, *lengths)

    def cost(rows: list[list[int]]) -> float:
        width = max(_used(lengths, row) for row in rows)
        return math.inf if width > limit else len(rows) * width * (1 + width / _ATTENTION_WIDTH)

    tried = [_spread(lengths, -(-total // width)) for width in _WIDTHS]
    best = min(tried, key=cost)
    count = len(best)
    while cost(best) == math.inf:
        count += 1
        best = _spread(lengths, count)
    return best


def _spread(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Longest first, each into the emptiest of `count` rows."""
    rows: list[list[int]] = [[] for _ in range(min(count, len(lengths)))]
    emptiest = [(0, row) for row in range(len(rows))]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        used, row = heapq.heappop(emptiest)
        rows[row].append(index)
        heapq.heappush(emptiest, (used + lengths[index], row))
    return rows


def _used(lengths: Sequence[int], row: Sequence[int]) -> int:
    return sum(lengths[i] for i in row)


def pack(examples: Sequence[Example], token_budget: int, share_rows: bool = True) -> list[Packed]:
    """Pack examples into micro-batches of at most `token_budget` tokens (one row at least).

    Without `share_rows` every example has a row of its own, those of similar length together.
    """
    if not examples:
        return []
    lengths = [len(example) for example in examples]
    filled = fill_rows(lengths, token_budget) if share_rows else [[i] for i in range(len(lengths))]
    rows = sorted(filled, key=lambda row: -_used(lengths, row))
    count = -(-len(rows) // max(token_budget // _used(lengths, rows[0]), 1))
    cuts = [len(rows) * i // count for i in range(count + 1)]
    return [
        _stack([[examples[i] for i in row] for row in rows[start:end]])
        for start, end in itertools.pairwise(cuts)
    ]


def _stack(rows: Sequence[Sequence[Example]]) -> Packed:
    width = max(sum(len(example) for example in row) for row in rows)
    shape = (len(rows), width)
    ids, positions, targets = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    weights = np.zeros(shape, dtype=np.float32)
    tokens = 0
    for r, row in enumerate(rows):
        start = 0
        for example in row:
            end = start + len(example)
            ids[r, start:end] = example.ids
            positions[r, start:end] = np.arange(len(example))
            targets[r, start : end - 1] = example.ids[1:]
            weights[r, start : end - 1] = example.weights[1:]
            start = end
        tokens += start
    return Packed(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(targets),
        torch.from_numpy(weights),
        tokens,
    )
