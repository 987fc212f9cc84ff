"""Gradients added in place: those of autograd, in memory that stays."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import nn

from pipeline.lm.cross_entropy import cross_entropy
from pipeline.lm.direct_gradients import direct_gradients
from pipeline.lm.packed_weights import product
from pipeline.lm.packing import Example, Packed, pack
from pipeline.lm.training import PackedLoss


def micro_batch(vocabulary: int) -> Packed:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(5, vocabulary, (n,), generator=generator).tolist() for n in (12, 30, 19)]
    (batch,) = pack([Example(own, [0.0, *[0.02] * (len(own) - 1)]) for own in ids], 4096)
    return batch


def gradients(
    model: Any, tokenizer: Any, batch: Packed, direct: bool, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The loss and all gradients of one pass; None, where nothing arrived, is left out."""
    model.zero_grad(set_to_none=True)
    loss_of = PackedLoss(model, tokenizer, dtype)
    inputs = (batch.ids, batch.positions, batch.targets, batch.weights)
    if direct:
        with direct_gradients(model, dtype or torch.float32) as loss_of.copies:
            loss = loss_of(*inputs)
            loss.backward()
    else:
        loss = loss_of(*inputs)
        loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | found


@pytest.mark.parametrize(("shape", "kind"), tiny.PAIRS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradients_are_those_of_autograd(shape: str, kind: str, checkpointing: bool) -> None:
    tokenizer = tiny.make_tokenizer(kind)
    model = tiny.make_model(shape, tokenizer)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    batch = micro_batch(len(tokenizer))
    wanted = gradients(model, tokenizer, batch, direct=False)
    found = gradients(model, tokenizer, batch, direct=True)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("shape", "kind"), tiny.PAIRS)
def test_low_precision_is_as_near_as_under_autocast(shape: str, kind: str) -> None:
    tokenizer = tiny.make_tokenizer(kind)
    model = tiny.make_model(shape, tokenizer)
    batch = micro_batch(len(tokenizer))
    exact = gradients(model, tokenizer, batch, direct=False)
    autocast = gradients(model, tokenizer, batch, direct=False, dtype=torch.bfloat16)
    found = gradients(model, tokenizer, batch, direct=True, dtype=torch.bfloat16)
    for name, value in exact.items():
        error = (autocast[name] - value).norm() + 1e-3 * value.norm() + 1e-6
        assert (found[name] - value).norm() < 1.5 * error, name


def test_gradients_of_several_passes_add_up_in_one_place() -> None:
    tokenizer = tiny.make_tokenizer("bytes")
    model = tiny.make_model("llama", tokenizer)
    batch = micro_batch(len(tokenizer))
    loss_of = PackedLoss(model, tokenizer, None)
    sums = []
    with direct_gradients(model, torch.float32) as loss_of.copies:
        for _ in range(2):
            loss_of(batch.ids, batch.positions, batch.targets, batch.weights).backward()
            sums.append({n: (p.grad.data_ptr(), p.grad.clone()) for n, p in named(model)})
    for name, (place, once) in sums[0].items():
        again, twice = sums[1][name]
        assert again == place, name
        torch.testing.assert_close(twice, 2 * once, atol=2e-6, rtol=1e-4, msg=name)


def named(model: Any) -> list[tuple[str, Any]]:
    """The weights whose gradients are added directly."""
    return [(n, p) for n, p in model.named_parameters() if p.dim() == 2]


def test_copies_follow_the_weights_when_told() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with direct_gradients(nn.Linear(4, 4), torch.bfloat16) as copies:
        copy = copies.of(weight)
        with torch.no_grad():
            weight *= 3
        copies.written()
        assert copies.of(weight).data_ptr() == copy.data_ptr()
        assert copies.of(weight).dtype == torch.bfloat16
        assert (copies.of(weight) == 3).all()


def test_frozen_weights_and_padding_get_nothing() -> None:
    layers = nn.Sequential(nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 3), nn.Linear(3, 2))
    layers[1].requires_grad_(False)
    ids = torch.tensor([[1, 2, 3, 1]])
    layers(ids).square().sum().backward()
    wanted = [None if p.grad is None else p.grad.clone() for p in layers.parameters()]
    layers.zero_grad(set_to_none=True)
    with direct_gradients(layers, torch.float32):
        layers(ids).square().sum().backward()
    assert wanted[1] is None
    for parameter, value in zip(layers.parameters(), wanted, strict=True):
        if value is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, value)


def test_only_the_loss_itself_goes_backward() -> None:
    table = nn.Parameter(torch.randn(9, 4))
    hidden = torch.randn(3, 4, requires_grad=True)
    targets, weights = torch.tensor([1, 2, 3]), torch.ones(3)
    with direct_gradients(nn.Linear(4, 4), torch.float32) as copies:
        loss = cross_entropy(hidden, table, None, targets, weights, torch.float32, copies)
        with pytest.raises(ValueError, match="only the loss itself"):
            (loss / 2).backward()


def test_the_layers_are_left_as_they_were() -> None:
    model = tiny.make_model("llama", tiny.make_tokenizer("bytes"))
    with pytest.raises(RuntimeError, match="on purpose"), direct_gradients(model, torch.float32):
        assert any("forward" in vars(module) for module in model.modules())
        raise RuntimeError("on purpose")
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_of_views(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(40, n, generator=generator).to(dtype) for n in (24, 72))
    wide, long = torch.randn(24, 40, generator=generator).to(dtype), a.new_zeros(0, 40)
    pairs = ((a.T, b), (wide, b), (a, wide), (b.T, wide.T), (a[::2], wide[:, ::2]), (long, b))
    for left, right in pairs:
        wanted = left.double() @ right.double()
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(product(left, right).double(), wanted, atol=tolerance, rtol=1e-2)
