"""How turns are read: every reference case, and what the cases do not cover."""

import json
from pathlib import Path

import pytest

from pipeline.agent import chat, inline, react
from pipeline.agent.environments.desks import calcola_tools
from pipeline.agent.parse import parse_turn
from pipeline.agent.toolbox import EnvironmentTools
from pipeline.agent.turns import Call, Message
from pipeline.errors import ConfigError


def cases(name):
    path = Path(__file__).parent / "cases" / name
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [pytest.param(row, id=row["name"]) for row in rows]


@pytest.mark.parametrize("case", cases("react_turns.jsonl"))
def test_react_case(case):
    read = parse_turn("react", case["turn"])
    assert read["actions"] == ([case["action"]] if case["action"] else [])
    assert read["answer"] == case["answer"]
    assert read["flags"] == case["flags"]
    assert bool(read["errors"]) == ("parse_failure" in case["flags"])


@pytest.mark.parametrize("case", cases("chat_calls.jsonl"))
def test_chat_case(case):
    read = parse_turn("chat", case["text"])
    assert read["actions"] == case["calls"]
    assert len(read["errors"]) == case["errors"]
    assert read["answer"] is None
    if "observation_names" in case:
        name, arguments = read["actions"][0]
        done = EnvironmentTools(calcola_tools()).execute(name, arguments, {})
        assert done.error_kind == "bad_arguments"
        assert case["observation_names"] in done.error


@pytest.mark.parametrize(
    ("turn", "argument"),
    [
        ('Action: python[print("]")]', 'print("]")'),
        ("Action: python[print(']')]", "print(']')"),
        ("Action: python[x = '''a]\nb'''; x]", "x = '''a]\nb'''; x"),
        ("Action: python[f']{1}']", "f']{1}'"),
        ("Action: search[a 5\" pipe] and 'so]", 'a 5" pipe'),
        ("Action: search[l'ultimo e l'unico]", "l'ultimo e l'unico"),
        ("Action: search['Ndrangheta]", "'Ndrangheta"),
        ("Action: search[dell'uomo] e l'altro x]", "dell'uomo"),
        ('Action: search[an open " quote]', 'an open " quote'),
        ("Action: search[città] ✓", "città"),
        ("**Thought:** t\n**Action:** search[Rome]", "Rome"),
        ("thought: t\naction: search[Rome]", "Rome"),
        ("Thought: I look it up. Action: search[Rome]", "Rome"),
    ],
)
def test_react_argument(turn, argument):
    read = parse_turn("react", turn)
    assert [action[1] for action in read["actions"]] == [argument]


def test_react_keeps_nothing_that_follows_the_action():
    turn = react.parse("Thought: a\nAction: search[A]\nThought: b\nFinal Answer: 3")
    assert turn.text == "Thought: a\nAction: search[A]"
    assert turn.flags == ("discarded_answer",)


def test_react_answer_before_an_action_does_not_count():
    read = parse_turn("react", "Final Answer: 5\nAction: calc[2+2]")
    assert (read["actions"], read["answer"]) == ([["calc", "2+2"]], None)


def test_react_broken_action_never_turns_into_an_answer():
    read = parse_turn("react", "Action: search[the first\nFinal Answer: 5")
    assert read["answer"] is None and read["actions"] == []
    assert "parse_failure" in read["flags"]


@pytest.mark.parametrize(
    "turn", ["", "   \n", "Observation: x", "Final Answer:", "Action: Finish[]"]
)
def test_react_empty_turns_are_failures(turn):
    read = parse_turn("react", turn)
    assert read["answer"] is None and read["actions"] == []
    assert "parse_failure" in read["flags"]


def test_react_bare_action_counts_only_for_a_known_tool():
    turn = "I look it up.\nsearch[Rome]"
    assert react.parse(turn).actions == ()
    assert react.parse(turn, ["Search"]).actions == (Call("search", "Rome"),)
    assert react.parse(turn, ["calc"]).actions == ()


def test_chat_reads_thinking_and_stops_at_its_own_results():
    text = (
        "<think>I could <tool_call>{}</tool_call> here</think>"
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
        "<tool_response>9</tool_response>The answer is 9."
    )
    turn = chat.parse(text)
    assert turn.actions == (Call("a", {}, raw='{"name": "a", "arguments": {}}'),)
    assert turn.answer is None
    assert turn.flags == ("self_observation",)
    assert "9" not in turn.text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "a", "arguments": {"x": 1}} }</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call>',
        "<tool_call>{'name': 'a', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "a"}</tool_call>',
        '<tool_call>{"name": "a", "arguments": ""}</tool_call>',
        '<tool_call>{"name": "a", "arguments": null}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        "<tool_call>",
    ],
)
def test_chat_never_repairs(text):
    read = parse_turn("chat", text)
    assert read["actions"] == [] and len(read["errors"]) == 1
    assert read["answer"] is None


def test_chat_closing_tag_inside_a_string_and_a_missing_one_at_the_end():
    text = '<tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}'
    assert parse_turn("chat", text)["actions"] == [["a", {"x": "</tool_call>"}]]


def test_chat_bare_object_is_a_call_only_of_a_known_tool():
    text = '{"name": "a", "parameters": {"x": 1}}'
    assert chat.parse(text).answer == text
    assert [c.arguments for c in chat.parse(text, ["a"]).actions] == [{"x": 1}]
    assert chat.parse(text, ["b"]).actions == ()


def test_chat_structured_calls_keep_their_ids_and_errors():
    turn = chat.from_structured("", [("id1", "a", '{"x": '), ("id2", "b", "{}")])
    assert [call.call_id for call in turn.calls] == ["id1", "id2"]
    assert [call.name for call in turn.actions] == ["b"]
    assert len(turn.errors) == 1


def test_chat_wire_forms():
    call = Call("calcola", {"espressione": "è"}, "c1")
    state = [Message("assistant", "Si.", (call,)), Message("tool", "3", (), "c1", "calcola")]
    template = chat.wire_messages(state, strings=False)
    assert template[0]["tool_calls"][0]["function"]["arguments"] == {"espressione": "è"}
    wire = chat.wire_messages(state, strings=True)
    assert wire[0]["tool_calls"][0]["function"]["arguments"] == '{"espressione": "è"}'
    assert wire[0]["content"] == "Si."
    assert wire[1]["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    ("text", "actions", "flags"),
    [
        ("It is [Calculator(37 * 24) ->", [["Calculator", "37 * 24"]], []),
        ("It is [Calculator(37 * 24)", [["Calculator", "37 * 24"]], []),
        ("It is [Calculator(37 * 24)]", [["Calculator", "37 * 24"]], []),
        ("It is [Calculator((1 + 2) * 3) ->", [["Calculator", "(1 + 2) * 3"]], []),
        ('x [QA("Who (a]?") ->', [["QA", '"Who (a]?"']], []),
        ("x [Calendar() ->", [["Calendar", ""]], []),
        ("x <API>MT(Haus) →", [["MT", "Haus"]], []),
        ("[Calculator(1 + 1) -> 3] 3 so", [["Calculator", "1 + 1"]], ["self_observation"]),
        ("[A(1)] and [B(2)]", [["A", "1"]], ["discarded_action"]),
    ],
)
def test_inline_calls(text, actions, flags):
    read = parse_turn("inline", text)
    assert read == {"actions": actions, "answer": None, "flags": flags, "errors": []}


def test_inline_text_without_a_call_is_the_answer():
    assert parse_turn("inline", " a -> b [see f(x) + 1] ")["answer"] == "a -> b [see f(x) + 1]"


def test_inline_unclosed_call_is_a_failure():
    read = parse_turn("inline", "so [Calculator(37 * 24")
    assert read["actions"] == [] and read["answer"] is None and len(read["errors"]) == 1


def test_inline_known_tools_decide_what_a_bracket_is():
    assert inline.parse("the list [f(x)] is", ["Calculator"]).answer == "the list [f(x)] is"
    assert inline.parse("so [Foo(x) ->", ["Calculator"]).actions == (Call("Foo", "x"),)
    assert inline.parse("[f(x and [Calculator(2) ->", ["Calculator"]).actions[0].arguments == "2"


def test_unknown_protocol_names_the_others():
    with pytest.raises(ConfigError, match=r"'xml'.*react, chat, inline"):
        parse_turn("xml", "")
