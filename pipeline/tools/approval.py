"""Who may do what: the approval policy for tools with effects outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

Decision = Literal["allow", "deny", "ask"]


@dataclass(frozen=True)
class ApprovalPolicy:
    """A decision per tool pattern; the first rule that matches wins, without one: `default`.

    `rules` maps shell patterns over tool names (`git.*`, `files.write_*`, matched without regard
    to case) to allow, deny or ask. `ask` calls `confirm(tool, arguments)`; without a `confirm`
    the answer is no. Raises ValueError for an unknown decision.
    """

    rules: Mapping[str, Decision] = field(default_factory=dict)
    default: Decision = "deny"
    confirm: Callable[[str, Mapping[str, Any]], bool] | None = None

    def __post_init__(self) -> None:
        for pattern, decision in [*self.rules.items(), ("default", self.default)]:
            if decision not in get_args(Decision):
                allowed = ", ".join(get_args(Decision))
                raise ValueError(f"approval.{pattern}: {decision!r}. Allowed: {allowed}")

    def refusal(self, tool: str, arguments: Mapping[str, Any]) -> str | None:
        """Why the call may not run, or None when it may."""
        decision, rule = self.default, "the default"
        for pattern, wanted in self.rules.items():
            if fnmatchcase(tool.lower(), pattern.lower()):
                decision, rule = wanted, f"the rule {pattern!r}"
                break
        if decision == "allow":
            return None
        if decision == "deny":
            return f"{tool} is denied by {rule} of the approval policy"
        if self.confirm is None:
            return f"{tool} needs a confirmation ({rule}) and nobody can be asked here"
        return None if self.confirm(tool, arguments) else f"{tool} was not confirmed"
