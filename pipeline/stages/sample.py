"""Stage `sample`: documents -> candidate calls (method, section 2).

    callsieve sample CONFIG --run-dir RUN

Covered: positions from one pass, lossless pruning by L_i(eps), m samples per position over shared
keys, equal calls merged. Not covered: running the calls (stage `execute`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pipeline.config import Sample
from pipeline.context import Context
from pipeline.lm.forward import Budget, LanguageModel
from pipeline.lm.grammar import (
    CallGrammar,
    expression_grammar,
    numbers_before,
    schema_grammar,
)
from pipeline.lm.loss import loss_weights, plain_losses
from pipeline.lm.prompts import load_prompt
from pipeline.lm.sampling import (
    DocumentBatch,
    PromptKeys,
    Row,
    Sampled,
    Settings,
    TokenMask,
    choose_positions,
    encode_prompt,
    read_positions,
    sample_hidden,
    sample_rows,
)
from pipeline.lm.shared_prefix import fits
from pipeline.lm.tokens import EncodedDocument, context_token, encode_document, open_token
from pipeline.records import Candidate, Document, call_id

log = logging.getLogger(__name__)


def run(documents: list[Document], context: Context) -> Iterator[Candidate]:
    """Sample the candidates of one shard, tool by tool, in order of document and position."""
    lm, config = context.language_model(), context.config
    encoded = [EncodedDocument(d.doc_id, *encode_document(lm.tokenizer, d.text)) for d in documents]
    used = [
        n for n, d in enumerate(documents) if d.tools and 0 < len(encoded[n].ids) < lm.max_length
    ]
    weights = loss_weights(config.score.horizon)
    budget = context.resources.setdefault("budget", Budget(config.sample.token_budget))
    plain = dict(
        zip(
            used,
            plain_losses(
                lm,
                context_token(lm.tokenizer),
                [encoded[n].ids for n in used],
                weights,
                config.score.tail,
                budget,
            ),
            strict=True,
        )
    )
    with context.progress(sum(len(d.tools) for d in documents), "documents") as bar:
        for tool in config.tool_names:
            offered = [n for n, d in enumerate(documents) if tool in d.tools]
            own = [n for n in offered if n in plain and _fits(tool, encoded[n].ids, context)]
            _count_documents(tool, offered, own, encoded, context)
            yield from _sample_tool(tool, own, documents, encoded, plain, context, bar.update)


def _count_documents(
    tool: str,
    offered: list[int],
    own: list[int],
    encoded: list[EncodedDocument],
    context: Context,
) -> None:
    """Count which documents of a tool the model can read together with the prompt."""
    empty = sum(not encoded[n].ids for n in offered)
    too_long = len(offered) - empty - len(own)
    context.count(tool, "documents", len(offered))
    context.count(tool, "fitting_documents", len(own))
    if empty:
        context.count(tool, "no_tokens", empty)
    if too_long:
        context.count(tool, "too_long_for_model", too_long)
        log.warning(
            "%s: %d of %d documents with their prompt are longer than the %d tokens that the "
            "model reads and are left out; lower `corpus.max_words`",
            *(tool, too_long, len(offered), context.language_model().max_length),
        )


def _fits(tool: str, ids: list[int], context: Context) -> bool:
    """Whether prompt, text and a call are within what the model can read."""
    prompt = _prompt_keys(tool, context)
    whole = len(prompt.head) + len(prompt.around(ids)) + context.config.sample.max_new_tokens
    return whole < context.language_model().max_length


def _sample_tool(
    tool: str,
    own: list[int],
    documents: list[Document],
    encoded: list[EncodedDocument],
    plain: dict[int, torch.Tensor],
    context: Context,
    on_done: Callable[[int], object],
) -> Iterator[Candidate]:
    lm, config = context.language_model(), context.config
    prompt = _prompt_keys(tool, context)
    settings = Settings(
        config.seed,
        config.sample.temperature,
        config.sample.max_new_tokens,
        config.sample.max_rows,
        config.sample.token_budget,
        config.call_format.syntax,
    )
    lengths = [len(prompt.around(encoded[n].ids)) for n in own]

    def sample_batch(indices: list[int]) -> list[tuple[int, list[Candidate]]]:
        numbers = [own[i] for i in indices]
        batch = read_positions(lm, prompt, [encoded[n] for n in numbers], settings.syntax)
        rows = []
        grammars: dict[tuple[int, int], str] = {}
        for doc, n in enumerate(numbers):
            text, starts = documents[n].text, encoded[n].char_starts
            chosen = _positions(tool, batch.p_api[doc], encoded[n], plain[n], text, context)
            if config.sample.constrain:
                for i in chosen:
                    grammars[doc, i] = _grammar(tool, text, starts[i], context)
            context.count(tool, "sampled_positions", len(chosen))
            _, _, m = config.sample.of(tool)
            rows += [Row(doc, i, s) for i in chosen for s in range(m)]
        sampled = _draw(lm, prompt, batch, rows, settings, grammars, context)
        on_done(len(numbers))
        return [
            (n, _candidates(tool, n, doc, sampled, documents, encoded, plain, batch, context))
            for doc, n in enumerate(numbers)
        ]

    def work(indices: list[int]) -> list[tuple[int, list[Candidate]]]:
        before = copy.deepcopy(context.counts)
        try:
            return sample_batch(indices)
        except torch.OutOfMemoryError:
            context.counts = before  # the same documents are counted again in smaller batches
            raise

    found: dict[int, list[Candidate]] = {}
    for group in context.resources["budget"].run(lengths, work):
        found.update(group)
    for n in own:
        yield from found[n]


def _prompt_keys(tool: str, context: Context) -> PromptKeys:
    """The demonstrations' keys of a tool, computed once per process."""
    name = f"prompt:{tool}"
    if name not in context.resources:
        lm, config = context.language_model(), context.config
        if "shared" not in context.resources:
            context.resources["shared"] = fits(lm)
            if not context.resources["shared"]:
                log.warning(
                    "%s: its attention cannot share keys between rows; sampling computes every "
                    "context whole, which gives the same calls many times slower",
                    type(lm.model).__name__,
                )
        prompt = load_prompt(config.prompts, tool, config.call_format.syntax)
        context.resources[name] = encode_prompt(lm, prompt, context.resources["shared"])
    keys: PromptKeys = context.resources[name]
    return keys


def _positions(
    tool: str,
    p_api: torch.Tensor,
    document: EncodedDocument,
    plain: torch.Tensor,
    text: str,
    context: Context,
) -> list[int]:
    """Top-k positions above tau_s, minus those where no call can reach the gain floor."""
    lm, config = context.language_model(), context.config
    tau_s, k, _ = config.sample.of(tool)
    chosen = choose_positions(
        p_api,
        document,
        tau_s,
        k,
        open_token(lm.tokenizer, config.call_format.syntax),
        context_token(lm.tokenizer) is not None,
        lambda what, n: context.count(tool, what, n),
        lambda i: _writable(tool, text[: document.char_starts[i]], config.sample),
    )
    if config.gain_floor is not None:
        # gain <= L_i(eps): below the floor no call can ever be kept there (method, section 2)
        able = [i for i in chosen if float(plain[i]) >= config.gain_floor]
        context.count(tool, "pruned_position", len(chosen) - len(able))
        chosen = able
    return chosen


def _writable(tool: str, before: str, sample: Sample) -> bool:
    """Whether the grammar allows any call after the text `before`."""
    if tool == "Calculator" and sample.numbers == "from_context":
        return len(numbers_before(before)) >= 2
    return sample.words == "free" or any(char.isalnum() for char in before)


def _grammar(tool: str, text: str, char_start: int, context: Context) -> str:
    """The grammar of a call at a place."""
    sample, syntax = context.config.sample, context.config.call_format.syntax
    before = text[:char_start]
    if tool == "Calculator":
        numbers = numbers_before(before) if sample.numbers == "from_context" else None
        return expression_grammar(tool, numbers, syntax)
    schema = context.executor().find(tool).spec.parameters
    words = before if sample.words == "from_context" else None
    return schema_grammar(tool, schema, words, syntax)


def _draw(
    lm: LanguageModel,
    prompt: PromptKeys,
    batch: DocumentBatch,
    rows: list[Row],
    settings: Settings,
    grammars: Mapping[tuple[int, int], str],
    context: Context,
) -> list[Sampled]:
    tool = prompt.prompt.tool
    if "grammar" not in context.resources and grammars:
        context.resources["grammar"] = CallGrammar(lm.tokenizer)

    def mask_of(row: Row) -> TokenMask | None:
        grammar = grammars.get((row.doc, row.position))
        return context.resources["grammar"].mask(grammar) if grammar else None

    hidden = context.config.sample.lookahead_prompt == "hidden"
    draw = sample_hidden if hidden else sample_rows
    sampled = draw(lm, prompt, batch, rows, settings, mask_of) if rows else []
    context.count(tool, "samples", len(sampled))
    context.count(tool, "tokens", sum(item.tokens for item in sampled))
    for item in sampled:
        context.count(tool, item.reason or "closed")
    return sampled


def _candidates(
    tool: str,
    n: int,
    doc: int,
    sampled: list[Sampled],
    documents: list[Document],
    encoded: list[EncodedDocument],
    plain: dict[int, torch.Tensor],
    batch: DocumentBatch,
    context: Context,
) -> list[Candidate]:
    """Merge equal calls of one document and make records of them."""
    counts: dict[tuple[int, str], int] = {}
    for item in sampled:
        if item.row.doc == doc and item.arguments is not None:
            place = (item.row.position, item.arguments)
            counts[place] = counts.get(place, 0) + 1
    context.count(tool, "merged", sum(counts.values()) - len(counts))
    context.count(tool, "candidates", len(counts))
    rows: list[dict[str, Any]] = []
    for (i, arguments), times in sorted(counts.items()):
        start = encoded[n].char_starts[i]
        doc_id = documents[n].doc_id
        rows.append(
            {
                "call_id": call_id(doc_id, tool, start, arguments),
                "doc_id": doc_id,
                "tool": tool,
                "char_start": start,
                "token_index": i,
                "arguments": arguments,
                "sample_count": times,
                "p_api": float(batch.p_api[doc][i]),
                "loss_none": float(plain[n][i]),
            }
        )
    return [Candidate(**row) for row in rows]
