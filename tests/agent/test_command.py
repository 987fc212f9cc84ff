"""`callsieve agent run` against a model folder and an endpoint, and the trace on the terminal."""

import argparse
import io
import json
import sys

import pytest
from rich.console import Console

from pipeline.agent.command import FORMS, answer_form, answer_question, make_policy, run_question
from pipeline.agent.environments.desks import library_tools
from pipeline.agent.limits import EXIT_REASONS, Limits
from pipeline.agent.loop import run_episode
from pipeline.agent.policies import ScriptedPolicy
from pipeline.agent.tasks import Task
from pipeline.agent.toolbox import EnvironmentTools
from pipeline.agent.trace import TracePrinter
from pipeline.cli import main
from pipeline.errors import ConfigError


def arguments(model, **changes):
    known = {
        "model": model,
        "question": "How many copies?",
        "protocol": "react",
        "strategy": None,
        "max_steps": 2,
        "date": None,
        "trace": None,
        "json": True,
    }
    return argparse.Namespace(**{**known, **changes})


def test_a_model_folder_runs_and_writes_json_and_a_trace(folder, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    code = run_question(arguments(folder, trace=trace), library_tools())
    document = json.loads(capsys.readouterr().out)
    assert document["exit_reason"] in EXIT_REASONS
    assert code == (0 if document["answer"] is not None else 1)
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    assert events[0]["event"] == "start" and events[-1]["event"] == "exit"
    assert events[-1]["exit_reason"] == document["exit_reason"]


def test_a_model_without_a_chat_template_is_not_asked_in_chat(folder, capsys):
    ask = ["agent", "run", folder, "hi", "--max-steps", "1", "--protocol", "chat"]
    assert main(ask) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.endswith(
        f"{folder}: its tokenizer has no chat template, which the protocol chat needs; "
        "use --protocol react\n"
    )
    assert main([*ask, "--strategy", "standard"]) in (0, 1)  # which never asks in chat


def test_a_strategy_that_needs_answers_is_refused_before_a_model_is_loaded():
    with pytest.raises(ConfigError, match="callsieve evaluate"):
        run_question(arguments("no-such-model", strategy="reflexion"), [])
    with pytest.raises(ConfigError, match="standard, cot"):
        answer_question("no-such-model", "q", [], strategy="magic")


def test_an_endpoint_that_is_down_is_reported_as_such():
    result = answer_question("http://127.0.0.1:9/v1#m", "q", library_tools(), limits=Limits(2))
    assert (result.exit_reason, result.answer) == ("model_error", None)
    assert "cannot be reached" in result.final.detail


def test_the_trace_on_the_terminal_reads_no_markup_and_sends_no_escapes():
    out = io.StringIO()
    printer = TracePrinter(Console(file=out, force_terminal=True, width=200, no_color=True))
    turns = ["Thought: [bold]x[/bold] \x1b[31mred\nAction: calc[1+1]", "Finish[2]"]
    box = EnvironmentTools(library_tools())
    run_episode(Task("q"), ScriptedPolicy(turns), box, on_event=printer)
    shown = out.getvalue()
    assert "[bold]x[/bold]" in shown and "\x1b[31mred" not in shown
    assert "call calc(1+1)" in shown
    assert "finished" in shown and "answer: 2" in shown and "2 steps" in shown


RUN = ["agent", "run", "no-such-model", "q", "--tools", "Calculator"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-tokens", "0"], ["--max-tokens", "'0'", "from 1 on"]),
        (["--max-tokens", "many"], ["--max-tokens", "'many'", "from 1 on"]),
        (["--max-seconds", "-3"], ["--max-seconds", "'-3'", "above 0"]),
        (["--max-seconds", "nan"], ["--max-seconds", "'nan'", "above 0"]),
        (["--max-steps", "0"], ["max_steps is 0", "1 or more"]),
        (["--inline-calls", "--protocol", "chat"], ["--inline-calls", "chat", "react"]),
        (["--answer", "nubmer"], ["--answer", "'nubmer'", "number, integer, date", "FILE.json"]),
        (["--answer", "/[/"], ["output", "not valid"]),
        (["--answer", "no-such.json"], ["--answer", "no-such.json", "no JSON Schema"]),
        (["--approvals", "no-such.yaml"], ["approvals", "no-such.yaml"]),
    ],
)
def test_bad_options_name_key_value_and_what_is_allowed(options, named, capsys):
    try:
        code = main([*RUN, *options])
    except SystemExit as stopped:  # argparse
        code = stopped.code
    said = capsys.readouterr().err
    assert code == 2 and all(part in said for part in named), said


def test_a_policy_file_with_a_bad_decision_is_refused(tmp_path, capsys):
    file = tmp_path / "approvals.yaml"
    file.write_text("rules: {git.*: perhaps}\n", encoding="utf-8")
    assert main([*RUN, "--approvals", str(file)]) == 2
    said = capsys.readouterr().err
    assert "approvals.yaml" in said and "perhaps" in said and "deny" in said


def test_an_address_cannot_be_constrained(capsys):
    assert main([*RUN[:2], "http://127.0.0.1:9/v1#m", "q", "--constrain"]) == 2
    assert "--constrain" in capsys.readouterr().err


def test_options_reach_the_run(folder, tmp_path, capsys):
    run = [*RUN[:2], folder, *RUN[3:], "--json"]
    assert main([*run, "--max-tokens", "1"]) == 1
    assert json.loads(capsys.readouterr().out)["exit_reason"] == "token_budget"
    assert main([*run, "--max-seconds", "1e-9"]) == 1
    assert json.loads(capsys.readouterr().out)["exit_reason"] == "time_budget"
    main([*run, "--strategy", "act", "--max-steps", "2", "--constrain"])
    masked = json.loads(capsys.readouterr().out)["runs"][0]
    assert not masked["flags"].get("parse_failure") and masked["messages"][2]["role"] == "assistant"
    assert make_policy(folder, "react", True).constrain


@pytest.mark.parametrize("question", ["", " \n"])
def test_a_question_without_words_is_refused_before_a_model_is_loaded(question, capsys):
    assert main([*RUN[:3], question, *RUN[4:]]) == 2
    assert f"the question is {question!r}" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["9" * 16, "1" + ",000" * 5, "0." + "3" * 11])
def test_a_number_has_so_many_digits_at_most(answer):
    assert answer_form("number").problem(answer) and answer_form("integer").problem(answer)


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (
            "number",
            ["3", "-0.5", "1,200.25", "9" * 15, "999,999,999,999,999"],
            ["", "three", "3 apples", "1e5", "1.", "1,20"],
        ),
        ("integer", ["986", "-2"], ["9.5", "1,200"]),
        ("date", ["2023-01-30"], ["2023-13-01", "30 January 2023"]),
        ("/yes|no/", ["yes"], ["maybe", "yes, no"]),
    ],
)
def test_forms_of_an_answer(form, right, wrong):
    read = answer_form(form)
    assert all(read.problem(answer) is None for answer in right)
    assert all(read.problem(answer) is not None for answer in wrong)


def test_an_answer_has_the_form_that_was_asked_for(folder, tmp_path, capsys):
    """A model without sense writes it where the form is forced; unforced, it is not let through."""
    schema = tmp_path / "form.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "maxItems": 2}')
    run = [*RUN[:2], folder, *RUN[3:], "--strategy", "standard", "--json"]
    for form in (*FORMS, "/(left|right) [0-9]/", str(schema)):
        assert main([*run, "--answer", form, "--constrain"]) == 0
        answer = json.loads(capsys.readouterr().out)["answer"]
        assert answer_form(form).problem(answer) is None
    assert main([*run, "--answer", "date"]) == 1
    assert json.loads(capsys.readouterr().out)["answer"] is None


def test_a_file_that_is_no_schema_is_refused(tmp_path, capsys):
    for text, said in (("{", "no JSON Schema"), ("[1]", "is an object"), ('{"type": 3}', "valid")):
        (tmp_path / "form.json").write_text(text)
        assert main([*RUN, "--answer", str(tmp_path / "form.json")]) == 2
        assert said in capsys.readouterr().err


def test_an_endpoint_without_its_client_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "openai", None)
    assert main([*RUN[:2], "http://127.0.0.1:9/v1#m", "q"]) == 2
    assert "pip install -e '.[openai]' in the project's folder" in capsys.readouterr().err
