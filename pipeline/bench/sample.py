"""Bench `sample`: calls drawn over shared keys against `generate` and `generate_batch`.

Ours computes p_i at every position and draws m calls at each of the k best; the baselines get the
contexts that follow from it and only draw. They are slow, so each pair gives them another document
(a batch of contexts of nearly one length, which suits them). Batched `generate` draws with the same
random numbers and ends a row where ours ends it, so it has to write the same calls.
`generate_batch` (continuous batching with block sharing) has random numbers of its own: it draws as
many tokens, and is compared greedily beforehand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from pipeline.bench import material
from pipeline.bench.measure import compare, document, growth
from pipeline.calls import read_sample
from pipeline.lm.forward import Budget, LanguageModel
from pipeline.lm.noise import gumbel, sample_key
from pipeline.lm.prompts import load_prompt
from pipeline.lm.sampling import (
    DocumentBatch,
    PromptKeys,
    Row,
    Sampled,
    Settings,
    choose_positions,
    encode_prompt,
    read_positions,
    sample_plain,
    sample_rows,
)
from pipeline.lm.shared_prefix import fits
from pipeline.lm.tokens import EncodedDocument, context_token, decode_piece, open_token

TOOL = "Calculator"
K, M = 3, 4  # positions per document, samples per position: configs/quickstart.yaml
CHECKED = 3  # rows that are compared with a path that shares nothing
TOLERANCE = 1e-4
PAGE = 16  # tokens per page of `generate_batch`: pages are what it shares


@dataclass
class Bench:
    """A model with the prompt of the tool, and one run over documents."""

    lm: LanguageModel
    prompt: PromptKeys
    settings: Settings

    def batch(
        self, documents: Sequence[EncodedDocument]
    ) -> tuple[DocumentBatch, list[Row], list[Sampled]]:
        """One batch, our way: all p_i, the k best positions, m calls at each."""
        batch = read_positions(self.lm, self.prompt, documents, self.settings.syntax)
        opening = open_token(self.lm.tokenizer, self.settings.syntax)
        first = context_token(self.lm.tokenizer) is not None
        rows = [
            Row(doc, i, s)
            for doc, own in enumerate(documents)
            for i in choose_positions(batch.p_api[doc], own, 0.0, K, opening, first)
            for s in range(M)
        ]
        return batch, rows, sample_rows(self.lm, self.prompt, batch, rows, self.settings)

    def ours(self, documents: Sequence[EncodedDocument]) -> list[list[Sampled]]:
        """All documents, in batches within the token budget, as the stage does it."""
        lengths = [len(self.prompt.around(own.ids)) for own in documents]
        return Budget(self.settings.token_budget).run(
            lengths, lambda indices: self.batch([documents[i] for i in indices])[2]
        )

    def context(self, documents: Sequence[EncodedDocument], row: Row) -> list[int]:
        """The ids after which a row is drawn: demonstrations, text, text up to i, opening."""
        own = documents[row.doc]
        seen = self.prompt.around(own.ids)[: self.prompt.offset(own.ids) + row.position]
        opening = open_token(self.lm.tokenizer, self.settings.syntax)
        return [*self.prompt.head, *seen, opening]

    def key(self, documents: Sequence[EncodedDocument], row: Row) -> int:
        doc_id = documents[row.doc].doc_id
        return sample_key(self.settings.seed, doc_id, TOOL, row.position, row.sample)

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether a row is over: a whole call, or something that is none."""
        opening = open_token(self.lm.tokenizer, self.settings.syntax)
        text = decode_piece(self.lm.tokenizer, opening, tokens)
        return read_sample(text, TOOL, self.settings.syntax) is not None


def run(model: str, pairs: int, documents: int | None, tokens: int | None) -> dict[str, Any]:
    """Measure; 4 whole bundled texts by default."""
    lm = LanguageModel(*material.load(model))
    count = documents or 4
    prompt = encode_prompt(lm, load_prompt(material.PROMPTS, TOOL, material.SYNTAX), fits(lm))
    settings = Settings(0, 1.0, 20, 128, 4096, material.SYNTAX)
    bench = Bench(lm, prompt, settings)
    many = material.encoded(lm, 16 * count, tokens)
    docs = many[:count]
    batch, rows, sampled = bench.batch(docs)
    contexts = [bench.context(docs, row) for row in rows]
    checked = _same_p(bench, docs, batch, rows) and _same_calls(bench, batch, rows, sampled)
    agrees = {
        "generate": checked,
        "generate_batch": checked and _greedy_agrees(bench, batch, rows, contexts),
    }
    slices = _slices(rows)

    def generate() -> float:
        own = next(slices)
        made = _generate(bench, docs, [contexts[n] for n in own], [rows[n] for n in own])
        agrees["generate"] &= _calls(bench, made, settings) == _listed([sampled[n] for n in own])
        return len(own)

    def continuous() -> float:
        own = next(slices)
        mean = max(round(sum(sampled[n].tokens for n in own) / len(own)), 1)
        return len(generate_batch(lm, [contexts[n] for n in own], mean, sample=True))

    def ours() -> float:
        return sum(len(group) for group in bench.ours(docs))

    comparisons = compare(ours, {"generate": generate, "generate_batch": continuous}, agrees, pairs)
    return document(
        "sample",
        comparisons,
        None,
        growth(lambda n: bench.ours(many[:n]), [count, 4 * count, 16 * count]),
    )


def _slices(rows: Sequence[Row]) -> Iterator[list[int]]:
    """The rows of one document after the other, each twice (for both baselines), without end."""
    while True:
        for doc in sorted({row.doc for row in rows}):
            own = [n for n, row in enumerate(rows) if row.doc == doc]
            yield own
            yield own


# -- baselines -----------------------------------------------------------------------------------


class _Noise(LogitsProcessor):
    """The random numbers of our rows, added to the logits: argmax then draws as ours does."""

    def __init__(self, keys: list[int], prompt_length: int) -> None:
        self.keys, self.prompt_length = keys, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.prompt_length
        return scores + gumbel(self.keys, [step] * len(scores), scores.shape[1], scores.device)


class _Ended(StoppingCriteria):
    """Ends a row where its call ends."""

    def __init__(self, bench: Bench, prompt_length: int) -> None:
        self.bench, self.prompt_length = bench, prompt_length
        self.over: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        rows = input_ids[:, self.prompt_length :].tolist()
        for index, tokens in enumerate(rows):
            if index not in self.over and self.bench.ended(tokens):
                self.over[index] = len(tokens)
        return torch.tensor([i in self.over for i in range(len(rows))], device=input_ids.device)


@torch.inference_mode()
def _generate(
    bench: Bench,
    documents: Sequence[EncodedDocument],
    contexts: Sequence[Sequence[int]],
    rows: Sequence[Row],
) -> list[list[int]]:
    """Batched `generate`, left-padded, with the random numbers of our rows."""
    lm = bench.lm
    width = max(len(own) for own in contexts)
    ids = torch.tensor([[0] * (width - len(own)) + list(own) for own in contexts])
    mask = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in contexts])
    noise = _Noise([bench.key(documents, row) for row in rows], width)
    ended = _Ended(bench, width)
    made = lm.model.generate(
        ids.to(lm.device),
        attention_mask=mask.to(lm.device),
        generation_config=_plain_config(bench.settings.max_new_tokens),
        logits_processor=[noise],
        stopping_criteria=[ended],
    )[:, width:].tolist()
    return [own[: ended.over.get(index, len(own))] for index, own in enumerate(made)]


def _plain_config(max_new_tokens: int, **options: Any) -> GenerationConfig:
    chosen = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **options}
    return GenerationConfig(max_new_tokens=max_new_tokens, **chosen)


def generate_batch(
    lm: LanguageModel, contexts: Sequence[Sequence[int]], max_new_tokens: int, sample: bool
) -> list[list[int]]:
    """Continuous batching with block sharing over the same contexts."""
    pages = sum(-(-(len(own) + max_new_tokens) // PAGE) for own in contexts) + len(contexts)
    config = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=pages, max_batch_tokens=2048, allow_block_sharing=True
    )
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {}
    before = lm.model.config._attn_implementation
    try:
        made = lm.model.generate_batch(
            [list(own) for own in contexts],
            generation_config=_plain_config(max_new_tokens, **options),
            continuous_batching_config=config,
        )
    finally:
        lm.model.set_attn_implementation(before)
    return [list(own.generated_tokens) for own in made.values()]


# -- agreement -----------------------------------------------------------------------------------


@torch.inference_mode()
def _same_p(
    bench: Bench, documents: Sequence[EncodedDocument], batch: DocumentBatch, rows: Sequence[Row]
) -> bool:
    """p_i of one pass over each document against one plain pass per context."""
    lm = bench.lm
    for row in rows[:: max(len(rows) // CHECKED, 1)]:
        *context, opening = bench.context(documents, row)
        logits = lm.model(torch.tensor([context], device=lm.device)).logits[0, -1].float()
        wanted = float(logits.softmax(-1)[opening])
        if abs(wanted - float(batch.p_api[row.doc][row.position])) > TOLERANCE:
            return False
    return True


def _same_calls(
    bench: Bench, batch: DocumentBatch, rows: Sequence[Row], sampled: Sequence[Sampled]
) -> bool:
    """A few rows against the path that computes every context whole."""
    chosen = rows[:: max(len(rows) // CHECKED, 1)]
    plain = sample_plain(bench.lm, bench.prompt, batch, chosen, bench.settings)
    ours = {own.row: own for own in sampled}
    return all(ours[own.row] == own for own in plain)


def _calls(
    bench: Bench, made: Sequence[Sequence[int]], settings: Settings
) -> list[tuple[str | None, str | None]]:
    """What `generate` wrote, read as samples."""
    opening = open_token(bench.lm.tokenizer, settings.syntax)
    found: list[tuple[str | None, str | None]] = []
    for tokens in made:
        text = decode_piece(bench.lm.tokenizer, opening, tokens)
        arguments = read_sample(text, TOOL, settings.syntax)
        if arguments is False:
            found.append((None, "malformed"))
        else:
            found.append((arguments, None) if arguments is not None else (None, "never_closed"))
    return found


def _listed(sampled: Sequence[Sampled]) -> list[tuple[str | None, str | None]]:
    return [(own.arguments, own.reason) for own in sampled]


def _greedy_agrees(
    bench: Bench, batch: DocumentBatch, rows: Sequence[Row], contexts: Sequence[Sequence[int]]
) -> bool:
    """A few contexts greedily (the limit of a small temperature): the same calls both ways."""
    chosen = [n for n, row in enumerate(rows) if row.sample == 0][:CHECKED]
    cold = dataclasses.replace(bench.settings, temperature=1e-6)
    ours = sample_rows(bench.lm, bench.prompt, batch, [rows[n] for n in chosen], cold)
    made = generate_batch(
        bench.lm, [contexts[n] for n in chosen], cold.max_new_tokens, sample=False
    )
    cut = []
    for tokens in made:
        ends = (n for n in range(1, len(tokens) + 1) if bench.ended(tokens[:n]))
        cut.append(tokens[: next(ends, len(tokens))])
    return _calls(bench, cut, cold) == _listed(ours)
