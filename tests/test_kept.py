"""Keys kept between calls: they change no text, and what is kept is not computed again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from pipeline.agent.engine import Engine
from pipeline.lm.forward import LanguageModel
from pipeline.lm.generation import generate
from pipeline.lm.kept import Kept, KeptKeys, common_length
from pipeline.lm.shared_slots import SharedSlots, shares
from pipeline.lm.tokens import encode_document

INSTRUCTIONS = (
    "Answer the question. Take one step at a time. The shop sold 12 * 5 pens in Rome.\n\n"
)
QUESTIONS = ["so 37 crates", "Paris is", "On Monday the shop paid 400 for 8 lamps", "so"]
RESULTS = [
    "\nObservation: 888",
    " [see the map]",
    "\nObservation: Lyon is a city",
    " 7 of its hills",
]
PLAIN = ("llama", "gpt2", "neox")
OTHERS = ("mistral", "gemma2")  # keys are not kept for these


def model_of(shape: str) -> tuple[Any, Any]:
    tokenizer = tiny.make_tokenizer("bytes")
    model = tiny.make_model(shape, tokenizer)
    if shape in OTHERS:  # a longer window: its end is the end of what the model is given to read
        model.config.sliding_window = 400
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    return model, tokenizer


def episodes(engine: Engine, temperature: float, together: bool) -> list[list[str]]:
    """Three turns of each question, which go on from what was written before."""

    def ask(prompts: list[str], seeds: list[int]) -> list[str]:
        made = generate(
            engine.model,
            engine.tokenizer,
            prompts,
            stop=["e,"],
            max_new_tokens=10,
            temperature=temperature,
            seed=seeds,
            max_rows=engine.max_rows,
            kept=engine.kept,
        )
        return [one.text for one in made]

    states = [INSTRUCTIONS + question for question in QUESTIONS]
    said: list[list[str]] = [[] for _ in states]
    groups = [list(range(len(states)))] if together else [[n] for n in range(len(states))]
    for group in groups:
        for turn in range(3):
            texts = ask([states[n] for n in group], [100 * n + turn for n in group])
            for n, text in zip(group, texts, strict=True):
                said[n].append(text)
                states[n] += text + RESULTS[(n + turn) % 4]
    return said


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [*PLAIN, *OTHERS])
def test_texts_do_not_depend_on_what_is_kept(shape: str, temperature: float) -> None:
    model, tokenizer = model_of(shape)
    plain = episodes(Engine(model, tokenizer, kept_bytes=0), temperature, together=False)
    assert len({text for texts in plain for text in texts}) > 4
    engine = Engine(model, tokenizer)
    for together in (True, False, True):  # with an empty store, then with all that went before
        assert episodes(engine, temperature, together) == plain
    assert bool(engine.kept.texts) == (shape in PLAIN)
    for few in (20_000, 200_000):  # most of what is kept is lost again in between
        small = Engine(model, tokenizer, max_rows=2, kept_bytes=few)
        assert episodes(small, temperature, together=True) == plain
        assert small.kept.bytes <= few


@contextmanager
def fed(model: Any) -> Iterator[list[int]]:
    """The sizes of what the model is fed."""
    sizes: list[int] = []

    def note(module: Any, args: Any, options: Any) -> None:
        sizes.append((args[0] if args else options["input_ids"]).numel())

    handle = model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    yield sizes
    handle.remove()


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [tokenizer.eos_token_id, *encode_document(tokenizer, text)[0]]


@pytest.mark.parametrize("shape", PLAIN)
def test_a_turn_computes_only_what_is_new(shape: str) -> None:
    model, tokenizer = model_of(shape)
    kept = KeptKeys()
    shares(kept.language_model(model, tokenizer))  # the trial is not counted
    head, question = ids_of(tokenizer, INSTRUCTIONS), encode_document(tokenizer, QUESTIONS[0])[0]

    def ask(*prompts: list[int]) -> tuple[list[list[int]], int]:
        with fed(model) as sizes:
            made = generate(model, tokenizer, prompts, max_new_tokens=6, kept=kept)
        # every token but the last is fed again
        out = sum(own.tokens_out - 1 for own in made)
        texts = [encode_document(tokenizer, own.text)[0] for own in made]
        return texts, sum(sizes) - out

    _, computed = ask(head + question)
    assert computed == len(head + question)
    # another episode alone: the instructions are there
    other = encode_document(tokenizer, QUESTIONS[2])[0]
    assert other[0] != question[0]
    assert ask(head + other)[1] == len(other)
    # the next turn, cut at the first difference: token ids count, not texts
    held = max((text.ids for text in kept.texts), key=lambda ids: common_length(ids, head + other))
    assert len(held) == len(head + other) + 5
    changed = [*held[:-2], held[-2] ^ 1, 7, 8]
    assert ask(changed)[1] == 3
    assert ask([*held, 7, 8, 9])[1] <= 5
    # the same again: only the last token, whose logits are wanted
    assert ask(head + question)[1] == 1
    # together: nothing of the instructions, and the two new questions
    new = [encode_document(tokenizer, text)[0] for text in (QUESTIONS[1], "45 went")]
    assert ask(*[head + own for own in new])[1] <= 2 * max(map(len, new))


def test_a_batch_holds_its_instructions_once() -> None:
    model, tokenizer = model_of("llama")
    engine = Engine(model, tokenizer)
    episodes(engine, 0.0, together=True)
    (base,) = [text for text in engine.kept.texts if text.base is None]
    rest = [text for text in engine.kept.texts if text.base is not None]
    assert base.ids == ids_of(tokenizer, INSTRUCTIONS)[: len(base.ids)]
    assert len(rest) == len(QUESTIONS)  # each turn took the place of the one before
    assert all(text.base is base and text.shared == len(base.ids) for text in rest)
    assert all(text.keys.shape[-2] == len(text.ids) - text.shared for text in rest)


def test_the_least_recently_used_goes_first() -> None:
    def text(first: int) -> Kept:
        return Kept([first] * 30, torch.zeros(1, 2, 1, 30, 4))

    one, two, three = text(1), text(2), text(3)
    kept = KeptKeys(limit_bytes=2 * one.keys.nbytes)
    kept.add(one)
    kept.add(two)
    assert kept.find([1, 1, 1, 9]) == (one, 3)
    kept.add(three)
    assert kept.texts == [one, three]
    assert kept.find([2, 2]) == (None, 0)
    # a base is used with what needs it, so it goes after that
    own = Kept([1] * 30 + [5] * 20, torch.zeros(1, 2, 1, 20, 4), one, 30)
    kept.add(own)
    assert kept.texts == [own, one]
    kept.add(three)
    assert kept.texts == [one, three] and kept.bytes == kept.limit_bytes
    kept.add(Kept([4] * 99, torch.zeros(1, 2, 1, 99, 4)))  # too large to be kept at all
    assert kept.bytes <= kept.limit_bytes


def test_changed_weights_and_another_model_forget_everything() -> None:
    model, tokenizer = model_of("llama")
    engine = Engine(model, tokenizer)
    episodes(engine, 0.0, together=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    new = episodes(Engine(model, tokenizer, kept_bytes=0), 0.0, together=True)
    assert episodes(engine, 0.0, together=True) == new
    engine.model = tiny.make_model("llama", tokenizer, seed=5)
    other = episodes(Engine(engine.model, tokenizer, kept_bytes=0), 0.0, together=True)
    assert other != new
    assert episodes(engine, 0.0, together=True) == other


def test_common_length() -> None:
    draw = random.Random(3)
    for _ in range(300):
        one, other = ([draw.choice("ab") for _ in range(draw.randrange(7))] for _ in range(2))
        pairs = list(zip(one, other, strict=False))
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
        assert common_length([*map(ord, one)], [*map(ord, other)]) == same


def test_pieces_of_a_text_with_a_base() -> None:
    keys = torch.arange(20.0).view(1, 1, 1, 20, 1)
    base = Kept([0] * 12, keys[..., :12, :])
    text = Kept([0] * 17, keys[..., 8:17, :].clone(), base, 8)
    for start in range(18):
        for end in range(start, 18):
            assert torch.equal(text.between(start, end), keys[..., start:end, :])


# -- rows behind shared keys ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", PLAIN)
def test_rows_with_kept_keys_equal_the_whole_forward_pass(shape: str) -> None:
    model, tokenizer = model_of(shape)
    lm = LanguageModel(model, tokenizer)
    assert shares(lm)
    draw = random.Random(5)
    head = [draw.randrange(len(tokenizer)) for _ in range(9)]
    rows = [[draw.randrange(len(tokenizer)) for _ in range(n)] for n in (3, 12, 7, 1)]

    def want(ids: list[int]) -> Any:
        return lm.logits(lm.hidden(torch.tensor([ids]))[:, -1])[0]

    def near(got: Any, *texts: list[int]) -> None:
        assert len(got) == len(texts)
        for row, text in zip(got, texts, strict=True):
            torch.testing.assert_close(row, want(text), atol=1e-4, rtol=1e-4)

    with torch.inference_mode():
        whole = SharedSlots(lm, 4)
        near(whole.prefill([head + row for row in rows]), *[head + row for row in rows])
        shared = SharedSlots(lm, 1)
        shared.prefill([head])
        slots = SharedSlots(lm, 4, shared.keys(0))
        known = [None, whole.keys(1)[..., 9:17, :], whole.keys(2)[..., 9:11, :], None]
        new = [rows[0], rows[1][8:], rows[2][2:], rows[3]]
        first = slots.prefill(new[:2], known[:2])
        near(torch.cat([first, slots.prefill(new[2:], known[2:])]), *[head + row for row in rows])
        texts = [[*head, *row, 5] for row in rows]
        near(slots.step([5] * 4, [3, 1]), texts[3], texts[1])
        slots.cut(1, 14)
        slots.remove(0)  # the last row takes its place
        texts = [[*texts[3], 6], [*texts[1][:14], 6], [*texts[2], 6]]
        near(slots.step([6] * 3, [0, 1, 2]), *texts)
        for token in range(90):  # the store grows
            texts = [[*text, token] for text in texts]
            got = slots.step([token] * 3, [0, 1, 2])
        near(got, *texts)


@pytest.mark.parametrize("shape", ["bloom", "gemma2", "mistral", "mamba", "lfm2"])
def test_models_with_more_than_plain_attention_are_found(shape: str) -> None:
    tokenizer = tiny.make_tokenizer("bytes")
    assert not shares(LanguageModel(tiny.make_model(shape, tokenizer), tokenizer))
