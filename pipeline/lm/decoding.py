"""The decoding loop: rows join and leave, and what a row does with each token.

See `generation` for what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline.calls import call_pieces, read_sample
from pipeline.lm.forward import LanguageModel, by_budget, forbid, on_device
from pipeline.lm.grammar import RowMask
from pipeline.lm.jobs import (
    MALFORMED,
    NEVER_CLOSED,
    Generation,
    Job,
    LiveCalls,
    MadeCall,
    Source,
)
from pipeline.lm.kept import Kept, KeptKeys
from pipeline.lm.noise import gumbel, sample_key
from pipeline.lm.plain_slots import PlainSlots
from pipeline.lm.shared_slots import SharedSlots, shares
from pipeline.lm.slots import SlotCache, caches
from pipeline.lm.tokens import (
    context_token,
    decode_piece,
    encode_document,
    encode_piece,
    open_token,
)

_TO_END = 1024  # tokens beyond its length that a text may take to end what its grammar has open
_PADDING = 0.1  # share of padding that a large batch of prompts may have

Slots = SharedSlots | SlotCache | PlainSlots
OnText = Callable[[int, str, Sequence[MadeCall]], object]


@dataclass
class _Row:
    """A prompt while it is answered."""

    index: int
    job: Job
    prompt: list[int]
    key: int
    new: list[int] = field(default_factory=list)  # all tokens after the prompt
    pending: list[int] = field(default_factory=list)  # chosen or inserted, not yet fed
    sampled: int = 0
    inserted: int = 0
    text_tokens: int = 0
    call_start: int | None = None  # index in `new` of the first token after the opening one
    text_start: int = 0  # character after the last call that was made
    mask: RowMask | None = None
    fired: bool = False  # the opening token of the job has been chosen
    mask_start: int = 0  # index in `new` of the first token that the mask has to do with
    calls: list[MadeCall] = field(default_factory=list)
    done: Generation | None = None


class Decoder:
    """The loop over steps, and what a row does with each token."""

    def __init__(
        self,
        lm: LanguageModel,
        calls: LiveCalls | None,
        on_text: OnText | None,
    ) -> None:
        self.lm, self.tokenizer = lm, lm.tokenizer
        self.calls, self.on_text = calls, on_text
        self.opening = None if calls is None else open_token(self.tokenizer, calls.syntax)
        self.eos = _eos_ids(lm)
        self.room = context_length(lm.model.config.get_text_config())
        self.count = 0  # jobs so far
        self.done: list[_Row] = []  # not yet reported

    def run(self, source: Source, max_rows: int, kept: KeptKeys | None) -> None:
        """Answer until the source has nothing more."""
        if not shares(self.lm):
            kept = None
        waiting = self._more(source, busy=False)
        count = 0
        while waiting:
            count = max(count, min(max_rows, len(waiting)))
            waiting = self._batch(waiting, source, count, kept)

    def _more(self, source: Source, busy: bool) -> list[_Row]:
        """Report what is done and take what comes next; rows that cannot begin are done at once."""
        while True:
            done, self.done = self.done, []
            jobs = source([(row.job, row.done) for row in done if row.done is not None], busy)
            rows = [self._row(job) for job in jobs]
            ready = [row for row in rows if row.done is None]
            if ready or busy or not self.done:
                return ready

    def _row(self, job: Job) -> _Row:
        if any(not text for text in job.stop):
            raise ValueError("a stop string is empty; leave it out")
        if job.mask is not None and self.calls is not None:
            raise ValueError(
                "masks are for plain decoding; live calls have their own (LiveCalls.mask)"
            )
        key = sample_key(job.seed, "generation", "", 0, 0)
        row = _Row(self.count, job, _encode(self.tokenizer, job.prompt), key, mask=job.mask)
        self.count += 1
        if len(row.prompt) >= self.room or job.max_new_tokens < 1:
            self._finish(row, "context" if job.max_new_tokens else "length")
        return row

    def _batch(
        self, waiting: list[_Row], source: Source, count: int, kept: KeptKeys | None
    ) -> list[_Row]:
        """Answer rows that begin alike, and all that come meanwhile; returns those that do not."""
        base, shared = kept.beginning([row.prompt for row in waiting]) if kept else (None, 0)
        head = base.ids[:shared] if base else []
        slots = self._slots(count, base, shared)
        active: list[_Row] = []
        others: list[_Row] = []
        while waiting or active:
            free = slots.count - len(active)
            if waiting and (not active or free >= max(slots.count // 4, 1)):
                waiting.sort(key=lambda row: len(row.prompt))
                new = [waiting.pop() for _ in range(min(free, len(waiting)))]
                self._admit(new, slots, active, kept)
            else:
                fed = [row.pending.pop(0) for row in active]
                wanted = [i for i, row in enumerate(active) if not row.pending]
                logits = slots.step(fed, wanted)
                self._choose([active[i] for i in wanted], logits, slots, active)
            for place in range(len(active) - 1, -1, -1):
                row = active[place]
                if row.done is not None:
                    if kept and kept.limit_bytes and isinstance(slots, SharedSlots):
                        ids = (row.prompt + row.new)[: slots.lengths[place]]
                        kept.add(Kept(ids, slots.keys(place), base, shared))
                    slots.remove(place)
                    active[place] = active[-1]
                    active.pop()
            for row in self._more(source, bool(active or waiting or others)):
                fits = len(row.prompt) > shared and row.prompt[:shared] == head
                (waiting if fits else others).append(row)
        return others

    def _slots(self, count: int, base: Kept | None, shared: int) -> Slots:
        if not shares(self.lm):
            return SlotCache(self.lm, count) if caches(self.lm) else PlainSlots(self.lm, count)
        return SharedSlots(self.lm, count, base.between(0, shared) if base else None)

    def _admit(
        self, rows: Sequence[_Row], slots: Slots, active: list[_Row], kept: KeptKeys | None
    ) -> None:
        """Compute what is new of the prompts, those of similar length together."""
        found = [kept.find(row.prompt[:-1]) if kept else (None, 0) for row in rows]
        known = [max(length, slots.start) for _, length in found]
        new = [len(row.prompt) - length for row, length in zip(rows, known, strict=True)]
        for group in by_budget(new, 4096, _PADDING):
            texts = [found[i][0] for i in group]
            keys = [
                text.between(slots.start, known[i]) if text else None
                for i, text in zip(group, texts, strict=True)
            ]
            own = [rows[i] for i in group]
            logits = slots.prefill([rows[i].prompt[known[i] :] for i in group], keys)
            active += own
            self._choose(own, logits, slots, active)

    # -- the next token -------------------------------------------------------------------------

    def _choose(
        self, rows: Sequence[_Row], logits_BV: Tensor, slots: Slots, active: list[_Row]
    ) -> None:
        if not rows:
            return
        opened = self._opened(rows, logits_BV)
        if self.opening is not None:  # no call may begin in text where none is allowed
            closed = [row.call_start is None and not self._may_call(row) for row in rows]
            muted = on_device(torch.tensor(closed), logits_BV.device)
            logits_BV[:, self.opening].masked_fill_(muted, -torch.inf)
        self._mask(rows, logits_BV)
        if opened is not None:  # not where a grammar forbids it
            allowed = logits_BV.gather(1, opened.clamp(min=0)[:, None])[:, 0] > -torch.inf
            opened = opened.masked_fill(~allowed, -1)
        self._heat(rows, logits_BV)
        tokens = logits_BV.argmax(-1)
        if opened is not None:
            tokens = torch.where(opened >= 0, opened, tokens)
        place = {id(row): number for number, row in enumerate(active)}
        for row, token in zip(rows, tokens.tolist(), strict=True):  # the one wait for a GPU
            self._take(row, token, slots, place[id(row)])
            if self.on_text is not None and row.done is None:
                before_call = None if row.call_start is None else row.call_start - 1
                self.on_text(row.index, self._text(row, before_call), row.calls)

    def _opened(self, rows: Sequence[_Row], logits_BV: Tensor) -> Tensor | None:
        """The opening token of each row where it is among the k most likely, else -1 (B,).

        None where no row may open a call.
        """
        found = [self._opening(row) for row in rows]
        if not any(found):
            return None
        pairs = on_device(torch.tensor([pair or (0, 0) for pair in found]), logits_BV.device)
        openings, k = pairs.T
        ranks = (logits_BV > logits_BV.gather(1, openings[:, None])).sum(1)
        return openings.masked_fill(ranks >= k, -1)

    def _opening(self, row: _Row) -> tuple[int, int] | None:
        """The token that may open a call here, and its k."""
        if self.calls is None or self.opening is None:
            return None if row.fired else row.job.fires
        return (self.opening, self.calls.call_k) if self._may_call(row) else None

    def _heat(self, rows: Sequence[_Row], logits_BV: Tensor) -> None:
        """Make the largest logit of a row that is not greedy a draw, in place."""
        drawn = [i for i, row in enumerate(rows) if row.job.temperature > 0]
        if not drawn:
            return
        own = [rows[i] for i in drawn]
        device = logits_BV.device
        noise = gumbel(
            [row.key for row in own], [row.sampled for row in own], logits_BV.shape[1], device
        )
        heat = on_device(torch.tensor([row.job.temperature for row in own]), device)
        index = on_device(torch.tensor(drawn), device)
        logits_BV[index] = logits_BV[index] / heat[:, None] + noise

    def _mask(self, rows: Sequence[_Row], logits_BV: Tensor) -> None:
        """Take away what the grammars of the rows forbid, in place."""
        masks: list[Tensor | None] = [None] * len(rows)
        for index, row in enumerate(rows):
            if row.mask is not None:
                written = row.new[row.mask_start :]
                masks[index] = allowed = row.mask(written)
                if row.mask.may_end(written):
                    allowed[[token for token in self.eos if token < len(allowed)]] = True
        forbid(logits_BV, masks)

    def _may_call(self, row: _Row) -> bool:
        calls = self.calls
        return (
            calls is not None
            and calls.enabled
            and row.call_start is None
            and len(row.calls) < calls.max_calls
        )

    def _take(self, row: _Row, token: int, slots: Slots, place: int) -> None:
        """Append a token that the model chose and do what follows from it."""
        row.sampled += 1
        if token in self.eos:
            if row.call_start is not None:
                self._give_up(row, NEVER_CLOSED)
            if row.done is None:
                self._finish(row, "eos")
            return
        row.new.append(token)
        row.pending.append(token)
        if row.call_start is not None:
            self._in_call(row, slots, place)
        elif token == self.opening and self._may_call(row):
            row.call_start = len(row.new)
            if self.calls is not None and self.calls.mask is not None:
                row.mask, row.mask_start = self.calls.mask(), len(row.new)
        else:
            row.text_tokens += 1
            row.fired |= row.job.fires is not None and token == row.job.fires[0]
            self._check_text(row)
        if row.done is None and len(row.prompt) + len(row.new) >= self.room:
            self._finish(row, "context")

    def _in_call(self, row: _Row, slots: Slots, place: int) -> None:
        assert self.calls is not None and self.opening is not None and row.call_start is not None
        written = row.new[row.call_start :]
        text = decode_piece(self.tokenizer, self.opening, written)
        read = [(tool, read_sample(text, tool, self.calls.syntax)) for tool in self.calls.tools]
        complete = [(tool, found) for tool, found in read if isinstance(found, str)]
        if complete:
            self._make(row, *complete[0], text, slots, place)
        elif all(found is False for _, found in read):
            self._give_up(row, MALFORMED)
        elif row.mask is None and len(written) >= self.calls.max_call_tokens:
            self._give_up(row, NEVER_CLOSED)

    def _make(
        self, row: _Row, tool: str, arguments: str, text: str, slots: Slots, place: int
    ) -> None:
        """Run a complete call and insert its result and the closing delimiter."""
        assert self.calls is not None and row.call_start is not None
        syntax = self.calls.syntax
        executed = self.calls.execute(tool, arguments, row.index)
        pieces = call_pieces(tool, arguments, executed.result or "", syntax)
        if not text.endswith(syntax.arrow):
            # Closed without an arrow, or the last token went beyond it: write the call again.
            slots.cut(place, len(row.prompt) + row.call_start)
            del row.new[row.call_start :]
            row.pending.clear()
            self._insert(row, encode_piece(self.tokenizer, pieces[1]))
        self._insert(row, encode_piece(self.tokenizer, pieces[2]))
        start = len(self._text(row, row.call_start - 1))
        end = len(self._text(row))
        row.calls.append(
            MadeCall(
                tool,
                arguments,
                executed.result,
                executed.error_kind,
                executed.error,
                start,
                end,
                executed.seconds,
            )
        )
        row.call_start = row.mask = None
        row.text_start = end

    def _insert(self, row: _Row, tokens: Sequence[int]) -> None:
        row.new += tokens
        row.pending += tokens
        row.inserted += len(tokens)

    def _give_up(self, row: _Row, kind: str) -> None:
        """Leave what was to become a call in the text, as text."""
        self._record_broken(row, kind)
        self._check_text(row)

    def _record_broken(self, row: _Row, kind: str) -> None:
        assert row.call_start is not None
        start = len(self._text(row, row.call_start - 1))
        text = self._text(row)
        row.calls.append(MadeCall("", text[start:], None, kind, None, start, len(text)))
        row.text_tokens += len(row.new) - row.call_start + 1
        row.call_start = row.mask = None

    def _check_text(self, row: _Row) -> None:
        """Finish a row at a stop string or at its length."""
        if row.job.stop:
            text = self._text(row)
            found = [text.find(stop, row.text_start) for stop in row.job.stop]
            places = [place for place in found if place >= 0]
            if places:
                return self._finish(row, "stop", text[: min(places)])
        written = row.new[row.mask_start :]
        if row.mask is not None and row.mask.complete(written):
            return self._finish(row, "eos")
        whole = row.mask is None or row.mask.may_end(written)
        if row.text_tokens >= row.job.max_new_tokens + (0 if whole else _TO_END):
            self._finish(row, "length")
        return None

    def _text(self, row: _Row, end: int | None = None) -> str:
        return decode_piece(self.tokenizer, row.prompt[-1], row.new[:end])

    def _finish(self, row: _Row, finish: str, text: str | None = None) -> None:
        if row.call_start is not None:  # the context ends in the middle of a call
            self._record_broken(row, NEVER_CLOSED)
        row.done = Generation(
            self._text(row) if text is None else text,
            len(row.prompt),
            row.sampled,
            row.calls,
            finish,
            row.inserted,
        )
        self.done.append(row)


def _eos_ids(lm: LanguageModel) -> set[int]:
    """The tokens that end a text: the tokenizer's and those of the generation settings."""
    settings = getattr(lm.model, "generation_config", None)
    named = getattr(settings, "eos_token_id", None)
    found = named if isinstance(named, list) else [named]
    return {int(i) for i in [*found, lm.tokenizer.eos_token_id] if i is not None}


def context_length(config: Any) -> int:
    """How many tokens the model can read; a sliding window counts as the end of that."""
    limits = [getattr(config, "max_position_embeddings", None)]
    layers = getattr(config, "layer_types", None)  # without them the window is that of all layers
    if layers is None or "sliding_attention" in layers:
        limits.append(getattr(config, "sliding_window", None))
    known = [int(limit) for limit in limits if limit]
    return min(known) if known else 1 << 30


def _encode(tokenizer: Any, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str):
        ids = list(prompt)
    else:
        context = context_token(tokenizer)
        ids = [] if context is None else [context]
        ids += encode_document(tokenizer, prompt)[0]
    if not ids:
        raise ValueError("a prompt is empty and the tokenizer has no token to start from")
    return ids
