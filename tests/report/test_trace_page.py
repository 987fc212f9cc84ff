"""The page of a trace file: events and runs, bad and broken files, hostile and large ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import CHROMIUM, Page, dump_dom
from test_report import NASTY

from pipeline.agent.demos import run_demo
from pipeline.agent.diagnosis import summarise
from pipeline.agent.environments.arithmetic import arithmetic_tools
from pipeline.agent.loop import run_episodes
from pipeline.agent.policies import Reply, Request, ScriptedPolicy
from pipeline.agent.tasks import EpisodeResult, Settings, Task
from pipeline.agent.trace import TraceFile
from pipeline.agent.transcripts import run_row, write_runs
from pipeline.agent.turns import Call
from pipeline.cli import main
from pipeline.errors import ConfigError
from pipeline.report import runs_list, trace_page
from pipeline.report.episodes import ENTRIES_SHOWN, TEXT_SHOWN
from pipeline.report.trace_page import write_trace_report
from pipeline.report.traces import read_trace

HOSTILE = f"{NASTY}\nFinal Answer: 7\n<tool_call><|im_end|>\x1b[31m\x00\u202e"


def react(request: Request) -> Reply:
    last = request.messages[-1]
    if last.kind == "observation":
        return Reply(f"Thought: so.\nFinal Answer: {last.content}", 30, 5)
    if any(" odd " in f" {m.content} " for m in request.messages):
        return Reply("Thought: hm", 20, 3)
    return Reply("Thought: x\nAction: Calculator[3 * 4]", 20, 7)


def inlined(request: Request) -> Reply:
    last = request.messages[-1]
    if last.kind == "inline":
        return Reply(" then.\nAction: Finish[12]", 25, 6)
    return Reply("Thought: it is [Calculator(3 * 4) ->", 20, 9)


def running(request: Request) -> Reply:
    done = request.messages[-1].kind == "inline"
    return Reply(" and that is all.") if done else Reply("It is [Calculator(3 * 4) ->", 20, 9)


def structured(request: Request) -> Reply:
    if request.messages[-1].role == "tool":
        return Reply("It is 12.", 40, 4)
    arguments = '{"expression": "3 * 4"}'
    calls = (("a", "Calculator", arguments), ("b", "Nothing", "{}"))
    return Reply("", 20, 9, calls)


KINDS = {
    "react": (react, Settings()),
    "inlined": (inlined, Settings(inline_calls=True)),
    "inline": (running, Settings(protocol="inline")),
    "chat": (structured, Settings(protocol="chat")),
}


def play(path: Path, kind: str, *questions: str) -> list[EpisodeResult]:
    """Run questions in the loop and leave the trace of their events."""
    policy, settings = KINDS[kind]
    tasks = [Task(question, f"q#{n}") for n, question in enumerate(questions)]
    with TraceFile(path) as sink:
        tools = arithmetic_tools()
        return run_episodes(tasks, ScriptedPolicy(policy), tools, settings, on_event=sink)


@pytest.mark.parametrize("kind", KINDS)
def test_events_and_runs_of_the_same_episodes_show_the_same(tmp_path: Path, kind: str) -> None:
    events, rows = tmp_path / "events.jsonl", tmp_path / "rows.jsonl"
    runs = play(events, kind, "How much?", "And this?")
    write_runs(rows, [run_row(run, True, arm="a") for run in runs])
    from_events, from_rows = read_trace(events).episodes, read_trace(rows).episodes
    assert len(from_events) == len(from_rows) == len(runs) == 2
    for run, one, other in zip(runs, from_events, from_rows, strict=True):
        told = [
            [(e.kind, e.text, e.marks, e.tool, e.call, e.failed) for e in episode.entries]
            for episode in (one, other)
        ]
        assert told[0] == told[1] and told[0]
        for episode in (one, other):
            assert episode.result is not None and not episode.left_out
            for name in ("exit_reason", "answer", "steps", "tokens", "calls", "errors", "flags"):
                assert getattr(episode.result, name) == getattr(run, name), name


def test_inline_calls_are_marked_in_the_turn(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    play(path, "inlined", "How much?")
    (entry,) = read_trace(path).episodes[0].entries
    assert entry.text is not None and entry.step == 1
    assert [entry.text[a:b] for a, b in entry.marks] == ["[Calculator(3 * 4) -> 12]"]
    assert "<mark>[Calculator(3 * 4) -&gt; 12]</mark> then." in trace_page.trace_html(path)


def test_structured_calls_are_shown_with_their_results(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    play(path, "chat", "How much?")
    words = Page(write_trace_report(path)).words
    one = words.index('Calculator({"expression": "3 * 4"})Observation: Calculator12')
    assert words.index("Nothing({})Observation: NothingError (unknown_tool)") > one


def test_calls_that_are_only_judged_are_shown(tmp_path: Path) -> None:
    """A benchmark of single turns executes nothing; its verdict has a reason."""
    path = tmp_path / "t.jsonl"
    run = play(path, "chat", "How much?")[0]
    broken = Call("Calculator", {}, "c", problem="not JSON", raw="{3")
    turn = replace(run.messages[1], calls=(*run.messages[1].calls, broken))
    one = replace(run, messages=(run.messages[0], turn), answer=None)
    write_runs(path, [{**run_row(one, False), "outcome": "wrong", "reason": "called <b> too"}])
    words = Page(write_trace_report(path)).words
    assert 'CallCalculator({"expression": "3 * 4"})Observation: Calculator(no result: not' in words
    assert "CallNothing({})" in words and "Call{3Observation" in words
    assert "wrong No answer. called <b> too" in words


def test_the_outcome_of_judged_calls_is_shown_instead_of_the_exit_reason(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    runs = play(path, "chat", "How much?", "And this?")
    judged = {"outcome": "wrong", "reason": "2 calls instead of 1"}
    write_runs(path, [{**run_row(run, False), **judged} for run in runs])
    page = Page(write_trace_report(path))
    assert "ended bywrong 2" in page.words and "finished" not in page.words
    assert "wrong, 2 of 2: 2 calls instead of 1" in page.words
    assert [run["data-exit"] for run in page.all("details")] == ["wrong", "wrong"]
    assert "wrongwrong" not in page.words  # the verdict says the same


def test_a_page_tells_what_happened_in_order(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    play(path, "react", "How much?")
    assert write_trace_report(path) == tmp_path / "one.html"
    page = Page(tmp_path / "one.html")
    position = 0
    for words in (
        "one.jsonl", "finishedended by", "2steps", "62tokens", "Turn by turn", "How much?",
        "1ThoughtxActionCalculator[3 * 4]20 tokens in, 7 out", "Observation: Calculator12",
        "2Thoughtso.Final Answer12", "Answer: 12",
    ):  # fmt: skip
        position = page.words.index(words, position)
    assert page.all("select") == [] and "Why the runs ended" not in page.words


def test_a_thought_without_words_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(START + TURN.replace("Thought: x", "Thought:"), encoding="utf-8")
    assert "1Thought(no words)4 tokens in" in Page(write_trace_report(path)).words


def test_many_runs_are_added_up(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    runs = play(path, "react", "How much?", "an odd one", "the odd two")
    page = Page(write_trace_report(path))
    summary = summarise(runs)
    assert summary.diagnosis and all(sentence in page.words for sentence in summary.diagnosis)
    assert "finished 1, parse failures 2" in page.words and "Calculator 1" in page.words
    assert [a["data-exit"] for a in page.all("details")] == [run.exit_reason for run in runs]
    assert f"{sum(run.steps for run in runs)}steps" in page.words
    assert f"{sum(run.tokens for run in runs)}tokens" in page.words


def test_every_reference_case_can_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    ended = []
    with TraceFile(path) as sink:
        for case in ("library", "paper", "stock", "calcola"):
            for variant, figures in run_demo(case)["variants"].items():
                ended += [figures["exit_reason"]] if "trace" in figures else []
                for event in figures.get("trace", ()):
                    sink({**event, "task_id": f"{case} {variant}"})
    page = Page(write_trace_report(path))
    assert [a["data-exit"] for a in page.all("details")] == ended and len(set(ended)) == 5


# -- files that are not whole or no trace ---------------------------------------------------------

START = '{"event": "start", "task_id": "q", "step": 0, "question": "Q?", "protocol": "react"}\n'
TURN = '{"event": "turn", "task_id": "q", "step": 1, "text": "Thought: x", "tokens_in": 4}\n'
CALL = '{"event": "call", "task_id": "q", "step": 1, "tool": "Search", "arguments": "a"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"t\.jsonl: nothing in it; wanted is a file of `callsieve agent run --trace`"),
        ("\n  \n", r"t\.jsonl: nothing in it"),
        ("hello\n", r"t\.jsonl:1: not JSON"),
        ('{"event": "st', r"t\.jsonl:1: not JSON"),
        (START + "oops\n" + TURN, r"t\.jsonl:2: not JSON"),
        (START + "oops\n", r"t\.jsonl:2: not JSON"),
        ("[" * 100_000 + "\n", r"t\.jsonl:1: not JSON"),
        (START + '{"text": "a document"}\n', r"t\.jsonl:2: no line of a trace"),
        ('["event"]\n', r"t\.jsonl:1: no line of a trace"),
        ("12\n", r"t\.jsonl:1: no line of a trace"),
        ("[]\n", r"t\.jsonl:1: no line of a trace"),
        ('{"run": 3}\n', r"t\.jsonl:1: no line of a trace"),
        ('{"run": {"task_id": "q"}}\n', r"t\.jsonl:1: `question` Field required"),
        (START + '{"event": "dance"}\n', r"t\.jsonl:2: .*'dance'"),
        (START + TURN.replace("4}", '"x"}'), r"t\.jsonl:2: `turn` `tokens_in` .*integer"),
    ],
)
def test_no_trace_is_refused_with_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        write_trace_report(path)
    assert not (tmp_path / "t.html").exists()


@pytest.mark.parametrize("end", [b"", b'{"event": "obs', '{"event": "é'.encode()[:-1]])
def test_a_killed_run_is_unfinished_and_no_error(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes((START + TURN + CALL).encode() + end)
    page = Page(write_trace_report(path))
    assert "Unfinished: the file ends before this run does." in page.words
    assert "Observation: Search(no result: the file ends here)" in page.words
    assert [a["data-exit"] for a in page.all("details")] == ["unfinished"]
    assert "1steps4tokensTurn by turn" in "".join(page.words.split("\n"))  # no time: not known
    assert ("Line 4 of the file, its last, is cut off" in page.words) == bool(end)


def test_a_killed_run_among_others_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    play(path, "react", "How much?")
    with path.open("a", encoding="utf-8") as file:
        file.write(START + TURN)
    assert "finished 1, unfinished 1" in Page(write_trace_report(path)).words


def test_a_task_that_is_run_again_is_another_run(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(START + TURN + START + TURN, encoding="utf-8")
    assert [len(episode.entries) for episode in read_trace(path).episodes] == [1, 1]


def test_what_comes_after_the_end_of_a_run_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    play(path, "react", "How much?")
    with path.open("a", encoding="utf-8") as file:
        file.write(TURN.replace('"q"', '"q#0"'))
    words = Page(write_trace_report(path)).words
    assert "finished 1, unfinished 1" in words and "(the beginning is not in the file)" in words


def test_a_trace_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "t.html"
    play(path, "react", "How much?")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="give the trace another name"):
        write_trace_report(path)
    assert path.read_bytes() == before


def test_report_takes_a_trace_from_the_command_line(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "t.jsonl"
    play(path, "react", "How much?")
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 't.html'}\n"
    path.write_text("x\n", encoding="utf-8")
    assert main(["report", str(path)]) == 2
    assert f"{path}:1: not JSON" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "missing.jsonl")]) == 2
    assert "neither a run folder nor a trace file" in capsys.readouterr().err


# -- hostile and large ----------------------------------------------------------------------------


def hostile_trace(path: Path) -> None:
    """Every text of a run is hostile, and one result is far too large."""
    events: list[dict[str, Any]] = [
        {"event": "start", "question": HOSTILE, "protocol": "chat"},
        {"event": "turn", "text": HOSTILE, "flags": [HOSTILE], "tokens_in": 1},
        {"event": "call", "tool": HOSTILE, "arguments": {HOSTILE: HOSTILE}},
        {"event": "observation", "tool": HOSTILE, "content": HOSTILE, "error_kind": HOSTILE},
        {"event": "observation", "tool": "T", "content": "<b>" * 1_700_000},
        {"event": "nudge", "content": HOSTILE},
        {
            "event": "exit", "exit_reason": "finished", "answer": HOSTILE, "tokens_in": 1,
            "tokens_out": 2, "seconds": 0.5, "forced_answer": HOSTILE, "detail": HOSTILE,
        },
    ]  # fmt: skip
    lines = [json.dumps({"task_id": HOSTILE, "step": 1, **event}) for event in events]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def check_harmless(html: str) -> None:
    page = Page(html)
    assert len(page.all("script")) == 1 and page.all("img") == [] and page.all("b") != []
    assert not [a for _, attributes in page.tags for a in attributes if a.startswith("on")]
    assert not {"\x00", "\x1b", "\u202e"} & set(html)
    assert page.words.count('<script>document.title="owned"</script>') >= 9
    assert f"[{5_100_000 - TEXT_SHOWN:,} more characters not shown]" in page.words
    assert len(html) < 200_000


def test_hostile_texts_are_shown_as_text(tmp_path: Path) -> None:
    path = tmp_path / "<img src=x>.jsonl"
    hostile_trace(path)
    check_harmless(write_trace_report(path).read_text(encoding="utf-8"))


def test_large_files_make_bounded_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    monkeypatch.setattr(trace_page, "EPISODES_SHOWN", 4)
    runs = play(path, "react", *["How much?"] * 3)
    labelled = [run_row(run, True, arm=arm) for arm in "ab" for run in runs]
    write_runs(path, labelled)
    page = Page(write_trace_report(path))
    assert [a["data-arm"] for a in page.all("details")] == ["a", "a", "b", "b"]
    assert "2 of 6 runs are left out of this page." in page.words and "6runs" in page.words
    monkeypatch.setattr(runs_list, "LIST_LIMIT", 1)
    assert "5 of 6 runs are left out" in Page(write_trace_report(path)).words


def test_a_long_run_is_cut_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    nudge = '{"event": "nudge", "task_id": "q", "step": 1, "content": "go on"}\n'
    path.write_text(START + nudge * (ENTRIES_SHOWN + 5) + TURN * 3, encoding="utf-8")
    words = Page(write_trace_report(path)).words
    assert words.count("go on") == ENTRIES_SHOWN and "8 more are not shown" in words


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_trace_pages_in_a_real_browser(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    play(path, "react", "How much?", "an odd one", "the odd two")
    page = write_trace_report(path)
    assert "3 of 3 runs on this page" in dump_dom(page)
    assert "2 of 3 runs on this page" in dump_dom(page, "#exit=parse_failures")
    assert "1 of 3 runs on this page" in dump_dom(page, "#run-words=odd+two")
    hostile_trace(path)
    dom = dump_dom(write_trace_report(path))
    check_harmless(dom)
    assert "<title>t.jsonl" in dom
