"""Bench `score`: the stage on real candidates against passes with all logits.

The candidates are what stages `sample` and `execute` make of some texts with the settings of
configs/quickstart.yaml. Ours is one plain pass per text and stage `score`, where a call that cannot
reach `gain_floor` any more gets no further pass. The baselines make three whole passes for every
candidate; they are slow, so each pair gives them the calls of another text. All have to agree on
each loss that ours computes and on the kept calls. The last two comparisons say what pruning saves.
The ceiling is a bare forward pass of the trunk over as many tokens in rows of one length.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.bench import material
from pipeline.bench.measure import Comparison, compare, document, growth, rates
from pipeline.calls import call_pieces, empty_call_pieces
from pipeline.config import load_config
from pipeline.context import Context, closing_resources
from pipeline.errors import WorkError
from pipeline.lm.forward import Budget, LanguageModel, right_padded
from pipeline.lm.loss import loss_weights, plain_losses, weighted_loss
from pipeline.lm.tokens import context_token, encode_document, encode_piece, encode_pieces
from pipeline.records import Document, ExecutedCall, ScoredCall
from pipeline.shards import RunFolder
from pipeline.stages import execute, sample, score

CONFIG = Path("configs/quickstart.yaml")
TOOL = "Calculator"
TOLERANCE = 1e-4
WITHOUT_FLOOR = "the same without gain_floor"
WITHOUT_PRUNING = "sample, execute and score without gain_floor"
ROWS_AT_ONCE = 8  # of the padded batch: its logits are what limits it


@dataclass(frozen=True)
class Passes:
    """What a path without sharing does for a call: its text, its place, and the three prefixes."""

    text: Sequence[int]
    position: int
    prefixes: tuple[Sequence[int], Sequence[int], Sequence[int]]  # none, call, result


def run(model: str, pairs: int, documents: int | None, tokens: int | None) -> dict[str, Any]:
    """Measure; 8 whole bundled texts by default, about a shard of the quickstart."""
    count = documents or 8
    with _surroundings(model) as context:
        lm = context.language_model()
        many = material.documents(lm, 16 * count, tokens)
        texts = many[:count]
        calls = _sampled_and_run(many, context)
        own = _of(calls, texts)
        if not own:
            raise WorkError(f"no call came out of {count} texts; give more with --documents")
        work = [_passes(call, texts, context) for call in own]
        ours = _scored(own, texts, context)
        whole = _scored(own, texts, without_floor(context))
        tau_f = _tau_f(context)
        naive = {"three unbatched passes": _unbatched, "padded batch": _padded}
        agrees = dict.fromkeys(naive, True)
        slices = _slices(own)

        def path(name: str) -> float:
            chosen = next(slices)
            found = naive[name](lm, [work[n] for n in chosen])
            agrees[name] &= _agrees([ours[n] for n in chosen], found, tau_f)
            return len(chosen)

        def stage() -> float:
            return len(_scored(own, texts, context))

        comparisons = compare(
            stage,
            {name: (lambda name=name: path(name)) for name in naive},  # type: ignore[misc]
            agrees,
            pairs,
        )
        comparisons += compare(
            stage,
            {WITHOUT_FLOOR: lambda: len(_scored(own, texts, without_floor(context)))},
            {WITHOUT_FLOOR: _kept(ours, tau_f) == _kept(whole, tau_f)},
            pairs,
        )
        comparisons.append(_without_pruning(texts, context, tau_f, pairs))
        return document(
            "score",
            comparisons,
            _ceiling_share(own, ours, texts, context, pairs),
            growth(
                lambda n: _scored(_of(calls, many[:n]), many[:n], context),
                [count, 4 * count, 16 * count],
            ),
        )


# -- ours ----------------------------------------------------------------------------------------


@contextmanager
def _surroundings(model: str) -> Iterator[Context]:
    """The stages' surroundings in a folder that goes away."""
    settings = [("model.path", model), ("score.null_share", "0.0"), ("execute.cache", "false")]
    config = load_config(CONFIG, settings)
    config = dataclasses.replace(config, tools=tuple(t for t in config.tools if t["name"] == TOOL))
    with tempfile.TemporaryDirectory() as folder:
        context = Context(config, RunFolder(Path(folder)), "bench", "")
        with closing_resources(context):
            yield context


def without_floor(context: Context) -> Context:
    """The same surroundings, where nothing is pruned."""
    config = dataclasses.replace(context.config, gain_floor=None)
    return dataclasses.replace(context, config=config)


def _sampled_and_run(texts: list[Document], context: Context) -> list[ExecutedCall]:
    candidates = list(sample.run(texts, context))
    done = list(execute.run(candidates, texts, context))
    return [call for call in done if call.result is not None]


def _of(calls: Sequence[ExecutedCall], texts: Sequence[Document]) -> list[ExecutedCall]:
    wanted = {text.doc_id for text in texts}
    return [call for call in calls if call.doc_id in wanted]


def _scored(calls: list[ExecutedCall], texts: list[Document], context: Context) -> list[ScoredCall]:
    """Stage `score`, with the plain pass over every text that stage `sample` makes."""
    lm, config = context.language_model(), context.config
    plain_losses(
        lm,
        context_token(lm.tokenizer),
        [encode_document(lm.tokenizer, text.text)[0] for text in texts],
        loss_weights(config.score.horizon),
        budget=Budget(config.sample.token_budget),
    )
    return list(score.run(calls, texts, {}, context))


def _tau_f(context: Context) -> float:
    tau_f = context.config.select.tau_of(TOOL)
    assert isinstance(tau_f, float), f"{CONFIG}: a plain number is needed"
    return tau_f


def _kept(found: Sequence[ScoredCall], tau_f: float) -> list[str]:
    return [own.call_id for own in found if own.gain is not None and own.gain >= tau_f]


def _without_pruning(
    texts: list[Document], context: Context, tau_f: float, pairs: int
) -> Comparison:
    """Three stages with and without the bound, text by text: the kept calls have to be the same."""

    surroundings = {"ours": context, WITHOUT_PRUNING: without_floor(context)}
    turns = {name: itertools.cycle(texts) for name in surroundings}
    kept: dict[str, list[str]] = {name: [] for name in surroundings}

    def stages(name: str) -> float:
        own, text = surroundings[name], next(turns[name])
        found = list(score.run(_sampled_and_run([text], own), [text], {}, own))
        kept[name] += _kept(found, tau_f)
        return 1

    found = rates({name: (lambda name=name: stages(name)) for name in surroundings}, pairs)  # type: ignore[misc]
    same = kept["ours"] == kept[WITHOUT_PRUNING]
    return Comparison(WITHOUT_PRUNING, tuple(found["ours"]), tuple(found[WITHOUT_PRUNING]), same)


# -- baselines -----------------------------------------------------------------------------------


def _passes(call: ExecutedCall, texts: Sequence[Document], context: Context) -> Passes:
    lm, config = context.language_model(), context.config
    first = context_token(lm.tokenizer)
    start = [] if first is None else [first]
    syntax = config.call_format.syntax
    separator = encode_piece(lm.tokenizer, config.score.separator)
    having = call_pieces(call.tool, call.arguments, str(call.result), syntax)
    without = empty_call_pieces(call.tool, call.arguments, syntax)
    (text,) = (own.text for own in texts if own.doc_id == call.doc_id)
    prefixes = [
        [*start, *encode_pieces(lm.tokenizer, pieces), *separator] for pieces in (without, having)
    ]
    ids = encode_document(lm.tokenizer, text)[0]
    return Passes(ids, call.token_index, (start, prefixes[0], prefixes[1]))


def _slices(calls: Sequence[ExecutedCall]) -> Iterator[list[int]]:
    """The calls of one text after the other, each twice (for both baselines), without end."""
    while True:
        for doc_id in dict.fromkeys(call.doc_id for call in calls):
            chosen = [n for n, call in enumerate(calls) if call.doc_id == doc_id]
            yield chosen
            yield chosen


def _agrees(
    ours: Sequence[ScoredCall], found: Sequence[tuple[float, float, float]], tau_f: float
) -> bool:
    """Whether every loss that ours computed is the same, and whether the same calls are kept."""
    kept = []
    for own, losses in zip(ours, found, strict=True):
        known = zip((own.loss_none, own.loss_call, own.loss_result), losses, strict=True)
        if any(a is not None and abs(a - b) > TOLERANCE for a, b in known):
            return False
        if min(losses[:2]) - losses[2] >= tau_f:
            kept.append(own.call_id)
    return kept == _kept(ours, tau_f)


@torch.inference_mode()
def _unbatched(lm: LanguageModel, work: Sequence[Passes]) -> list[tuple[float, float, float]]:
    """Three full passes per candidate, one after the other, with the logits of every token."""
    found = []
    for own in work:
        for prefix in own.prefixes:
            ids = torch.tensor([[*prefix, *own.text]], device=lm.device)
            logits = lm.model(ids).logits[0]
            found.append(_from_logits(logits, ids[0], len(prefix) + own.position))
    return _threes(found)


@torch.inference_mode()
def _padded(lm: LanguageModel, work: Sequence[Passes]) -> list[tuple[float, float, float]]:
    """Padded batches in the order of the candidates, with the logits of every token."""
    rows = [
        ([*prefix, *own.text], len(prefix) + own.position)
        for own in work
        for prefix in own.prefixes
    ]
    found = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        ids = right_padded([row for row, _ in part], lm.device)
        mask = right_padded([[1] * len(row) for row, _ in part], lm.device)
        logits = lm.model(ids, attention_mask=mask).logits
        for n, (row, at) in enumerate(part):
            found.append(_from_logits(logits[n, : len(row)], ids[n, : len(row)], at))
    return _threes(found)


def _threes(values: Sequence[float]) -> list[tuple[float, float, float]]:
    return list(zip(values[::3], values[1::3], values[2::3], strict=True))


def _from_logits(logits_LV: torch.Tensor, ids_L: torch.Tensor, at: int) -> float:
    """L_i from all logits of a row, where x_i stands at `at`."""
    logprobs = logits_LV[:-1].float().log_softmax(-1)
    own = logprobs.gather(1, ids_L[1:, None])[:, 0]
    weights = loss_weights()
    return weighted_loss(own[at - 1 : at - 1 + len(weights)].cpu(), weights)


# -- the ceiling ---------------------------------------------------------------------------------


def _lengths(
    calls: Sequence[ExecutedCall],
    scored: Sequence[ScoredCall],
    texts: Sequence[Document],
    context: Context,
) -> list[int]:
    """Tokens of every pass that ours makes; calls with equal prefixes share one."""
    lm, horizon = context.language_model(), context.config.score.horizon
    ends: dict[tuple[str, tuple[int, ...]], int] = {}
    for call, own in zip(calls, scored, strict=True):
        work = _passes(call, texts, context)
        _, without, having = work.prefixes
        for prefix in [having] if own.loss_call is None else [having, without]:
            end = len(prefix) + min(work.position + horizon, len(work.text))
            place = (call.doc_id, tuple(prefix))
            ends[place] = max(end, ends.get(place, 0))
    plain = [1 + len(encode_document(lm.tokenizer, text.text)[0]) for text in texts]
    return [*plain, *ends.values()]


def _ceiling_share(
    calls: list[ExecutedCall],
    scored: Sequence[ScoredCall],
    texts: list[Document],
    context: Context,
    pairs: int,
) -> float:
    """Our tokens per second over those of a bare forward pass over as many tokens."""
    lm = context.language_model()
    lengths = _lengths(calls, scored, texts, context)
    total = sum(lengths)
    width = round(total / len(lengths))
    rows = max(context.config.score.token_budget // width, 1)
    ids = torch.randint(5, len(lm.tokenizer), (rows, width), device=lm.device)

    @torch.inference_mode()
    def bare() -> float:
        left = round(total / width)
        while left > 0:
            lm.hidden(ids[: min(rows, left)])
            left -= rows
        return total

    def ours() -> float:
        _scored(calls, texts, context)
        return total

    found = rates({"ours": ours, "bare": bare}, pairs)
    return statistics.median(
        a.per_s / b.per_s for a, b in zip(found["ours"], found["bare"], strict=True)
    )
