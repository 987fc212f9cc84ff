"""A tool from a typed function and its docstring.

The schema follows the ecosystem's convention (`transformers.utils.get_json_schema`): the first
lines describe the tool, a Google-style `Args:` block describes every argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.tools.base import ToolSpec


class FunctionTool:
    """Wraps `function(**arguments) -> str`; it raises ToolError for a failure that is data."""

    def __init__(self, function: Callable[..., str], *, name: str = "", effects: bool = False):
        from transformers.utils import get_json_schema

        schema = get_json_schema(function)["function"]
        parameters = {"properties": {}, "required": [], **schema["parameters"]}
        self.function = function
        self.spec = ToolSpec(
            name=name or schema["name"],
            version="1",
            description=schema["description"],
            parameters={**parameters, "additionalProperties": False},
            result_limit=2000,
            effects=effects,
            cacheable=False,
        )

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """Call the function."""
        return self.function(**arguments)
