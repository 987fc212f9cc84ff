"""The leaderboard's rules, on rows made by hand and on the real files."""

import copy
import json

import pytest
from jsonschema import Draft202012Validator

from pipeline import cli
from pipeline.agent import command
from pipeline.agent.policies import PolicyError, ScriptedPolicy
from pipeline.agent.turns import Call, Turn
from pipeline.evaluation.bfcl import Row, ask_rows, judge, load_rows, summary, tool_specs

PROPERTIES = {
    "city": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "float"},
    "open": {"type": "boolean"},
    "points": {"type": "array", "items": {"type": "float"}},
    "filter": {"type": "dict"},
}
ACCEPTED = {
    "city": ["New York, NY", "NYC"],
    "count": [5],
    "share": [0.5, 2.0, ""],
    "open": [True, ""],
    "points": [[1.0, 2.5], ""],
    "filter": [{"a": ["x", "y"], "b": [1, ""]}, ""],
}
FUNCTION = {
    "name": "geo.find",
    "description": "d",
    "parameters": {"type": "dict", "properties": PROPERTIES, "required": ["city", "count"]},
}
ROW = Row("r", "simple", (), (FUNCTION,), ({"geo.find": ACCEPTED},))


def turn(*arguments, name="geo.find"):
    return Turn("", tuple(Call(name, one) for one in arguments))


def good(**more):
    return {"city": "nyc", "count": 5, **more}


@pytest.mark.parametrize(
    "arguments",
    [
        good(),
        good(city="new york ny"),
        good(share=0.5),
        good(share=2),
        good(open=True),
        good(points=[1, 2.5]),
        good(filter={"a": "X"}),
        good(filter={"b": 1, "a": "y"}),
    ],
)
def test_right(arguments):
    assert judge(ROW, turn(arguments)).reason is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"city": "nyc"}, "missing required parameter 'count'"),
        (good(city="Boston"), "city"),
        (good(count=5.0), "count"),
        (good(count="5"), "count"),
        (good(count=True), "count"),
        (good(share="0.5"), "share"),
        (good(open=1), "open"),
        (good(points=[2.5, 1.0]), "points"),
        (good(points=["1", "2.5"]), "points"),
        (good(filter={"b": 1}), "filter"),
        (good(filter={"a": "x", "c": 1}), "filter"),
        (good(extra=1), "unexpected parameter 'extra'"),
    ],
)
def test_wrong(arguments, reason):
    verdict = judge(ROW, turn(arguments))
    assert (verdict.outcome, verdict.right) == ("wrong", False)
    assert reason in verdict.reason


def test_numeric_policy_by_value_differs_only_in_the_kind_of_number():
    assert judge(ROW, turn(good(count=5.0)), "value").right
    assert not judge(ROW, turn(good(count=5.1)), "value").right
    assert not judge(ROW, turn(good(count=True)), "value").right
    assert not judge(ROW, turn(good(count="5")), "value").right


def test_an_optional_argument_is_needed_when_no_answer_leaves_it_out():
    row = Row("r", "simple", (), (FUNCTION,), ({"geo.find": {**ACCEPTED, "open": [True]}},))
    assert judge(row, turn(good())).reason == "missing parameter 'open'"
    assert judge(row, turn(good(open=True))).right


def test_wrong_function_and_wrong_number_of_calls():
    assert "instead of geo.find" in judge(ROW, turn(good(), name="geo.fine")).reason
    assert judge(ROW, turn(good(), good())).reason == "2 calls instead of 1"


def test_parallel_calls_in_any_order_each_used_once():
    wide = {"geo.find": {**ACCEPTED, "count": [5, 6]}}
    narrow = {"geo.find": {**ACCEPTED, "count": [5]}}
    row = Row("r", "parallel", (), (FUNCTION,), (wide, narrow))
    six = good(count=6)
    assert judge(row, turn(good(), six)).right
    assert judge(row, turn(six, good())).right
    assert not judge(row, turn(six, six)).right
    assert not judge(row, turn(good())).right


def test_no_call_is_kept_apart_from_unparseable():
    irrelevant = Row("r", "irrelevance", (), (FUNCTION,), ())
    silent = Turn("I cannot.", answer="I cannot.")
    broken = Turn("x", (Call("", {}, problem="bad"),), errors=("bad",))
    assert judge(irrelevant, silent).right
    assert (judge(ROW, silent).outcome, judge(ROW, silent).right) == ("no_call", False)
    for row in (ROW, irrelevant):
        verdict = judge(row, broken)
        assert (verdict.outcome, verdict.right) == ("unparseable", False)
    assert judge(irrelevant, turn(good())).outcome == "wrong"


def perfect_calls(row):
    """Write the accepted calls as a model would."""
    written = []
    for wanted in row.accepted:
        ((name, accepted),) = wanted.items()
        arguments = {k: options[0] for k, options in accepted.items() if options[0] != ""}
        for key, value in arguments.items():
            if isinstance(value, dict):
                arguments[key] = {k: o[0] for k, o in value.items()}
            if isinstance(value, list) and value and isinstance(value[0], dict):
                arguments[key] = [{k: o[0] for k, o in one.items()} for one in value]
        written.append({"name": name, "arguments": arguments})
    return "".join(f"<tool_call>{json.dumps(c)}</tool_call>" for c in reversed(written))


FILES = {
    "simple": (
        "bfcl_v4_simple_python_first200.jsonl",
        "bfcl_v4_simple_python_answers_first200.jsonl",
    ),
    "multiple": ("bfcl_v4_multiple_first100.jsonl", "bfcl_v4_multiple_answers_first100.jsonl"),
    "parallel": ("bfcl_v4_parallel_first100.jsonl", "bfcl_v4_parallel_answers_first100.jsonl"),
}


@pytest.mark.parametrize("category", FILES)
def test_real_rows_a_perfect_model_is_right_and_a_silent_one_is_not(category, shared_data):
    questions, answers = map(shared_data, FILES[category])
    rows = load_rows(questions, answers, category)
    turns = {row.row_id: perfect_calls(row) for row in rows}
    verdicts = ask_rows(rows, ScriptedPolicy(lambda request: turns[request.task_id]))
    assert [v for v in verdicts if not v.right] == []
    silent = ask_rows(rows, ScriptedPolicy(lambda request: "No."))
    assert summary(silent)["outcomes"] == {"no_call": len(rows)}
    ids = [row.row_id for row in rows]
    shifted = {one: turns[other] for one, other in zip(ids, ids[1:] + ids[:1], strict=True)}
    wrong = ask_rows(rows, ScriptedPolicy(lambda request: shifted[request.task_id]))
    assert summary(wrong)["right"] == 0


def test_real_irrelevance_and_schemas(shared_data):
    rows = load_rows(shared_data("bfcl_v4_irrelevance_first120.jsonl"), None, "irrelevance")
    before = copy.deepcopy(rows)
    for row in rows:
        for spec in tool_specs(row):
            Draft202012Validator.check_schema(spec.parameters)
            assert '"dict"' not in json.dumps(spec.parameters)
    assert rows == before
    verdicts = ask_rows(rows, ScriptedPolicy(lambda request: "None fits."))
    assert summary(verdicts) == {
        "n": 120,
        "right": 120,
        "accuracy": 1.0,
        "stderr": 0.0,
        "outcomes": {"no_call": 120},
    }


def test_an_endpoint_that_is_down_is_no_silence():
    class Down:
        def ask(self, requests):
            return [PolicyError("down") for _ in requests]

    irrelevant = Row("r", "irrelevance", (), (FUNCTION,), ())
    (verdict,) = ask_rows([irrelevant], Down())
    assert (verdict.outcome, verdict.right) == ("model_error", False)


def bfcl(tmp_path, monkeypatch, lines, *options):
    """Run the command with a model that writes one right call, whatever it is asked."""
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    questions.write_text(lines)
    answers.write_text('{"id": "s0", "ground_truth": [{"area": {"base": [10], "height": [5]}}]}\n')
    turn = '<tool_call>{"name": "area", "arguments": {"base": 10, "height": 5}}</tool_call>'
    monkeypatch.setattr(command, "make_policy", lambda *given: ScriptedPolicy(lambda r: turn))
    return cli.main(
        ["agent", "bfcl", "m", str(questions), "--answers", str(answers), "--json", *options]
    )


TRIANGLE = {
    "id": "s0",
    "question": [[{"role": "user", "content": "The area of a triangle, base 10, height 5?"}]],
    "function": [
        {
            "name": "area",
            "description": "Area.",
            "parameters": {
                "type": "dict",
                "properties": {"base": {"type": "integer"}, "height": {"type": "integer"}},
                "required": ["base", "height"],
            },
        }
    ],
}


def test_the_command_asks_and_judges(tmp_path, monkeypatch, capsys):
    assert bfcl(tmp_path, monkeypatch, json.dumps(TRIANGLE), "--category", "simple") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["n"], document["right"], document["outcomes"]) == (1, 1, {"right": 1})
    assert document["rows"][0]["row_id"] == "s0"


def test_the_command_refuses_other_files(tmp_path, monkeypatch, capsys):
    assert bfcl(tmp_path, monkeypatch, '{"id": "s0"}\n', "--category", "simple") == 2
    assert "questions.jsonl and" in capsys.readouterr().err
    assert bfcl(tmp_path, monkeypatch, json.dumps(TRIANGLE), "--category", "irrelevance") == 2
    assert "all categories but irrelevance" in capsys.readouterr().err
