"""Random numbers that belong to a sample, not to a batch.

Each sampled call has its own key, made of (seed, doc_id, tool, position, sample index). The noise
of a step is a hash of (key, step, token id), so the same call is drawn whatever the batch size, the
number of workers, the order, or a resume. Tokens are drawn by the Gumbel-max trick, which flips
only where two tokens are within rounding error of each other (inverse-CDF sampling would flip in
the long tail of a 50,000-token vocabulary).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from pipeline.lm.forward import on_device

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
_ROWS_AT_ONCE = 8  # keeps the working set of a CPU core in its cache


def sample_key(seed: int, doc_id: str, tool: str, position: int, sample: int) -> int:
    """64-bit key of one sample."""
    text = f"{seed}|{doc_id}|{tool}|{position}|{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _step_key(key: int, step: int) -> tuple[int, int]:
    """Mix the step into the key (splitmix64's finaliser) and split it into two 32-bit words."""
    z = (key + (step + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    z ^= z >> 31
    return _signed(z), _signed(z >> 32)


def gumbel(keys: list[int], steps: list[int], vocabulary: int, device: torch.device) -> Tensor:
    """Gumbel noise (rows, vocabulary), fp32: one stream per key and step."""
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=device) * _signed(_GOLDEN)
    pairs = [_step_key(k, s) for k, s in zip(keys, steps, strict=True)]
    words = on_device(torch.tensor(pairs, dtype=torch.int32), device)
    chunk = _ROWS_AT_ONCE if device.type == "cpu" else len(keys)
    parts = []
    for start in range(0, len(keys), chunk):
        a, b = words[start : start + chunk, 0:1], words[start : start + chunk, 1:2]
        x = tokens + a
        x ^= (x >> 16) & 0xFFFF
        x *= _MIX_1
        x ^= b
        x ^= (x >> 15) & 0x1FFFF
        x *= _signed(_MIX_2)
        x ^= (x >> 16) & 0xFFFF
        # 23 bits and a half are exact in fp32: never 0 or 1, so the noise is always finite
        uniform = ((x >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
        parts.append(uniform.log_().neg_().log_().neg_())
    return torch.cat(parts)
