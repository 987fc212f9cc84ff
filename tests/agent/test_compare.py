"""Arms, benchmarks and strategies compared: scores, exit reasons, and what is written down."""

import json

import pytest

from pipeline.agent.environments.encyclopedia import Question
from pipeline.agent.policies import Reply, ScriptedPolicy
from pipeline.agent.strategies import STRATEGIES
from pipeline.agent.transcripts import documents_from_runs, write_runs
from pipeline.evaluation.agents import (
    Arm,
    arithmetic_benchmark,
    compare_agents,
    fever_benchmark,
    hotpot_benchmark,
)

PROBLEMS = [Question(str(n), f"{n} boxes of 12?", str(12 * n)) for n in range(1, 5)]


def calculating(request):
    number = int(request.task_id.split("@")[0])
    if request.messages[-1].kind == "observation":
        return f"Thought: done.\nAction: Finish[{request.messages[-1].content}]"
    if number == 4:
        return "Thought: 48 it is."
    return f"Thought: x\nAction: Calculator[{number} * {12 if number < 3 else 13}]"


def test_only_submitted_right_answers_score(tmp_path):
    kept = []
    (row,) = compare_agents(
        {"base": Arm(ScriptedPolicy(calculating, 5))},
        [arithmetic_benchmark(PROBLEMS)],
        ["react"],
        on_run=kept.append,
    )
    assert (row["arm"], row["benchmark"], row["strategy"]) == ("base", "arithmetic", "react")
    assert (row["n"], row["right"], row["accuracy"]) == (4, 2, 0.5)
    assert row["standard_error"] == pytest.approx(0.25)
    assert row["exit_reasons"] == {"finished": 3, "parse_failures": 1}
    assert row["calls"] == {"Calculator": 3}
    assert row["steps_per_question"] == (3 * 2 + 3) / 4
    assert row["tokens_per_question"] == 5 * 9 / 4
    assert "parse_failures" in row["diagnosis"][0]
    json.dumps(row)
    path = tmp_path / "traces.jsonl"
    write_runs(path, kept)
    documents = documents_from_runs(path)
    assert len(documents) == 2
    assert documents[0]["text"].startswith("Question: 1 boxes of 12?\nThought: x\nAction: Calcu")


def test_every_combination_has_a_row_and_its_own_instructions():
    seen = set()

    def policy(request):
        seen.add(request.messages[0].content.split("\n")[0])
        return "Answer: 12\nFinish[12]" if request.protocol != "react" else "Finish[12]"

    arms = {"a": Arm(ScriptedPolicy(policy)), "b": Arm(ScriptedPolicy(policy), inline_calls=True)}
    rows = compare_agents(arms, [arithmetic_benchmark(PROBLEMS[:1])], ["cot", "react", "standard"])
    assert [(r["arm"], r["strategy"], r["right"]) for r in rows] == [
        (arm, name, 1) for arm in "ab" for name in ("cot", "react", "standard")
    ]
    assert len(seen) == 3


def test_inline_calls_of_an_arm_are_switched_on_in_the_prompt():
    prompts = []

    def policy(request):
        prompts.append(request.messages[0].content)
        return "Finish[12]"

    arms = {"off": Arm(ScriptedPolicy(policy)), "on": Arm(ScriptedPolicy(policy), True)}
    compare_agents(arms, [arithmetic_benchmark(PROBLEMS[:1])], ["react"])
    assert ["Inside a thought" in prompt for prompt in prompts] == [False, True]


def test_an_evaluator_reaches_reflexion_without_the_gold_answer():
    shown = []

    class Policy:
        def ask(self, requests):
            shown.extend(m.content for r in requests for m in r.messages[1:])
            return [Reply("Finish[7]") for _ in requests]

    question = Question("1", "A riddle?", "gold-987")
    (row,) = compare_agents({"a": Arm(Policy())}, [arithmetic_benchmark([question])], ["reflexion"])
    assert row["right"] == 0
    assert row["steps_per_question"] == STRATEGIES["reflexion"].trials
    assert not any("987" in text for text in shown)


def test_real_benchmarks_can_be_built(shared_data):
    pages = shared_data("hotpot_distractor_reflexion100.json")
    claims = shared_data("fever_paper_dev_first1000.jsonl")
    benchmarks = [hotpot_benchmark(pages, 3), fever_benchmark(claims, pages, 3)]
    gold = {q.question_id: q.gold for b in benchmarks for q in b.questions}
    perfect = ScriptedPolicy(lambda request: f"Finish[{gold[request.task_id]}]")
    rows = compare_agents({"oracle": Arm(perfect)}, benchmarks, ["react", "act"])
    assert [row["accuracy"] for row in rows] == [1.0] * 4
    assert [b.limits.max_steps for b in benchmarks] == [7, 5]
