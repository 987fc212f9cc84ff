"""What a remote tool server says, made safe: its JSON Schemas and its answers."""

from __future__ import annotations

import json
from typing import Any

from pipeline.calls import neutralise
from pipeline.errors import ConfigError


def safe_schema(schema: Any) -> Any:
    """An untrusted JSON Schema without what could harm: its texts cleaned, no regular expression
    (they can take exponential time; the server checks its own), no reference to somewhere else.
    """
    if isinstance(schema, list):
        return [safe_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    safe: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DROPPED_KEYWORDS:
            continue
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            safe[key] = {name: safe_schema(inner) for name, inner in value.items()}
        elif key in ("enum", "const", "default", "examples", "required"):
            safe[key] = value
        elif key in ("$ref", "$dynamicRef") and not str(value).startswith("#"):
            raise ConfigError(f"a JSON Schema refers to {str(value)[:80]!r}, outside of itself")
        elif isinstance(value, str) and key in ("description", "title", "$comment"):
            safe[key] = neutralise(value, 200)[0]
        else:
            safe[key] = safe_schema(value)
    return safe


_DROPPED_KEYWORDS = ("pattern", "patternProperties", "format", "$schema", "$id")
_NAMED_SCHEMAS = ("properties", "$defs", "definitions", "dependentSchemas")


def content_text(answer: Any) -> str:
    """The text of an answer: its text blocks, else its structured content; other blocks by name."""
    parts = []
    for block in answer.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and getattr(block.resource, "text", None):
            parts.append(block.resource.text)
        else:
            kind = getattr(block, "mime_type", None) or block.type
            parts.append(f"({kind})")
    if not parts and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    return "\n".join(parts)
