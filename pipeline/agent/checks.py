"""What an answer must pass before a run counts as finished: its form, and a second judge."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from pipeline.agent.policies import Policy, PolicyError, Request
from pipeline.agent.turns import Message
from pipeline.errors import ConfigError

# Gets the question, the answer and the state; returns what is missing, or None to confirm.
GoalCheck = Callable[[str, str, Sequence[Message]], str | None]
# Gets where the text comes from and the text; returns why it is blocked, or None.
Guardrail = Callable[[Literal["question", "turn", "observation"], str], str | None]


@dataclass(frozen=True)
class OutputForm:
    """The form of the final answer: a JSON Schema, or a regular expression for all of it.

    Every answer is checked; a local policy with `constrain` is also made to write it in this form
    (`agent.constrain` says in which protocols).

    Raises ConfigError when neither or both are given, or when one is not valid itself.
    """

    schema: dict[str, Any] | None = None
    pattern: str | None = None

    def __post_init__(self) -> None:
        if (self.schema is None) == (self.pattern is None):
            raise ConfigError("output: give either a JSON Schema or a regular expression")
        try:
            if self.schema is not None:
                Draft202012Validator.check_schema(self.schema)
            else:
                re.compile(self.pattern or "")
        except (SchemaError, re.error) as problem:
            raise ConfigError(f"output: not valid: {problem}") from None

    def problem(self, answer: str) -> str | None:
        """Say everything that is wrong with the form of an answer, or return None."""
        if self.pattern is not None:
            fits = re.fullmatch(self.pattern, answer.strip(), re.DOTALL)
            return None if fits else f"the answer must match {self.pattern}"
        try:
            value = json.loads(answer)
        except ValueError as problem:
            return f"the answer must be JSON: {problem}"
        errors = Draft202012Validator(self.schema or {}).iter_errors(value)
        found = [f"{'.'.join(map(str, e.path)) or 'answer'}: {e.message}" for e in errors]
        return "; ".join(sorted(found)) or None


def model_goal_check(policy: Policy, instructions: str) -> GoalCheck:
    """Make a goal check out of a model: it must begin its verdict with yes.

    Raises PolicyError when the judge cannot be asked: an unconfirmed answer is not confirmed.
    """

    def check(question: str, answer: str, state: Sequence[Message]) -> str | None:
        messages = (
            Message("system", instructions),
            Message("user", f"Question: {question}\nAnswer: {answer}\nIs the answer complete?"),
        )
        reply = policy.ask([Request(messages, protocol="direct", max_new_tokens=64)])[0]
        if isinstance(reply, PolicyError):
            raise reply
        verdict = reply.text.strip()
        return None if re.match(r"\W*yes\b", verdict, re.IGNORECASE) else verdict or "not confirmed"

    return check
