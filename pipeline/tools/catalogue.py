"""The closed list of tools: configurations in, tools out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from pipeline.errors import ConfigError
from pipeline.tools.base import Tool
from pipeline.tools.calculator import Calculator, CalculatorConfig
from pipeline.tools.calendar import CalendarConfig, build_calendar
from pipeline.tools.search import WikiSearchConfig, build_wiki_search
from pipeline.tools.user import FunctionConfig, build_function

ToolConfig = Annotated[
    CalculatorConfig | CalendarConfig | WikiSearchConfig | FunctionConfig,
    Field(discriminator="name"),
]

# The built-in tools; `Function` stands for a function of the user's.
BUILT_IN = ("Calculator", "Calendar", "WikiSearch")
TOOL_NAMES = (*BUILT_IN, "Function")

_ADAPTER: TypeAdapter[Any] = TypeAdapter(ToolConfig)


def parse_tool_config(raw: Mapping[str, Any], where: str = "tools") -> Any:
    """Read one entry of `tools:` strictly; raises ConfigError with the key and what is allowed."""
    try:
        return _ADAPTER.validate_json(json.dumps(dict(raw), ensure_ascii=False, default=str))
    except ValidationError as error:
        lines = [_explain(where, dict(detail)) for detail in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def build_tools(configs: Sequence[Any]) -> list[Tool]:
    """The tools of a configuration, in its order; an entry is a mapping or a config dataclass.

    Raises ConfigError for an unknown tool or key, and when two tools share a name.
    """
    tools: list[Tool] = []
    for index, entry in enumerate(configs):
        config = entry if is_dataclass(entry) else parse_tool_config(entry, f"tools.{index}")
        tools.extend(_build(config))
    seen: set[str] = set()
    for tool in tools:
        if tool.spec.name.lower() in seen:
            raise ConfigError(f"tools: two tools are called {tool.spec.name!r}; rename one")
        seen.add(tool.spec.name.lower())
    return tools


def _build(config: Any) -> list[Tool]:
    match config:
        case CalculatorConfig():
            return [Calculator()]
        case CalendarConfig():
            return [build_calendar(config)]
        case WikiSearchConfig():
            return [build_wiki_search(config)]
        case FunctionConfig():
            tool = build_function(config)
            if tool.spec.name.lower() in {name.lower() for name in BUILT_IN}:
                raise ConfigError(
                    f"{config.function}: {tool.spec.name!r} is the name of a built-in tool; "
                    "give it another one with `rename`"
                )
            return [tool]
    raise ConfigError(f"tools: {type(config).__name__} is no tool configuration")


def _explain(where: str, detail: dict[str, Any]) -> str:
    path = ".".join([where, *(str(part) for part in detail["loc"] if part not in TOOL_NAMES)])
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        given = detail.get("input")
        name = given.get("name") if isinstance(given, dict) else given
        return f"{where}.name: {name!r} is no tool; allowed: {', '.join(TOOL_NAMES)}"
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{path}: unknown key"
    return f"{path}: {detail.get('input')!r}: {detail['msg']}"
