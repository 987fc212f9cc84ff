"""Turns under a grammar: a random model writes calls that its tools can read, in every protocol."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from transformers import AutoTokenizer

from pipeline.agent import chat, inline, react
from pipeline.agent.checks import OutputForm
from pipeline.agent.constrain import turn_grammar
from pipeline.agent.engine import local_policy
from pipeline.agent.limits import Limits
from pipeline.agent.loop import run_episodes
from pipeline.agent.policies import Request
from pipeline.agent.tasks import Settings, Task
from pipeline.agent.turns import Message
from pipeline.lm.grammar import CallGrammar
from pipeline.lm.tokens import encode_piece
from pipeline.tools.base import ToolSpec, one_string
from pipeline.tools.calculator import Calculator
from pipeline.tools.executor import Executor

ADD = {
    "type": "object",
    "properties": {
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        "note": {"type": "string"},
    },
    "required": ["numbers"],
    "additionalProperties": False,
}


class Told:
    """A tool that answers any valid arguments."""

    def __init__(self, name, parameters):
        self.spec = ToolSpec(name, "1", "", parameters)

    def run(self, arguments, document):
        return "done"


TOOLS = [Calculator(), Told("Search", one_string("query", "")), Told("add", ADD)]
SPECS = tuple(tool.spec for tool in TOOLS)
NAMES = [spec.name for spec in SPECS]
ASKED = Request((Message("user", "q"),), SPECS, temperature=1.0, max_new_tokens=4)
# How a turn must be a call.
CALLS = [
    {"protocol": "chat", "tool_choice": "required"},
    {"protocol": "chat", "tool_choice": "Add"},
    {"protocol": "react", "tool_choice": "required"},
    {"protocol": "react", "tool_choice": "search", "prefix": "Action:"},
    {"protocol": "inline", "tool_choice": "required"},
]


def policy(kind="bytes", constrain=True, shape="llama"):
    lm = tiny.make_lm(shape, kind)
    return local_policy(lm.model, lm.tokenizer, constrain=constrain)


@pytest.fixture(scope="module")
def executor():
    with Executor(TOOLS) as own:
        yield own


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize("how", CALLS, ids=lambda how: f"{how['protocol']}-{how['tool_choice']}")
def test_a_turn_that_must_be_a_call_is_one(kind, how, executor, monkeypatch):
    lm = tiny.make_lm("llama", kind)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(lm.tokenizer, "chat_template", template, raising=False)
    asked = [replace(ASKED, seed=seed, stop=inline.STOP, **how) for seed in range(2)]
    if how["protocol"] != "inline":
        asked = [replace(request, stop=()) for request in asked]
    module = {"chat": chat, "react": react, "inline": inline}[how["protocol"]]
    replies = policy(kind).ask(asked)
    for reply in replies:
        turn = module.parse(reply.text, NAMES)
        assert turn.calls and not turn.errors and "parse_failure" not in turn.flags, reply.text
        for call in turn.calls:
            assert how["tool_choice"].lower() in ("required", call.name.lower())
            done = executor.execute(call.name, call.arguments)
            if how["protocol"] == "chat":  # its schema says that a sum is a string, and no more
                assert done.error_kind not in ("bad_arguments", "unknown_tool"), done.error
            else:
                assert done.error_kind in (None, "division_by_zero"), (reply.text, done.error)
    assert policy(kind).ask(asked[:1]) + policy(kind).ask(asked[1:]) == replies


def accepts(request, text):
    """Whether the grammar of a turn lets a text through; None when it may not end there."""
    tokenizer = tiny.make_tokenizer("bytes")
    mask, ids = CallGrammar(tokenizer).mask(turn_grammar(request)), encode_piece(tokenizer, text)
    for n, token in enumerate(ids):
        if not bool(mask(ids[:n])[token]):
            return False
    return True if mask.may_end(ids) else None


ADDED = '{"name": "add", "arguments": {"numbers": [1, -2]}}'
CHAT = '<tool_call>{"name": "Search", "arguments": {"query": "Rome"}}</tool_call>'


@pytest.mark.parametrize(
    ("protocol", "text", "right"),
    [
        ("chat", "Just an answer, with {braces} and [brackets].", True),
        ("chat", f"I look.\n{CHAT}\n{CHAT}", True),
        ("chat", f"<tool_call>\n{ADDED}\n</tool_call>", True),
        ("chat", ADDED, True),
        ("chat", '{"answer": 3}', True),
        ("chat", "<tool_call>", None),
        ("chat", '<tool_call>{"name": "Look', False),
        ("chat", '<tool_call>{"name": "add", "arguments": {"numbers": [1]}', False),
        ("chat", '{"name": "Look', False),
        ("react", " I think.\nAction: Search[Rome (city), 2nd]", True),
        ("react", " I think.\nAction 2: Finish[it is 4]", True),
        ("react", " so\n**Action**: add[numbers=[1, 2], note=\"x\"]", True),
        ("react", "Final Answer: 4", True),
        ("react", " only a thought", True),
        ("react", " I think.\nAction: Look", False),
        ("react", " I think.\nAction: I", False),
        ("react", " I think.\naction: add[3", False),
        ("react", " I think.\nAction: Search[Rome] and", False),
        ("inline", "No call (yet) -> x", True),
        ("inline", "It is [Calculator(3 * 4) ->", True),
        ("inline", "It is <API>Search(Rome) →", True),
        ("inline", "It is [1", False),
        ("inline", "It is [Calculator(3)", False),
    ],
)  # fmt: skip
def test_text_is_free_until_a_call_begins(protocol, text, right):
    assert accepts(replace(ASKED, protocol=protocol), text) is right


def test_choices_prefixes_and_inline_calls():
    assert accepts(replace(ASKED, prefix="Action:"), " Search[Rome]") is True
    assert accepts(replace(ASKED, prefix="Action:"), " I think") is False
    assert accepts(replace(ASKED, tool_choice="none"), " x\nAction: Search") is False
    assert accepts(replace(ASKED, tool_choice="none"), " x\nAction: Finish[4]") is True
    assert accepts(replace(ASKED, protocol="chat", tool_choice="none"), CHAT) is False
    assert accepts(replace(ASKED, tool_choice="required"), " x\nAction: Finish") is False
    within = replace(ASKED, inline_calls=True)
    assert accepts(within, " That is [Calculator(2 + 2) ->") is True
    assert accepts(within, " That is [Calculator(two") is False
    assert accepts(within, " That is [Search(Rome) b") is False
    assert accepts(within, " done\nAction: Search[Rome]") is True
    for protocol in ("plain", "direct"):
        assert turn_grammar(replace(ASKED, protocol=protocol)) is None
    assert turn_grammar(replace(ASKED, protocol="chat", tools=())) is None


PAIR = OutputForm(
    schema={
        "type": "object",
        "properties": {"city": {"type": "string"}, "year": {"type": "integer"}},
        "required": ["city", "year"],
    }
)


@pytest.mark.parametrize("output", [PAIR, OutputForm(pattern=r"(yes|no), \d{1,3}/\d")])
@pytest.mark.parametrize("protocol", ["chat", "react", "direct", "plain"])
def test_a_typed_answer_is_forced(protocol, output):
    right = json.dumps({"city": "Rome", "year": 3}) if output is PAIR else "yes, 12/3"
    before = {"react": " x\nAction: Finish[", "plain": " x\nAnswer: "}.get(protocol, "")
    after = "]" if protocol == "react" else ""
    request = replace(ASKED, protocol=protocol, output=output)
    assert accepts(request, before + right + after) is True
    assert accepts(request, before + "maybe") is False
    if protocol == "react":
        assert accepts(request, f"Final Answer: {right}") is True
        assert accepts(request, "Final Answer: maybe") is False
    if protocol == "chat":
        assert accepts(request, CHAT) is True
        assert accepts(request, f"I look. {CHAT}") is False


def test_a_pattern_that_cannot_be_forced_is_only_checked(caplog):
    request = replace(ASKED, protocol="direct", output=OutputForm(pattern="(?=y)yes"))
    assert turn_grammar(request) is None
    assert "checked and not forced" in caplog.text


def test_the_loop_accepts_every_typed_answer_of_a_random_model(executor):
    settings = Settings(
        protocol="direct", prefixes=True, tool_choice="none", temperature=1.0, output=PAIR,
        max_new_tokens=4, limits=Limits(max_steps=1),
    )  # fmt: skip
    tasks = [Task("q", str(n), seed=n) for n in range(6)]
    runs = run_episodes(tasks, policy(), executor, settings)
    assert [run.exit_reason for run in runs] == ["finished"] * 6
    assert all(PAIR.problem(run.answer) is None for run in runs)
    free = run_episodes(tasks, policy(constrain=False), executor, settings)
    assert not any(run.finished for run in free)


def test_actions_of_the_loop_are_well_formed_only_with_constrain(executor):
    settings = Settings(prefixes=True, thoughts=False, temperature=1.0, max_new_tokens=8)
    tasks = [Task("q", str(n), seed=n) for n in range(6)]
    runs = run_episodes(tasks, policy(), executor, replace(settings, limits=Limits(max_steps=4)))
    for run in runs:
        assert run.exit_reason in ("finished", "max_steps"), run.detail
        kinds = {kind for errors in run.errors.values() for kind in errors}
        assert not run.flags.get("parse_failure") and kinds <= {"division_by_zero"}, run.errors
    free = run_episodes(tasks, policy(constrain=False), executor, settings)
    assert all(run.exit_reason == "parse_failures" for run in free)


def test_a_large_vocabulary_does_not_outgrow_the_grammar():
    path = Path(__file__).parents[2] / ".cache/models/SmolLM2-135M-Instruct"
    if not path.is_dir():
        pytest.skip("SmolLM2-135M-Instruct is not here; scripts/quickstart brings it")
    tokenizer = AutoTokenizer.from_pretrained(path)
    grammar = turn_grammar(replace(ASKED, tools=(Calculator().spec,), protocol="react"))
    mask = CallGrammar(tokenizer).mask(grammar)
    ids = tokenizer("Action: Finish[14 plus 30 is 44]", add_special_tokens=False)["input_ids"]
    assert all(mask(ids[:n])[token] for n, token in enumerate(ids))
    assert mask.may_end(ids)
