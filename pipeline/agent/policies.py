"""Policies: who decides the next turn.

A policy answers a batch of requests, one per episode, so a local model serves many episodes in
one pass. A failure that belongs to one request is a `PolicyError` in its place of the list: it
ends that run and leaves the others alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.agent import chat
from pipeline.agent.context import shorten
from pipeline.agent.parse import PROTOCOLS
from pipeline.agent.turns import Message
from pipeline.lm.jobs import Generation, Job, Source
from pipeline.tools.base import ToolSpec

if TYPE_CHECKING:
    from pipeline.agent.checks import OutputForm
    from pipeline.lm.grammar import RowMask


@dataclass(frozen=True)
class Request:
    """What a policy is asked: the state, the tools on offer, and how to decode.

    `prefix` is text with which the turn must begin (a completion model is made to continue it).
    `output` and `inline_calls` are what the loop will look for in the turn: see `tasks.Settings`.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    protocol: str = "react"
    tool_choice: str = "auto"  # auto, none, required, or the name of one tool
    stop: tuple[str, ...] = ()
    prefix: str = ""
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    step: int = 1
    task_id: str = ""
    output: OutputForm | None = None
    inline_calls: bool = False
    may_fire: bool = False  # an inline call may open here where it is merely likely


@dataclass(frozen=True)
class Reply:
    """A turn as the policy wrote it; `calls` are `(id, name, arguments)` already taken apart.

    `finish` is eos (the turn is over, or nobody knows better), stop (a stop string was reached),
    length (cut at the token limit) or filter (blocked by the endpoint).
    """

    text: str
    tokens_in: int = 0
    tokens_out: int = 0
    calls: tuple[tuple[str, str, str], ...] | None = None
    finish: str = "eos"


class PolicyError(Exception):
    """The policy cannot answer this request: the run ends as `model_error`."""


class ContextOverflow(PolicyError):
    """The state does not fit the model, even shortened: the run ends as `context_overflow`."""


class Policy(Protocol):
    """Answers a batch; the replies come in the order of the requests."""

    def ask(self, requests: Sequence[Request]) -> list[Reply | PolicyError]:
        """Decide the next turn of every request."""


Script = Sequence[str | Reply] | Callable[[Request], str | Reply]


@dataclass(frozen=True)
class ScriptedPolicy:
    """Plays a script: the n-th turn of a run is the n-th entry, or what the function returns.

    `tokens` are counted as written for every turn whose entry is plain text. A script that is
    over is a model error.
    """

    script: Script
    tokens: int = 0

    def ask(self, requests: Sequence[Request]) -> list[Reply | PolicyError]:
        """Answer from the script."""
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Reply | PolicyError:
        if callable(self.script):
            entry = self.script(request)
        else:
            turn = sum(message.role == "assistant" for message in request.messages)
            if turn >= len(self.script):
                return PolicyError(f"the script has {len(self.script)} turns and all are played")
            entry = self.script[turn]
        return entry if isinstance(entry, Reply) else Reply(entry, tokens_out=self.tokens)


Prompt = str | list[int]


class Generator(Protocol):
    """A batched generation engine; what one prompt gets does not depend on the others.

    See `lm.generation.serve`. `mask` compiles a Lark grammar; an engine that is never asked to
    constrain need not know it.
    """

    def serve(self, source: Source) -> None: ...
    def mask(self, grammar: str) -> RowMask: ...


class Asking(Protocol):
    """Where a policy that answers whoever waits gets its requests: see `desk.Desk`."""

    def take(self, busy: bool) -> list[Request]: ...
    def give(self, answered: Sequence[tuple[Request, Reply | PolicyError]]) -> None: ...


class _Once:
    """A desk with so many requests and no more."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.open = list(requests)
        self.replies: dict[int, Reply | PolicyError] = {}

    def take(self, busy: bool) -> list[Request]:
        requests, self.open = self.open, []
        return requests

    def give(self, answered: Sequence[tuple[Request, Reply | PolicyError]]) -> None:
        self.replies.update((id(request), reply) for request, reply in answered)


@dataclass(frozen=True)
class LocalPolicy:
    """A local model: requests are answered together, and new ones join while others are.

    `tokenizer` (a transformers tokenizer) gives the chat template and counts tokens; without one
    the state is rendered as plain text and never shortened. `context_tokens` is the length that
    the model can read, the new tokens included. `use_template` renders `react` and `plain`
    through the chat template too, as instruction-tuned models expect it. `constrain` makes
    malformed calls impossible (`agent.constrain` says how). `fires` is the opening token of inline
    calls and k: a tuned model opens its first call of a turn where that token is among the k most
    likely (method, section 7).
    """

    generator: Generator
    tokenizer: Any = None
    context_tokens: int | None = None
    use_template: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # for the chat template
    constrain: bool = False
    fires: tuple[int, int] | None = None

    def ask(self, requests: Sequence[Request]) -> list[Reply | PolicyError]:
        """Answer requests, in their order."""
        once = _Once(requests)
        self.serve(once)
        return [once.replies[id(request)] for request in requests]

    def serve(self, desk: Asking) -> None:
        """Answer what the desk asks until it has nothing more."""
        asked: dict[int, Request] = {}

        def source(done: Sequence[tuple[Job, Generation]], busy: bool) -> list[Job]:
            desk.give([(request := asked.pop(id(job)), _reply(request, g)) for job, g in done])
            jobs: list[Job] = []
            while requests := desk.take(busy or bool(jobs)):
                refused: list[tuple[Request, Reply | PolicyError]] = []
                for request in requests:
                    prompt = self._fit(request)
                    if isinstance(prompt, PolicyError):
                        refused.append((request, prompt))
                    else:
                        jobs.append(self._job(request, prompt))
                        asked[id(jobs[-1])] = request
                desk.give(refused)
            return jobs

        self.generator.serve(source)

    def _job(self, request: Request, prompt: Prompt) -> Job:
        mask = None
        if self.constrain:
            from pipeline.agent.constrain import turn_grammar  # which needs this module's requests

            grammar = turn_grammar(request)
            mask = None if grammar is None else self.generator.mask(grammar)
        return Job(
            prompt,
            request.max_new_tokens,
            request.stop,
            request.temperature,
            request.seed,
            mask,
            self.fires if request.may_fire else None,
        )

    def _fit(self, request: Request) -> Prompt | PolicyError:
        if self.tokenizer is None:
            return self.prompt(request, request.messages)
        room = None
        if self.context_tokens is not None:
            room = self.context_tokens - request.max_new_tokens - 1  # one for the model's first

        def fits(messages: Sequence[Message]) -> bool:
            return room is None or len(self._ids(self.prompt(request, messages))) <= room

        kept = shorten(request.messages, fits)
        if kept is None:
            return ContextOverflow(f"the state does not fit {self.context_tokens} tokens")
        prompt = self.prompt(request, kept)
        return self._ids(prompt) if self._templated(request) else prompt

    def _ids(self, prompt: str) -> list[int]:
        ids: list[int] = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return ids

    def _templated(self, request: Request) -> bool:
        if self.tokenizer is None or request.protocol == "inline":
            return False
        return self.use_template or request.protocol == "chat"

    def prompt(self, request: Request, messages: Sequence[Message]) -> str:
        """Write the prompt that the model continues."""
        module = PROTOCOLS[request.protocol]
        if not self._templated(request):
            return module.render(messages) + request.prefix
        if request.protocol == "chat":
            return self._chat_prompt(request, messages)
        head = [m for m in messages[:2] if m.role in ("system", "user")]
        steps = messages[len(head) :]
        rest = module.render(steps) if steps else ""
        text: str = self.tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in head],
            tokenize=False,
            add_generation_prompt=True,
            **self.options,
        )
        return text + rest + request.prefix

    def _chat_prompt(self, request: Request, messages: Sequence[Message]) -> str:
        wire = chat.wire_messages(messages, strings=False)
        tools = [spec.schema_for_chat() for spec in request.tools]
        template = self.tokenizer.chat_template or ""
        if tools and "tools" not in str(template):
            wire = _describe_tools(messages, tools)
            tools = []
        text: str = self.tokenizer.apply_chat_template(
            wire, tools=tools or None, tokenize=False, add_generation_prompt=True, **self.options
        )
        return text


def _describe_tools(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Write tools and calls as text, for a chat template that knows neither."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    about = f"You may call these tools:\n<tools>\n{listed}\n</tools>\n{chat.HINT}"
    wire: list[dict[str, Any]] = []
    for message in messages:
        content = message.content
        if message.role == "system":
            content = f"{content}\n\n{about}".strip()
        elif message.role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        elif message.role == "assistant":
            content = chat.assistant_text(message)
        role = "user" if message.role == "tool" else message.role
        if wire and wire[-1]["role"] == role:
            wire[-1]["content"] += "\n" + content
        else:
            wire.append({"role": role, "content": content})
    if not wire or wire[0]["role"] != "system":
        wire.insert(0, {"role": "system", "content": about})
    return wire


def _reply(request: Request, made: Generation) -> Reply | PolicyError:
    if made.finish == "context":
        return ContextOverflow("the model's context ended in the middle of the turn")
    text = request.prefix + made.text
    return Reply(text, made.tokens_in, made.tokens_out, None, made.finish)
