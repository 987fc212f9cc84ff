"""Function calling by the rules of the Berkeley Function-Calling Leaderboard (AST match).

Four kinds of rows: simple (one function, one call), multiple (several functions, one call),
parallel (several calls, in any order), irrelevance (no function fits: calling is wrong). Each row
is one turn in the protocol `chat`; nothing is executed. "No call" is kept apart from "unparseable":
only the first is right for irrelevance.

Numeric policy (`numbers`): `typed`, the leaderboard's, takes an integer where a float is wanted
and never a float where an integer is (not even 5.0); `value` compares numbers by value. In both a
boolean is not a number, a number in quotes is not a number, and equality is exact.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.agent import chat
from pipeline.agent.instructions import instructions_for
from pipeline.agent.limits import ExitReason
from pipeline.agent.policies import ContextOverflow, Policy, PolicyError, Reply, Request
from pipeline.agent.tasks import EpisodeResult
from pipeline.agent.trace import Sink
from pipeline.agent.turns import Message, Turn
from pipeline.errors import ConfigError
from pipeline.evaluation.bfcl_rows import read_answers, read_rows
from pipeline.tools.base import ToolSpec

Category = Literal["simple", "multiple", "parallel", "irrelevance"]
Outcome = Literal["right", "wrong", "no_call", "unparseable", "model_error"]
Numbers = Literal["typed", "value"]
BATCH = 64  # rows that are asked together

_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
_IGNORED = re.compile(r"[ ,./\-_*^]")


@dataclass(frozen=True)
class Row:
    """One task: the request, the functions on offer, and the accepted calls (none: irrelevance)."""

    row_id: str
    category: Category
    messages: tuple[Message, ...]
    functions: tuple[dict[str, Any], ...]
    accepted: tuple[dict[str, dict[str, list[Any]]], ...]


@dataclass(frozen=True)
class Verdict:
    """What a turn came to; `reason` says what did not match."""

    row_id: str
    outcome: Outcome
    right: bool
    reason: str | None = None


def load_rows(questions: Path, answers: Path | None, category: Category) -> list[Row]:
    """Read a file of the leaderboard and its answers; irrelevance has none.

    Raises ConfigError for a file that does not hold such rows; see `bfcl_rows` for what is checked.
    """
    if (answers is None) != (category == "irrelevance"):
        raise ConfigError(f"{category}: answers are wanted for all categories but irrelevance")
    rows = read_rows(questions, category)
    accepted = [()] * len(rows) if answers is None else read_answers(answers, rows, category)
    return [
        Row(
            row_id=row.row_id,
            category=category,
            messages=tuple(Message(role, content) for role, content in row.messages),
            functions=row.functions,
            accepted=calls,
        )
        for row, calls in zip(rows, accepted, strict=True)
    ]


def tool_specs(row: Row) -> tuple[ToolSpec, ...]:
    """The functions of a row as tools, with the leaderboard's types in JSON Schema's names."""
    return tuple(
        ToolSpec(f["name"], "1", f["description"], _schema(f["parameters"])) for f in row.functions
    )


def ask_rows(
    rows: Sequence[Row],
    policy: Policy,
    *,
    numbers: Numbers = "typed",
    tool_choice: str = "auto",
    max_new_tokens: int = 256,
    on_event: Sink | None = None,
) -> list[tuple[Verdict, EpisodeResult]]:
    """Ask a policy for one turn per row, and judge the turns; `on_event` gets one exit per row."""
    system = Message("system", instructions_for("chat", "bfcl"))
    asked: list[tuple[Verdict, EpisodeResult]] = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        requests = [
            Request(
                messages=(system, *row.messages),
                tools=tool_specs(row),
                protocol="chat",
                tool_choice=tool_choice,
                stop=chat.STOP,
                max_new_tokens=max_new_tokens,
                task_id=row.row_id,
            )
            for row in batch
        ]
        began = time.monotonic()
        replies = policy.ask(requests)
        seconds = (time.monotonic() - began) / len(batch)
        for row, request, reply in zip(batch, requests, replies, strict=True):
            turn = _read(row, reply)
            run = _run(request, reply, turn, seconds)
            asked.append((_verdict(row, reply, turn, numbers), run))
            if on_event is not None:
                on_event({"event": "exit", "task_id": row.row_id, "exit_reason": run.exit_reason})
    return asked


def judge(row: Row, turn: Turn, numbers: Numbers = "typed") -> Verdict:
    """Judge one turn: the calls in it against the accepted ones."""
    if turn.errors:
        return Verdict(row.row_id, "unparseable", False, "; ".join(turn.errors))
    if not turn.calls:
        right = row.category == "irrelevance"
        return Verdict(row.row_id, "no_call", right, None if right else "no call")
    calls = [(call.name, call.arguments) for call in turn.calls]
    if row.category == "irrelevance":
        return Verdict(row.row_id, "wrong", False, f"called {calls[0][0]}")
    reason = _mismatch(row, calls, numbers)
    return Verdict(row.row_id, "wrong" if reason else "right", reason is None, reason)


def outcomes(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Count the outcomes: right, wrong, no_call, unparseable, model_error."""
    return dict(sorted(Counter(verdict.outcome for verdict in verdicts).items()))


def _read(row: Row, reply: Reply | PolicyError) -> Turn:
    if isinstance(reply, PolicyError):
        return Turn("")
    if reply.calls is not None:
        return chat.from_structured(reply.text, reply.calls)
    return chat.parse(reply.text, [function["name"] for function in row.functions])


def _verdict(row: Row, reply: Reply | PolicyError, turn: Turn, numbers: Numbers) -> Verdict:
    if isinstance(reply, PolicyError):
        return Verdict(row.row_id, "model_error", False, str(reply))
    return judge(row, turn, numbers)


def _run(request: Request, reply: Reply | PolicyError, turn: Turn, seconds: float) -> EpisodeResult:
    """The turn as a run of one step; no tool was executed in it."""
    failed = isinstance(reply, PolicyError)
    written = () if failed else (Message("assistant", turn.text, turn.calls),)
    read, wrote = (0, 0) if isinstance(reply, PolicyError) else (reply.tokens_in, reply.tokens_out)
    return EpisodeResult(
        task_id=request.task_id,
        question=request.messages[-1].content,
        heading="Question",
        protocol="chat",
        exit_reason=_exit_reason(reply, turn),
        answer=turn.answer,
        forced_answer=None,
        steps=1,
        tokens_in=read,
        tokens_out=wrote,
        context_sent=len(request.messages),
        calls={},
        errors={},
        flags=dict(Counter(turn.flags)),
        detail=str(reply) if failed else "; ".join(turn.errors) or None,
        seconds=seconds,
        messages=(*request.messages, *written),
        events=(),
    )


def _exit_reason(reply: Reply | PolicyError, turn: Turn) -> ExitReason:
    if isinstance(reply, PolicyError):
        return "context_overflow" if isinstance(reply, ContextOverflow) else "model_error"
    if turn.errors:
        return "parse_failures"
    return "finished" if turn.calls or turn.answer is not None else "unexpected_stop"


def _mismatch(
    row: Row, calls: Sequence[tuple[str, str | dict[str, Any]]], numbers: Numbers
) -> str | None:
    """Say what is wrong with the calls; every accepted call needs one of its own, in any order."""
    if len(calls) != len(row.accepted):
        return f"{len(calls)} calls instead of {len(row.accepted)}"
    reasons = [
        [_call_problem(row, wanted, call, numbers) for call in calls] for wanted in row.accepted
    ]
    if _assignable([[reason is None for reason in line] for line in reasons]):
        return None
    return next((r for line in reasons if None not in line for r in line if r), "a call is doubled")


def _assignable(fits: Sequence[Sequence[bool]]) -> bool:
    """Tell whether every row can have a column of its own (augmenting paths)."""
    owner: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for column, good in enumerate(fits[row]):
            if good and column not in tried:
                tried.add(column)
                if column not in owner or place(owner[column], tried):
                    owner[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(fits)))


def _call_problem(
    row: Row,
    wanted: Mapping[str, Mapping[str, list[Any]]],
    call: tuple[str, str | dict[str, Any]],
    numbers: Numbers,
) -> str | None:
    (name, accepted), (called, arguments) = next(iter(wanted.items())), call
    if called != name:
        return f"called {called} instead of {name}"
    if isinstance(arguments, str):
        return "the arguments are not structured"
    function = next(f for f in row.functions if f["name"] == name)
    properties = function["parameters"]["properties"]
    for parameter in function["parameters"].get("required", []):
        if parameter not in arguments:
            return f"missing required parameter {parameter!r}"
    for parameter, value in arguments.items():
        if parameter not in properties or parameter not in accepted:
            return f"unexpected parameter {parameter!r}"
        if not _has_type(value, properties[parameter], numbers):
            return f"{parameter}: {value!r} is not of type {properties[parameter].get('type')}"
        if not any(_equal(value, option) for option in accepted[parameter]):
            return f"{parameter}: {value!r} is not one of {accepted[parameter]}"
    for parameter, options in accepted.items():
        if parameter not in arguments and "" not in options:
            return f"missing parameter {parameter!r}"
    return None


def _has_type(value: Any, declared: Mapping[str, Any], numbers: Numbers) -> bool:
    kind = declared.get("type", "any")
    if kind in ("float", "number") or (kind == "integer" and numbers == "value"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in ("array", "tuple"):
        items = declared.get("items") or {}
        return isinstance(value, list) and all(_has_type(v, items, numbers) for v in value)
    python = {"string": str, "integer": int, "boolean": bool, "dict": dict, "object": dict}
    wanted = python.get(str(kind), object)
    return isinstance(value, wanted) and (wanted is not int or not isinstance(value, bool))


def _equal(value: Any, option: Any) -> bool:
    """Compare a value with an accepted one: strings loosely, objects by their own options."""
    if isinstance(value, str) and isinstance(option, str):
        return _loose(value) == _loose(option)
    if isinstance(value, list) and isinstance(option, list):
        pairs = zip(value, option, strict=False)
        return len(value) == len(option) and all(_equal(v, o) for v, o in pairs)
    if isinstance(value, dict) and isinstance(option, dict):
        given = all(
            key in option and any(_equal(v, o) for o in option[key]) for key, v in value.items()
        )
        return given and all(key in value or "" in options for key, options in option.items())
    return isinstance(value, bool) == isinstance(option, bool) and bool(value == option)


def _loose(text: str) -> str:
    """Drop what the leaderboard does not compare: case, spaces, some punctuation, quote style."""
    return _IGNORED.sub("", text).lower().replace("'", '"')


def _schema(declared: Any) -> Any:
    if isinstance(declared, list):
        return [_schema(item) for item in declared]
    if not isinstance(declared, dict):
        return declared
    schema = {key: _schema(value) for key, value in declared.items()}
    kind = schema.get("type")
    if isinstance(kind, str):
        if kind == "any":
            del schema["type"]
        else:
            schema["type"] = _TYPES.get(kind, kind)
    if isinstance(schema.get("optional"), bool):
        del schema["optional"]
    return schema
