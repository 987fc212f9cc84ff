"""The reference cases: one loop, small worlds, scripted policies, exact numbers.

    callsieve agent demo library|paper|stock|grid|calcola

`run_demo` returns plain data; every number in it is also a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from pipeline.agent.environments import desks, grid
from pipeline.agent.instructions import load_instructions
from pipeline.agent.limits import Limits
from pipeline.agent.loop import run_episode
from pipeline.agent.policies import Reply, Request, Script, ScriptedPolicy
from pipeline.agent.tasks import EpisodeResult, Settings, Task
from pipeline.agent.toolbox import EnvironmentTools
from pipeline.agent.trace import event_lines, printable
from pipeline.errors import ConfigError
from pipeline.tools.base import Tool

GATTOPARDO = "How many copies of Il Gattopardo are free?"
SKU = "Does SKU-11 have to be ordered?"


def run_demo(name: str) -> dict[str, Any]:
    """Run every variant of a case: `{"demo": name, "variants": {variant: figures}}`.

    A variant that is a run has `exit_reason, answer, steps, tokens, message_count, messages` and
    the other fields of an `EpisodeResult`, and its events under `trace`. Raises ConfigError for a
    case that does not exist.
    """
    if name not in DEMOS:
        raise ConfigError(f"demo {name!r} is not one of: {', '.join(DEMOS)}")
    return {"demo": name, "variants": DEMOS[name]()}


def demo_lines(outcome: dict[str, Any]) -> list[Text]:
    """Render what `run_demo` returned, in colour."""
    lines: list[Text] = []
    for variant, figures in outcome["variants"].items():
        lines.append(Text(f"{outcome['demo']}: {variant}", "bold underline"))
        if "trace" in figures:
            for event in figures["trace"]:
                lines.extend(event_lines(event))
            figure = f"{figures['exit_reason']} {figures['steps']} {figures['tokens']}"
            lines.append(Text.assemble((figure, "bold"), ("  (exit reason, steps, tokens)", "dim")))
        else:
            shown = "  ".join(f"{key} {value}" for key, value in figures.items())
            lines.append(Text(printable(f"    {shown}")))
    return lines


def library() -> dict[str, Any]:
    """The library desk: a good policy, and what the loop does about bad ones."""
    look = [
        "Thought: first the copies it owns.\nAction: catalogo[Il Gattopardo]",
        "Thought: now those lent out.\nAction: prestiti[Il Gattopardo]",
        "Thought: the difference is free.\nAction: calc[5 - 3]",
        "Thought: two are free.\nAction: Finish[2]",
    ]
    errors = [
        'Thought: try this.\nAction: calc[__import__("os").getcwd()]',
        "Thought: or this.\nAction: calc[1/0]",
        "Thought: or another book.\nAction: catalogo[La coscienza di Zeno]",
        "Thought: nothing of it worked.\nAction: Finish[I don't know]",
    ]

    def play(script: Script) -> dict[str, Any]:
        return _react(GATTOPARDO, desks.library_tools(), script)

    return {
        "good policy": play(look),
        "unknown tool first": play(["Action: biblioteca[Il Gattopardo]", *look]),
        "repeats itself": play(lambda _: look[0]),
        "errors are observations": play(errors),
    }


def paper() -> dict[str, Any]:
    """The paper archive: search and subtract; a miss is admitted."""
    return {
        "found": _paper("attention is all you need"),
        "missing": _paper("a paper nobody wrote"),
    }


def _paper(title: str) -> dict[str, Any]:
    def policy(request: Request) -> str:
        seen = [m.content for m in request.messages if m.kind == "observation"]
        if not seen:
            return f"Thought: I need the year.\nAction: search[{title}]"
        if seen[-1].startswith("Error"):
            return "Thought: it is not in the archive.\nAction: Finish[I don't know]"
        if len(seen) == 1:
            return f"Thought: how long ago is that?\nAction: calc[2026 - {seen[0]}]"
        return f"Thought: done.\nAction: Finish[{seen[-1]}]"

    return _react(f"How many years before 2026 was '{title}'?", desks.paper_tools(), policy)


def stock() -> dict[str, Any]:
    """The stock desk with structured calls: steps, tokens and every budget."""
    stock_call = Reply("", tokens_out=100, calls=(("", "stock", '{"sku": "SKU-11"}'),))
    incoming = Reply("", tokens_out=100, calls=(("", "incoming", '{"sku": "SKU-11"}'),))
    answer = Reply("No: 4 are left under a threshold of 10, but 20 are coming.", tokens_out=100)
    asked: list[int] = []

    def same(tokens: int) -> Script:
        def policy(request: Request) -> Reply:
            asked.append(request.step)
            return Reply("", tokens_out=tokens, calls=stock_call.calls)

        return policy

    def play(script: Script, **limits: Any) -> dict[str, Any]:
        asked.clear()
        figures = _chat(SKU, desks.stock_tools(), script, Limits(**limits))
        return {**figures, "times_asked": len(asked)}

    good = play([stock_call, incoming, answer])
    return {
        "good policy": {**good, "times_asked": good["steps"]},
        "same call, brake off": play(same(100), max_steps=3, max_repeats=None),
        "token budget of 1000": play(same(600), max_tokens=1000, max_repeats=None),
        "deadline passed": play(same(100), max_seconds=0),
        "context sent": {"context_sent": [_context_sent(turns) for turns in range(1, 11)]},
    }


def _context_sent(turns: int) -> int:
    """Context sent over `turns` equal turns, in units of one turn (a call and its result)."""
    same = Reply("", calls=(("", "stock", '{"sku": "SKU-11"}'),))
    settings = Settings(protocol="chat", limits=Limits(max_steps=turns, max_repeats=None))
    tools = EnvironmentTools(desks.stock_tools())
    result = run_episode(Task(SKU), ScriptedPolicy(lambda _: same), tools, _instructed(settings))
    # System and user are as many messages as one turn.
    return result.context_sent // 2


def grid_world() -> dict[str, Any]:
    """The grid world: reactive, with memory, with a map."""
    grids = grid.draw_grids()
    best = [grid.shortest(one) or 0 for one in grids]

    def score(steps: Sequence[int | None]) -> dict[str, Any]:
        extra = [own - least for own, least in zip(steps, best, strict=True) if own is not None]
        return {
            "reached": len(extra),
            "grids": len(grids),
            "extra_steps": round(sum(extra) / len(extra), 1),
        }

    return {
        "reactive": score([grid.reactive(one) for one in grids]),
        "with memory": score([grid.with_memory(one) for one in grids]),
        "planner": {
            **score(best),
            "mean_length": round(sum(best) / len(best), 1),
            "agrees_with_dijkstra": best == [grid.shortest_dijkstra(one) for one in grids],
        },
    }


def calcola() -> dict[str, Any]:
    """Function calling: one required argument, and a call that forgets it."""
    good = '{"name": "calcola", "arguments": {"espressione": "4831 * 7092"}}'
    call = f"<tool_call>\n{good}\n</tool_call>"
    empty = '<tool_call>\n{"name": "calcola", "arguments": {}}\n</tool_call>'
    question = "Quanto fa 4831 * 7092?"
    return {
        "good call": _chat(question, desks.calcola_tools(), [call, "34261452"]),
        "argument missing": _chat(question, desks.calcola_tools(), [empty, call, "34261452"]),
    }


DEMOS: dict[str, Callable[[], dict[str, Any]]] = {
    "library": library,
    "paper": paper,
    "stock": stock,
    "grid": grid_world,
    "calcola": calcola,
}


def _react(question: str, tools: Sequence[Tool], script: Script) -> dict[str, Any]:
    settings = _instructed(Settings(protocol="react"))
    return _play(question, tools, script, settings)


def _chat(
    question: str, tools: Sequence[Tool], script: Script, limits: Limits | None = None
) -> dict[str, Any]:
    settings = _instructed(Settings(protocol="chat", limits=limits or Limits()))
    return _play(question, tools, script, settings)


def _instructed(settings: Settings) -> Settings:
    return replace(settings, instructions=load_instructions(f"{settings.protocol}-v1"))


def _play(
    question: str, tools: Sequence[Tool], script: Script, settings: Settings
) -> dict[str, Any]:
    toolbox = EnvironmentTools(tools)
    result = run_episode(Task(question), ScriptedPolicy(script), toolbox, settings)
    return _figures(result)


def _figures(result: EpisodeResult) -> dict[str, Any]:
    observations = [m.content for m in result.messages if m.role == "tool"]
    return {
        **result.as_dict(),
        "message_count": len(result.messages),
        "observations": observations,
        "trace": list(result.events),
    }
