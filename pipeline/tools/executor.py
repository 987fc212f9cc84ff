"""The executor: the one place where a tool is run.

It knows a closed list of tools, validates arguments, asks the approval policy, looks into the
cache, bounds the time, retries what talks to a network, and neutralises and caps the result.
A failure of a tool is an `Execution` with an `error_kind` (`base.ERROR_KINDS`); a bug of ours
propagates. Tools that may hang or crash (`spec.isolated`) run in worker processes that are
killed at the time limit; the others bound themselves and run in this process.
"""

from __future__ import annotations

import difflib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from pipeline.calls import neutralise
from pipeline.tools.approval import ApprovalPolicy
from pipeline.tools.arguments import canonical_arguments, check_arguments, parse_arguments
from pipeline.tools.base import TRANSIENT_KINDS, Tool, ToolError, ToolSpec
from pipeline.tools.cache import CachedResult, CacheKey, ResultCache

NO_DOCUMENT: Mapping[str, Any] = MappingProxyType({"date": None, "doc_id": ""})
# `neutralise` looks at each character; of a huge result only the beginning can be kept anyway.
_PRE_CUT = 20


@dataclass(frozen=True)
class Execution:
    """What came of a call: exactly one of `result` and `error_kind` is set.

    `seconds` is wall time of this execution (near zero when `cached`); `cut` says that the result
    was longer than the tool's `result_limit`.
    """

    result: str | None
    error_kind: str | None
    error: str | None
    seconds: float
    cached: bool
    cut: bool = False
    attempts: int = 1


class Executor:
    """Runs calls of a closed list of tools; see the module.

    `workers` is the number of processes for isolated tools and of threads in `execute_many`.
    `on_execution` gets one flat dictionary per execution, for the metrics. Raises ValueError when
    two tools share a name.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        cache_path: Path | None = None,
        workers: int = 1,
        approval: ApprovalPolicy | None = None,
        retries: int = 2,
        backoff_s: float = 0.5,
        on_execution: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.spec.name.lower() in self.tools:
                raise ValueError(f"two tools are called {tool.spec.name!r}; give one another name")
            self.tools[tool.spec.name.lower()] = tool
        self.approval = approval
        self.workers = workers
        self.retries = retries
        self.backoff_s = backoff_s
        self.on_execution = on_execution
        self._cache = None if cache_path is None else ResultCache(Path(cache_path))
        self._pool: ProcessPool | None = None
        self._pool_lock = threading.Lock()
        self._slots = {
            name: threading.BoundedSemaphore(tool.spec.concurrency)
            for name, tool in self.tools.items()
            if tool.spec.concurrency is not None
        }

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers, close the cache and every tool that holds something open."""
        if self._pool is not None:
            _stop(self._pool)
            self._pool = None
        if self._cache is not None:
            self._cache.close()
        for tool in self.tools.values():
            closing = getattr(tool, "close", None)
            if closing is not None:
                closing()

    @property
    def specs(self) -> list[ToolSpec]:
        """The specifications, in the order of the catalogue."""
        return [tool.spec for tool in self.tools.values()]

    def find(self, name: str) -> Tool:
        """The tool of that name; raises ToolError of kind unknown_tool that names the real ones."""
        tool = self.tools.get(name.strip().lower())
        if tool is None:
            names = [tool.spec.name for tool in self.tools.values()]
            close = difflib.get_close_matches(name.strip().lower(), self.tools, 1, cutoff=0.5)
            hint = f"; did you mean {self.tools[close[0]].spec.name}?" if close else ""
            listed = ", ".join(names) or "none"
            raise ToolError("unknown_tool", f"no tool {name[:80]!r}; there are: {listed}{hint}")
        return tool

    def arguments(self, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
        """Checked arguments of a call from the linear form or a dictionary; raises ToolError."""
        spec = self.find(name).spec
        read = parse_arguments(spec, arguments) if isinstance(arguments, str) else dict(arguments)
        check_arguments(spec, read)
        return read

    def canonical(self, name: str, arguments: str) -> str:
        """One text for all spellings of the same arguments; unreadable ones stay as they are."""
        try:
            return canonical_arguments(self.arguments(name, arguments))
        except ToolError:
            return arguments.strip()

    def execute(
        self,
        name: str,
        arguments: str | Mapping[str, Any],
        document: Mapping[str, Any] = NO_DOCUMENT,
    ) -> Execution:
        """Run one call. `arguments` is the text between the brackets, or a dictionary."""
        start = time.perf_counter()
        attempts = 1
        cached = False
        try:
            tool = self.find(name)
            checked = self.arguments(name, arguments)
            self._approve(tool.spec, checked)
            key = self._key(tool.spec, checked, document)
            answer = self._cache.get(key) if self._cache and key else None
            cached = answer is not None
            if answer is None:
                answer, attempts = self._answer(tool, checked, document)
                if self._cache and key and answer.error_kind not in TRANSIENT_KINDS:
                    self._cache.put(key, answer)
        except ToolError as failure:
            answer = CachedResult(None, False, failure.kind, _one_line(failure.message))
        seconds = time.perf_counter() - start
        done = Execution(
            answer.result, answer.error_kind, answer.error, seconds, cached, answer.cut, attempts
        )
        self._report(name, done)
        return done

    def execute_many(
        self, calls: Iterable[tuple[str, str | Mapping[str, Any], Mapping[str, Any]]]
    ) -> list[Execution]:
        """Run calls (name, arguments, document) at the same time, results in their order.

        At most `workers` at once, and of one tool at most its `concurrency`.
        """
        todo = list(calls)
        if self.workers == 1 or len(todo) < 2:
            return [self.execute(*call) for call in todo]
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(lambda call: self.execute(*call), todo))

    def _approve(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
        if self.approval is not None:
            refusal = self.approval.refusal(spec.name, arguments) if spec.effects else None
        elif spec.effects:
            refusal = f"{spec.name} has effects outside and there is no approval policy"
        else:
            refusal = None
        if refusal is not None:
            raise ToolError("refused", refusal)

    def _key(
        self, spec: ToolSpec, arguments: Mapping[str, Any], document: Mapping[str, Any]
    ) -> CacheKey | None:
        if not spec.cacheable or spec.effects:
            return None
        read = str(document.get("date") or "") if spec.reads_document else ""
        return CacheKey(spec.name, spec.version, canonical_arguments(arguments), read)

    def _answer(
        self, tool: Tool, arguments: dict[str, Any], document: Mapping[str, Any]
    ) -> tuple[CachedResult, int]:
        """The tool's answer, made harmless, and how many attempts it took."""
        attempts = 0
        while True:
            attempts += 1
            try:
                raw = self._run(tool, arguments, document)
            except ToolError as failure:
                # A call with effects may have had them although its answer was lost.
                retry = tool.spec.network and not tool.spec.effects and failure.kind == "network"
                if retry and attempts <= self.retries:
                    time.sleep(self.backoff_s * 2 ** (attempts - 1))
                    continue
                error = _one_line(failure.message)
                return CachedResult(None, False, failure.kind, error), attempts
            limit = tool.spec.result_limit
            window = limit * _PRE_CUT
            text, cut = neutralise(raw[:window], limit)
            if not text:
                empty = f"{tool.spec.name} returned nothing"
                return CachedResult(None, False, "no_result", empty), attempts
            return CachedResult(text, cut or len(raw) > window, None, None), attempts

    def _run(self, tool: Tool, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        slot: AbstractContextManager[Any] = self._slots.get(tool.spec.name.lower(), nullcontext())
        with slot:
            if not tool.spec.isolated:
                return tool.run(arguments, document)
            return self._run_isolated(tool, arguments, dict(document))

    def _run_isolated(self, tool: Tool, arguments: dict[str, Any], document: dict[str, Any]) -> str:
        call = (tool, arguments, document)
        try:
            future = self._workers().schedule(
                _run_in_worker, args=call, timeout=tool.spec.timeout_s
            )
            return future.result()
        except TimeoutError:
            limit = f"{tool.spec.timeout_s:g} s"
            raise ToolError("timeout", f"{tool.spec.name} ran over {limit}, stopped") from None
        except ProcessExpired as expired:
            code = f"exit code {expired.exitcode}"
            raise ToolError("crash", f"the worker of {tool.spec.name} died ({code})") from None
        except BrokenProcessPool:
            message = f"a worker died before {tool.spec.name} had begun"
            raise ToolError("crash", message) from None

    def _workers(self) -> ProcessPool:
        """The worker processes; new ones where the last died while no call ran."""
        with self._pool_lock:
            if self._pool is not None and not self._pool.active:
                _stop(self._pool)
                self._pool = None
            if self._pool is None:
                # Not fork: torch and SQLite may hold threads and locks in this process.
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPool(max_workers=self.workers, context=context)
            return self._pool

    def _report(self, name: str, done: Execution) -> None:
        if self.on_execution is None:
            return
        known = self.tools.get(name.strip().lower())
        event = {
            "event": "execution",
            "tool": known.spec.name if known else name[:80],
            "error_kind": done.error_kind,
            "seconds": round(done.seconds, 6),
            "cached": done.cached,
            "cut": done.cut,
            "attempts": done.attempts,
        }
        self.on_execution(event)


def _stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def _run_in_worker(tool: Tool, arguments: dict[str, Any], document: dict[str, Any]) -> str:
    # What a user's function prints, or what it starts, must not mix with what the command prints.
    os.dup2(2, 1)
    with redirect_stdout(sys.stderr):
        return tool.run(arguments, document)


def _one_line(message: str) -> str:
    """An error message as one harmless line: it may quote what the model or a server wrote."""
    return neutralise(message[:4000], 500)[0]
