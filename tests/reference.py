"""The method again, one candidate at a time, straight from the formulas.

Nothing here is shared with `pipeline.lm`: plain forward passes of transformers over whole contexts,
all logits, no batch, no cache, no padding, no pruning. Only the noise of a sample is taken from
there, because the same calls can only be drawn with the same noise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.calls import read_sample
from pipeline.lm.noise import gumbel, sample_key

WEIGHTS = (5 / 15, 4 / 15, 3 / 15, 2 / 15, 1 / 15)  # w_t = max(0, 1 - 0.2 t) / 3


# -- tokens ---------------------------------------------------------------------------------------


def piece_ids(tokenizer: Any, piece: str) -> list[int]:
    """Ids of a piece inside of a text: for `▁` tokenizers word by word through the bare model."""
    core = tokenizer.backend_tokenizer
    if "Metaspace" not in core.to_str():
        return list(tokenizer(piece, add_special_tokens=False)["input_ids"])
    words = [word for word in re.split("(?=▁)", piece.replace(" ", "▁")) if word]
    return [token.id for word in words for token in core.model.tokenize(word)]


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """x_1..x_T."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def before_all(tokenizer: Any) -> list[int]:
    """What stands before every text: BOS, else the end-of-text token, else nothing."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    return []


def called(tool: str, arguments: str, result: str) -> list[str]:
    """The pieces of e(c, r); of e(c, eps) when the result is empty."""
    return [" [", f"{tool}({arguments}) ->", f" {result}]"]


# -- probabilities and losses ---------------------------------------------------------------------


@torch.no_grad()
def log_probabilities(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """log p(. | ids[:n+1]) for every n, float64 (L, V)."""
    logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def loss(
    model: Any,
    before: Sequence[int],
    text: Sequence[int],
    i: int,
    weights: Sequence[float] = WEIGHTS,
    tail: str = "fixed",
) -> float:
    """L_i(z) = - sum_{j>=i} w_{j-i} log p(x_j | z, x_1..x_{j-1}); `before` is context and z."""
    logp = log_probabilities(model, [*before, *text])
    total = used = 0.0
    for t, weight in enumerate(weights):
        j = i + t
        if j < len(text):
            total -= weight * float(logp[len(before) + j - 1, text[j]])
            used += weight
    return total / used if tail == "renormalise" else total


@dataclass(frozen=True)
class Losses:
    """The losses of one call and what follows from them."""

    none: float
    call: float
    result: float
    null: float | None

    @property
    def gain(self) -> float:
        return min(self.none, self.call) - self.result

    @property
    def gain_null(self) -> float | None:
        return None if self.null is None else min(self.none, self.call) - self.null


def losses_of_call(
    lm: Any,
    text: str,
    call: Any,
    null_result: str | None,
    separator: str = "\n",
    tail: str = "fixed",
) -> Losses:
    """L_i(eps), L_i(e(c, eps)), L_i(e(c, r)) and the loss with another call's result."""
    model, tokenizer = lm.model, lm.tokenizer
    start, x, i = before_all(tokenizer), text_ids(tokenizer, text), call.token_index

    def with_result(result: str) -> float:
        pieces = [*called(call.tool, call.arguments, result), separator]
        z = [token for piece in pieces for token in piece_ids(tokenizer, piece)]
        return loss(model, [*start, *z], x, i, tail=tail)

    return Losses(
        loss(model, start, x, i, tail=tail),
        with_result(""),
        with_result(call.result),
        None if null_result is None else with_result(null_result),
    )


# -- sampling -------------------------------------------------------------------------------------


def sampling_context(tokenizer: Any, prompt: str, text: str) -> tuple[list[int], list[int]]:
    """Ids of P(x) with everything before the copy of x, and x_1..x_T."""
    x = text_ids(tokenizer, text)
    head = [*before_all(tokenizer), *piece_ids(tokenizer, prompt)]
    head += [*piece_ids(tokenizer, "\n\nInput:\n"), *x, *piece_ids(tokenizer, "\n\nOutput:\n")]
    return head, x


def p_at(lm: Any, prompt: str, text: str, i: int) -> float:
    """p_i = p(<API> | P(x), x_1..x_{i-1}), from a context that ends there."""
    (opening,) = piece_ids(lm.tokenizer, " [")
    head, x = sampling_context(lm.tokenizer, prompt, text)
    return float(log_probabilities(lm.model, head + x[:i])[-1, opening].exp())


def best_positions(lm: Any, prompt: str, text: str, tau_s: float, k: int) -> list[int]:
    """The k likeliest positions above tau_s where a call may stand, in order."""
    tokenizer = lm.tokenizer
    (opening,) = piece_ids(tokenizer, " [")
    head, x = sampling_context(tokenizer, prompt, text)
    logp = log_probabilities(lm.model, head + x)[len(head) - 1 : -1, opening]
    able = [
        i
        for i in range(len(x))
        if x[i] != opening
        and float(logp[i].exp()) > tau_s
        and (i > 0 or before_all(tokenizer))
        and not tokenizer.decode(x[:i]).endswith("\ufffd")  # in the middle of a character
    ]
    return sorted(sorted(able, key=lambda i: -float(logp[i]))[:k])


def char_start(tokenizer: Any, text: str, i: int) -> int:
    """Where the text goes on after x_1..x_{i-1}."""
    return len(tokenizer.decode(text_ids(tokenizer, text)[:i]))


@torch.no_grad()
def draw(
    lm: Any,
    tool: str,
    context: Sequence[int],
    name: tuple[int, str, str, int, int],
    max_new_tokens: int,
    temperature: float = 1.0,
    allowed: Callable[[Sequence[int]], torch.Tensor] | None = None,
) -> str | None:
    """One sample from [P(x), x_1..x_{i-1}, <API>], the whole context again for every token."""
    (opening,) = piece_ids(lm.tokenizer, " [")
    key, drawn = sample_key(*name), []
    while len(drawn) < max_new_tokens:
        logits = lm.model(torch.tensor([[*context, opening, *drawn]]), use_cache=False).logits[
            0, -1
        ]
        noise = gumbel([key], [len(drawn)], len(logits), logits.device)[0]
        scores = logits / temperature + noise
        if allowed is not None:
            scores[~allowed(drawn)] = -torch.inf
        drawn.append(int(scores.argmax()))
        anchor = lm.tokenizer.decode([opening])
        written = lm.tokenizer.decode([opening, *drawn])[len(anchor) :]
        arguments = read_sample(written, tool)
        if arguments is not None:
            return arguments if isinstance(arguments, str) else None
    return None


def merged(samples: Mapping[int, Sequence[str | None]]) -> dict[tuple[int, str], int]:
    """Equal calls at one position, counted; what never closed is dropped."""
    counts: dict[tuple[int, str], int] = {}
    for position, texts in samples.items():
        for text in texts:
            if text is not None:
                counts[position, text] = counts.get((position, text), 0) + 1
    return counts
