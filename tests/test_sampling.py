"""Sampling: a naive reference with the same noise, shared keys = plain, and the noise itself."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import reference
import tiny
import torch

from pipeline.calls import TEXT
from pipeline.errors import ConfigError
from pipeline.lm.forward import LanguageModel
from pipeline.lm.noise import gumbel, sample_key
from pipeline.lm.prompts import Prompt
from pipeline.lm.sampling import (
    PromptKeys,
    Row,
    Sampled,
    Settings,
    choose_positions,
    encode_prompt,
    read_positions,
    sample_hidden,
    sample_plain,
    sample_rows,
)
from pipeline.lm.shared_prefix import fits
from pipeline.lm.tokens import EncodedDocument, encode_document, encode_piece
from pipeline.records import Candidate, Document
from pipeline.stages import sample

COMBINATIONS = [(shape, kind) for shape in tiny.SHAPES for kind in tiny.KINDS]
SETTINGS = Settings(
    seed=7, temperature=1.0, max_new_tokens=20, max_rows=128, token_budget=4096, syntax=TEXT
)


def encoded(lm: LanguageModel, texts: Sequence[str] = tiny.TEXTS) -> list[EncodedDocument]:
    return [
        EncodedDocument(tiny.document(text).doc_id, *encode_document(lm.tokenizer, text))
        for text in texts
    ]


def prompt_of(lm: LanguageModel, shared: bool, tool: str = "Calculator") -> PromptKeys:
    return encode_prompt(lm, Prompt(tool, tiny.PROMPTS[tool]), shared)


def run_stage(
    lm: LanguageModel, inputs: Path, folder: Path, documents: list[Document], **changes: Any
) -> tuple[list[Candidate], dict[str, dict[str, int]]]:
    config = tiny.make_config(inputs, **changes)
    context = tiny.make_context(folder, config, lm)
    found = list(sample.run(documents, context))
    for resource in context.resources.values():
        if hasattr(resource, "close"):
            resource.close()
    return found, context.counts


# -- the naive reference --------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "kind"), tiny.PAIRS)
def test_the_stage_agrees_with_the_reference(
    shape: str, kind: str, inputs: Path, tmp_path: Path
) -> None:
    """Every candidate of a run: its place, its text, its count, p_i and L_i(eps)."""
    lm = tiny.taught_lm(shape, kind)
    texts = (tiny.TEXTS[0], tiny.TEXTS[1], tiny.TEXTS[3])
    tools = ("Calculator",)
    documents = [tiny.document(text, tools) for text in texts]
    changes = {"sample": {"k": 3, "m": 3, "max_new_tokens": 13, "temperature": 0.9}, "seed": 3}
    found, counts = run_stage(lm, inputs, tmp_path, documents, **changes)
    wanted: dict[tuple[str, str, int, str], int] = {}
    never = 0
    for document in documents:
        for tool in tools:
            prompt = tiny.PROMPTS[tool]
            head, x = reference.sampling_context(lm.tokenizer, prompt, document.text)
            for i in reference.best_positions(lm, prompt, document.text, 0.0, 3):
                names = [(3, document.doc_id, tool, i, s) for s in range(3)]
                drawn = [reference.draw(lm, tool, head + x[:i], n, 13, 0.9) for n in names]
                never += drawn.count(None)
                for (_, arguments), times in reference.merged({i: drawn}).items():
                    wanted[document.doc_id, tool, i, arguments] = times
    assert len(wanted) >= 6, "the model was not taught enough for this test to say anything"
    assert {(c.doc_id, c.tool, c.token_index, c.arguments): c.sample_count for c in found} == wanted
    assert never > 0
    lost = [counts[tool].get(why, 0) for tool in tools for why in ("never_closed", "malformed")]
    assert sum(lost) == never
    text_of = {document.doc_id: document.text for document in documents}
    for call in found:
        text, i = text_of[call.doc_id], call.token_index
        prompt = tiny.PROMPTS[call.tool]
        assert call.p_api == pytest.approx(reference.p_at(lm, prompt, text, i), rel=1e-4, abs=1e-6)
        assert call.char_start == reference.char_start(lm.tokenizer, text, i)
        start, x = reference.before_all(lm.tokenizer), reference.text_ids(lm.tokenizer, text)
        assert call.loss_none == pytest.approx(reference.loss(lm.model, start, x, i), abs=1e-4)


@pytest.mark.parametrize(("shape", "kind"), COMBINATIONS)
@pytest.mark.parametrize("shared", [True, False])
def test_p_api_at_every_position(shape: str, kind: str, shared: bool) -> None:
    lm = tiny.make_lm(shape, kind)
    texts = (tiny.TEXTS[3], "Rome", tiny.TEXTS[5])
    batch = read_positions(lm, prompt_of(lm, shared), encoded(lm, texts), TEXT)
    for text, p in zip(texts, batch.p_api, strict=True):
        x = reference.text_ids(lm.tokenizer, text)
        assert len(p) == len(x)
        for i in sorted({0, 1, len(x) // 2, len(x) - 1} & set(range(len(x)))):
            wanted = reference.p_at(lm, tiny.PROMPTS["Calculator"], text, i)
            assert float(p[i]) == pytest.approx(wanted, rel=1e-4)


# -- positions ------------------------------------------------------------------------------------


def chosen(
    p: list[float], tau_s: float, k: int, ids: list[int] | None = None, **changes: Any
) -> tuple[list[int], dict[str, int]]:
    ids = ids or [5] * len(p)
    starts = changes.pop("starts", list(range(0, 2 * len(p), 2)))
    counts: dict[str, int] = {}

    def count(what: str, n: int) -> None:
        counts[what] = counts.get(what, 0) + n

    document = EncodedDocument("d", ids, starts)
    has_context = changes.pop("has_context", True)
    found = choose_positions(
        torch.tensor(p, dtype=torch.float64), document, tau_s, k, 3, has_context, count
    )
    return found, counts


def test_top_k_above_tau_s_in_order_of_position() -> None:
    p = [0.05, 0.30, 0.01, 0.20, 0.06, 0.40]
    assert chosen(p, 0.05, 2) == (
        [1, 5],
        {"positions": 6, "below_tau_s": 2, "beyond_k": 2},  # 0.05 is not above 0.05
    )
    assert chosen(p, 0.0, 20)[0] == [0, 1, 2, 3, 4, 5]
    assert chosen([0.0, 0.1], 0.0, 5)[0] == [1]
    assert chosen([0.2, 0.2, 0.2], 0.0, 2)[0] == [0, 1]  # ties: the earlier ones


def test_places_where_no_call_can_stand() -> None:
    p = [0.3, 0.3, 0.3, 0.3]
    # the text itself opens a bracket there
    found, counts = chosen(p, 0.0, 5, ids=[5, 3, 5, 5])
    assert found == [0, 2, 3] and counts["opens_already"] == 1 and counts["positions"] == 3
    # in the middle of a character
    assert chosen(p, 0.0, 5, starts=[0, 4, 4, 5])[0] == [0, 1, 3]
    # the first place, when nothing stands before the text
    assert chosen(p, 0.0, 5, has_context=False)[0] == [1, 2, 3]


def test_no_context_token_means_no_call_at_the_start(inputs: Path, tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer("bare")
    lm = LanguageModel(tiny.taught_lm("llama", "bytes").model, tokenizer)
    assert reference.before_all(tokenizer) == []
    documents = [tiny.document(tiny.TEXTS[0], ("Calendar",))]
    changes = {"sample": {"k": 500, "m": 1, "constrain": True}}
    found, counts = run_stage(lm, inputs, tmp_path, documents, **changes)
    places = sorted(call.token_index for call in found)
    assert counts["Calendar"]["positions"] == len(reference.text_ids(tokenizer, tiny.TEXTS[0])) - 1
    assert places[0] == 1
    for call in found:
        x = reference.text_ids(tokenizer, tiny.TEXTS[0])
        wanted = reference.loss(lm.model, [], x, call.token_index)
        assert call.loss_none == pytest.approx(wanted, abs=1e-4)


# -- shared keys, batches, slots ------------------------------------------------------------------


def by_row(found: Sequence[Sampled]) -> dict[Row, tuple[str | None, str | None]]:
    return {item.row: (item.arguments, item.reason) for item in found}


@pytest.mark.parametrize(("shape", "kind"), tiny.PAIRS)
def test_shared_keys_draw_what_whole_contexts_draw(shape: str, kind: str) -> None:
    lm = tiny.taught_lm(shape, kind)
    assert fits(lm)
    documents = encoded(lm, tiny.TEXTS[:2])
    rows = [
        Row(d, i, s)
        for d, own in enumerate(documents)
        for i in (0, 4, len(own.ids) - 1)
        for s in range(2)
    ]
    plain = prompt_of(lm, shared=False)
    batch = read_positions(lm, plain, documents, TEXT)
    assert batch.keys is None
    wanted = by_row(sample_plain(lm, plain, batch, rows, SETTINGS))
    assert by_row(sample_rows(lm, plain, batch, rows[:2], SETTINGS)).items() <= wanted.items()
    assert len({arguments for arguments, _ in wanted.values()}) >= 3
    shared = prompt_of(lm, shared=True)
    batch = read_positions(lm, shared, documents, TEXT)
    assert batch.keys is not None
    for max_rows in (1, 5, 128):
        settings = Settings(7, 1.0, 20, max_rows, 4096, TEXT)
        mixed = random.Random(max_rows).sample(rows, len(rows))
        found = sample_rows(lm, shared, batch, mixed, settings)
        assert [item.row for item in found] == rows  # in order, whatever came first
        assert by_row(found) == wanted


@pytest.mark.parametrize("shape", ["bloom", "mistral", "gemma2"])
def test_models_that_cannot_share_keys_draw_the_same_calls(
    shape: str, inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are found out by a trial and take whole contexts, with the same results."""
    lm = LanguageModel(
        tiny.make_model(shape, tiny.make_tokenizer("bytes")), tiny.make_tokenizer("bytes")
    )
    assert not fits(lm)
    assert lm.split_head == (shape != "gemma2")
    text = tiny.TEXTS[0]
    documents = [tiny.document(text, ("Calculator",))]
    options = {"k": 2, "m": 2, "max_new_tokens": 40, "constrain": True}
    found, _ = run_stage(lm, inputs, tmp_path, documents, sample=options)
    assert found and "its attention cannot share keys" in caplog.text
    prompt, start = tiny.PROMPTS["Calculator"], reference.before_all(lm.tokenizer)
    x = reference.text_ids(lm.tokenizer, text)
    best = reference.best_positions(lm, prompt, text, 0.0, 2)
    assert {call.token_index for call in found} <= set(best)
    for call in found:
        i = call.token_index
        assert call.p_api == pytest.approx(reference.p_at(lm, prompt, text, i), rel=1e-3)
        assert call.loss_none == pytest.approx(reference.loss(lm.model, start, x, i), abs=1e-4)


def test_rows_and_batches_of_the_stage_change_nothing(inputs: Path, tmp_path: Path) -> None:
    lm = tiny.taught_lm("neox", "metaspace")
    documents = tiny.documents()
    results = []
    for n, (max_rows, budget) in enumerate([(1, 1), (3, 600), (128, 100_000)]):
        changes = {"max_rows": max_rows, "token_budget": budget, "max_new_tokens": 14}
        results.append(run_stage(lm, inputs, tmp_path / str(n), documents, sample=changes))
    (first, counts), *others = results
    assert len(first) > 10
    for found, own_counts in others:
        assert own_counts == counts
        for one, other in zip(first, found, strict=True):
            assert one.call_id == other.call_id and one.sample_count == other.sample_count
            assert one.token_index == other.token_index
            assert one.p_api == pytest.approx(other.p_api, rel=1e-4)
            assert one.loss_none == pytest.approx(other.loss_none, abs=1e-4)


@pytest.mark.parametrize("constrain", [False, True])
def test_a_document_is_sampled_the_same_in_any_company(
    constrain: bool, inputs: Path, tmp_path: Path
) -> None:
    lm = tiny.taught_lm("gpt2", "bos")
    options = {"sample": {"constrain": constrain, "max_new_tokens": 14}}
    documents = tiny.documents()
    together, _ = run_stage(lm, inputs, tmp_path / "all", documents, **options)
    alone = [
        call
        for n, document in enumerate(documents)
        for call in run_stage(lm, inputs, tmp_path / str(n), [document], **options)[0]
    ]
    key = {c.call_id: (c.tool, c.token_index, c.arguments, c.sample_count) for c in together}
    assert {c.call_id: (c.tool, c.token_index, c.arguments, c.sample_count) for c in alone} == key
    assert len(key) > 5


def forced(tokenizer: Any, text: str, size: int) -> Callable[[Sequence[int]], torch.Tensor]:
    """A mask that lets through one text only."""
    ids = encode_piece(tokenizer, text)

    def mask(tokens: Sequence[int]) -> torch.Tensor:
        allowed = torch.zeros(size, dtype=torch.bool)
        allowed[ids[len(tokens)]] = True
        return allowed

    return mask


def test_slots_whose_row_has_ended_wait_without_harm() -> None:
    """One row ends, nothing waits, and the others go on for as many steps again."""
    lm = tiny.make_lm("llama", "bytes")
    prompt = prompt_of(lm, shared=True)
    batch = read_positions(lm, prompt, encoded(lm, tiny.TEXTS[:1]), TEXT)
    rows = [Row(0, i, s) for i in (3, 5, 7) for s in range(5)]
    digits = dict(zip(rows, [28, *[20] * 7, *[28] * 7], strict=True))
    settings = Settings(0, 1.0, 40, 8, 4096, TEXT)
    size = len(lm.tokenizer)
    found = sample_rows(
        lm, prompt, batch, rows, settings,
        lambda row: forced(lm.tokenizer, f"Calculator({'1' * digits[row]})]", size),
    )  # fmt: skip
    assert [item.arguments for item in found] == ["1" * digits[row] for row in rows]


def test_why_samples_are_lost() -> None:
    lm = tiny.make_lm("llama", "bytes")
    prompt = prompt_of(lm, shared=True)
    batch = read_positions(lm, prompt, encoded(lm, tiny.TEXTS[:1]), TEXT)
    texts = ["Calculator(1)]", "Calculator(11111111111111)]", "Calendar()]", "Calculator(1) and"]
    rows = [Row(0, 2, s) for s in range(len(texts))]
    settings = Settings(0, 1.0, 8, 8, 4096, TEXT)
    size = len(lm.tokenizer)
    found = sample_rows(
        lm, prompt, batch, rows, settings,
        lambda row: forced(lm.tokenizer, texts[row.sample], size),
    )  # fmt: skip
    assert [(item.arguments, item.reason) for item in found] == [
        ("1", None), (None, "never_closed"), (None, "malformed"), (None, "malformed"),
    ]  # fmt: skip
    drawn = [item.tokens for item in found]
    assert drawn[:2] == [len(encode_piece(lm.tokenizer, texts[0])), settings.max_new_tokens]
    # a malformed one ends with the token that shows it: `Calen`, and what follows `)`
    shown = [encode_piece(lm.tokenizer, text) for text in texts[2:]]
    assert all(1 <= n <= len(ids) for n, ids in zip(drawn[2:], shown, strict=True))


def test_a_sample_may_end_in_a_token_that_holds_more_than_the_end() -> None:
    lm = tiny.make_lm("llama", "bytes")
    assert len(encode_piece(lm.tokenizer, ")]")) == 1  # fused
    prompt = prompt_of(lm, shared=True)
    batch = read_positions(lm, prompt, encoded(lm, tiny.TEXTS[:1]), TEXT)
    mask = forced(lm.tokenizer, "Calculator((1 + 2) * 3)]", len(lm.tokenizer))
    (item,) = sample_rows(lm, prompt, batch, [Row(0, 2, 0)], SETTINGS, lambda row: mask)
    assert item.arguments == "(1 + 2) * 3"


# -- pruning --------------------------------------------------------------------------------------


def test_positions_below_the_floor_are_never_sampled(inputs: Path, tmp_path: Path) -> None:
    lm = tiny.taught_lm("llama", "bytes")
    documents = tiny.documents()
    every, counts = run_stage(lm, inputs, tmp_path / "every", documents)
    floor = sorted(call.loss_none for call in every)[len(every) // 2] + 1e-9
    changes = {"gain_floor": floor, "select": {"tau_f": floor}}
    pruned, pruned_counts = run_stage(lm, inputs, tmp_path / "pruned", documents, **changes)
    # the same calls, less those at places where none can gain so much; k is chosen before
    assert [c.call_id for c in pruned] == [c.call_id for c in every if c.loss_none >= floor]
    assert 0 < len(pruned) < len(every)
    for tool, own in counts.items():
        after = pruned_counts[tool]
        assert after["pruned_position"] + after["sampled_positions"] == own["sampled_positions"]
        assert after["beyond_k"] == own["beyond_k"]
    assert sum(own["pruned_position"] for own in pruned_counts.values()) > 0


# -- counts ---------------------------------------------------------------------------------------


def test_counts_add_up(inputs: Path, tmp_path: Path) -> None:
    lm = tiny.taught_lm("llama", "bytes")
    found, counts = run_stage(lm, inputs, tmp_path, tiny.documents(), sample={"m": 4})
    for tool, own in counts.items():
        assert own["documents"] == len(tiny.TEXTS)
        rest = own.get("below_tau_s", 0) + own["beyond_k"]
        assert own["positions"] == rest + own["sampled_positions"]
        assert own["samples"] == 4 * own["sampled_positions"]
        lost = own.get("never_closed", 0) + own.get("malformed", 0)
        assert own["samples"] == lost + own["merged"] + own["candidates"]
        mine = [call for call in found if call.tool == tool]
        assert len(mine) == own["candidates"]
        assert sum(call.sample_count for call in mine) == own["merged"] + own["candidates"]
    assert len({call.call_id for call in found}) == len(found)


def test_the_tokens_of_lost_samples_count_too(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = tiny.taught_lm("llama", "bytes")
    drawn: list[Sampled] = []

    def watched(*arguments: Any) -> list[Sampled]:
        found = sample_rows(*arguments)
        drawn.extend(found)
        return found

    monkeypatch.setattr(sample, "sample_rows", watched)
    _, counts = run_stage(lm, inputs, tmp_path, tiny.documents(), sample={"max_new_tokens": 14})
    lost = [item for item in drawn if item.reason is not None]
    assert lost and all(1 <= item.tokens <= 14 for item in drawn)
    assert sum(own["tokens"] for own in counts.values()) == sum(item.tokens for item in drawn)
    assert sum(own.get("closed", 0) for own in counts.values()) == len(drawn) - len(lost) > 0


def test_counts_do_not_drift_when_memory_runs_out(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = tiny.taught_lm("llama", "bytes")
    documents = tiny.documents()
    options = {"sample": {"max_new_tokens": 10, "token_budget": 100_000}}
    wanted, counts = run_stage(lm, inputs, tmp_path / "1", documents, **options)
    draws = []

    def tight(*arguments: Any) -> Any:
        draws.append(len(arguments[2].documents))
        if len(arguments[2].documents) > 3:
            raise torch.OutOfMemoryError("too large")
        return sample_rows(*arguments)

    monkeypatch.setattr(sample, "sample_rows", tight)
    found, own_counts = run_stage(lm, inputs, tmp_path / "2", documents, **options)
    assert max(draws) > 3
    assert [call.call_id for call in found] == [call.call_id for call in wanted]
    assert own_counts == counts


def test_documents_that_the_model_cannot_read_are_left_out(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GPT-2 has 1024 positions and no more; the other documents are sampled as ever."""
    lm = tiny.taught_lm("gpt2", "bos")
    short, long, endless = (" ".join(tiny.TEXTS * n) for n in (1, 3, 6))
    sizes = [len(encode_document(lm.tokenizer, text)[0]) for text in (long, endless)]
    assert sizes[0] < lm.max_length < 2 * sizes[0] and lm.max_length < sizes[1]
    documents = [tiny.document(text, ("Calculator",)) for text in (long, short, endless)]
    found, counts = run_stage(lm, inputs, tmp_path / "all", documents)
    alone, _ = run_stage(lm, inputs, tmp_path / "one", documents[1:2])
    assert counts["Calculator"]["documents"] == 3
    assert counts["Calculator"]["too_long_for_model"] == 2
    assert "2 of 3 documents" in caplog.text and "lower `corpus.max_words`" in caplog.text
    assert [call.call_id for call in found] == [call.call_id for call in alone] != []


def test_a_prompt_that_the_model_cannot_read_is_refused(inputs: Path) -> None:
    lm = tiny.taught_lm("gpt2", "bos")
    prompt = Prompt("Calculator", tiny.PROMPTS["Calculator"] * 12)
    with pytest.raises(ConfigError, match=r"prompt of Calculator takes \d+ tokens .* reads 1024"):
        encode_prompt(lm, prompt, shared=True)


# -- noise ----------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def test_noise_is_always_finite() -> None:
    keys = [0, 1, 2**64 - 1, sample_key(0, "d", "Calculator", 0, 0)]
    noise = gumbel(keys * 8, list(range(32)), 200_000, CPU)  # 6.4 million draws
    assert torch.isfinite(noise).all()
    assert noise.dtype == torch.float32


def test_noise_does_not_depend_on_the_batch() -> None:
    keys = [sample_key(1, "doc", "Calculator", i, s) for i in range(7) for s in range(5)]
    steps = [n % 9 for n in range(len(keys))]
    whole = gumbel(keys, steps, 500, CPU)
    for n in range(len(keys)):
        assert torch.equal(gumbel([keys[n]], [steps[n]], 500, CPU)[0], whole[n])
    assert torch.equal(gumbel(keys[::-1], steps[::-1], 500, CPU), whole.flip(0))
    assert torch.equal(gumbel(keys, steps, 300, CPU), whole[:, :300])  # nor on the vocabulary


def test_every_part_of_the_key_matters() -> None:
    base = (0, "doc", "Calculator", 5, 1)
    others = [(1, *base[1:]), (0, "dof", *base[2:]), (*base[:2], "Calendar", 5, 1),
              (*base[:3], 6, 1), (*base[:4], 2)]  # fmt: skip
    keys = [sample_key(*parts) for parts in (base, *others)]
    assert len(set(keys)) == len(keys)
    noise = gumbel([*keys, keys[0]], [0] * len(keys) + [1], 1000, CPU)
    correlation = torch.corrcoef(noise)
    off = correlation - torch.diag(torch.diag(correlation))
    assert off.abs().max() < 0.12  # 4 / sqrt(1000)


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> tuple[float, int]:
    """Statistic and degrees of freedom over the cells that are expected at least ten times."""
    cells = [(o, e) for o, e in zip(observed, expected, strict=True) if e >= 10]
    rest_o = sum(observed) - sum(o for o, _ in cells)
    rest_e = sum(expected) - sum(e for _, e in cells)
    if rest_e >= 10:
        cells.append((rest_o, rest_e))
    return sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1


def limit(freedom: int) -> float:
    """The chi-square value exceeded with a probability of about 1e-5 (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.2649 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(700, generator=generator) * 2
    draws = 20_000
    for step in (0, 3):
        keys = [sample_key(9, f"doc{n // 50}", "Calculator", n % 50, step) for n in range(draws)]
        noise = gumbel(keys, [step] * draws, len(logits), CPU)
        tokens = (logits / temperature + noise).argmax(-1)
        observed = torch.bincount(tokens, minlength=len(logits)).tolist()
        expected = ((logits / temperature).softmax(-1) * draws).tolist()
        statistic, freedom = chi_square(observed, expected)
        assert freedom > 40
        assert statistic < limit(freedom)


def test_noise_is_gumbel_over_tokens_keys_and_steps() -> None:
    """exp(-exp(-g)) is uniform along each of the three axes of the noise."""
    keys = [sample_key(0, "d", "t", i, 0) for i in range(4000)]
    samples = {
        "tokens": gumbel(keys[:1], [0], 4000, CPU)[0],
        "keys": gumbel(keys, [0] * 4000, 40, CPU)[:, 17],
        "steps": gumbel(keys[:1] * 4000, list(range(4000)), 40, CPU)[:, 17],
    }
    for name, noise in samples.items():
        uniform = torch.exp(-torch.exp(-noise.double()))
        observed = torch.histc(uniform, 50, 0, 1).int().tolist()
        statistic, freedom = chi_square(observed, [80.0] * 50)
        assert statistic < limit(freedom), name
        lag = torch.corrcoef(torch.stack([uniform[:-1], uniform[1:]]))[0, 1]
        assert abs(float(lag)) < 0.07, name


def test_samples_of_one_position_are_independent_draws() -> None:
    """The first token after the opening delimiter, over many samples, against p itself."""
    lm = tiny.taught_lm("llama", "bytes")
    prompt = prompt_of(lm, shared=True)
    document = encoded(lm, tiny.TEXTS[:1])
    batch = read_positions(lm, prompt, document, TEXT)
    head, x = reference.sampling_context(lm.tokenizer, tiny.PROMPTS["Calculator"], tiny.TEXTS[0])
    (opening,) = reference.piece_ids(lm.tokenizer, " [")
    draws = 3000
    seen: list[int] = []

    def watch(row: Row) -> Callable[[Sequence[int]], None]:
        return lambda tokens: seen.append(tokens[0]) if len(tokens) == 1 else None

    settings = Settings(1, 1.0, 2, 500, 4096, TEXT)
    rows = [Row(0, 6, s) for s in range(draws)]
    found = sample_rows(lm, prompt, batch, rows, settings, watch)
    assert len(found) == draws
    p = reference.log_probabilities(lm.model, [*head, *x[:6], opening])[-1].exp()
    # rows that end with their first token (malformed at once) never show it: compare the others
    shown = torch.bincount(torch.tensor(seen), minlength=len(p))
    for token in p.topk(3).indices.tolist():
        if shown[token]:
            deviation = math.sqrt(float(p[token] * (1 - p[token])) * draws)
            assert abs(int(shown[token]) - float(p[token]) * draws) < 4.5 * deviation + 1
    assert shown.sum() > draws / 10


def test_hidden_prompts_draw_from_the_text_before_alone() -> None:
    """With `lookahead_prompt: hidden` a changed tail of the text changes no sampled call."""
    lm = tiny.taught_lm("llama", "bytes")
    first = encoded(lm)[0]
    place = len(first.ids) // 2
    other = [*first.ids[:place], *reversed(first.ids[place:])]
    rows = [Row(0, place, sample) for sample in range(12)]
    drawn = {}
    for shared in (True, False):
        prompt = prompt_of(lm, shared)
        for draw in (sample_hidden, sample_rows):
            for name, ids in (("as it is", first.ids), ("another tail", other)):
                document = EncodedDocument(first.doc_id, list(ids), first.char_starts)
                batch = read_positions(lm, prompt, [document], TEXT)
                key = (draw.__name__, name, shared)
                drawn[key] = draw(lm, prompt, batch, rows, SETTINGS)
    for shared in (True, False):
        hidden = drawn["sample_hidden", "as it is", shared]
        assert hidden == drawn["sample_hidden", "another tail", shared]
        assert any(item.arguments for item in hidden)
        seen = drawn["sample_rows", "as it is", shared]
        assert seen != drawn["sample_rows", "another tail", shared]
    assert drawn["sample_hidden", "as it is", True] == drawn["sample_hidden", "as it is", False]
