"""Evaluation: metrics, statistics, questions, and the stage with its four arms."""

from __future__ import annotations

import io
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from pipeline.calls import TEXT
from pipeline.config import parse_config
from pipeline.context import Context, closing_resources
from pipeline.errors import ConfigError, WorkError
from pipeline.evaluation.live import generate_text
from pipeline.evaluation.metrics import first_number, is_correct, within_words
from pipeline.evaluation.questions import Question, load_questions
from pipeline.evaluation.statistics import binomial_error, compare, perplexity_of
from pipeline.lm.checkpoint import save_checkpoint
from pipeline.lm.forward import LanguageModel
from pipeline.lm.perplexity import text_losses
from pipeline.lm.tokens import open_token
from pipeline.records import Document, to_table
from pipeline.report.summary import print_arms
from pipeline.shards import RunFolder, read_json
from pipeline.stages import evaluate, finetune
from pipeline.tools.calculator import Calculator
from pipeline.tools.executor import Executor

# -- metrics --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 888 bottles and 3 crates", "888"),
        (" about 1,250.50 euros, 3 more", "1250.50"),
        (" $1,000,000.", "1000000"),
        (" 37 * 24 = 888 bottles", "888"),
        (" 10 - 2 - 3 = 5, not 8", "5"),
        (" 37 crates. 5 = 5", "37"),
        (" -4 degrees", "-4"),
        (" 10-2", "10"),
        (" in B12 there are 7", "7"),
        (" 25% of it", "25"),
        (" 12,5", "12"),
        (" 3.", "3"),
        (" none at all", None),
    ],
)
def test_first_number(text: str, number: str | None) -> None:
    assert first_number(text) == (None if number is None else Decimal(number))


def question(kind: str, answer: str, *aliases: str) -> Question:
    return Question("q", kind, "p", answer, aliases)


@pytest.mark.parametrize(
    ("kind", "answers", "text", "right"),
    [
        ("arithmetic", ["888"], " 888.0 bottles", True),
        ("arithmetic", ["2444"], " 2,444 vines", True),
        ("arithmetic", ["888"], " 889 or 888", False),
        ("arithmetic", ["888"], " 8888", False),
        ("lookup", ["Clemens Winkler", "Winkler"], " a chemist called winkler.", True),
        ("lookup", ["Rhine"], " " + "word " * 19 + "Rhine", True),
        ("lookup", ["Rhine"], " " + "word " * 20 + "Rhine", False),
        ("lookup", ["Rhine"], " Rhineland", False),
        ("lookup", ["Ploce"], " Ploče, in Croatia", True),
        ("date", ["April 30", "30 April"], " 30 April 1998", True),
        ("date", ["April 30"], " 30 April 1998", False),
        ("date", ["Friday"], " " + "word " * 9 + "Friday", True),
        ("date", ["Friday"], " " + "word " * 10 + "Friday", False),
        ("date", ["7"], " 17 days", False),
    ],
)
def test_is_correct(kind: str, answers: list[str], text: str, right: bool) -> None:
    assert is_correct(question(kind, *answers), text) is right


def test_within_words_needs_an_answer() -> None:
    assert not within_words("!", "anything ! at all", 10)


# -- statistics -----------------------------------------------------------------------------------


def test_binomial_error() -> None:
    assert binomial_error(20, 100) == pytest.approx(0.04)
    assert binomial_error(0, 0) == 0.0


def test_perplexity_and_its_error() -> None:
    value, error = perplexity_of([20.0, 60.0], [10, 20])
    assert value == pytest.approx(math.exp(80 / 30))
    # draws: both the first (1/4), both the second (1/4), one of each (1/2)
    samples = [math.exp(2), math.exp(3), math.exp(80 / 30), math.exp(80 / 30)]
    assert error == pytest.approx(np.std(samples), rel=0.05)
    assert perplexity_of([20.0, 60.0], [10, 20]) == (value, error)
    assert perplexity_of([20.0], [10]) == (pytest.approx(math.exp(2)), None)


def test_paired_comparison() -> None:
    first = [True] * 8 + [False] * 1 + [True] * 5 + [False] * 6
    second = [False] * 8 + [True] * 1 + [True] * 5 + [False] * 6
    found = compare(first, second)
    assert (found["only_first"], found["only_second"], found["n"]) == (8, 1, 20)
    assert found["difference"] == pytest.approx(0.35)
    assert found["p_value"] == pytest.approx(2 * (1 + 9) / 2**9)
    differences = np.array(first, dtype=float) - np.array(second, dtype=float)
    assert found["standard_error"] == pytest.approx(differences.std() / 20**0.5)
    assert compare([True, False], [True, False])["p_value"] == 1.0


# -- questions ------------------------------------------------------------------------------------


def write_questions(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_load_questions(tmp_path: Path) -> None:
    rows = [
        {"id": f"a{i}", "kind": "arithmetic", "prompt": f"p{i} ", "answer": "1"} for i in range(9)
    ]
    rows.append({"id": "d", "kind": "date", "prompt": "p", "answer": "x", "date": "2020-01-02"})
    write_questions(tmp_path / "a.jsonl", rows[:5])
    write_questions(tmp_path / "b.jsonl", rows[5:])
    found = load_questions([str(tmp_path / "*.jsonl")])
    assert [q.id for q in found] == [row["id"] for row in rows]
    assert found[0].prompt == "p0"
    assert found[-1].date == "2020-01-02"
    few = load_questions([str(tmp_path / "*.jsonl")], limit=3)
    assert [q.id for q in few] == ["a0", "a3", "a6", "d"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad.jsonl:2: not JSON"),
        ("[]", r"bad.jsonl:2: expected an object"),
        ('{"id": "x", "kind": "date", "prompt": "p"}', r"bad.jsonl:2: `answer`"),
        (
            '{"id": "x", "kind": "poem", "prompt": "p", "answer": "a"}',
            r"`kind` = 'poem': allowed are arithmetic",
        ),
        ('{"id": "one", "kind": "date", "prompt": "p", "answer": "a"}', r"'one' occurs twice"),
    ],
)
def test_bad_questions(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    good = '{"id": "one", "kind": "date", "prompt": "p", "answer": "a"}\n'
    path.write_text(good + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_questions([str(path)])


def test_no_questions_where_some_were_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="matches no file"):
        load_questions([str(tmp_path / "*.jsonl")])


# -- the stage ------------------------------------------------------------------------------------

TEXTS = ["Box with 37 and 24: 888 pens.", "Box with 12 and 3: 36 pens."]
CALLS = ["37 * 24", "12 * 3"]
RESULTS = ["888", "36"]


def make_tokenizer() -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*TEXTS, "so [Calculator(1 * 2) -> 3] and [ ["] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def make_model(tokenizer: Any) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """A run that has been fine-tuned until the tuned model answers with calls."""
    root = tmp_path_factory.mktemp("run")
    tokenizer = make_tokenizer()
    save_checkpoint(make_model(tokenizer), tokenizer, root / "base", {})
    folder = RunFolder(root / "run")
    rows = [
        {
            "id": str(i),
            "text": text,
            "text_augmented": "",
            "calls": [
                {
                    "tool": "Calculator",
                    "arguments": arguments,
                    "result": result,
                    "char_start": text.index(":") + 1,
                }
            ],
        }
        for i, (text, arguments, result) in enumerate(zip(TEXTS, CALLS, RESULTS, strict=True))
    ]
    data = folder.stage("augment") / "data"
    data.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), data / "train-00000-of-00001.parquet")
    plain = ["Box with 5 and 6: pens.", "Rome has 3 pens [ and more."]
    documents = [
        Document(doc_id=doc_id, text=text, date=None, url=None, source="s", tools=[])
        for doc_id, text in (("0", TEXTS[0]), ("8", plain[0]), ("9", plain[1]))
    ]
    folder.write_part("ingest", 0, 1, to_table(documents, Document), {"fingerprint": "x"})
    questions = [
        {
            "id": "q1",
            "kind": "arithmetic",
            "prompt": "Box with 37 and 24:",
            "answer": "888",
            "date": "2023-01-30",
        },
        {"id": "q2", "kind": "arithmetic", "prompt": "Box with 12 and 3:", "answer": "36"},
        {"id": "q3", "kind": "date", "prompt": "Box with 12 and", "answer": "Monday"},
    ]
    config = parse_config(
        {
            "name": "test",
            "corpus": {"sources": [{"path": "none.txt"}]},
            "model": {"path": str(root / "base"), "device": "cpu"},
            "tools": [{"name": "Calculator"}],
            "finetune": {
                "max_steps": 120,
                "batch_size": 2,
                "eval_every": 60,
                "learning_rate": 0.01,
                "dtype": "float32",
            },
            "evaluate": {
                "questions": [write_questions(root / "questions.jsonl", questions)],
                "call_k": 1,
                "max_new_tokens": 8,
                "held_out_documents": 5,
            },
        }
    )
    finetune.run(Context(config, folder, "finetune", "trained"))
    return Context(config, folder, "evaluate", "print")


def run_evaluate(context: Context) -> dict[str, Any]:
    own = Context(context.config, context.folder, "evaluate", context.fingerprint)
    with closing_resources(own):
        evaluate.run(own)
    results: dict[str, Any] = read_json(own.folder.stage("evaluate") / "results.json")
    return results


@pytest.fixture(scope="module")
def results(finished: Context) -> dict[str, Any]:
    return run_evaluate(finished)


def read_traces(context: Context) -> list[dict[str, Any]]:
    path = context.folder.stage("evaluate") / "traces.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_four_arms(results: dict[str, Any]) -> None:
    assert list(results["arms"]) == ["base", "control", "tuned_disabled", "tuned"]
    assert results["questions"] == 3
    for name, arm in results["arms"].items():
        assert list(arm["tasks"]) == ["arithmetic", "date"]
        assert arm["tasks"]["arithmetic"]["n"] == 2
        if name != "tuned":
            assert arm["overall"]["calls"] == arm["overall"]["call_rate"] == 0
    assert results["arms"]["base"]["tasks"]["arithmetic"]["correct"] == 0
    assert results["arms"]["control"]["tasks"]["arithmetic"]["correct"] == 2  # known by heart
    tuned = results["arms"]["tuned"]
    task = tuned["tasks"]["arithmetic"]
    assert (task["correct"], task["calls"], task["failed_calls"]) == (2, 2, 0)
    assert (task["accuracy"], task["standard_error"], task["call_rate"]) == (1.0, 0.0, 1.0)
    assert tuned["tools"]["Calculator"]["calls"] >= 2
    pairs = {(c["first"], c["second"], c["task"]) for c in results["comparisons"]}
    assert ("tuned", "tuned_disabled", "overall") in pairs
    assert ("tuned", "control", "arithmetic") in pairs


def test_traces_hold_each_answer_with_its_calls(finished: Context, results: Any) -> None:
    traces = read_traces(finished)
    assert [(t["arm"], t["id"]) for t in traces] == [
        (arm, q) for arm in evaluate.ARMS for q in ("q1", "q2", "q3")
    ]
    (first,) = [t for t in traces if (t["arm"], t["id"]) == ("tuned", "q1")]
    assert first["text"] == " [Calculator(37 * 24) -> 888] 888 pens."
    assert first["calls"][0]["result"] == "888"
    assert first["correct"]
    assert finished.folder.stage_marker("evaluate").is_file()
    marker = read_json(finished.folder.stage_marker("evaluate"))
    assert marker["fingerprint"] == "print"
    assert marker["counts"]["Calculator"]["calls"] >= 2


def test_perplexity_is_that_of_texts_nobody_trained_on(
    finished: Context, results: dict[str, Any]
) -> None:
    """No validation split here, so the documents without calls: 8 and 9, not 0."""
    assert results["held_out_documents"] == 2
    texts = evaluate.held_out_texts(finished.folder, 5)
    assert texts == ["Box with 5 and 6: pens.", "Rome has 3 pens [ and more."]
    model = AutoModelForCausalLM.from_pretrained(finished.folder.path.parent / "base")
    tokenizer = make_tokenizer()
    loss, tokens = 0.0, 0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        logits = model(torch.tensor([ids])).logits[0, :-1].detach()
        loss += float(functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        tokens += len(ids) - 1
    base = results["arms"]["base"]
    assert base["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-4)
    assert base["perplexity_standard_error"] > 0


def test_disabled_perplexity_rules_the_opening_token_out() -> None:
    tokenizer = make_tokenizer()
    lm = LanguageModel(make_model(tokenizer), tokenizer)
    opening = open_token(tokenizer, TEXT)
    text = "Rome has 3 pens [ and more."
    ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert opening in ids
    logits = lm.model(torch.tensor([ids])).logits[0, :-1].detach()
    free = logits.log_softmax(-1)
    logits[:, opening] = -torch.inf
    muted = logits.log_softmax(-1)
    wanted = sum(
        -float((free if target == opening else muted)[i, target])
        for i, target in enumerate(ids[1:])
    )
    ((loss, tokens),) = text_losses(lm, [text], muted=opening)
    assert (tokens, loss) == (len(ids) - 1, pytest.approx(wanted, abs=1e-3))
    ((plain, _),) = text_losses(lm, [text])
    assert plain > loss
    assert text_losses(lm, [text, "Box"])[0][0] == pytest.approx(plain, abs=1e-4)


def test_a_killed_evaluation_goes_on_with_the_next_arm(
    finished: Context, results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done = evaluate.evaluate_arm, []

    def dies(context: Any, arm: str, *rest: Any) -> Any:
        done.append(arm)
        if done == ["base", "control", "tuned_disabled"]:
            raise KeyboardInterrupt
        return real(context, arm, *rest)

    monkeypatch.setattr(evaluate, "evaluate_arm", dies)
    with pytest.raises(KeyboardInterrupt):
        run_evaluate(finished)
    assert run_evaluate(finished) == results
    assert done == ["base", "control", "tuned_disabled", "tuned_disabled", "tuned"]
    assert not (finished.folder.stage("evaluate") / ".arms").exists()


class Recorder(Calculator):
    """The calculator, and about which document it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def run(self, arguments: dict[str, Any], document: Any) -> str:
        self.asked.append((arguments["expression"], dict(document)))
        return super().run(arguments, document)


def test_tools_are_told_the_date_of_the_question(finished: Context, results: Any) -> None:
    recorder = Recorder()
    with Executor([recorder]) as executor:
        own = Context(finished.config, finished.folder, "evaluate", "again")
        own.resources["executor"] = executor
        evaluate.run(own)
    asked = dict(recorder.asked)
    assert asked["37 * 24"] == {"date": "2023-01-30", "doc_id": "q1"}
    assert asked["12 * 3"]["date"] is None


def test_a_missing_checkpoint_is_a_clear_error(finished: Context, tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="finetune"):
        evaluate.model_of("tuned", finished.config, RunFolder(tmp_path))


def test_print_arms(results: dict[str, Any]) -> None:
    out = io.StringIO()
    print_arms(results, Console(file=out, width=140))
    text = out.getvalue()
    assert "tuned disabled" in text and "100.0 ± 0.0" in text
    assert "tuned - control" in text
    print_arms({}, Console(file=out))


def test_generate_text_uses_the_tools_of_the_checkpoint(finished: Context) -> None:
    folder = str(finished.folder.stage("finetune"))
    made = generate_text(folder, "Box with 37 and 24:", device="cpu")
    assert made.text.startswith(" [Calculator(37 * 24) -> 888] 888 pens.")
    assert made.calls[0].result == "888"
    silent = generate_text(folder, "Box with 37 and 24:", device="cpu", enabled=False)
    assert not silent.calls
    control = generate_text(f"{folder}/control", "Box with 37 and 24:", device="cpu")
    assert control.text == " 888 pens."
    base = str(finished.folder.path.parent / "base")
    assert generate_text(base, "Box", device="cpu", max_new_tokens=3).calls == []
