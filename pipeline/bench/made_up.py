"""Made-up calls and their three losses, for measurements where no real model writes any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.bench import material
from pipeline.calls import call_pieces, empty_call_pieces
from pipeline.lm.forward import Budget, LanguageModel
from pipeline.lm.loss import LossRequest, loss_weights, losses, plain_losses
from pipeline.lm.tokens import EncodedDocument, context_token, encode_piece, encode_pieces

POSITIONS, CALLS = 3, 2  # candidates per document: different calls at each of some positions
BUDGET = 4096


@dataclass(frozen=True)
class Candidate:
    """A call with its result, at a position of a document."""

    text: Sequence[int]
    position: int
    without: Sequence[int]  # context token + e(c, eps) + separator
    with_result: Sequence[int]


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
