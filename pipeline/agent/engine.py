"""The language-model engine behind a local policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.agent.policies import LocalPolicy, Prompt
from pipeline.config import Model
from pipeline.lm.checkpoint import load_model
from pipeline.lm.generation import Generation, generate


class Engine:
    """Batched generation with one loaded model; fits `policies.Generator`."""

    def __init__(self, model: Any, tokenizer: Any, max_rows: int = 64) -> None:
        self.model, self.tokenizer, self.max_rows = model, tokenizer, max_rows

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        temperature: float,
        seed: Sequence[int],
    ) -> list[Generation]:
        """Continue every prompt; see `lm.generation.generate`."""
        return generate(
            self.model,
            self.tokenizer,
            prompts,
            max_new_tokens=max_new_tokens,
            stop=stop,
            temperature=temperature,
            seed=seed,
            max_rows=self.max_rows,
        )


def local_policy(
    model: Any, tokenizer: Any, *, use_template: bool = False, max_rows: int = 64
) -> LocalPolicy:
    """Make the policy of a loaded model; its context length bounds the state."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    engine = Engine(model, tokenizer, max_rows)
    return LocalPolicy(engine, tokenizer, length, use_template)


def load_policy(path: str, *, device: str = "auto", use_template: bool = False) -> LocalPolicy:
    """Load a model folder or hub id and make its policy; raises ConfigError."""
    model, tokenizer = load_model(Model(path=path, device=device))
    return local_policy(model, tokenizer, use_template=use_template)
