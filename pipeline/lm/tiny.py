"""Makes a tiny model on the spot: every stage can be tried in seconds, without a download.

`model.path: tiny` in a configuration names it; it is made once, in `.cache/models/tiny` of the
project, from the bundled texts and prompts. It has learnt the form of a call and little else: what
it keeps is no measure of anything.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.errors import ConfigError
from pipeline.paths import PROJECT

CORPUS, PROMPTS = PROJECT / "data/corpus", PROJECT / "data/prompts"

_VOCABULARY = 1000
_ROWS, _LENGTH = 16, 128
_LEARNING_RATE = 4e-3
_SIGNS = " [ [ ] )] -> ( ,"  # counted so often that ` [` becomes one token


def bundled_texts() -> list[str]:
    """The texts of `data/corpus` and `data/prompts`, in the order of their names."""
    prompts = [path.read_text(encoding="utf-8") for path in sorted(PROMPTS.glob("*.txt"))]
    texts = [
        json.loads(line)["text"]
        for path in sorted(CORPUS.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    if not prompts or not texts:
        raise ConfigError(
            f"`model.path` = 'tiny' is made from {CORPUS} and {PROMPTS}, which are not there; "
            "name another model"
        )
    # a prompt is read as often as ten texts, so that the form of a call is learnt
    return [*texts, *(prompt for prompt in prompts for _ in range(10))]


def make_tiny_model(folder: Path, texts: Iterable[str], steps: int = 100) -> Path:
    """Train a byte-level BPE of about 1,000 tokens and a Llama of 64 hidden units on the texts.

    The same texts give the same model on the same machine. Takes seconds on one core; the folder
    appears when it is whole and loads with `AutoModelForCausalLM.from_pretrained`.
    """
    read = list(texts)
    tokenizer = _train_tokenizer(read)
    model = _train_model(tokenizer, read, steps)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.replace(temporary, folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _train_tokenizer(texts: Sequence[str]) -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*texts, *([_SIGNS] * len(texts))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def _train_model(tokenizer: Any, texts: Sequence[str], steps: int) -> Any:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    order = random.Random(0).sample(texts, len(texts))
    stream: list[int] = []
    for ids in tokenizer(order, add_special_tokens=False)["input_ids"]:
        stream += [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
    stream *= -(-_LENGTH // len(stream))
    starts = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, steps)
    tokens = torch.tensor(stream)
    for _ in range(steps):
        begin = torch.randint(len(tokens) - _LENGTH + 1, (_ROWS, 1), generator=starts)
        ids = tokens[begin + torch.arange(_LENGTH)]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()
