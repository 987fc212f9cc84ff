"""The loop with real models: a tiny one in seconds, SmolLM2-135M-Instruct in the slow tests."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
import tiny

from pipeline.agent.endpoint import connect, first_model
from pipeline.agent.engine import local_policy
from pipeline.agent.environments.arithmetic import arithmetic_tools
from pipeline.agent.environments.encyclopedia import make_tasks
from pipeline.agent.instructions import instructions_for
from pipeline.agent.limits import EXIT_REASONS, Limits
from pipeline.agent.loop import run_episode, run_episodes
from pipeline.agent.parse import PROTOCOLS
from pipeline.agent.strategies import STRATEGIES, run_strategy
from pipeline.agent.tasks import Settings, Task
from pipeline.agent.toolbox import EnvironmentTools
from pipeline.agent.trace import comparable
from pipeline.config import Model
from pipeline.evaluation.hotpot import load_hotpot
from pipeline.lm.checkpoint import load_model

ROOT = Path(__file__).resolve().parents[2]
SHORT = Settings(
    limits=Limits(max_steps=3, repeats_per_tool={"Lookup": 3}), prefixes=True, max_new_tokens=24
)


class Witness:
    """A toolbox that keeps what its tools really returned."""

    def __init__(self, inner, returned):
        self.inner, self.returned = inner, returned

    @property
    def specs(self):
        return self.inner.specs

    def execute(self, name, arguments, document):
        done = self.inner.execute(name, arguments, document)
        self.returned.append(done.result if done.error_kind is None else done.error)
        return done


def assert_sound(run, returned):
    """Every run has an exit reason, and no observation that a tool did not return."""
    assert run.exit_reason in EXIT_REASONS
    assert (run.answer is not None) == run.finished
    everything = "\n".join(returned)
    for message in run.messages:
        if message.role == "assistant":
            assert "\nObservation" not in message.content
        if message.role == "tool" and not message.content.startswith("Not executed"):
            text = message.content.strip().removesuffix("]").strip()
            text = text.split(": ", 1)[1] if text.startswith("Error (") else text
            assert text[:40].split("\n")[0] in everything or "…" in text


def strategy_results(name, tasks, policy, tools, settings):
    short = STRATEGIES[name]
    changes = {"samples": min(short.samples, 3), "trials": min(short.trials, 2)}
    changes["rounds"] = min(short.rounds, 1)
    return run_strategy(
        name,
        tasks,
        policy,
        tools,
        settings,
        strategy=replace(short, **changes),
        family="hotpot",
        evaluator=lambda task, run: False,
    )


@pytest.mark.parametrize("protocol", ["react", "inline", "plain"])
def test_tiny_model_batched_and_single_runs_give_the_same_traces(protocol):
    lm = tiny.make_lm("llama", "bytes")
    policy = local_policy(lm.model, lm.tokenizer)
    settings = replace(SHORT, protocol=protocol, max_new_tokens=8)
    tasks = [Task(f"{'x' * (3 * n)} {n}?", str(n)) for n in range(5)]
    box = EnvironmentTools([])
    batched = run_episodes(tasks, policy, box, settings)
    single = [run_episode(task, policy, box, settings) for task in tasks]
    for one, other in zip(batched, single, strict=True):
        assert comparable(list(one.events)) == comparable(list(other.events))
    assert any(run.tokens_out for run in batched)


def test_tiny_model_state_that_does_not_fit_is_an_overflow():
    lm = tiny.make_lm("llama", "bytes")
    policy = local_policy(lm.model, lm.tokenizer)
    result = run_episode(Task("x" * 100_000), policy, EnvironmentTools([]), SHORT)
    assert result.exit_reason == "context_overflow"


@pytest.fixture(scope="module")
def real_path():
    path = Path(os.environ.get("CALLSIEVE_MODEL") or ROOT / ".cache/models/SmolLM2-135M-Instruct")
    if not path.exists():
        pytest.skip("SmolLM2-135M-Instruct is not here; scripts/quickstart brings it")
    return str(path)


@pytest.fixture(scope="module")
def real(real_path):
    return load_model(Model(path=real_path, device="cpu"))


@pytest.fixture(scope="module")
def served(real_path):
    """A real OpenAI-compatible server with the real model."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", real_path]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    server = subprocess.Popen(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(240):
            assert server.poll() is None, "transformers serve ended"
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health") as ready:
                if ready.status == 200:
                    break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("protocol", ["react", "chat", "inline"])
def test_real_model_runs_every_protocol(protocol, real):
    policy = local_policy(*real)
    returned = []
    tools = Witness(arithmetic_tools(), returned)
    tasks = [Task(f"How much is {n + 12} * {n + 3}?", str(n)) for n in range(20)]
    settings = replace(SHORT, protocol=protocol)
    settings = replace(settings, instructions=instructions_for(protocol))
    runs = run_episodes(tasks, policy, tools, settings)
    assert len(runs) == 20
    for run in runs:
        assert_sound(run, returned)
        assert PROTOCOLS[run.protocol].render(run.messages)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", STRATEGIES)
def test_real_model_runs_every_strategy(name, real, shared_data):
    questions, encyclopedia = load_hotpot(shared_data("hotpot_distractor_reflexion100.json"))
    returned = []
    tasks = [
        replace(task, tools=lambda: Witness(encyclopedia.tools(), returned))
        for task in make_tasks(questions[:20], encyclopedia)
    ]
    results = strategy_results(name, tasks, local_policy(*real), EnvironmentTools([]), SHORT)
    assert [result.task_id.split("@")[0] for result in results] == [t.task_id for t in tasks]
    for result in results:
        assert result.exit_reason in EXIT_REASONS
        for run in result.runs:
            assert_sound(run, returned)


@pytest.mark.slow
@pytest.mark.long
def test_real_model_batched_and_single_runs_give_the_same_traces(real, shared_data):
    questions, encyclopedia = load_hotpot(shared_data("hotpot_distractor_reflexion100.json"))
    tasks = make_tasks(questions[:6], encyclopedia)
    settings = replace(SHORT, instructions=instructions_for("react", "hotpot"))
    policy = local_policy(*real)
    batched = run_episodes(tasks, policy, EnvironmentTools([]), settings)
    single = [run_episode(task, policy, EnvironmentTools([]), settings) for task in tasks]
    for one, other in zip(batched, single, strict=True):
        assert comparable(list(one.events)) == comparable(list(other.events))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("protocol", "api"),
    [("chat", "chat"), ("react", "chat"), ("react", "completions"), ("inline", "completions")],
)
def test_real_endpoint_runs_every_protocol(protocol, api, served):
    policy = connect(served, "", api=api, timeout_s=300, retries=0)
    policy = replace(policy, model=first_model(policy))
    returned = []
    settings = replace(
        SHORT,
        protocol=protocol,
        prefixes=api == "completions",
        instructions=instructions_for(protocol),
        limits=Limits(max_steps=2),
    )
    tasks = [Task(f"How much is {n} * 4?", str(n)) for n in range(2)]
    for run in run_episodes(tasks, policy, Witness(arithmetic_tools(), returned), settings):
        assert_sound(run, returned)
        assert run.exit_reason != "model_error", run.detail
        assert run.tokens_in > 0 and run.tokens_out > 0
