"""The filter end to end: pruning is lossless, batches do not matter, and a real model agrees.

The real model is looked for in `CALLSIEVE_MODEL`, else `.cache/models/SmolLM2-135M-Instruct`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import reference
import tiny

from pipeline.calls import TEXT
from pipeline.config import Config, Model, parse_config
from pipeline.context import Context
from pipeline.lm.checkpoint import load_model
from pipeline.lm.forward import LanguageModel
from pipeline.lm.prompts import load_prompt
from pipeline.records import Document, ExecutedCall, ScoredCall, SelectedCall, to_table
from pipeline.stages import execute, sample, score, select

ROOT = Path(__file__).parents[1]
REAL = Path(os.environ.get("CALLSIEVE_MODEL") or ROOT / ".cache/models/SmolLM2-135M-Instruct")


@dataclass(frozen=True)
class Outcome:
    """What the stages made of some documents."""

    scored: list[ScoredCall]
    selected: list[SelectedCall]
    context: Context

    @property
    def kept(self) -> set[str]:
        return {call.call_id for call in self.selected if call.kept}


def sieve(config: Config, folder: Path, lm: LanguageModel, documents: list[Document]) -> Outcome:
    """Sample, execute, score and select in memory, as one shard."""
    context = tiny.make_context(folder, config, lm)
    marker = {"fingerprint": "print"}
    candidates = list(sample.run(documents, context))
    executed = list(execute.run(candidates, documents, context))
    context.folder.write_part("execute", 0, 1, to_table(executed, ExecutedCall), marker)
    pool = score.result_pool(context)
    scored = list(score.run(executed, documents, pool, context))
    context.folder.write_part("score", 0, 1, to_table(scored, ScoredCall), marker)
    reasons = select.decide([(scored, documents)], select.thresholds(context), context)
    selected = list(select.run(scored, reasons, context))
    context.executor().close()
    return Outcome(scored, selected, context)


def options(**changes: Any) -> dict[str, Any]:
    sampled = {"constrain": True, "k": 4, "m": 2, "max_new_tokens": 40, **changes.pop("sample", {})}
    return {"sample": sampled, **changes}


# -- pruning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "kind"), tiny.PAIRS)
def test_pruning_keeps_exactly_the_same_calls(
    shape: str, kind: str, inputs: Path, tmp_path: Path
) -> None:
    lm = tiny.taught_lm(shape, kind)
    documents = tiny.documents(tiny.TEXTS[:4])

    def config_of(tau: float, floor: float | None) -> Config:
        changes = options(gain_floor=floor, select={"tau_f": tau}, score={"null_share": 0.0})
        return tiny.make_config(inputs, **changes)

    whole = sieve(config_of(0.0, None), tmp_path / "whole", lm, documents)
    gains = sorted(call.gain for call in whole.scored if call.gain is not None and call.gain > 0)
    losses = sorted(call.loss_none for call in whole.scored)
    assert len(gains) > 4
    # between two gains: the last digits of a gain may depend on the batch
    low, high, least = sum(gains[:2]) / 2, sum(gains[-2:]) / 2, sum(losses[2:4]) / 2
    for n, (tau, floor) in enumerate(
        (
            (low, low),  # the threshold is the floor
            (high, low),  # the threshold is above the floor
            (least, least),  # even L(eps) is below at some positions: they are not sampled
        )
    ):
        context = tiny.make_context(tmp_path / "whole", config_of(tau, None))
        unpruned = select.decide([(whole.scored, documents)], select.thresholds(context), context)
        pruned = sieve(config_of(tau, floor), tmp_path / str(n), lm, documents)
        assert pruned.kept == {name for name, reason in unpruned.items() if reason == "kept"}
        assert pruned.kept or n == 2, "nothing was kept: this shows nothing"
        unscored = sum(c.gain is None and c.result is not None for c in pruned.selected)
        missing = len(whole.scored) - len(pruned.scored)
        assert unscored + missing > 0, "nothing was pruned: this shows nothing"
        numbers = {c.call_id: c.gain for c in whole.scored}
        for call in pruned.selected:
            if call.kept:  # what is kept has the same numbers
                assert call.gain == pytest.approx(numbers[call.call_id], abs=1e-4)


def test_batches_of_1_and_of_many(inputs: Path, tmp_path: Path) -> None:
    lm = tiny.taught_lm("gpt2", "bos")
    outcomes = []
    for n, (rows, budget) in enumerate([(1, 1), (32, 3000), (512, 200_000)]):
        settings = options(
            sample={"max_rows": rows, "token_budget": budget}, score={"token_budget": budget}
        )
        config = tiny.make_config(inputs, **settings)
        outcomes.append(sieve(config, tmp_path / str(n), lm, tiny.documents(tiny.TEXTS[:4])))
    first, *others = outcomes
    assert first.kept
    for other in others:
        assert other.kept == first.kept
        assert other.context.counts == first.context.counts
        for one, two in zip(first.selected, other.selected, strict=True):
            assert (one.call_id, one.result, one.reason, one.sample_count) == (
                two.call_id, two.result, two.reason, two.sample_count
            )  # fmt: skip
            for name in ("p_api", "loss_none", "loss_call", "loss_result", "gain", "gain_null"):
                assert getattr(one, name) == pytest.approx(getattr(two, name), abs=1e-4)


def test_a_wanted_rate_is_kept_to(inputs: Path, tmp_path: Path) -> None:
    lm = tiny.taught_lm("llama", "bytes")
    settings = options(select={"tau_f": {"false_keep_rate": 0.8}, "lookahead": "allow"})
    outcome = sieve(tiny.make_config(inputs, **settings), tmp_path, lm, tiny.documents())
    found = select.thresholds(outcome.context)
    assert any(threshold.tau_f is not None for threshold in found.values())
    for tool, threshold in found.items():
        own = [c for c in outcome.selected if c.tool == tool and c.gain is not None]
        if threshold.tau_f is None:
            assert not any(c.kept for c in own)
            continue
        real = sum(c.gain >= threshold.tau_f for c in own)
        null = sum(c.gain_null is not None and c.gain_null >= threshold.tau_f for c in own)
        assert null / real <= 0.8
        assert threshold.false_keep_rate == pytest.approx(null / real)
        assert all(c.gain >= threshold.tau_f for c in own if c.kept)


def test_a_failed_call_is_a_row_and_no_more(inputs: Path, tmp_path: Path) -> None:
    """Free samples of a model that writes nonsense: failures are data."""
    lm = tiny.taught_lm("llama", "bytes")
    settings = options(sample={"constrain": False, "m": 4, "max_new_tokens": 20})
    outcome = sieve(tiny.make_config(inputs, **settings), tmp_path, lm, tiny.documents())
    failed = [call for call in outcome.selected if call.result is None]
    assert failed
    for call in failed:
        assert call.reason == "tool_error" and call.error_kind and call.error
        assert (call.loss_call, call.loss_result, call.gain) == (None, None, None)
    counts = outcome.context.counts["Calculator"]
    errors = sum(n for what, n in counts.items() if what.startswith("error:"))
    assert errors == len(failed) == counts["tool_error"]


# -- the real model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Iterator[LanguageModel]:
    if not REAL.is_dir():
        pytest.skip(f"{REAL.name} is not here; scripts/quickstart brings it")
    yield LanguageModel(*load_model(Model(path=str(REAL), device="cpu")))


REAL_TEXTS = (
    "The farm sold 37 crates with 24 bottles each, so 888 bottles left the yard by noon.",
    "Of the 1,310 tickets 874 were gone by Monday, 4 May 2020, which left 436 for Zürich.",
)


@pytest.mark.slow
def test_real_model_agrees_with_the_reference(
    real: LanguageModel, inputs: Path, tmp_path: Path
) -> None:
    """Every stored number of a small run on the 135M model, to 1e-4 in fp32."""
    raw = tiny.raw_config(inputs, **options(sample={"k": 2, "m": 2, "constrain": False}))
    config = parse_config({**raw, "prompts": str(ROOT / "data" / "prompts"), "seed": 2})
    documents = [tiny.document(text, date="2020-05-04") for text in REAL_TEXTS]
    outcome = sieve(config, tmp_path, real, documents)
    text_of = {document.doc_id: document.text for document in documents}
    pool = score.result_pool(outcome.context)
    assert len(outcome.scored) >= 4 and any(call.result for call in outcome.scored)
    heads = {tool: load_prompt(config.prompts, tool, TEXT).head for tool in config.tool_names}
    for call in outcome.scored:
        text = text_of[call.doc_id]
        i = call.token_index
        assert call.p_api == pytest.approx(
            reference.p_at(real, heads[call.tool], text, i), rel=1e-3
        )
        assert call.char_start == reference.char_start(real.tokenizer, text, i)
        if call.result is None:
            continue
        null = score.null_result(call, pool, config)
        wanted = reference.losses_of_call(real, text, call, null)
        assert call.loss_none == pytest.approx(wanted.none, abs=1e-4)
        assert call.loss_call == pytest.approx(wanted.call, abs=1e-4)
        assert call.loss_result == pytest.approx(wanted.result, abs=1e-4)
        assert call.gain == pytest.approx(wanted.gain, abs=2e-4)
        if wanted.gain_null is not None:
            assert call.gain_null == pytest.approx(wanted.gain_null, abs=2e-4)
    # the same samples, drawn one by one from whole contexts
    tool, document = "Calculator", documents[0]
    head, x = reference.sampling_context(real.tokenizer, heads[tool], document.text)
    drawn: dict[int, list[str | None]] = {}
    for i in reference.best_positions(real, heads[tool], document.text, 0.0, 2):
        names = [(2, document.doc_id, tool, i, s) for s in range(2)]
        drawn[i] = [reference.draw(real, tool, head + x[:i], name, 40) for name in names]
    found = {
        (call.token_index, call.arguments): call.sample_count
        for call in outcome.scored
        if call.tool == tool and call.doc_id == document.doc_id
    }
    assert found == reference.merged(drawn)


@pytest.mark.slow
def test_a_true_call_stands_out_on_the_real_model(
    real: LanguageModel, inputs: Path, tmp_path: Path
) -> None:
    """37 * 24 -> 888 gains about two nats, a wrong result and another place do not."""
    text = REAL_TEXTS[0]
    gains = {}
    for arguments, result in (("37 * 24", "888"), ("37 * 24", "731"), ("37 + 24", "61")):
        call = _call_before(real, text, " 888", arguments, result)
        gains[result] = reference.losses_of_call(real, text, call, None).gain
    elsewhere = _call_before(real, text, " bottles each", "37 * 24", "888")
    assert gains["888"] > 1.0
    assert max(gains["731"], gains["61"]) < 0.3
    assert reference.losses_of_call(real, text, elsewhere, None).gain < 0.3


@dataclass(frozen=True)
class _Call:
    tool: str
    arguments: str
    result: str
    token_index: int


def _call_before(lm: LanguageModel, text: str, before: str, arguments: str, result: str) -> _Call:
    at = text.index(before)
    (index,) = (i for i in range(len(text)) if reference.char_start(lm.tokenizer, text, i) == at)
    return _Call("Calculator", arguments, result, index)
