"""The `plain` protocol: think, then one answer, and no tools (chain of thought).

The answer stands on the line of the last `Answer:` (or `Final Answer:`). See `direct` for turns
without a thought.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from pipeline.agent.turns import Message, Turn

STOP: tuple[str, ...] = ("\nQuestion:", "\nClaim:")
HINT = "End with a line `Answer: answer`."

ANSWER = re.compile(r"\b(?:Final )?Answer[ \t]*:[ \t]*", re.IGNORECASE)
_NEXT = re.compile(r"^\s*(?:Question|Claim)[ \t]*\d*[ \t]*:", re.IGNORECASE | re.MULTILINE)


def parse(text: str, tools: Collection[str] | None = None) -> Turn:
    """Read one turn; without an `Answer:` it is a parse failure, never an answer."""
    kept = cut(text)
    marks = list(ANSWER.finditer(kept))
    answer = kept[marks[-1].end() :].strip().split("\n")[0].strip() if marks else ""
    if answer:
        return Turn(kept.strip(), answer=answer)
    return Turn(kept.strip(), flags=("parse_failure",), errors=("no `Answer:` in it",))


def render(messages: Sequence[Message]) -> str:
    """Write the state as one text, ready to be continued."""
    return "".join(
        message.content + ("\n" if message.role == "assistant" else "\n\n") for message in messages
    ).rstrip("\n") + "\n" * bool(messages)


def cut(text: str) -> str:
    """Drop the next question, if the model went on with one."""
    following = _NEXT.search(text)
    return text[: following.start()] if following else text
