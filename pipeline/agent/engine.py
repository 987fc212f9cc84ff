"""The language-model engine behind a local policy."""

from __future__ import annotations

from typing import Any

from pipeline.agent.policies import LocalPolicy
from pipeline.calls import CallSyntax
from pipeline.config import Model
from pipeline.lm.checkpoint import load_model, read_extra
from pipeline.lm.generation import serve
from pipeline.lm.grammar import CallGrammar, RowMask
from pipeline.lm.jobs import Source
from pipeline.lm.kept import LIMIT_BYTES, KeptKeys
from pipeline.lm.tokens import open_token


class Engine:
    """Batched generation with one loaded model; fits `policies.Generator`.

    The keys of what was read and written stay for the next call, up to `kept_bytes` (0: none): a
    turn computes what is new in its episode, and instructions are computed once.
    """

    def __init__(
        self, model: Any, tokenizer: Any, max_rows: int = 64, kept_bytes: int = LIMIT_BYTES
    ) -> None:
        self.model, self.tokenizer, self.max_rows = model, tokenizer, max_rows
        self.kept = KeptKeys(kept_bytes)
        self._masks: CallGrammar | None = None

    def serve(self, source: Source) -> None:
        """Answer what comes; see `lm.generation.serve`."""
        serve(self.model, self.tokenizer, source, max_rows=self.max_rows, kept=self.kept)

    def mask(self, grammar: str) -> RowMask:
        """Compile a Lark grammar for one text."""
        if self._masks is None:
            self._masks = CallGrammar(self.tokenizer)
        return self._masks.mask(grammar)


def local_policy(
    model: Any,
    tokenizer: Any,
    *,
    use_template: bool = False,
    max_rows: int = 64,
    constrain: bool = False,
    fires: tuple[CallSyntax, int] | None = None,
) -> LocalPolicy:
    """Make the policy of a loaded model; its context length bounds the state.

    `fires` is the syntax of inline calls and their k, for a model that was tuned to make them.
    """
    opening = None if fires is None else (open_token(tokenizer, fires[0]), fires[1])
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    engine = Engine(model, tokenizer, max_rows)
    return LocalPolicy(engine, tokenizer, length, use_template, constrain=constrain, fires=opening)


def load_policy(
    path: str, *, device: str = "auto", use_template: bool = False, constrain: bool = False
) -> LocalPolicy:
    """Load a model folder or hub id and make its policy; raises ConfigError.

    A model that callsieve tuned opens inline calls as it does in `callsieve generate`.
    """
    model, tokenizer = load_model(Model(path=path, device=device))
    extra = read_extra(path)
    return local_policy(
        model,
        tokenizer,
        use_template=use_template,
        constrain=constrain,
        fires=(CallSyntax(**extra["syntax"]), extra["call_k"]) if extra.get("syntax") else None,
    )
