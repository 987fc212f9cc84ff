"""The desks and the grid as benchmarks: drawn worlds, exact answers, scripted agents."""

import json
import re
from collections import deque

import pytest

from pipeline.agent.environments.grid import draw_grids, reactive, shortest
from pipeline.agent.environments.walk import DIRECTIONS, grid_tasks
from pipeline.agent.environments.worlds import (
    TITLES,
    library_tasks,
    stock_right,
    stock_tasks,
)
from pipeline.agent.policies import Reply, ScriptedPolicy
from pipeline.agent.tasks import Settings
from pipeline.evaluation.agents import (
    Arm,
    compare_agents,
    grid_benchmark,
    library_benchmark,
    stock_benchmark,
)


def seen(request):
    return [m.content for m in request.messages if m.kind == "observation" or m.role == "tool"]


def row_of(benchmark, policy, strategy="react", **settings):
    arms = {"a": Arm(ScriptedPolicy(policy))}
    kept = []
    (row,) = compare_agents(arms, [benchmark], [strategy], Settings(**settings), on_run=kept.append)
    return row, kept


def asked_of(request):
    return next(m.content for m in request.messages if m.role == "user")


# -- the library desk ------------------------------------------------------------------------------


def librarian(request):
    """Looks every title up that is asked for, then subtracts."""
    question, found = asked_of(request), seen(request)
    titles = sorted((t for t in TITLES if t in question), key=question.index)
    looks = [f"{tool}[{title}]" for title in titles for tool in ("catalogo", "prestiti")]
    if len(found) < len(looks):
        return f"Thought: x\nAction: {looks[len(found)]}"
    if len(found) == len(looks):
        pairs = zip(found[::2], found[1::2], strict=True)
        return "Thought: x\nAction: calc[" + " + ".join(f"({a} - {b})" for a, b in pairs) + "]"
    return f"Thought: x\nAction: Finish[{found[-1]}]"


def test_a_good_policy_is_right_at_every_library_desk():
    row, kept = row_of(library_benchmark(60), librarian)
    assert (row["n"], row["accuracy"]) == (60, 1.0) and row["errors"] == {}
    assert kept[0]["run"]["steps"] == 4 and kept[0]["run"]["answer"] == "2"  # the reference case
    assert {run["run"]["steps"] for run in kept} == {4, 6}  # one title, and two together


def test_the_first_library_desk_is_the_reference_case():
    questions, _ = library_tasks(1)
    assert questions[0].text == "How many copies of Il Gattopardo are free?"
    assert questions[0].gold == "2"


def test_a_librarian_who_forgets_the_loans_is_wrong_and_one_who_repeats_is_stopped():
    def forgets(request):
        found = seen(request)
        if not found:
            return "Action: catalogo[Il Gattopardo]"
        return f"Action: Finish[{found[-1]}]"

    row, _ = row_of(library_benchmark(1), forgets)
    assert (row["right"], row["exit_reasons"]) == (0, {"finished": 1})
    row, _ = row_of(library_benchmark(3), lambda request: "Action: calc[1 + 1]")
    assert row["exit_reasons"] == {"repeated_action": 3}


# -- the stock desk --------------------------------------------------------------------------------


def storekeeper(request):
    """Asks for stock and arrivals, by structured calls or in words, and applies the rule."""
    question, found = asked_of(request), seen(request)
    sku = re.search(r"SKU-\d+", question)[0]
    if len(found) < 2:
        tool = ("stock", "incoming")[len(found)]
        if request.protocol == "chat":
            return Reply("", calls=(("", tool, json.dumps({"sku": sku})),))
        return f"Thought: x\nAction: {tool}[{sku}]"
    have, coming = json.loads(found[0]), json.loads(found[1])["incoming"]
    missing = max(0, have["threshold"] - have["stock"] - coming)
    answer = str(missing) if "How many" in question else "yes" if missing else "no"
    return answer if request.protocol == "chat" else f"Thought: x\nAction: Finish[{answer}]"


@pytest.mark.parametrize("protocol", ["react", "chat"])
def test_a_good_policy_is_right_at_every_stock_desk(protocol):
    row, kept = row_of(stock_benchmark(60), storekeeper, protocol=protocol)
    assert (row["n"], row["accuracy"]) == (60, 1.0)
    assert row["calls"] == {"stock": 60, "incoming": 60}
    assert kept[0]["run"]["steps"] == 3 and kept[0]["run"]["protocol"] == protocol


def test_the_first_stock_desk_is_the_reference_case_and_answers_cannot_be_guessed():
    questions, _ = stock_tasks(200)
    assert questions[0].text.startswith("Does SKU-11 have to be ordered?")
    assert questions[0].gold == "no"
    golds = [question.gold for question in questions]
    assert 30 < golds.count("yes") < 70 and 30 < golds.count("no") < 70
    assert max(golds.count(gold) for gold in set(golds)) <= 70


def test_an_answer_of_the_stock_desk_begins_with_yes_or_no_or_states_the_number():
    assert stock_right("No: 4 are left under a threshold of 10, but 20 are coming.", "no")
    assert stock_right("**Yes**", "yes") and stock_right("12 pieces", "12")
    assert not stock_right("There are no pieces, so yes", "yes")
    assert not stock_right("Nothing", "no") and not stock_right("yes", "no")
    assert not stock_right(None, "no") and not stock_right(None, "0")


# -- the grid --------------------------------------------------------------------------------------


def way(grid):
    """The directions of a shortest way, breadth first."""
    queue, came = deque([(0, 0)]), {(0, 0): ()}
    while queue:
        cell = queue.popleft()
        for name, (down, right) in DIRECTIONS.items():
            following = (cell[0] + down, cell[1] + right)
            if following in grid.neighbours(cell) and following not in came:
                came[following] = (*came[cell], name)
                queue.append(following)
    return came[grid.goal]


def planner(grids):
    """An agent with the maps."""

    def policy(request):
        steps, moved = way(grids[int(request.task_id.split("-")[1]) - 1]), len(seen(request))
        action = f"move[{steps[moved]}]" if moved < len(steps) else "Finish[done]"
        return f"Thought: x\nAction: {action}"

    return policy


def test_a_planner_reaches_the_goal_in_every_grid():
    grids = draw_grids(60)
    row, kept = row_of(grid_benchmark(60), planner(grids))
    assert (row["n"], row["accuracy"]) == (60, 1.0)
    assert [run["run"]["steps"] - 1 for run in kept] == [shortest(grid) for grid in grids]


def sees_its_neighbours(request):
    """The reactive agent of the reference case, on what the tools say."""
    found = seen(request)
    if not found:
        return "Action: look[]"
    row, column = (int(n) for n in re.findall(r"\d+", found[-1])[:2])
    if (row, column) == (8, 8):
        return "Action: Finish[done]"
    free = [name for name in DIRECTIONS if name in found[-1].partition("Free:")[2]]

    def left_to_go(name):
        return abs(8 - row - DIRECTIONS[name][0]) + abs(8 - column - DIRECTIONS[name][1])

    return f"Action: move[{min(free, key=left_to_go)}]"


def test_the_reactive_agent_reaches_what_it_reaches_in_the_reference_case():
    grids = draw_grids(200)
    row, kept = row_of(grid_benchmark(200), sees_its_neighbours, "act")
    assert [run["right"] for run in kept] == [reactive(grid) is not None for grid in grids]
    assert row["right"] == 37
    assert row["exit_reasons"] == {"finished": 37, "repeated_action": 163}


def test_only_who_is_at_the_goal_when_it_finishes_is_right():
    steps = way(draw_grids(1)[0])
    back = {"right": "left", "down": "up", "left": "right", "up": "down"}[steps[-1]]
    moves = [f"Action: move[{step}]" for step in steps]
    ends = {
        "there": [*moves, "Action: Finish[done]"],
        "after an error": [*moves, "Action: jump[far]", "Action: Finish[whatever]"],
        "left again": [*moves, f"Action: move[{back}]", "Action: Finish[done]"],
        "one short": [*moves[:-1], "Action: Finish[done]"],
        "never moved": ["Action: Finish[You are at row 8, column 8.]"],
        "never finished": [*moves, *["Action: look[]"] * 2],
    }
    right = {
        name: row_of(grid_benchmark(1), turns, "act")[0]["right"] for name, turns in ends.items()
    }
    assert right == {**dict.fromkeys(ends, 0), "there": 1, "after an error": 1}


def test_bad_walkers_get_the_reason_why_they_ended():
    def reasons(policy):
        return row_of(grid_benchmark(2), policy, "act")[0]["exit_reasons"]

    assert reasons(lambda request: "Action: move[up]") == {"max_steps": 2}  # into the wall
    assert reasons(lambda request: "Action: look[]") == {"repeated_action": 2}
    assert reasons(lambda request: "hm") == {"parse_failures": 2}
    row, _ = row_of(grid_benchmark(1), ["Action: move[north]", "Action: Finish[x]"], "act")
    assert row["errors"] == {"move": {"bad_arguments": 1}}


def test_episodes_in_one_grid_do_not_share_where_they_stand():
    _, (task, *_) = grid_tasks(1)
    first, second = task.tools(), task.tools()
    assert "row 1, column 2" in first.execute("move", "right", {}).result
    assert "row 1, column 1" in second.execute("look", "", {}).result


@pytest.mark.parametrize("draw", [library_tasks, stock_tasks, grid_tasks])
def test_the_same_worlds_are_drawn_every_time_however_many(draw):
    (few, _), (questions, tasks) = draw(3), draw(30)
    assert few == questions[:3] and draw(30)[0] == questions
    assert [task.task_id for task in tasks] == [q.question_id for q in questions]


@pytest.mark.parametrize("draw", [library_tasks, stock_tasks])
def test_worlds_differ(draw):
    questions, _ = draw(30)
    assert len({question.text for question in questions}) > 20
