"""A key/value cache with one slot per row: rows of any length decode together, join and leave.

Column j of a slot holds the keys of the row's token j, so a row is cut back by forgetting its last
columns and nothing moves when another row comes or goes. Rows in use are always the first ones.
For causal models of transformers whose layers call `cache.update` with full attention, found by
trial; most of them can take `shared_slots` instead, which computes less, the others `plain_slots`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from pipeline.lm.forward import LanguageModel, on_device, right_padded
from pipeline.lm.packed_weights import packed

log = logging.getLogger(__name__)
Keys = list[tuple[Tensor, Tensor]]  # per layer: keys and values (n, H, L, D)


class _SlotLayer(DynamicLayer):
    """Keys and values of one layer (slots, H, columns, D); a step writes one column per row."""

    def __init__(self, slots: SlotCache) -> None:
        super().__init__()
        self.slots = slots
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def room(self, like: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Stores with at least so many columns, grown by doubling."""
        if self.k is None or self.v is None:
            shape = (self.slots.count, like.shape[1], columns, like.shape[3])
            self.k, self.v = like.new_zeros(shape), like.new_zeros(shape)
        elif self.k.shape[2] < columns:
            more = (*self.k.shape[:2], max(columns, 2 * self.k.shape[2]) - self.k.shape[2])
            extra = self.k.new_zeros(*more, self.k.shape[3])
            self.k, self.v = torch.cat([self.k, extra], 2), torch.cat([self.v, extra], 2)
        return self.k, self.v

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows, width = key_states.shape[0], self.slots.width
        k, v = self.room(key_states, width)
        k[self.slots.rows, :, self.slots.columns] = key_states[:, :, 0]
        v[self.slots.rows, :, self.slots.columns] = value_states[:, :, 0]
        return k[:rows, :, :width], v[:rows, :, :width]


class SlotCache:
    """The keys of up to `count` rows, and the forward passes that read and write them."""

    def __init__(self, lm: LanguageModel, count: int) -> None:
        self.lm, self.count = lm, count
        self.start = 0  # nothing is shared
        self.lengths: list[int] = []  # tokens stored per row in use
        self.rows = self.columns = torch.empty(0, dtype=torch.long)
        self.width = 0
        config = lm.model.config.get_text_config()
        self.layers = [_SlotLayer(self) for _ in range(config.num_hidden_layers)]
        self.cache = Cache(layers=list(self.layers))
        self._name = cache_argument(lm.trunk)

    def prefill(self, rows: Sequence[Sequence[int]], known: Any = None) -> Tensor:
        """Add rows and return fp32 logits (n, V) for their next token; none is `known` in part."""
        hidden, keys = _prefill(self.lm, rows)
        first = len(self.lengths)
        own = slice(first, first + len(rows))
        self.lengths += [len(row) for row in rows]
        for layer, (new_k, new_v) in zip(self.layers, keys, strict=True):
            k, v = layer.room(new_k, max(self.lengths) + 1)
            # with the padding: a step's mask hides it
            k[own, :, : new_k.shape[2]] = new_k
            v[own, :, : new_v.shape[2]] = new_v
        return self.lm.logits(torch.stack([hidden[i, len(row) - 1] for i, row in enumerate(rows)]))

    def step(self, tokens: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """Feed one token to every row; returns fp32 logits of the `wanted` rows."""
        device = self.lm.device
        self.columns = on_device(torch.tensor(self.lengths), device)
        self.rows = torch.arange(len(tokens), device=device)
        self.width = max(self.lengths) + 1
        seen = torch.arange(self.width, device=device) <= self.columns[:, None]
        dtype = self.lm.model.dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        mask = mask.masked_fill(~seen, torch.finfo(dtype).min)[:, None, None]
        options = {self._name: self.cache, "use_cache": True, "attention_mask": mask}
        ids = on_device(torch.tensor(tokens), device)[:, None]
        hidden = _forward(self.lm, ids, position_ids=self.columns[:, None], **options)
        self.lengths = [length + 1 for length in self.lengths]
        chosen = hidden[:, -1]
        if len(wanted) < len(tokens):
            chosen = chosen[on_device(torch.tensor(wanted, dtype=torch.long), device)]
        return self.lm.logits(chosen)

    def cut(self, row: int, length: int) -> None:
        """Forget all but the first `length` tokens of a row."""
        assert length <= self.lengths[row]
        self.lengths[row] = length

    def remove(self, row: int) -> None:
        """Free a row; the last one takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self.layers:
                if layer.k is not None and layer.v is not None:
                    layer.k[row, :, : self.lengths[last]] = layer.k[last, :, : self.lengths[last]]
                    layer.v[row, :, : self.lengths[last]] = layer.v[last, :, : self.lengths[last]]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()


_tried: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def caches(lm: LanguageModel) -> bool:
    """Whether `SlotCache` computes what the model does: tried on a few tokens, once per model."""
    if lm.model not in _tried:
        _tried[lm.model] = computes_the_same(lm, _decode)
        if not _tried[lm.model]:
            log.warning(
                "this model's keys cannot be kept: each new token computes its whole text again"
            )
    return _tried[lm.model]


def _decode(lm: LanguageModel, ids: Sequence[int]) -> Tensor:
    slots = SlotCache(lm, 2)
    slots.prefill([ids[:3], ids[:5]])
    slots.cut(1, 3)
    for token in ids[3:-1]:
        slots.step([token, token], [])
    return slots.step([ids[-1]] * 2, [0, 1])


@torch.inference_mode()
def computes_the_same(
    lm: LanguageModel, decode: Callable[[LanguageModel, Sequence[int]], Tensor]
) -> bool:
    """Whether the rows of `decode(lm, ids)` are the logits after seven `ids`, up to rounding."""
    ids = [n % len(lm.tokenizer) for n in range(5, 12)]
    want = lm.logits(lm.hidden(torch.tensor([ids], device=lm.device))[:, -1])[0]
    try:
        got = decode(lm, ids)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError):
        return False
    atol = 1e-3 if lm.model.dtype == torch.float32 else 5e-2
    return all(torch.allclose(row, want, atol=atol, rtol=1e-3) for row in got)


def _prefill(lm: LanguageModel, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Keys]:
    """Compute rows of ids; returns hidden (n, L, D) and their keys."""
    cache = DynamicCache()
    ids = right_padded(rows, lm.device)
    positions = torch.arange(ids.shape[1], device=lm.device)[None].expand(len(rows), -1)
    options = {cache_argument(lm.trunk): cache, "use_cache": True}
    hidden = _forward(lm, ids, position_ids=positions, **options)
    layers: list[Any] = cache.layers
    return hidden, [(layer.keys, layer.values) for layer in layers]


def cache_argument(model: Any) -> str:
    """How this version of transformers calls the cache (`past_key_values` before `cache`)."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _forward(lm: LanguageModel, ids: Tensor, **options: Any) -> Tensor:
    """What `lm.logits` takes: hidden states, or full logits where the head is not plain."""
    with packed(lm.model):
        if lm.split_head:
            hidden: Tensor = lm.trunk(ids, **options).last_hidden_state
            return hidden
        logits: Tensor = lm.model(ids, **options).logits
        return logits
