"""Strategies: each test fails if the strategy did another thing than its paper says."""

import re

import pytest

from pipeline.agent.environments.desks import library_tools
from pipeline.agent.instructions import FOLDER, instructions_for, load_instructions
from pipeline.agent.limits import Limits
from pipeline.agent.policies import PolicyError, Reply
from pipeline.agent.strategies import STRATEGIES, Strategy, fold_answer, run_strategy
from pipeline.agent.tasks import Settings, Task
from pipeline.agent.toolbox import EnvironmentTools
from pipeline.errors import ConfigError

GOLD = "the-gold-answer"


class Recording:
    """A policy that answers by a function and keeps every request."""

    def __init__(self, answer):
        self.answer, self.requests, self.batches = answer, [], []

    def ask(self, requests):
        self.requests.extend(requests)
        self.batches.append(len(requests))
        made = [self.answer(request) for request in requests]
        return [Reply(m, 10, 1) if isinstance(m, str) else m for m in made]

    @property
    def shown(self):
        return "\n".join(m.content for r in self.requests for m in r.messages)


def box():
    return EnvironmentTools(library_tools())


def run(name, policy, tasks=None, **options):
    return run_strategy(name, tasks or [Task("How many?", "t")], policy, box(), **options)


def test_the_table_has_the_settings_of_the_papers():
    assert list(STRATEGIES) == [
        "standard",
        "cot",
        "act",
        "react",
        "cot_sc",
        "react_then_cot_sc",
        "cot_sc_then_react",
        "reflexion",
        "last_trajectory_memory",
        "self_refine",
    ]
    assert (STRATEGIES["cot_sc"].samples, STRATEGIES["cot_sc"].temperature) == (21, 0.7)
    assert 1 <= STRATEGIES["reflexion"].memory <= 3


def test_standard_asks_once_without_tools_or_thoughts():
    policy = Recording(lambda r: "Rome\nMore")
    (result,) = run("standard", policy)
    assert (result.answer, result.exit_reason, result.steps) == ("Rome", "finished", 1)
    assert policy.requests[0].tools == () and "catalogo" not in policy.shown
    assert policy.requests[0].temperature == 0.0


def test_cot_needs_an_answer_line():
    (result,) = run("cot", Recording(lambda r: "Thought: 3 and 4.\nAnswer: 7"))
    assert result.answer == "7"
    (result,) = run("cot", Recording(lambda r: "It must be 7."))
    assert (result.answer, result.exit_reason) == (None, "parse_failures")


def test_react_keeps_its_thoughts_and_act_has_none():
    def answer(request):
        return ["Thought: why\nAction: catalogo[Il Gattopardo]", "Finish[5]"][
            sum(m.role == "assistant" for m in request.messages)
        ]

    for name, thinks in [("react", True), ("act", False)]:
        policy = Recording(answer)
        (result,) = run(name, policy)
        assert (result.answer, result.steps) == ("5", 2)
        assert any("why" in m.content for m in result.final.messages) is thinks
        assert ("Thought:" in policy.requests[0].messages[0].content) is thinks
        assert "catalogo[titolo]" in policy.requests[0].messages[0].content


def test_self_consistency_takes_the_majority_of_sampled_answers():
    def answer(request):
        number = int(request.task_id.split("#")[1])
        return f"Answer: {['no', 'The Yes!', 'yes.'][min(number % 4, 2)]}"

    policy = Recording(answer)
    (result,) = run("cot_sc", policy)
    assert policy.batches == [21]
    assert {request.temperature for request in policy.requests} == {0.7}
    assert len({request.seed for request in policy.requests}) == 21
    assert result.votes == {"no": 6, "yes": 15} and result.answer == "The Yes!"
    assert result.task_id == "t" and len(result.runs) == 21


def test_self_consistency_ties_go_to_the_earliest_and_failures_do_not_vote():
    def answer(request):
        number = int(request.task_id.split("#")[1])
        return {0: "nothing", 1: "Answer: b", 2: "Answer: a"}.get(number, "nothing")

    (result,) = run("cot_sc", Recording(answer))
    assert (result.answer, result.votes) == ("b", {"b": 1, "a": 1})
    (silent,) = run("cot_sc", Recording(lambda r: "nothing"))
    assert (silent.answer, silent.exit_reason) == (None, "parse_failures")


def test_react_falls_back_only_without_an_answer():
    def answer(request):
        if "#" in request.task_id:
            return "Answer: from samples"
        if request.task_id == "solved":
            return "Finish[from react]"
        return f"Action: catalogo[{len(request.messages)}]"

    policy = Recording(answer)
    tasks = [Task("q", "solved"), Task("q", "open")]
    settings = Settings(limits=Limits(max_steps=2))
    solved, open_one = run("react_then_cot_sc", policy, tasks, settings=settings)
    assert (solved.answer, solved.path, len(solved.runs)) == ("from react", "react", 1)
    assert (open_one.answer, open_one.path) == ("from samples", "cot_sc")
    assert len(open_one.runs) == 22 and open_one.strategy == "react_then_cot_sc"
    assert open_one.steps == 2 + 21


@pytest.mark.parametrize(("agreeing", "path"), [(11, "cot_sc"), (10, "react")])
def test_samples_fall_back_to_react_with_fewer_than_half_of_the_votes(agreeing, path):
    def answer(request):
        if "#" not in request.task_id:
            return "Finish[from react]"
        number = int(request.task_id.split("#")[1])
        return f"Answer: {'same' if number < agreeing else number}"

    (result,) = run("cot_sc_then_react", Recording(answer))
    assert result.path == path
    assert result.answer == {"cot_sc": "same", "react": "from react"}[path]
    assert result.votes["same"] == agreeing


class Failing(Recording):
    """Fails in every trial; its reflections are numbered."""

    def __init__(self):
        super().__init__(self.turn)
        self.reflections = 0

    def turn(self, request):
        if request.protocol != "direct":
            return "Thought: guess\nFinish[wrong]"
        self.reflections += 1
        return f"Reflection: lesson {self.reflections}"


def test_reflexion_learns_from_its_last_reflections_only():
    policy = Failing()
    (result,) = run("reflexion", policy, evaluator=lambda task, r: r.answer == GOLD)
    assert (len(result.runs), result.answer) == (5, "wrong")
    assert result.lessons == ("lesson 1", "lesson 2", "lesson 3", "lesson 4")
    last = next(r for r in policy.requests if r.task_id == "t@5").messages[1].content
    assert "lesson 1" not in last
    assert all(f"- lesson {n}" in last for n in (2, 3, 4))
    first = next(r for r in policy.requests if r.task_id == "t@1").messages[1].content
    assert first == "Question: How many?"
    assert GOLD not in policy.shown
    assert result.tokens_out == 5 + 4 and result.tokens_in == 90


def test_reflexion_stops_when_the_evaluator_is_content_and_leaves_the_others():
    def answer(request):
        if request.protocol == "direct":
            return "be right"
        if request.task_id.startswith("easy"):
            return "Finish[right]"
        return "Finish[right]" if "be right" in request.messages[1].content else "Finish[wrong]"

    policy = Recording(answer)
    tasks = [Task("q", "easy"), Task("q", "hard")]
    easy, hard = run("reflexion", policy, tasks, evaluator=lambda t, r: r.answer == "right")
    assert (len(easy.runs), easy.lessons) == (1, ())
    assert (len(hard.runs), hard.answer, hard.lessons) == (2, "right", ("be right",))
    assert policy.batches == [2, 1, 1]


def test_reflexion_ends_a_task_whose_reflection_cannot_be_asked():
    def answer(request):
        return PolicyError("down") if request.protocol == "direct" else "Finish[wrong]"

    (result,) = run("reflexion", Recording(answer), evaluator=lambda t, r: False)
    assert len(result.runs) == 1


def test_last_trajectory_memory_shows_the_last_attempt_itself_and_asks_no_reflection():
    def answer(request):
        return f"Thought: attempt {request.task_id}\nFinish[wrong]"

    policy = Recording(answer)
    (result,) = run("last_trajectory_memory", policy, evaluator=lambda t, r: False)
    assert len(result.runs) == 5 and policy.batches == [1] * 5
    last = policy.requests[-1].messages[1].content
    assert "attempt t@4" in last and "attempt t@3" not in last


def test_trials_need_an_evaluator():
    with pytest.raises(ConfigError, match="evaluator"):
        run("reflexion", Failing())


def test_self_refine_uses_its_own_feedback_until_it_is_content():
    def answer(request):
        text = request.messages[-1].content
        if request.protocol == "direct":
            return "It is correct." if "Draft: 2" in text else "Feedback: too small"
        return "Answer: 2" if "Feedback: too small" in text else "Answer: 1"

    policy = Recording(answer)
    (result,) = run("self_refine", policy)
    assert (result.answer, len(result.runs)) == ("2", 2)
    assert result.lessons == ("too small", "It is correct.")
    refining = next(r for r in policy.requests if r.task_id == "t~1")
    assert refining.messages[0].content == load_instructions("refine-v1")


def test_self_refine_keeps_the_draft_when_a_refinement_cannot_be_read_and_ends():
    def answer(request):
        if request.protocol == "direct":
            return "wrong"
        return "mumble" if "Draft:" in request.messages[-1].content else "Answer: 1"

    (result,) = run("self_refine", Recording(answer))
    assert (result.answer, len(result.runs), len(result.lessons)) == ("1", 5, 4)


def test_a_strategy_of_ones_own_and_an_unknown_one():
    mine = Strategy("vote", "cot", "plain", samples=3, temperature=1.0)
    policy = Recording(lambda r: "Answer: x")
    (result,) = run("mine", policy, strategy=mine)
    assert policy.batches == [3] and result.strategy == "mine"
    with pytest.raises(ConfigError, match="standard, cot, act"):
        run("tree", policy)


def test_loop_strategies_follow_the_protocol():
    policy = Recording(lambda r: "It is 5.")
    (result,) = run("react", policy, settings=Settings(protocol="chat"))
    assert result.answer == "It is 5."
    assert policy.requests[0].messages[0].content == load_instructions("chat-v1")


def test_instruction_files_are_versioned_and_hold_nothing_volatile():
    for path in FOLDER.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert path.stem.rsplit("-v", 1)[1].isdigit()
        assert not re.search(r"\{\w*\}", text.replace("{tools}", "", 1)) and "202" not in text
    assert instructions_for("react", "no-such-family") == load_instructions("react-v1")
    with pytest.raises(ConfigError, match="react-v1"):
        load_instructions("react-v999")


def test_answers_are_folded_for_the_vote():
    assert fold_answer(" The  Eiffel tower. ") == fold_answer("eiffel Tower")
    assert fold_answer("3.5") != fold_answer("35")
