"""Linear layers of a CPU model with their weights laid out for oneDNN.

torch multiplies fp32 matrices with MKL, which reads plain weights anew for every product. With
weights that were laid out once, the few rows of a decoding step take half the time on some
processors, and a large batch a tenth less. The results agree (fp32: 1e-5); the model itself is not
changed, and outside of `packed` it computes as ever. The price is a second copy of the weights.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

LIMIT_BYTES = 4 << 30  # of weights: a larger model is not held twice
_ROWS = 16  # the layout is chosen for so many rows; it serves others as well

_Forward = Callable[[Tensor], Tensor]
_State = tuple[tuple[int, int], ...]


@dataclass
class _Packed:
    """The layers of a model, the state of their weights when they were packed, and what it made."""

    layers: list[nn.Linear]
    state: _State
    forwards: list[_Forward]


_known: WeakKeyDictionary[Any, _Packed] = WeakKeyDictionary()


@contextmanager
def packed(model: Any) -> Iterator[None]:
    """Let the linear layers of `model` use packed weights, where that can be had.

    Not while gradients are recorded, nor for other devices and precisions than fp32 on an x86 CPU.
    Weights that have changed are packed again.
    """
    layers, forwards = ([], []) if torch.is_grad_enabled() else _of(model)
    for layer, forward in zip(layers, forwards, strict=True):
        layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _of(model: Any) -> tuple[list[nn.Linear], list[_Forward]]:
    if not _available():
        return [], []
    known = _known.get(model)
    if known is None or known.state != _state(known.layers):
        layers = [
            module
            for module in model.modules()
            if type(module) is nn.Linear
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.float32
        ]
        if sum(layer.weight.nbytes for layer in layers) > LIMIT_BYTES:
            layers = []
        known = _Packed(layers, _state(layers), [_pack(layer) for layer in layers])
        _known[model] = known
    return known.layers, known.forwards


def _state(layers: Sequence[nn.Linear]) -> _State:
    """Changes when weights are replaced or written to (but for a step of a fused optimiser)."""
    return tuple((layer.weight.data_ptr(), layer.weight._version) for layer in layers)


def _pack(module: nn.Linear) -> _Forward:
    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), _ROWS)
    bias = None if module.bias is None else module.bias.detach()

    def forward(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out

    return forward


def product(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """Return a @ b without gradients; fp32 on a CPU by way of oneDNN, where that can be had.

    Both may be transposed views. Some processors run it twice as fast as torch's own product.
    """
    plain = a_NK.dtype != torch.float32 or a_NK.device.type != "cpu"
    if plain or not a_NK.numel() or not b_KM.numel() or not _available():
        return a_NK @ b_KM
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a_NK, b_KM.T, None, "none", [], "")
    return out


@cache
def _available() -> bool:
    """Whether this torch can, found by trial."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    linear = nn.Linear(24, 40, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        linear.weight.copy_(torch.linspace(-2, 1, 960).view(40, 24))
        linear.bias.copy_(torch.linspace(0, 1, 40))
    x = torch.linspace(-1, 1, 144).view(2, 3, 24)  # no random number is used up
    try:
        with torch.inference_mode():
            found = _pack(linear)(x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(found, functional.linear(x, linear.weight, linear.bias), atol=1e-5)
