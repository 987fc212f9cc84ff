"""Our tools as an MCP server, over stdio or Streamable HTTP (extra `mcp`)."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread

from pipeline.tools.base import MissingExtra, Tool
from pipeline.tools.executor import Executor

LOOPBACK = "127.0.0.1"


def serve(
    tools: Sequence[Tool],
    http_port: int | None = None,
    *,
    host: str = LOOPBACK,
    executor: Executor | None = None,
) -> None:
    """Offer tools until interrupted: over stdio, or over HTTP at `http://HOST:PORT/mcp`.

    Without an `executor` (for a cache, a policy, workers) a plain one is made. A call comes with no
    document, so Calendar tells the clock's date. A failure of a tool is an answer marked as an
    error, with its kind.
    """
    owned = executor is None
    executor = executor or Executor(tools)
    server = build_server(executor)
    try:
        if http_port is None:
            anyio.run(_serve_stdio, server)
        else:
            print(f"serving at http://{host}:{http_port}/mcp", file=sys.stderr)
            anyio.run(_serve_http, server, host, http_port)
    finally:
        if owned:
            executor.close()


def build_server(executor: Executor) -> Any:
    """The low-level MCP server of an executor's tools; calls run in threads."""
    try:
        from mcp import types
        from mcp.server import Server
    except ImportError:
        raise MissingExtra("callsieve tools serve", "mcp") from None

    async def list_tools(context: Any, params: Any) -> Any:
        return types.ListToolsResult(
            tools=[
                types.Tool(name=s.name, description=s.description, input_schema=s.parameters)
                for s in executor.specs
            ]
        )

    async def call_tool(context: Any, params: Any) -> Any:
        arguments: Mapping[str, Any] = params.arguments or {}
        run = functools.partial(executor.execute, params.name, arguments)
        done = await anyio.to_thread.run_sync(run)
        text = done.result if done.result is not None else f"{done.error_kind}: {done.error}"
        structured = {"result": done.result, "error_kind": done.error_kind, "error": done.error}
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=text)],
            structured_content=json.loads(json.dumps(structured)),
            is_error=done.result is None,
        )

    return Server("callsieve", on_list_tools=list_tools, on_call_tool=call_tool)


async def _serve_stdio(server: Any) -> None:
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


async def _serve_http(server: Any, host: str, port: int) -> None:
    import uvicorn

    app = server.streamable_http_app(host=host)
    config = uvicorn.Config(app, host=host, port=port, log_level="warning")
    await uvicorn.Server(config).serve()
