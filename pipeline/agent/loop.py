"""The agent loop: the model proposes, the program executes.

    results = run_episodes([Task("How much is 37 * 24?")], policy, Executor([Calculator()]))

N episodes step together: one call of the policy and one round of tools per step. An episode that
is over leaves the batch; what happens in one never touches another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pipeline.agent.episode import Episode
from pipeline.agent.policies import Policy
from pipeline.agent.tasks import EpisodeResult, Settings, Task
from pipeline.agent.toolbox import Pending, Toolbox, execute_calls
from pipeline.agent.trace import Sink
from pipeline.tools.executor import NO_DOCUMENT

DEFAULT_SETTINGS = Settings()


def run_episodes(
    tasks: Sequence[Task],
    policy: Policy,
    tools: Toolbox,
    settings: Settings = DEFAULT_SETTINGS,
    *,
    cancel: Callable[[], bool] | None = None,
    on_event: Sink | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[EpisodeResult]:
    """Run all tasks to their end; the results come in the order of the tasks.

    `cancel` is asked before every step. `on_event` gets every event as it happens; `clock` gives
    seconds for the time budget. Raises ConfigError for settings that cannot work.
    """
    episodes = [Episode(task, tools, settings, on_event, clock) for task in tasks]
    while _step(episodes, policy, cancel):
        pass
    return [episode.result() for episode in episodes]


def run_episode(
    task: Task,
    policy: Policy,
    tools: Toolbox,
    settings: Settings = DEFAULT_SETTINGS,
    *,
    cancel: Callable[[], bool] | None = None,
    on_event: Sink | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EpisodeResult:
    """Run one task; see `run_episodes`."""
    results = run_episodes(
        [task], policy, tools, settings, cancel=cancel, on_event=on_event, clock=clock
    )
    return results[0]


def _step(episodes: Sequence[Episode], policy: Policy, cancel: Callable[[], bool] | None) -> bool:
    """Take one step of every open episode; False when none is left."""
    if cancel is not None and cancel():
        for episode in episodes:
            episode.end("cancelled")
    asked = [(episode, request) for episode in episodes if (request := episode.request())]
    if not asked:
        return False
    replies = policy.ask([request for _, request in asked])
    planned = [
        (episode, episode.receive(reply))
        for (episode, _), reply in zip(asked, replies, strict=True)
    ]
    pending: list[Pending] = [
        (episode.tools, call, {**NO_DOCUMENT, **episode.task.document})
        for episode, calls in planned
        for call in calls
    ]
    executed = iter(execute_calls(pending))
    for episode, calls in planned:
        episode.observe([next(executed) for _ in calls])
    return True
