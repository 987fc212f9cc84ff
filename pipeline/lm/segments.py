"""Attention within the examples of a packed row, one after the other, without a mask.

A mask that keeps packed examples apart still pays for every pair of tokens in the row. On a CPU
each example gets a causal call of its own instead, which gives the same result (fp32: 1e-5) for the
pairs that count alone. On a GPU many small calls cost more than they save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "callsieve_segments"
# Under autocast, examples up to this length that waste no more than this factor in padding are
# multiplied together: a third of the flash kernel's time, most of which is in the backward pass.
SHORT = 256
MUCH_PADDING = 2.0
_NOT_PLAIN = ("sliding_window", "softcap", "s_aux")

_active: list[list[list[int]]] = []


class Unsupported(RuntimeError):
    """The model's attention is more than plain causal attention."""


def segment_lengths(positions_BL: Tensor) -> list[list[int]]:
    """Lengths of the examples in every row, from position ids that start again at 0.

    A run of examples of one token counts as one: they are padding, or no target of any loss.
    """
    found = []
    for row in positions_BL.tolist():
        single = [p == 0 and (row[i + 1 : i + 2] or [0])[0] == 0 for i, p in enumerate(row)]
        starts = [
            i for i, p in enumerate(row) if p == 0 and not (i and single[i] and single[i - 1])
        ]
        found.append([b - a for a, b in zip(starts, [*starts[1:], len(row)], strict=True)])
    return found


@contextmanager
def attending_within(model: Any, positions_BL: Tensor) -> Iterator[None]:
    """Let the model attend within the examples of its rows (give it no mask)."""
    before = model.config._attn_implementation
    model.config._attn_implementation = _NAME
    _active.append(segment_lengths(positions_BL))
    try:
        yield
    finally:
        _active.pop()
        model.config._attn_implementation = before


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    if any(options.get(name) is not None for name in _NOT_PLAIN):
        raise Unsupported(f"{type(module).__name__} uses more than plain causal attention")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # the fast kernel wants as many keys as queries
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    lengths = _active[-1]
    low = torch.is_autocast_enabled("cpu") and _alike(lengths)
    # in the flash kernel of a CPU, bf16 takes three times as long as fp32
    dtype = torch.get_autocast_dtype("cpu") if low else torch.float32
    parts = [_split(x.to(dtype), lengths) for x in (query, key, value)]
    dropout, scale = options.get("dropout") or 0.0, options.get("scaling")
    done = _together(parts, dropout, scale) if low else _each(parts, dropout, scale)
    rows = []
    for own in lengths:
        rows.append(torch.cat([next(done) for _ in own]))
    return torch.stack(rows).to(query.dtype), None


def _split(x_BHLD: Tensor, lengths: Sequence[Sequence[int]]) -> list[Tensor]:
    """The examples of all rows, (T, H, D) each."""
    # split, and not slices: their gradients are joined without a copy per example
    rows = zip(x_BHLD.transpose(1, 2), lengths, strict=True)
    return [part for row, own in rows for part in row.split(list(own))]


def _alike(lengths: Sequence[Sequence[int]]) -> bool:
    """Whether the examples are short and of about one length."""
    every = [length for own in lengths for length in own]
    longest = max(every)
    return longest <= SHORT and longest**2 * len(every) < MUCH_PADDING * sum(n**2 for n in every)


def _together(parts: list[list[Tensor]], dropout: float, scale: float | None) -> Iterator[Tensor]:
    """All examples padded on the right, where nobody looks, with every score in memory."""
    query, key, value = (
        pad_sequence(own, batch_first=True).transpose(1, 2).contiguous() for own in parts
    )
    size = query.shape[2]
    future = torch.ones(size, size, dtype=torch.bool).triu(1)
    scores = (query @ key.mT).float() * (scale or query.shape[-1] ** -0.5)
    shares = scores.masked_fill_(future, -torch.inf).softmax(-1)
    out = functional.dropout(shares, dropout).to(value.dtype) @ value
    for row, example in zip(out.transpose(1, 2), parts[0], strict=True):
        yield row[: len(example)]


def _each(parts: list[list[Tensor]], dropout: float, scale: float | None) -> Iterator[Tensor]:
    """A call of the flash kernel for each example."""
    for qkv in zip(*parts, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        yield functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scale
        )[0].transpose(0, 1)


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)


@torch.no_grad()
def fits(model: Any) -> bool:
    """Try two packed examples against the model's own way of keeping them apart."""
    device = model.device
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]], device=device) % model.config.vocab_size
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=device)
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    training = model.training
    model.eval()
    try:
        want = model.base_model(**inputs).last_hidden_state
        with attending_within(model, positions):
            got = model.base_model(**inputs).last_hidden_state
    except (Unsupported, AttributeError, TypeError, RuntimeError):
        return False
    finally:
        model.train(training)
    return torch.allclose(got, want, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def keeps_apart(model: Any) -> bool:
    """Whether the model keeps the examples of a row apart that begin at position 0 again.

    Models whose state is not keys do not, nor those that count distances and not positions.
    """
    device = model.device
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]], device=device) % model.config.vocab_size
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=device)
    training = model.training
    model.eval()
    try:
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        got = model.base_model(**inputs).last_hidden_state[:, 3:]
        want = model.base_model(input_ids=ids[:, 3:], use_cache=False).last_hidden_state
    except (TypeError, ValueError, RuntimeError):
        return False
    finally:
        model.train(training)
    atol = 1e-3 if model.dtype == torch.float32 else 5e-2
    return torch.allclose(got, want, atol=atol, rtol=1e-3)
