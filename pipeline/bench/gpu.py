"""What `scripts/bench_gpu` runs: agreement with the CPU on small inputs, then three rates on CUDA.

    python -m pipeline.bench.gpu

The rates are those of random weights in the shape of a 1.7B Llama in bf16: scoring and training as
a share of the card's own matrix rate, sampling against `generate_batch`. It has not run on a card
yet: no figure has been measured, and none of its targets is known to be met.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from pipeline.bench import _quieten, material
from pipeline.bench.sample import TOOL, Bench, K, generate_batch
from pipeline.bench.score import candidates, three_losses
from pipeline.config import Model
from pipeline.lm.checkpoint import load_model
from pipeline.lm.forward import LanguageModel
from pipeline.lm.packing import Example, pack
from pipeline.lm.prompts import load_prompt
from pipeline.lm.sampling import Settings, encode_prompt
from pipeline.lm.tokens import context_token
from pipeline.lm.training import PackedLoss

CONTEXT = 1024
DOCUMENTS = 32
TOLERANCE = 1e-3  # nats: fp32 on both sides, with sums in another order


def main() -> int:
    """Check, measure, print a table; 1 when a check fails, 2 without a card."""
    if not torch.cuda.is_available():
        print("bench_gpu: no CUDA device answers; nothing was measured", file=sys.stderr)
        return 2
    _quieten()
    console = Console()
    small, tokenizer = load_model(Model(path="tiny", device="cpu"))
    worst = _largest_difference(small, tokenizer)
    agrees = worst <= TOLERANCE
    console.print(
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}; losses on the card and on "
        f"the CPU differ by {worst:.1e} nats at most: {'agrees' if agrees else 'DISAGREES'}"
    )
    lm = LanguageModel(llama(len(tokenizer)).cuda().eval(), tokenizer)
    peak = _matrix_rate()
    table = Table("what", "rate", "share or ratio", "target")
    table.add_row("bf16 matrix product", f"{peak / 1e12:.0f} TFLOP/s", "", "")
    table.add_row("score", *_scoring(lm, peak), "40 %")
    table.add_row("sample", *_sampling(lm), "2x generate_batch")
    table.add_row("train", *_training(lm, peak), "45 %")
    table.add_row("peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", "", "")
    console.print(table)
    return 0 if agrees else 1


def llama(vocabulary: int) -> torch.nn.Module:
    """Random weights in the shape of a 1.7B Llama, bf16."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=max(vocabulary, 49152),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def _largest_difference(model: torch.nn.Module, tokenizer: object) -> float:
    """Largest difference between the losses of a tiny model on CPU and card, fp32."""
    found = []
    for device in ("cpu", "cuda"):
        lm = LanguageModel(copy.deepcopy(model).to(device), tokenizer)
        docs = material.encoded(lm, 4, 60)
        found.append(three_losses(lm, docs, candidates(lm, docs, _first(lm))))
    return max(abs(a - b) for a, b in zip(*found, strict=True))


def _first(lm: LanguageModel) -> list[int]:
    context = context_token(lm.tokenizer)
    return [] if context is None else [context]


def _seconds(work: Callable[[], object], times: int = 5) -> float:
    """Seconds of one call, after one to warm up."""
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def _matrix_rate(size: int = 8192) -> float:
    """FLOP per second of a large bf16 product: what the shares are shares of."""
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    return 2 * size**3 / _seconds(lambda: a @ a, 20)


def _flops_per_token(lm: LanguageModel) -> float:
    """Of a forward pass of the trunk: two per weight, and attention over half the context."""
    table = lm.model.get_input_embeddings().weight.numel()
    weights = sum(p.numel() for p in lm.trunk.parameters()) - table
    config = lm.model.config
    return 2.0 * weights + 2.0 * config.num_hidden_layers * config.hidden_size * CONTEXT


def _scoring(lm: LanguageModel, peak: float) -> tuple[str, str]:
    docs = material.encoded(lm, DOCUMENTS, CONTEXT)
    wanted = candidates(lm, docs, _first(lm))
    passes = [len(own.ids) for own in docs]
    passes += [len(p) + own.position + 5 for own in wanted for p in (own.without, own.with_result)]
    seconds = _seconds(lambda: three_losses(lm, docs, wanted, budget=65_536), 3)
    rate = sum(passes) / seconds
    return f"{rate:,.0f} tokens/s", f"{rate * _flops_per_token(lm) / peak:.0%}"


def _sampling(lm: LanguageModel) -> tuple[str, str]:
    prompt = encode_prompt(lm, load_prompt(material.PROMPTS, TOOL, material.SYNTAX), shared=True)
    settings = Settings(0, 1.0, 16, 512, 65_536, material.SYNTAX)
    bench = Bench(lm, prompt, settings)
    docs = material.encoded(lm, DOCUMENTS, None)
    _, rows, _ = bench.batch(docs)
    contexts = [bench.context(docs, row) for row in rows]
    ours = len(rows) / _seconds(lambda: bench.batch(docs), 3)
    theirs = len(rows) / _seconds(lambda: generate_batch(lm, contexts, 16, sample=True), 3)
    return f"{ours:,.0f} samples/s (k={K})", f"{ours / theirs:.2f}x"


def _training(lm: LanguageModel, peak: float) -> tuple[str, str]:
    """Forward and backward of packed rows with the optimiser's step, fp32 master weights."""
    model = lm.model.float().train()
    loss_of = PackedLoss(model, lm.tokenizer, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    docs = material.encoded(lm, 16, CONTEXT)
    examples = [Example(own.ids, [0.0, *[1.0] * (len(own.ids) - 1)]) for own in docs]
    batches = [batch.to(torch.device("cuda")) for batch in pack(examples, 8 * CONTEXT)]

    def step() -> None:
        for batch in batches:
            loss_of(batch.ids, batch.positions, batch.targets, batch.weights).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    rate = sum(batch.tokens for batch in batches) / _seconds(step, 3)
    head = 2.0 * model.get_output_embeddings().weight.numel()
    flops = 3.0 * (_flops_per_token(lm) + head)
    return f"{rate:,.0f} tokens/s", f"{rate * flops / peak:.0%}"


if __name__ == "__main__":
    raise SystemExit(main())
