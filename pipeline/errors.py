"""The two kinds of failure that a user meets; everything else is a bug and propagates."""

import difflib
from collections.abc import Sequence


class ConfigError(ValueError):
    """Wrong usage or configuration: names the key, the value and what is allowed (exit code 2)."""


class WorkError(RuntimeError):
    """The work failed: says where it stopped; the same command continues (exit code 1)."""


def unknown_key(path: str, allowed: Sequence[str]) -> str:
    """Say that the key at `path` (`a.b.key`) is not known, which may be meant, and which exist."""
    close = difflib.get_close_matches(path.rpartition(".")[2], allowed, 1)
    hint = f"; did you mean `{close[0]}`?" if close else "."
    return f"unknown key `{path}`{hint} Allowed: {', '.join(allowed)}"
