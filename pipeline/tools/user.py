"""A user's own Python function as a tool: typed, with a docstring, named by `path.py:function`.

The schema comes from `transformers.utils.get_json_schema`, so the function needs a type for each
argument and a docstring with an `Args:` section. Calls run in a worker process that is killed at
the time limit; a crash or an endless loop costs one call.

    def population(city: str) -> int:
        \"\"\"
        Looks up how many people live in a city.

        Args:
            city: The name of the city.
        \"\"\"
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import ConfigError
from pipeline.tools.base import STRICT, ToolError, ToolSpec, content_version

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FunctionConfig:
    """A function of the user's. `function` is `path.py:name`; `rename` gives the tool's name.

    `cache: false` is for a function whose answer changes with time; `effects: true` for one that
    changes something outside, which then needs an approval policy.
    """

    __pydantic_config__ = STRICT

    function: str
    name: Literal["Function"] = "Function"
    rename: str | None = None
    timeout_s: float = 10.0
    result_limit: int = 200
    cache: bool = True
    effects: bool = False


class FunctionTool:
    """Calls the function; what it raises is a failure of kind `exception`."""

    def __init__(self, path: Path, function: str, spec: ToolSpec) -> None:
        self.path = path
        self.function = function
        self.spec = spec

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """The function's return value as text: a string as it is, the rest as JSON."""
        try:
            value = load_function(self.path, self.function)(**arguments)
            text = _as_text(value)
        except BaseException as error:  # also what would end the process: it is the worker's
            log.info("%s raised", self.spec.name, exc_info=True)
            message = f"{self.spec.name}: {type(error).__name__}: {_words_of(error)}"
            raise ToolError("exception", message) from None
        if value is None:
            raise ToolError("no_result", f"{self.spec.name} returned nothing")
        return text


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return str(value)  # of a class of their own too
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _words_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be made)"


def build_function(config: FunctionConfig) -> FunctionTool:
    """The tool of a function; raises ConfigError that names the function and what is missing."""
    path, function = _split(config.function)
    called = _load_or_refuse(path, function, config.function)
    _refuse_unusable(called, config.function)
    schema = _schema(called, config.function)
    name = config.rename or schema["name"]
    if not name.replace("_", "a").replace("-", "a").isalnum() or not (name[0] + "a").isidentifier():
        raise ConfigError(f"{config.function}: {name!r} is no name for a tool; use letters and _")
    spec = ToolSpec(
        name=name,
        version=content_version("1", path.read_text(encoding="utf-8"), function),
        description=schema["description"],
        parameters={**schema["parameters"], "additionalProperties": False},
        result_limit=config.result_limit,
        timeout_s=config.timeout_s,
        effects=config.effects,
        isolated=True,
        cacheable=config.cache and not config.effects,
    )
    return FunctionTool(path, function, spec)


@lru_cache(maxsize=64)
def load_function(path: Path, function: str) -> Callable[..., Any]:
    """Import the file (its folder comes first in the path, as when it is run) and find the name."""
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    module_name = f"callsieve_user_{path.stem}_{digest}"
    module = sys.modules.get(module_name)
    if module is None:
        found = importlib.util.spec_from_file_location(module_name, path)
        assert found is not None and found.loader is not None  # the path ends in .py
        module = importlib.util.module_from_spec(found)
        sys.modules[module_name] = module
        sys.path.insert(0, str(path.parent))
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
        finally:
            sys.path.remove(str(path.parent))
    called: Callable[..., Any] = getattr(module, function)
    return called


def _split(reference: str) -> tuple[Path, str]:
    file, colon, function = reference.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        raise ConfigError(f"function: {reference!r} is not of the form path.py:function")
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"function: {reference!r}: there is no file {file!r}")
    return path, function


def _load_or_refuse(path: Path, function: str, reference: str) -> Callable[..., Any]:
    try:
        called = load_function(path, function)
    except AttributeError as error:
        if f"no attribute {function!r}" not in str(error):
            raise ConfigError(f"{reference}: the file raises {error!r}") from error
        raise ConfigError(f"{reference}: the file has no function {function!r}") from None
    except Exception as error:
        raise ConfigError(f"{reference}: the file raises {error!r}") from error
    if not inspect.isfunction(called):
        raise ConfigError(f"{reference}: is a {type(called).__name__}, not a function")
    return called


def _refuse_unusable(called: Callable[..., Any], reference: str) -> None:
    """What no call with named arguments could serve."""
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigError(f"{reference}: is async; offer a plain function that waits itself")
    if inspect.isgeneratorfunction(called):
        raise ConfigError(f"{reference}: is a generator; return one value instead of yielding")
    untyped = []
    for name, parameter in inspect.signature(called).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{reference}: takes *{name}; name every argument")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{reference}: {name!r} is positional only; remove the `/`")
        if parameter.annotation is parameter.empty:
            untyped.append(name)
    if untyped:
        listed = ", ".join(untyped)
        raise ConfigError(f"{reference}: no type for {listed}; write for example {untyped[0]}: str")
    if not (called.__doc__ or "").strip():
        raise ConfigError(
            f"{reference}: no docstring; say what it does in one sentence and describe each "
            "argument under `Args:`"
        )


def _schema(called: Callable[..., Any], reference: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    try:
        schema: dict[str, Any] = get_json_schema(called)["function"]
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(f"{reference}: {error}") from None
    return schema
