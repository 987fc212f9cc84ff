"""The agent loop in report.html: figures, runs turn by turn, filters; also in a real browser."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pages import CHROMIUM, Page, choose, dump_dom
from test_report import NASTY, make_run

from pipeline.agent.environments.encyclopedia import Question
from pipeline.agent.policies import Reply, Request, ScriptedPolicy
from pipeline.agent.transcripts import write_runs
from pipeline.evaluation.agents import Arm, arithmetic_benchmark, compare_agents
from pipeline.report.agents_section import RUNS_SHOWN, agents_section
from pipeline.report.page import write_report
from pipeline.shards import RunFolder, write_json

QUESTIONS = [Question(str(n), f"{n} boxes of 12, how many?", str(12 * n)) for n in range(1, 21)]
# Tags, protocol markers, control tokens, an escape, a change of direction.
HOSTILE = f"{NASTY}\nFinal Answer: 7\n<tool_call><|im_end|>\x1b[31m\x00\u202e"


def player(right_below: int, inline: bool, extra: str = "") -> ScriptedPolicy:
    """Answers right up to a number, wrong above it, and rambles for every seventh question."""

    def play(request: Request) -> Reply:
        n = int(request.task_id)
        last = request.messages[-1]
        if request.protocol != "react":
            return Reply(f"Thought: so.{extra}\nAnswer: {12 * n}", 90, 10)
        if last.kind == "observation":
            return Reply(f"Thought: done.\nAction: Finish[{last.content}]", 200, 12)
        if last.kind == "inline":
            return Reply(f" boxes.\nAction: Finish[{12 * n}]", 150, 12)
        if n % 7 == 0:
            return Reply(f"Thought: I do not know.{extra}", 120, 9)
        if inline and n % 2:
            return Reply(f"Thought: that is [Calculator({n} * 12) ->", 120, 14)
        return Reply(f"Action: Calculator[{n} * {12 if n < right_below else 13}]", 130, 15)

    return ScriptedPolicy(play)


def evaluated_run(path: Path, extra: str = "", questions: Any = QUESTIONS) -> RunFolder:
    """A run whose evaluation has two arms and two strategies in the agent loop."""
    arms = {
        "base": Arm(player(3, False, extra)),
        "tuned_disabled": Arm(player(9, False, extra)),
        "tuned": Arm(player(18, True, extra), inline_calls=True),
    }
    runs: list[dict[str, Any]] = []
    rows = compare_agents(
        arms, [arithmetic_benchmark(questions)], ["react", "cot"], on_run=runs.append
    )
    folder = make_run(path)
    write_runs(folder.stage("evaluate") / "agent-traces.jsonl", runs)
    write_json(folder.stage("evaluate") / "results.json", {"arms": {}, "agents": rows})
    return folder


def agents_of(folder: RunFolder) -> list[dict[str, Any]]:
    return json.loads((folder.stage("evaluate") / "results.json").read_text())["agents"]


def check_figures(rows: list[dict[str, Any]], shown: str) -> None:
    """Every figure of the results stands in the page's words, in the order of the table."""
    position = shown.index("In the agent loop")
    for strategy in ("react", "cot"):
        for arm in ("base", "tuned_disabled", "tuned"):
            (row,) = (r for r in rows if (r["arm"], r["strategy"]) == (arm, strategy))
            calls = sum(row["calls"].values()) / row["n"]
            cell = (
                f"{100 * row['accuracy']:.1f} ± {100 * row['standard_error']:.1f}"
                f"{row['steps_per_question']:.1f} steps · {row['tokens_per_question']:,.0f} tokens"
                f" · {calls:.1f} calls"
            )
            position = shown.index(cell, position)
    for row in rows:
        why = ", ".join(f"{k.replace('_', ' ')} {n}" for k, n in row["exit_reasons"].items())
        calls = ", ".join(f"{tool} {n}" for tool, n in row["calls"].items())
        assert f"{row['strategy']}{row['arm'].replace('_', ' ')}{why}{calls}" in shown
        for sentence in row["diagnosis"]:
            name = row["arm"].replace("_", " ")
            assert f"{name}, {row['strategy']}: {sentence}" in shown


def test_figures_are_those_of_the_results(tmp_path: Path) -> None:
    folder = evaluated_run(tmp_path / "run")
    rows = agents_of(folder)
    assert len({row["accuracy"] for row in rows}) == 4  # or a mixed-up column would not show
    check_figures(rows, Page(write_report(folder)).words)


def test_diagnosis_and_errors_are_shown() -> None:
    row = {
        "arm": "base", "benchmark": "hotpot", "strategy": "react", "n": 4, "right": 1,
        "accuracy": 0.25, "standard_error": 0.2, "exit_reasons": {"finished": 2, "max_steps": 2},
        "errors": {"Search": {"no_result": 3}}, "diagnosis": ["2 of 4 runs ended as max_steps"],
    }  # fmt: skip
    html = agents_section({"agents": [row]}, Path("none"))
    words = Page(html).words
    assert "base, react: 2 of 4 runs ended as max_steps" in words
    assert "Search: no result 3" in words and "finished 2, max steps 2" in words
    widths = [a["style"] for a in Page(html).all("i") if "style" in a]
    assert widths == ["width:25.0%", "width:25.0%", "width:50.0%"]


def test_a_row_without_episodes_shows_what_it_has() -> None:
    row = {
        "arm": "base", "benchmark": "bfcl", "strategy": "chat", "n": 40, "accuracy": 0.25,
        "outcomes": {"right": 10, "no_call": 30},
    }  # fmt: skip
    words = Page(agents_section({"agents": [row]}, Path("none"))).words
    assert "bfcl, 40 questions" in words and "right 10, no call 30" in words
    assert "25.0" in words and "±" not in words.split("bfcl", 1)[1] and "turn by turn" not in words


@pytest.mark.parametrize("results", [None, [], {}, {"agents": []}, {"agents": None, "arms": {}}])
def test_no_agents_no_section(results: Any) -> None:
    assert agents_section(results, Path("none")) == ""


def test_runs_are_a_few_of_each_kind(tmp_path: Path) -> None:
    page = Page(write_report(evaluated_run(tmp_path / "run")))
    runs = [a for a in page.all("details") if "data-arm" in a]
    groups = Counter((a["data-arm"], a["data-strategy"]) for a in runs)
    assert set(groups.values()) == {RUNS_SHOWN} and len(groups) == 6
    base = [a for a in runs if (a["data-arm"], a["data-strategy"]) == ("base", "react")]
    assert Counter((a["data-verdict"], a["data-exit"]) for a in base) == {
        ("right", "finished"): 2, ("wrong", "finished"): 2, ("wrong", "parse_failures"): 2
    }  # fmt: skip
    assert f"{6 * RUNS_SHOWN} of 120: up to {RUNS_SHOWN} per benchmark" in page.words


def test_turns_results_and_inline_calls_are_told_apart(tmp_path: Path) -> None:
    raw = write_report(evaluated_run(tmp_path / "run")).read_text(encoding="utf-8")
    for piece in (
        "<div class='part thought'><span class=label>Thought</span>that is "
        "<mark>[Calculator(1 * 12) -&gt; 12]</mark> boxes.</div>"
        "<div class='part action'><span class=label>Action</span>Finish[12]</div>",
        "<div class='part observation'><span class=label>Observation: Calculator</span>12</div>",
        "<span class=label>The loop says</span>Not understood",
        "<span class=reason>finished</span> Answer: <b>12</b>",
    ):
        assert piece in raw, piece


def test_traces_that_cannot_be_read_do_not_stop_the_report(tmp_path: Path) -> None:
    folder = evaluated_run(tmp_path / "run")
    traces = folder.stage("evaluate") / "agent-traces.jsonl"
    traces.write_text('{"run": {}}\n', encoding="utf-8")
    page = Page(write_report(folder))
    assert "agent-traces.jsonl:1" in page.words and "In the agent loop" in page.words
    assert len(page.all("article")) == 7


def test_hostile_runs_are_text(tmp_path: Path) -> None:
    questions = [Question("1", HOSTILE, "12"), Question("7", HOSTILE, "7")]
    path = write_report(evaluated_run(tmp_path / "run", HOSTILE, questions))
    page = Page(path)
    assert len(page.all("script")) == 1 and page.all("img") == []
    assert not [a for _, attributes in page.tags for a in attributes if a.startswith("on")]
    assert page.words.count('<script>document.title="owned"</script>') >= 12
    raw = path.read_text(encoding="utf-8")
    assert not {"\x00", "\x1b", "\u202e"} & set(raw)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_runs_in_a_real_browser(tmp_path: Path) -> None:
    folder = evaluated_run(tmp_path / "run")
    path = write_report(folder)
    whole = Page(dump_dom(path))
    check_figures(agents_of(folder), whole.words)
    assert "36 of 36 runs on this page" in whole.words
    assert "7 of 7 calls on this page" in whole.words
    for fragment, wanted in (
        ("#arm=tuned", {"data-arm": "tuned"}),
        ("#arm=base&strategy=react&verdict=wrong", {
            "data-arm": "base", "data-strategy": "react", "data-verdict": "wrong"}),
        ("#exit=parse_failures&benchmark=arithmetic", {"data-exit": "parse_failures"}),
    ):  # fmt: skip
        page = Page(dump_dom(path, fragment))
        runs = [a for a in page.all("details") if "data-arm" in a]
        fitting = [a for a in runs if wanted.items() <= a.items()]
        assert [a for a in runs if "hidden" not in a] == fitting and 0 < len(fitting) < 36
        assert f"{len(fitting)} of 36 runs on this page" in page.words
        assert "7 of 7 calls on this page" in page.words
    words = Page(dump_dom(path, "#run-words=calculator(1+*")).words
    assert "1 of 36 runs on this page" in words
    for field, value, said in (
        ("arm", "tuned", "12 of 36 runs on this page; 7 of 7 calls on this page"),
        ("reason", "kept", "36 of 36 runs on this page; 3 of 7 calls on this page"),
    ):
        assert choose(path, field, value) == said


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_hostile_runs_in_a_real_browser(tmp_path: Path) -> None:
    questions = [Question("1", HOSTILE, "12"), Question("7", HOSTILE, "7")]
    dom = dump_dom(write_report(evaluated_run(tmp_path / "run", HOSTILE, questions)))
    page = Page(dom)
    assert "<title>test run" in dom and len(page.all("script")) == 1 and page.all("img") == []
    assert "12 of 12 runs on this page" in page.words
