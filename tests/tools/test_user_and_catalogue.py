"""A user's own function as a tool, and the closed list of tools."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.errors import ConfigError
from pipeline.tools import listing
from pipeline.tools.calculator import CalculatorConfig
from pipeline.tools.catalogue import BUILT_IN, build_tools, declared_names, parse_tool_config
from pipeline.tools.executor import Executor
from pipeline.tools.listing import list_built_in, list_tools

GOOD = '''
from helper import PEOPLE

def population(city: str, factor: int = 1) -> int:
    """
    Looks up how many people live in a city.

    Args:
        city: The name of the city.
        factor: What to multiply by.
    """
    return PEOPLE[city] * factor

def record(city: str) -> dict:
    """
    Everything about a city.

    Args:
        city: The name of the city.
    """
    return {"name": city, "mayor": "Zoë"}
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "helper.py").write_text('PEOPLE = {"Roma": 2_800_000}\n')
    path = tmp_path / "mine.py"
    path.write_text(GOOD, "utf-8")
    return str(path)


def test_from_a_file_to_a_result(mine):
    tools = build_tools([{"name": "Function", "function": f"{mine}:population"}])
    spec = tools[0].spec
    assert (spec.name, spec.isolated) == ("population", True)
    assert spec.description == "Looks up how many people live in a city."
    assert spec.parameters["required"] == ["city"]
    assert spec.parameters["properties"]["factor"]["type"] == "integer"
    with Executor(tools) as executor:
        assert executor.execute("population", "Roma").result == "2800000"
        assert executor.execute("population", 'city="Roma", factor=2').result == "5600000"
        wrong = executor.execute("population", 'city="Roma", factor="two"')
        assert wrong.error_kind == "bad_arguments" and "'factor'" in wrong.error
        missing = executor.execute("population", "Milano")
        assert missing.error_kind == "exception" and "KeyError: 'Milano'" in missing.error


def test_structured_value_is_json_in_its_own_letters(mine):
    tools = build_tools([{"name": "Function", "function": f"{mine}:record", "rename": "City"}])
    with Executor(tools) as executor:
        assert executor.execute("city", "Roma").result == '{"name": "Roma", "mayor": "Zoë"}'


def test_names_are_known_without_building(mine):
    entry = {"name": "Function", "function": f"{mine}:record"}
    entries = [{"name": "Calculator"}, entry, {**entry, "rename": "City"}]
    assert declared_names(entries) == [tool.spec.name for tool in build_tools(entries)]


def test_version_follows_the_file(mine):
    entry = {"name": "Function", "function": f"{mine}:population"}
    before = build_tools([entry])[0].spec.version
    assert build_tools([entry])[0].spec.version == before
    Path(mine).write_text(GOOD + "# changed\n", "utf-8")
    assert build_tools([entry])[0].spec.version != before


BAD = {
    "untyped": ('def untyped(a, b: int):\n    """Does."""\n', "no type for a"),
    "silent": ("def silent(a: int) -> int:\n    return a\n", "no docstring"),
    "vague": ('def vague(a: int):\n    """Does."""\n', "'a'"),
    "many": ('def many(*a: int):\n    """Does."""\n', r"\*a"),
    "anything": ('def anything(**a: int):\n    """Does."""\n', r"\*a"),
    "later": ('async def later():\n    """Does."""\n', "async"),
    "steps": ('def steps():\n    """Does."""\n    yield 1\n', "generator"),
    "position": ('def position(a: int, /):\n    """Does."""\n', "positional"),
    "number": ("number = 3\n", "int, not a function"),
    "absent": ("x = 1\n", "no function 'absent'"),
    "broken": ("raise OSError('no disk')\n", "no disk"),
    "garbled": ("def garbled(:\n", "SyntaxError"),
    "calculator": (
        'def calculator(a: int):\n    """Does.\n\n    Args:\n        a: A number.\n    """\n',
        "built-in",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_definitions_are_refused_by_name(tmp_path, name):
    source, message = BAD[name]
    path = tmp_path / f"bad_{name}.py"
    path.write_text(source, "utf-8")
    with pytest.raises(ConfigError, match=message) as raised:
        build_tools([{"name": "Function", "function": f"{path}:{name}"}])
    assert name in str(raised.value)


@pytest.mark.parametrize("reference", ["mine.py", "mine:f", "missing.py:f", "mine.py:a b", ":f"])
def test_bad_references_are_refused(reference):
    with pytest.raises(ConfigError, match="function: "):
        build_tools([{"name": "Function", "function": reference}])


def test_name_clash_is_refused(mine):
    entry = {"name": "Function", "function": f"{mine}:population"}
    with pytest.raises(ConfigError, match=r"(?i)population"):
        build_tools([entry, {**entry, "function": f"{mine}:record", "rename": "Population"}])


def test_entries_are_mappings_or_dataclasses():
    names = [tool.spec.name for tool in build_tools([CalculatorConfig(), {"name": "Calendar"}])]
    assert names == ["Calculator", "Calendar"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"name": "Oracle"},
            r"`tools\.2\.name`: 'Oracle' is no tool\. Allowed: Calculator, Calendar",
        ),
        ({}, r"`tools\.2\.name` is missing\. Allowed: Calculator"),
        ({"name": "Calculator", "digits": 3}, r"unknown key `tools\.2\.digits`\. Allowed: name$"),
        (
            {"name": "WikiSearch", "title": "x"},
            r"key `tools\.2\.title`; did you mean `title_field`\?",
        ),
        (
            {"name": "MCP", "server": "a", "command": ["x"], "tool": ["y"]},
            "mean `tools`\\? Allowed: ",
        ),
        (
            {"name": "QA", "reader": {"kind": "x"}},
            r"2\.reader\.kind`: 'x' is no kind\. Allowed: extr",
        ),
        (
            {"name": "QA", "reader": {"model": "m"}},
            r"2\.reader\.kind` is missing\. Allowed: extr",
        ),
        (
            {"name": "QA", "reader": {"kind": "causal", "model": "m", "devise": "x"}},
            r"unknown key `tools\.2\.reader\.devise`\. Allowed: model, kind, max_new_tokens$",
        ),
        (
            {"name": "QA", "reader": {"kind": "causal", "model": 3}},
            r"`tools\.2\.reader\.model` = 3: has to be text; put it in quotes: '3'$",
        ),
        (
            {"name": "QA", "reader": {"kind": "causal", "model": "m"}, "search": {"name": "MT"}},
            r"search\.name`: 'MT' is no tool\. Allowed: WikiSearch, DenseSearch$",
        ),
        (
            {
                "name": "QA",
                "reader": {"kind": "causal", "model": "m"},
                "search": {"name": "WikiSearch", "result": 2},
            },
            r"`tools\.2\.search\.result`; did you mean `results`\? Allowed: name, sources, engine",
        ),
        ({"name": "Calendar", "today": 3}, "today` = 3: has to be text, or null; put it in quotes"),
        ({"name": "Calendar", "today": "soon"}, "'soon' is not an ISO date"),
        ({"name": "WikiSearch", "results": 0}, "results: 0 must be"),
        ({"name": "WikiSearch", "sources": "a.jsonl"}, "sources` = 'a.jsonl': has to be a list"),
    ],
)
def test_bad_configuration_is_named(entry, message):
    with pytest.raises(ConfigError, match=message) as raised:
        parse_tool_config(entry, "tools.2")
    assert "tools.2" in str(raised.value)


def test_every_tool_describes_itself(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"title": "Oak", "text": "A tree."}', "utf-8")
    entries = [{"name": "Calculator"}, {"name": "Calendar"}]
    entries.append({"name": "WikiSearch", "sources": [str(source)], "index": f"{source}.sqlite"})
    for name, library in (("Units", "pint"), ("Python", "pydantic_monty")):
        if importlib.util.find_spec(library):
            entries.append({"name": name})
    tools = build_tools(entries)
    for tool in tools:
        assert len(tool.spec.description) > 60 and "\n" not in tool.spec.description
        assert tool.spec.parameters["type"] == "object"
        chat = tool.spec.schema_for_chat()
        assert chat["function"]["parameters"] == tool.spec.parameters
    assert [tool.spec.name for tool in tools] == [entry["name"] for entry in entries]
    assert {entry["name"] for entry in entries} <= set(BUILT_IN)


# -- listed without being opened ------------------------------------------------------------------


def test_a_tool_is_listed_as_it_is_built(tmp_path, mine):
    source = tmp_path / "a.jsonl"
    source.write_text('{"title": "Oak", "text": "A tree."}', "utf-8")
    searched = {"sources": [str(source)], "index": f"{source}.sqlite", "result_limit": 90}
    entries = [{"name": "Calculator"}, {"name": "Calendar"}, {"name": "WikiSearch", **searched}]
    entries.append({"name": "Function", "function": f"{mine}:population", "rename": "People"})
    for name, library in (("Units", "pint"), ("Python", "pydantic_monty")):
        if importlib.util.find_spec(library):
            entries.append({"name": name})
    listed = list_tools(entries)
    assert not Path(f"{source}.sqlite").exists()
    assert all(tool.missing is None for tool in listed)
    built = [tool.spec for tool in build_tools(entries)]
    for shown, its in zip(listed, built, strict=True):
        assert dataclasses.replace(shown.spec, version=its.version) == its


def test_what_is_missing_is_said_tool_by_tool(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(listing, "find_spec", lambda module: None)
    monkeypatch.setattr(listing, "apertium_is_there", lambda: False)
    missing = {tool.spec.name: tool.missing for tool in list_built_in()}
    assert list(missing) == list(BUILT_IN)
    for name in ("Calculator", "Calendar", "WikiSearch"):
        assert missing[name] is None
    for name, part in (
        ("DenseSearch", ".[dense]"),
        ("QA", "no model to read with; give `reader:"),
        ("MT", "apertium is not installed"),
        ("Python", ".[python]"),
        ("Units", ".[units]"),
    ):
        assert part in missing[name]
    monkeypatch.setattr(listing, "apertium_is_there", lambda: True)
    assert ".[mt]" in {t.spec.name: t.missing for t in list_built_in()}["MT"]
    (tmp_path / "c.yaml").write_text(
        "tools: [{name: WikiSearch, sources: [nowhere.jsonl]}, {name: WikiSearch, engine: tantivy}]"
    )
    assert main(["tools", "list", "--config", str(tmp_path / "c.yaml")]) == 0
    out, err = capsys.readouterr()
    shown = " ".join(out.split())
    assert "'nowhere.jsonl': no such file" in shown and ".[tantivy]" in shown and not err


def test_a_pinned_server_is_listed_without_being_started(tmp_path):
    definition = {"description": "Echoes.", "inputSchema": {"type": "object"}}
    lock = tmp_path / "lock.json"
    lock.write_text(
        json.dumps({"odd": {"hash": "0", "tools": {"echo": definition, "other": definition}}})
    )
    entry = {"name": "MCP", "server": "odd", "command": ["no-such-program"], "tools": ["e*"]}
    (echo,) = list_tools([{**entry, "lock": str(lock)}])
    assert (echo.spec.name, echo.spec.description) == ("odd.echo", "Echoes.")
    assert echo.spec.effects


def test_the_list_loads_no_library_that_tools_run_on():
    heavy = ("torch", "transformers", "sentence_transformers", "pint", "pydantic_monty", "mcp")
    program = (
        "import sys; from pipeline.cli import main; main(['tools', 'list', '--json']); "
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
    assert [tool["name"] for tool in json.loads(done.stdout)] == list(BUILT_IN)


def test_a_tool_that_cannot_run_ends_a_command_with_a_message(monkeypatch, capsys):
    monkeypatch.setattr("pipeline.tools.translate.shutil.which", lambda name: None)
    pytest.importorskip("py3langid")
    assert main(["tools", "call", "MT", "la casa"]) == 2
    assert "apertium is not installed" in capsys.readouterr().err
