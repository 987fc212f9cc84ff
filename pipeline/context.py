"""What a stage is given: the configuration, the run folder, a place to count, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.progress import Lines, progress
from pipeline.shards import RunFolder

if TYPE_CHECKING:
    from tqdm import tqdm

    from pipeline.lm.forward import LanguageModel
    from pipeline.tools.executor import Executor


@dataclass
class Context:
    """The surroundings of one stage; `counts` go into the marker and from there to the funnel."""

    config: Config
    folder: RunFolder
    stage: str
    fingerprint: str
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    resources: dict[str, Any] = field(default_factory=dict)  # the model, the executor: made once
    part: str = ""  # which shard of how many, for the bars

    def count(self, tool: str, what: str, n: int = 1) -> None:
        """Count `n` things that happened for a tool (`*` = for all of them)."""
        own = self.counts.setdefault(tool, {})
        own[what] = own.get(what, 0) + n

    def take_counts(self) -> dict[str, dict[str, int]]:
        """Return the counts since the last call and start again from zero."""
        taken, self.counts = self.counts, {}
        return taken

    def language_model(self) -> LanguageModel:
        """The model of the run, loaded once per process."""
        if "lm" not in self.resources:
            from pipeline.lm.checkpoint import load_for_run
            from pipeline.lm.forward import LanguageModel

            self.resources["lm"] = LanguageModel(*load_for_run(self.config))
        lm: LanguageModel = self.resources["lm"]
        return lm

    def executor(self) -> Executor:
        """The tools of the run, opened once per process; results are cached in the run folder."""
        if "executor" not in self.resources:
            from pipeline.tools.catalogue import build_tools
            from pipeline.tools.executor import Executor

            settings = self.config.execute
            self.resources["executor"] = Executor(
                build_tools(self.config.tools, load_generate),
                cache_path=self.folder.path / "tool-cache.sqlite" if settings.cache else None,
                workers=settings.workers,
                on_execution=lambda event: self.folder.log(**event),
            )
        executor: Executor = self.resources["executor"]
        return executor

    def progress(self, total: int | None, unit: str) -> tqdm[Any] | Lines:
        """A progress bar on stderr, with counts; some plain lines when that is no terminal."""
        return progress(total, unit, f"{self.stage}{self.part}")


@contextmanager
def closing_resources(context: Context) -> Iterator[Context]:
    """Close what a stage opened (executors, servers), whatever happens."""
    try:
        yield context
    finally:
        for resource in context.resources.values():
            close = getattr(resource, "close", None)
            if close is not None:
                close()


def load_generate(path: str, max_new_tokens: int) -> Callable[[Sequence[str]], list[str]]:
    """Load a causal model for a tool that reads with one: prompts -> greedy continuations."""
    from pipeline.config import Model
    from pipeline.lm.checkpoint import load_model
    from pipeline.lm.generation import generate

    model, tokenizer = load_model(Model(path=path))

    def texts(prompts: Sequence[str]) -> list[str]:
        made = generate(model, tokenizer, prompts, max_new_tokens=max_new_tokens)
        return [generation.text for generation in made]

    return texts
