"""Bench `agent`: episodes that step together against the same episodes one after the other.

The local policy answers arithmetic questions greedily in the ReAct form, with the calculator. Both
sides run through the same engine, which has answered one other question before the clock starts:
instructions are computed once for its life, by either side. No question is known to it already. One
after the other is measured on a slice of the questions, another one in each pair; all of them are
compared turn by turn with the batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from pipeline.agent.engine import local_policy
from pipeline.agent.limits import Limits
from pipeline.agent.policies import LocalPolicy
from pipeline.agent.strategies import StrategyResult, run_strategy
from pipeline.agent.tasks import Settings, Task
from pipeline.bench import material
from pipeline.bench.measure import Comparison, Rate, document, timed
from pipeline.errors import ConfigError
from pipeline.paths import PROJECT
from pipeline.tools.catalogue import build_tools
from pipeline.tools.executor import Executor

QUESTIONS = PROJECT / "data/questions/arithmetic.jsonl"
SLICE = 8  # every so many-th question is asked alone, in each pair
STEPS = 3
NEW_TOKENS = 32


def run(model: str, pairs: int, documents: int | None, tokens: int | None) -> dict[str, Any]:
    """Measure; 32 episodes of up to three turns of at most `tokens` (32) tokens by default."""
    loaded = material.load(model)
    limits = Limits(max_steps=STEPS)
    settings = Settings(limits=limits, prefixes=True, max_new_tokens=tokens or NEW_TOKENS)
    *tasks, first = _tasks((documents or 32) + 1)
    together: list[Rate] = []
    alone: list[Rate] = []
    agrees = True
    with Executor(build_tools([{"name": "Calculator"}])) as executor:
        for pair in range(pairs):
            chosen = range(pair % SLICE % len(tasks), len(tasks), SLICE)
            said: dict[str, list[Any]] = {}

            def batch(policy: LocalPolicy, said: dict[str, list[Any]] = said) -> float:
                said["batch"] = _turns(_run(tasks, policy, executor, settings))
                return len(tasks)

            def single(
                policy: LocalPolicy,
                said: dict[str, list[Any]] = said,
                chosen: range = chosen,
            ) -> float:
                said["single"] = [
                    turns
                    for n in chosen
                    for turns in _turns(_run([tasks[n]], policy, executor, settings))
                ]
                return len(chosen)

            order = [(batch, together), (single, alone)]
            for work, found in order if pair % 2 == 0 else reversed(order):
                policy = local_policy(*loaded)
                _run([first], policy, executor, settings)
                found.append(timed(partial(work, policy)))
            agrees &= [said["batch"][n] for n in chosen] == said["single"]
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
        raise ConfigError(f"{QUESTIONS}: the bundled questions are not there")
    prompts = [json.loads(lines[n % len(lines)])["prompt"] for n in range(count)]
    return [
        Task(prompt, str(n), document={"date": None, "doc_id": str(n)})
        for n, prompt in enumerate(prompts)
    ]


def _run(
    tasks: Sequence[Task], policy: LocalPolicy, executor: Executor, settings: Settings
) -> list[StrategyResult]:
    return run_strategy("react", tasks, policy, executor, settings, family="arithmetic")


def _turns(results: Sequence[StrategyResult]) -> list[Any]:
    """What was said in each run, message by message."""
    return [[message.as_dict() for message in own.final.messages] for own in results]
