"""Tiny models, tokenizers, documents and prompts made on the spot: nothing is downloaded.

Three shapes of model (Llama with grouped keys, GPT-2, GPT-NeoX) and four tokenizers:
- `bytes`: byte-level BPE like GPT-2's, no BOS, only an end of text;
- `bos`: byte-level BPE that adds a BOS by itself and trims spaces from its offsets (Llama 3, NeoX);
- `metaspace`: SentencePiece-like, a dummy space before the first word, byte fallback, adds a BOS;
- `bare`: `bytes` with neither BOS nor end of text.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    PreTrainedTokenizerFast,
)

from pipeline.config import Config, parse_config
from pipeline.context import Context
from pipeline.lm.forward import LanguageModel
from pipeline.records import Document, stable_hash
from pipeline.shards import RunFolder

SHAPES = ("llama", "gpt2", "neox")
KINDS = ("bytes", "bos", "metaspace")
PAIRS = (("llama", "bytes"), ("gpt2", "bos"), ("neox", "metaspace"))

TEXTS = (
    "The farm sold 37 crates with 24 bottles each, so the total is 888 bottles in all.",
    "A class of 12 has 3 pens each, which makes 36 pens. It rained for five days in Lyon.",
    "On Monday the shop paid 400 for 8 lamps (50 per lamp) and sold them again in May.",
    "Café Zoë in Zürich sold 15 % more: 460 cakes instead of 400. 😀 日本 came too.",
    "Rome is the capital of Italy. It lies on the Tiber, and 7 of its hills are old.",
    "Paris is the capital of France, 90 + 45 = 135 km away [see the map] by train.",
)

PROMPTS = {
    "Calculator": (
        "Add calls to a calculator. Write [Calculator(expression)] before the answer.\n\n"
        "Input:\nIt took 12 boxes of 5, so 60 in all.\n\n"
        "Output:\nIt took 12 boxes of 5, so [Calculator(12 * 5)] 60 in all.\n\n"
        "Input:\nOf 90 pens 45 are left, so 45 went.\n\n"
        "Output:\nOf 90 pens 45 are left, so [Calculator(90 - 45)] 45 went."
    ),
    "Calendar": (
        "Add calls to a calendar.\n\n"
        "Input:\nToday is Monday in Rome.\n\nOutput:\nToday is [Calendar()] Monday in Rome."
    ),
    "WikiSearch": (
        "Add calls to an encyclopedia.\n\n"
        "Input:\nRome is the capital of Italy.\n\n"
        "Output:\nRome is the capital of [WikiSearch(Rome)] Italy."
    ),
}

ARTICLES = (
    {"title": "Rome", "text": "Rome is the capital of Italy. It lies on the Tiber."},
    {"title": "Paris", "text": "Paris is the capital of France. It lies on the Seine."},
    {"title": "Lyon", "text": "Lyon is a city in France where the Rhone meets the Saone."},
)

# what a model is taught: calls of the calculator, everywhere
SUMS = ("12 * 5", "90 - 45", "37 * 24", "12 * 3", "400 / 8", "90 + 45", "(58 - 7)", "1240 + 15")
LESSONS = (
    PROMPTS["Calculator"],
    *(
        f"so [Calculator({one})] pens is [Calculator({other})] 60 the [Calculator({one})] km."
        for one, other in zip(SUMS, SUMS[3:] + SUMS[:3], strict=True)
    ),
    "so [Calculator(37 * 24) -> 888] 888 and [Calculator(12 * 3) -> 36] 36 pens.",
)


# -- tokenizers -----------------------------------------------------------------------------------


def _corpus() -> list[str]:
    # so often that ` [` becomes one token under every scheme
    return [
        *TEXTS,
        *LESSONS,
        *PROMPTS.values(),
        *(["and [ so [ is [ the [Calculator( 1)] ->"] * 40),
    ]


def _train(pre_tokenizer: Any, size: int, special: list[str]) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    core.decoder = decoders.ByteLevel()
    return core


def _begins_with(core: Tokenizer, bos: str) -> Any:
    return processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
    )


def _byte_level(digits: bool) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if not digits:
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _metaspace() -> Tokenizer:
    """BPE over `▁`, with bytes for what it does not know: made as SentencePiece models are."""
    trained = Tokenizer(models.BPE())
    signs = pre_tokenizers.Split(Regex(r"▁?[^\w▁]+|\d"), "isolated")  # no merge across them
    trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), signs])
    trained.train_from_iterator(
        _corpus(), trainers.BpeTrainer(vocab_size=380, limit_alphabet=70, show_progress=False)
    )
    state = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learnt = sorted(state["vocab"], key=state["vocab"].get)
    vocabulary = {name: index for index, name in enumerate([*names, *learnt])}
    merges = [tuple(merge) for merge in state["merges"]]
    core = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.post_processor = _begins_with(core, "<s>")
    return core


@cache
def make_tokenizer(kind: str) -> Any:
    """One of the four tokenizers; made once, so nobody may change it (copy it first)."""
    if kind == "metaspace":
        core = _metaspace()
        return PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
    if kind == "bos":
        core = _train(_byte_level(digits=False), 480, ["<s>", "</s>"])
        core.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=True), _begins_with(core, "<s>")]
        )
        return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    core = _train(_byte_level(digits=True), 420, ["<|endoftext|>"])
    if kind == "bare":
        return PreTrainedTokenizerFast(tokenizer_object=core)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")


def lower_casing_tokenizer() -> Any:
    """A byte-level tokenizer that loses the case of what it reads."""
    core = Tokenizer.from_str(make_tokenizer("bytes").backend_tokenizer.to_str())
    core.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")


def respacing_tokenizer() -> Any:
    """A word-level tokenizer that puts spaces around every sign."""
    words = sorted({w for t in [*_corpus(), "q n Zürich 2.5 1,888.5 max"] for w in _words(t)})
    vocabulary = {name: index for index, name in enumerate(["<unk>", " [", *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" \["), "isolated"),
            pre_tokenizers.Split(Regex(r"(?<! )\[|[^\w\s\[]| +(?!\[)"), "removed"),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<unk>")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


# -- models ---------------------------------------------------------------------------------------


def make_model(shape: str, tokenizer: Any, seed: int = 0, scale: float = 0.15) -> Any:
    """A random model in fp32; `scale` above 0.02 makes its distributions far from uniform."""
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    size = {"vocab_size": len(tokenizer), "initializer_range": scale, **ids}
    config: Any
    match shape:
        case "llama" | "mistral" | "gemma2" | "lfm2":
            window = {"head_dim": 12, "sliding_window": 16}
            own: dict[str, Any] = {
                "llama": {},
                "mistral": window,
                "gemma2": window,  # and logits that are changed at the end
                "lfm2": {"layer_types": ["conv", "full_attention"]},  # short convolutions between
            }[shape]
            config = CONFIG_MAPPING[shape](
                hidden_size=48,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                **own,
                **size,
            )
        case "gpt2":
            config = GPT2Config(n_embd=48, n_layer=2, n_head=4, n_positions=1024, **size)
        case "neox":
            config = GPTNeoXConfig(
                hidden_size=48,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                **size,
            )
        case "bloom":  # attention of its own, with distances instead of positions
            config = BloomConfig(hidden_size=48, n_layer=2, n_head=4, **size)
        case "mamba":  # a state that cannot be cut
            config = CONFIG_MAPPING[shape](
                hidden_size=48, num_hidden_layers=2, state_size=8, **size
            )
        case _:
            raise ValueError(f"no tiny model {shape!r}")
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@cache
def make_lm(shape: str, kind: str) -> LanguageModel:
    """A random model with its tokenizer, made once."""
    return LanguageModel(make_model(shape, make_tokenizer(kind)), make_tokenizer(kind))


@cache
def taught_lm(shape: str, kind: str, steps: int = 80) -> LanguageModel:
    """A model that was taught the lessons well enough to write calls, and not by heart."""
    tokenizer = make_tokenizer(kind)
    model = make_model(shape, tokenizer, scale=0.05)
    stream = [token for text in LESSONS for token in tokenizer(f"{text}\n\n")["input_ids"]]
    ids = torch.tensor(stream[: len(stream) // 240 * 240]).view(-1, 240)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        logits = model(ids).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return LanguageModel(model.eval(), tokenizer)


# -- a run ----------------------------------------------------------------------------------------


def document(
    text: str, tools: tuple[str, ...] = tuple(PROMPTS), date: str | None = None
) -> Document:
    """A document that every tool may work on."""
    return Document(
        doc_id=stable_hash("tiny", text),
        text=text,
        date=date,
        url=None,
        source="tiny",
        tools=list(tools),
    )


def documents(texts: tuple[str, ...] = TEXTS) -> list[Document]:
    """The documents of a tiny run."""
    return [document(text, date="2020-05-04") for text in texts]


def write_inputs(folder: Path) -> None:
    """Write prompts, an encyclopedia and a corpus to `folder`."""
    (folder / "prompts").mkdir(parents=True, exist_ok=True)
    for tool, prompt in PROMPTS.items():
        (folder / "prompts" / f"{tool}.txt").write_text(prompt, encoding="utf-8")
    for name, rows in (
        ("articles.jsonl", ARTICLES),
        ("corpus.jsonl", [{"text": text, "date": "2020-05-04"} for text in TEXTS]),
    ):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / name).write_text("".join(lines), encoding="utf-8")


def raw_config(inputs: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a tiny run; `section={...}` replaces values of a section."""
    raw: dict[str, Any] = {
        "name": "tiny",
        "corpus": {"sources": [{"path": str(inputs / "corpus.jsonl")}]},
        "model": {"path": "unused", "device": "cpu"},
        "tools": [
            {"name": "Calculator"},
            {"name": "Calendar"},
            {
                "name": "WikiSearch",
                "sources": [str(inputs / "articles.jsonl")],
                "index": str(inputs / "articles.sqlite"),
            },
        ],
        "shards": 1,
        "prompts": str(inputs / "prompts"),
        "sample": {"tau_s": 0.0, "k": 3, "m": 2, "max_new_tokens": 24},
        "execute": {"workers": 1},
        "select": {"tau_f": 0.0},
    }
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(raw.get(key), dict)
        raw[key] = {**raw[key], **value} if both else value
    return raw


def make_config(inputs: Path, **changes: Any) -> Config:
    """The configuration of a tiny run."""
    return parse_config(raw_config(inputs, **changes))


def make_context(folder: Path, config: Config, lm: LanguageModel | None = None) -> Context:
    """A context over an empty run folder, with a model that is already in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    context = Context(config, RunFolder(folder), "tiny", "print")
    if lm is not None:
        context.resources["lm"] = lm
    return context
