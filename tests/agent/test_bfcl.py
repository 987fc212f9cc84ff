"""The leaderboard's rules, on rows made by hand and on the real files."""

import copy
import json

import pytest
from jsonschema import Draft202012Validator

from pipeline import cli
from pipeline.agent import evaluate
from pipeline.agent.policies import ContextOverflow, PolicyError, Reply, ScriptedPolicy
from pipeline.agent.turns import Call, Message, Turn
from pipeline.evaluation.bfcl import Row, ask_rows, judge, load_rows, outcomes, tool_specs

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


def verdicts_of(rows, policy):
    return [verdict for verdict, _ in ask_rows(rows, policy)]


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
    verdicts = verdicts_of(rows, ScriptedPolicy(lambda request: turns[request.task_id]))
    assert [v for v in verdicts if not v.right] == []
    silent = verdicts_of(rows, ScriptedPolicy(lambda request: "No."))
    assert outcomes(silent) == {"no_call": len(rows)}
    ids = [row.row_id for row in rows]
    shifted = {one: turns[other] for one, other in zip(ids, ids[1:] + ids[:1], strict=True)}
    wrong = verdicts_of(rows, ScriptedPolicy(lambda request: shifted[request.task_id]))
    assert not any(verdict.right for verdict in wrong)


def test_real_irrelevance_and_schemas(shared_data):
    rows = load_rows(shared_data("bfcl_v4_irrelevance_first120.jsonl"), None, "irrelevance")
    before = copy.deepcopy(rows)
    for row in rows:
        for spec in tool_specs(row):
            Draft202012Validator.check_schema(spec.parameters)
            assert '"dict"' not in json.dumps(spec.parameters)
    assert rows == before
    verdicts = verdicts_of(rows, ScriptedPolicy(lambda request: "None fits."))
    assert all(verdict.right for verdict in verdicts)
    assert outcomes(verdicts) == {"no_call": 120}


def test_an_endpoint_that_is_down_is_no_silence():
    class Down:
        def ask(self, requests):
            return [PolicyError("down") for _ in requests]

    irrelevant = Row("r", "irrelevance", (Message("user", "q"),), (FUNCTION,), ())
    ((verdict, run),) = ask_rows([irrelevant], Down())
    assert (verdict.outcome, verdict.right) == ("model_error", False)
    assert (run.exit_reason, run.detail) == ("model_error", "down")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply('<tool_call>{"name": "x", "arguments": {}}</tool_call>'), "finished"),
        (Reply("None fits."), "finished"),
        (Reply("<tool_call>{nothing"), "parse_failures"),
        (Reply("", calls=()), "unexpected_stop"),
        (PolicyError("down"), "model_error"),
        (ContextOverflow("long"), "context_overflow"),
    ],
)
def test_a_turn_is_a_run_of_one_step(reply, reason):
    class Policy:
        def ask(self, requests):
            return [reply for _ in requests]

    ends = []
    row = Row("r", "simple", (Message("system", "be brief"), Message("user", "q")), (FUNCTION,), ())
    ((_, run),) = ask_rows([row], Policy(), on_event=ends.append)
    assert (run.exit_reason, run.steps, run.calls, run.question) == (reason, 1, {}, "q")
    assert [event["exit_reason"] for event in ends] == [reason]
    assert [m.role for m in run.messages[:3]] == ["system", "system", "user"]


def test_more_rows_than_a_batch_are_all_asked_in_order():
    sizes = []

    class Policy:
        def ask(self, requests):
            sizes.append(len(requests))
            return [Reply(f"answer to {request.task_id}") for request in requests]

    rows = [Row(str(n), "irrelevance", (Message("user", "q"),), (FUNCTION,), ()) for n in range(70)]
    asked = ask_rows(rows, Policy())
    assert sizes == [64, 6]
    assert [run.answer for _, run in asked] == [f"answer to {n}" for n in range(70)]


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
CALL = '<tool_call>{"name": "area", "arguments": {"base": %s, "height": 5}}</tool_call>'

ROWS = json.dumps(TRIANGLE)


@pytest.fixture
def bfcl(tmp_path, monkeypatch):
    """Runs the command with a model that writes one call, whatever it is asked."""

    def run(*options, base="10", rows=ROWS):
        questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
        questions.write_text(rows + "\n")
        answers.write_text(
            '{"id": "s0", "ground_truth": [{"area": {"base": [10], "height": [5]}}]}\n'
        )
        policy = ScriptedPolicy(lambda request: CALL % base)
        monkeypatch.setattr(evaluate, "make_policy", lambda *given: policy)
        command = ["agent", "evaluate", "m", "--benchmarks", "bfcl", "--bfcl-file", str(questions)]
        own = [str(answers) if option == "ANSWERS" else option for option in options]
        return cli.main([*command, *own])

    return run


ANSWERED = ("--bfcl-answers", "ANSWERS", "--bfcl-category", "simple")


def test_the_command_asks_and_judges(bfcl, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    assert bfcl(*ANSWERED, "--strategies", "act,react", "--json", "--trace", str(trace)) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["benchmark"], row["strategy"], row["n"], row["right"]) == ("bfcl", "one_turn", 1, 1)
    assert (row["outcomes"], row["exit_reasons"]) == ({"right": 1}, {"finished": 1})
    (run,) = [json.loads(line) for line in trace.read_text().splitlines()]
    assert (run["benchmark"], run["right"], run["outcome"]) == ("bfcl", True, "right")
    assert run["run"]["messages"][-1]["calls"][0]["arguments"] == {"base": 10, "height": 5}
    assert bfcl(*ANSWERED) == 0
    assert "1 right" in capsys.readouterr().out


def test_the_table_says_why_calls_were_wrong(bfcl, capsys):
    assert bfcl(*ANSWERED, base="11") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 wrong" in shown and "bfcl one_turn: wrong, 1 of 1: base: 11 is not one of" in shown


def test_numbers_are_typed_or_compared_by_value(bfcl, capsys):
    for numbers, outcome in (("typed", "wrong"), ("value", "right")):
        assert bfcl(*ANSWERED, "--bfcl-numbers", numbers, "--json", base="10.0") == 0
        assert json.loads(capsys.readouterr().out)[0]["outcomes"] == {outcome: 1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            (),
            "--bfcl-category is missing: bfcl needs one of simple, multiple, parallel, irrelevance",
        ),
        (("--bfcl-category", "simple"), "--bfcl-answers is missing: bfcl needs the answers"),
        (
            ("--bfcl-category", "simple", "--bfcl-answers", "no.jsonl"),
            "--bfcl-answers = 'no.jsonl': no such file",
        ),
        (("--bfcl-answers", "ANSWERS", "--bfcl-category", "irrelevance"), "allowed is none"),
        (("--bfcl-category", "irrelevance", "--tool-choice", "required"), "allowed is auto"),
    ],
)
def test_the_command_refuses_what_does_not_go_together(bfcl, capsys, options, said):
    assert bfcl(*options) == 2
    assert said in capsys.readouterr().err


def test_the_command_refuses_other_files(bfcl, capsys):
    assert bfcl(*ANSWERED, rows='{"id": "s0"}') == 2
    assert "questions.jsonl:1: `question` is missing" in capsys.readouterr().err
