"""Kernels of the package `liger-kernel` in training: on CUDA, where it is installed.

    .venv/bin/pip install -e ".[liger]"

Two things are taken from it: norms and gated layers as one kernel each, and the loss of the output
layer in chunks where all targets weigh the same (`cross_entropy` does the others). Only this one
model is changed: liger would replace the classes of its architecture too, for every model that the
process loads later. For the same reason rotary positions stay as they are; liger has no other way.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_TOLERANCE = 1e-3  # of the largest value: fp32, sums in another order


def available(device: torch.device) -> bool:
    """Whether the kernels can run here: a CUDA device, and the package with its compiler."""
    found = all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton"))
    return device.type == "cuda" and found


def adopt(model: Any) -> bool:
    """Put the kernels into `model`, in place; tells whether they are in.

    They are tried on a few tokens, forwards and backwards, against what the model did before. Where
    they fail or differ, the model is left as it was, with a warning.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return False
    before = [(module, dict(vars(module))) for module in model.modules()]
    wanted = _trial(model)
    try:
        _put_in(model)
        if all(map(_close, _trial(model), wanted)):
            return True
        problem = "they give other results"
    except Exception as error:  # whatever goes wrong in compiling for this device
        problem = f"{type(error).__name__}: {error}"
    log.warning("the kernels of liger are left out for this model: %s", problem)
    for module, values in before:
        vars(module).clear()
        vars(module).update(values)
    return False


def summed_loss(
    hidden_ND: Tensor, table_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor
) -> Any:
    """Sum of -log p(target) in nats over at least one target, a fp32 scalar; for one backward."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden_ND, table_VD, targets_N, bias_V, reduction="sum")


def _put_in(model: Any) -> None:
    """Change the modules of this model; the names of its architecture stay what they were."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    architecture = vars(sys.modules[type(model).__module__])
    before = dict(architecture)
    try:
        _apply_liger_kernel_to_instance(
            model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False
        )
    finally:
        architecture.update(before)


def _trial(model: Any) -> list[Tensor]:
    """Hidden states of two packed examples, and gradients of the embeddings and of the norms."""
    training = model.training
    model.eval()
    ids = torch.arange(5, 21, device=model.device)[None] % model.config.vocab_size
    positions = torch.tensor([[*range(9), *range(7)]], device=model.device)
    with torch.enable_grad():
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        small = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
        hidden = model.base_model(
            inputs_embeds=embedded, position_ids=positions, use_cache=False
        ).last_hidden_state
        slope = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view_as(hidden)
        gradients = torch.autograd.grad(hidden, [embedded, *small], slope)
    model.train(training)
    return [hidden.detach(), *gradients]


def _close(found: Tensor, wanted: Tensor) -> bool:
    allowed = _TOLERANCE * max(1.0, float(wanted.abs().max()))
    return bool((found - wanted).abs().max() <= allowed)
