"""Texts as training examples, packed into rows without cross-attention and almost without padding.

Several short examples share a row. Position ids start again at 0 with each of them, which is how
transformers (with no mask and no cache) knows that they must not see each other. Padding at the
end of a row has position 0 throughout, so each padded token is an example of its own that nobody
sees and that carries no weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.calls import CallSyntax
from pipeline.lm.tokens import CALL, RESULT, TEXT, PlacedCall, augmented_ids, context_token

# Rows much longer than the examples only add masked attention; much shorter ones add padding.
ROW_TOKENS = 512


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

    def to(self, device: torch.device) -> Packed:
        return Packed(
            self.ids.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.weights.to(device, non_blocking=True),
            self.tokens,
        )


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


def fill_rows(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Put examples into rows of `width` tokens (first fit, longest first); returns indices."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = (row for row, left in enumerate(room) if left >= lengths[index])
        row = next(fitting, None)
        if row is None:
            rows.append([])
            room.append(width)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def pack(examples: Sequence[Example], token_budget: int) -> list[Packed]:
    """Pack examples into micro-batches of at most `token_budget` tokens (one row at least)."""
    if not examples:
        return []
    longest = max(len(example) for example in examples)
    width = max(longest, min(ROW_TOKENS, token_budget))
    rows = [[examples[i] for i in row] for row in fill_rows([len(e) for e in examples], width)]
    per_batch = max(token_budget // width, 1)
    return [_stack(rows[i : i + per_batch]) for i in range(0, len(rows), per_batch)]


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
