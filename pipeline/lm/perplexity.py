"""Loss of plain texts, for perplexity; optionally with the opening token of a call ruled out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.lm.forward import Budget, LanguageModel, right_padded
from pipeline.lm.tokens import context_token, encode_document

_CHUNK = 512  # positions whose logits exist at the same time


@torch.inference_mode()
def text_losses(
    lm: LanguageModel,
    texts: Sequence[str],
    *,
    muted: int | None = None,
    max_length: int = 1024,
    budget: Budget | None = None,
) -> list[tuple[float, int]]:
    """Summed loss in nats and number of target tokens of each text (EOS not included).

    `muted` is a token whose probability is set to 0 wherever it is not what really comes next.
    Longer texts are cut at `max_length` tokens.
    """
    context = context_token(lm.tokenizer)
    head = [] if context is None else [context]
    rows = [(head + encode_document(lm.tokenizer, text)[0])[:max_length] for text in texts]
    found = [(0.0, 0)] * len(texts)

    def work(batch: list[int]) -> None:
        hidden_BLD = lm.hidden(right_padded([rows[i] for i in batch], lm.device))
        for number, index in enumerate(batch):
            targets = torch.tensor(rows[index][1:], dtype=torch.long, device=lm.device)
            loss = 0.0
            for start in range(0, len(targets), _CHUNK):
                own = targets[start : start + _CHUNK]
                logits = lm.logits(hidden_BLD[number, start : start + len(own)])
                if muted is not None:
                    logits = logits.clone()
                    logits[own != muted, muted] = -torch.inf
                picked = logits.gather(1, own[:, None])[:, 0]
                loss += float((torch.logsumexp(logits, dim=-1) - picked).double().sum())
            found[index] = (loss, len(targets))

    (budget or Budget(4096)).run([len(row) for row in rows], work)
    return found
