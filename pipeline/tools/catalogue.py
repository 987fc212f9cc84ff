"""The closed list of tools: configurations in, tools out."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from pipeline.errors import ConfigError
from pipeline.refusals import refusals
from pipeline.tools.base import Tool
from pipeline.tools.calculator import Calculator, CalculatorConfig
from pipeline.tools.calendar import CalendarConfig, build_calendar
from pipeline.tools.dense import DenseSearch, DenseSearchConfig, build_dense_search
from pipeline.tools.mcp import MCPConfig, build_mcp_tools, declared_mcp_names
from pipeline.tools.pins import is_pinned, pinned_tools
from pipeline.tools.python import Python, PythonConfig
from pipeline.tools.qa import CausalReaderConfig, Generate, QAConfig, build_qa
from pipeline.tools.search import WikiSearch, WikiSearchConfig, build_wiki_search
from pipeline.tools.translate import MTConfig, build_mt
from pipeline.tools.units import Units, UnitsConfig
from pipeline.tools.user import FunctionConfig, build_function

ToolConfig = Annotated[
    CalculatorConfig
    | CalendarConfig
    | WikiSearchConfig
    | DenseSearchConfig
    | QAConfig
    | MTConfig
    | PythonConfig
    | UnitsConfig
    | FunctionConfig
    | MCPConfig,
    Field(discriminator="name"),
]

# The built-in tools; `Function` stands for a function of the user's, `MCP` for a server's tools.
BUILT_IN = (
    *("Calculator", "Calendar", "WikiSearch", "DenseSearch"),
    *("QA", "MT", "Python", "Units"),
)
TOOL_NAMES = (*BUILT_IN, "Function", "MCP")

# Loads a causal model and gives its generation: (model, max_new_tokens) -> prompts -> texts.
LoadGenerate = Callable[[str, int], Generate]

_ADAPTER: TypeAdapter[Any] = TypeAdapter(ToolConfig)


def parse_tool_config(raw: Mapping[str, Any], where: str = "tools") -> Any:
    """Read one entry of `tools:` strictly; raises ConfigError with the key and what is allowed."""
    try:
        return _ADAPTER.validate_json(json.dumps(dict(raw), ensure_ascii=False, default=str))
    except ValidationError as error:
        lines = refusals(error.errors(), ToolConfig, where)
        raise ConfigError("\n".join(lines)) from None


def build_tools(configs: Sequence[Any], load_generate: LoadGenerate | None = None) -> list[Tool]:
    """The tools of a configuration, in its order; an entry is a mapping or a config dataclass.

    `load_generate` loads the causal model of a QA reader: tools know no model themselves.

    Raises ConfigError for an unknown tool or key, and when two tools share a name.
    """
    tools: list[Tool] = []
    try:
        for index, entry in enumerate(configs):
            config = entry if is_dataclass(entry) else parse_tool_config(entry, f"tools.{index}")
            tools.extend(_build(config, load_generate))
        _refuse_equal_names(tools)
    except ConfigError:
        close_tools(tools)
        raise
    return tools


def declared_names(configs: Sequence[Any], first: int = 0) -> list[str]:
    """The names of the tools that `build_tools` would give, without building anything.

    `first` is the number of the first entry among all, for messages.
    Raises ConfigError as `build_tools` does, and for an MCP server whose tools are not known yet.
    """
    names: list[str] = []
    for index, entry in enumerate(configs, first):
        config: Any = entry
        if not is_dataclass(entry):
            config = parse_tool_config(entry, f"tools.{index}")
        match config:
            case FunctionConfig():
                names.append(config.rename or config.function.rpartition(":")[2])
            case MCPConfig():
                names.extend(declared_mcp_names(config))
            case _:
                names.append(config.name)
    return names


def pin_servers(configs: Sequence[Any]) -> None:
    """Connect once to the MCP servers that are not pinned, or not as their `accept` says.

    `configs` are config dataclasses. Raises ConfigError as `build_tools` does.
    """
    for config in configs:
        if isinstance(config, MCPConfig) and not is_pinned(
            Path(config.lock), config.server, config.accept
        ):
            close_tools(build_mcp_tools(config))


def mask_inputs(configs: Sequence[Any]) -> list[str]:
    """What the masks of calls depend on, one text for each function and MCP server.

    `configs` are config dataclasses; no tool is built. Of a function it is the file without the
    bodies of its functions (a type that another function computes is not seen to change), of a
    server the schemas of the arguments as pinned. The arguments of all other tools are fixed.
    """
    found = []
    for config in configs:
        match config:
            case FunctionConfig():
                found.append(_signatures(Path(config.function.rpartition(":")[0])))
            case MCPConfig():
                pinned = pinned_tools(Path(config.lock), config.server)
                schemas = {
                    name: definition.get("inputSchema")
                    for name, definition in pinned.items()
                    if any(fnmatchcase(name, pattern) for pattern in config.tools)
                }
                found.append(json.dumps(schemas, sort_keys=True))
    return found


def _signatures(path: Path) -> str:
    """A Python file as text, without comments, layout and the bodies of functions."""
    source = path.read_bytes() if path.is_file() else b""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return repr(source)  # refused when the tool is built
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node) is not None
            node.body = node.body[:1] if documented else []
    return ast.dump(tree)


def close_tools(tools: Sequence[Tool]) -> None:
    """End what tools hold open: processes, connections to servers."""
    for tool in tools:
        closing = getattr(tool, "close", None)
        if closing is not None:
            closing()


def _refuse_equal_names(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.spec.name.lower() in seen:
            raise ConfigError(f"tools: two tools are called {tool.spec.name!r}; rename one")
        seen.add(tool.spec.name.lower())


def _build(config: Any, load_generate: LoadGenerate | None) -> list[Tool]:
    match config:
        case CalculatorConfig():
            return [Calculator()]
        case CalendarConfig():
            return [build_calendar(config)]
        case WikiSearchConfig() | DenseSearchConfig():
            return [_build_search(config)]
        case QAConfig():
            generate = None
            if isinstance(config.reader, CausalReaderConfig) and load_generate is not None:
                generate = load_generate(config.reader.model, config.reader.max_new_tokens)
            return [build_qa(config, _build_search(config.search), generate)]
        case MTConfig():
            return [build_mt(config)]
        case PythonConfig():
            return [Python(config)]
        case UnitsConfig():
            return [Units()]
        case FunctionConfig():
            return [build_user_function(config)]
        case MCPConfig():
            return list(build_mcp_tools(config))
    raise ConfigError(f"tools: {type(config).__name__} is no tool configuration")


def _build_search(config: WikiSearchConfig | DenseSearchConfig) -> WikiSearch | DenseSearch:
    if isinstance(config, WikiSearchConfig):
        return build_wiki_search(config)
    return build_dense_search(config)


def build_user_function(config: FunctionConfig) -> Tool:
    """The tool of a user's function, under a name that no built-in tool has."""
    tool = build_function(config)
    if tool.spec.name.lower() in {name.lower() for name in BUILT_IN}:
        raise ConfigError(
            f"{config.function}: {tool.spec.name!r} is the name of a built-in tool; "
            "give it another one with `rename`"
        )
    return tool
