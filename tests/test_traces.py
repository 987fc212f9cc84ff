"""Right runs of the agent loop as training text, and the arms in the agent loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny

from pipeline.agent.engine import local_policy
from pipeline.agent.environments.encyclopedia import Question
from pipeline.agent.policies import ScriptedPolicy
from pipeline.agent.transcripts import write_runs
from pipeline.config import AgentLoop, parse_config
from pipeline.context import Context
from pipeline.errors import ConfigError, WorkError
from pipeline.evaluation import agent_arms
from pipeline.evaluation.agent_arms import run_agents
from pipeline.evaluation.agent_settings import check_agents
from pipeline.evaluation.agents import Arm, arithmetic_benchmark, compare_agents
from pipeline.evaluation.questions import Question as TextQuestion
from pipeline.lm.tokens import open_token
from pipeline.runner import plan
from pipeline.shards import RunFolder
from pipeline.stages import augment
from pipeline.stages.finetune import read_split


def calculating(request: Any) -> str:
    """Multiplies by 12 for even numbers, by 13 for odd ones (which is wrong)."""
    number = int(request.task_id.split("@")[0])
    if request.messages[-1].kind == "observation":
        return f"Thought: done.\nAction: Finish[{request.messages[-1].content}]"
    return f"Thought: x\nAction: Calculator[{number} * {13 if number % 2 else 12}]"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    runs: list[dict[str, Any]] = []
    questions = [Question(str(n), f"{n} boxes of 12?", str(12 * n)) for n in range(1, 7)]
    benchmark = arithmetic_benchmark(questions)
    policy = ScriptedPolicy(calculating, 5)
    compare_agents({"base": Arm(policy)}, [benchmark], ["react"], on_run=runs.append)
    path = tmp_path / "traces.jsonl"
    write_runs(path, runs)
    return path


def context_of(tmp_path: Path, inputs: Path, traces: Path) -> Context:
    config = tiny.make_config(inputs, augment={"traces": str(traces)})
    return Context(config, RunFolder(tmp_path / "run"), "augment", "f")


def test_only_right_runs_become_training_text(tmp_path: Path, inputs: Path, traces: Path) -> None:
    context = context_of(tmp_path, inputs, traces)
    context.folder.path.mkdir()
    augment.run(context)
    data = context.folder.stage("augment") / "data"
    rows = [row for file in data.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert len(rows) == 3
    for row in rows:
        number = int(row["text"].split(" boxes")[0].removeprefix("Question: "))
        assert number % 2 == 0 and row["calls"] == []
        assert f"Calculator[{number} * 12]" in row["text_augmented"]
        assert "Calculator" not in row["text"] and f"Finish[{12 * number}]" in row["text"]
    texts = read_split(context.folder, "train")
    assert all(text.text_of("tuned") == text.text_augmented for text in texts)
    assert all(text.text_of("control") == text.text for text in texts)


def test_traces_stand_in_for_the_stages_before(tmp_path: Path, inputs: Path, traces: Path) -> None:
    lm = tiny.make_lm("llama", "bytes")
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    settings = {"path": str(tmp_path / "model"), "device": "cpu"}
    config = tiny.make_config(inputs, augment={"traces": str(traces)}, model=settings)
    context = Context(config, RunFolder(tmp_path / "run"), "augment", "f")
    assert plan(context.config, context.folder, None, None).todo == (
        "augment",
        "finetune",
        "evaluate",
    )


def test_missing_and_useless_traces_are_clear(tmp_path: Path, inputs: Path) -> None:
    with pytest.raises(ConfigError, match=r"augment.traces.*no such file"):
        augment.run(context_of(tmp_path, inputs, tmp_path / "nowhere.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(WorkError, match="no run that ended right"):
        augment.run(context_of(tmp_path, inputs, tmp_path / "empty.jsonl"))


def test_settings_of_the_loop_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"strategies.*'reflect'.*allowed are standard"):
        check_agents(AgentLoop(strategies=("reflect",)))
    with pytest.raises(ConfigError, match="hotpot_file"):
        check_agents(AgentLoop(benchmarks=("hotpot",)))


@pytest.mark.parametrize(("arm", "inline"), [("base", False), ("tuned", True)])
def test_an_arm_in_the_loop_has_a_row_per_strategy_and_a_trace_per_question(
    arm: str, inline: bool, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = {"strategies": ["standard", "act"], "limit": 2, "tool_choice": "required"}
    agents["constrain"] = True
    evaluate = {"agents": agents, "call_k": 7}
    config = parse_config(tiny.raw_config(inputs, evaluate=evaluate))
    lm = tiny.make_lm("llama", "bytes")
    policies: list[Any] = []

    def policy(*given: Any, **options: Any) -> Any:
        policies.append(local_policy(*given, **options))
        return policies[-1]

    monkeypatch.setattr(agent_arms, "local_policy", policy)
    questions = [
        TextQuestion(f"q{n}", "arithmetic", f"{n} boxes of 12 pens are", str(12 * n))
        for n in (3, 4)
    ]
    ended: list[int] = []
    rows, runs = run_agents(config, arm, lm, questions, ended.append)
    assert [(row["arm"], row["strategy"], row["n"]) for row in rows] == [
        (arm, "standard", 2),
        (arm, "act", 2),
    ]
    assert len(runs) == 4 == len(ended) and sum(rows[0]["exit_reasons"].values()) == 2
    assert rows[0]["calls"] == {} and rows[1]["calls"]["Calculator"] >= 2  # the first turn calls
    opening = open_token(lm.tokenizer, config.call_format.syntax)
    assert policies[0].fires == ((opening, 7) if inline else None)
