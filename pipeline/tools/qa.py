"""QA: retrieve passages, then read a short answer out of them.

The reader is a transformers question-answering model, or any causal language model through a
`generate` function that is given. An answer counts only if it is short and stands in its passage;
"unknown" is an allowed answer and a failure of kind no_result.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.errors import ConfigError
from pipeline.tools.articles import Passage
from pipeline.tools.base import STRICT, ToolError, ToolSpec, content_version, one_string
from pipeline.tools.dense import DenseSearchConfig
from pipeline.tools.search import SearchEngine, WikiSearchConfig

# Prompts in, continuations out, in the same order; greedy, so that an answer is repeatable.
Generate = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True)
class Answer:
    """What a reader found in one passage: a higher `score` is better; None: nothing."""

    text: str | None
    score: float


# A question and passages in, one answer per passage out.
Reader = Callable[[str, Sequence[Passage]], Sequence[Answer]]


@dataclass(frozen=True)
class ExtractiveReaderConfig:
    """A question-answering model (SQuAD 2 style): a folder or hub id."""

    __pydantic_config__ = STRICT

    model: str
    kind: Literal["extractive"] = "extractive"
    device: str = "cpu"


@dataclass(frozen=True)
class CausalReaderConfig:
    """A causal language model, run by the pipeline's own generation."""

    __pydantic_config__ = STRICT

    model: str
    kind: Literal["causal"] = "causal"
    max_new_tokens: int = 16


@dataclass(frozen=True)
class QAConfig:
    """`search` is the configuration of the search tool that QA retrieves with."""

    __pydantic_config__ = STRICT

    reader: Annotated[ExtractiveReaderConfig | CausalReaderConfig, Field(discriminator="kind")]
    name: Literal["QA"] = "QA"
    search: Annotated[WikiSearchConfig | DenseSearchConfig, Field(discriminator="name")] = field(
        default_factory=WikiSearchConfig
    )
    passages: int = 3
    max_answer_words: int = 10
    result_limit: int = 100

    def __post_init__(self) -> None:
        for key in ("passages", "max_answer_words"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: {getattr(self, key)} must be at least 1")


class QA:
    """Answers a question about the world with a few words out of an encyclopedia."""

    def __init__(
        self,
        engine: SearchEngine,
        reader: Reader,
        *,
        reader_identity: str,
        passages: int = 3,
        max_answer_words: int = 10,
        result_limit: int = 100,
    ) -> None:
        self.engine = engine
        self.reader = reader
        self.passages = passages
        self.max_answer_words = max_answer_words
        settings = (engine.spec.version, reader_identity, passages, max_answer_words)
        self.spec = qa_spec(result_limit, *settings)

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """The best answer as its passage spells it; raises ToolError of kind no_result."""
        question = arguments["question"]
        passages = self.engine.search(question, self.passages)
        answers = self.reader(question, passages) if passages else []
        best: tuple[float, str] | None = None
        for passage, answer in zip(passages, answers, strict=True):
            spelled = find_in_passage(answer.text, passage) if answer.text else None
            if spelled is None or len(spelled.split()) > self.max_answer_words:
                continue
            if best is None or answer.score > best[0]:
                best = (answer.score, spelled)
        if best is None:
            raise ToolError("no_result", f"unknown: no passage answers {question[:80]!r}")
        return best[1]


def qa_spec(result_limit: int, *settings: object) -> ToolSpec:
    """What QA says of itself; its answers depend on `settings`."""
    return ToolSpec(
        name="QA",
        version=content_version("1", *settings),
        description=(
            "Answers a question about facts with a few words that stand in an encyclopedia, "
            "or says that it does not know. Example: What is the capital of Portugal?"
        ),
        parameters=one_string("question", "A full question, for example Who wrote Emma?"),
        result_limit=result_limit,
        timeout_s=60.0,
    )


def find_in_passage(answer: str, passage: Passage) -> str | None:
    """The answer as the passage spells it, whatever case and spaces; None if it is not there."""
    words = re.findall(r"\w+(?:[^\w\s]+\w+)*", answer)
    if not words:
        return None
    pattern = r"(?<!\w)" + r"[\s\W]{1,3}".join(re.escape(word) for word in words) + r"(?!\w)"
    for text in (passage.text, passage.title):
        match = re.search(pattern, text, re.IGNORECASE)
        if match:
            return " ".join(match.group().split())
    return None


_PROMPT = (
    "Answer with a few words from the passage, or with: unknown\n\n"
    "Passage: Lisbon. Lisbon is the capital of Portugal. It lies on the Tagus.\n"
    "Question: On which river does Lisbon lie?\nAnswer: the Tagus\n\n"
    "Passage: Oak. Oaks are trees that grow slowly and can become very old.\n"
    "Question: Who painted the Mona Lisa?\nAnswer: unknown\n\n"
    "Passage: {title}. {text}\nQuestion: {question}\nAnswer:"
)


class GenerativeReader:
    """Asks a causal model about each passage, all in one batch; the first passages win ties."""

    def __init__(self, generate: Generate) -> None:
        self.generate = generate
        self._lock = threading.Lock()  # a model is used by one call at a time

    def __call__(self, question: str, passages: Sequence[Passage]) -> list[Answer]:
        asked = " ".join(question.split())
        prompts = [_PROMPT.format(title=p.title, text=p.text, question=asked) for p in passages]
        with self._lock:
            written = self.generate(prompts)
        return [Answer(_first_line(text), -rank) for rank, text in enumerate(written)]


def _first_line(text: str) -> str | None:
    """What a model answered on its first line, without a final point; None for `unknown`."""
    line = text.strip().partition("\n")[0].strip().strip("\"'“”").rstrip(".")
    return None if not line or line.lower().startswith("unknown") else line


class ExtractiveReader:
    """A transformers question-answering model; its score is the best span's less the null span's.

    A passage is cut to the model's length; passages of a search index are far shorter.
    """

    def __init__(self, model: str, device: str = "cpu", max_answer_tokens: int = 24) -> None:
        import torch
        from transformers import AutoModelForQuestionAnswering, AutoTokenizer

        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForQuestionAnswering.from_pretrained(model).to(device).eval()
        self.max_answer_tokens = max_answer_tokens
        self._lock = threading.Lock()

    def __call__(self, question: str, passages: Sequence[Passage]) -> list[Answer]:
        texts = [passage.text for passage in passages]
        batch = self.tokenizer(
            [question] * len(texts),
            texts,
            truncation="only_second",
            max_length=min(self.tokenizer.model_max_length, 512),
            padding=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        offsets = batch.pop("offset_mapping").tolist()
        with self._lock, self.torch.inference_mode():
            output = self.model(**batch.to(self.model.device))
        starts, ends = output.start_logits.float().cpu(), output.end_logits.float().cpu()
        answers = []
        for row, text in enumerate(texts):
            inside = self.torch.tensor([part == 1 for part in batch.sequence_ids(row)])
            span, score = self._best_span(starts[row], ends[row], inside)
            # Position 0 is the null answer of SQuAD 2: what the model says when it is not there.
            margin = score - float(starts[row][0] + ends[row][0])
            found = text[offsets[row][span[0]][0] : offsets[row][span[1]][1]]
            answers.append(Answer(found if margin > 0 else None, margin))
        return answers

    def _best_span(self, starts: Any, ends: Any, inside: Any) -> tuple[tuple[int, int], float]:
        """The best (start, end) inside the passage of at most `max_answer_tokens`; its score."""
        low = self.torch.finfo(starts.dtype).min / 4
        scores = starts.masked_fill(~inside, low)[:, None] + ends.masked_fill(~inside, low)[None]
        allowed = self.torch.ones_like(scores).triu().tril(self.max_answer_tokens - 1).bool()
        scores = scores.masked_fill(~allowed, low * 2)
        best = int(scores.argmax())
        length = len(starts)
        return (best // length, best % length), float(scores.flatten()[best])


def build_qa(config: QAConfig, engine: SearchEngine, generate: Generate | None) -> QA:
    """The tool of a configuration. `generate` runs the causal reader's model, if it is one.

    Raises ConfigError for a causal reader without a `generate`.
    """
    reader: Reader
    if isinstance(config.reader, ExtractiveReaderConfig):
        reader = ExtractiveReader(config.reader.model, config.reader.device)
    elif generate is not None:
        reader = GenerativeReader(generate)
    else:
        raise ConfigError("QA: a causal reader needs a generate function and none was given")
    return QA(
        engine,
        reader,
        reader_identity=f"{config.reader.kind} {config.reader.model}",
        passages=config.passages,
        max_answer_words=config.max_answer_words,
        result_limit=config.result_limit,
    )
