"""Keys that outlive a call: a prompt that begins like an earlier text computes only what is new.

Texts are compared by their token ids and kept keys are cut at the first difference, so it does not
matter how a text was put together. A common beginning (instructions, examples) is held once: the
texts that begin with it hold the keys of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.lm.forward import LanguageModel
from pipeline.lm.shared_slots import SharedSlots

LIMIT_BYTES = 1 << 30  # some 23,000 tokens of a 135M model in fp32
SHARE_FROM = 16  # a common beginning shorter than this is not worth sharing
_TAIL = 16  # an older text that a newer one covers but for so many tokens is forgotten


@dataclass(eq=False)
class Kept:
    """The keys of a text: `keys` (layers, 2, H, L, D) are those of `ids[shared:]`.

    Those of `ids[:shared]` are the first ones of `base`, which has no base itself.
    """

    ids: list[int]
    keys: Tensor
    base: Kept | None = None
    shared: int = 0

    def between(self, start: int, end: int) -> Tensor:
        """The keys and values of `ids[start:end]`: a view, unless they lie on both sides."""
        own = self.keys[..., max(start - self.shared, 0) : max(end - self.shared, 0), :]
        if self.base is None or start >= self.shared:
            return own
        first = self.base.between(start, min(end, self.shared))
        return torch.cat([first, own], dim=-2) if end > self.shared else first


class KeptKeys:
    """The keys of recent texts of one model, up to `limit_bytes`; the least recently used go first.

    They are forgotten when another model comes, or when the weights of this one have changed.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.texts: list[Kept] = []  # least recently used first, a base after all that need it
        self.lm: LanguageModel | None = None
        self._weights: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """How much is held."""
        return sum(text.keys.nbytes for text in self.texts)

    def language_model(self, model: Any, tokenizer: Any) -> LanguageModel:
        """The model whose keys are kept; made once, since it takes a trial."""
        # every change in place counts a parameter's version up
        weights = tuple(parameter._version for parameter in model.parameters())
        if self.lm is None or self.lm.model is not model or self.lm.tokenizer is not tokenizer:
            self.lm = LanguageModel(model, tokenizer)
            self.texts.clear()
        elif weights != self._weights:
            self.texts.clear()
        self._weights = weights
        return self.lm

    def find(self, ids: Sequence[int]) -> tuple[Kept | None, int]:
        """The text that shares the longest beginning with `ids`, and how many tokens that is."""
        best, length = None, 0
        for text in reversed(self.texts):
            if length < min(len(text.ids), len(ids)) and text.ids[length] == ids[length]:
                common = common_length(text.ids, ids)
                if common > length:
                    best, length = text, common
        if best is not None:
            self._touch(best)
        return best, length

    def add(self, new: Kept) -> None:
        """Keep a text; what it goes on from and what does not fit any more is forgotten."""
        if new.base is not None and new.base not in self.texts:
            return
        self.texts = [text for text in self.texts if not _goes_on(new, text)]
        self.texts.append(new)
        self._touch(new)
        held = self.bytes
        while held > self.limit_bytes:
            held -= self.texts.pop(0).keys.nbytes

    def beginning(self, prompts: Sequence[list[int]]) -> tuple[Kept | None, int]:
        """What all prompts begin with, as a text that can be a base, and how many of its tokens.

        What is not kept of it yet is computed; a prompt alone takes what there is.
        """
        length = min(len(prompt) for prompt in prompts) - 1  # one token is left to go on from
        ids = min(prompts)[: min(common_length(min(prompts), max(prompts)), length)]
        found, known = self.find(ids)
        base, shared = found, known
        if found is not None and found.base is not None:
            base, shared = found.base, min(known, found.shared)
        if len(prompts) > 1 and len(ids) - shared >= SHARE_FROM:
            return self._extend(found, known, ids), len(ids)
        return (base, shared) if shared >= SHARE_FROM else (None, 0)

    def _extend(self, found: Kept | None, known: int, ids: Sequence[int]) -> Kept:
        """Compute a base, from what is known of it."""
        assert self.lm is not None
        slots = SharedSlots(self.lm, 1)
        slots.prefill([ids[known:]], [None if found is None else found.between(0, known)])
        base = Kept(list(ids), slots.keys(0))
        if self.limit_bytes:
            self.add(base)
        return base

    def _touch(self, text: Kept) -> None:
        for used in (text, text.base):
            if used is not None:
                self.texts.remove(used)
                self.texts.append(used)


def _goes_on(new: Kept, text: Kept) -> bool:
    """Whether `new` holds nearly all that `text` does, beside the same base."""
    covered = max(len(text.ids) - _TAIL, text.shared)
    return (
        text.base is not None
        and text.base is new.base
        and len(text.ids) <= len(new.ids)
        and text.ids[:covered] == new.ids[:covered]
    )


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
