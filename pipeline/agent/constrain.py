"""The grammar of a turn, for a local policy with `constrain`: calls that cannot be malformed.

Text is free until a call begins (`<tool_call>` in `chat`, `Action:` in `react`, `[` in `inline`);
then it must be a call of one of the tools on offer whose arguments fit their schema. The masks
take away what the grammar forbids and renormalise the rest, so they secure the form of a call and
not its content, and the loop validates it as ever. Where `tool_choice` asks for a call, the turn
is one.

A typed answer (`Settings.output`) is forced in `chat` (a turn is then calls or the answer, with
no other text), in `react` (`Finish[...]`, `Final Answer:`), in `plain` and in `direct`. In
`inline`, where the answer is what several turns say, and for a regular expression that llguidance
cannot read (look-around, references), it is only checked, as without `constrain`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from llguidance import LLMatcher

from pipeline.agent.policies import Request
from pipeline.lm.grammar import json_rule, lark, tool_calls
from pipeline.tools.base import ToolSpec, schemas_of

log = logging.getLogger(__name__)

Rules = dict[str, str]

# A thought before the call where a turn must be one: bounded, and with no sign of which the marks
# of a turn and the stop strings are made.
_THOUGHT = r"/[^\n\[\]:<>→\x00-\x1f\x7f-]{0,200}/"
# In brackets of `react`: anything but brackets, and what would be an arrow.
_SIGN, _EDGE = r"[^\[\]>→\x00-\x1f\x7f]", r"[^\[\]>→\x00-\x20\x7f]"
_BARE = rf"/{_EDGE}({_SIGN}{{0,150}}{_EDGE})?/"
# Where `react.parse` sees an action: a line that begins with it, or the capital word in a line.
_LINE = r"[ \t]*[*#]*[ \t]*(?i:action)[ \t]*[0-9]*[ \t]*\**:"
_ACTION = rf"/\n{_LINE}/ | /[^\w\n]Action( [0-9]+)?:/"


def turn_grammar(request: Request) -> str | None:
    """Write the Lark grammar of the turn that a request asks for; None where all text is free.

    It is the grammar of what follows `request.prefix`.
    """
    write = {"chat": _chat, "react": _react, "inline": _inline, "plain": _plain}
    made = write.get(request.protocol, _direct)(request, _offered(request))
    return None if made is None else lark(*made)


def _offered(request: Request) -> list[ToolSpec]:
    """The tools that the turn may call."""
    choice = request.tool_choice.lower()
    if choice in ("auto", "required"):
        return list(request.tools)
    return [spec for spec in request.tools if spec.name.lower() == choice]


def _must_call(request: Request) -> bool:
    return request.tool_choice not in ("auto", "none") and request.tools != ()


def _free(marks: Rules, begins: str) -> Rules:
    """FREE, text without any of the marks, and for each mark `to_NAME`, the text up to its end.

    `begins` is a regular expression with which no free text begins.
    """
    named = {name.upper(): f"({mark})" for name, mark in marks.items()}
    mark = f"/(?s:.*)/ ({' | '.join(named)}) /(?s:.*)/"
    parts = ["/(?s:.*)/", f"~({mark})", f"~/{begins}(?s:.*)/"]
    heads = {f"to_{name}[lazy]": f"FREE {name.upper()}" for name in marks}
    return {**named, "FREE": " & ".join(parts), **heads}


def _chat(request: Request, offered: Sequence[ToolSpec]) -> tuple[str, Rules] | None:
    form = _form(request)
    if not request.tools and form is None:
        return None
    objects = [_object(spec) for spec in offered]
    rules = {"object": " | ".join(objects)} if offered else {}
    rules |= {"rest": r'/\n?/ object /\n?/ "</tool_call>"'} if offered else {}
    calls = r'"<tool_call>" rest (/\n?/ "<tool_call>" rest){0,3}'
    if _must_call(request):
        return calls, rules
    if form is not None:
        return f"{calls} | {form}" if offered else form, rules
    # a turn that is one bare object of this kind is read as a call too
    bare = r'\s*\{\s*"(name|arguments|parameters)"'
    rules |= _free({"call": '"<tool_call>"'}, bare)
    return ("(to_call rest)* FREE | object" if offered else "FREE"), rules


def _object(spec: ToolSpec) -> str:
    """The rule of one call as a JSON object."""
    head = '{"name": ' + json.dumps(spec.name, ensure_ascii=False) + ', "arguments": '
    arguments = json_rule({"type": "object", "properties": {}, **spec.parameters})
    return f"{json.dumps(head)} {arguments} " + '"}"'


def _react(request: Request, offered: Sequence[ToolSpec]) -> tuple[str, Rules]:
    form, must_call = _form(request), _must_call(request)
    calls, rules = tool_calls(schemas_of(offered), ("[", "]"), "", _BARE) if offered else ("", {})
    answer = form or f"/{_EDGE}({_SIGN}{{0,200}}{_EDGE})?/"
    ends = [] if must_call else [f'"Finish[" {answer} "]"']
    act = {"act": "/ ?/ (" + " | ".join([*([calls] if offered else []), *ends]) + ")"}
    if request.prefix.endswith("Action:"):
        return "act", {**rules, **act}
    if must_call:
        return f'"Thought:"? {_THOUGHT} "\\nAction:" act', {**rules, **act}
    marks, starts = {"action": _ACTION}, ["to_action act", f"/{_LINE}/ act"]
    if form is not None:
        marks["answer"] = "/(?i:final answer)[ \\t]*\\**:/"
        starts.append(f"to_answer / ?/ {form}")
    if request.inline_calls and offered:
        inside = tool_calls(schemas_of(offered), ("(", ")"), " ->")
        marks["call"], rules = '"["', {**rules, "within": inside[0]}
        starts.append("to_call within")
    return " | ".join([*starts, "FREE"]), {**rules, **act, **_free(marks, _LINE)}


def _inline(request: Request, offered: Sequence[ToolSpec]) -> tuple[str, Rules] | None:
    if not offered:
        return None
    call, rules = tool_calls(schemas_of(offered), ("(", ")"), "")
    rules["call"] = call
    if _must_call(request):
        return f'{_THOUGHT} ("[" call " ->" | "<API>" call " →")', rules
    free = _free({"open": '"["', "api": '"<API>"'}, r"(\[|<API>)")
    return 'to_open call " ->" | to_api call " →" | FREE', {**rules, **free}


def _plain(request: Request, offered: Sequence[ToolSpec]) -> tuple[str, Rules] | None:
    form = _form(request)
    if form is None:
        return None
    answer = r"(?i:answer)[ \t]*:"
    return f"to_answer / ?/ {form} | FREE", _free({"answer": f"/{answer}/"}, answer)


def _direct(request: Request, offered: Sequence[ToolSpec]) -> tuple[str, Rules] | None:
    form = _form(request)
    return None if form is None else (f"/ ?/ {form}", {})


def _form(request: Request) -> str | None:
    """The Lark rule of a typed answer; None where there is none, or none that can be forced."""
    output = request.output
    if output is None:
        return None
    if output.schema is not None:
        return json_rule(output.schema)
    pattern = (output.pattern or "").replace("/", r"\/")
    rule = f"/(?s:{pattern})/"
    problem = LLMatcher.validate_grammar(f"start: {rule}")
    if problem:
        log.warning("the answer is checked and not forced: %s", problem.split("\n")[0])
        return None
    return f"({rule})"
