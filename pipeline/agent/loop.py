"""The agent loop: the model proposes, the program executes.

    results = run_episodes([Task("How much is 37 * 24?")], policy, Executor([Calculator()]))

N episodes run together, and what happens in one never touches another. A local model answers
whoever waits: an episode asks again as soon as its tools are done, while others are still being
answered, and leaves the batch when it is over. Other policies answer in rounds, one turn of every
open episode each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pipeline.agent.desk import Desk
from pipeline.agent.episode import Episode
from pipeline.agent.policies import LocalPolicy, Policy
from pipeline.agent.tasks import EpisodeResult, Settings, Task
from pipeline.agent.toolbox import Toolbox
from pipeline.agent.trace import Sink

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
    desk = Desk(episodes, cancel)
    if isinstance(policy, LocalPolicy):
        policy.serve(desk)
    else:
        while requests := desk.take_all():
            desk.give(list(zip(requests, policy.ask(requests), strict=True)))
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
