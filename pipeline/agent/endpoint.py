"""A policy behind an OpenAI-compatible endpoint, through the `openai` client.

Structured calls go through the chat API with `tools=`. The text protocols go through it as well
(observations as user messages with a stop string), or through the completions API, which is what
`inline` needs: a chat endpoint cannot continue a text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipeline.agent import chat
from pipeline.agent.parse import PROTOCOLS
from pipeline.agent.policies import ContextOverflow, PolicyError, Reply, Request
from pipeline.agent.turns import Message
from pipeline.errors import ConfigError, WorkError

if TYPE_CHECKING:
    import openai

Api = Literal["chat", "completions"]

_FINISH = {"length": "length", "content_filter": "filter"}


@dataclass(frozen=True)
class EndpointPolicy:
    """Asks `model` of an endpoint; the requests of a batch go out `workers` at a time.

    An endpoint that is down, too slow or answers with an error gives a PolicyError for that
    request; a state that is too long for the model gives a ContextOverflow.
    """

    client: openai.OpenAI
    model: str
    api: Api = "chat"
    workers: int = 8

    def ask(self, requests: Sequence[Request]) -> list[Reply | PolicyError]:
        """Decide the next turn of every request, in their order."""
        with ThreadPoolExecutor(max(1, min(self.workers, len(requests)))) as threads:
            return list(threads.map(self._one, requests))

    def _one(self, request: Request) -> Reply | PolicyError:
        import openai

        if request.protocol == "inline" and self.api == "chat":
            raise ConfigError("the protocol inline needs api='completions': a chat cannot continue")
        try:
            return self._complete(request) if self.api == "completions" else self._chat(request)
        except openai.APIStatusError as error:
            code = getattr(error, "code", None)
            message = f"the endpoint answered {error.status_code}: {error.message[:300]}"
            overflow = code == "context_length_exceeded" or "context length" in error.message
            return ContextOverflow(message) if overflow else PolicyError(message)
        except openai.APITimeoutError:
            return PolicyError(f"the endpoint did not answer within {self.client.timeout} s")
        except openai.APIConnectionError as error:
            return PolicyError(f"the endpoint cannot be reached: {error.__cause__ or error}")
        except (openai.APIError, json.JSONDecodeError) as error:
            return PolicyError(f"the endpoint's answer cannot be read: {str(error)[:300]}")

    def _chat(self, request: Request) -> Reply | PolicyError:
        options: dict[str, Any] = {}
        if request.protocol == "chat":
            messages = chat.wire_messages(request.messages, strings=True)
            if request.tools:
                options["tools"] = [spec.schema_for_chat() for spec in request.tools]
                options["tool_choice"] = _tool_choice(request.tool_choice)
        else:
            messages = _transcript(request.messages)
            options["stop"] = list(request.stop)
        answer = self.client.chat.completions.create(
            model=self.model,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            seed=request.seed,
            **options,
        )
        if isinstance(answer, str) or not answer.choices:
            return PolicyError("the endpoint's answer holds no choice")
        choice = answer.choices[0]
        calls = [
            (call.id, call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or []
            if call.type == "function"
        ]
        return Reply(
            cut_at_stop(choice.message.content or "", request.stop),
            answer.usage.prompt_tokens if answer.usage else 0,
            answer.usage.completion_tokens if answer.usage else 0,
            tuple(calls) or None,
            _FINISH.get(choice.finish_reason or "", "eos"),
        )

    def _complete(self, request: Request) -> Reply | PolicyError:
        prompt = PROTOCOLS[request.protocol].render(request.messages) + request.prefix
        answer = self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop=list(request.stop),
        )
        if isinstance(answer, str) or not answer.choices:
            return PolicyError("the endpoint's answer holds no choice")
        choice = answer.choices[0]
        return Reply(
            request.prefix + cut_at_stop(choice.text, request.stop),
            answer.usage.prompt_tokens if answer.usage else 0,
            answer.usage.completion_tokens if answer.usage else 0,
            None,
            _FINISH.get(choice.finish_reason or "", "eos"),
        )


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Drop a stop string and what follows: some servers return it, or go on after it.

    A stop string that begins with a line break may have met the end of the prompt, so it counts
    at the beginning of the text without it.
    """
    ends = [text.find(one) for one in stop]
    ends += [0 for one in stop if one != one.lstrip() and text.startswith(one.lstrip())]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def connect(
    base_url: str,
    model: str,
    *,
    api_key: str | None = None,
    api: Api = "chat",
    timeout_s: float = 60.0,
    retries: int = 2,
    workers: int = 8,
) -> EndpointPolicy:
    """Make a policy for an endpoint; the key comes from OPENAI_API_KEY unless it is given.

    Raises ConfigError when the `openai` client is not installed.
    """
    try:
        import openai
    except ImportError:
        raise ConfigError(
            "an endpoint needs the openai client: "
            "pip install -e '.[openai]' in the project's folder"
        ) from None
    key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
    client = openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout_s, max_retries=retries)
    return EndpointPolicy(client, model, api, workers)


def first_model(policy: EndpointPolicy) -> str:
    """Ask the endpoint for its models and return the first; raises WorkError when it cannot."""
    import openai

    try:
        return next(iter(policy.client.models.list())).id
    except (openai.APIError, StopIteration) as problem:
        address = policy.client.base_url
        raise WorkError(f"the endpoint {address} names no model: {problem!r}") from None


def _tool_choice(choice: str) -> Any:
    if choice in ("auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}


def _transcript(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Write a run of a text protocol as a chat: what came from outside is the user's."""
    wire: list[dict[str, str]] = []
    for message in messages:
        role, content = message.role, message.content
        if message.kind in ("observation", "nudge"):
            role, content = "user", f"Observation: {content}"
        elif message.kind == "inline":
            role = "assistant"
        if wire and wire[-1]["role"] == role:
            glue = "" if role == "assistant" else "\n"
            wire[-1]["content"] += glue + content
        else:
            wire.append({"role": role, "content": content})
    return wire
