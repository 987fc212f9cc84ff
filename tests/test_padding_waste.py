"""Batches for scoring: little padding, and the same losses whatever the batches."""

from __future__ import annotations

import random

import pytest
import tiny

from pipeline.lm import forward, loss
from pipeline.lm.forward import Budget, by_budget
from pipeline.lm.loss import LossRequest, loss_weights, losses


def padding(lengths: list[int], batches: list[list[int]]) -> float:
    cells = sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)
    return 1 - sum(lengths) / cells


def test_little_padding_and_every_row_once() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(20, 200) for _ in range(200)]
    batches = by_budget(lengths, 4096, 0.05)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    assert all(max(lengths[i] for i in batch) * len(batch) <= 4096 for batch in batches)
    assert padding(lengths, batches) < 0.05
    assert all(sum(lengths[i] for i in batch) > 400 for batch in batches[:-1])  # not row by row
    # the padding of a single large batch is what this is about
    assert padding(lengths[:30], by_budget(lengths[:30], 100_000)) > 0.3


def test_without_a_limit_the_batches_are_as_large_as_the_budget() -> None:
    assert by_budget([600, 10, 10], 4096) == [[0, 1, 2]]
    assert by_budget([600, 10, 10], 4096, 0.1) == [[0], [1, 2]]


def test_losses_do_not_depend_on_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.make_lm("llama", "bytes")
    draw = random.Random(1)
    requests = [
        LossRequest([0, 5], [draw.randrange(5, 400) for _ in range(40)], [draw.randrange(35)])
        for _ in range(12)
    ]
    found = []
    for waste in (1.0, 0.0):
        monkeypatch.setattr(loss, "_WASTE", waste)
        monkeypatch.setattr(forward, "ENOUGH", 60)
        found.append(losses(lm, requests, loss_weights(), budget=Budget(600)))
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
