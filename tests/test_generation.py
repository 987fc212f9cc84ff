"""Generation: batched = single = transformers; live calls against a naive reference."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from pipeline.calls import CallSyntax, call_pieces, read_sample
from pipeline.lm.checkpoint import add_markers
from pipeline.lm.generation import generate, serve
from pipeline.lm.grammar import CallGrammar
from pipeline.lm.jobs import Generation, Job, LiveCalls
from pipeline.lm.kept import KeptKeys
from pipeline.lm.packing import make_examples, pack
from pipeline.lm.tokens import (
    context_token,
    decode_piece,
    encode_document,
    encode_piece,
    open_token,
)
from pipeline.lm.training import PackedLoss
from pipeline.tools.calculator import Calculator
from pipeline.tools.executor import Executor

SYNTAX = CallSyntax()
PROMPTS = [
    "The farm sold 37 crates",
    "Rome",
    "A train left at nine and came back at noon, and nobody asked why it was so late. The lake",
    "It rained for five days",
    "The shop paid",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*PROMPTS, "so [Calculator(1 * 2) -> 3] and [ [)]"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


SHAPES: dict[str, Any] = {
    "llama": LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "gpt2": GPT2Config(n_embd=48, n_layer=2, n_head=4, n_positions=128),
    "neox": GPTNeoXConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
}


def make_model(shape: str, tokenizer: Any, scale: float = 0.2, **changes: Any) -> Any:
    config = SHAPES[shape].__class__(**{**SHAPES[shape].to_diff_dict(), **changes})
    config.vocab_size, config.initializer_range = len(tokenizer), scale
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: Any, tokenizer: Any) -> Any:
    return make_model(request.param, tokenizer)


# -- plain decoding -------------------------------------------------------------------------------


def test_greedy_equals_transformers(model: Any, tokenizer: Any) -> None:
    ours = generate(model, tokenizer, PROMPTS, max_new_tokens=24, max_rows=3)
    for prompt, generation in zip(PROMPTS, ours, strict=True):
        ids = [tokenizer.bos_token_id, *encode_document(tokenizer, prompt)[0]]
        found = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0]
        new = [t for t in found[len(ids) :].tolist() if t != tokenizer.eos_token_id]
        assert generation.text == decode_piece(tokenizer, ids[-1], new)
        assert generation.tokens_in == len(ids)
        assert generation.tokens_out == len(found) - len(ids)
    assert len({generation.text for generation in ours}) == len(PROMPTS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batched_equals_single(model: Any, tokenizer: Any, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "stop": ["e"]}
    seeds = [11, 12, 13, 14, 15]
    alone = [
        generate(model, tokenizer, [prompt], seed=[seed], **options)[0]
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    for max_rows in (1, 2, 64):
        assert (
            generate(model, tokenizer, PROMPTS, seed=seeds, max_rows=max_rows, **options) == alone
        )
    assert {generation.finish for generation in alone} > {"stop"}  # rows left at different times


def test_seeds(tokenizer: Any) -> None:
    model = make_model("llama", tokenizer)

    def texts(**options: Any) -> list[str]:
        made = generate(model, tokenizer, ["It"] * 4, max_new_tokens=8, temperature=1.0, **options)
        return [generation.text for generation in made]

    assert len(set(texts(seed=3))) == 4  # equal prompts are independent draws
    assert texts(seed=3) == texts(seed=3) != texts(seed=4)
    assert len(set(texts(seed=[5, 5, 5, 6]))) == 2
    with pytest.raises(ValueError, match="one per prompt"):
        texts(seed=[1])


def test_temperature_draws_from_the_distribution(tokenizer: Any) -> None:
    model = make_model("llama", tokenizer)
    ids = torch.tensor([[tokenizer.bos_token_id, *encode_document(tokenizer, "It")[0]]])
    p = model(ids).logits[0, -1].detach().div(0.7).softmax(-1)
    made = generate(
        model, tokenizer, ["It"] * 3000, max_new_tokens=1, temperature=0.7, max_rows=1000
    )
    wanted: dict[str, float] = {}
    for token, probability in enumerate(p.tolist()):  # parts of characters look alike
        text = decode_piece(tokenizer, int(ids[0, -1]), [token])
        wanted[text] = wanted.get(text, 0.0) + probability
    for text, probability in sorted(wanted.items(), key=lambda item: -item[1])[:6]:
        share = sum(generation.text == text for generation in made) / len(made)
        deviation = (probability * (1 - probability) / len(made)) ** 0.5
        assert share == pytest.approx(probability, abs=4 * deviation)


def test_a_shared_beginning_is_computed_once_and_changes_nothing(
    model: Any, tokenizer: Any
) -> None:
    head = "A train left at nine. Rome paid five days. The farm sold 37 crates, and so."
    prompts = [head + prompt for prompt in (" Rome", " The lake", " It rained", " five days")]
    results = []
    for share in (False, True):
        fed: list[int] = []
        handle = model.base_model.register_forward_pre_hook(
            lambda module, args, options, fed=fed: fed.append(
                (args[0] if args else options["input_ids"]).numel()
            ),
            with_kwargs=True,
        )
        results.append(generate(model, tokenizer, prompts, max_new_tokens=12, share_prefix=share))
        handle.remove()
        results.append(fed)
    plain, plain_fed, shared, shared_fed = results
    assert shared == plain
    common = 1 + len(encode_document(tokenizer, head)[0])
    assert sum(plain_fed) - sum(shared_fed) == 3 * common


def test_stop_strings_match_across_token_borders(tokenizer: Any) -> None:
    model = make_model("llama", tokenizer)
    (free,) = generate(model, tokenizer, ["It rained"], max_new_tokens=24)
    new = encode_piece(tokenizer, free.text)
    for cut in range(3, len(free.text) - 3):
        stop = free.text[cut : cut + 3]
        (made,) = generate(model, tokenizer, ["It rained"], max_new_tokens=24, stop=["§§", stop])
        assert made.finish == "stop"
        assert made.text == free.text[: free.text.index(stop)]
        assert made.tokens_out <= 24
    assert len(new) > 3
    with pytest.raises(ValueError, match="empty"):
        generate(model, tokenizer, ["It"], max_new_tokens=1, stop=[""])


def test_the_end_of_the_context(tokenizer: Any) -> None:
    model = make_model("gpt2", tokenizer, n_positions=24)
    long = " five days" * 30
    short, too_long = generate(model, tokenizer, ["It rained", long], max_new_tokens=100)
    assert short.finish == "context" and short.tokens_in + short.tokens_out == 24
    assert too_long.finish == "context" and too_long.text == ""


def test_token_ids_as_a_prompt(tokenizer: Any) -> None:
    model = make_model("llama", tokenizer)
    ids = [tokenizer.bos_token_id, *encode_document(tokenizer, "It rained")[0]]
    by_ids, by_text = (
        generate(model, tokenizer, [prompt], max_new_tokens=9)[0] for prompt in (ids, "It rained")
    )
    assert by_ids == by_text


# -- live calls -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    tool: str
    arguments: str
    result: str | None
    char_start: int


QUESTIONS = ["Box with 37 and 24:", "Box with 12 and 3:", "Box with 50 and 41:"]
ANSWERS = ["888", "36", "2050"]
ARGUMENTS = ["37 * 24", "12 * 3", "50 * 41"]


def teach(tokenizer: Any, examples: list[Any], model: Any = None) -> Any:
    """A tiny model that knows its few texts by heart."""
    model = make_model("llama", tokenizer, scale=0.05) if model is None else model
    loss_of = PackedLoss(model, tokenizer, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    (batch,) = pack(examples, 4096)
    for _ in range(120):
        loss = loss_of(batch.ids, batch.positions, batch.targets, batch.weights)
        (loss / batch.weights.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def lesson(tokenizer: Any, syntax: CallSyntax = SYNTAX) -> list[Any]:
    examples = []
    for question, answer, arguments in zip(QUESTIONS, ANSWERS, ARGUMENTS, strict=True):
        calls = [Call("Calculator", arguments, answer, len(question))]
        text = f"{question} {answer} pens."
        examples += make_examples(tokenizer, text, calls, syntax, max_length=200)
    return examples


@pytest.fixture(scope="module")
def caller(tokenizer: Any) -> Any:
    """A model that answers each question with a call."""
    return teach(tokenizer, lesson(tokenizer))


def live(executor: Executor, **changes: Any) -> LiveCalls:
    own = LiveCalls(SYNTAX, ["Calculator"], lambda t, a, i: executor.execute(t, a), call_k=1)
    return dataclasses.replace(own, **changes)


@pytest.fixture(scope="module")
def executor() -> Any:
    with Executor([Calculator()]) as own:
        yield own


def naive(model: Any, tokenizer: Any, prompt: str, calls: LiveCalls, length: int) -> str:
    """One prompt, the whole context again for each token, straight from section 7."""
    opening = open_token(tokenizer, calls.syntax)
    context = [tokenizer.bos_token_id, *encode_document(tokenizer, prompt)[0]]
    new: list[int] = []
    made, text_tokens, start = 0, 0, -1
    while text_tokens < length:
        with torch.no_grad():
            logits = model(torch.tensor([context + new])).logits[0, -1]
        if start < 0 and made < calls.max_calls and calls.enabled:
            token = opening if opening in logits.topk(calls.call_k).indices else logits.argmax()
        elif start < 0:
            logits[opening] = -torch.inf
            token = logits.argmax()
        else:
            token = logits.argmax()
        if int(token) == tokenizer.eos_token_id:
            break
        new.append(int(token))
        if start < 0 and int(token) == opening:
            start = len(new)
        elif start < 0:
            text_tokens += 1
        else:
            found = read_sample(
                decode_piece(tokenizer, opening, new[start:]), "Calculator", calls.syntax
            )
            if isinstance(found, str):
                result = calls.execute("Calculator", found, 0).result or ""
                pieces = call_pieces("Calculator", found, result, calls.syntax)
                new[start:] = encode_piece(tokenizer, pieces[1])
                new += encode_piece(tokenizer, pieces[2])
                made, start = made + 1, -1
            elif found is False or len(new) - start >= calls.max_call_tokens:
                made, text_tokens, start = made + 1, text_tokens + len(new) - start + 1, -1
    return decode_piece(tokenizer, context[-1], new)


def test_text_is_told_while_it_is_written(caller: Any, tokenizer: Any, executor: Executor) -> None:
    told: list[list[tuple[str, int]]] = [[] for _ in QUESTIONS]

    def on_text(index: int, text: str, calls: Any) -> None:
        told[index].append((text, len(calls)))

    options: dict[str, Any] = {"max_new_tokens": 12, "calls": live(executor)}
    made = generate(caller, tokenizer, QUESTIONS, on_text=on_text, **options)
    silent = generate(caller, tokenizer, QUESTIONS, **options)
    assert [own.text for own in made] == [own.text for own in silent]
    for generation, so_far in zip(made, told, strict=True):
        assert len(generation.calls) == 1 and len({text for text, _ in so_far}) > 2
        for text, calls in so_far:
            assert generation.text.startswith(text.rstrip("\ufffd"))
            assert ("[" in text) == (calls == 1)  # nothing of a call before its result is in


def test_a_call_is_made_and_its_result_used(caller: Any, tokenizer: Any, executor: Any) -> None:
    made = generate(caller, tokenizer, QUESTIONS, max_new_tokens=12, calls=live(executor))
    for generation, arguments, answer in zip(made, ARGUMENTS, ANSWERS, strict=True):
        call = f" [Calculator({arguments}) -> {answer}]"
        assert generation.text == f"{call} {answer} pens."
        assert generation.plain == f" {answer} pens."
        (own,) = generation.calls
        assert (own.tool, own.arguments, own.result) == ("Calculator", arguments, answer)
        assert generation.text[own.start : own.end] == call
        assert generation.finish == "eos"
        inserted = len(encode_piece(tokenizer, f" {answer}]"))
        assert generation.tokens_inserted == inserted
        whole = len(encode_piece(tokenizer, " [")) + len(
            encode_piece(tokenizer, f"Calculator({arguments}) ->")
        )
        assert generation.tokens_out == whole + len(encode_piece(tokenizer, f" {answer} pens.")) + 1


def test_the_result_comes_from_the_tool(caller: Any, tokenizer: Any, executor: Any) -> None:
    """The model knows 888 by heart; another tool result must stand in the text all the same."""
    other = live(executor, execute=lambda tool, arguments, index: executor.execute(tool, "5 + 5"))
    (made,) = generate(caller, tokenizer, QUESTIONS[:1], max_new_tokens=12, calls=other)
    assert made.text.startswith(" [Calculator(37 * 24) -> 10]")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"call_k": 10},
        {"call_k": 60, "max_calls": 3},
        {"enabled": False},
        {"max_calls": 0},
        {"max_call_tokens": 3, "call_k": 5, "max_calls": 2},
    ],
)
def test_live_calls_agree_with_the_naive_reference(
    changes: dict[str, Any], caller: Any, tokenizer: Any, executor: Any
) -> None:
    calls = live(executor, **changes)
    prompts = [*QUESTIONS, "Box with", "Box with 37 and 3:", "Rome"]
    made = generate(caller, tokenizer, prompts, max_new_tokens=16, calls=calls, max_rows=3)
    for prompt, generation in zip(prompts, made, strict=True):
        assert generation.text == naive(caller, tokenizer, prompt, calls, 16)
    assert all(len(generation.calls) <= calls.max_calls for generation in made)


def test_disabled_never_opens_a_call(caller: Any, tokenizer: Any, executor: Any) -> None:
    calls = live(executor, enabled=False, call_k=50)
    made = generate(caller, tokenizer, QUESTIONS, max_new_tokens=12, calls=calls)
    assert all(" [" not in generation.text and not generation.calls for generation in made)
    assert all(generation.text for generation in made)


def test_call_k_lets_an_unlikely_call_fire(tokenizer: Any, executor: Any) -> None:
    """Trained on the questions with and without calls, mostly without: the call is second."""
    texts = [f"{q} {a} pens." for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    plain = [make_examples(tokenizer, t, (), SYNTAX, max_length=200)[0] for t in texts]
    model = teach(tokenizer, [*lesson(tokenizer), *plain, *plain, *plain])
    greedy = generate(model, tokenizer, QUESTIONS, max_new_tokens=8, calls=live(executor))
    eager = generate(model, tokenizer, QUESTIONS, max_new_tokens=8, calls=live(executor, call_k=5))
    assert sum(len(generation.calls) for generation in greedy) == 0
    assert sum(len(generation.calls) for generation in eager) == 3


def test_a_call_closed_without_an_arrow_is_written_again(tokenizer: Any, executor: Any) -> None:
    """`)]` is one token here: the end of the call is seen on text, and the cache is cut back."""
    texts = []
    for question, answer, arguments in zip(QUESTIONS, ANSWERS, ARGUMENTS, strict=True):
        text = f"{question} {answer} pens."
        (example,) = make_examples(tokenizer, text, (), SYNTAX, max_length=200)
        head = len(encode_document(tokenizer, question)[0]) + 1
        call = encode_piece(tokenizer, " [") + encode_piece(tokenizer, f"Calculator({arguments})]")
        ids = example.ids[:head] + call + example.ids[head:]
        texts.append(dataclasses.replace(example, ids=ids, weights=[0.0] + [1.0] * (len(ids) - 1)))
    assert len(encode_piece(tokenizer, ")]")) == 1
    model = teach(tokenizer, texts)
    calls = live(executor)
    made = generate(model, tokenizer, QUESTIONS, max_new_tokens=12, calls=calls)
    for question, generation, arguments, answer in zip(
        QUESTIONS, made, ARGUMENTS, ANSWERS, strict=True
    ):
        assert generation.text.startswith(f" [Calculator({arguments}) -> {answer}]")
        assert generation.text == naive(model, tokenizer, question, calls, 12)


def test_a_failing_tool_is_data(caller: Any, tokenizer: Any, executor: Any) -> None:
    calls = live(executor, execute=lambda tool, arguments, index: executor.execute(tool, "1 / 0"))
    (made,) = generate(caller, tokenizer, QUESTIONS[:1], max_new_tokens=12, calls=calls)
    (call,) = made.calls
    assert (call.result, call.error_kind) == (None, "division_by_zero")
    assert made.text.startswith(" [Calculator(37 * 24) -> ]")
    assert made.plain == made.text[call.end :]


def test_an_unknown_tool_ends_as_text(caller: Any, tokenizer: Any, executor: Any) -> None:
    calls = live(executor, tools=["WikiSearch"])
    (made,) = generate(caller, tokenizer, QUESTIONS[:1], max_new_tokens=40, calls=calls)
    (call,) = made.calls
    assert call.error_kind == "malformed" and not call.complete
    assert made.text.startswith(" [") and made.plain == made.text


def test_a_call_that_never_closes_ends_as_text(caller: Any, tokenizer: Any, executor: Any) -> None:
    calls = live(executor, max_call_tokens=4)
    (made,) = generate(caller, tokenizer, QUESTIONS[:1], max_new_tokens=40, calls=calls)
    (call,) = made.calls
    assert call.error_kind == "never_closed"
    assert made.plain == made.text
    assert made.text[call.start : call.end].startswith(" [Calculator")


def test_calls_know_their_prompt(caller: Any, tokenizer: Any, executor: Any) -> None:
    asked = {}

    def execute(tool: str, arguments: str, index: int) -> Any:
        asked[index] = arguments
        return executor.execute(tool, arguments)

    calls = live(executor, execute=execute)
    generate(caller, tokenizer, QUESTIONS, max_new_tokens=4, calls=calls, max_rows=2)
    assert asked == dict(enumerate(ARGUMENTS))


def test_special_rendering(tokenizer: Any, executor: Any) -> None:
    syntax = CallSyntax("special")
    own = copy.deepcopy(tokenizer)
    model = make_model("llama", own, scale=0.05)
    add_markers(model, own, syntax)
    teach(own, lesson(own, syntax), model)
    calls = live(executor, syntax=syntax)
    made = generate(model, own, QUESTIONS, max_new_tokens=12, calls=calls)
    assert made[0].text == "<API>Calculator(37 * 24) → 888</API> 888 pens."
    assert [generation.plain for generation in made] == [f" {a} pens." for a in ANSWERS]


def test_jobs_that_follow_join_those_that_are_being_answered(model: Any, tokenizer: Any) -> None:
    """Each goes on from its own answer or begins anew; all get what they would get alone."""
    lengths = [3, 9, 14, 5, 20]
    follow = [" and the farm", "", " Rome", " so it", ""]
    head = "A train left at nine. Rome paid five days. The farm sold 37 crates, and so."
    first = [
        Job(head + prompt, length, ("e ",), float(n % 2), n)
        for n, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True))
    ]
    found: list[tuple[Job, Generation]] = []
    rounds: list[bool] = []
    batches = iter([first])

    def source(done: Sequence[tuple[Job, Generation]], busy: bool) -> list[Job]:
        new = list(next(batches, []))
        for job, made in done:
            found.append((job, made))
            if job in first and (more := follow[first.index(job)]):
                new.append(Job(f"{job.prompt}{made.text}{more}", 6, (), 0.5, job.seed + 50))
            elif job in first:
                new.append(Job(f"{job.seed} days it rained. {head} The lake", 6))
        if new:
            rounds.append(busy)
        return new

    serve(model, tokenizer, source, max_rows=3, kept=KeptKeys())
    assert len(found) == 10
    assert any(rounds[1:])  # some came while others were being answered
    for job, made in found:
        how: dict[str, Any] = {"max_new_tokens": job.max_new_tokens, "stop": job.stop}
        how.update(temperature=job.temperature, seed=[job.seed])
        assert generate(model, tokenizer, [job.prompt], **how) == [made]


def test_a_job_opens_its_first_call_where_that_is_merely_likely(model: Any, tokenizer: Any) -> None:
    token, k = open_token(tokenizer, SYNTAX), 40
    jobs = [Job(prompt, 16, fires=(token, k)) for prompt in PROMPTS]
    batches = iter([jobs])
    found: dict[int, str] = {}

    def source(done: Sequence[tuple[Job, Generation]], busy: bool) -> list[Job]:
        found.update((jobs.index(job), made.text) for job, made in done)
        return next(batches, [])

    serve(model, tokenizer, source, max_rows=3)
    unlikely = 0
    for n, prompt in enumerate(PROMPTS):
        ids = [tokenizer.bos_token_id, *encode_document(tokenizer, prompt)[0]]
        new: list[int] = []
        while len(new) < 16:
            with torch.no_grad():
                logits = model(torch.tensor([[*ids, *new]])).logits[0, -1]
            rank = int((logits > logits[token]).sum())
            fires = token not in new and rank < k
            unlikely += fires and rank > 0
            new.append(token if fires else int(logits.argmax()))
            if new[-1] == tokenizer.eos_token_id:
                del new[-1]
                break
        assert found[n] == decode_piece(tokenizer, ids[-1], new)
    assert unlikely  # some were not the most likely token


@pytest.mark.parametrize("shape", ["bloom", "mamba", "lfm2", "neox"])
def test_any_causal_model_continues_as_by_hand(
    shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those whose state is not keys: rows that join, leave and are cut back."""
    own = tiny.make_tokenizer("bytes")
    model = tiny.make_model(shape, own)
    prompts = ["The farm sold 37 crates", "Rome", "It rained for five days and"]
    first = context_token(own)
    made = generate(model, own, prompts, max_new_tokens=9, max_rows=2)
    assert ("keys cannot be kept" in caplog.text) == (shape != "neox")  # what is slow says so
    for prompt, generation in zip(prompts, made, strict=True):
        ids = ([] if first is None else [first]) + encode_document(own, prompt)[0]
        new: list[int] = []
        with torch.no_grad():
            while len(new) < 9 and own.eos_token_id not in new:
                new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
        kept = [token for token in new if token != own.eos_token_id]
        assert generation.text == decode_piece(own, ids[-1], kept)


def test_a_grammar_comes_before_a_likely_call(tokenizer: Any) -> None:
    model, token = make_model("llama", tokenizer), open_token(tokenizer, SYNTAX)
    mask = CallGrammar(tokenizer).mask("start: /[a-m ]{8}/")
    likely = (token, len(tokenizer))  # always, where it is allowed
    batches = iter([[Job("Rome", 8, fires=likely), Job("Rome", 8, fires=likely, mask=mask)]])
    found: list[Generation] = []

    def source(done: Sequence[tuple[Job, Generation]], busy: bool) -> list[Job]:
        found.extend(made for _, made in sorted(done, key=lambda pair: pair[0].mask is not None))
        return next(batches, [])

    serve(model, tokenizer, source, max_rows=1)
    assert sorted(" [" in made.text for made in found) == [False, True]
    assert any(re.fullmatch("[a-m ]{8}", made.text) for made in found)
