"""`callsieve agent run`: one question in the loop, shown as it happens."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipeline.agent.approvals import ask_on_terminal, read_approvals
from pipeline.agent.checks import OutputForm
from pipeline.agent.limits import Limits
from pipeline.agent.policies import Policy
from pipeline.agent.strategies import StrategyResult, run_strategy, strategy_named
from pipeline.agent.tasks import Settings, Task
from pipeline.agent.templates import check_template
from pipeline.agent.trace import Event, TraceFile, TracePrinter
from pipeline.config import Model
from pipeline.errors import ConfigError
from pipeline.tools.approval import ApprovalPolicy
from pipeline.tools.base import Tool
from pipeline.tools.executor import Executor

# The answers that `--answer` knows by name, as regular expressions. Their digits are bounded: where
# the form is forced, nothing else would end a number.
FORMS = {
    "number": r"-?([0-9]{1,15}|[0-9]{1,3}(,[0-9]{3}){1,4})(\.[0-9]{1,10})?",
    "integer": r"-?[0-9]{1,15}",
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
}


def run_question(args: argparse.Namespace, tools: Sequence[Tool]) -> int:
    """Run `callsieve agent run`; exit code 0 when an answer was submitted, else 1.

    Reads `model, question, protocol, strategy, max_steps, date, trace, json` of the arguments,
    and `approvals, max_tokens, max_seconds, answer, inline_calls, constrain` where there are any.
    The trace goes to stderr, the answer (or with `json` the whole result) to stdout.
    """
    given: dict[str, Any] = vars(args)
    result = answer_question(
        args.model,
        args.question,
        tools,
        protocol=args.protocol,
        strategy=args.strategy or "react",
        limits=Limits(args.max_steps, given.get("max_tokens"), given.get("max_seconds")),
        date=args.date,
        trace=args.trace,
        approvals=given.get("approvals"),
        output=answer_form(given["answer"]) if given.get("answer") else None,
        inline_calls=given.get("inline_calls", False),
        constrain=given.get("constrain", False),
        show=True,
    )
    if args.json or result.answer is not None:
        print(json.dumps(_document(result), ensure_ascii=False) if args.json else result.answer)
    return 0 if result.answer is not None else 1


def answer_question(
    model: str,
    question: str,
    tools: Sequence[Tool],
    *,
    protocol: str = "react",
    strategy: str = "react",
    limits: Limits | None = None,
    date: str | None = None,
    trace: Path | None = None,
    approvals: Path | None = None,
    output: OutputForm | None = None,
    inline_calls: bool = False,
    constrain: bool = False,
    show: bool = False,
) -> StrategyResult:
    """Answer one question by a strategy; see `make_policy` for what `model` may be.

    `trace` is a file for the events as JSONL, `approvals` a policy file; without one every call
    with effects is asked for on the terminal. `output` is the form of the answer; `inline_calls`
    answers calls within a turn of `react`; `constrain` makes malformed calls impossible (a local
    model only). `show` prints the events to stderr as they happen.
    Raises ConfigError for settings that cannot work, WorkError for an endpoint without a model.
    """
    if not question.strip():
        raise ConfigError(f"the question is {question!r}; allowed: a text that is not empty")
    chosen = strategy_named(strategy)
    if chosen.kind == "trials":
        raise ConfigError(f"strategy {strategy} needs the right answers: use callsieve evaluate")
    check_inline_calls(inline_calls, protocol)
    settings = Settings(
        protocol=protocol,
        limits=limits or Limits(),
        prefixes=not is_address(model),
        output=output,
        inline_calls=inline_calls,
    )
    task = Task(question, "q", document={"date": date, "doc_id": "question"})
    if approvals is None:
        approval = ApprovalPolicy({"*": "ask"}, confirm=ask_on_terminal)
    else:
        approval = read_approvals(approvals, confirm=ask_on_terminal)
    in_chat = protocol == "chat" and chosen.makes_calls
    policy = make_policy(model, protocol, constrain, "use --protocol react" if in_chat else None)
    with ExitStack() as stack:
        executor = stack.enter_context(Executor(tools, approval=approval))
        sinks: list[Callable[[Event], None]] = [TracePrinter()] if show else []
        if trace is not None:
            sinks.append(stack.enter_context(TraceFile(trace)))

        def emit(event: Event) -> None:
            for sink in sinks:
                sink(event)

        (result,) = run_strategy(strategy, [task], policy, executor, settings, on_event=emit)
    return result


def answer_form(text: str) -> OutputForm:
    """Read `--answer`: a name of `FORMS`, a file of a JSON Schema, or a `/regular expression/`.

    Raises ConfigError for anything else, and for a schema or an expression that is not valid.
    """
    if text in FORMS:
        return OutputForm(pattern=FORMS[text])
    if len(text) > 2 and text.startswith("/") and text.endswith("/"):
        return OutputForm(pattern=text[1:-1])
    if not text.endswith(".json"):
        raise ConfigError(
            f"--answer {text!r}; allowed: {', '.join(FORMS)}, a FILE.json that holds a JSON "
            "Schema, or a /REGULAR EXPRESSION/"
        )
    try:
        schema = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--answer {text}: no JSON Schema can be read: {error}") from None
    if not isinstance(schema, dict):
        raise ConfigError(f"--answer {text}: a JSON Schema is an object, not {schema!r}")
    return OutputForm(schema=schema)


def check_inline_calls(inline_calls: bool, protocol: str) -> None:
    """Refuse `--inline-calls` where a turn has no thoughts that could hold them."""
    if inline_calls and protocol != "react":
        raise ConfigError(f"--inline-calls with --protocol {protocol}; allowed: react")


def make_policy(
    model: str, protocol: str, constrain: bool = False, instead: str | None = None
) -> Policy:
    """Make the policy that a model argument names: a folder, a hub id, or an endpoint's address.

    An address may name its model after a `#`; without one the endpoint's first model is taken.
    `instead` is given where turns are asked in the protocol `chat`, and says what can be done when
    a model's tokenizer has no template for it. Raises ConfigError then, and for an address with
    `constrain`: masks need the model's own logits.
    """
    if is_address(model):
        if constrain:
            raise ConfigError(
                f"--constrain with the address {model}; allowed: a model folder or hub id (a "
                "server masks by its own settings)"
            )
        from pipeline.agent.endpoint import Api, connect, first_model

        address, _, name = model.partition("#")
        api: Api = "completions" if protocol == "inline" else "chat"
        policy = connect(address, name, api=api)
        return policy if name else dataclasses.replace(policy, model=first_model(policy))
    if instead is not None:
        check_template(Model(path=model), instead)
    from pipeline.agent.engine import load_policy

    return load_policy(model, constrain=constrain)


def is_address(model: str) -> bool:
    """Whether a model argument is the address of an endpoint."""
    return model.startswith(("http://", "https://"))


def _document(result: StrategyResult) -> dict[str, Any]:
    """The result of the run that counts, with what is told about all runs."""
    return {**result.final.as_dict(), **result.as_dict()}
