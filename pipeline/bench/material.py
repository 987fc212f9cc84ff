"""What the benches work on: a model, and documents of the bundled corpus."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from pipeline.calls import CallSyntax
from pipeline.config import Model
from pipeline.errors import ConfigError
from pipeline.lm.checkpoint import load_model
from pipeline.lm.forward import LanguageModel
from pipeline.lm.tokens import EncodedDocument, encode_document
from pipeline.paths import PROJECT
from pipeline.records import Document, stable_hash

CORPUS = PROJECT / "data/corpus"
PROMPTS = PROJECT / "data/prompts"
SYNTAX = CallSyntax()


@cache
def corpus() -> tuple[str, ...]:
    """The texts of the bundled corpus, arithmetic first."""
    files = sorted(CORPUS.glob("*.jsonl"))
    if not files:
        raise ConfigError(f"{CORPUS}: the bundled corpus is not there")
    return tuple(
        json.loads(line)["text"]
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
    )


def texts() -> Iterator[str]:
    """The bundled texts without end; from the second round on each has a number of its own."""
    for turn in itertools.count():
        for text in corpus():
            yield text if turn == 0 else f"{text} This is copy {turn}."


def encoded(lm: LanguageModel, count: int, tokens: int | None) -> list[EncodedDocument]:
    """`count` documents, as they are or joined and cut to exactly `tokens` tokens."""
    source = texts()
    found: list[EncodedDocument] = []
    while len(found) < count:
        text = next(source)
        ids, starts = encode_document(lm.tokenizer, text)
        while tokens is not None and len(ids) < tokens:
            text = f"{text} {next(source)}"
            ids, starts = encode_document(lm.tokenizer, text)
        found.append(EncodedDocument(stable_hash("bench", text), ids[:tokens], starts[:tokens]))
    return found


def load(model: str) -> tuple[Any, Any]:
    """Load (model, tokenizer): a folder, a hub id, or `tiny` (made on the spot)."""
    return load_model(Model(path=model))


def documents(lm: LanguageModel, count: int, tokens: int | None) -> list[Document]:
    """The same texts as records for the stages."""
    found: list[Document] = []
    source = texts()
    while len(found) < count:
        text = next(source)
        ids, starts = encode_document(lm.tokenizer, text)
        while tokens is not None and len(ids) <= tokens:
            text = f"{text} {next(source)}"
            ids, starts = encode_document(lm.tokenizer, text)
        cut = text if tokens is None else text[: starts[tokens]].rstrip()
        doc_id = stable_hash("bench", cut)
        found.append(
            Document(
                doc_id=doc_id, text=cut, date=None, url=None, source="bench", tools=["Calculator"]
            )
        )
    return found
