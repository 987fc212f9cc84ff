"""Attention over keys that many rows share, without copying them per row.

All contexts from which calls are sampled are prefixes of `[P(x), x]` (method, section 2): the
demonstrations are the same for every document of a tool, and the rows of one document differ only
in how far they see. So keys exist in three layers, each once: those of the demonstrations, those of
each document, and the few of each row's own call. The attention of a row runs over
`[demonstrations | document up to its own position | own suffix]` with one softmax.

The model's own code does everything else (projections, rotary positions, layers): this module only
registers an attention function with transformers. Works for any model that calls its attention
through that interface with plain causal attention; `fits` finds out by trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipeline.lm.forward import LanguageModel, on_device

_NAME = "callsieve_shared_prefix"
_NOT_PLAIN = ("sliding_window", "softcap", "s_aux")


class Unsupported(RuntimeError):
    """The model's attention is more than plain causal attention."""


class _State(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor: ...


_active: ContextVar[_State] = ContextVar("active")  # of this thread: a tool's reader has another


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    if any(options.get(name) is not None for name in _NOT_PLAIN):
        raise Unsupported(f"{type(module).__name__} uses more than plain causal attention")
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    out = _active.get().attend(module.layer_idx, query, key, value, scale)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)


@contextmanager
def attending(lm: LanguageModel, state: _State) -> Iterator[None]:
    """Let `state` compute the attention of all layers."""
    config = lm.model.config
    before = config._attn_implementation
    config._attn_implementation = _NAME
    token = _active.set(state)
    try:
        yield
    finally:
        _active.reset(token)
        config._attn_implementation = before


@dataclass
class Keys:
    """Keys and values per layer, each (n, H_kv, L, D)."""

    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return int(self.k[0].shape[2]) if self.k else 0


@dataclass
class _Prefill:
    """Causal attention within each row, after the shared keys; keeps the new keys."""

    shared: Keys | None
    new: Keys = field(default_factory=Keys)
    mask: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.new.k.append(k)
        self.new.v.append(v)
        before = self.shared.length if self.shared else 0
        if self.shared is None or not before:
            return attend(q, k, v, None, scale)
        rows, length = k.shape[0], k.shape[2]
        k = torch.cat([self.shared.k[layer].expand(rows, -1, -1, -1), k], dim=2)
        v = torch.cat([self.shared.v[layer].expand(rows, -1, -1, -1), v], dim=2)
        if self.mask is None:
            self.mask = torch.ones(length, before + length, dtype=torch.bool, device=q.device)
            self.mask = self.mask.tril(before)
        return attend(q, k, v, self.mask, scale)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of q (n, H, L, D) to keys (n, H_kv, S, D): within the mask, or causal (S = L)."""
    if q.device.type == "cuda":
        # Of its kernels only flash takes fewer heads of keys, and no mask and no fp32; the one
        # that takes everything holds all scores.
        k, v = _for_heads(k, q.shape[1]), _for_heads(v, q.shape[1])
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _for_heads(k: Tensor, heads: int) -> Tensor:
    """Repeat keys or values (n, H_kv, S, D) for all query heads."""
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], dim=1)


@torch.inference_mode()
def prefill(lm: LanguageModel, ids_BL: Tensor, shared: Keys | None) -> tuple[Tensor, Keys]:
    """Run rows (B, L; right-padded) after the shared keys; returns hidden (B, L, D), their keys."""
    start = shared.length if shared else 0
    state = _Prefill(shared)
    positions = torch.arange(start, start + ids_BL.shape[1], device=ids_BL.device)[None]
    with attending(lm, state):
        hidden = lm.hidden(ids_BL, position_ids=positions.expand(ids_BL.shape[0], -1))
    return hidden, state.new


class RowDecoder:
    """Rows that decode one token at a time over shared demonstration and document keys.

    A slot holds one row: its document, how many keys of that document it sees, and its suffix.
    Free slots take new rows without moving the others.
    """

    def __init__(self, lm: LanguageModel, shared: Keys, documents: Keys, room: int) -> None:
        self.lm = lm
        self.shared, self.documents, self.room = shared, documents, room
        self.slot_doc: list[int] = []
        self.slot_limit: list[int] = []
        self.slot_length: list[int] = []
        self._suffix = Keys()
        self._grid: _Grid | None = None

    def place(self, slot: int, doc: int, limit: int) -> None:
        """Put a new row into a slot (the next one, or one that is free)."""
        if slot == len(self.slot_doc):
            self.slot_doc.append(doc)
            self.slot_limit.append(limit)
            self.slot_length.append(0)
        else:
            self.slot_doc[slot], self.slot_limit[slot], self.slot_length[slot] = doc, limit, 0
        self._grid = None

    def free(self, slot: int) -> None:
        """Forget the row of a slot; it idles from the start of its room until it is dropped."""
        # Without this it would outgrow the room while younger rows go on.
        self.slot_length[slot] = 0

    def keep(self, slots: Sequence[int]) -> None:
        """Drop all other slots."""
        index = on_device(torch.tensor(slots), self.lm.device)
        self._suffix.k = [k[index] for k in self._suffix.k]
        self._suffix.v = [v[index] for v in self._suffix.v]
        self.slot_doc = [self.slot_doc[s] for s in slots]
        self.slot_limit = [self.slot_limit[s] for s in slots]
        self.slot_length = [self.slot_length[s] for s in slots]
        self._grid = None

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Feed one token to each slot; returns fp32 logits (slots, V) for the next one."""
        device = self.lm.device
        if self._grid is None:
            self._grid = _Grid.of(self.slot_doc, self.slot_limit, self.documents.length, device)
        numbers = torch.tensor([tokens, self.slot_length, self.slot_limit])
        ids, lengths, limits = on_device(numbers, device)
        positions = self.shared.length + limits + lengths
        with attending(self.lm, _Decode(self, self._grid, lengths)):
            hidden = self.lm.hidden(ids[:, None], position_ids=positions[:, None])
        self.slot_length = [length + 1 for length in self.slot_length]
        return self.lm.logits(hidden[:, -1])

    def suffix(self, layer: int, k: Tensor, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys (slots, H_kv, 1, D) and return all suffix keys up to the longest."""
        if layer == len(self._suffix.k):
            shape = (k.shape[0], k.shape[1], self.room, k.shape[3])
            self._suffix.k.append(k.new_zeros(shape))
            self._suffix.v.append(v.new_zeros(shape))
        missing = k.shape[0] - self._suffix.k[layer].shape[0]
        for store in (self._suffix.k, self._suffix.v):
            if missing > 0:
                store[layer] = torch.cat(
                    [store[layer], k.new_zeros(missing, *store[layer].shape[1:])]
                )
        rows = torch.arange(k.shape[0], device=k.device)
        self._suffix.k[layer][rows, :, lengths] = k[:, :, 0]
        self._suffix.v[layer][rows, :, lengths] = v[:, :, 0]
        longest = max(self.slot_length) + 1
        return self._suffix.k[layer][:, :, :longest], self._suffix.v[layer][:, :, :longest]


@dataclass
class _Grid:
    """Rows arranged per document, so that a document's keys are read once for all its rows."""

    first_doc: int
    docs: int
    slot_of: Tensor  # (docs, R): which slot stands there (0 where none)
    doc_of: Tensor  # (slots,)
    place_of: Tensor  # (slots,)
    hidden: Tensor  # (docs, R, T) bool: keys that a row must not see

    @staticmethod
    def of(slot_doc: list[int], slot_limit: list[int], length: int, device: torch.device) -> _Grid:
        first, last = min(slot_doc), max(slot_doc)
        rows: list[list[int]] = [[] for _ in range(last - first + 1)]
        place = []
        for slot, doc in enumerate(slot_doc):
            place.append(len(rows[doc - first]))
            rows[doc - first].append(slot)
        width = max(len(own) for own in rows)
        table = torch.tensor([own + [0] * (width - len(own)) for own in rows])
        limits = torch.tensor(slot_limit)[table]
        hidden = torch.arange(length) >= limits[..., None]
        return _Grid(
            first,
            len(rows),
            on_device(table, device),
            on_device(torch.tensor(slot_doc) - first, device),
            on_device(torch.tensor(place), device),
            on_device(hidden, device),
        )


@dataclass
class _Decode:
    decoder: RowDecoder
    grid: _Grid
    lengths: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        own, grid = self.decoder, self.grid
        suffix_k, suffix_v = own.suffix(layer, k, v, self.lengths)
        B, H, _, D = q.shape
        K = k.shape[1]
        G = H // K
        q_BKGD = (q[:, :, 0] * scale).view(B, K, G, D)

        # demonstrations: one product for all rows
        shared_k, shared_v = own.shared.k[layer][0], own.shared.v[layer][0]  # (K, P, D)
        q_KND = q_BKGD.transpose(0, 1).reshape(K, B * G, D)
        s_shared = (q_KND @ shared_k.transpose(1, 2)).view(K, B, G, -1).transpose(0, 1)

        # documents: one product per document for all its rows
        docs = slice(grid.first_doc, grid.first_doc + grid.docs)
        doc_k, doc_v = own.documents.k[layer][docs], own.documents.v[layer][docs]  # (N, K, T, D)
        N, R = grid.slot_of.shape
        q_NKRGD = q_BKGD[grid.slot_of].transpose(1, 2).reshape(N, K, R * G, D)
        s_doc = (q_NKRGD @ doc_k.transpose(2, 3)).view(N, K, R, G, -1)
        s_doc = s_doc.masked_fill(grid.hidden[:, None, :, None], -torch.inf)
        s_doc = s_doc.transpose(1, 2)[grid.doc_of, grid.place_of]  # (B, K, G, T)

        # own suffix
        s_own = q_BKGD @ suffix_k.transpose(2, 3)
        after = torch.arange(s_own.shape[-1], device=q.device) > self.lengths[:, None]
        s_own = s_own.masked_fill(after[:, None, None], -torch.inf)

        scores = torch.cat([s_shared, s_doc, s_own], dim=-1).softmax(-1, dtype=torch.float32)
        w_shared, w_doc, w_own = scores.to(q.dtype).split(
            [s_shared.shape[-1], s_doc.shape[-1], s_own.shape[-1]], dim=-1
        )
        out = w_own @ suffix_v
        o_shared = w_shared.transpose(0, 1).reshape(K, B * G, -1) @ shared_v
        out = out + o_shared.view(K, B, G, D).transpose(0, 1)
        w_grid = w_doc[grid.slot_of].transpose(1, 2).reshape(N, K, R * G, -1)
        o_doc = (w_grid @ doc_v).view(N, K, R, G, D).transpose(1, 2)
        out = out + o_doc[grid.doc_of, grid.place_of]
        return out.reshape(B, H, 1, D)


@torch.inference_mode()
def fits(lm: LanguageModel) -> bool:
    """Try the shared keys on a few tokens against the model's own forward pass."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]], device=lm.device) % len(lm.tokenizer)
    want = lm.logits(lm.hidden(ids)[:, -1])
    try:
        _, shared = prefill(lm, ids[:, :2], None)
        _, documents = prefill(lm, ids[:, 2:6], shared)
        decoder = RowDecoder(lm, shared, documents, room=4)
        decoder.place(0, doc=0, limit=3)
        decoder.step([int(ids[0, 5])])
        got = decoder.step([int(ids[0, 6])])
    except (Unsupported, AttributeError, IndexError, TypeError, RuntimeError):
        return False
    return torch.allclose(got, want, atol=2e-2 if want.dtype != torch.float32 else 1e-3, rtol=1e-3)
