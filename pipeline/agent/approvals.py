"""Approvals of calls with effects outside: the policy file, and asking on the terminal.

The file is YAML, a pattern over tool names to a decision; the first that matches wins:

    default: deny
    rules:
      git.status: allow
      git.*: ask
      files.write_*: deny
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError
from pipeline.tools.approval import ApprovalPolicy

Confirm = Callable[[str, Mapping[str, Any]], bool]


def read_approvals(path: Path, confirm: Confirm | None = None) -> ApprovalPolicy:
    """Read a policy file; raises ConfigError naming the file, the key and what is allowed."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as problem:
        raise ConfigError(f"approvals: {path} cannot be read: {problem}") from None
    if not isinstance(raw, dict) or not raw.keys() <= {"default", "rules"}:
        raise ConfigError(f"approvals: {path}: allowed keys are `default` and `rules`")
    rules = raw.get("rules") or {}
    if not isinstance(rules, dict):
        raise ConfigError(f"approvals: {path}: `rules` maps a tool pattern to a decision")
    try:
        return ApprovalPolicy(rules, raw.get("default", "deny"), confirm)
    except ValueError as problem:
        raise ConfigError(f"{path}: {problem}") from None


def ask_on_terminal(tool: str, arguments: Mapping[str, Any]) -> bool:
    """Ask a person on the terminal; without one the answer is no."""
    if not sys.stdin.isatty():
        return False
    shown = json.dumps(dict(arguments), ensure_ascii=True)[:500]
    print(f"{tool} wants to run with {shown}. Allow? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
