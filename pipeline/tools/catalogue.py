"""The closed list of tools: configurations in, tools out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from pipeline.errors import ConfigError
from pipeline.tools.base import Tool
from pipeline.tools.calculator import Calculator, CalculatorConfig
from pipeline.tools.calendar import CalendarConfig, build_calendar
from pipeline.tools.dense import DenseSearch, DenseSearchConfig, build_dense_search
from pipeline.tools.mcp import MCPConfig, build_mcp_tools, declared_mcp_names
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
        lines = [_explain(where, dict(detail)) for detail in error.errors()]
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
    except ValueError:
        close_tools(tools)
        raise
    return tools


def declared_names(configs: Sequence[Any]) -> list[str]:
    """The names of the tools that `build_tools` would give, without building anything.

    Raises ConfigError as `build_tools` does, and for an MCP server whose tools are not known yet.
    """
    names: list[str] = []
    for index, entry in enumerate(configs):
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
            return [_build_function(config)]
        case MCPConfig():
            return list(build_mcp_tools(config))
    raise ConfigError(f"tools: {type(config).__name__} is no tool configuration")


def _build_search(config: WikiSearchConfig | DenseSearchConfig) -> WikiSearch | DenseSearch:
    if isinstance(config, WikiSearchConfig):
        return build_wiki_search(config)
    return build_dense_search(config)


def _build_function(config: FunctionConfig) -> Tool:
    tool = build_function(config)
    if tool.spec.name.lower() in {name.lower() for name in BUILT_IN}:
        raise ConfigError(
            f"{config.function}: {tool.spec.name!r} is the name of a built-in tool; "
            "give it another one with `rename`"
        )
    return tool


def _explain(where: str, detail: dict[str, Any]) -> str:
    path = ".".join([where, *(str(part) for part in detail["loc"] if part not in TOOL_NAMES)])
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        given = detail.get("input")
        name = given.get("name") if isinstance(given, dict) else given
        return f"{where}.name: {name!r} is no tool; allowed: {', '.join(TOOL_NAMES)}"
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{path}: unknown key"
    return f"{path}: {detail.get('input')!r}: {detail['msg']}"
