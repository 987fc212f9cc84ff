"""`callsieve agent run`: one question in the loop, shown as it happens."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from pipeline.agent.approvals import ask_on_terminal
from pipeline.agent.limits import Limits
from pipeline.agent.policies import Policy
from pipeline.agent.strategies import STRATEGIES, StrategyResult, run_strategy
from pipeline.agent.tasks import Settings, Task
from pipeline.agent.trace import Event, TraceFile, TracePrinter
from pipeline.errors import ConfigError
from pipeline.tools.approval import ApprovalPolicy
from pipeline.tools.base import Tool
from pipeline.tools.executor import Executor


def run_question(args: argparse.Namespace, tools: Sequence[Tool]) -> int:
    """Run `callsieve agent run`; exit code 0 when an answer was submitted, else 1.

    Reads `model, question, protocol, strategy, max_steps, date, trace, json` of the arguments.
    The trace goes to stderr, the answer (or with `json` the whole result) to stdout.
    """
    name = args.strategy or "react"
    if STRATEGIES.get(name, STRATEGIES["react"]).kind == "trials":
        raise ConfigError(f"strategy {name} needs the right answers: use callsieve evaluate")
    settings = Settings(
        protocol=args.protocol,
        limits=Limits(max_steps=args.max_steps),
        prefixes=not _is_address(args.model),
    )
    task = Task(args.question, "q", document={"date": args.date, "doc_id": "question"})
    policy = make_policy(args.model, args.protocol)
    approval = ApprovalPolicy({"*": "ask"}, confirm=ask_on_terminal)
    with ExitStack() as stack:
        executor = stack.enter_context(Executor(tools, approval=approval))
        sinks: list[Any] = [TracePrinter()]
        if args.trace is not None:
            sinks.append(stack.enter_context(TraceFile(args.trace)))

        def emit(event: Event) -> None:
            for sink in sinks:
                sink(event)

        (result,) = run_strategy(name, [task], policy, executor, settings, on_event=emit)
    print(json.dumps(_document(result), ensure_ascii=False) if args.json else result.answer or "")
    return 0 if result.answer is not None else 1


def make_policy(model: str, protocol: str) -> Policy:
    """Make the policy that a model argument names: a folder, a hub id, or an endpoint's address.

    An address may name its model after a `#`; without one the endpoint's first model is taken.
    """
    if _is_address(model):
        from pipeline.agent.endpoint import Api, connect, first_model

        address, _, name = model.partition("#")
        api: Api = "completions" if protocol == "inline" else "chat"
        policy = connect(address, name, api=api)
        return policy if name else dataclasses.replace(policy, model=first_model(policy))
    from pipeline.agent.engine import load_policy

    return load_policy(model)


def _is_address(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _document(result: StrategyResult) -> dict[str, Any]:
    """The result of the run that counts, with what is told about all runs."""
    return {**result.final.as_dict(), **result.as_dict()}
