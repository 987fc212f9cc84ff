"""Python: short programs in Monty, an interpreter without files or sockets (extra `python`).

Each call runs in a fresh session of a worker process with limits on time, memory and recursion;
the clock is the document's date and the random numbers are seeded, so a call is repeatable.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, time
from typing import Any, Literal

from pipeline.tools.base import STRICT, MissingExtra, ToolError, ToolSpec, one_string
from pipeline.tools.calendar import parse_date

# What the interpreter refuses, and what it does not offer.
_NOT_OFFERED = ("PermissionError", "ModuleNotFoundError", "ImportError", "NotImplementedError")


@dataclass(frozen=True)
class PythonConfig:
    """Limits of one call: wall seconds of the program and megabytes of its heap."""

    __pydantic_config__ = STRICT

    name: Literal["Python"] = "Python"
    timeout_s: float = 2.0
    memory_mb: int = 64
    result_limit: int = 200


class Python:
    """Runs a program and answers with what it printed and the value of its last expression."""

    def __init__(self, config: PythonConfig = PythonConfig()) -> None:
        try:
            import pydantic_monty  # noqa: F401  said at start, not at the first call
        except ImportError:
            raise MissingExtra("Python", "python") from None
        self.config = config
        self._lock = threading.Lock()
        self._pool: Any = None
        self._owner = 0
        self.spec = python_spec(config)

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """Printed text, then the last value; raises ToolError of the kinds of a program's end."""
        import pydantic_monty as monty

        printed = monty.CollectString(max_bytes=1_000_000)
        limits: Any = {
            "max_feed_duration_secs": self.config.timeout_s,
            "max_memory": self.config.memory_mb * 2**20,
            "max_recursion_depth": 200,
            "max_suspensions": 10,
        }
        policy: Any = {"random_start": {"seed": 0}, "sleep": "zero"}
        day = parse_date(document.get("date"))
        if day is not None:
            policy["datetime"] = datetime.combine(day, time(12), UTC)
        try:
            with self._workers().checkout(limits=limits, os_policy=policy) as session:
                value = session.feed_run(arguments["code"], print_callback=printed)
        except monty.MontySyntaxError as error:
            raise _failure(str(error), "syntax") from None
        except monty.MontyCrashedError as error:
            kind = "timeout" if error.timed_out else "crash"
            raise ToolError(kind, f"Python: the interpreter was stopped ({error})") from None
        except monty.MontyError as error:
            raise _failure(str(error), "exception") from None
        parts = [printed.output.strip()]
        if value is not None:
            parts.append(value if isinstance(value, str) else repr(value))
        return " ".join(part for part in parts if part)

    def close(self) -> None:
        """Stop the interpreter's processes."""
        with self._lock:
            if self._pool is not None and self._owner == os.getpid():
                self._pool.__exit__(None, None, None)
            self._pool = None

    def _workers(self) -> Any:
        import pydantic_monty as monty

        with self._lock:
            if self._pool is None or self._owner != os.getpid():
                backstop = self.config.timeout_s + 5
                self._pool = monty.Monty(request_timeout=backstop, checkout_timeout=60)
                self._pool.__enter__()
                self._owner = os.getpid()
            return self._pool


def python_spec(config: PythonConfig) -> ToolSpec:
    """What Python says of itself."""
    return ToolSpec(
        name="Python",
        version="1",
        description=(
            "Runs a short Python program without files, network or packages and returns what "
            "it prints and the value of its last expression. "
            "Example: sum(n * n for n in range(10)) gives 285."
        ),
        parameters=one_string("code", "The program; statements may be separated by ;"),
        result_limit=config.result_limit,
        timeout_s=config.timeout_s,
        reads_document=True,
        cacheable=False,  # without a document date the clock is today's
    )


def _failure(message: str, kind: str) -> ToolError:
    """The kind of a program's end by the name of its exception."""
    name = message.partition(":")[0].strip()
    kinds = {"TimeoutError": "timeout", "MemoryError": "too_large", "RecursionError": "too_large"}
    if name in _NOT_OFFERED:
        kind = "not_allowed"
    return ToolError(kinds.get(name, kind), f"Python: {message}")
