"""The reference cases with exactly the numbers of the specification."""

import json

import pytest

from pipeline.agent.demos import DEMOS, demo_lines, run_demo
from pipeline.errors import ConfigError


def figures(demo, variant, *names):
    outcome = run_demo(demo)["variants"][variant]
    return tuple(outcome[name] for name in names)


def test_library():
    wanted = ("exit_reason", "steps", "answer")
    assert figures("library", "good policy", *wanted) == ("finished", 4, "2")
    assert figures("library", "unknown tool first", *wanted) == ("finished", 5, "2")
    assert figures("library", "repeats itself", *wanted) == ("repeated_action", 2, None)
    (first, *_) = figures("library", "unknown tool first", "observations")[0]
    assert all(name in first for name in ("catalogo", "prestiti", "calc", "biblioteca"))
    errors = figures("library", "errors are observations", "observations")[0]
    assert [error.split(":")[0] for error in errors] == [
        "Error (not_allowed)",
        "Error (division_by_zero)",
        "Error (no_result)",
    ]


def test_paper():
    wanted = ("exit_reason", "steps", "answer")
    assert figures("paper", "found", *wanted) == ("finished", 3, "9")
    assert figures("paper", "missing", *wanted) == ("finished", 2, "I don't know")


def test_stock():
    wanted = ("exit_reason", "steps", "tokens", "times_asked")
    assert figures("stock", "good policy", *wanted) == ("finished", 3, 300, 3)
    assert figures("stock", "same call, brake off", *wanted) == ("max_steps", 3, 300, 3)
    assert figures("stock", "token budget of 1000", *wanted) == ("token_budget", 3, 1200, 2)
    assert figures("stock", "deadline passed", *wanted) == ("time_budget", 1, 0, 0)
    (messages,) = figures("stock", "good policy", "messages")
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in messages] == roles
    sent = [1, 3, 6, 10, 15, 21, 28, 36, 45, 55]
    assert figures("stock", "context sent", "context_sent") == (sent,)


def test_grid():
    wanted = ("reached", "grids", "extra_steps")
    assert figures("grid", "reactive", *wanted) == (37, 200, 0.0)
    assert figures("grid", "with memory", *wanted) == (200, 200, 6.9)
    assert figures("grid", "planner", *wanted) == (200, 200, 0.0)
    assert figures("grid", "planner", "mean_length", "agrees_with_dijkstra") == (14.1, True)


def test_calcola():
    assert figures("calcola", "good call", "observations", "steps") == (["34261452"], 2)
    (observations,) = figures("calcola", "argument missing", "observations")
    assert "missing required argument 'espressione'" in observations[0]
    assert observations[1] == "34261452"


@pytest.mark.parametrize("name", DEMOS)
def test_every_demo_is_json_and_readable(name):
    outcome = run_demo(name)
    json.dumps(outcome, ensure_ascii=False)
    text = "\n".join(line.plain for line in demo_lines(outcome))
    assert all(variant in text for variant in outcome["variants"])


def test_the_readable_form_states_the_figures():
    text = "\n".join(line.plain for line in demo_lines(run_demo("stock")))
    for figure in ("finished 3 300", "max_steps 3", "token_budget 3 1200", "time_budget 1"):
        assert figure in text


def test_unknown_demo_names_the_others():
    with pytest.raises(ConfigError, match="library, paper, stock, grid, calcola"):
        run_demo("chess")
