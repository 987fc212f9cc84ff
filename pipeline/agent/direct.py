"""The `direct` protocol: the prompt ends with `Answer:` and the first line of the turn is it."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.agent import plain
from pipeline.agent.turns import Turn

STOP = plain.STOP
HINT = "Write the answer on one line."
render = plain.render


def parse(text: str, tools: Collection[str] | None = None) -> Turn:
    """Read a turn; its first line that is not empty is the answer."""
    kept = plain.ANSWER.sub("", plain.cut(text).strip(), count=1)
    lines = [line.strip() for line in kept.split("\n") if line.strip()]
    if lines:
        return Turn(f"Answer: {lines[0]}", answer=lines[0])
    return Turn("", flags=("parse_failure",), errors=("the answer is empty",))
