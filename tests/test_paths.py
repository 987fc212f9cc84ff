"""Where files are found: one's own first, the bundled ones from anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.bench import agent as bench_agent
from pipeline.calls import CallSyntax
from pipeline.config import Model, Source, load_config
from pipeline.errors import ConfigError
from pipeline.evaluation.questions import load_questions
from pipeline.lm.files import locate
from pipeline.lm.prompts import load_prompt
from pipeline.paths import PROJECT, find, find_all, folder_of
from pipeline.runner import check
from pipeline.stages.reading import files_of
from pipeline.tools.articles import resolve_sources
from pipeline.tools.search import WikiSearchConfig, build_wiki_search

MINE = """
name: mine
corpus: {sources: [{path: data/corpus/plain.jsonl}]}
model: {path: tiny, device: cpu}
tools: [{name: Calculator}, {name: WikiSearch}]
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's, as the current one."""
    monkeypatch.setenv("CALLSIEVE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_bundled_files_are_found_from_anywhere(elsewhere: Path) -> None:
    (elsewhere / "my.yaml").write_text(MINE)
    check(load_config("my.yaml"))  # the prompts
    assert load_config("configs/smoke.yaml").name == "smoke"
    assert files_of(Source(path="data/corpus/plain.jsonl")) == [PROJECT / "data/corpus/plain.jsonl"]
    assert load_questions(["data/questions/*.jsonl"])
    search = build_wiki_search(WikiSearchConfig())
    assert "Praia" in search.run({"query": "capital of Cape Verde"}, {})
    assert list(elsewhere.iterdir()) == [elsewhere / "my.yaml"]


def test_an_index_of_bundled_texts_is_built_once(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_wiki_search(WikiSearchConfig())
    monkeypatch.chdir(PROJECT)
    build_wiki_search(WikiSearchConfig())
    assert len(list((elsewhere.parent / "cache").glob("*.sqlite"))) == 1


def test_ones_own_file_comes_before_the_bundled_one(elsewhere: Path) -> None:
    own = elsewhere / "data/prompts/Calculator.txt"
    own.parent.mkdir(parents=True)
    own.write_text("Mine. [Calculator(1 + 1)]")
    assert load_prompt("data/prompts", "Calculator", CallSyntax()).head.startswith("Mine.")
    assert find("data/prompts/Calculator.txt") == Path("data/prompts/Calculator.txt")
    assert find("data/prompts/Calendar.txt") == PROJECT / "data/prompts/Calendar.txt"
    assert find_all("data/prompts/*.txt") == [Path("data/prompts/Calculator.txt")]


def test_other_paths_are_those_of_the_current_folder(elsewhere: Path) -> None:
    assert (PROJECT / "tests/tiny.py").is_file()
    for pattern in ("tests/tiny.py", "tests/*.py", "data/nowhere/*", "", "/nowhere", "../data"):
        assert folder_of(pattern) == Path(), pattern
    assert find_all("tests/*.py") == []
    (elsewhere / "a[1].txt").touch()
    assert find_all("a[1].txt") == [Path("a[1].txt")]
    with pytest.raises(ValueError, match="no such file"):
        resolve_sources(["tests/*.jsonl"])
    with pytest.raises(ConfigError, match="no such folder"):
        locate(Model(path="models/a/b"))


def test_the_questions_of_the_bench_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len({task.question for task in bench_agent._tasks(3)}) == 3
