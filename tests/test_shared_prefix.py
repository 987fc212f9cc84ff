"""Attention over grouped keys: as they are, or repeated for the query heads as on CUDA."""

from __future__ import annotations

import pytest
import torch

from pipeline.lm.shared_prefix import _for_heads, attend


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("before", [None, 0, 5])
def test_repeated_keys_and_no_mask_change_nothing(heads: int, before: int | None) -> None:
    torch.manual_seed(0)
    rows, kinds, length, depth = 3, 2, 7, 8
    q = torch.randn(rows, heads, length, depth)
    k, v = torch.randn(2, rows, kinds, length + (before or 0), depth)
    seen = torch.ones(length, k.shape[2], dtype=torch.bool).tril(before or 0)
    mask = None if before is None else seen
    as_they_are = attend(q, k, v, mask, 0.3)
    repeated = attend(q, _for_heads(k, heads), _for_heads(v, heads), mask, 0.3)
    torch.testing.assert_close(repeated, as_they_are)
    for head in range(heads):  # by the definition
        own = head // (heads // kinds)
        scores = q[:, head] @ k[:, own].mT * 0.3
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        torch.testing.assert_close(as_they_are[:, head], weights @ v[:, own])
