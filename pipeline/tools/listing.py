"""What tools say of themselves, and what they lack to run, without opening anything they run on.

No model is loaded, no index built, no server started (but one whose tools are not pinned yet).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from pipeline.errors import ConfigError
from pipeline.tools.articles import resolve_sources
from pipeline.tools.base import MissingExtra, ToolSpec
from pipeline.tools.calculator import Calculator, CalculatorConfig
from pipeline.tools.calendar import Calendar, CalendarConfig
from pipeline.tools.catalogue import BUILT_IN, build_user_function, parse_tool_config
from pipeline.tools.dense import DenseSearchConfig, dense_search_spec
from pipeline.tools.mcp import MCPConfig, described_mcp_specs
from pipeline.tools.python import PythonConfig, python_spec
from pipeline.tools.qa import QAConfig, qa_spec
from pipeline.tools.search import WikiSearchConfig, wiki_search_spec
from pipeline.tools.translate import NO_APERTIUM, MTConfig, apertium_is_there, mt_spec
from pipeline.tools.units import Units, UnitsConfig
from pipeline.tools.user import FunctionConfig

_NO_READER = (
    "no model to read with; give `reader: {kind: causal, model: FOLDER}` in a configuration"
)


@dataclass(frozen=True)
class ListedTool:
    """A tool, and what is missing to run it as far as that shows from outside (None: nothing)."""

    spec: ToolSpec
    missing: str | None = None


def list_built_in() -> list[ListedTool]:
    """The built-in tools with their default settings; QA has none, as it lacks a reader."""
    configs = [parse_tool_config({"name": name}) for name in BUILT_IN if name != "QA"]
    listed = {tool.spec.name: tool for tool in map(_list_one, configs)}
    listed["QA"] = ListedTool(qa_spec(QAConfig.result_limit), _NO_READER)
    return [listed[name] for name in BUILT_IN]


def list_tools(entries: Sequence[Any]) -> list[ListedTool]:
    """The tools of the `tools` of a configuration, in its order.

    Raises ConfigError for a wrong entry, a function that is no tool, and a server that is not
    pinned and does not start.
    """
    listed: list[ListedTool] = []
    for index, entry in enumerate(entries):
        config = parse_tool_config(entry, f"tools.{index}")
        if isinstance(config, MCPConfig):
            missing = _library("MCP", "mcp", "mcp")
            listed += [ListedTool(spec, missing) for spec in described_mcp_specs(config)]
        else:
            listed.append(_list_one(config))
    return listed


def _list_one(config: Any) -> ListedTool:
    match config:
        case CalculatorConfig():
            return ListedTool(Calculator.spec)
        case CalendarConfig():
            return ListedTool(Calendar.spec)
        case WikiSearchConfig():
            return ListedTool(wiki_search_spec(config.result_limit), _search_lacks(config))
        case DenseSearchConfig():
            return ListedTool(dense_search_spec(config.result_limit), _search_lacks(config))
        case QAConfig():
            return ListedTool(qa_spec(config.result_limit), _search_lacks(config.search))
        case MTConfig():
            return ListedTool(mt_spec(config), _translation_lacks(config))
        case PythonConfig():
            return ListedTool(python_spec(config), _library("Python", "python", "pydantic_monty"))
        case UnitsConfig():
            return ListedTool(Units.spec, _library("Units", "units", "pint"))
        case FunctionConfig():
            return ListedTool(build_user_function(config).spec)
    raise ConfigError(f"tools: {type(config).__name__} is no tool configuration")


def _search_lacks(config: WikiSearchConfig | DenseSearchConfig) -> str | None:
    lacking = None
    if isinstance(config, DenseSearchConfig):
        lacking = _library("DenseSearch", "dense", "sentence_transformers")
    elif config.engine == "tantivy":
        lacking = _library("WikiSearch", "tantivy", "tantivy")
    try:
        resolve_sources(config.sources)
    except ConfigError as error:
        return str(error)
    return lacking


def _translation_lacks(config: MTConfig) -> str | None:
    if config.model is None and not apertium_is_there():
        return NO_APERTIUM
    return _library("MT", "mt", "py3langid")


def _library(tool: str, extra: str, module: str) -> str | None:
    return None if find_spec(module) else str(MissingExtra(tool, extra))
