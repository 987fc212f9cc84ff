"""Why runs ended, and where to look first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.agent.limits import EXIT_REASONS
from pipeline.agent.tasks import EpisodeResult

MANY = 0.2  # share of the runs from which an exit reason is worth a sentence
FEW_STEPS = 3  # a token budget used up within so many steps was used up by results
MOSTLY = 0.6  # share of calls to one tool from which a run counts as repeating it
JUDGED = ("wrong", "unparseable")  # outcomes of function calls whose reasons say where to look
REASONS = 3  # so many of these reasons are told
REASON_SHOWN = 200  # characters of one


@dataclass(frozen=True)
class Summary:
    """All runs of one arm in figures; shares are of `n`."""

    n: int
    exit_reasons: dict[str, int]
    mean_steps: float
    mean_tokens: float
    calls: dict[str, int]
    errors: dict[str, dict[str, int]]
    flags: dict[str, int]
    diagnosis: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {**vars(self), "diagnosis": list(self.diagnosis)}


def summarise(runs: Sequence[EpisodeResult]) -> Summary:
    """Add up exit reasons, steps, tokens, calls and errors per tool, and say where to look."""
    reasons: Counter[str] = Counter(run.exit_reason for run in runs)
    errors: dict[str, Counter[str]] = {}
    for run in runs:
        for tool, kinds in run.errors.items():
            errors.setdefault(tool, Counter()).update(kinds)
    count = max(len(runs), 1)
    return Summary(
        n=len(runs),
        exit_reasons={reason: reasons[reason] for reason in EXIT_REASONS if reasons[reason]},
        mean_steps=sum(run.steps for run in runs) / count,
        mean_tokens=sum(run.tokens for run in runs) / count,
        calls=dict(sum((Counter(run.calls) for run in runs), Counter())),
        errors={tool: dict(kinds) for tool, kinds in sorted(errors.items())},
        flags=dict(sum((Counter(run.flags) for run in runs), Counter())),
        diagnosis=tuple(diagnose(runs)),
    )


def diagnose(runs: Sequence[EpisodeResult]) -> list[str]:
    """Write one sentence per exit reason that many runs share: what it points at."""
    kinds: dict[tuple[str, bool], list[EpisodeResult]] = {}
    for run in runs:
        kinds.setdefault((run.exit_reason, _silent(run)), []).append(run)
    sentences = []
    for (reason, _), ended in sorted(kinds.items(), key=lambda kind: _place(*kind[0])):
        if ended and len(ended) >= MANY * len(runs):
            where = _where(reason, ended)
            if where:
                sentences.append(f"{len(ended)} of {len(runs)} runs ended as {reason}{where}")
    return sentences


def diagnose_outcomes(found: Sequence[tuple[str, str | None]]) -> list[str]:
    """Write the most frequent reasons of calls that were judged `wrong` or could not be read."""
    reasons = Counter(
        (outcome, reason) for outcome, reason in found if outcome in JUDGED and reason
    )
    return [
        f"{outcome}, {times} of {len(found)}: {reason[:REASON_SHOWN]}"
        for (outcome, reason), times in reasons.most_common(REASONS)
    ]


def _silent(run: EpisodeResult) -> bool:
    """Whether a run reached its last step without a call, not even one that failed."""
    return run.exit_reason == "max_steps" and not run.calls and not run.errors


def _place(reason: str, silent: bool) -> tuple[int, bool]:
    return EXIT_REASONS.index(reason), silent


def _where(reason: str, ended: Sequence[EpisodeResult]) -> str | None:
    if reason == "max_steps":
        if _silent(ended[0]):
            return (
                ": no answer was submitted in their turns and no tool was called; the model did "
                f"not write the form of an answer, or was cut at its length limit "
                f"({_most_common_flag(ended)})"
            )
        tool = _repeated_tool(ended)
        if tool:
            return f", mostly calling {tool} again and again: look at what it returns"
        return ", with different tools: look at the criterion for being done"
    if reason == "token_budget":
        steps = sum(run.steps for run in ended) / len(ended)
        if steps <= FEW_STEPS:
            return f" after {steps:.1f} steps on average: the tools return too much"
        return f" after {steps:.1f} steps on average: raise the budget or lower the steps"
    if reason == "guardrail":
        named = ", ".join(run.task_id for run in ended[:5])
        return f": read a sample of the blocked runs ({named})"
    if reason == "parse_failures":
        return f": the model does not keep to the form ({_most_common_flag(ended)})"
    if reason == "model_error":
        return f": look at the endpoint ({ended[0].detail})"
    return _PLAIN.get(reason)


_PLAIN = {
    "time_budget": ": look at the infrastructure, not at the model",
    "context_overflow": ": shorten what the tools return, or use a model with a longer context",
    "repeated_action": ": the model does not use what it got; look at the observations",
    "approval_rejected": ": the task needs calls that the approval policy refuses",
    "handoff": ": look at what the agent hands over to people",
    "unexpected_stop": ": the model stops without an answer; look at its last turns",
    "tool_fatal": ": a tool's server is gone",
    "cancelled": ": these runs were interrupted and say nothing",
}


def _repeated_tool(ended: Sequence[EpisodeResult]) -> str | None:
    """Return the tool that most of these runs called most of the time."""
    favourites: Counter[str] = Counter()
    for run in ended:
        calls = sum(run.calls.values())
        tool, times = max(run.calls.items(), key=lambda item: item[1], default=("", 0))
        if calls >= 2 and times >= MOSTLY * calls:
            favourites[tool] += 1
    tool, times = favourites.most_common(1)[0] if favourites else ("", 0)
    return tool if times > len(ended) / 2 else None


def _most_common_flag(ended: Sequence[EpisodeResult]) -> str:
    flags: Counter[str] = sum((Counter(run.flags) for run in ended), Counter())
    return ", ".join(flag for flag, _ in flags.most_common(2)) or "no flag"
