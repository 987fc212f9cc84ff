"""What the benches work on: a model, and documents of the bundled corpus."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from pipeline.calls import CallSyntax
from pipeline.config import Model
from pipeline.errors import ConfigError
from pipeline.lm.checkpoint import load_model
from pipeline.lm.forward import LanguageModel
from pipeline.lm.prompts import load_prompt
from pipeline.lm.tokens import EncodedDocument, encode_document
from pipeline.records import stable_hash

CORPUS = Path("data/corpus")
PROMPTS = Path("data/prompts")
SYNTAX = CallSyntax()


@cache
def corpus() -> tuple[str, ...]:
    """The texts of the bundled corpus, arithmetic first."""
    files = sorted(CORPUS.glob("*.jsonl"))
    if not files:
        raise ConfigError(f"{CORPUS}: no bundled corpus here; run bench from the project's folder")
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
    """Load (model, tokenizer); `tiny` is a small random Llama made on the spot."""
    return tiny() if model == "tiny" else load_model(Model(path=model))


def tiny() -> tuple[Any, Any]:
    """A random Llama with two layers, and a byte-level tokenizer trained on the bundled texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    prompt = load_prompt(PROMPTS, "Calculator", SYNTAX).head
    # often enough that the opening delimiter becomes one token
    core.train_from_iterator([*corpus()[:200], *[prompt] * 40], trainer)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        vocab_size=len(tokenizer),
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.random.set_rng_state(state)
    return model, tokenizer
