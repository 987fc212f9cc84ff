"""Rows without any cache, for models whose state is not keys: every step computes them whole.

Works with whatever reads tokens from left to right, and costs accordingly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.lm.forward import LanguageModel, right_padded


class PlainSlots:
    """The tokens of up to `count` rows; `SlotCache` says what the methods do."""

    def __init__(self, lm: LanguageModel, count: int) -> None:
        self.lm, self.count = lm, count
        self.start = 0  # nothing is shared
        self.rows: list[list[int]] = []

    @property
    def lengths(self) -> list[int]:
        """Tokens per row in use."""
        return [len(row) for row in self.rows]

    def prefill(self, rows: Sequence[Sequence[int]], known: Any = None) -> Tensor:
        """Add rows and return fp32 logits (n, V) for their next token; none is `known` in part."""
        first = len(self.rows)
        self.rows += [list(row) for row in rows]
        return self._logits(self.rows[first:])

    def step(self, tokens: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """Add one token to every row; returns fp32 logits of the `wanted` rows."""
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(token)
        if not wanted:
            return torch.empty(0, 0, device=self.lm.device)
        return self._logits([self.rows[row] for row in wanted])

    def cut(self, row: int, length: int) -> None:
        """Forget all but the first `length` tokens of a row."""
        assert length <= len(self.rows[row])
        del self.rows[row][length:]

    def remove(self, row: int) -> None:
        """Free a row; the last one takes its place."""
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        hidden = self.lm.hidden(right_padded(rows, self.lm.device))
        return self.lm.logits(torch.stack([hidden[i, len(row) - 1] for i, row in enumerate(rows)]))
