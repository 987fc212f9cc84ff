"""WikiSearch: real SQLite FTS5 indices over JSONL, Parquet and data set folders."""

import json
import multiprocessing
import random
import sqlite3
import threading
from pathlib import Path

import pytest

from pipeline.tools.articles import Passage, split_passages, split_sentences
from pipeline.tools.base import ToolError
from pipeline.tools.search import (
    WikiSearchConfig,
    build_wiki_search,
    cut_at_word,
    query_terms,
    snippet,
)

ARTICLES = [
    {"title": "Lisbon", "text": "Lisbon is the capital of Portugal. It lies on the river Tagus."},
    {"title": "Portugal", "text": "Portugal is a country in Europe. Lisbon is its largest city."},
    {"title": "Tagus", "text": "The Tagus is the longest river of the Iberian Peninsula."},
    {"title": "Porto", "text": "Porto is known for its bridges and its wines."},
    {"title": "São Paulo", "text": "São Paulo is the largest city of Brazil."},
]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> WikiSearchConfig:
    source = write(tmp_path / "a.jsonl", ARTICLES)
    return WikiSearchConfig(sources=(source,), index=str(tmp_path / "index.sqlite"))


def build_index(config: WikiSearchConfig) -> Path:
    return build_wiki_search(config).engine.index.path


def ask(tool, query: str) -> str:
    return tool.run({"query": query}, {})


def test_finds_and_formats(config):
    tool = build_wiki_search(config)
    assert ask(tool, "What is the capital of Portugal?") == (
        "Lisbon > Lisbon is the capital of Portugal. It lies on the river Tagus."
    )
    assert ask(tool, "wine bridge").startswith("Porto > ")  # stems
    assert ask(tool, "sao paulo").startswith("São Paulo > ")  # accents
    assert [hit.title for hit in tool.search("Tagus", 5)] == [
        "Tagus",
        "Lisbon",
    ]  # title weighs more


@pytest.mark.parametrize(
    "query",
    [
        '"',
        '"Tagus',
        "Tagus AND (",
        "title:Tagus",
        "Tagus*",
        "NEAR(Tagus)",
        "-Tagus",
        "Tagus'; DROP",
    ],
)
def test_query_syntax_is_only_words(config, query):
    tool = build_wiki_search(config)
    if "Tagus" in query:
        assert ask(tool, query).startswith("Tagus > ")
    else:
        with pytest.raises(ToolError) as raised:
            ask(tool, query)
        assert raised.value.kind == "no_result"


def test_no_hit_is_an_error(config):
    with pytest.raises(ToolError) as raised:
        ask(build_wiki_search(config), "quasar")
    assert raised.value.kind == "no_result"


def test_query_terms():
    assert query_terms("What is the capital of the Capital?") == ["capital"]
    assert query_terms("Who?") == ["who"]
    assert len(query_terms(" ".join(f"w{i}" for i in range(1000)))) == 32


def test_index_is_built_once_and_again_when_the_content_changes(config, tmp_path):
    index = build_index(config)
    first = index.stat().st_ino
    assert build_index(config).stat().st_ino == first
    source = tmp_path / "a.jsonl"
    source.touch()  # another time, the same content
    assert build_index(config).stat().st_ino == first
    version = build_wiki_search(config).spec.version
    write(source, [*ARTICLES, {"title": "Quasar", "text": "A quasar is a bright galaxy core."}])
    tool = build_wiki_search(config)
    assert ask(tool, "quasar").startswith("Quasar > ")
    assert index.stat().st_ino != first  # a new file: who has the old one open keeps reading it
    assert tool.spec.version != version  # so that cached results are not used


def test_open_tool_survives_a_rebuild(config, tmp_path):
    before = build_wiki_search(config)
    assert ask(before, "wines").startswith("Porto")
    write(tmp_path / "a.jsonl", [{"title": "Quasar", "text": "A bright core."}])
    after = build_wiki_search(config)
    assert ask(before, "wines").startswith("Porto")
    assert ask(after, "quasar").startswith("Quasar")


def test_a_build_that_fails_leaves_nothing_and_names_the_line(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"title": "A", "text": "b"}\n{"title": "A"}\n', "utf-8")
    config = WikiSearchConfig(sources=(str(source),), index=str(tmp_path / "i.sqlite"))
    with pytest.raises(ValueError, match=r"a\.jsonl:2: field 'text'"):
        build_index(config)
    assert sorted(path.name for path in tmp_path.iterdir() if "lock" not in path.name) == [
        "a.jsonl"
    ]
    source.write_text("not json\n", "utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl:1: not JSON"):
        build_index(config)
    source.write_text("\n", "utf-8")
    with pytest.raises(ValueError, match="no article"):
        build_index(config)


def test_missing_sources_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\*\.jsonl"):
        build_index(WikiSearchConfig(sources=(str(tmp_path / "nothing*.jsonl"),)))
    other = tmp_path / "a.txt"
    other.write_text("x")
    with pytest.raises(ValueError, match=r"\.parquet"):
        build_index(WikiSearchConfig(sources=(str(other),)))
    with pytest.raises(ValueError, match="passage_words"):
        WikiSearchConfig(passage_words=0)


def test_a_file_that_is_no_index_is_not_overwritten(config, tmp_path):
    precious = tmp_path / "thesis.txt"
    precious.write_text("years of work " * 100)
    with pytest.raises(ValueError, match="no search index"):
        build_index(WikiSearchConfig(sources=config.sources, index=str(precious)))
    assert precious.read_text().startswith("years")


def test_parquet_folder_and_saved_data_set_hold_the_same(tmp_path, monkeypatch):
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as parquet

    monkeypatch.setenv("CALLSIEVE_CACHE", str(tmp_path / "cache"))
    table = pa.Table.from_pylist([{"t": row["title"], "x": row["text"]} for row in ARTICLES])
    (tmp_path / "folder").mkdir()
    parquet.write_table(table, tmp_path / "one.parquet")
    parquet.write_table(table, tmp_path / "folder" / "train.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    for source in ("one.parquet", "folder", "saved"):
        config = WikiSearchConfig(
            sources=(str(tmp_path / source),), title_field="t", text_field="x"
        )
        assert ask(build_wiki_search(config), "wines").startswith("Porto > ")
    assert len(list((tmp_path / "cache").glob("wikisearch-*.sqlite"))) == 3


def build_and_ask(config: WikiSearchConfig, answers) -> None:
    answers.put(ask(build_wiki_search(config), "wines"))


def test_many_processes_build_and_read_at_once(config):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    workers = [context.Process(target=build_and_ask, args=(config, answers)) for _ in range(4)]
    for worker in workers:
        worker.start()
    got = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert got == ["Porto > Porto is known for its bridges and its wines."] * 4


def test_threads_share_one_tool(config):
    tool = build_wiki_search(config)
    got: list[str] = []
    threads = [
        threading.Thread(target=lambda: got.extend(ask(tool, "wines") for _ in range(50)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 200 and len(set(got)) == 1


def test_long_articles_become_passages(tmp_path):
    filler = "This sentence says nothing of interest at all. " * 40
    rows = [{"title": "Long", "text": filler + "The zeppelin landed in Friedrichshafen. " + filler}]
    source = write(tmp_path / "a.jsonl", rows)
    tool = build_wiki_search(
        WikiSearchConfig(sources=(source,), index=str(tmp_path / "i.sqlite"), passage_words=60)
    )
    answer = ask(tool, "Where did the zeppelin land?")
    assert "The zeppelin landed in Friedrichshafen." in answer
    assert len(answer) <= 200


def test_passages_lose_nothing():
    rng = random.Random(1)
    words = ["alpha", "beta.", "Gamma", "Dr. Who", "3.5", "end!", "“Quote.”", "U.S. troops"]
    for _ in range(200):
        text = " ".join(rng.choice(words) for _ in range(rng.randrange(1, 120)))
        pieces = [piece.text for piece in split_passages(Passage("t", text), 20)]
        assert " ".join(pieces) == text
    assert split_sentences("Dr. Smith met J. R. Hill. He left at 5 p.m. today.")[0] == (
        "Dr. Smith met J. R. Hill."
    )


def test_snippet_limits():
    text = "First sentence here. The \x02second\x03 one is rather long and goes on. Third."
    assert (
        snippet(Passage("T", text), 60) == "T > The second one is rather long and goes on. Third."
    )
    assert snippet(Passage("T", text), 30) == "T > The second one is rather…"
    for limit in range(12, 120):
        assert len(snippet(Passage("A rather long title", text), limit)) <= limit
    assert cut_at_word("one two three", 8) == "one two…"
    assert cut_at_word("onetwothree", 5) == "onet…"


def test_several_results_share_the_limit(config):
    from dataclasses import replace

    tool = build_wiki_search(replace(config, results=2))
    answer = ask(tool, "Lisbon")
    assert answer.count(" > ") == 2 and " | " in answer and len(answer) <= 200


def test_index_can_be_read_by_plain_sqlite(config):
    connection = sqlite3.connect(build_index(config))
    rows = connection.execute("SELECT count(*) FROM passages WHERE passages MATCH 'wine'")
    assert rows.fetchone() == (1,)


def test_tantivy_behind_the_same_interface(config, tmp_path):
    pytest.importorskip("tantivy")
    from dataclasses import replace

    other = replace(config, engine="tantivy", index=str(tmp_path / "t.sqlite"))
    tool = build_wiki_search(other)
    assert ask(tool, "What is the capital of Portugal?") == (
        "Lisbon > Lisbon is the capital of Portugal. It lies on the river Tagus."
    )
    assert ask(tool, "wine bridge").startswith("Porto > ")
    assert ask(tool, "sao paulo").startswith("São Paulo > ")
    assert [hit.title for hit in tool.search("Tagus", 5)] == ["Tagus", "Lisbon"]
    for query in ('"', "title:Tagus AND (", "Tagus*"):
        assert tool.search(query, 1) == ([] if query == '"' else tool.search("Tagus title", 1))
    write(tmp_path / "a.jsonl", [{"title": "Quasar", "text": "A bright core."}])
    newer = build_wiki_search(other)
    assert ask(newer, "quasar").startswith("Quasar")
    assert newer.spec.version != tool.spec.version
    assert len(list(tmp_path.glob("*.tantivy"))) == 1
