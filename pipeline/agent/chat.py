"""The `chat` protocol: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

`parse` reads the text of a local model; `from_structured` reads the calls that an endpoint has
already taken apart. Malformed JSON is an error and never an empty object, nothing is repaired,
and one bad call does not lose its siblings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from pipeline.agent.turns import Call, Message, Turn

STOP: tuple[str, ...] = ("<tool_response>",)
HINT = (
    'Write a call as <tool_call>{"name": "NAME", "arguments": {...}}</tool_call>, '
    "or answer in plain words."
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK = re.compile(r"^\s*(?:<think>)?.*?</think>|^\s*<think>.*\Z", re.DOTALL)
_END_TOKENS = re.compile(r"(?:<\|(?:im_end|endoftext|eot_id|end)\|>|</s>)\s*\Z")


def parse(text: str, tools: Collection[str] | None = None) -> Turn:
    """Read one turn; with `tools`, a turn that is one bare JSON call of a known tool counts too."""
    text = _END_TOKENS.sub("", text)
    own, marker, _ = text.partition("<tool_response>")
    flags = ["self_observation"] if marker else []
    body = _THINK.sub("", own, count=1)
    calls, prose = _read_calls(body)
    if not calls and tools is not None:
        bare = _bare_call(body, tools)
        calls, prose = ([bare], "") if bare else (calls, prose)
    errors = tuple(call.problem for call in calls if call.problem)
    if errors:
        flags.append("parse_failure")
    answer = (prose.strip() or None) if not calls else None
    return Turn(own.strip(), tuple(calls), answer, tuple(flags), errors)


def from_structured(text: str, calls: Sequence[tuple[str, str, str]]) -> Turn:
    """Read what an endpoint returned: its text and `(id, name, arguments as a JSON string)`."""
    read = [
        _with_id(_call(name, arguments, arguments), identity) for identity, name, arguments in calls
    ]
    errors = tuple(call.problem for call in read if call.problem)
    flags = ("parse_failure",) if errors else ()
    prose = _THINK.sub("", text, count=1).strip()
    return Turn(text.strip(), tuple(read), None if read else prose or None, flags, errors)


def render(messages: Sequence[Message]) -> str:
    """Write the state as plain text, for models without a chat template."""
    lines = [
        f"{m.role}: {assistant_text(m) if m.role == 'assistant' else m.content}" for m in messages
    ]
    return "\n".join([*lines, "assistant:"])


def prose(text: str) -> str:
    """Return what a turn says besides its calls and its thinking."""
    return _read_calls(_THINK.sub("", text, count=1))[1].strip()


def assistant_text(message: Message) -> str:
    """Write an assistant message with its calls in the text form."""
    if not message.calls or _OPEN in message.content:
        return message.content
    objects = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
    calls = [f"{_OPEN}{json.dumps(o, ensure_ascii=False)}{_CLOSE}" for o in objects]
    return "\n".join([part for part in [message.content.strip(), *calls] if part])


def wire_messages(messages: Sequence[Message], *, strings: bool) -> list[dict[str, Any]]:
    """Write the state for a chat template (`strings=False`: arguments are objects) or for the
    OpenAI wire (`strings=True`: arguments are JSON strings, results carry their call id)."""
    return [_wire(message, strings) for message in messages]


def _wire(message: Message, strings: bool) -> dict[str, Any]:
    if message.role == "tool":
        wire = {"role": "tool", "name": message.name, "content": message.content}
        return {**wire, "tool_call_id": message.call_id} if strings else wire
    if not message.calls:
        return {"role": message.role, "content": message.content}
    if not strings and any(call.problem for call in message.calls):
        return {"role": "assistant", "content": message.content}
    functions = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": _arguments(call, strings)},
        }
        for call in message.calls
    ]
    return {"role": "assistant", "content": prose(message.content), "tool_calls": functions}


def _arguments(call: Call, strings: bool) -> Any:
    if not strings:
        return call.arguments
    if call.problem is not None and call.raw:
        return call.raw
    return json.dumps(call.arguments, ensure_ascii=False)


def _read_calls(text: str) -> tuple[list[Call], str]:
    """Return the calls of a text in order, and the prose around them."""
    calls: list[Call] = []
    prose: list[str] = []
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
        prose.append(text[position:start])
        body = start + len(_OPEN)
        call, position = _read_one(text, body)
        calls.append(call)
    prose.append(text[position:])
    return calls, "".join(prose)


def _read_one(text: str, start: int) -> tuple[Call, int]:
    """Read the call whose body begins at `start`; return it and the index after its end."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except ValueError as problem:
        return _broken(text, start, f"the call is not valid JSON: {problem}")
    rest = text[end:].lstrip()
    if rest and not rest.startswith(_CLOSE):
        return _broken(text, start, "the call does not end after its JSON object")
    after = len(text) if not rest else len(text) - len(rest) + len(_CLOSE)
    return _from_json(value, text[start:end]), after


def _broken(text: str, start: int, problem: str) -> tuple[Call, int]:
    ends = [i for i in (text.find(_CLOSE, start), text.find(_OPEN, start)) if i >= 0]
    end = min(ends, default=len(text))
    raw = text[start:end].strip()
    after = end + len(_CLOSE) if text.startswith(_CLOSE, end) else end
    name = re.match(r'\{\s*"name"\s*:\s*"([^"\\]+)"', raw)
    return Call(name[1] if name else "", {}, problem=problem, raw=raw), after


def _from_json(value: Any, raw: str) -> Call:
    if not isinstance(value, dict):
        return Call("", {}, problem="a call is a JSON object with name and arguments", raw=raw)
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return Call("", {}, problem='the call has no "name"', raw=raw)
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        return Call(name, {}, problem='the call has no "arguments" (an empty one is {})', raw=raw)
    return _call(name, arguments, raw)


def _call(name: str, arguments: Any, raw: str) -> Call:
    """Take arguments that are an object or a JSON string of one."""
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except ValueError as problem:
            return Call(name, {}, problem=f"the arguments are not valid JSON: {problem}", raw=raw)
    if not isinstance(arguments, dict):
        return Call(name, {}, problem="the arguments are not a JSON object", raw=raw)
    return Call(name, arguments, raw=raw)


def _bare_call(text: str, tools: Collection[str]) -> Call | None:
    try:
        value = _DECODER.decode(text.strip())
    except ValueError:
        return None
    if not isinstance(value, dict) or not {"arguments", "parameters"} & value.keys():
        return None
    call = _from_json(value, text.strip())
    return call if call.name.lower() in {name.lower() for name in tools} else None


def _with_id(call: Call, identity: str) -> Call:
    return Call(call.name, call.arguments, identity, call.problem, call.raw)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
