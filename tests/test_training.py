"""The training loop: packed = unpacked, 1x8 = 8x1, killed and resumed = uninterrupted."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from pipeline.calls import CallSyntax
from pipeline.config import Finetune, parse_config
from pipeline.context import Context
from pipeline.errors import WorkError
from pipeline.lm import training
from pipeline.lm.checkpoint import save_checkpoint
from pipeline.lm.cross_entropy import cross_entropy
from pipeline.lm.packing import Example, fill_rows, make_examples, pack
from pipeline.lm.training import PackedLoss, Progress, learning_rate, texts_of_step, train
from pipeline.shards import RunFolder, read_json
from pipeline.stages import finetune

TEXTS = [
    "The farm sold 37 crates with 24 bottles each, so the total is 888 bottles in all.",
    "A train left at nine and came back at noon, and nobody asked why it was so late.",
    "Rome is the capital of Italy. It lies on the Tiber.",
    "Twelve boxes of three pens make 36 pens, which is enough for the class.",
    "The shop paid 400 for 1400 sheets and sold them again on Monday.",
    "It rained for five days, and then the sun came out over the valley and the lake.",
]


@dataclasses.dataclass(frozen=True)
class Call:
    tool: str
    arguments: str
    result: str
    char_start: int


def make_tokenizer() -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*TEXTS, "so [Calculator(1 * 2) -> 3] and [ ["], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


SHAPES = {
    "llama": LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "neox": GPTNeoXConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    ),
}


def make_model(shape: str, tokenizer: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = SHAPES[shape]
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def texts_of(tokenizer: Any, texts: list[str] = TEXTS) -> list[list[Example]]:
    return [make_examples(tokenizer, t, (), CallSyntax(), max_length=64) for t in texts]


@pytest.fixture(scope="module")
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)


SETTINGS = Finetune(
    learning_rate=1e-2,
    batch_size=3,
    max_steps=6,
    eval_every=2,
    tokens_per_micro_batch=96,
    dtype="float32",
)


MANY_BATCHES = dataclasses.replace(SETTINGS, tokens_per_micro_batch=40, batch_size=5)


def save(model: Any, folder: Path, progress: Progress) -> None:
    folder.mkdir(parents=True)
    torch.save(model.state_dict(), folder / "weights.pt")


def run(
    shape: str,
    tokenizer: Any,
    accelerator: Accelerator,
    folder: Path,
    settings: Finetune = SETTINGS,
    **options: Any,
) -> tuple[Any, list[dict[str, Any]], training.Trained]:
    model = make_model(shape, tokenizer)
    events: list[dict[str, Any]] = []
    texts = texts_of(tokenizer)
    trained = train(
        model,
        tokenizer,
        texts[:5],
        texts[5:],
        settings,
        accelerator=accelerator,
        folder=folder,
        save=save,
        seed=7,
        **{"on_event": lambda event, **v: events.append({"event": event, **v}), **options},
    )
    accelerator.free_memory()
    return model, events, trained


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [e["loss"] for e in events if e["event"] == "train"]


# -- packing --------------------------------------------------------------------------------------


def summed_alone(model: Any, examples: Sequence[Example]) -> float:
    """The summed loss of examples that the model reads one by one."""
    alone = 0.0
    for example in examples:
        ids = torch.tensor([example.ids])
        logits = model(ids).logits[0, :-1]
        alone += float(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    return alone


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_loss_equals_the_loss_of_each_text_alone(shape: str, tokenizer: Any) -> None:
    model = make_model(shape, tokenizer).requires_grad_(False)
    examples = [example for text in texts_of(tokenizer) for example in text]
    alone = summed_alone(model, examples)
    loss_of = PackedLoss(model, tokenizer, None)
    for budget in (40, 96, 4096):
        batches = pack(examples, budget)
        packed = sum(float(loss_of(b.ids, b.positions, b.targets, b.weights)) for b in batches)
        assert packed == pytest.approx(alone, abs=2e-4)
    assert any((b.positions[0] == 0).sum() > 1 for b in pack(examples, 4096))  # rows were shared


@pytest.mark.parametrize("shape", ["bloom", "mamba", "lfm2"])
def test_models_that_would_mix_the_examples_of_a_row_get_one_each(shape: str) -> None:
    own = tiny.make_tokenizer("bytes")
    model = tiny.make_model(shape, own).requires_grad_(False)
    examples = [example for text in texts_of(own) for example in text]
    alone = summed_alone(model, examples)
    loss_of = PackedLoss(model, own, None)
    assert not loss_of.shares_rows
    for budget in (40, 96, 4096):
        batches = pack(examples, budget, share_rows=False)
        assert sum(len(b.ids) for b in batches) == len(examples)
        packed = sum(float(loss_of(b.ids, b.positions, b.targets, b.weights)) for b in batches)
        assert packed == pytest.approx(alone, abs=2e-4)
    shared = pack(examples, 4096)
    mixed = sum(float(loss_of(b.ids, b.positions, b.targets, b.weights)) for b in shared)
    assert abs(mixed - alone) > 0.1


def test_rows_waste_no_room() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 200, (300,), generator=generator).tolist()
    rows = fill_rows(lengths, 512)
    assert sorted(i for row in rows for i in row) == list(range(300))
    assert all(sum(lengths[i] for i in row) <= 512 for row in rows)
    assert fill_rows([5, 900, 5], 100) in ([[1], [0, 2]], [[1], [0], [2]])  # over-long: alone
    examples = [Example([1] * n, [0.0] + [1.0] * (n - 1)) for n in lengths]
    batches = pack(examples, 4096)
    cells = sum(b.ids.numel() for b in batches)
    assert sum(b.tokens for b in batches) == sum(lengths)
    assert sum(lengths) / cells > 0.98
    assert all(b.ids.numel() <= 4096 for b in batches)


def test_examples_start_with_the_context_token_and_end_with_eos(tokenizer: Any) -> None:
    text = TEXTS[0]
    (example,) = make_examples(tokenizer, text, (), CallSyntax(), max_length=512)
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert example.ids == [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]
    assert example.weights == [0.0] + [1.0] * (len(plain) + 1)


def test_weights_of_calls_and_results(tokenizer: Any) -> None:
    call = Call("Calculator", "37 * 24", "888", TEXTS[0].index(" 888"))
    (example,) = make_examples(
        tokenizer,
        TEXTS[0],
        [call],
        CallSyntax(),
        max_length=512,
        call_weight=2.0,
        mask_results=True,
    )

    def shown(weight: float) -> str:
        return tokenizer.decode(
            [i for i, w in zip(example.ids, example.weights, strict=True) if w == weight]
        )

    assert shown(2.0) == " [Calculator(37 * 24) ->"
    assert shown(0.0) == "<s> 888]"
    assert shown(1.0) == TEXTS[0] + "</s>"


def test_a_long_text_is_cut_outside_of_calls(tokenizer: Any) -> None:
    call = Call("Calculator", "37 * 24", "888", TEXTS[0].index(" 888"))
    (whole,) = make_examples(tokenizer, TEXTS[0], [call], CallSyntax(), max_length=512)
    for room in range(30, len(whole)):
        parts = make_examples(tokenizer, TEXTS[0], [call], CallSyntax(), max_length=room)
        assert all(len(part) <= room for part in parts)
        assert [i for part in parts for i in part.ids[1:]] == whole.ids[1:]
        assert sum("[Calculator(37 * 24) -> 888]" in tokenizer.decode(p.ids) for p in parts) == 1


# -- loss -----------------------------------------------------------------------------------------


def test_chunked_cross_entropy_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.lm.cross_entropy.CHUNK_LOGITS", 7 * 50)  # 7 rows at a time
    torch.manual_seed(0)
    hidden, table, bias = torch.randn(40, 16), torch.randn(50, 16), torch.randn(50)
    targets, weights = torch.randint(0, 50, (40,)), torch.rand(40)
    results = []
    for chunked in (False, True):
        inputs = [t.clone().requires_grad_() for t in (hidden, table, bias)]
        if chunked:
            loss = cross_entropy(*inputs, targets, weights, torch.float32)
        else:
            logits = inputs[0] @ inputs[1].T + inputs[2]
            loss = (functional.cross_entropy(logits, targets, reduction="none") * weights).sum()
        (loss * 0.3).backward()
        results.append((loss.detach(), *(t.grad for t in inputs)))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


def test_how_a_step_is_cut_does_not_matter(
    tokenizer: Any, accelerator: Accelerator, tmp_path: Path
) -> None:
    """Accumulation 1x8 = 8x1, though the micro-batches hold different numbers of targets."""
    ends = []
    for budget in (16, 4096):
        settings = dataclasses.replace(SETTINGS, tokens_per_micro_batch=budget, batch_size=5)
        model, events, _ = run("llama", tokenizer, accelerator, tmp_path / str(budget), settings)
        ends.append((losses(events), torch.cat([p.flatten() for p in model.parameters()])))
    assert ends[0][0] == pytest.approx(ends[1][0], abs=1e-5)
    # Adam divides by the size of the gradient, so rounding shows where that is near zero.
    torch.testing.assert_close(ends[0][1], ends[1][1], atol=3e-4, rtol=0)


def test_gradient_checkpointing_changes_nothing(
    tokenizer: Any, accelerator: Accelerator, tmp_path: Path
) -> None:
    plain = run("llama", tokenizer, accelerator, tmp_path / "a")[1]
    settings = dataclasses.replace(SETTINGS, gradient_checkpointing=True)
    checked = run("llama", tokenizer, accelerator, tmp_path / "b", settings)[1]
    assert losses(checked) == pytest.approx(losses(plain), abs=1e-6)


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [learning_rate(step, 10, 1.0, 0.2) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert learning_rate(0, 1, 1.0, 0.0) == 1.0


def test_every_epoch_sees_every_text_once() -> None:
    settings = Finetune(batch_size=4)
    epochs = [[texts_of_step(e * 3 + s, settings, 10, 1) for s in range(3)] for e in range(2)]
    for epoch in epochs:
        assert sorted(i for step in epoch for i in step) == list(range(10))
    assert epochs[0] != epochs[1]


# -- the loop -------------------------------------------------------------------------------------


def test_training_learns_and_keeps_the_best(
    tokenizer: Any, accelerator: Accelerator, tmp_path: Path
) -> None:
    settings = dataclasses.replace(SETTINGS, max_steps=40, eval_every=4, learning_rate=3e-2)
    _, events, trained = run("llama", tokenizer, accelerator, tmp_path, settings)
    assert losses(events)[-1] < 0.3 * losses(events)[0]
    dev = {e["step"]: e["perplexity"] for e in events if e["event"] == "dev"}
    assert sorted(dev) == [0, *range(4, 41, 4)]
    assert trained.perplexity_before == dev.pop(0)
    assert trained.perplexity == min(dev.values()) == dev[trained.best_step]
    assert trained.best_step < 40  # it over-fits: the best is not the last
    model = make_model("llama", tokenizer)
    model.load_state_dict(torch.load(trained.folder / "weights.pt", weights_only=True))
    (example,) = texts_of(tokenizer)[5]
    ids = torch.tensor([example.ids])
    assert math.exp(float(model(ids, labels=ids).loss)) == pytest.approx(trained.perplexity)


class Killed(Exception):
    pass


@pytest.mark.parametrize("shape", ["llama", "gpt2"])  # gpt2 has dropout
@pytest.mark.parametrize("at", [3, 5])
def test_killed_and_resumed_gives_the_same_losses(
    shape: str, at: int, tokenizer: Any, accelerator: Accelerator, tmp_path: Path
) -> None:
    whole_model, whole, trained = run(shape, tokenizer, accelerator, tmp_path / "whole")
    first: list[dict[str, Any]] = []

    def die(event: str, **values: Any) -> None:
        if event == "train" and values["step"] == at:
            raise Killed
        first.append({"event": event, **values})

    with pytest.raises(Killed):
        run(shape, tokenizer, accelerator, tmp_path / "cut", on_event=die)
    accelerator.free_memory()
    model, second, resumed = run(shape, tokenizer, accelerator, tmp_path / "cut")
    done = {e["step"]: e["loss"] for e in first + second if e["event"] == "train"}
    assert next(e["step"] for e in second if e["event"] == "train") == at - (at - 1) % 2
    assert [done[step] for step in sorted(done)] == losses(whole)  # bit for bit
    for one, other in zip(model.parameters(), whole_model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (resumed.best_step, resumed.perplexity) == (trained.best_step, trained.perplexity)
    assert resumed.tokens == trained.tokens


def test_a_state_of_another_configuration_is_not_used(
    tokenizer: Any, accelerator: Accelerator, tmp_path: Path
) -> None:
    run("llama", tokenizer, accelerator, tmp_path, fingerprint="one")
    assert (tmp_path / "state.pt").is_file()
    events = run("llama", tokenizer, accelerator, tmp_path, fingerprint="two")[1]
    assert len(losses(events)) == SETTINGS.max_steps


def test_a_loss_that_is_no_number_stops(
    tokenizer: Any, accelerator: Accelerator, tmp_path: Path
) -> None:
    settings = dataclasses.replace(SETTINGS, learning_rate=1e30)
    with pytest.raises(WorkError, match="learning_rate"):
        run("llama", tokenizer, accelerator, tmp_path, settings)
    accelerator.free_memory()


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(
    tokenizer: Any, accelerator: Accelerator, tmp_path: Path
) -> None:
    one = run("llama", tokenizer, accelerator, tmp_path / "one", MANY_BATCHES)[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*command, __file__, str(tmp_path / "two")], check=True, timeout=300)
    two = json.loads((tmp_path / "two" / "events.json").read_text())
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    assert [e["perplexity"] for e in two if e["event"] == "dev"] == pytest.approx(
        [e["perplexity"] for e in one if e["event"] == "dev"], rel=1e-4
    )


# -- the stage ------------------------------------------------------------------------------------


def make_run(tmp_path: Path, tokenizer: Any, **settings: Any) -> Context:
    """A run folder with a base model and a data set of six augmented texts."""
    base = tmp_path / "base"
    if not base.exists():
        save_checkpoint(make_model("llama", tokenizer), tokenizer, base, {})
    rows = []
    for index, text in enumerate(TEXTS):
        start = text.index(" ", 20)
        calls = [vars(Call("Calculator", f"{index} + 1", str(index + 1), start))]
        rows.append({"id": str(index), "text": text, "text_augmented": "", "calls": calls})
    data = tmp_path / "run" / "06-dataset" / "data"
    data.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows[:5]), data / "train-00000-of-00001.parquet")
    pq.write_table(pa.Table.from_pylist(rows[5:]), data / "validation-00000-of-00001.parquet")
    config = parse_config(
        {
            "name": "test",
            "corpus": {"sources": [{"path": "none.txt"}]},
            "model": {"path": str(base), "device": "cpu"},
            "tools": [{"name": "Calculator"}],
            "finetune": {
                "max_steps": 4,
                "batch_size": 2,
                "eval_every": 2,
                "learning_rate": 0.01,
                "dtype": "float32",
            },
            **settings,
        }
    )
    return Context(config, RunFolder(tmp_path / "run"), "finetune", "print")


def test_the_stage_writes_two_ordinary_checkpoints(tokenizer: Any, tmp_path: Path) -> None:
    context = make_run(tmp_path, tokenizer)
    finetune.run(context)
    folder = context.folder.stage("finetune")
    weights = []
    for place in (tmp_path / "base", folder, folder / "control"):
        model = AutoModelForCausalLM.from_pretrained(place, dtype="float32")
        AutoTokenizer.from_pretrained(place)
        weights.append(model.get_input_embeddings().weight)
        prompt = torch.tensor([[0, 5, 6]])
        assert model.generate(prompt, max_new_tokens=2, min_new_tokens=2).shape == (1, 5)
    assert not any(torch.equal(weights[a], weights[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    extra = read_json(folder / "callsieve.json")
    assert extra["syntax"] == {"rendering": "text", "empty_result": "arrow"}
    assert extra["tools"] == [{"name": "Calculator"}]
    assert extra["call_k"] == 10
    marker = read_json(context.folder.stage_marker("finetune"))
    assert marker["fingerprint"] == "print"
    assert marker["arms"]["tuned"]["steps"] == marker["arms"]["control"]["steps"] == 4
    counts = marker["counts"]["*"]
    assert counts["tuned:tokens"] > counts["control:tokens"]  # calls only in one of them
    assert not (folder / ".training").exists()
    events = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum('"event": "train", "arm": "control"' in line for line in events) == 4


def test_a_finished_model_is_not_trained_again(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_run(tmp_path, tokenizer)
    real, trained = finetune.train, []

    def dies_at_the_control(*arguments: Any, **options: Any) -> Any:
        trained.append(options["folder"].name)
        if trained == ["tuned", "control"]:
            raise Killed
        return real(*arguments, **options)

    monkeypatch.setattr(finetune, "train", dies_at_the_control)
    with pytest.raises(Killed):
        finetune.run(context)
    assert context.folder.stage_marker("finetune").exists() is False
    finetune.run(context)
    assert trained == ["tuned", "control", "control"]
    assert context.folder.stage_marker("finetune").exists()


def test_special_rendering_adds_three_different_rows(tokenizer: Any, tmp_path: Path) -> None:
    context = make_run(tmp_path, tokenizer, call_format={"rendering": "special"})
    finetune.run(context)
    folder = context.folder.stage("finetune")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    loaded = AutoTokenizer.from_pretrained(folder)
    ids = [loaded.convert_tokens_to_ids(m) for m in ("<API>", "</API>", "→")]
    assert all(i is not None for i in ids)
    rows = model.get_input_embeddings().weight[ids]
    assert torch.pdist(rows).min() > 1e-3
    assert len(AutoTokenizer.from_pretrained(folder / "control")) == len(loaded) - 3


def test_no_data_set_is_a_clear_error(tokenizer: Any, tmp_path: Path) -> None:
    context = make_run(tmp_path, tokenizer)
    for file in (tmp_path / "run" / "06-dataset" / "data").iterdir():
        file.unlink()
    with pytest.raises(WorkError, match="augment"):
        finetune.run(context)


if __name__ == "__main__":  # one of the two processes of the test above
    own = Accelerator(cpu=True)
    target = Path(sys.argv[1])
    found = run("llama", make_tokenizer(), own, target, MANY_BATCHES)[1]
    if own.is_main_process:
        (target / "events.json").write_text(json.dumps(found))
