"""A key/value store with one slot per row, behind keys that all rows share and none copies.

Column j of a slot holds the keys of the row's j-th token after the shared ones, so a row is cut
back by forgetting its last columns. Rows that come with keys of their own compute only what is new.
The attention is ours (see `shared_prefix`): for any model with plain causal attention, found by
trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.lm.forward import LanguageModel, on_device, right_padded
from pipeline.lm.shared_prefix import Unsupported, attend, attending
from pipeline.lm.slots import computes_the_same

_SPARE = 64  # columns beyond those that the first rows need


class SharedSlots:
    """The keys of up to `count` rows, after `shared` keys of all of them that are read in place.

    Keys are (layers, 2, H, L, D), those of the rows in one store with a slot (H, columns, D) each.
    For models that `shares` allows; the others take `SlotCache`.
    """

    def __init__(self, lm: LanguageModel, count: int, shared: Tensor | None = None) -> None:
        self.lm, self.count, self.shared = lm, count, shared
        self.start = 0 if shared is None else shared.shape[-2]
        self.lengths: list[int] = []  # tokens per row in use, the shared ones included
        self._store: Tensor | None = None  # (layers, 2, slots, H, columns, D)
        self._rows = slice(0, 0)
        self._columns = self._hidden = torch.empty(0)

    def prefill(
        self, rows: Sequence[Sequence[int]], known: Sequence[Tensor | None] | None = None
    ) -> Tensor:
        """Add rows of at least one new token; returns fp32 logits (n, V) for what follows.

        `known` are keys that a row has already, between the shared and the new ones.
        """
        first = len(self.lengths)
        for row, keys in zip(rows, known or [None] * len(rows), strict=True):
            own = 0 if keys is None else keys.shape[-2]
            if keys is not None and own:
                store = self._room(keys, own + len(row))
                store[:, :, len(self.lengths), :, :own] = keys
            self.lengths.append(self.start + own)
        hidden = self._feed(first, rows)
        return self.lm.logits(torch.stack([hidden[i, len(row) - 1] for i, row in enumerate(rows)]))

    def step(self, tokens: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """Feed one token to every row; returns fp32 logits of the `wanted` rows."""
        chosen = self._feed(0, [[token] for token in tokens])[:, -1]
        if len(wanted) < len(tokens):
            index = torch.tensor(wanted, dtype=torch.long)
            chosen = chosen[on_device(index, self.lm.device)]
        return self.lm.logits(chosen)

    def cut(self, row: int, length: int) -> None:
        """Forget all but the first `length` tokens of a row; none of the shared ones."""
        assert self.start <= length <= self.lengths[row]
        self.lengths[row] = length

    def remove(self, row: int) -> None:
        """Free a row; the last one takes its place."""
        last = len(self.lengths) - 1
        if row != last and self._store is not None:
            own = self.lengths[last] - self.start
            self._store[:, :, row, :, :own] = self._store[:, :, last, :, :own]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def keys(self, row: int) -> Tensor:
        """A copy of the keys of a row that are not shared."""
        if self._store is None:
            raise Unsupported("the model does not attend through the interface of transformers")
        return self._store[:, :, row, :, : self.lengths[row] - self.start].clone()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store new keys (n, H, L, D) and attend to all that a row has (`shared_prefix`)."""
        width = self._hidden.shape[-1]
        store = self._room(k, width)[layer, :, self._rows]
        rows = torch.arange(len(k), device=k.device)[:, None]
        for own, new in zip(store, (k, v), strict=True):
            own[rows, :, self._columns] = new.transpose(1, 2)
        shared = None if self.shared is None else self.shared[layer]
        attend = _attend_one if q.shape[2] == 1 else _attend_many
        return attend(q * scale, store[:, :, :, :width], shared, self._hidden)

    def _feed(self, first: int, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Compute tokens of the rows from `first` on; returns what `lm.logits` takes (n, L, D)."""
        device = self.lm.device
        ids = right_padded(tokens, device)
        self._rows = slice(first, first + len(tokens))
        begin = on_device(torch.tensor(self.lengths[self._rows]), device)[:, None] - self.start
        self._columns = begin + torch.arange(ids.shape[1], device=device)
        width = max(self.lengths[self._rows]) - self.start + ids.shape[1]
        self._hidden = torch.arange(width, device=device) > self._columns[..., None]  # (n, L, W)
        last = self.lm.max_length - 1  # padding may lie beyond
        positions = (self.start + self._columns).clamp(max=last)
        with attending(self.lm, self):
            hidden = self.lm.hidden(ids, position_ids=positions)
        for row, new in enumerate(tokens, start=first):
            self.lengths[row] += len(new)
        return hidden

    def _room(self, like: Tensor, columns: int) -> Tensor:
        """The store, with at least so many columns; it grows by doubling."""
        old = self._store
        if old is not None and old.shape[-2] >= columns:
            return old
        layers = self.lm.model.config.get_text_config().num_hidden_layers
        size = columns + _SPARE if old is None else max(columns, 2 * old.shape[-2])
        heads, depth = like.shape[-3], like.shape[-1]
        self._store = like.new_zeros(layers, 2, self.count, heads, size, depth)
        if old is not None:
            self._store[..., : old.shape[-2], :] = old
        return self._store


def _attend_one(q: Tensor, own: Tensor, shared: Tensor | None, hidden: Tensor) -> Tensor:
    """One scaled query per row, q (n, H, 1, D): the shared keys are read once for all rows."""
    rows, heads, _, depth = q.shape
    k, v = own  # (n, K, W, D)
    kinds = k.shape[1]
    q_nkgd = q.view(rows, kinds, heads // kinds, depth)
    scores = (q_nkgd @ k.transpose(2, 3)).masked_fill(hidden[:, None], -torch.inf)
    if shared is None:
        return (_softmax(scores) @ v).view(q.shape)
    q_kmd = q_nkgd.transpose(0, 1).reshape(kinds, -1, depth)  # all rows of a key head
    before = (q_kmd @ shared[0].transpose(1, 2)).view(kinds, rows, heads // kinds, -1)
    weights = _softmax(torch.cat([before.transpose(0, 1), scores], dim=-1))
    w_shared, w_own = weights.split([before.shape[-1], scores.shape[-1]], dim=-1)
    out = w_shared.transpose(0, 1).reshape(kinds, q_kmd.shape[1], -1) @ shared[1]
    out = out.view(kinds, rows, heads // kinds, depth).transpose(0, 1) + w_own @ v
    return out.reshape(q.shape)


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)


def _attend_many(q: Tensor, own: Tensor, shared: Tensor | None, hidden: Tensor) -> Tensor:
    """Scaled queries (n, H, L, D) that see the shared keys and their row's up to themselves."""
    k, v = own
    seen = ~hidden[:, None]
    if shared is not None:
        before, after = (part.expand(len(q), -1, -1, -1) for part in shared)
        k, v = torch.cat([before, k], dim=2), torch.cat([after, v], dim=2)
        seen = functional.pad(seen, (before.shape[2], 0), value=True)
    return attend(q, k, v, seen, 1.0)


_tried: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def shares(lm: LanguageModel) -> bool:
    """Whether `SharedSlots` computes what the model does: tried on a few tokens, once per model.

    Not so with a sliding window, soft-capped attention, or a state that is not keys.
    """
    if lm.model not in _tried:
        _tried[lm.model] = computes_the_same(lm, _decode)
    return _tried[lm.model]


def _decode(lm: LanguageModel, ids: Sequence[int]) -> Tensor:
    head = SharedSlots(lm, 1)
    head.prefill([ids[:2]])
    slots = SharedSlots(lm, 2, head.keys(0))
    slots.prefill([ids[2:4], ids[2:6]])
    slots.cut(1, 4)
    slots.step([ids[4], ids[4]], [])
    slots.step([ids[5], ids[5]], [])
    return slots.step([ids[6], ids[6]], [0, 1])
