"""Packed weights: the results of plain ones, also when the weights have changed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny
import torch

from pipeline.lm import packed_weights
from pipeline.lm.packed_weights import packed

IDS = torch.arange(5, 29).view(2, 12)

pytestmark = pytest.mark.skipif(
    not packed_weights._available(), reason="this torch has no packed weights"
)


@pytest.fixture(params=["llama", "neox"])
def model(request: Any) -> Any:
    return tiny.make_model(request.param, tiny.make_tokenizer("bytes"))


@torch.inference_mode()
def logits(model: Any, pack: bool = True) -> torch.Tensor:
    if not pack:
        return model(IDS).logits
    with packed(model):
        return model(IDS).logits


def replaced(model: Any) -> list[Any]:
    return [m for m in model.modules() if "forward" in m.__dict__]


def test_the_same_results_and_an_unchanged_model(model: Any) -> None:
    with torch.inference_mode(), packed(model):
        assert len(replaced(model)) >= 9
        found = model(IDS).logits
    assert not replaced(model)
    assert torch.allclose(found, logits(model, pack=False), atol=1e-5)


def test_weights_that_have_changed_are_packed_again(model: Any) -> None:
    layer = next(m for m in reversed(list(model.modules())) if type(m) is torch.nn.Linear)
    found = [logits(model)]
    other = torch.nn.Parameter(layer.weight.detach() * 1.5)
    with torch.no_grad():
        while other._version < layer.weight._version:
            other.mul_(1)
    layer.weight = other
    found.append(logits(model))
    assert torch.allclose(found[-1], logits(model, pack=False), atol=1e-5)
    with torch.no_grad():
        layer.weight.mul_(1.5)
    found.append(logits(model))
    assert torch.allclose(found[-1], logits(model, pack=False), atol=1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    found.append(logits(model))
    assert torch.allclose(found[-1], logits(model, pack=False), atol=1e-5)
    for one, other in itertools.pairwise(found):
        assert not torch.allclose(one, other, atol=1e-3)


def test_not_where_it_cannot_be(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with packed(model):  # gradients are recorded
        assert not replaced(model)
    with torch.inference_mode(), packed(model.bfloat16()):
        assert not replaced(model)
    monkeypatch.setattr(packed_weights, "LIMIT_BYTES", 1000)
    with torch.inference_mode(), packed(model.float()):
        assert not replaced(model)
