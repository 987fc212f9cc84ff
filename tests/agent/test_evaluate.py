"""`callsieve agent evaluate`, and the same benchmarks for the arms of a run."""

import json
from contextlib import nullcontext

import pytest
import tiny

from pipeline import cli, fingerprints
from pipeline.agent import episode, evaluate, instructions
from pipeline.agent.limits import EXIT_REASONS
from pipeline.agent.policies import PolicyError, Reply, ScriptedPolicy
from pipeline.agent.strategies import STRATEGIES
from pipeline.agent.tasks import Settings
from pipeline.agent.templates import check_template
from pipeline.agent.transcripts import documents_from_runs
from pipeline.config import Model, parse_config
from pipeline.errors import ConfigError
from pipeline.evaluation import agent_arms
from pipeline.evaluation.agent_arms import run_agents
from pipeline.evaluation.agent_settings import check_agents
from pipeline.evaluation.agents import Arm, compare_agents, library_benchmark
from pipeline.report.traces import read_trace
from pipeline.runner import run
from pipeline.shards import RunFolder


def command(model, *options):
    return cli.main(["agent", "evaluate", model, *options])


def scripted(monkeypatch, policy):
    asked = []

    def make(*given):
        asked.append(given)
        return policy

    monkeypatch.setattr(evaluate, "make_policy", make)
    return asked


def good(request):
    """Right in the first library desk, a bad call first."""
    turn = sum(message.role == "assistant" for message in request.messages)
    turns = ["calc[1/0]", "catalogo[Il Gattopardo]", "prestiti[Il Gattopardo]", "Finish[2]"]
    return Reply(f"Thought: x\nAction: {turns[turn]}", tokens_in=7, tokens_out=3)


def test_the_table_names_score_cost_reasons_tools_and_where_to_look(monkeypatch, capsys):
    scripted(monkeypatch, ScriptedPolicy(good))
    assert command("m", "--benchmarks", "library", "--limit", "1", "--strategies", "react") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "library react 1 100.0 ± 0.0 4.0 40 1 finished" in shown
    assert "calc 1 calls, errors: 1 division_by_zero; catalogo 1 calls; prestiti 1 calls" in shown
    scripted(monkeypatch, ScriptedPolicy(lambda request: "hm"))
    assert command("m", "--benchmarks", "library", "--limit", "2", "--strategies", "react") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "0.0 ± 0.0" in shown and "2 parse_failures" in shown
    assert "2 of 2 runs ended as parse_failures: the model does not keep to the form" in shown


def test_rows_as_json_and_runs_as_a_traces_file(monkeypatch, tmp_path, capsys):
    scripted(monkeypatch, ScriptedPolicy(good))
    trace = tmp_path / "new" / "trace.jsonl"
    options = ("--benchmarks", "library,stock", "--limit", "1", "--strategies", "act,react")
    command("m", *options, "--json", "--trace", str(trace))
    rows = json.loads(capsys.readouterr().out)
    named = [(row["arm"], row["benchmark"], row["strategy"]) for row in rows]
    assert named == [("m", b, s) for b in ("library", "stock") for s in ("act", "react")]
    lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    assert [(line["benchmark"], line["right"]) for line in lines[:2]] == [("library", True)] * 2
    assert documents_from_runs(trace)[0]["text"].startswith("Question: How many copies")
    assert len(read_trace(trace).episodes) == 4  # `callsieve report` reads it


def test_a_model_folder_is_asked_as_the_options_say(folder, capsys):
    options = ("--benchmarks", "library,grid", "--strategies", "act", "--limit", "2", "--json")
    assert command(folder, *options, "--constrain", "--tool-choice", "required") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["benchmark"], row["n"]) for row in rows] == [("library", 2), ("grid", 2)]
    for row in rows:
        assert sum(row["exit_reasons"].values()) == 2 and set(row["exit_reasons"]) <= {
            *EXIT_REASONS
        }
        assert sum(row["calls"].values()) >= 2  # the first turn had to call
    assert command(folder, "--benchmarks", "stock", "--protocol", "chat", *options[2:]) == 2
    assert "'act' is written in react only" in capsys.readouterr().err


def test_the_protocol_reaches_the_model(monkeypatch, capsys):
    seen = set()

    def policy(request):
        seen.add((request.protocol, request.prefix, request.messages[0].content[:20]))
        return "no"

    scripted(monkeypatch, ScriptedPolicy(policy))
    options = ("--benchmarks", "stock", "--strategies", "react", "--limit", "1")
    assert command("m", *options, "--protocol", "chat") == 0
    assert seen == {("chat", "", instructions.load_instructions("chat-v1")[:20])}
    command("http://127.0.0.1:9/v1#m", *options)
    assert seen - {("chat", "", instructions.load_instructions("chat-v1")[:20])} == {
        ("react", "", "Answer the question ")  # a server is not made to continue a text
    }


def test_arithmetic_is_read_from_the_bundled_questions(monkeypatch, capsys):
    scripted(monkeypatch, ScriptedPolicy(lambda request: "Answer: 3"))
    assert command("m", "--strategies", "standard", "--limit", "4", "--json") == 0
    assert [(r["benchmark"], r["n"]) for r in json.loads(capsys.readouterr().out)] == [
        ("arithmetic", 4)
    ]


def test_a_server_that_is_down_is_told_and_not_scored_in_silence(capsys):
    options = ("--benchmarks", "library", "--strategies", "react", "--limit", "3")
    assert command("http://127.0.0.1:9/v1#m", *options) == 1
    told = capsys.readouterr()
    assert "3 model_error" in told.out and "3 of 3 runs ended as model_error" in told.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--strategies", "standard", "--tool-choice", "required"), ["--tool-choice required"]),
        (("--strategies", "cot", "--constrain"), ["--constrain"]),
        (("--strategies", "standard,cot", "--inline-calls"), ["--inline-calls"]),
        (("--strategies", "cot,react", "--constrain", "--inline-calls"), []),
        (("--strategies", "react", "--tool-choice", "required"), []),
    ],
)
def test_options_that_change_nothing_are_told(monkeypatch, capsys, options, told):
    scripted(monkeypatch, ScriptedPolicy(lambda request: "Answer: 3"))
    assert command("m", "--benchmarks", "library", "--limit", "1", *options) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "changes nothing" in line]
    assert [line.split(" changes")[0].removeprefix("callsieve: ") for line in said] == told


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--benchmarks", "chess"], ["--benchmarks", "'chess'", "library, stock, grid, bfcl"]),
        (["--benchmarks", ","], ["--benchmarks", "','"]),
        (["--strategies", "magic"], ["--strategies", "'magic'", "standard, cot"]),
        (["--protocol", "inline"], ["--protocol", "inline", "chat"]),
        (["--strategies", "act", "--protocol", "chat"], ["act", "--protocol chat", "react"]),
        (["--limit", "0"], ["--limit", "'0'", "from 1 on"]),
        (["--benchmarks", "hotpot"], ["--hotpot-file is missing", "a HotpotQA"]),
        (["--benchmarks", "fever", "--hotpot-file", "README.md"], ["--fever-file is missing"]),
        (
            ["--benchmarks", "hotpot", "--hotpot-file", "no.json"],
            ["--hotpot-file = 'no.json': no such file"],
        ),
        (["--benchmarks", "hotpot", "--hotpot-file", "README.md"], ["not a HotpotQA"]),
        (["--questions", "no*.jsonl"], ["--questions", "'no*.jsonl'"]),
        (["--questions", "data/questions/places.jsonl"], ["--questions", "no question"]),
        (["--benchmarks", "library"], ["model.path", "no-such-model"]),
    ],
)
def test_bad_options_name_key_value_and_what_is_allowed(options, named, capsys, monkeypatch):
    monkeypatch.chdir(instructions.FOLDER.parents[1])
    try:
        code = command("no-such-model", *options)
    except SystemExit as stopped:  # argparse
        code = stopped.code
    said = capsys.readouterr().err
    assert code == 2 and all(part in said for part in named), said


# -- in a configuration ----------------------------------------------------------------------------


def config_of(inputs, **agents):
    return parse_config(tiny.raw_config(inputs, evaluate={"agents": agents}))


@pytest.mark.parametrize(("protocol", "inline"), [("react", True), ("chat", False)])
def test_the_arms_are_judged_on_the_desks_in_the_protocol(inputs, monkeypatch, protocol, inline):
    asked = []

    class Policy:
        def ask(self, requests):
            asked.extend(requests)
            return [Reply("no") for _ in requests]

    monkeypatch.setattr(agent_arms, "local_policy", lambda *given, **options: Policy())
    config = config_of(
        inputs,
        benchmarks=["library", "stock", "grid"],
        strategies=["react"],
        limit=2,
        protocol=protocol,
    )
    check_agents(config.evaluate.agents)
    lm = tiny.make_lm("llama", "bytes")
    rows, runs = run_agents(config, "tuned", lm, [])
    assert [(row["benchmark"], row["n"]) for row in rows] == [
        ("library", 2),
        ("stock", 2),
        ("grid", 2),
    ]
    assert len(runs) == 6
    assert {(r.protocol, r.inline_calls) for r in asked} == {(protocol, inline)}


def test_bfcl_in_a_configuration_is_checked(inputs, tmp_path):
    def check(**agents):
        check_agents(config_of(inputs, benchmarks=["bfcl"], **agents).evaluate.agents)

    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    own = {"bfcl_file": str(rows)}
    check(**own, bfcl_category="irrelevance")
    check(**own, bfcl_category="simple", bfcl_answers=str(rows))
    for wrong, named in (
        ({}, "bfcl_file` is missing"),
        (own, "bfcl_category` is missing: bfcl needs one of simple"),
        ({**own, "bfcl_category": "simple"}, "bfcl_answers` is missing"),
        ({**own, "bfcl_category": "irrelevance", "bfcl_answers": str(rows)}, "allowed is none"),
    ):
        with pytest.raises(ConfigError, match=named):
            check(**wrong)
    with pytest.raises(ConfigError, match="parallel"):
        check(**own, bfcl_category="hard")
    with pytest.raises(ConfigError, match=r"protocol.*chat"):
        config_of(inputs, protocol="inline")


# -- models without a chat template ----------------------------------------------------------------


@pytest.fixture
def bfcl_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"id": "i0", "question": [[{"role": "user", "content": "hi"}]], "function": [{"name": '
        '"f", "description": "", "parameters": {"type": "dict", "properties": {}}}]}\n'
    )
    return str(path)


def test_a_model_without_a_chat_template_is_refused(folder, bfcl_file, capsys):
    called = ("--benchmarks", "library,bfcl", "--bfcl-file", bfcl_file)
    called = (*called, "--bfcl-category", "irrelevance", "--limit", "1")
    chat = ("--protocol", "chat", "--strategies")
    react, leave = "use --protocol react", "leave bfcl out of --benchmarks"
    for options, instead in (
        (("--benchmarks", "library", *chat, "react"), [react]),
        ((*called, "--strategies", "react"), [leave]),
        ((*called, *chat, "react"), [leave, react]),
    ):
        assert command(folder, *options) == 2
        said = capsys.readouterr().err
        assert f"{folder}: its tokenizer has no chat template" in said and said.count("\n") == 1
        assert [way for way in (leave, react) if way in said] == instead
    assert command(folder, "--benchmarks", "library", "--limit", "1", *chat, "cot") == 0


def test_a_run_in_chat_is_refused_before_its_first_stage(inputs, folder, bfcl_file, tmp_path):
    own = {"bfcl_file": bfcl_file, "bfcl_category": "irrelevance", "benchmarks": ["bfcl"]}
    for agents, instead in (
        ({"benchmarks": ["library"], "protocol": "chat"}, "`evaluate.agents.protocol` react"),
        (own, "bfcl out of `evaluate.agents.benchmarks`"),
    ):
        raw = tiny.raw_config(inputs, evaluate={"agents": agents}, model={"path": folder})
        with pytest.raises(ConfigError, match=f"no chat template.*{instead}"):
            run(parse_config(raw), RunFolder(tmp_path / "run"))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "text", "has"),
    [
        ("chat_template.jinja", "{{ messages }}", True),
        ("additional_chat_templates/default.jinja", "{{ messages }}", True),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("tokenizer_config.json", "[", False),
    ],
)
def test_a_template_is_found_in_a_folder(tmp_path, file, text, has):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    with nullcontext() if has else pytest.raises(ConfigError, match="no chat template"):
        check_template(Model(path=str(tmp_path)), "x")


# -- instruction files in the fingerprint ----------------------------------------------------------


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A copy of the instruction files that may be edited."""
    for path in instructions.FOLDER.glob("*.md"):
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(instructions, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "agents", "stale"),
    [
        ("library-react-v1", {"benchmarks": ["library"]}, True),
        ("standard-v1", {"benchmarks": ["library"]}, True),
        ("within-v1", {"benchmarks": ["library"]}, True),
        ("within-v1", {"benchmarks": ["library"], "protocol": "chat"}, False),
        ("chat-v1", {"benchmarks": ["library"], "protocol": "chat"}, True),
        ("library-react-v1", {"benchmarks": ["library"], "protocol": "chat"}, False),
        ("library-act-v1", {"benchmarks": ["library"]}, False),
        ("library-react-v1", {"benchmarks": ["stock"]}, False),
        ("library-react-v1", None, False),
    ],
)
def test_editing_a_file_that_is_read_makes_evaluate_stale(
    inputs, folder, own_folder, file, agents, stale
):
    raw = tiny.raw_config(inputs, evaluate={"agents": agents}, model={"path": folder})
    before = fingerprints.fingerprints(parse_config(raw))
    path = own_folder / f"{file}.md"
    path.write_text(path.read_text(encoding="utf-8") + "More.\n", encoding="utf-8")
    after = fingerprints.fingerprints(parse_config(raw))
    changed = [name for name in before if before[name] != after[name]]
    assert changed == (["evaluate"] if stale else [])


@pytest.mark.parametrize("protocol", ["react", "chat"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_files_in_the_fingerprint_are_those_that_are_read(name, protocol, monkeypatch, inputs):
    config = config_of(inputs, benchmarks=["library"], strategies=[name], protocol=protocol)
    wanted = {path.stem for path in fingerprints._instructions(config.evaluate.agents)}
    read, load = set(), instructions.load_instructions

    def noted(name):
        read.add(name)
        return load(name)

    def unsure(request):  # so that every part of a strategy is run
        return f"Answer: {request.seed}" if request.protocol in ("plain", "direct") else ""

    for module in (instructions, episode):
        monkeypatch.setattr(module, "load_instructions", noted)
    arms = {"tuned": Arm(ScriptedPolicy(unsure), inline_calls=protocol == "react")}
    compare_agents(arms, [library_benchmark(1)], [name], Settings(protocol))
    assert read == wanted


def test_an_unknown_strategy_is_refused_before_a_stage_runs(inputs, folder):
    agents = {"strategies": ["magic"]}
    raw = tiny.raw_config(inputs, evaluate={"agents": agents}, model={"path": folder})
    with pytest.raises(ConfigError, match=r"evaluate\.agents\.strategies.*'magic'"):
        fingerprints.fingerprints(parse_config(raw))


def test_an_endpoint_error_in_one_run_leaves_the_others(monkeypatch, capsys):
    def asked(request):
        if request.task_id == "library-2":
            return PolicyError("gone")
        return Reply("Finish[2]")

    class Policy:
        def ask(self, requests):
            return [asked(request) for request in requests]

    scripted(monkeypatch, Policy())
    options = ("--benchmarks", "library", "--strategies", "react", "--limit", "2", "--json")
    assert command("m", *options) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)[0]["exit_reasons"] == {"finished": 1, "model_error": 1}
    assert "1 of 2 runs" in told.err
