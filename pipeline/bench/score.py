"""Bench `score`: the three losses of every candidate against passes with all logits.

Work of one run: L_i(eps), L_i(e(c, eps)) and L_i(e(c, r)) for the candidates of some documents.
Nothing is pruned, so all paths compute the same numbers; what `gain_floor` saves on top of that
(calls that cannot pass lose their other pass) is the last comparison, with the kept calls compared.
The ceiling is a bare forward pass of the
trunk over as many tokens in rows of one length.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.bench import material
from pipeline.bench.measure import compare, document, growth, rates
from pipeline.calls import call_pieces, empty_call_pieces
from pipeline.lm.forward import Budget, LanguageModel, right_padded
from pipeline.lm.loss import (
    LossRequest,
    loss_weights,
    losses,
    plain_losses,
    weighted_loss,
)
from pipeline.lm.tokens import EncodedDocument, context_token, encode_piece, encode_pieces

POSITIONS, CALLS = 3, 2  # candidates per document: different calls at each of some positions
TOLERANCE = 1e-4
FLOOR, TAU_F = 0.2, 0.3  # configs/quickstart.yaml
PRUNED = "the same without gain_floor"
BUDGET = 4096
ROWS_AT_ONCE = 8  # of the padded batch: its logits are what limits it


@dataclass(frozen=True)
class Candidate:
    """A call with its result, at a position of a document."""

    text: Sequence[int]
    position: int
    without: Sequence[int]  # context token + e(c, eps) + separator
    with_result: Sequence[int]

    def losses_wanted(self, first: Sequence[int]) -> list[Sequence[int]]:
        return [first, self.without, self.with_result]


def run(model: str, pairs: int, documents: int | None, tokens: int | None) -> dict[str, Any]:
    """Measure; `documents` 1 and a whole bundled text by default."""
    lm = LanguageModel(*material.load(model))
    count = documents or 1
    many = material.encoded(lm, 16 * count, tokens)
    docs = many[:count]
    context = context_token(lm.tokenizer)
    first = [] if context is None else [context]
    wanted = candidates(lm, docs, first)
    paths: dict[str, Callable[[], list[float]]] = {
        "three unbatched passes": lambda: _unbatched(lm, wanted, first),
        "padded batch": lambda: _padded(lm, wanted, first),
    }
    truth = three_losses(lm, docs, wanted)
    agrees = {name: _close(path(), truth) for name, path in paths.items()}

    def ours() -> float:
        return len(three_losses(lm, docs, wanted)) / 3

    def pruned() -> float:
        _kept_with_floor(lm, docs, wanted)
        return len(wanted)

    comparisons = compare(
        ours,
        {name: (lambda path=path: len(path()) / 3) for name, path in paths.items()},  # type: ignore[misc]
        agrees,
        pairs,
    )
    same = _kept_with_floor(lm, docs, wanted) == _kept(truth)
    comparisons += compare(pruned, {PRUNED: ours}, {PRUNED: same}, pairs)
    grown = {n: candidates(lm, many[:n], first) for n in (count, 4 * count, 16 * count)}
    return document(
        "score",
        comparisons,
        _ceiling_share(lm, docs, wanted, pairs),
        growth(lambda n: three_losses(lm, many[:n], grown[n]), list(grown)),
    )


def candidates(
    lm: LanguageModel, documents: Sequence[EncodedDocument], first: Sequence[int]
) -> list[Candidate]:
    """Made-up calls spread over every document, each with a result."""
    separator = encode_piece(lm.tokenizer, "\n")
    found = []
    for own in documents:
        for p in range(POSITIONS):
            position = (p + 1) * len(own.ids) // (POSITIONS + 1)
            for c in range(CALLS):
                a, b = 12 + 7 * p, 3 + c
                call = ("Calculator", f"{a} * {b}")
                without = empty_call_pieces(*call, material.SYNTAX)
                having = call_pieces(*call, str(a * b), material.SYNTAX)
                prefixes = [
                    [*first, *encode_pieces(lm.tokenizer, pieces), *separator]
                    for pieces in (without, having)
                ]
                found.append(Candidate(own.ids, position, *prefixes))
    return found


def three_losses(
    lm: LanguageModel,
    documents: Sequence[EncodedDocument],
    wanted: Sequence[Candidate],
    budget: int = BUDGET,
) -> list[float]:
    """Three losses per candidate, as the stages compute them."""
    weights, tokens = loss_weights(), Budget(budget)
    plain = plain_losses(
        lm, context_token(lm.tokenizer), [own.ids for own in documents], weights, budget=tokens
    )
    of_text = {id(own.ids): losses_T for own, losses_T in zip(documents, plain, strict=True)}
    requests = [
        LossRequest(prefix, own.text, [own.position])
        for prefixes in ([own.without for own in wanted], [own.with_result for own in wanted])
        for own, prefix in zip(wanted, prefixes, strict=True)
    ]
    found = losses(lm, requests, weights, budget=tokens)
    without, having = found[: len(wanted)], found[len(wanted) :]
    return [
        value
        for n, own in enumerate(wanted)
        for value in (float(of_text[id(own.text)][own.position]), without[n][0], having[n][0])
    ]


def _kept(found: Sequence[float]) -> list[int]:
    """Candidates whose gain reaches tau_f."""
    threes = zip(found[::3], found[1::3], found[2::3], strict=True)
    return [n for n, (none, call, result) in enumerate(threes) if min(none, call) - result >= TAU_F]


def _kept_with_floor(
    lm: LanguageModel, documents: Sequence[EncodedDocument], wanted: Sequence[Candidate]
) -> list[int]:
    """The same, where the pass without the result is made only for calls that can still pass."""
    weights, tokens = loss_weights(), Budget(BUDGET)
    plain = plain_losses(
        lm, context_token(lm.tokenizer), [own.ids for own in documents], weights, budget=tokens
    )
    of_text = {id(own.ids): losses_T for own, losses_T in zip(documents, plain, strict=True)}
    none = [float(of_text[id(own.text)][own.position]) for own in wanted]
    able = [n for n, loss in enumerate(none) if loss >= FLOOR]

    def passes(numbers: Sequence[int], with_result: bool) -> dict[int, float]:
        requests = [
            LossRequest(
                wanted[n].with_result if with_result else wanted[n].without,
                wanted[n].text,
                [wanted[n].position],
            )
            for n in numbers
        ]
        found = losses(lm, requests, weights, budget=tokens)
        return {n: values[0] for n, values in zip(numbers, found, strict=True)}

    result = passes(able, with_result=True)
    call = passes([n for n in able if none[n] - result[n] >= FLOOR], with_result=False)
    return [n for n in call if min(none[n], call[n]) - result[n] >= TAU_F]


@torch.inference_mode()
def _unbatched(lm: LanguageModel, wanted: Sequence[Candidate], first: Sequence[int]) -> list[float]:
    """Three full passes per candidate, one after the other, with the logits of every token."""
    found = []
    for own in wanted:
        for prefix in own.losses_wanted(first):
            ids = torch.tensor([[*prefix, *own.text]], device=lm.device)
            logits = lm.model(ids).logits[0]
            found.append(_from_logits(logits, ids[0], len(prefix) + own.position))
    return found


@torch.inference_mode()
def _padded(lm: LanguageModel, wanted: Sequence[Candidate], first: Sequence[int]) -> list[float]:
    """Padded batches in the order of the candidates, with the logits of every token."""
    rows = [
        ([*prefix, *own.text], len(prefix) + own.position)
        for own in wanted
        for prefix in own.losses_wanted(first)
    ]
    found = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        ids = right_padded([row for row, _ in part], lm.device)
        mask = right_padded([[1] * len(row) for row, _ in part], lm.device)
        logits = lm.model(ids, attention_mask=mask).logits
        for n, (row, at) in enumerate(part):
            found.append(_from_logits(logits[n, : len(row)], ids[n, : len(row)], at))
    return found


def _from_logits(logits_LV: torch.Tensor, ids_L: torch.Tensor, at: int) -> float:
    """L_i from all logits of a row, where x_i stands at `at`."""
    logprobs = logits_LV[:-1].float().log_softmax(-1)
    own = logprobs.gather(1, ids_L[1:, None])[:, 0]
    weights = loss_weights()
    return weighted_loss(own[at - 1 : at - 1 + len(weights)].cpu(), weights)


def _close(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(found) == len(wanted) and all(
        abs(a - b) <= TOLERANCE for a, b in zip(found, wanted, strict=True)
    )


def _ceiling_share(
    lm: LanguageModel,
    documents: Sequence[EncodedDocument],
    wanted: Sequence[Candidate],
    pairs: int,
) -> float:
    """Our tokens per second over those of a bare forward pass over as many tokens."""
    horizon = len(loss_weights())
    lengths = [1 + len(own.ids) for own in documents]
    lengths += [
        len(prefix) + min(own.position + horizon, len(own.text))
        for own in wanted
        for prefix in (own.without, own.with_result)
    ]
    total = sum(lengths)
    width = round(total / len(lengths))
    rows = max(BUDGET // width, 1)
    ids = torch.randint(5, len(lm.tokenizer), (rows, width), device=lm.device)

    @torch.inference_mode()
    def bare() -> float:
        left = round(total / width)
        while left > 0:
            lm.trunk(ids[: min(rows, left)], use_cache=False)
            left -= rows
        return total

    def ours() -> float:
        three_losses(lm, documents, wanted)
        return total

    found = rates({"ours": ours, "bare": bare}, pairs)
    return statistics.median(
        a.per_cpu_s / b.per_cpu_s for a, b in zip(found["ours"], found["bare"], strict=True)
    )
