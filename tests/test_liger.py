"""The kernels of liger give our losses and gradients (in triton's interpreter, so without a GPU).

A process of its own, because triton decides when it is imported whether it interprets or compiles.
Skipped where the packages are missing: they are an extra and hundreds of megabytes large.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from transformers.models.llama import modeling_llama

from pipeline.lm import liger
from pipeline.lm.packing import Example, pack
from pipeline.lm.training import PackedLoss

HERE = all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton"))


def test_no_kernels_on_a_cpu() -> None:
    assert not liger.available(torch.device("cpu"))
    assert liger.available(torch.device("cuda")) == HERE


@pytest.mark.skipif(not HERE, reason="needs the extra `liger`")
def test_losses_and_gradients_are_those_of_the_model_without_kernels() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("tied", "untied"):
        assert found[f"{name} adopted"] is True
        assert found[f"{name} fused"] == {"ones": 2, "twos": 2, "mixed": 0, "none": 0}
        for weights in ("ones", "twos", "mixed", "none"):
            assert found[f"{name} {weights}"] < 1e-4, found
    assert found["classes as they were"] is True
    assert found["gpt2 adopted"] is False
    assert found["wrong kernel adopted"] is False
    assert found["left as it was"] is True


# -- what runs in the interpreter -----------------------------------------------------------------


def interpreter_like_a_device() -> None:
    """On a device, Python's floats arrive in a kernel as fp32 scalars, and libdevice exists."""
    import liger_kernel.ops.rms_norm as rms_norm
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = with_floats
    rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)  # the interpreter exchanges what `tl` holds


def make(tied: bool) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        vocab_size=70,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # norms that are not 1, larger differences elsewhere
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def batches(weight_of: Callable[[int], float]) -> list[Any]:
    """Two micro-batches of rows that several examples share."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for length in (5, 9, 3, 7, 6, 4):
        ids = torch.randint(0, 70, (length,), generator=generator).tolist()
        examples.append(Example(ids, [0.0, *(weight_of(n) for n in range(1, length))]))
    made = pack(examples, 18)
    assert len(made) == 2 and any(int((b.positions == 0).sum()) > 2 for b in made)
    return made


WEIGHTS: dict[str, Callable[[int], float]] = {
    "ones": lambda n: float(n != 2),  # results are masked, say
    "twos": lambda n: 2.0,
    "mixed": lambda n: 1.0 + (n % 2),
    "none": lambda n: 0.0,
}


def loss_and_gradients(loss_of: PackedLoss, made: list[Any]) -> list[torch.Tensor]:
    loss_of.zero_grad(set_to_none=True)
    summed = torch.zeros(())
    for batch in made:
        loss = loss_of(batch.ids, batch.positions, batch.targets, batch.weights)
        (loss * 0.3).backward()
        summed += loss.detach()
    return [summed, *(p.grad for p in loss_of.model.parameters())]


def check() -> Iterator[tuple[str, Any]]:
    fused: list[int] = []
    real = liger.summed_loss

    def counted(*inputs: Any) -> Any:
        fused.append(1)
        return real(*inputs)

    liger.summed_loss = counted
    tokenizer = SimpleNamespace()
    for name in ("tied", "untied"):
        model = make(name == "tied").train()
        plain = PackedLoss(model, tokenizer, None)
        liger.available = lambda device: True
        kernels = PackedLoss(copy.deepcopy(model), tokenizer, None)
        liger.available = lambda device: False
        yield f"{name} adopted", kernels.liger and not plain.liger
        uses = {}
        for weights, weight_of in WEIGHTS.items():
            made = batches(weight_of)
            fused.clear()
            ours, theirs = (loss_and_gradients(own, made) for own in (plain, kernels))
            uses[weights] = len(fused)
            pairs = zip(ours, theirs, strict=True)
            yield f"{name} {weights}", max(float((a - b).abs().max()) for a, b in pairs)
        yield f"{name} fused", uses
    yield from check_refusals()


def check_refusals() -> Iterator[tuple[str, Any]]:
    names = ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb")
    origins = [getattr(modeling_llama, name).__module__ for name in names]
    yield "classes as they were", set(origins) == {modeling_llama.__name__}
    gpt2 = GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=32, vocab_size=70)
    yield "gpt2 adopted", liger.adopt(AutoModelForCausalLM.from_config(gpt2))
    model = make(True)
    before = [dict(vars(module)) for module in model.modules()]
    real = liger._put_in

    def wrong(own: Any) -> None:
        real(own)
        own.model.norm.variance_epsilon = 1.0

    liger._put_in = wrong
    yield "wrong kernel adopted", liger.adopt(model)
    yield "left as it was", before == [dict(vars(module)) for module in model.modules()]


if __name__ == "__main__":
    interpreter_like_a_device()
    print(json.dumps(dict(check())))
