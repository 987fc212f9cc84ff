"""What the aggregate of many runs says, and which runs become training text."""

import json

import pytest

from pipeline.agent.demos import run_demo
from pipeline.agent.diagnosis import diagnose, diagnose_outcomes, summarise
from pipeline.agent.environments.desks import library_tools
from pipeline.agent.limits import Limits
from pipeline.agent.loop import run_episode
from pipeline.agent.policies import PolicyError, Reply, ScriptedPolicy
from pipeline.agent.strategies import run_strategy
from pipeline.agent.tasks import EpisodeResult, Settings, Task
from pipeline.agent.toolbox import EnvironmentTools
from pipeline.agent.transcripts import (
    documents_from_runs,
    run_row,
    trace_text,
    traces_to_documents,
    write_runs,
)
from pipeline.errors import ConfigError
from pipeline.tools.calculator import Calculator


def play(script, question="q", tokens=0, memory=(), **settings):
    box = EnvironmentTools([*library_tools(), Calculator()])
    task = Task(question, "t7", memory=memory)
    return run_episode(task, ScriptedPolicy(script, tokens), box, Settings(**settings))


def numbered(tools, **options):
    """A run that never ends: call after call with other arguments."""
    turns = (f"Action: {tools[n % len(tools)]}[{n} + 1]" for n in range(100))
    return play(lambda _: next(turns), **options)


def test_max_steps_with_one_tool_points_at_the_observation():
    (sentence,) = diagnose([numbered(["calc"])] * 3)
    assert sentence == (
        "3 of 3 runs ended as max_steps, mostly calling calc again and again: "
        "look at what it returns"
    )


def test_max_steps_with_different_tools_points_at_the_criterion():
    (sentence,) = diagnose([numbered(["calc", "catalogo", "Calculator"])] * 3)
    assert "with different tools: look at the criterion for being done" in sentence


def test_max_steps_without_a_call_says_that_nothing_was_submitted_or_called():
    box = EnvironmentTools([Calculator()])
    tasks = [Task("q", str(n)) for n in range(3)]
    silent = [r.final for r in run_strategy("standard", tasks, ScriptedPolicy([""]), box)]
    (sentence,) = diagnose(silent)
    assert sentence.startswith("3 of 3 runs ended as max_steps: no answer was submitted")
    assert "no tool was called" in sentence and sentence.endswith("(parse_failure)")
    both = diagnose([*silent, *[numbered(["calc"])] * 2])
    assert both[0].startswith("2 of 5 runs") and "calling calc again and again" in both[0]
    assert both[1] == sentence.replace("3 of 3", "3 of 5")
    unknown = numbered(["a", "b"], limits=Limits(max_steps=1))
    assert "with different tools" in diagnose([unknown])[0]  # a call that failed is one


def test_outcomes_of_judged_calls_tell_their_most_frequent_reasons():
    found = [("wrong", "b")] * 2 + [("wrong", "c"), ("unparseable", "x" * 999), ("wrong", "d")]
    found += [("right", None), ("no_call", "no call"), ("model_error", "gone")]
    assert diagnose_outcomes(found) == [
        "wrong, 2 of 8: b",
        "wrong, 1 of 8: c",
        "unparseable, 1 of 8: " + "x" * 200,
    ]


def test_token_budget_in_few_steps_points_at_the_tools():
    few = numbered(["calc"], tokens=600, limits=Limits(max_tokens=1000))
    assert few.steps == 3 and "the tools return too much" in diagnose([few])[0]
    many = numbered(["calc"], tokens=200, limits=Limits(max_tokens=1000))
    assert many.steps == 6 and "return too much" not in diagnose([many])[0]


def test_time_budget_and_guardrail():
    late = numbered(["calc"], limits=Limits(max_seconds=0))
    assert "infrastructure" in diagnose([late])[0]
    blocked = numbered(["calc"], guardrail=lambda stage, text: "no")
    assert "read a sample of the blocked runs (t7)" in diagnose([blocked])[0]


def test_parse_failures_and_a_dead_endpoint_say_what_they_saw():
    silent = play(lambda _: "hm")
    assert "parse_failure" in diagnose([silent])[0]

    class Down:
        def ask(self, requests):
            return [PolicyError("refused") for _ in requests]

    down = run_episode(Task("q"), Down(), EnvironmentTools([]))
    assert "look at the endpoint (refused)" in diagnose([down])[0]


def test_rare_reasons_and_finished_runs_get_no_sentence():
    runs = [play(["Finish[1]"])] * 9 + [play(lambda _: "hm")]
    assert diagnose(runs) == []
    assert diagnose([]) == []


def test_summary_adds_up():
    runs = [
        play(["Action: calc[1/0]", "Action: calc[1+1]", "Finish[2]"], tokens=10),
        play(["Action: nope[1]", "Finish[1]"], tokens=10),
        play(lambda _: "hm", tokens=10),
    ]
    summary = summarise(runs)
    assert summary.n == 3
    assert summary.exit_reasons == {"finished": 2, "parse_failures": 1}
    assert summary.calls == {"calc": 2}
    assert summary.errors == {"calc": {"division_by_zero": 1}, "unknown": {"unknown_tool": 1}}
    assert summary.mean_steps == pytest.approx(8 / 3)
    assert summary.mean_tokens == pytest.approx(80 / 3)
    assert json.loads(json.dumps(summary.as_dict()))["n"] == 3
    assert summarise([]).mean_steps == 0


def test_right_runs_become_text_without_instructions_or_lessons():
    turns = ["Thought: a\nAction: calc[5 - 3]", "Thought: b\nAction: Finish[2]"]
    run = play(turns, "How many?\n\nReally?", memory=("be careful",), instructions="SECRET RULES")
    (document,) = traces_to_documents([run], [True])
    assert document["text"] == (
        "Question: How many?\n\nReally?\nThought: a\nAction: calc[5 - 3]\nObservation: 2\n"
        "Thought: b\nAction: Finish[2]"
    )
    assert document["tools"] == ["calc"] and document["date"] is None


def test_wrong_stopped_and_nudged_runs_are_left_out_and_equal_ones_merged():
    good, stopped = play(["Finish[1]"]), play(lambda _: "hm")
    nudged = play(["hm", "Finish[1]"])
    wrong = play(["Finish[3]"])
    documents = traces_to_documents(
        [good, good, stopped, nudged, wrong], [True, True, True, True, False]
    )
    assert [d["text"] for d in documents] == ["Question: q\nFinish[1]"]


def test_gold_and_verdict_never_reach_the_text():
    def answer(request):
        return "Reflection: count again" if request.protocol == "direct" else "Finish[no]"

    class Policy:
        def ask(self, requests):
            return [Reply(answer(r)) for r in requests]

    tasks = [Task("q", "1")]
    verdicts = iter([False, True])
    (result,) = run_strategy(
        "reflexion",
        tasks,
        Policy(),
        EnvironmentTools([]),
        evaluator=lambda task, run: next(verdicts),
    )
    (document,) = traces_to_documents([result.final], [True])
    assert document["text"] == "Question: q\nFinish[no]"
    assert not any(word in document["text"] for word in ("succeed", "count again", "True"))


def test_chat_and_inline_runs_keep_the_form_of_their_protocol():
    call = '<tool_call>\n{"name": "calc", "arguments": {"expression": "5 - 3"}}\n</tool_call>'
    chat = play([call, "Two."], protocol="chat")
    assert trace_text(chat) == f"q\n{call}\n<tool_response>\n2\n</tool_response>\nTwo."
    inline = play([" [Calculator(37 * 24) ->", " 888."], "It is", protocol="inline")
    assert trace_text(inline) == "It is [Calculator(37 * 24) -> 888] 888."


def test_a_traces_file_gives_the_same_documents(tmp_path):
    turns = ["Thought: è\nAction: calc[5 - 3]", "Finish[2]"]
    runs = [play(turns), play(["Finish[9]"])]
    path = tmp_path / "traces.jsonl"
    rows = [run_row(run, right, arm="tuned") for run, right in zip(runs, [1, 0], strict=True)]
    assert write_runs(path, rows) == 2
    assert "è" in path.read_text(encoding="utf-8")
    assert documents_from_runs(path) == traces_to_documents(runs, [True, False])
    back = EpisodeResult.from_dict(json.loads(path.read_text().splitlines()[0])["run"])
    assert back.messages == runs[0].messages
    path.write_text('{"right": true}\n')
    with pytest.raises(ConfigError, match=r":1 is not a run"):
        documents_from_runs(path)


def test_demo_runs_are_readable_as_runs():
    figures = run_demo("library")["variants"]["good policy"]
    assert EpisodeResult.from_dict(figures).answer == "2"
