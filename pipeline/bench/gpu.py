"""What `scripts/bench_gpu` runs: agreement with the CPU on small inputs, then three rates on CUDA.

    python -m pipeline.bench.gpu
    python -m pipeline.bench.gpu --rehearse     every step on a CPU, on tiny shapes

The rates are those of random weights in the shape of a 1.7B Llama in bf16: scoring and training as
a share of the card's own matrix rate, sampling against `generate_batch`. It stops after seven
minutes and prints what there is by then. It has not run on a card yet: no figure has been measured,
and none of its targets is known to be met.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from pipeline.bench import _quieten, material
from pipeline.bench.made_up import candidates, three_losses
from pipeline.bench.measure import synchronise
from pipeline.bench.sample import TOOL, Bench, K, generate_batch
from pipeline.config import Model
from pipeline.lm import liger
from pipeline.lm.checkpoint import load_model
from pipeline.lm.forward import LanguageModel
from pipeline.lm.packing import Example, Packed, pack
from pipeline.lm.prompts import load_prompt
from pipeline.lm.sampling import Settings, encode_prompt
from pipeline.lm.tokens import context_token
from pipeline.lm.training import PackedLoss

TOLERANCE = 1e-3  # nats per token: fp32 on both sides, with sums in another order
LIMIT_S = 7 * 60


@dataclass(frozen=True)
class Work:
    """What is measured, and where."""

    device: torch.device
    context: int  # tokens per document
    documents: int
    layers: int
    hidden: int
    heads: int
    matrix: int  # rows and columns of the product that gives the card's own rate
    times: int  # repetitions of each measurement
    limit_s: int = LIMIT_S


CARD = Work(torch.device("cuda"), 1024, 32, 24, 2048, 32, 8192, 3)
REHEARSAL = Work(torch.device("cpu"), 24, 2, 2, 32, 4, 64, 1)


class OutOfTime(Exception):
    """The time of the whole bench is over."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure, print a table; 1 when a check fails or time runs out, 2 without a card."""
    parser = argparse.ArgumentParser(prog="bench_gpu", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run every step on a CPU with tiny shapes; its rates mean nothing",
    )
    if parser.parse_args(argv).rehearse:
        return measure(REHEARSAL, Console())
    if not torch.cuda.is_available():
        print("bench_gpu: no CUDA device answers; nothing was measured", file=sys.stderr)
        return 2
    return measure(CARD, Console())


def measure(work: Work, console: Console) -> int:
    """Run all steps within the time, the checks first; returns the exit code."""
    _quieten()
    table = Table("what", "rate", "share or ratio", "target")
    agrees = in_time = False
    try:
        with _time_limit(work.limit_s):
            agrees = _agreement(work, console)
            for row in _rows(work):
                table.add_row(*row)
        in_time = True
    except OutOfTime:
        console.print(f"stopped after {work.limit_s} s: the rest was not measured")
    console.print(table)
    return 0 if agrees and in_time else 1


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block when it takes longer (between two operations on the device)."""

    def ring(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _rows(work: Work) -> Iterator[tuple[str, ...]]:
    """The rows of the table, one after the other."""
    tokenizer = load_model(Model(path="tiny", device="cpu"))[1]
    lm = LanguageModel(llama(work, len(tokenizer)), tokenizer)
    peak = _matrix_rate(work)
    yield "bf16 product", f"{peak / 1e12:.3g} TFLOP/s", "", ""
    yield "score", *_scoring(work, lm, peak), "40 %"
    yield "sample", *_sampling(work, lm), "2x generate_batch"
    yield "train", *_training(work, lm, peak), "45 %"
    if work.device.type == "cuda":
        yield "peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", "", ""


def llama(work: Work, vocabulary: int) -> Any:
    """Random weights in bf16; for a card in the shape of a 1.7B Llama."""
    config = LlamaConfig(
        hidden_size=work.hidden,
        intermediate_size=4 * work.hidden,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.heads,
        vocab_size=max(vocabulary, 24 * work.hidden),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with work.device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


# -- agreement -----------------------------------------------------------------------------------


def _agreement(work: Work, console: Console) -> bool:
    """Losses of scoring, and loss and gradients of training: the device against the CPU, fp32."""
    model, tokenizer = load_model(Model(path="tiny", device="cpu"))
    scoring, training = [], []
    for device in (torch.device("cpu"), work.device):
        own = copy.deepcopy(model).to(device)
        lm = LanguageModel(own, tokenizer)
        docs = material.encoded(lm, 4, 60)
        scoring.append(torch.tensor(three_losses(lm, docs, candidates(lm, docs, _first(lm)))))
        training.append(_loss_and_gradients(lm, docs))
    apart = float((scoring[0] - scoring[1]).abs().max())
    apart_training = max(float((a - b).abs().max()) for a, b in zip(*training, strict=True))
    agrees = max(apart, apart_training) <= TOLERANCE
    name = torch.cuda.get_device_name(0) if work.device.type == "cuda" else "rehearsal on a CPU"
    kernels = "with" if liger.available(work.device) else "without"
    console.print(
        f"{name}, torch {torch.__version__}, {kernels} the kernels of liger\n"
        f"largest difference to the CPU: losses {apart:.1e} nats, loss per token and gradients of "
        f"training {apart_training:.1e}: {'agrees' if agrees else 'DISAGREES'}"
    )
    return agrees


def _loss_and_gradients(lm: LanguageModel, docs: Sequence[Any]) -> list[torch.Tensor]:
    """Loss per token of packed rows, and all its gradients."""
    (batch,) = _packed(docs, 4096)
    loss_of = PackedLoss(lm.model.train(), lm.tokenizer, None)
    loss = _loss(loss_of, batch) / float(batch.weights.sum())
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in lm.model.parameters())]


def _first(lm: LanguageModel) -> list[int]:
    context = context_token(lm.tokenizer)
    return [] if context is None else [context]


# -- rates ---------------------------------------------------------------------------------------


def _seconds(work: Callable[[], object], times: int) -> float:
    """Seconds of one call, after one to warm up."""
    work()
    synchronise()
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronise()
    return (time.perf_counter() - began) / times


def _matrix_rate(work: Work) -> float:
    """FLOP per second of a large bf16 product: what the shares are shares of."""
    a = torch.randn(work.matrix, work.matrix, dtype=torch.bfloat16, device=work.device)
    return 2 * work.matrix**3 / _seconds(lambda: a @ a, 20)


def _flops_per_token(work: Work, lm: LanguageModel) -> float:
    """Of a forward pass of the trunk: two per weight, and attention over half the context."""
    table = lm.model.get_input_embeddings().weight.numel()
    weights = sum(p.numel() for p in lm.trunk.parameters()) - table
    return 2.0 * weights + 2.0 * work.layers * work.hidden * work.context


def _scoring(work: Work, lm: LanguageModel, peak: float) -> tuple[str, str]:
    docs = material.encoded(lm, work.documents, work.context)
    wanted = candidates(lm, docs, _first(lm))
    passes = [len(own.ids) for own in docs]
    passes += [len(p) + own.position + 5 for own in wanted for p in (own.without, own.with_result)]
    seconds = _seconds(lambda: three_losses(lm, docs, wanted, budget=65_536), work.times)
    rate = sum(passes) / seconds
    return f"{rate:,.0f} tokens/s", f"{rate * _flops_per_token(work, lm) / peak:.0%}"


def _sampling(work: Work, lm: LanguageModel) -> tuple[str, str]:
    prompt = encode_prompt(lm, load_prompt(material.PROMPTS, TOOL, material.SYNTAX), shared=True)
    settings = Settings(0, 1.0, 16, 512, 65_536, material.SYNTAX)
    bench = Bench(lm, prompt, settings)
    docs = material.encoded(lm, work.documents, None)
    _, rows, _ = bench.batch(docs)
    contexts = [bench.context(docs, row) for row in rows]
    ours = len(rows) / _seconds(lambda: bench.batch(docs), work.times)
    theirs = len(rows) / _seconds(lambda: generate_batch(lm, contexts, 16, sample=True), work.times)
    return f"{ours:,.0f} samples/s (k={K})", f"{ours / theirs:.2f}x"


def _training(work: Work, lm: LanguageModel, peak: float) -> tuple[str, str]:
    """Forward and backward of packed rows with the optimiser's step, fp32 master weights."""
    model = lm.model.float().train()
    loss_of = PackedLoss(model, lm.tokenizer, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batches = _packed(material.encoded(lm, work.documents // 2, work.context), 8 * work.context)

    def step() -> None:
        for batch in batches:
            _loss(loss_of, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    rate = sum(batch.tokens for batch in batches) / _seconds(step, work.times)
    head = 2.0 * model.get_output_embeddings().weight.numel()
    flops = 3.0 * (_flops_per_token(work, lm) + head)
    return f"{rate:,.0f} tokens/s", f"{rate * flops / peak:.0%}"


def _packed(docs: Sequence[Any], budget: int) -> list[Packed]:
    return pack([Example(own.ids, [0.0, *[1.0] * (len(own.ids) - 1)]) for own in docs], budget)


def _loss(loss_of: PackedLoss, batch: Packed) -> torch.Tensor:
    loss: torch.Tensor = loss_of(batch.ids, batch.positions, batch.targets, batch.weights)
    return loss


if __name__ == "__main__":
    raise SystemExit(main())
