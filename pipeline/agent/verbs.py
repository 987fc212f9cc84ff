"""The verbs of `callsieve agent`: nothing but parsing and printing.

What a verb needs is imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline.arguments import (
    add_evaluate,
    add_json,
    add_limits,
    add_verb,
    day,
    load_silently,
    print_json,
    tool_list,
)


def add_agent_verbs(verbs: Any) -> None:
    """Add `agent` and what it can do to the commands."""
    agent = verbs.add_parser(
        "agent",
        help="the agent loop: run, evaluate, demo, parse",
        description="A model that thinks, calls tools and answers: one question shown as it "
        "happens, benchmarks, reference cases, or how a turn is read.",
    ).add_subparsers(metavar="WHAT", required=True)
    _add_run(add_verb(agent, "run", _agent_run, "answer a question in the loop, as it happens"))
    evaluate = add_verb(agent, "evaluate", _agent_evaluate, "a model on benchmarks x strategies")
    add_evaluate(evaluate)
    add_json(evaluate)
    demo = add_verb(agent, "demo", _agent_demo, "the reference cases, with scripted policies")
    demo.add_argument(
        "name",
        choices=("library", "paper", "stock", "grid", "calcola"),
        help="which case: two desks and an archive with tools, a walk on a grid, function calling",
    )
    add_json(demo)
    parse = add_verb(agent, "parse", _agent_parse, "print how a turn on standard input is read")
    parse.add_argument(
        "--protocol",
        choices=("react", "inline", "chat"),
        required=True,
        help="react: Thought:, Action: tool[argument]; inline: [Tool(arguments) ->; chat: "
        "<tool_call> JSON",
    )
    add_json(parse)


def _add_run(run: Any) -> None:
    run.add_argument("model", help="a model folder or hub id, or an http(s) address of an endpoint")
    run.add_argument("question", help='the question, e.g. "How much is 29 * 34?"')
    run.add_argument(
        "--protocol",
        choices=("react", "inline", "chat"),
        default="react",
        help="react: Thought, Action, Observation; inline: calls within running text, "
        "for a model that callsieve tuned; chat: structured calls by the model's chat template",
    )
    run.add_argument("--strategy", default=None, help="act, cot, standard, ... (without it: react)")
    run.add_argument("--tools", help="comma-separated (default: Calculator, Calendar, WikiSearch)")
    run.add_argument("--config", help="take the tools' settings from this configuration")
    run.add_argument(
        "--max-steps", type=int, default=7, metavar="N", help="end the run after N turns"
    )
    run.add_argument("--date", type=day, help="the date of today for Calendar, ISO")
    run.add_argument(
        "--trace", type=Path, help="write the trace as JSONL (`callsieve report FILE` shows it)"
    )
    add_limits(run)
    add_json(run)


def _agent_run(args: Any) -> int:
    from pipeline.agent.command import run_question

    load_silently()
    return run_question(args, tool_list(args.config, args.tools))


def _agent_evaluate(args: Any) -> None:
    from pipeline.agent.evaluate import evaluate_model

    load_silently()
    evaluate_model(args)


def _agent_demo(args: Any) -> None:
    from rich.console import Console

    from pipeline.agent.demos import demo_lines, run_demo

    outcome = run_demo(args.name)
    if args.json:
        print_json(outcome)
        return
    for line in demo_lines(outcome):
        Console().print(line)


def _agent_parse(args: Any) -> None:
    from pipeline.agent.parse import parse_turn

    print_json(parse_turn(args.protocol, sys.stdin.read()))
