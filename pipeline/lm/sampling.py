"""Sample candidate calls (method, section 2; paper, section 2 "Sampling API calls").

For one tool and a batch of documents: one prefill of `[P(x), x]` gives every position's
p_i = p(<API> | P(x), x_1..x_{i-1}), and its keys serve every row that is sampled afterwards.
The keys of the demonstrations are computed once per tool. A model whose attention cannot share
keys takes `sample_plain`, which computes each context whole (and is the reference in the tests).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pipeline.calls import CallSyntax, read_sample
from pipeline.errors import ConfigError
from pipeline.lm.forward import LanguageModel, forbid, on_device, right_padded
from pipeline.lm.noise import gumbel, sample_key
from pipeline.lm.prompts import Prompt
from pipeline.lm.shared_prefix import Keys, RowDecoder, prefill
from pipeline.lm.tokens import (
    EncodedDocument,
    context_token,
    decode_piece,
    encode_piece,
    open_token,
)

TokenMask = Callable[[Sequence[int]], Tensor | None]
"""Given the tokens after the opening delimiter: which tokens may follow (V,), None = all."""


@dataclass(frozen=True)
class Settings:
    """How samples are drawn."""

    seed: int
    temperature: float
    max_new_tokens: int
    max_rows: int
    token_budget: int
    syntax: CallSyntax


@dataclass(frozen=True)
class Row:
    """One sample to draw: document number in the batch, position i, sample index."""

    doc: int
    position: int
    sample: int


@dataclass(frozen=True)
class Sampled:
    """What was drawn: the arguments, or None with the reason (`never_closed`, `malformed`).

    `tokens`: how many tokens were drawn for it, the closing one included.
    """

    row: Row
    arguments: str | None
    reason: str | None
    tokens: int


@dataclass
class PromptKeys:
    """The demonstrations of a tool, computed once: their ids and (where shared) their keys."""

    prompt: Prompt
    head: list[int]
    before: list[int]
    between: list[int]
    keys: Keys | None

    def around(self, text: Sequence[int]) -> list[int]:
        """Ids of what follows the demonstrations for one text: `Input: x Output: x`."""
        return [*self.before, *text, *self.between, *text]

    def offset(self, text: Sequence[int]) -> int:
        """Where x_1 stands in `around(text)`."""
        return len(self.before) + len(text) + len(self.between)


def encode_prompt(lm: LanguageModel, prompt: Prompt, shared: bool) -> PromptKeys:
    """Encode the demonstrations and compute their keys (once per tool).

    Raises ConfigError when they are longer than what the model can read.
    """
    context = context_token(lm.tokenizer)
    head = [] if context is None else [context]
    head += encode_piece(lm.tokenizer, prompt.head)
    if len(head) >= lm.max_length:
        raise ConfigError(
            f"the prompt of {prompt.tool} takes {len(head)} tokens and the model reads "
            f"{lm.max_length}; shorten the prompt or take another model"
        )
    keys = prefill(lm, torch.tensor([head], device=lm.device), None)[1] if shared else None
    return PromptKeys(
        prompt,
        head,
        encode_piece(lm.tokenizer, prompt.before),
        encode_piece(lm.tokenizer, prompt.between),
        keys,
    )


@dataclass
class DocumentBatch:
    """A batch after its prefill: p_i of each document and, where shared, the keys."""

    documents: Sequence[EncodedDocument]
    p_api: Sequence[Tensor]
    keys: Keys | None = None


@torch.inference_mode()
def read_positions(
    lm: LanguageModel, prompt: PromptKeys, documents: Sequence[EncodedDocument], syntax: CallSyntax
) -> DocumentBatch:
    """Compute p_i at every position i of each document in one teacher-forced pass; float64 (T,)."""
    opening = open_token(lm.tokenizer, syntax)
    rows = [prompt.around(document.ids) for document in documents]
    if prompt.keys is not None:
        hidden, keys = prefill(lm, right_padded(rows, lm.device), prompt.keys)
        before = 0
    else:
        hidden = lm.hidden(right_padded([prompt.head + row for row in rows], lm.device))
        keys, before = None, len(prompt.head)
    logprobs = []
    for row, document in enumerate(documents):
        start = before + prompt.offset(document.ids) - 1
        chosen = hidden[row, start : start + len(document.ids)]
        targets = torch.full((len(document.ids),), opening, device=lm.device)
        logprobs.append(lm.token_logprobs(chosen, targets))
    p_api = torch.cat(logprobs).double().exp().cpu()  # a GPU is waited for once
    return DocumentBatch(documents, p_api.split([len(d.ids) for d in documents]), keys)


def choose_positions(
    p_api: Tensor,
    document: EncodedDocument,
    tau_s: float,
    k: int,
    opening: int,
    has_context: bool,
    count: Callable[[str, int], None] = lambda what, n: None,
    writable: Callable[[int], bool] = lambda i: True,
) -> list[int]:
    """The at most k positions with the largest p_i > tau_s, in order of position.

    No candidate: a position whose true next token is the opening delimiter, one in the middle of a
    character, the first one without a context token, and one where `writable` says that the
    grammar allows no call. Ties go to the earlier position.
    """
    able = []
    for i in range(len(document.ids)):
        if document.ids[i] == opening:
            count("opens_already", 1)
        elif (i > 0 or has_context) and (
            i == 0 or document.char_starts[i] != document.char_starts[i - 1]
        ):
            able.append(i)
    possible = [i for i in able if writable(i)]
    if len(possible) < len(able):
        count("no_call_possible", len(able) - len(possible))
    able = possible
    count("positions", len(able))
    above = [i for i in able if float(p_api[i]) > tau_s]
    count("below_tau_s", len(able) - len(above))
    best = sorted(above, key=lambda i: (-float(p_api[i]), i))[:k]
    count("beyond_k", len(above) - len(best))
    return sorted(best)


@dataclass
class _Live:
    """A row while it is drawn."""

    row: Row
    key: int
    mask: TokenMask | None
    tokens: list[int] = field(default_factory=list)


@torch.inference_mode()
def sample_rows(
    lm: LanguageModel,
    prompt: PromptKeys,
    batch: DocumentBatch,
    rows: Iterable[Row],
    settings: Settings,
    mask_of: Callable[[Row], TokenMask | None] = lambda row: None,
) -> list[Sampled]:
    """Draw one call per row over the shared keys; rows that end make room for waiting ones."""
    if batch.keys is None or prompt.keys is None:
        return sample_plain(lm, prompt, batch, rows, settings, mask_of)
    opening = open_token(lm.tokenizer, settings.syntax)
    waiting = sorted(rows, key=lambda r: (r.doc, r.position, r.sample), reverse=True)
    decoder = RowDecoder(lm, prompt.keys, batch.keys, settings.max_new_tokens + 1)
    slots: list[_Live | None] = []
    done: list[Sampled] = []

    def fill(slot: int) -> None:
        row = waiting.pop()
        document = batch.documents[row.doc]
        live = _Live(row, _key(settings, prompt, document, row), mask_of(row))
        slots[slot : slot + 1] = [live]
        decoder.place(slot, row.doc, prompt.offset(document.ids) + row.position)

    while waiting or any(slots):
        while waiting and len(slots) < settings.max_rows:
            fill(len(slots))
        live = [s for s, own in enumerate(slots) if own is not None]
        if len(live) <= 0.75 * len(slots):
            decoder.keep(live)
            slots = [slots[s] for s in live]
        last = [own.tokens[-1] if own and own.tokens else opening for own in slots]
        logits = decoder.step(last)
        for slot, token in zip(
            (s for s, own in enumerate(slots) if own is not None),
            _draw(logits, slots, settings),
            strict=True,
        ):
            own = slots[slot]
            assert own is not None
            own.tokens.append(token)
            ended = _ended(lm, prompt, own, opening, settings)
            if ended is not None:
                done.append(ended)
                slots[slot] = None
                decoder.free(slot)
                if waiting:
                    fill(slot)
    return sorted(done, key=lambda s: (s.row.doc, s.row.position, s.row.sample))


@torch.inference_mode()
def sample_plain(
    lm: LanguageModel,
    prompt: PromptKeys,
    batch: DocumentBatch,
    rows: Iterable[Row],
    settings: Settings,
    mask_of: Callable[[Row], TokenMask | None] = lambda row: None,
) -> list[Sampled]:
    """Draw the same calls without sharing anything: every step computes its whole context."""
    opening = open_token(lm.tokenizer, settings.syntax)
    done = []
    for row in rows:
        document = batch.documents[row.doc]
        around = prompt.around(document.ids)
        seen = around[: prompt.offset(document.ids) + row.position]
        context = [*prompt.head, *seen, opening]
        own = _Live(row, _key(settings, prompt, document, row), mask_of(row))
        ended = None
        while ended is None:
            ids = torch.tensor([context + own.tokens], device=lm.device)
            logits = lm.logits(lm.hidden(ids)[:, -1])
            own.tokens.append(_draw(logits, [own], settings)[0])
            ended = _ended(lm, prompt, own, opening, settings)
        done.append(ended)
    return done


def sample_hidden(
    lm: LanguageModel,
    prompt: PromptKeys,
    batch: DocumentBatch,
    rows: Iterable[Row],
    settings: Settings,
    mask_of: Callable[[Row], TokenMask | None] = lambda row: None,
) -> list[Sampled]:
    """Draw from prompts that end at the position: the arguments cannot come from later text.

    Every position is a document of its own, x_1..x_{i-1}, with the keys and random numbers of its
    (doc_id, position); this costs a prefill per position.
    """
    rows = list(rows)
    places = sorted({(row.doc, row.position) for row in rows})
    cut = []
    for doc, i in places:
        whole = batch.documents[doc]
        cut.append(EncodedDocument(whole.doc_id, whole.ids[:i], whole.char_starts[:i]))
    number = {place: n for n, place in enumerate(places)}
    original = {Row(number[r.doc, r.position], r.position, r.sample): r for r in rows}
    hidden = read_positions(lm, prompt, cut, settings.syntax)
    found = sample_rows(lm, prompt, hidden, original, settings, lambda row: mask_of(original[row]))
    return [replace(item, row=original[item.row]) for item in found]


def _key(settings: Settings, prompt: PromptKeys, document: EncodedDocument, row: Row) -> int:
    return sample_key(settings.seed, document.doc_id, prompt.prompt.tool, row.position, row.sample)


def _draw(logits_BV: Tensor, slots: Sequence[_Live | None], settings: Settings) -> list[int]:
    """Draw the next token of every live slot by Gumbel-max at the temperature."""
    live = [(s, own) for s, own in enumerate(slots) if own is not None]
    if len(live) < len(slots):
        index = torch.tensor([s for s, _ in live])
        logits_BV = logits_BV[on_device(index, logits_BV.device)]
    forbid(logits_BV, [own.mask(own.tokens) if own.mask else None for _, own in live])
    keys = [own.key for _, own in live]
    steps = [len(own.tokens) for _, own in live]
    noise = gumbel(keys, steps, logits_BV.shape[1], logits_BV.device)
    return [int(t) for t in (logits_BV / settings.temperature + noise).argmax(-1).tolist()]


def _ended(
    lm: LanguageModel, prompt: PromptKeys, own: _Live, opening: int, settings: Settings
) -> Sampled | None:
    """Tell whether a row is finished, on the decoded text: a call, malformed, or out of room."""
    text = decode_piece(lm.tokenizer, opening, own.tokens)
    arguments = read_sample(text, prompt.prompt.tool, settings.syntax)
    if arguments is False:
        return Sampled(own.row, None, "malformed", len(own.tokens))
    if arguments is not None:
        return Sampled(own.row, arguments, None, len(own.tokens))
    if len(own.tokens) >= settings.max_new_tokens:
        return Sampled(own.row, None, "never_closed", len(own.tokens))
    return None
