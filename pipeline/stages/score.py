"""Stage `score`: the losses of the filter for every executed call (method, section 4).

    callsieve score CONFIG --run-dir RUN

Losses are not negative and the gain is min(L(eps), L(e(c,eps))) - L(e(c,r)), so the pass with the
result comes first: where L(eps) - L(e(c,r)) is below the floor no other pass can save the call, and
the pass without the result is made only for the calls that are left (`gain_floor: null` makes all).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from pipeline.calls import call_pieces, empty_call_pieces
from pipeline.config import Config
from pipeline.context import Context
from pipeline.lm.forward import Budget
from pipeline.lm.loss import LossRequest, loss_weights, losses
from pipeline.lm.tokens import context_token, encode_document, encode_piece, encode_pieces
from pipeline.records import Document, ExecutedCall, ScoredCall, extend, stable_hash

ResultPool = Mapping[str, Sequence[str]]
"""Per tool, the distinct results of the whole run in a fixed order."""


def result_pool(context: Context) -> ResultPool:
    """Collect the distinct results per tool over all shards, sorted."""
    table = context.folder.read_all("execute", ["tool", "result"])
    pool: dict[str, set[str]] = {}
    for tool, result in zip(table["tool"].to_pylist(), table["result"].to_pylist(), strict=True):
        if result is not None:
            pool.setdefault(tool, set()).add(result)
    return {tool: sorted(results) for tool, results in pool.items()}


def null_result(call: ExecutedCall, pool: ResultPool, config: Config) -> str | None:
    """A result of another call of the same tool, drawn per call.

    None when there is no other, and for calls outside the share that is asked for.
    """
    others = pool.get(call.tool, ())
    draw = random.Random(stable_hash(config.seed, "null", call.call_id))
    if len(others) < 2 or draw.random() >= config.score.null_share:
        return None
    while True:
        result = draw.choice(others)
        if result != call.result:
            return result


def run(
    calls: list[ExecutedCall], documents: list[Document], pool: ResultPool, context: Context
) -> Iterator[ScoredCall]:
    """Score one shard; failed calls pass through with empty losses, in the order they came."""
    config = context.config
    floor = config.gain_floor
    ran = [n for n, call in enumerate(calls) if call.result is not None]
    with context.progress(None, "passes") as bar:
        scorer = _Scorer(calls, documents, context, bar.update)

        def gains_possible(found: Mapping[int, float]) -> list[int]:
            return [n for n in found if floor is None or calls[n].loss_none - found[n] >= floor]

        result = scorer.losses({n: str(calls[n].result) for n in ran})
        drawn = {n: null_result(calls[n], pool, config) for n in ran}
        null = scorer.losses({n: r for n, r in drawn.items() if r is not None})
        need = sorted({*gains_possible(result), *gains_possible(null)})
        without = scorer.losses(dict.fromkeys(need))
    for n, call in enumerate(calls):
        best = min(call.loss_none, without[n]) if n in without else None
        bound = call.loss_none if best is None else best
        if n in result:
            context.count(call.tool, "executed")
            context.count(call.tool, "pruned_call" if best is None else "scored")
        yield extend(
            call,
            ScoredCall,
            loss_call=without.get(n),
            loss_result=result.get(n),
            gain=None if best is None else best - result[n],
            gain_null=None if n not in null else bound - null[n],
        )


class _Scorer:
    """Computes L_i(z) for calls of one shard; equal z of one document share a pass."""

    def __init__(
        self,
        calls: list[ExecutedCall],
        documents: list[Document],
        context: Context,
        on_done: Callable[[int], object],
    ) -> None:
        self.calls, self.context = calls, context
        self.lm, config = context.language_model(), context.config
        tokenizer = self.lm.tokenizer
        wanted = {call.doc_id for call in calls}
        self.text = {
            d.doc_id: encode_document(tokenizer, d.text)[0] for d in documents if d.doc_id in wanted
        }
        first = context_token(tokenizer)
        self.start = [] if first is None else [first]
        self.separator = encode_piece(tokenizer, config.score.separator)
        self.weights = loss_weights(config.score.horizon)
        self.budget = context.resources.setdefault(
            "score_budget", Budget(config.score.token_budget)
        )
        self.on_done = on_done

    def losses(self, results: Mapping[int, str | None]) -> dict[int, float]:
        """L_i(e(c, r)) per call number; a result of None asks for L_i(e(c, eps))."""
        syntax = self.context.config.call_format.syntax
        groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for n, result in results.items():
            call = self.calls[n]
            pieces = (
                empty_call_pieces(call.tool, call.arguments, syntax)
                if result is None
                else call_pieces(call.tool, call.arguments, result, syntax)
            )
            groups.setdefault((call.doc_id, tuple(pieces)), []).append(n)
        requests = [
            LossRequest(
                [*self.start, *encode_pieces(self.lm.tokenizer, pieces), *self.separator],
                self.text[doc_id],
                [self.calls[n].token_index for n in numbers],
            )
            for (doc_id, pieces), numbers in groups.items()
        ]
        found = losses(
            self.lm,
            requests,
            self.weights,
            self.context.config.score.tail,
            self.budget,
            self.on_done,
        )
        return {
            n: value
            for numbers, values in zip(groups.values(), found, strict=True)
            for n, value in zip(numbers, values, strict=True)
        }
