"""Fitting a long run into a context: whole steps go, oldest first; the run itself is untouched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.agent.turns import Message


def shorten(
    messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool]
) -> list[Message] | None:
    """Return the longest state that fits: head, a mark, and the newest steps; None if none does.

    A step is an assistant message with everything up to the next one, so a call is never parted
    from its result, nor running text from the result inside it. The head (system, user) stays.
    """
    head, steps = split_steps(messages)
    for dropped in range(len(steps) if steps else 1):
        kept = [message for step in steps[dropped:] for message in step]
        shown = [*head, *([_mark(dropped)] if dropped else []), *kept]
        if fits(shown):
            return shown
    return None


def split_steps(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Split a state into its head and its steps."""
    head: list[Message] = []
    steps: list[list[Message]] = []
    for message in messages:
        continues = bool(steps) and steps[-1][-1].kind == "inline"
        if message.role == "assistant" and not continues:
            steps.append([message])
        elif steps:
            steps[-1].append(message)
        else:
            head.append(message)
    return head, steps


def _mark(dropped: int) -> Message:
    return Message("user", f"({dropped} earlier steps are not shown.)", kind="nudge")
