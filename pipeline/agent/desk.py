"""The desk between episodes and the model: what they ask goes out, what is answered comes in.

An episode is in one of three places: ready to ask, with the model, or waiting for its tools, which
run in threads meanwhile. Episodes change in the caller's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from pipeline.agent.episode import Episode
from pipeline.agent.policies import PolicyError, Reply, Request
from pipeline.agent.toolbox import Pending, execute_calls, needs_caller, start_calls
from pipeline.tools.executor import NO_DOCUMENT, Execution

Answered = Sequence[tuple[Request, Reply | PolicyError]]


class Desk:
    """The episodes of one batch. `cancel` is asked before every step."""

    def __init__(
        self, episodes: Sequence[Episode], cancel: Callable[[], bool] | None = None
    ) -> None:
        self.cancel = cancel
        self.ready = list(episodes)
        self.asked: dict[int, Episode] = {}
        self.running: dict[Future[list[Execution]], Episode] = {}
        self._order = {id(episode): place for place, episode in enumerate(episodes)}

    def take(self, busy: bool) -> list[Request]:
        """What can be asked now, in the order of the episodes.

        Somebody who is not `busy` waits until there is something: nothing means that all episodes
        are over or with the model.
        """
        while True:
            self._observe([future for future in self.running if future.done()])
            requests = self._requests()
            if requests or busy or not self.running:
                return requests
            wait(self.running, return_when=FIRST_COMPLETED)

    def take_all(self) -> list[Request]:
        """What is to be asked when all tools are done."""
        while self.ready or self.running:
            self._observe(list(self.running))
            if requests := self._requests():
                return requests
        return []

    def give(self, answered: Answered) -> None:
        """Hand in replies; the tools that they call are started."""
        for request, reply in answered:
            episode = self.asked.pop(id(request))
            pending: list[Pending] = [
                (episode.tools, call, {**NO_DOCUMENT, **episode.task.document})
                for call in episode.receive(reply)
            ]
            if pending and not needs_caller(pending):
                self.running[start_calls(pending, len(self._order))] = episode
            else:
                episode.observe(execute_calls(pending))
                self.ready.append(episode)

    def _observe(self, done: Sequence[Future[list[Execution]]]) -> None:
        for future in done:
            episode = self.running.pop(future)
            episode.observe(future.result())
            self.ready.append(episode)

    def _requests(self) -> list[Request]:
        ready = sorted(self.ready, key=lambda episode: self._order[id(episode)])
        self.ready = []
        if ready and self.cancel is not None and self.cancel():
            for episode in ready:
                episode.end("cancelled")
        requests = []
        for episode in ready:
            request = episode.request()
            if request is not None:
                self.asked[id(request)] = episode
                requests.append(request)
        return requests
