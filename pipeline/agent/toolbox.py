"""Running the calls of a turn: together, each result in the place of its call.

A `Toolbox` is what the loop executes through. `pipeline.tools.executor.Executor` is one;
`EnvironmentTools` is the one for environments, whose tools keep the state of one episode.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from pipeline.agent.turns import Call
from pipeline.tools.approval import ApprovalPolicy
from pipeline.tools.base import Tool, ToolError, ToolSpec
from pipeline.tools.executor import Execution, Executor

log = logging.getLogger(__name__)

Pending = tuple["Toolbox", Call, Mapping[str, Any]]


class Toolbox(Protocol):
    """A closed list of tools that can be executed by name."""

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    def execute(
        self, name: str, arguments: str | Mapping[str, Any], document: Mapping[str, Any]
    ) -> Execution: ...


class EnvironmentTools:
    """Tools of one episode: validated like all others, never cached, results kept as they are.

    The calls of one turn run one after the other, because the tools share a state. A tool with
    effects outside needs an `approval` policy, as in the executor.
    """

    def __init__(self, tools: Sequence[Tool], approval: ApprovalPolicy | None = None) -> None:
        self._executor = Executor(tools)
        self._approval = approval or ApprovalPolicy()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The specifications, in order."""
        return self._executor.specs

    def execute(
        self, name: str, arguments: str | Mapping[str, Any], document: Mapping[str, Any]
    ) -> Execution:
        """Run one call; a ToolError becomes data."""
        start = time.perf_counter()
        try:
            tool = self._executor.find(name)
            checked = self._executor.arguments(name, arguments)
            refusal = self._approval.refusal(tool.spec.name, checked) if tool.spec.effects else None
            if refusal is not None:
                raise ToolError("refused", refusal)
            result = tool.run(checked, document)
        except ToolError as failure:
            seconds = time.perf_counter() - start
            return Execution(None, failure.kind, failure.message, seconds, False)
        return Execution(result, None, None, time.perf_counter() - start, False)


def needs_caller(pending: Sequence[Pending]) -> bool:
    """Whether a call has effects outside: somebody at the terminal may have to be asked."""
    specs = [_spec(toolbox, call.name) for toolbox, call, _ in pending]
    return any(spec is not None and spec.effects for spec in specs)


def start_calls(pending: Sequence[Pending], others: int) -> Future[list[Execution]]:
    """Run calls in a thread, as `execute_calls` does, beside up to `others` of the same kind."""
    future: Future[list[Execution]] = Future()

    def work() -> None:
        try:
            future.set_result(execute_calls(pending, others))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def execute_calls(pending: Sequence[Pending], others: int = 1) -> list[Execution]:
    """Run calls concurrently, results in order.

    Calls with effects outside run one after the other in the calling thread (somebody may have to
    be asked), and so do the calls of one environment. Every other call gets a thread. A call that
    outlives its tool's time limit is given up: it becomes a timeout, the thread is left behind.
    """
    slots: list[Execution | None] = [None] * len(pending)
    lanes: dict[int, list[int]] = {}
    in_order: list[int] = []
    for index, (toolbox, call, _) in enumerate(pending):
        spec = _spec(toolbox, call.name)
        if spec is None or spec.effects:
            in_order.append(index)
        elif isinstance(toolbox, EnvironmentTools):
            lanes.setdefault(id(toolbox), []).append(index)
        else:
            lanes[-1 - index] = [index]
    threads = [(lane, _start(pending, slots, lane)) for lane in lanes.values()]
    for index in in_order:
        slots[index] = _execute(*pending[index])
    for lane, thread in threads:
        thread.join(_patience(pending, lane, len(lanes) * max(others, 1)))
    return [slot or _gave_up(*pending[i][:2]) for i, slot in enumerate(slots)]


def _start(
    pending: Sequence[Pending], slots: list[Execution | None], lane: Sequence[int]
) -> threading.Thread:
    def work() -> None:
        for index in lane:
            slots[index] = _execute(*pending[index])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _execute(toolbox: Toolbox, call: Call, document: Mapping[str, Any]) -> Execution:
    """Execute one call; what the tool raises is an observation, its traceback goes to the log."""
    start = time.perf_counter()
    try:
        return toolbox.execute(call.name, call.arguments, document)
    except Exception as error:
        log.exception("the tool %s raised", call.name)
        message = f"{type(error).__name__}: {error}"[:500]
        return Execution(None, "exception", message, time.perf_counter() - start, False)


def _patience(pending: Sequence[Pending], lane: Sequence[int], lanes: int) -> float | None:
    """Seconds to wait for a lane; None for isolated tools, whose worker the executor kills."""
    specs = [_spec(pending[index][0], pending[index][1].name) for index in lane]
    if any(spec is not None and spec.isolated for spec in specs):
        return None
    # Calls may wait for each other (a tool's own limit, one interpreter): allow for all of them.
    return sum(spec.timeout_s for spec in specs if spec is not None) * lanes + 0.1


def _gave_up(toolbox: Toolbox, call: Call) -> Execution:
    spec = _spec(toolbox, call.name)
    limit = spec.timeout_s if spec else 0.0
    return Execution(None, "timeout", f"{call.name} ran over {limit:g} s", limit, False)


def _spec(toolbox: Toolbox, name: str) -> ToolSpec | None:
    wanted = name.strip().lower()
    return next((spec for spec in toolbox.specs if spec.name.lower() == wanted), None)
