"""The open-book look-up, arithmetic, and the metrics of HotpotQA and FEVER."""

import json

import pytest

from pipeline.agent.environments.arithmetic import arithmetic_tools, number_in, number_right
from pipeline.agent.environments.encyclopedia import Encyclopedia, Question, make_tasks
from pipeline.agent.limits import Limits
from pipeline.agent.loop import run_episode, run_episodes
from pipeline.agent.policies import ScriptedPolicy
from pipeline.agent.tasks import Settings, Task
from pipeline.errors import ConfigError
from pipeline.evaluation.fever import evidence_titles, label_right, load_fever, read_label
from pipeline.evaluation.hotpot import exact_match, f1, load_hotpot

PAGES = {
    "Lake Garda": [f" Sentence {n} on water." for n in range(1, 5)]
    + [" The lake is deep.", " It has Trouts.", " No trout is blue.", " A trout swims."],
    "Garda": ["A town at the lake."],
    "Café Müller": ["A dance piece by Pina Bausch."],
}


def answers(*calls):
    box = Encyclopedia(PAGES).tools()
    return [box.execute(name, argument, {}).result for name, argument in calls]


def test_search_shows_the_first_five_sentences():
    (shown,) = answers(("Search", "lake  garda"))
    assert shown == (
        "Sentence 1 on water. Sentence 2 on water. Sentence 3 on water. Sentence 4 on water. "
        "The lake is deep."
    )


def test_search_is_blind_to_accents_and_names_similar_pages():
    assert answers(("Search", "cafe muller")) == ["A dance piece by Pina Bausch."]
    (missed,) = answers(("Search", "Lake Gardaa"))
    assert missed.startswith("Could not find [Lake Gardaa]. Similar: ['Lake Garda', ")
    (by_text,) = answers(("Search", "Pina Bausch"))
    assert by_text == "Could not find [Pina Bausch]. Similar: ['Café Müller']"
    assert answers(("Search", "Qqq")) == ["Could not find [Qqq]. Similar: []"]


def test_lookup_goes_on_with_the_same_keyword_and_restarts_with_another():
    found = answers(
        ("Search", "Lake Garda"),
        ("Lookup", "trout"),
        ("Lookup", "Trout"),
        ("Lookup", "deep"),
        ("Lookup", "trout"),
        ("Lookup", "trout"),
        ("Lookup", "trout"),
        ("Lookup", "trout"),
        ("Lookup", "whale"),
    )[1:]
    assert found == [
        "(Result 1 / 3) It has Trouts.",
        "(Result 2 / 3) No trout is blue.",
        "(Result 1 / 1) The lake is deep.",
        "(Result 1 / 3) It has Trouts.",
        "(Result 2 / 3) No trout is blue.",
        "(Result 3 / 3) A trout swims.",
        "No more results.",
        "No sentence holds [whale].",
    ]


def test_lookup_needs_an_open_page_and_a_miss_closes_it():
    closed = "No page is open. Search for one first."
    assert answers(("Lookup", "x")) == [closed]
    assert answers(("Search", "Garda"), ("Search", "Qqq"), ("Lookup", "lake"))[-1] == closed


def test_episodes_do_not_share_the_open_page():
    questions = [Question("a", "q?", "secret"), Question("b", "q?", "secret")]
    tasks = make_tasks(questions, Encyclopedia(PAGES))

    def policy(request):
        if len(request.messages) == 1:
            return f"Action: Search[{'Garda' if request.task_id == 'a' else 'Lake Garda'}]"
        if sum(m.role == "assistant" for m in request.messages) == 1:
            return "Action: Lookup[lake]"
        return f"Finish[{request.messages[-1].content}]"

    first, second = run_episodes(tasks, ScriptedPolicy(policy), Encyclopedia({}).tools())
    assert first.answer == "(Result 1 / 1) A town at the lake."
    assert second.answer == "(Result 1 / 1) The lake is deep."


def test_looking_a_keyword_up_again_may_be_allowed():
    limits = Limits(repeats_per_tool={"Lookup": 3})
    turns = ["Action: Search[Lake Garda]", *["Action: Lookup[trout]"] * 3, "Finish[x]"]
    box = Encyclopedia(PAGES).tools()
    result = run_episode(Task("q"), ScriptedPolicy(turns), box, Settings(limits=limits))
    assert result.exit_reason == "finished"
    assert result.messages[-2].content == "(Result 3 / 3) A trout swims."


def test_exact_match_and_f1():
    assert exact_match("The  Eiffel Tower!", "eiffel tower")
    assert not exact_match(None, "x") and not exact_match("x y", "x")
    assert f1("the red big house", "big house") == pytest.approx(0.8)
    assert f1("yes it is", "yes") == 0.0
    assert f1(None, "x") == 0.0 and f1("a", "b") == 0.0


def test_fever_labels():
    assert label_right("supports", "SUPPORTS") and label_right("REFUTED.", "REFUTES")
    assert read_label("Not enough information") == "NOT ENOUGH INFO"
    assert read_label("SUPPORTS or REFUTES") is None and read_label("maybe") is None
    assert not label_right(None, "SUPPORTS")


def test_both_shapes_of_a_hotpot_file(tmp_path):
    path = tmp_path / "hotpot.json"
    pairs = [["A", ["One.", " Two."]], ["B", ["Three."]]]
    columns = {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]}
    base = {"question": "q", "answer": "a"}
    path.write_text(json.dumps([{**base, "_id": "1", "context": pairs}]))
    first = load_hotpot(path)
    path.write_text(json.dumps([{**base, "id": "1", "context": columns}]))
    second = load_hotpot(path)
    assert first[0] == second[0] == [Question("1", "q", "a")]
    assert first[1].pages == second[1].pages == {"A": ["One.", "Two."], "B": ["Three."]}
    path.write_text('[{"claim": "x"}]')
    with pytest.raises(ConfigError, match="not a HotpotQA"):
        load_hotpot(path)


def test_fever_file_names_the_bad_line(tmp_path):
    path = tmp_path / "fever.jsonl"
    good = {"id": 1, "claim": "c", "label": "REFUTES", "evidence": [[[1, 2, "A_-LRB-b-RRB-", 0]]]}
    path.write_text(json.dumps(good) + "\n")
    assert load_fever(path) == [Question("1", "c", "REFUTES", "Claim")]
    assert evidence_titles(path) == {"A (b)"}
    path.write_text(
        json.dumps(good) + "\n" + json.dumps({**good, "id": 2, "label": "MAYBE"}) + "\n"
    )
    with pytest.raises(ConfigError, match=r":2: .*SUPPORTS"):
        load_fever(path)


def test_numbers_are_compared_as_numbers():
    assert number_right("The answer is 1,200.50 euros", "1200.5")
    assert number_right("3 + 4 = 7", "7") and number_right("1/2", "0.5")
    assert not number_right("70", "7") and not number_right(None, "7")
    assert not number_right("none", "7")
    assert number_in("1/0") is None and number_in("−3") == -3


def test_arithmetic_through_the_executor():
    turns = ["Thought: x\nAction: Calculator[37 * 24]", "Final Answer: 888"]
    result = run_episode(Task("q"), ScriptedPolicy(turns), arithmetic_tools())
    assert result.messages[-2].content == "888" and number_right(result.answer, "888")


def test_real_hotpot_pages_can_be_searched(shared_data):
    questions, encyclopedia = load_hotpot(shared_data("hotpot_distractor_reflexion100.json"))
    assert len(questions) == 100 and len(encyclopedia.pages) > 900
    box = encyclopedia.tools()
    shown = box.execute("Search", "VIVA Media", {}).result
    assert "Gesellschaft mit beschränkter Haftung" in shown or "GmbH" in shown
    for title in list(encyclopedia.pages)[:50]:
        assert not box.execute("Search", title, {}).result.startswith("Could not find")
    missed = box.execute("Search", "VIVA Media AG", {}).result
    assert missed.startswith("Could not find [VIVA Media AG]. Similar: ['VIVA Media'")


def test_real_fever_claims(shared_data):
    path = shared_data("fever_paper_dev_first1000.jsonl")
    claims = load_fever(path)
    assert len(claims) == 1000 and {c.gold for c in claims} == {
        "SUPPORTS",
        "REFUTES",
        "NOT ENOUGH INFO",
    }
    assert "Soul Food (film)" in evidence_titles(path)
