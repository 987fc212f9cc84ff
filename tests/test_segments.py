"""Attention within packed examples: the same losses and gradients as with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from pipeline.lm import segments
from pipeline.lm.packing import Example, pack
from pipeline.lm.segments import attending_within, fits, segment_lengths
from pipeline.lm.training import PackedLoss


def examples(vocabulary: int) -> list[Example]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for length in (12, 1, 7, 30, 2, 19):
        ids = torch.randint(5, vocabulary, (length,), generator=generator).tolist()
        found.append(Example(ids, [0.0, *[1.0] * (length - 1)]))
    return found


def loss_and_gradients(model: Any, tokenizer: Any, budget: int, within: bool) -> dict[str, Any]:
    loss_of = PackedLoss(model, tokenizer, None)
    assert loss_of.segments
    loss_of.segments = within
    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for batch in pack(examples(len(tokenizer)), budget):
        loss = loss_of(batch.ids, batch.positions, batch.targets, batch.weights)
        loss.backward()
        total += loss.detach()
    return {"loss": total} | {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("shape", "kind"), tiny.PAIRS)
@pytest.mark.parametrize("budget", [24, 40, 4096])
def test_same_loss_and_gradients_as_with_a_mask(shape: str, kind: str, budget: int) -> None:
    tokenizer = tiny.make_tokenizer(kind)
    model = tiny.make_model(shape, tokenizer)  # in eval mode: no dropout
    wanted = loss_and_gradients(model, tokenizer, budget, within=False)
    found = loss_and_gradients(model, tokenizer, budget, within=True)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=2e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_examples_together_attend_as_each_alone(scale: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = (5, 9, 1, 7)
    parts = [[torch.randn(n, 2, 8, generator=generator) for n in lengths] for _ in range(3)]
    for part in parts:
        for x in part:
            x.requires_grad_()

    def outcome(way: Any) -> list[torch.Tensor]:
        out = list(way(parts, 0.0, scale))
        inputs = [x for part in parts for x in part]
        loss = sum(own.square().sum() for own in out)
        return [*out, *torch.autograd.grad(loss, inputs)]

    together, each = outcome(segments._together), outcome(segments._each)
    for found, wanted in zip(together, each, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_long_or_unlike_examples_get_a_call_each() -> None:
    assert segments._alike([[80, 100], [90, 70, 3]])
    assert not segments._alike([[100, 5, 5, 5, 5]])
    assert not segments._alike([[300, 300]])


def test_lengths_of_segments() -> None:
    rows = torch.tensor(
        [
            [0, 1, 2, 0, 1, 0, 0],  # padding at the end is one segment
            [0, 0, 1, 2, 3, 4, 5],  # one token alone, then an example
            [0, 1, 0, 0, 0, 1, 2],  # two alone in the middle
        ]
    )
    assert segment_lengths(rows) == [[3, 2, 2], [1, 6], [2, 2, 3]]


def test_other_attention_is_left_alone_afterwards() -> None:
    model = tiny.make_model("llama", tiny.make_tokenizer("bytes"))
    before = model.config._attn_implementation
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        attending_within(model, torch.tensor([[0, 1]])),
    ):
        raise RuntimeError("on purpose")
    assert model.config._attn_implementation == before


def test_a_window_is_found_out() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
        sliding_window=2,
    )
    assert not fits(MistralForCausalLM(config))


def test_checkpointed_layers_take_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny.make_tokenizer("bytes")
    model = tiny.make_model("llama", tokenizer)
    plain = loss_and_gradients(model, tokenizer, 40, within=True)
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()
    found = loss_and_gradients(model, tokenizer, 40, within=True)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, atol=2e-4, rtol=1e-4, msg=name)
