"""The strategies, in one table, with the settings of their papers.

    results = run_strategy("reflexion", tasks, policy, tools, settings, evaluator=right)

Every strategy runs all tasks together: the samples, trials and fall-backs of all of them are
batches too. An evaluator says whether a run was right and nothing else; no gold answer and no
reward ever reaches a prompt.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.agent.instructions import instructions_for, name_for
from pipeline.agent.loop import run_episodes
from pipeline.agent.observations import harmless
from pipeline.agent.parse import protocol_named
from pipeline.agent.policies import Policy, PolicyError, Reply, Request
from pipeline.agent.tasks import EpisodeResult, Settings, Task
from pipeline.agent.toolbox import Toolbox
from pipeline.agent.trace import Sink
from pipeline.agent.transcripts import trace_text
from pipeline.agent.turns import Message
from pipeline.errors import ConfigError

Kind = Literal["answer", "loop", "vote", "fallback", "trials", "refine"]
Evaluator = Callable[[Task, EpisodeResult], bool]

LESSON_LIMIT = 1500  # characters of one lesson in the memory
CORRECT = re.compile(r"\b(?:it is|is|looks) correct\b", re.IGNORECASE)


@dataclass(frozen=True)
class Strategy:
    """One row of the table; what each kind does is said at the function that runs it."""

    kind: Kind
    instructions: str = ""  # the kind of instruction file: standard, cot, act, react
    protocol: str = ""
    thoughts: bool = True
    samples: int = 1
    temperature: float = 0.0
    parts: tuple[str, str] = ("", "")
    trials: int = 1
    memory: int = 0  # lessons kept from earlier trials: the last ones
    reflects: bool = False
    rounds: int = 0

    @property
    def makes_calls(self) -> bool:
        """Whether a model can call tools in it."""
        return self.kind not in ("answer", "vote", "refine")


STRATEGIES: dict[str, Strategy] = {
    # Brown et al. 2020; Wei et al. 2022
    "standard": Strategy("answer", "standard", "direct"),
    "cot": Strategy("answer", "cot", "plain"),
    # Yao et al. 2023; steps: 7 for HotpotQA, 5 for FEVER (Settings.limits)
    "act": Strategy("loop", "act", "react", thoughts=False),
    "react": Strategy("loop", "react", "react"),
    # Wang et al. 2022, with the n and the temperature of Yao et al.
    "cot_sc": Strategy("vote", "cot", "plain", samples=21, temperature=0.7),
    "react_then_cot_sc": Strategy("fallback", parts=("react", "cot_sc")),
    "cot_sc_then_react": Strategy("fallback", parts=("cot_sc", "react")),
    # Shinn et al. 2023; memory of the last 1-3
    "reflexion": Strategy("trials", "react", "react", trials=5, memory=3, reflects=True),
    "last_trajectory_memory": Strategy("trials", "react", "react", trials=5, memory=1),
    # Madaan et al. 2023; no outside signal
    "self_refine": Strategy("refine", "cot", "plain", rounds=4),
}


@dataclass(frozen=True)
class StrategyResult:
    """What a strategy made of a task: `final` is the run that counts, `runs` are all of them.

    `answer` is set only when one was submitted. `path` names the part that gave it, `votes` the
    votes per answer. `tokens_in` and `tokens_out` hold reflections and feedback as well.
    """

    strategy: str
    task_id: str
    final: EpisodeResult
    runs: tuple[EpisodeResult, ...]
    answer: str | None
    exit_reason: str
    path: str
    votes: dict[str, int] = field(default_factory=dict)
    lessons: tuple[str, ...] = ()
    extra_tokens: tuple[int, int] = (0, 0)

    @property
    def steps(self) -> int:
        """Steps of all runs."""
        return sum(run.steps for run in self.runs)

    @property
    def tokens_in(self) -> int:
        """Tokens read by the model, in all runs and between them."""
        return sum(run.tokens_in for run in self.runs) + self.extra_tokens[0]

    @property
    def tokens_out(self) -> int:
        """Tokens written by the model, in all runs and between them."""
        return sum(run.tokens_out for run in self.runs) + self.extra_tokens[1]

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON, with the runs."""
        return {
            "strategy": self.strategy,
            "task_id": self.task_id,
            "answer": self.answer,
            "exit_reason": self.exit_reason,
            "path": self.path,
            "steps": self.steps,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "votes": self.votes,
            "lessons": list(self.lessons),
            "runs": [run.as_dict() for run in self.runs],
        }


@dataclass(frozen=True)
class _Setup:
    """What all parts of one call of `run_strategy` share."""

    policy: Policy
    tools: Toolbox
    settings: Settings
    family: str
    evaluator: Evaluator | None
    sink: Sink | None
    cancel: Callable[[], bool] | None

    def run(self, strategy: Strategy, tasks: Sequence[Task]) -> list[EpisodeResult]:
        settings = strategy_settings(strategy, self.settings, self.family)
        return run_episodes(
            tasks, self.policy, self.tools, settings, cancel=self.cancel, on_event=self.sink
        )


def run_strategy(
    name: str,
    tasks: Sequence[Task],
    policy: Policy,
    tools: Toolbox,
    settings: Settings | None = None,
    *,
    strategy: Strategy | None = None,
    family: str = "",
    evaluator: Evaluator | None = None,
    on_event: Sink | None = None,
    cancel: Callable[[], bool] | None = None,
) -> list[StrategyResult]:
    """Run all tasks by a strategy of the table, or by `strategy` under that name.

    `settings` gives limits, decoding and the protocol of the loop strategies; `family` picks
    instruction files (`hotpot`: `hotpot-react-v1`). Raises ConfigError for an unknown strategy,
    and for one that needs an `evaluator` and has none.
    """
    chosen = strategy or strategy_named(name)
    if chosen.kind == "trials" and evaluator is None:
        raise ConfigError(f"strategy {name}: an evaluator has to say which runs were right")
    setup = _Setup(policy, tools, settings or Settings(), family, evaluator, on_event, cancel)
    run = {
        "answer": _run_once,
        "loop": _run_once,
        "vote": _run_vote,
        "fallback": _run_fallback,
        "trials": _run_trials,
        "refine": _run_refine,
    }[chosen.kind]
    return run(name, chosen, tasks, setup)


def strategy_named(name: str) -> Strategy:
    """Return a strategy of the table; raises ConfigError naming the ones there are."""
    if name not in STRATEGIES:
        raise ConfigError(f"strategy {name!r} is not one of: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def strategy_settings(strategy: Strategy, settings: Settings, family: str = "") -> Settings:
    """The loop settings of one strategy: its instructions, protocol and temperature."""
    if not strategy.makes_calls:
        limits = replace(settings.limits, max_steps=1, max_parse_failures=1)
        return replace(
            settings,
            protocol=strategy.protocol,
            instructions=instructions_for(strategy.instructions, family),
            limits=limits,
            tool_choice="none",
            inline_calls=False,
            temperature=strategy.temperature or settings.temperature,
        )
    protocol = settings.protocol if strategy.thoughts else strategy.protocol
    return replace(
        settings,
        protocol=protocol,
        instructions=settings.instructions or instructions_for(_kind(strategy, protocol), family),
        thoughts=strategy.thoughts,
    )


def _kind(strategy: Strategy, protocol: str) -> str:
    """The kind of instruction file with which a strategy runs in a protocol."""
    in_loop = strategy.kind in ("loop", "trials") and strategy.thoughts
    return protocol if in_loop and protocol != "react" else strategy.instructions


def instruction_names(name: str, protocol: str, family: str, inline_calls: bool) -> set[str]:
    """The instruction files that a strategy reads; raises ConfigError for an unknown one."""
    strategy = strategy_named(name)
    if strategy.kind == "fallback":
        parts = (instruction_names(p, protocol, family, inline_calls) for p in strategy.parts)
        return set().union(*parts)
    kinds = [_kind(strategy, protocol)]
    kinds += ["reflect"] if strategy.reflects else []
    kinds += ["feedback", "refine"] if strategy.kind == "refine" else []
    kinds += ["within"] if inline_calls and strategy.kind in ("loop", "trials") else []
    return {name_for(kind, "" if kind == "within" else family) for kind in kinds}


def _run_once(
    name: str, strategy: Strategy, tasks: Sequence[Task], setup: _Setup
) -> list[StrategyResult]:
    """One run per task: an answer without tools, or the loop."""
    return [_single(name, name, [run]) for run in setup.run(strategy, tasks)]


def _run_vote(
    name: str, strategy: Strategy, tasks: Sequence[Task], setup: _Setup
) -> list[StrategyResult]:
    """Self-consistency: n sampled answers, the most frequent one wins, the earliest of equals."""
    samples = [
        replace(task, task_id=f"{task.task_id}#{n}", seed=task.seed * strategy.samples + n)
        for task in tasks
        for n in range(strategy.samples)
    ]
    runs = setup.run(strategy, samples)
    results = []
    for index, task in enumerate(tasks):
        own = runs[index * strategy.samples : (index + 1) * strategy.samples]
        votes = Counter(fold_answer(run.answer) for run in own if run.answer is not None)
        winner = votes.most_common(1)[0][0] if votes else None
        final = next(
            (run for run in own if run.answer is not None and fold_answer(run.answer) == winner),
            own[0],
        )
        result = _single(name, name, own, final)
        results.append(replace(result, task_id=task.task_id, votes=dict(votes)))
    return results


def _run_fallback(
    name: str, strategy: Strategy, tasks: Sequence[Task], setup: _Setup
) -> list[StrategyResult]:
    """Two strategies: the second where the first gave no answer, or no majority.

    After `react`: no answer within the steps. After `cot_sc`: the winning answer has fewer than
    n/2 votes.
    """
    first, second = strategy.parts
    results = run_strategy_part(first, tasks, setup)
    open_indices = [i for i, result in enumerate(results) if _unsure(result, STRATEGIES[first])]
    again = run_strategy_part(second, [tasks[i] for i in open_indices], setup)
    for index, other in zip(open_indices, again, strict=True):
        earlier = results[index]
        results[index] = replace(
            other, runs=(*earlier.runs, *other.runs), votes=other.votes or earlier.votes
        )
    return [replace(result, strategy=name) for result in results]


def run_strategy_part(name: str, tasks: Sequence[Task], setup: _Setup) -> list[StrategyResult]:
    """Run one part of a fall-back."""
    strategy = STRATEGIES[name]
    run = _run_vote if strategy.kind == "vote" else _run_once
    return run(name, strategy, tasks, setup)


def _unsure(result: StrategyResult, strategy: Strategy) -> bool:
    if strategy.kind == "vote":
        return max(result.votes.values(), default=0) < strategy.samples / 2
    return result.answer is None


def _run_trials(
    name: str, strategy: Strategy, tasks: Sequence[Task], setup: _Setup
) -> list[StrategyResult]:
    """Try again with a memory: verbal reflections (reflexion) or the last trajectory itself.

    A task is over when the evaluator says that a run was right, or after the last trial. The
    memory holds the last `memory` lessons.
    """
    assert setup.evaluator is not None
    runs: list[list[EpisodeResult]] = [[] for _ in tasks]
    lessons: list[list[str]] = [[] for _ in tasks]
    extra = [(0, 0)] * len(tasks)
    open_tasks = list(range(len(tasks)))
    for trial in range(1, strategy.trials + 1):
        trying = [_remembering(tasks[i], trial, lessons[i], strategy) for i in open_tasks]
        made = setup.run(strategy, trying)
        for index, run in zip(open_tasks, made, strict=True):
            runs[index].append(run)
        open_tasks = [i for i in open_tasks if not setup.evaluator(tasks[i], runs[i][-1])]
        if trial == strategy.trials or not open_tasks:
            break
        failed = [runs[i][-1] for i in open_tasks]
        learned = (
            _reflect(setup, failed) if strategy.reflects else [trace_text(run) for run in failed]
        )
        for index, lesson in zip(list(open_tasks), learned, strict=True):
            if isinstance(lesson, PolicyError):
                open_tasks.remove(index)
            elif isinstance(lesson, Reply):
                lessons[index].append(_lesson_text(lesson))
                extra[index] = _add(extra[index], lesson)
            else:
                lessons[index].append(lesson)
    return [
        replace(
            _single(name, name, own),
            task_id=task.task_id,
            lessons=tuple(learned),
            extra_tokens=tokens,
        )
        for task, own, learned, tokens in zip(tasks, runs, lessons, extra, strict=True)
    ]


def _remembering(task: Task, trial: int, lessons: Sequence[str], strategy: Strategy) -> Task:
    kept = tuple(lessons[-strategy.memory :]) if strategy.memory else ()
    return replace(task, task_id=f"{task.task_id}@{trial}", memory=(*task.memory, *kept))


def _reflect(setup: _Setup, failed: Sequence[EpisodeResult]) -> list[Reply | PolicyError]:
    """Ask the model what went wrong in its own runs; it is told only that they did not succeed."""
    instructions = instructions_for("reflect", setup.family)
    attempts = [f"{trace_text(run)}\n\nThis attempt did not succeed." for run in failed]
    return _ask(setup, instructions, attempts, "Reflection:")


def _run_refine(
    name: str, strategy: Strategy, tasks: Sequence[Task], setup: _Setup
) -> list[StrategyResult]:
    """Draft, own feedback, better draft, until the feedback is content or the rounds are over."""
    runs = [[run] for run in setup.run(strategy, tasks)]
    extra = [(0, 0)] * len(tasks)
    notes: list[list[str]] = [[] for _ in tasks]
    open_tasks = [i for i, own in enumerate(runs) if own[-1].answer is not None]
    for _ in range(strategy.rounds):
        drafts = [_draft(tasks[i], runs[i]) for i in open_tasks]
        asked = _ask(setup, instructions_for("feedback", setup.family), drafts, "Feedback:")
        going = []
        for index, reply in zip(open_tasks, asked, strict=True):
            if isinstance(reply, PolicyError):
                continue
            extra[index] = _add(extra[index], reply)
            notes[index].append(_lesson_text(reply))
            if not CORRECT.search(notes[index][-1]):
                going.append(index)
        open_tasks = going
        if not open_tasks:
            break
        better = replace(strategy, instructions="refine")
        refined = setup.run(better, [_refining(tasks[i], runs[i], notes[i]) for i in open_tasks])
        for index, run in zip(open_tasks, refined, strict=True):
            runs[index].append(run)
    return [
        replace(
            _single(name, name, own, _last_answered(own)),
            task_id=task.task_id,
            lessons=tuple(said),
            extra_tokens=tokens,
        )
        for task, own, said, tokens in zip(tasks, runs, notes, extra, strict=True)
    ]


def _last_answered(runs: Sequence[EpisodeResult]) -> EpisodeResult:
    return next((run for run in reversed(runs) if run.answer is not None), runs[-1])


def _draft(task: Task, runs: Sequence[EpisodeResult]) -> str:
    return f"{task.heading}: {task.question}\nDraft: {_last_answered(runs).answer}"


def _refining(task: Task, runs: Sequence[EpisodeResult], notes: Sequence[str]) -> Task:
    draft = _last_answered(runs).answer
    question = f"{task.question}\nDraft: {draft}\nFeedback: {notes[-1]}\nGive a better answer."
    return replace(task, question=question, task_id=f"{task.task_id}~{len(runs)}")


def _ask(
    setup: _Setup, instructions: str, texts: Sequence[str], prefix: str
) -> list[Reply | PolicyError]:
    """Ask for free text, all in one batch."""
    requests = [
        Request(
            (Message("system", instructions), Message("user", text)),
            protocol="direct",
            stop=protocol_named("direct").STOP,
            prefix=prefix,
            max_new_tokens=setup.settings.max_new_tokens,
        )
        for text in texts
    ]
    return setup.policy.ask(requests) if requests else []


def _lesson_text(reply: Reply) -> str:
    """Take the text without the prefix it was made to begin with, and make it harmless."""
    said = re.sub(r"^\s*(?:Reflection|Feedback):", "", reply.text)
    return harmless(" ".join(said.split()), LESSON_LIMIT)


def _single(
    name: str, path: str, runs: Sequence[EpisodeResult], final: EpisodeResult | None = None
) -> StrategyResult:
    last = final or runs[-1]
    return StrategyResult(
        name, last.task_id, last, tuple(runs), last.answer, last.exit_reason, path
    )


def _add(tokens: tuple[int, int], reply: Reply) -> tuple[int, int]:
    return tokens[0] + reply.tokens_in, tokens[1] + reply.tokens_out


def fold_answer(answer: str) -> str:
    """Fold what does not make another answer: case, punctuation at the ends, spaces, articles."""
    text = " ".join(answer.casefold().split()).strip(string.punctuation + " ")
    return re.sub(r"^(?:a|an|the) ", "", text)
