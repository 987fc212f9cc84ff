"""Strict configuration: every refusal names the place, the value and what is allowed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from pipeline.calls import CallSyntax
from pipeline.config import (
    Config,
    FalseKeepRate,
    dump_config,
    fingerprint_values,
    load_config,
    parse_config,
    to_dict,
)
from pipeline.errors import ConfigError
from pipeline.lm.prompts import load_prompt

ROOT = Path(__file__).parents[1]


@pytest.fixture
def raw(inputs: Path) -> dict[str, Any]:
    return tiny.raw_config(inputs)


def put(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(raw)
    node: Any = changed
    *sections, key = path.split(".")
    for section in sections:
        node = node[int(section)] if isinstance(node, list) else node.setdefault(section, {})
    node[int(key) if isinstance(node, list) else key] = value
    return changed


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, "c.yaml")
    return str(caught.value)


# -- one value ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        # unknown keys, at every depth
        ("sampel", {}, ["unknown key `sampel`; did you mean `sample`? Allowed: name, corpus"]),
        ("sample.tau", 0.1, ["unknown key `sample.tau`", "`tau_s`", "Allowed: tau_s, k, m"]),
        ("sample.per_tool", {"Calculator": {"kk": 1}},
         ["`sample.per_tool.Calculator.kk`", "did you mean `k`?", "Allowed: tau_s, k, m"]),
        ("corpus.sources.0.txt", "x", ["`corpus.sources.0.txt`", "Allowed: path, dataset"]),
        ("sample.zzz", 1, ["unknown key `sample.zzz`. Allowed: tau_s, k, m"]),
        ("select.tau_f", {"rate": 0.1}, ["`select.tau_f.rate`", "Allowed: false_keep_rate"]),
        # wrong types
        ("sample.k", "five", ["`sample.k` = 'five': has to be a whole number from 1 on"]),
        ("sample.k", 2.5, ["`sample.k` = 2.5: has to be a whole number from 1 on"]),
        ("sample.k", True, ["`sample.k` = true: has to be a whole number from 1 on"]),
        ("sample.k", None, ["`sample.k` = null: has to be a whole number from 1 on; leave it out"]),
        ("sample.constrain", "yes", ["`sample.constrain` = 'yes': has to be true or false"]),
        ("name", 3, ["`name` = 3: has to be text that is not empty; put it in quotes: '3'"]),
        ("sample", None, ["`sample` = null: has to be a mapping (keys: tau_s, k, m"]),
        ("tools", "Calculator", ["`tools` = 'Calculator': has to be a list of at least one"]),
        ("evaluate.questions", "a.jsonl", ["has to be a list, each item text;", "['a.jsonl']"]),
        ("sample.k", 2.0, ["`sample.k` = 2.0: has to be a whole number from 1 on; write 2"]),
        ("sample.k", "5", ["`sample.k` = '5': has to be", "; write it without quotes"]),
        ("model", "tiny", ["`model` = 'tiny': has to be a mapping (keys: path, ", "{path: tiny}"]),
        ("model.path", None, ["`model.path` = null: has to be text"]),
        ("corpus", ["a"], ["`corpus` = ['a']: has to be a mapping (keys: sources, "]),
        ("corpus.sources", {"path": "a"}, ["`corpus.sources` = {'path': 'a'}: has to be a list"]),
        ("corpus.sources.0", "a", ["`corpus.sources.0` = 'a': has to be a mapping (keys: path"]),
        ("sample.per_tool", [1], ["`sample.per_tool` = [1]: has to be a mapping, each value a"]),
        ("tools.0", "Calculator", ["`tools.0` = 'Calculator': has to be a mapping, e.g. {na"]),
        ("tools.0", {"name": 3}, ["`tools.0.name`: 3 is no tool. Allowed: Calculator"]),
        ("tools.0", {"name": "Calendar", "today": 3}, ["`tools.0.today` = 3: has to be text, or"]),
        ("tools.0", {"name": "Units", "x": 1}, ["unknown key `tools.0.x`. Allowed: name"]),
        ("tools.0", {"name": "QA", "reader": "m"},
         ["`tools.0.reader` = 'm': has to be a mapping whose `kind` is one of extractive, causal"]),
        ("evaluate.agents", True, ["`evaluate.agents` = true: has to be a mapping (keys: strateg"]),
        ("evaluate.questions", [1], ["`evaluate.questions.0` = 1: has to be text; put it in quot"]),
        # impossible values
        ("sample.k", 0, ["`sample.k` = 0: has to be a whole number from 1 on"]),
        ("sample.tau_s", 1.5, ["`sample.tau_s` = 1.5: has to be a number from 0 to 1"]),
        ("sample.tau_s", float("nan"), ["`sample.tau_s` = nan: has to be a number from 0 to 1"]),
        ("sample.temperature", 0.0, ["`sample.temperature` = 0.0: has to be a number above 0"]),
        ("finetune.learning_rate", float("inf"), ["learning_rate` = inf: has to be a number"]),
        ("select.tau_f", -0.1, ["`select.tau_f` = -0.1: has to be a number from 0 on, or"]),
        ("select.tau_f", {"false_keep_rate": 2},
         ["`select.tau_f.false_keep_rate` = 2: has to be a number above 0 and below 1"]),
        ("select.per_tool", {"Calculator": -1}, ["`select.per_tool.Calculator` = -1"]),
        ("sample.numbers", "some", ["`sample.numbers` = 'some'", "one of 'free', 'from_context'"]),
        ("call_format.rendering", "html", ["`call_format.rendering`", "one of 'text', 'special'"]),
        ("model.dtype", "fp16", ["`model.dtype` = 'fp16'", "'bfloat16'"]),
        ("model.dtype", "bfloat", ["`model.dtype` = 'bfloat'", "; did you mean 'bfloat16'?"]),
        ("score.null_share", 1.01, ["`score.null_share` = 1.01: has to be a number from 0 to 1"]),
        ("shards", 0, ["`shards` = 0: has to be a whole number from 1 on"]),
        ("seed", -1, ["`seed` = -1: has to be a whole number from 0 to 2,147,483,647"]),
        ("name", "", ["`name` = '': has to be text that is not empty"]),
        ("name", "a/../../b", ["`name` = 'a/../../b'", "letters, digits", "--run-dir"]),
        ("name", "a\\b", ["`name` = ", "letters, digits"]),
        ("name", "..", ["`name` = '..'", "not `.` or `..`"]),
        ("name", ".", ["`name` = '.'", "not `.` or `..`"]),
        ("name", " ", ["`name` = ' '", "letters, digits"]),
        ("name", "a\n", ["`name` = ", "letters, digits"]),
        ("tools", [], ["`tools` = []: has to be a list of at least one item", "{name: "]),
        ("corpus.sources", [], ["`corpus.sources` = []: has to be a list of at least one"]),
        ("gain_floor", -1, ["`gain_floor` = -1: has to be a number from 0 on, or null"]),
        # possible alone, impossible together
        ("corpus.sources.0", {"path": "a", "dataset": "b"},
         ["`corpus.sources.0`", "either `path` or `dataset`"]),
        ("corpus.sources.0", {}, ["`corpus.sources.0`", "either `path` or `dataset`"]),
        ("corpus.min_words", 500, ["`corpus.min_words` 500", "`corpus.max_words` 200"]),
        ("gain_floor", 5.0, ["tau_f 0.0 of Calculator", "`gain_floor` 5.0", "lower"]),
        ("sample.numbers", "from_context", ["`sample.numbers: from_context`", "constrain: true"]),
        ("sample.words", "from_context", ["`sample.words: from_context`", "constrain: true"]),
        ("tools.0", {"nam": "x"}, ["`tools.0.name` is missing"]),
        ("tools.0", {"name": "Calc"}, ["tools.0.name", "no tool; did you mean Calculator?"]),
        ("tools.0", {"name": "MCP", "a": 1, "b": 1},
         ["`tools.0.a`", "`tools.0.b`", "tools.0.server"]),
        ("tools.1", {"name": "Calculator"}, ["each tool once", "Calculator, Calculator"]),
        ("sample.per_tool", {"Calc": {"k": 1}},
         ["`sample.per_tool.Calc`", "`tools` has Calculator, Calendar, WikiSearch"]),
        ("select.per_tool", {"Units": 1.0}, ["`select.per_tool.Units`: no such tool"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refusals(raw: dict[str, Any], path: str, value: Any, parts: list[str]) -> None:
    message = refusal(put(raw, path, value))
    assert all(line.startswith("c.yaml: ") for line in message.splitlines())
    for part in parts:
        assert part in message, message


def test_what_is_no_number_is_not_told_to_lose_its_quotes(raw: dict[str, Any]) -> None:
    assert "quotes" not in refusal(put(raw, "select.tau_f", "nan"))


@pytest.mark.parametrize("path", ["select.tau_f", "select.per_tool.Calculator"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("abc", "` = 'abc': has to be a number from 0 on, or a mapping (keys: false_keep_rate)"),
        (-1, "` = -1: has to be a number from 0 on, or a mapping (keys: false_keep_rate)"),
        ([1], "` = [1]: has to be a number from 0 on, or a mapping (keys: false_keep_rate)"),
        ({"false_keep_rate": 3}, ".false_keep_rate` = 3: has to be a number above 0 and below 1"),
        (
            {"false_keep_rate": "x"},
            ".false_keep_rate` = 'x': has to be a number above 0 and below 1",
        ),
        ({}, ".false_keep_rate` is missing"),
    ],
)
def test_a_number_or_a_mapping_is_refused_in_one_line(
    raw: dict[str, Any], path: str, value: Any, said: str
) -> None:
    message = refusal(put(raw, path, value))
    assert message.startswith(f"c.yaml: `{path}{said}") and len(message.splitlines()) == 1


def test_missing_sections(raw: dict[str, Any]) -> None:
    for key in ("name", "corpus", "model", "tools"):
        without = {k: v for k, v in raw.items() if k != key}
        message = refusal(without)
        assert message.startswith(f"c.yaml: `{key}` is missing; it has to be ")
        assert len(message.splitlines()) == 1
    assert "`model.path` is missing" in refusal(put(raw, "model", {}))


def test_all_mistakes_are_told_at_once(raw: dict[str, Any]) -> None:
    message = refusal(put(put(raw, "sample.k", 0), "score.horizn", 3))
    assert "`sample.k`" in message and "did you mean `horizon`?" in message
    # a list whose only item is wrong is not called empty as well
    assert "at least one item" not in refusal(put(raw, "corpus.sources.0.txt", "x"))


def test_no_message_is_left_in_the_words_of_a_library(raw: dict[str, Any]) -> None:
    """Every setting, with values of every wrong type: said in our words, in one line for each."""

    def leaves(value: Any, path: str) -> list[str]:
        if not isinstance(value, dict) or not value:
            return [path]
        return [own for key, item in value.items() for own in leaves(item, f"{path}.{key}")]

    settings = [own for k, v in to_dict(parse_config(raw)).items() for own in (k, *leaves(v, k))]
    settings += ["evaluate.agents", "corpus.sources.0", "corpus.sources.0.limit", "tools.0"]
    assert len(settings) > 60
    for path in dict.fromkeys(settings):
        for value in (None, True, 7, 2.5, "x", [], ["x"], {}, {"x": 1}, [None], float("nan")):
            try:
                parse_config(put(raw, path, value), "c.yaml")
            except ConfigError as error:
                for line in str(error).splitlines():
                    assert line.startswith("c.yaml: "), line
                    assert f"`{path}" in line or "tool" in line or "min_words" in line, line
                    assert not any(word in line for word in ("Input", "Tuple", "a valid ", "Field"))


def test_the_mistakes_of_tools_and_of_several_sections_are_told_together(
    raw: dict[str, Any],
) -> None:
    wrong = put(put(raw, "tools.0", {"name": "Calc"}), "tools.1", {"name": "Calendar", "x": 1})
    wrong = put(put(wrong, "sample.k", 0), "evaluate.agents", {"limit": "x", "strategies": []})
    lines = refusal(wrong).splitlines()
    assert [line.split("`")[1] for line in lines] == [
        "sample.k",
        "evaluate.agents.strategies",
        "evaluate.agents.limit",
        "tools.0.name",
        "tools.1.x",
    ]


def test_all_that_does_not_go_together_is_told_together(raw: dict[str, Any]) -> None:
    wrong = put(put(raw, "name", "a/b"), "corpus.min_words", 500)
    wrong = put(put(wrong, "sample.words", "from_context"), "select.per_tool", {"X": 1})
    lines = refusal(put(wrong, "gain_floor", 5.0)).splitlines()
    assert len(lines) == 4 + 3  # `gain_floor` is above the threshold of each tool


# -- files and overrides --------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    for text, part in (("a: [", "not YAML"), ("- a", "no mapping but"), ("# a", "is empty; a")):
        with pytest.raises(ConfigError, match=part):
            load_config(write(tmp_path, text))
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such configuration file"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "c.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "c.yaml")


def test_a_key_that_stands_twice_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    text = yaml.safe_dump({**raw, "name": "first"}, sort_keys=False)
    for more, part in (
        ("name: second\n", "the key `name` stands twice, in line 1 and in "),
        ("finetune: {epochs: 1, epochs: 2}\n", "the key `epochs` stands twice"),
    ):
        with pytest.raises(ConfigError, match=rf"c\.yaml: not YAML: {part}"):
            load_config(write(tmp_path, text + more))
    anchored = "finetune: &a {epochs: 1}\nevaluate: {limit: 1}\n"
    assert load_config(write(tmp_path, text + anchored)).finetune.epochs == 1


@pytest.mark.parametrize("written", ["1e-5", "1.0e-5", "1E-5", "0.00001", "+1e-5"])
def test_small_numbers_as_people_write_them(
    raw: dict[str, Any], tmp_path: Path, written: str
) -> None:
    path = write(tmp_path, yaml.safe_dump(raw) + f"\nfinetune: {{learning_rate: {written}}}\n")
    assert load_config(path).finetune.learning_rate == 1e-5
    override = load_config(path, [("finetune.weight_decay", written)])
    assert override.finetune.weight_decay == 1e-5


def test_text_stays_text(raw: dict[str, Any], tmp_path: Path) -> None:
    for name in ("1e-5", "e5-1e", "1e", "no", "3", "2020-05-04", "Größe 1_a.b"):
        config = parse_config(put(raw, "name", name))
        assert load_config(write(tmp_path, dump_config(config))) == config


def test_overrides(raw: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(raw))
    config = load_config(
        path,
        [
            ("sample.k", "9"),
            ("select.tau_f", "{false_keep_rate: 0.05}"),
            ("sample.per_tool.Calculator.m", "3"),
            ("gain_floor", "null"),
            ("finetune.mask_results", "true"),
            ("model.path", "some/where"),
        ],
    )
    assert config.sample.k == 9
    assert config.select.tau_f == FalseKeepRate(0.05)
    assert config.sample.of("Calculator") == (0.0, 9, 3)
    assert config.sample.of("Calendar") == (0.0, 9, 2)
    assert config.gain_floor is None and config.finetune.mask_results is True
    assert config.model.path == "some/where"


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("sample.kk", "3", "unknown key `sample.kk`"),
        ("sample.k", "three", "`sample.k` = 'three'"),
        ("sample.k", "[", "--sample.k [: not a YAML value"),
        ("name.x", "3", "--name.x: `name` is not a section"),
        ("corpus.sources.0.path", "x", "`sources` is not a section"),
        ("", "3", "unknown key"),
    ],
)
def test_bad_overrides(
    raw: dict[str, Any], tmp_path: Path, key: str, value: str, part: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, yaml.safe_dump(raw)), [(key, value)])
    assert part in str(caught.value)


# -- what is written ------------------------------------------------------------------------------


def test_every_value_is_written_and_read_back(raw: dict[str, Any]) -> None:
    changed = put(raw, "select", {"tau_f": {"false_keep_rate": 0.05}, "per_tool": {"Calendar": 2}})
    config = parse_config(put(changed, "finetune", {"learning_rate": 1e-5}))
    text = dump_config(config)
    assert parse_config(yaml.safe_load(text)) == config
    assert "horizon: 5" in text and "temperature: 1.0" in text  # defaults too
    assert isinstance(config.select.tau_of("Calendar"), int | float)
    assert config.select.tau_of("Calculator") == FalseKeepRate(0.05)


def test_values_of_speed_leave_no_trace_in_fingerprints(raw: dict[str, Any]) -> None:
    config = parse_config(raw)
    for section, speed in (
        (config.sample, {"max_rows", "token_budget"}),
        (config.execute, {"workers", "cache"}),
        (config.score, {"token_budget"}),
        (config.finetune, {"gradient_checkpointing", "tokens_per_micro_batch"}),
        (config.evaluate, {"max_rows"}),
    ):
        assert set(to_dict(section)) - set(fingerprint_values(section)) == speed


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda p: p.name)
def test_configurations_of_the_project(path: Path) -> None:
    config = load_config(path)
    assert isinstance(config, Config) and config.name == path.stem
    for tool in config.tool_names:
        assert (ROOT / config.prompts / f"{tool}.txt").is_file()


def test_a_missing_prompt_names_the_folders_that_were_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, searched in (
        ("data/prompts", f"in {tmp_path / 'data/prompts'}, nor in {ROOT / 'data/prompts'};"),
        ("mine", f"in {tmp_path / 'mine'};"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_prompt(folder, "Rates", CallSyntax())
        assert f"no prompt for the tool Rates {searched}" in str(refused.value)
