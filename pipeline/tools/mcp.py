"""Tools of MCP servers, over stdio or Streamable HTTP (extra `mcp`).

A server is untrusted: its definitions are pinned (`pins`), what it says about its tools is cleaned
before a model sees it, its hints about effects are not believed, its results go through the
executor like any other, and its stderr goes to a file. Each call has a time limit; a server that
dies is started once more, and after that its calls are failures of kind `unavailable`.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jsonschema import Draft202012Validator, SchemaError

from pipeline.calls import neutralise
from pipeline.errors import ConfigError
from pipeline.paths import cache_folder
from pipeline.tools.base import STRICT, MissingExtra, ToolError, ToolSpec, content_version
from pipeline.tools.pins import check_pins, is_pinned, pinned_names, pinned_tools
from pipeline.tools.untrusted import content_text, safe_schema

_GRACE_S = 5.0  # beyond a call's own limit, before the connection is given up
_PROBE_S = 2.0  # within which a server must answer after a timeout, else it counts as dead
_MAX_ANSWER_BYTES = 64 * 2**20  # of one event, or of an answer that is one JSON document
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*")


@dataclass(frozen=True)
class MCPConfig:
    """One server: `command` (stdio) or `url` (Streamable HTTP). Its tools are `server.tool`.

    `effects` says whether its tools may change something outside; they then need an approval
    policy. `$NAME` in `env` and `headers` is taken from the environment. `tools` are patterns of
    the tools that are taken. `accept` is the hash of changed definitions that you looked at.
    """

    __pydantic_config__ = STRICT

    server: str
    name: Literal["MCP"] = "MCP"
    command: tuple[str, ...] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    tools: tuple[str, ...] = ("*",)
    effects: bool = True
    cache: bool = False
    timeout_s: float = 20.0
    start_timeout_s: float = 30.0
    concurrency: int | None = None
    result_limit: int = 500
    lock: str = "mcp.lock.json"
    accept: str | None = None
    log: str | None = None  # of its stderr; default: mcp-SERVER.log in the cache folder

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(f"MCP server {self.server!r}: give either `command` or `url`")
        if not _NAME.fullmatch(self.server):
            raise ValueError(f"server: {self.server!r}: use letters, digits, _ and -")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {self.url!r} must begin with http:// or https://")


class ServerDied(Exception):
    """The connection is gone; what it did last is not known."""


class MCPServer:
    """A connection to one server, on an event loop in a thread of its own."""

    def __init__(self, config: MCPConfig) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise MissingExtra("MCP", "mcp") from None
        logging.getLogger("mcp.client").setLevel(logging.CRITICAL)  # its errors are raised as well
        self.config = config
        self._lock = threading.RLock()
        self._exit: ExitStack | None = None
        self._portal: Any = None
        self._client: Any = None
        self._restarts = 0
        self._changed = False  # the server has said that its list of tools changed
        self._dead = False
        try:
            self._connect()
            self.definitions = self._check_definitions()
        except (ServerDied, ToolError) as error:
            self.close()
            where = self.config.url or " ".join(self.config.command)
            raise ConfigError(
                f"MCP server {config.server!r} ({where}) does not start: {error}; "
                f"its messages are in {self.log_path}"
            ) from error
        except ConfigError:
            self.close()
            raise

    @property
    def log_path(self) -> Path:
        """Where the server's stderr goes."""
        if self.config.log is not None:
            return Path(self.config.log)
        return cache_folder() / f"mcp-{self.config.server}.log"

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """The text of the tool's answer; raises ToolError.

        A server found dead is started once more before the call. A call during which it dies is
        not repeated: it may have had its effects.
        """
        client = self._alive()
        limit = self.config.timeout_s
        sent = partial(client.call_tool, tool, arguments, read_timeout_seconds=limit)
        try:
            answer = self._run(sent, limit)
        except ServerDied as error:
            self._dead = True
            kind = "network" if self.config.url else "crash"
            raise ToolError(kind, f"MCP server {self.config.server!r} is gone: {error}") from None
        except ToolError as error:
            if error.kind == "timeout" and not self._answers():
                self._dead = True
            raise
        if self.config.url:
            self._restarts = 0  # over a network a lost connection is no dead server
        text = content_text(answer)
        if answer.is_error:
            raise ToolError("tool_error", f"{self.config.server}.{tool}: {text[:2000]}")
        return text

    def close(self) -> None:
        """End the connection and, over stdio, the server."""
        with self._lock:
            self._disconnect()
            self._dead, self._restarts = True, 2

    def _alive(self) -> Any:
        """The client, after the one restart if the server is dead, its definitions checked."""
        with self._lock:
            if self._dead or self._client is None:
                if self._restarts >= 1:
                    raise ToolError("unavailable", f"MCP server {self.config.server!r} is gone")
                self._restarts += 1
                self._disconnect()
                try:
                    self._connect()
                    self._check_definitions()
                except ServerDied as error:
                    message = f"MCP server {self.config.server!r} does not start again: {error}"
                    raise ToolError("unavailable", message) from None
                self._dead = False
            elif self._changed:
                self._check_definitions()
            return self._client

    def _connect(self) -> None:
        from anyio.from_thread import start_blocking_portal
        from mcp import Client

        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            transport = self._transport(stack)
            client = Client(
                transport,
                read_timeout_seconds=self.config.start_timeout_s,
                message_handler=self._on_message,
                cache=None,
            )
            try:
                self._client = stack.enter_context(self._portal.wrap_async_context_manager(client))
            except BaseException as error:
                if not _is_connection_failure(error):
                    raise
                raise ServerDied(_innermost(error)) from error
            self._exit = stack.pop_all()

    def _transport(self, stack: ExitStack) -> Any:
        if self.config.url is not None:
            from mcp.client.streamable_http import streamable_http_client

            http = _http_client(self.config)
            stack.enter_context(self._portal.wrap_async_context_manager(http))
            return streamable_http_client(
                self.config.url, http_client=http, max_sse_event_size=_MAX_ANSWER_BYTES
            )
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context(self.log_path.open("a", encoding="utf-8"))
        env = {key: os.path.expandvars(value) for key, value in self.config.env.items()}
        command, *rest = self.config.command
        parameters = StdioServerParameters(
            command=command,
            args=rest,
            env=env,
            cwd=self.config.cwd,
            encoding_error_handler="replace",
        )
        return stdio_client(parameters, errlog=log)

    def _disconnect(self) -> None:
        exit_, self._exit, self._client = self._exit, None, None
        if exit_ is None:
            return
        try:
            exit_.close()
        except BaseException as error:
            # Leaving a connection whose other end is gone complains about just that.
            if not _is_connection_failure(error):
                raise

    def _check_definitions(self) -> dict[str, dict[str, Any]]:
        """List the tools and compare them with the pinned ones; raises DefinitionsChanged."""
        self._changed = False
        definitions: dict[str, dict[str, Any]] = {}
        cursor: str | None = None
        while True:
            listing = partial(self._client.list_tools, cursor=cursor)
            page = self._run(listing, self.config.start_timeout_s)
            for tool in page.tools:
                dumped = tool.model_dump(mode="json", by_alias=True, exclude_none=True)
                definitions[tool.name] = {k: v for k, v in dumped.items() if k not in _UNPINNED}
            cursor = page.next_cursor
            if not cursor or len(definitions) > 10_000:
                break
        check_pins(Path(self.config.lock), self.config.server, definitions, self.config.accept)
        return definitions

    def _answers(self) -> bool:
        """Whether the server still answers at all, after a call that ran out of time."""
        try:
            self._run(self._client.list_tools, _PROBE_S)
        except (ServerDied, ToolError):
            return False
        return True

    def _run(self, function: Callable[[], Awaitable[Any]], limit_s: float) -> Any:
        """Run a request on the connection's loop within a time; raises ServerDied or ToolError."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        future = self._portal.start_task_soon(function)
        try:
            return future.result(limit_s + _GRACE_S if limit_s > _PROBE_S else limit_s)
        except TimeoutError:
            future.cancel()
            raise ToolError("timeout", f"{self.config.server} ran over {limit_s:g} s") from None
        except MCPError as error:
            if error.error.code == REQUEST_TIMEOUT:
                raise ToolError("timeout", f"{self.config.server} ran over {limit_s:g} s") from None
            if error.error.code == CONNECTION_CLOSED:
                raise ServerDied(str(error)) from error
            raise ToolError("tool_error", f"{self.config.server}: {str(error)[:2000]}") from None
        except CancelledError as error:
            raise ServerDied("the connection was closed") from error
        except Exception as error:
            if not _is_connection_failure(error):
                raise
            raise ServerDied(_innermost(error)) from error

    async def _on_message(self, message: Any) -> None:
        from mcp_types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification):
            self._changed = True


def _http_client(config: MCPConfig) -> Any:
    import httpx2

    return httpx2.AsyncClient(
        headers={key: os.path.expandvars(value) for key, value in config.headers.items()},
        timeout=httpx2.Timeout(10.0, read=config.timeout_s + _GRACE_S),
        event_hooks={"response": [_bound_document]},
    )


async def _bound_document(response: Any) -> None:
    """Let the body of an answer be read up to the limit; the events of a stream have their own.

    Bytes are counted as they are after decompression.
    """
    import httpx2

    if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        return
    read = response.aiter_bytes

    async def bounded(chunk_size: int | None = None) -> AsyncIterator[bytes]:
        size = 0
        async for part in read(chunk_size):
            size += len(part)
            if size > _MAX_ANSWER_BYTES:
                raise httpx2.StreamError(f"the answer is over {_MAX_ANSWER_BYTES:,} bytes")
            yield part

    response.aiter_bytes = bounded


# Names that do not change what a tool is or does.
_UNPINNED = ("icons", "_meta")


class MCPTool:
    """One tool of a server."""

    def __init__(self, server: MCPServer, remote_name: str, spec: ToolSpec) -> None:
        self.server = server
        self.remote_name = remote_name
        self.spec = spec

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """The text of the server's answer; raises ToolError."""
        return self.server.call(self.remote_name, arguments)

    def close(self) -> None:
        """End the server's connection, with the first of its tools that is closed."""
        self.server.close()


def build_mcp_tools(config: MCPConfig) -> list[MCPTool]:
    """Connect to a server and offer its tools.

    Raises ConfigError when it does not start, a pattern matches nothing, or a definition cannot be
    used, and DefinitionsChanged when the tools are not those that were pinned.
    """
    server = MCPServer(config)
    try:
        tools = []
        for name, definition in server.definitions.items():
            if any(fnmatchcase(name, pattern) for pattern in config.tools):
                tools.append(MCPTool(server, name, _spec(config, name, definition)))
        for pattern in config.tools:
            if not any(fnmatchcase(name, pattern) for name in server.definitions):
                offered = ", ".join(server.definitions) or "nothing"
                raise ConfigError(
                    f"MCP server {config.server!r} has no tool {pattern!r}; it has: {offered}"
                )
    except ConfigError:
        server.close()
        raise
    return tools


def described_mcp_specs(config: MCPConfig) -> list[ToolSpec]:
    """What a server's tools say of themselves: as pinned, else as it tells when it is asked once.

    Raises ConfigError as `build_mcp_tools` does.
    """
    lock = Path(config.lock)
    if is_pinned(lock, config.server, config.accept):
        return [
            _spec(config, name, definition)
            for name, definition in pinned_tools(lock, config.server).items()
            if any(fnmatchcase(name, pattern) for pattern in config.tools)
        ]
    tools = build_mcp_tools(config)
    for tool in tools:
        tool.close()
    return [tool.spec for tool in tools]


def declared_mcp_names(config: MCPConfig) -> list[str]:
    """The names of a server's tools without asking it: from the lock file, else those listed.

    Raises ConfigError when they are not known yet.
    """
    known = pinned_names(Path(config.lock), config.server)
    if known:
        wanted = [n for n in known if any(fnmatchcase(n, pattern) for pattern in config.tools)]
    elif any(character in pattern for pattern in config.tools for character in "*?["):
        raise ConfigError(
            f"MCP server {config.server!r}: its tools are not known yet; list them under `tools`, "
            "or connect once, so that they are pinned"
        )
    else:
        wanted = list(config.tools)
    return [_full_name(config, name) for name in wanted]


def _full_name(config: MCPConfig, name: str) -> str:
    """`server.tool`, with only the characters that the text form of a call allows."""
    return f"{config.server}.{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"


def _spec(config: MCPConfig, name: str, definition: Mapping[str, Any]) -> ToolSpec:
    schema = safe_schema(definition.get("inputSchema") or {"type": "object"})
    full_name = _full_name(config, name)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"{full_name}: its JSON Schema is not one: {error.message}") from None
    return ToolSpec(
        name=full_name,
        version=content_version("1", config.command, config.url, definition),
        description=neutralise(str(definition.get("description") or name), 600)[0],
        parameters=schema,
        result_limit=config.result_limit,
        timeout_s=config.timeout_s,
        effects=config.effects,
        cacheable=config.cache and not config.effects,
        network=config.url is not None,
        concurrency=config.concurrency,
    )


def _is_connection_failure(error: BaseException) -> bool:
    """Whether an exception, or each of a group, is about the connection and not about our code."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_connection_failure(inner) for inner in error.exceptions)
    import anyio
    import httpx2
    from mcp import MCPError

    kinds = (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream)
    lost = (CancelledError, OSError, MCPError, httpx2.HTTPError, TimeoutError)
    return isinstance(error, kinds + lost)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
