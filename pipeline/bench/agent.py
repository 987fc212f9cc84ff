"""Bench `agent`: episodes that step together against the same episodes one after the other.

The local policy answers arithmetic questions greedily with the calculator. One after the other is
measured on a slice of the questions, another one in each pair; all of them are compared turn by
turn with the batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.agent.engine import local_policy
from pipeline.agent.limits import Limits
from pipeline.agent.policies import LocalPolicy
from pipeline.agent.strategies import StrategyResult, run_strategy
from pipeline.agent.tasks import Settings, Task
from pipeline.bench import material
from pipeline.bench.measure import Comparison, Rate, document, timed
from pipeline.errors import ConfigError
from pipeline.tools.catalogue import build_tools
from pipeline.tools.executor import Executor

QUESTIONS = Path("data/questions/arithmetic.jsonl")
SLICE = 8  # every so many-th question is asked alone, in each pair
STEPS = 2


def run(model: str, pairs: int, documents: int | None, tokens: int | None) -> dict[str, Any]:
    """Measure; 32 episodes of two turns of at most `tokens` (12) new tokens by default."""
    policy = local_policy(*material.load(model))
    settings = Settings(limits=Limits(max_steps=STEPS), prefixes=True, max_new_tokens=tokens or 12)
    tasks = _tasks(documents or 32)
    together: list[Rate] = []
    alone: list[Rate] = []
    agrees = True
    with Executor(build_tools([{"name": "Calculator"}])) as executor:
        for pair in range(pairs):
            chosen = range(pair % SLICE % len(tasks), len(tasks), SLICE)
            kept: dict[str, list[Any]] = {}

            def batch(kept: dict[str, list[Any]] = kept) -> float:
                kept["batch"] = _turns(_run(tasks, policy, executor, settings))
                return len(tasks)

            def single(kept: dict[str, list[Any]] = kept, chosen: range = chosen) -> float:
                kept["single"] = [
                    turns
                    for n in chosen
                    for turns in _turns(_run([tasks[n]], policy, executor, settings))
                ]
                return len(chosen)

            order = [(batch, together), (single, alone)]
            for work, found in order if pair % 2 == 0 else reversed(order):
                found.append(timed(work))
            agrees &= [kept["batch"][n] for n in chosen] == kept["single"]
    comparison = Comparison(
        "one after the other",
        tuple(together),
        tuple(alone),
        agrees,
    )
    return document("agent", [comparison], None, [])


def _tasks(count: int) -> list[Task]:
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines() if QUESTIONS.is_file() else []
    if not lines:
        raise ConfigError(f"{QUESTIONS}: no questions; run bench from the project's folder")
    prompts = [json.loads(lines[n % len(lines)])["prompt"] for n in range(count)]
    return [
        Task(prompt, str(n), document={"date": None, "doc_id": str(n)})
        for n, prompt in enumerate(prompts)
    ]


def _run(
    tasks: Sequence[Task], policy: LocalPolicy, executor: Executor, settings: Settings
) -> list[StrategyResult]:
    return run_strategy("react", tasks, policy, executor, settings)


def _turns(results: Sequence[StrategyResult]) -> list[Any]:
    """What was said in each run, message by message."""
    return [[message.as_dict() for message in own.final.messages] for own in results]
