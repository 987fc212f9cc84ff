"""The weighted loss: values by hand, a naive reference, and what must not change them."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import tiny
import torch
from torch import nn

from pipeline.calls import CallSyntax
from pipeline.lm.checkpoint import add_markers
from pipeline.lm.forward import Budget, LanguageModel, by_budget, right_padded
from pipeline.lm.loss import (
    LossRequest,
    loss_weights,
    losses,
    plain_losses,
    weighted_loss,
    windowed_loss,
)
from pipeline.lm.tokens import context_token, encode_document
from pipeline.records import ExecutedCall, ScoredCall, call_id
from pipeline.stages import score

LN = math.log
COMBINATIONS = [(shape, kind) for shape in tiny.SHAPES for kind in tiny.KINDS]


# -- by hand --------------------------------------------------------------------------------------


def test_weights_of_the_paper() -> None:
    assert loss_weights().tolist() == pytest.approx([0.3333, 0.2667, 0.2, 0.1333, 0.0667], abs=5e-5)
    assert loss_weights(5).tolist() == pytest.approx([n / 15 for n in (5, 4, 3, 2, 1)])


@pytest.mark.parametrize(
    ("horizon", "wanted"),
    [
        (1, [1.0]),
        (2, [2 / 3, 1 / 3]),
        (3, [3 / 6, 2 / 6, 1 / 6]),
        (10, [n / 55 for n in range(10, 0, -1)]),
    ],
)
def test_weights_of_another_horizon(horizon: int, wanted: list[float]) -> None:
    assert loss_weights(horizon).tolist() == pytest.approx(wanted)
    assert float(loss_weights(horizon).sum()) == pytest.approx(1.0)


def test_loss_of_known_probabilities() -> None:
    # ln 2 / 3 + 4 ln 4 / 15 + ln 5 / 5 + 2 ln 10 / 15 + ln 1.25 / 15
    logprobs = torch.tensor([0.5, 0.25, 0.2, 0.1, 0.8]).log()
    assert weighted_loss(logprobs, loss_weights()) == pytest.approx(1.244502, abs=1e-5)
    assert weighted_loss(torch.tensor([1.0] * 5).log(), loss_weights()) == 0.0


def test_tail_of_three_tokens() -> None:
    logprobs = torch.tensor([0.5, 0.25, 0.2]).log()
    fixed = LN(2) / 3 + 4 * LN(4) / 15 + LN(5) / 5  # = 0.922615
    assert weighted_loss(logprobs, loss_weights()) == pytest.approx(0.922615, abs=1e-5)
    assert weighted_loss(logprobs, loss_weights()) == pytest.approx(fixed)
    # of the weight 1 only 12/15 is used
    assert weighted_loss(logprobs, loss_weights(), "renormalise") == pytest.approx(
        1.153269, abs=1e-5
    )


class Bigram(nn.Module):
    """A causal model whose next token depends on the last one alone, by a table of probabilities.

    Token 9 is a hint: once it stands anywhere before, every token of the text gets `hinted`.
    """

    def __init__(self, table: torch.Tensor, hinted: float) -> None:
        super().__init__()
        self.table, self.hinted = table, hinted
        self.device = torch.device("cpu")
        self.head = nn.Identity()

    @property
    def base_model(self) -> Any:
        return self.trunk

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def trunk(self, ids_BL: torch.Tensor, **options: Any) -> SimpleNamespace:
        p = self.table[ids_BL].clone()
        p[(ids_BL == 9).cumsum(1) > 0] = self.hinted
        return SimpleNamespace(last_hidden_state=p.log())

    def forward(self, ids_BL: torch.Tensor, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.trunk(ids_BL).last_hidden_state)


@pytest.fixture
def toy() -> LanguageModel:
    """p(2|1)=.5 p(3|2)=.25 p(4|3)=.2 p(5|4)=.1 p(6|5)=.8 p(7|6)=.4; .1 each after the hint."""
    table = torch.zeros(10, 10)
    for last, p in enumerate([0.6, 0.5, 0.25, 0.2, 0.1, 0.8, 0.4]):
        table[last] = (1 - p) / 9
        table[last, last + 1] = p
    table[7:] = 0.1
    return LanguageModel(Bigram(table, 0.1), None)


def test_known_model(toy: LanguageModel) -> None:
    text = [1, 2, 3, 4, 5, 6, 7]
    found = losses(toy, [LossRequest([0], text, [1, 0, 4])], loss_weights())[0]
    at_0 = (5 * LN(1 / 0.6) + 4 * LN(2) + 3 * LN(4) + 2 * LN(5) + LN(10)) / 15
    tail = (5 * LN(10) + 4 * LN(1.25) + 3 * LN(2.5)) / 15
    assert found == pytest.approx([1.244502, at_0, tail], abs=1e-5)
    (renormalised,) = losses(toy, [LossRequest([0], text, [4])], loss_weights(), "renormalise")[0]
    assert renormalised == pytest.approx(tail * 15 / 12, abs=1e-5)
    (three,) = losses(toy, [LossRequest([0], text, [1])], loss_weights(3))[0]
    assert three == pytest.approx((3 * LN(2) + 2 * LN(4) + LN(5)) / 6, abs=1e-5)
    assert plain_losses(toy, 0, [text], loss_weights())[0].tolist() == pytest.approx(
        [*losses(toy, [LossRequest([0], text, range(7))], loss_weights())[0]]
    )


def test_what_is_prepended_is_seen_and_carries_no_weight(toy: LanguageModel) -> None:
    text = [1, 2, 3, 4, 5, 6, 7]
    prefixes = ([0], [0, 8, 8, 8], [0, 9], [0, 8, 9, 8, 8])
    found = losses(toy, [LossRequest(p, text, [1]) for p in prefixes], loss_weights())
    assert [value for (value,) in found] == pytest.approx(
        [1.244502, 1.244502, LN(10), LN(10)], abs=1e-5
    )


def test_position_without_any_context(toy: LanguageModel) -> None:
    text = [1, 2, 3]
    with pytest.raises(ValueError, match="position 0 needs a context token"):
        losses(toy, [LossRequest([], text, [0])], loss_weights())
    (plain,) = plain_losses(toy, None, [text], loss_weights())
    assert plain[0] == math.inf
    assert plain[1:].tolist() == pytest.approx(
        [(5 * LN(2) + 4 * LN(4)) / 15, 5 * LN(4) / 15], abs=1e-6
    )


@pytest.mark.parametrize("tail", ["fixed", "renormalise"])
@pytest.mark.parametrize("horizon", [1, 3, 5, 8])
def test_losses_at_all_positions_equal_single_ones(tail: Any, horizon: int) -> None:
    logprobs = torch.rand(11, generator=torch.Generator().manual_seed(0)).double().log()
    weights = loss_weights(horizon)
    single = [weighted_loss(logprobs[i : i + horizon], weights, tail) for i in range(11)]
    assert windowed_loss(logprobs, weights, tail).tolist() == pytest.approx(single)


# -- batches --------------------------------------------------------------------------------------


def some_requests(lm: LanguageModel) -> list[LossRequest]:
    """Prefixes and texts of very different lengths, several positions of a text in one request."""
    draw = random.Random(4)
    start = reference.before_all(lm.tokenizer)
    requests = []
    for text in tiny.TEXTS:
        ids, _ = encode_document(lm.tokenizer, text)
        for length in (0, 3, 17):
            prefix = [*start, *draw.choices(range(5, 300), k=length)]
            positions = [*draw.sample(range(len(ids)), 3), len(ids) - 1, 0]
            requests.append(LossRequest(prefix, ids, positions))
    return requests


@pytest.mark.parametrize(("shape", "kind"), COMBINATIONS)
def test_losses_agree_with_the_reference_in_any_batch(shape: str, kind: str) -> None:
    lm = tiny.make_lm(shape, kind)
    requests = some_requests(lm)
    wanted = [
        [reference.loss(lm.model, r.prefix, r.text, i) for i in r.positions] for r in requests[:6]
    ]
    alone = losses(lm, requests, loss_weights(), budget=Budget(1))
    for budget in (200, 100_000):
        together = losses(lm, requests, loss_weights(), budget=Budget(budget))
        for one, other in zip(alone, together, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    for one, other in zip(alone, wanted, strict=False):
        assert one == pytest.approx(other, abs=1e-4)
    order = list(range(len(requests)))
    random.Random(0).shuffle(order)
    shuffled = losses(lm, [requests[n] for n in order], loss_weights(), budget=Budget(300))
    for place, n in enumerate(order):
        assert shuffled[place] == pytest.approx(alone[n], abs=1e-4)


@pytest.mark.parametrize(("shape", "kind"), tiny.PAIRS)
@pytest.mark.parametrize("tail", ["fixed", "renormalise"])
def test_plain_losses_agree_with_the_reference(shape: str, kind: str, tail: Any) -> None:
    lm = tiny.make_lm(shape, kind)
    start = context_token(lm.tokenizer)
    assert [start] == reference.before_all(lm.tokenizer)
    texts = [encode_document(lm.tokenizer, text)[0] for text in tiny.TEXTS]
    batched = plain_losses(lm, start, texts, loss_weights(), tail, Budget(100_000))
    alone = plain_losses(lm, start, texts, loss_weights(), tail, Budget(1))
    for text, one, other in zip(texts, batched, alone, strict=True):
        assert one.tolist() == pytest.approx(other.tolist(), abs=1e-4)
        assert len(one) == len(text)
        for i in (0, 1, len(text) // 2, len(text) - 3, len(text) - 1):
            wanted = reference.loss(lm.model, [start], text, i, tail=tail)
            assert float(one[i]) == pytest.approx(wanted, abs=1e-4)


def test_out_of_memory_halves_the_budget_and_changes_nothing(monkeypatch: Any) -> None:
    lm = tiny.make_lm("llama", "bytes")
    requests = some_requests(lm)
    wanted = losses(lm, requests, loss_weights())
    hidden = LanguageModel.hidden

    def tight(self: Any, ids_BL: torch.Tensor, **options: Any) -> torch.Tensor:
        if ids_BL.numel() > 300:
            raise torch.OutOfMemoryError("too large")
        return hidden(self, ids_BL, **options)

    monkeypatch.setattr(LanguageModel, "hidden", tight)
    budget = Budget(4000)
    seen: list[int] = []
    found = losses(lm, requests, loss_weights(), budget=budget, on_done=seen.append)
    assert 75 < budget.tokens <= 300
    assert sum(seen) == len(requests)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_batches_keep_to_the_budget() -> None:
    draw = random.Random(1)
    lengths = [draw.randrange(1, 400) for _ in range(300)]
    batches = by_budget(lengths, 1000)
    assert sorted(i for batch in batches for i in batch) == list(range(300))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= 1000
    assert by_budget([], 10) == []
    assert right_padded([[1, 2, 3], [4]], torch.device("cpu")).tolist() == [[1, 2, 3], [4, 0, 0]]


# -- the stage ------------------------------------------------------------------------------------


def executed(lm: LanguageModel, text: str, calls: list[tuple[str, str, str | None]]) -> list[Any]:
    """Executed calls at three positions each, the first and the last token among them."""
    document = tiny.document(text)
    ids, starts = encode_document(lm.tokenizer, text)
    start = context_token(lm.tokenizer)
    plain = plain_losses(lm, start, [ids], loss_weights())[0]
    rows = []
    for n, (tool, arguments, result) in enumerate(calls):
        for i in sorted({0, 3 + 2 * n, len(ids) - 1 - n}):
            rows.append(
                ExecutedCall(
                    call_id=call_id(document.doc_id, tool, starts[i], arguments),
                    doc_id=document.doc_id,
                    tool=tool,
                    char_start=starts[i],
                    token_index=i,
                    arguments=arguments,
                    sample_count=1,
                    p_api=0.1,
                    loss_none=float(plain[i]),
                    result=result,
                    error_kind=None if result is not None else "syntax",
                    error=None if result is not None else "no number",
                    seconds=0.0,
                    cached=False,
                )
            )
    return rows


CALLS: list[tuple[str, str, str | None]] = [
    ("Calculator", "37 * 24", "888"),
    ("Calculator", "12 x (3 + 4)", "84"),
    ("Calculator", "37 * ", None),
    ("Calendar", "", "Today is Monday, May 4, 2020."),
    ("WikiSearch", "Café Zoë \\ {x}", "Rome: it says “日本 😀”…"),
]


def score_run(
    lm: LanguageModel, inputs: Path, folder: Path, texts: tuple[str, ...], **changes: Any
) -> tuple[list[ScoredCall], dict[str, list[str]]]:
    config = tiny.make_config(inputs, **changes)
    context = tiny.make_context(folder, config, lm)
    calls = [call for text in texts for call in executed(lm, text, CALLS)]
    pool: dict[str, list[str]] = {}
    for call in calls:
        if call.result is not None and call.result not in pool.setdefault(call.tool, []):
            pool[call.tool].append(call.result)
    documents = [tiny.document(text) for text in texts]
    return list(score.run(calls, documents, pool, context)), pool


@pytest.mark.parametrize(("shape", "kind"), COMBINATIONS)
def test_every_stored_loss_agrees_with_the_reference(
    shape: str, kind: str, inputs: Path, tmp_path: Path
) -> None:
    lm = tiny.make_lm(shape, kind)
    texts = (tiny.TEXTS[0], tiny.TEXTS[3])
    scored, pool = score_run(lm, inputs, tmp_path, texts)
    assert len(scored) == len(texts) * len(CALLS) * 3
    config = tiny.make_config(inputs)
    for call in scored:
        text = next(t for t in texts if tiny.document(t).doc_id == call.doc_id)
        if call.result is None:
            assert (call.loss_call, call.loss_result, call.gain, call.gain_null) == (None,) * 4
            continue
        null = score.null_result(call, pool, config)
        assert (null is None) == (len(pool[call.tool]) == 1)
        assert null != call.result
        wanted = reference.losses_of_call(lm, text, call, null)
        assert call.loss_none == pytest.approx(wanted.none, abs=1e-4)
        assert call.loss_call == pytest.approx(wanted.call, abs=1e-4)
        assert call.loss_result == pytest.approx(wanted.result, abs=1e-4)
        assert call.gain == pytest.approx(wanted.gain, abs=1e-4)
        if wanted.gain_null is None:
            assert call.gain_null is None
        else:
            assert call.gain_null == pytest.approx(wanted.gain_null, abs=1e-4)


@pytest.mark.parametrize(("shape", "kind"), tiny.PAIRS)
def test_the_budget_of_the_stage_changes_nothing(
    shape: str, kind: str, inputs: Path, tmp_path: Path
) -> None:
    lm = tiny.make_lm(shape, kind)
    few, _ = score_run(lm, inputs, tmp_path / "1", tiny.TEXTS[:3], score={"token_budget": 1})
    many, _ = score_run(lm, inputs, tmp_path / "2", tiny.TEXTS[:3], score={"token_budget": 50_000})
    assert [call.call_id for call in few] == [call.call_id for call in many]
    for one, other in zip(few, many, strict=True):
        for name in ("loss_call", "loss_result", "gain", "gain_null"):
            assert getattr(one, name) == (
                None if getattr(other, name) is None
                else pytest.approx(getattr(other, name), abs=1e-4)
            )  # fmt: skip


def test_options_of_the_stage_are_used(inputs: Path, tmp_path: Path) -> None:
    lm = tiny.make_lm("llama", "bos")
    text = tiny.TEXTS[0]
    options = {"separator": " :: ", "tail": "renormalise", "null_share": 0.0}
    scored, _ = score_run(lm, inputs, tmp_path, (text,), score=options)
    for call in scored:
        if call.result is not None:
            wanted = reference.losses_of_call(lm, text, call, None, " :: ", "renormalise")
            assert call.loss_call == pytest.approx(wanted.call, abs=1e-4)
            assert call.loss_result == pytest.approx(wanted.result, abs=1e-4)
        assert call.gain_null is None


def test_bare_form_of_the_call_without_a_result(inputs: Path, tmp_path: Path) -> None:
    lm = tiny.make_lm("llama", "bos")
    text = tiny.TEXTS[0]
    form = {"empty_result": "bare"}
    bare, _ = score_run(lm, inputs, tmp_path, (text,), call_format=form)
    x = reference.text_ids(lm.tokenizer, text)
    for call in bare:
        if call.result is not None:
            pieces = [" [", f"{call.tool}({call.arguments})", "]", "\n"]
            z = [token for piece in pieces for token in reference.piece_ids(lm.tokenizer, piece)]
            start = reference.before_all(lm.tokenizer)
            wanted = reference.loss(lm.model, [*start, *z], x, call.token_index)
            assert call.loss_call == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(("shape", "kind"), tiny.PAIRS)
def test_rendering_with_added_markers(shape: str, kind: str, inputs: Path, tmp_path: Path) -> None:
    plain = tiny.make_tokenizer(kind)
    tokenizer = copy.deepcopy(plain)
    model = tiny.make_model(shape, tokenizer)
    add_markers(model, tokenizer, CallSyntax("special"))
    lm = LanguageModel(model.eval(), tokenizer)
    text = tiny.TEXTS[0]
    scored, _ = score_run(lm, inputs, tmp_path, (text,), call_format={"rendering": "special"})
    x, start = reference.text_ids(plain, text), reference.before_all(plain)
    opening, closing, arrow = tokenizer.convert_tokens_to_ids(["<API>", "</API>", "→"])

    def wanted(call: ScoredCall, result: str) -> float:
        head = reference.piece_ids(plain, f"{call.tool}({call.arguments}) ")
        tail = reference.piece_ids(plain, f" {result}")
        z = [opening, *head, arrow, *tail, closing, *reference.piece_ids(plain, "\n")]
        return reference.loss(model, [*start, *z], x, call.token_index)

    for call in scored:
        if call.result is not None:
            assert call.loss_result == pytest.approx(wanted(call, call.result), abs=1e-4)
            assert call.loss_call == pytest.approx(wanted(call, ""), abs=1e-4)


def test_pruned_calls_are_those_that_cannot_reach_the_floor(inputs: Path, tmp_path: Path) -> None:
    lm = tiny.make_lm("neox", "metaspace")
    every, _ = score_run(lm, inputs, tmp_path / "every", tiny.TEXTS)
    gains = sorted(call.gain for call in every if call.gain is not None and call.gain > 0)
    middle = len(gains) // 3
    floor = (gains[middle - 1] + gains[middle]) / 2  # last digits may depend on the batch
    changes = {"gain_floor": floor, "select": {"tau_f": floor}}
    pruned, _ = score_run(lm, inputs, tmp_path / "pruned", tiny.TEXTS, **changes)
    assert sum(call.gain is None for call in pruned) > sum(call.gain is None for call in every)
    for tau in (floor, floor + 0.05, (gains[-2] + gains[-1]) / 2):
        for one, other in zip(every, pruned, strict=True):
            assert (one.gain is not None and one.gain >= tau) == (
                other.gain is not None and other.gain >= tau
            )
            assert (one.gain_null is not None and one.gain_null >= tau) == (
                other.gain_null is not None and other.gain_null >= tau
            )


def test_equal_calls_of_one_document_share_a_pass(inputs: Path, tmp_path: Path) -> None:
    lm = tiny.make_lm("llama", "bytes")
    config = tiny.make_config(inputs, score={"null_share": 0.0, "token_budget": 1})
    context = tiny.make_context(tmp_path, config, lm)
    calls = executed(lm, tiny.TEXTS[0], [("Calculator", "37 * 24", "888")])
    passes: list[int] = []
    handle = lm.model.register_forward_hook(lambda *_: passes.append(1))
    trunk = lm.trunk.register_forward_hook(lambda *_: passes.append(1))
    list(score.run(calls, [tiny.document(tiny.TEXTS[0])], {}, context))
    handle.remove()
    trunk.remove()
    assert len(calls) == 3
    assert len(passes) == 2  # with the result and without, for all three positions
