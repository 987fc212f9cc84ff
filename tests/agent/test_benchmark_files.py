"""Faulty files of HotpotQA, FEVER and the leaderboard are refused: where, what is wanted."""

import copy
import json
import re

import pytest

from pipeline import cli
from pipeline.agent.turns import Message
from pipeline.errors import ConfigError
from pipeline.evaluation.bfcl import load_rows
from pipeline.evaluation.fever import load_fever
from pipeline.evaluation.hotpot import load_hotpot

GONE = object()  # the key is taken away
RAW_WORDS = r"KeyError|TypeError|ValueError|Expecting|Extra data|line 1 column|\(char"


def changed(value, path, new):
    """A copy with what stands at a path of keys and places replaced, or taken away."""
    whole = copy.deepcopy(value)
    inner = whole
    for step in path[:-1]:
        inner = inner[step]
    if new is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return whole


def refused(said, load, *given):
    with pytest.raises(ConfigError) as problem:
        load(*given)
    message = str(problem.value)
    assert said in message and not re.search(RAW_WORDS, message), message
    return message


# -- the leaderboard -------------------------------------------------------------------------------

AREA = {
    "name": "area",
    "description": "Area.",
    "parameters": {
        "type": "dict",
        "properties": {"base": {"type": "integer"}, "unit": {"type": "string"}},
        "required": ["base"],
    },
}
ROW = {"id": "s1", "question": [[{"role": "user", "content": "q"}]], "function": [AREA]}
CALL = {"area": {"base": [10], "unit": ["cm", ""]}}
ANSWER = {"id": "s1", "ground_truth": [CALL]}
PROPERTIES = ("function", 0, "parameters", "properties")


@pytest.fixture
def bfcl(tmp_path):
    """Loads rows and answers, each given as values or as the text of the file."""

    def load(rows, answers, category="simple"):
        files = []
        for name, lines in (("rows.jsonl", rows), ("answers.jsonl", answers)):
            text = lines if isinstance(lines, str) else "\n".join(map(json.dumps, lines))
            (tmp_path / name).write_text(text)
            files.append(tmp_path / name)
        return load_rows(files[0], files[1] if category != "irrelevance" else None, category)

    return load


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        (("id",), GONE, "`id` is missing"),
        (("id",), "s0", "`id` = 's0' occurs twice"),
        (("id",), None, "`id` is null"),
        (("question",), GONE, "`question` is missing"),
        (("question",), "q", "`question` is no list of lists"),
        (("question",), [], "`question` has no message"),
        (("question",), [[]], "`question` has no message"),
        (("question",), ROW["question"] * 2, "`question` has 2 turns; wanted is a single one"),
        (("question", 0, 0), "q", "`question[0][0]` is a text"),
        (("question", 0, 0, "role"), "robot", "`question[0][0].role` = 'robot'; allowed are syst"),
        (("question", 0, 0, "role"), GONE, "question[0][0]: `role` is missing"),
        (("question", 0, 0, "content"), " ", "question[0][0]: `content` is empty"),
        (("function",), GONE, "`function` is missing"),
        (("function",), AREA, "`function` is an object; wanted is a list of functions"),
        (("function",), [], "`function` is an empty list"),
        (("function",), ["area"], "`function[0]` is a text; wanted is an object"),
        (("function", 0, "name"), GONE, "function[0]: `name` is missing"),
        (("function", 0, "description"), 3, "`function[0].description` is a number"),
        (("function", 0, "parameters"), [], "`function[0].parameters` is a list"),
        (("function", 0, "parameters", "type"), "string", "allowed are dict, object"),
        (PROPERTIES, [], "`function[0].parameters.properties` is a list"),
        ((*PROPERTIES, "base"), "integer", "properties.base` is a text; wanted is an object"),
        ((*PROPERTIES, "base", "type"), "int", "properties.base.type` = 'int'; allowed are any,"),
        ((*PROPERTIES, "base", "items"), {"type": "int"}, "base.items.type` = 'int'"),
        ((*PROPERTIES, "base", "items"), [{}], "base.items` is a list"),
        (("function", 0, "parameters", "required"), "base", "required` is a text"),
        (
            ("function", 0, "parameters", "required"),
            ["height"],
            "`function[0].parameters.required` names 'height', which is no property; there are: "
            "base, unit",
        ),
        (("function",), [AREA, {**AREA, "name": "b"}], "2 functions; that is not the category sim"),
    ],
)
def test_a_row_that_is_none_is_refused(bfcl, path, new, said):
    rows = [{**ROW, "id": "s0"}, changed(ROW, path, new)]
    message = refused(said, bfcl, rows, [{**ANSWER, "id": "s0"}, ANSWER])
    assert "rows.jsonl:2: " in message


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        (("id",), GONE, ":2: `id` is missing"),
        (("id",), "s0", ":2: `id` = 's0' occurs twice"),
        (("id",), "s2", ": no answer for row s1"),
        (("ground_truth",), GONE, ":2: `ground_truth` is missing"),
        (("ground_truth",), CALL, ":2: `ground_truth` is an object; wanted is a list of calls"),
        (("ground_truth",), [], ":2: `ground_truth` is an empty list"),
        (("ground_truth",), ["area()"], ":2: `ground_truth[0]` is a text"),
        (("ground_truth",), [{**CALL, "b": {}}], "`ground_truth[0]` is an object of 2 keys"),
        (("ground_truth",), [{"volume": {}}], "the function 'volume', which row s1 does not offer"),
        (("ground_truth",), [CALL, CALL], "2 calls; that is not the category simple, parallel wou"),
        (("ground_truth", 0, "area"), [], ":2: `ground_truth[0].area` is a list"),
        (("ground_truth", 0, "area", "base"), 10, "`ground_truth[0].area.base` is a number"),
        (("ground_truth", 0, "area", "base"), [], "`ground_truth[0].area.base` is an empty list"),
        (("ground_truth", 0, "area", "base"), [{"x": 1}], "area.base.x` is a number"),
        (("ground_truth", 0, "area", "base"), [[{"x": 1}]], "area.base.x` is a number"),
        (("ground_truth", 0, "area", "base"), GONE, "ground_truth[0].area: `base` is missing"),
        (("ground_truth", 0, "area", "size"), [1], "names 'size', which is no parameter"),
    ],
)
def test_an_answer_that_no_call_could_match_is_refused(bfcl, path, new, said):
    answers = [{**ANSWER, "id": "s0"}, changed(ANSWER, path, new)]
    message = refused(said, bfcl, [{**ROW, "id": "s0"}, ROW], answers)
    assert "answers.jsonl" in message


@pytest.mark.parametrize(
    ("rows", "answers", "said"),
    [
        ("", [ANSWER], "rows.jsonl: holds no row"),
        ("\n \n", [ANSWER], "rows.jsonl: holds no row"),
        ([ROW], "", "answers.jsonl: holds no row"),
        (json.dumps([ROW], indent=1), [ANSWER], "rows.jsonl:1: a list; wanted is JSONL"),
        (json.dumps(ROW) + "\n{nothing", [ANSWER], "rows.jsonl:2: not JSON from line 1, column 2"),
        ('"text"', [ANSWER], "rows.jsonl:1: a text; wanted is an object"),
        ([ROW], "[" * 9, "answers.jsonl:1: a list"),
        ('{"a": ' + "[" * 100000, [ANSWER], "lists too deep"),
        ('{"a": ' + "1" * 9999 + "}", [ANSWER], "a number too long"),
    ],
)
def test_another_kind_of_file_is_refused(bfcl, rows, answers, said):
    refused(said, bfcl, rows, answers)


def test_the_category_that_would_fit_is_named(bfcl):
    two = {**ROW, "function": [AREA, {**AREA, "name": "volume"}]}
    refused("not the category parallel, simple would fit", bfcl, [ROW], [ANSWER], "parallel")
    refused("not the category parallel, multiple would fit", bfcl, [two], [ANSWER], "parallel")
    doubled = {**ANSWER, "ground_truth": [CALL, CALL]}
    refused("not the category multiple, parallel would fit", bfcl, [two], [doubled], "multiple")
    refused("not the category simple, multiple would fit", bfcl, [two], [ANSWER])
    mixed = [{**ROW, "id": "s0"}, ROW], [{**doubled, "id": "s0"}, ANSWER]
    assert len(bfcl(*mixed, "parallel")) == 2


def test_description_and_parameters_may_be_missing(bfcl):
    (row,) = bfcl([{**ROW, "function": [{"name": "area"}]}], "", "irrelevance")
    assert row.functions[0]["description"] == ""
    assert row.functions[0]["parameters"] == {"type": "dict", "properties": {}}
    assert row.messages == (Message("user", "q"),) and row.accepted == ()
    bare = {**ROW, "function": [{"name": "area", "parameters": {"type": "dict"}}]}
    (row,) = bfcl([bare], [{**ANSWER, "ground_truth": [{"area": {}}]}])
    assert row.functions[0]["parameters"]["properties"] == {}


def test_other_line_ends_within_a_text_break_no_row(bfcl):
    raw = {**ROW, "question": [[{"role": "user", "content": "a\u2028b"}]]}
    (row,) = bfcl(json.dumps(raw, ensure_ascii=False) + "\r\n", [ANSWER])
    assert row.messages[0].content == "a\u2028b"


def test_a_nested_object_may_require_what_it_does_not_declare(bfcl):
    loose = changed(ROW, (*PROPERTIES, "unit"), {"type": "dict", "required": ["x"]})
    assert len(bfcl([loose], [ANSWER])) == 1
    strict = changed(loose, (*PROPERTIES, "unit", "properties"), {"y": {"type": "string"}})
    refused("properties.unit.required` names 'x'", bfcl, [strict], [ANSWER])


@pytest.mark.parametrize(
    ("category", "rows", "answers", "count"),
    [
        ("simple", "simple_python_first200", "simple_python_answers_first200", 200),
        ("multiple", "multiple_first100", "multiple_answers_first100", 100),
        ("parallel", "parallel_first100", "parallel_answers_first100", 100),
        ("irrelevance", "irrelevance_first120", None, 120),
    ],
)
def test_the_real_files_load_whole_and_unchanged(shared_data, category, rows, answers, count):
    file = shared_data(f"bfcl_v4_{rows}.jsonl")
    truth = answers and shared_data(f"bfcl_v4_{answers}.jsonl")
    loaded = load_rows(file, truth, category)
    raw = [json.loads(line) for line in file.read_text().split("\n") if line]
    assert len(loaded) == len(raw) == count
    assert [(r.row_id, list(r.functions)) for r in loaded] == [
        (r["id"], r["function"]) for r in raw
    ]


# -- HotpotQA --------------------------------------------------------------------------------------

ASKED = {"id": "h1", "question": "q", "answer": "a", "context": [["A", ["One."]]]}


@pytest.fixture
def hotpot(tmp_path):
    def load(rows):
        path = tmp_path / "hotpot.json"
        path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
        return load_hotpot(path)

    return load


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        (("id",), GONE, "`id` is missing"),
        (("id",), "h0", "`id` = 'h0' occurs twice"),
        (("question",), GONE, "`question` is missing"),
        (("question",), " ", "`question` is empty"),
        (("answer",), GONE, "`answer` is missing"),
        (("answer",), 7, "`answer` is a number; wanted is a text"),
        (("answer",), ["a"], "`answer` is a list"),
        (("context",), GONE, '`context` is missing; wanted is [["title", ["sentence", ...]], ...]'),
        (("context",), "A", "`context` holds no such pages"),
        (("context",), ["A"], "`context` holds no such pages"),
        (("context",), [["A", "One."]], "`context` holds no such pages"),
        (("context",), [["A", [1]]], "`context` holds no such pages"),
        (("context",), [[1, ["One."]]], "`context` holds no such pages"),
        (("context",), {"title": ["A"]}, "`sentences` is missing"),
        (("context",), {"title": ["A"], "sentences": []}, "`context` holds no such pages"),
        (("context",), {"title": "A", "sentences": "B"}, "`context` holds no such pages"),
    ],
)
def test_a_question_that_is_none_is_refused(hotpot, path, new, said):
    message = refused(said, hotpot, [{**ASKED, "id": "h0"}, changed(ASKED, path, new)])
    assert "hotpot.json: not a HotpotQA distractor file: row 2: " in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty; wanted is one JSON list"),
        ("[]", "holds no question"),
        (json.dumps(ASKED) + "\n" + json.dumps(ASKED), "or JSONL; wanted is one JSON list"),
        ("[1]", "row 1: a number; wanted is an object"),
        ("# Title", "something else; wanted is one JSON list"),
        ("[\n{nothing}]", "not JSON from line 2, column 2 on"),
        (json.dumps([{**ASKED, "context": []}]), "no `context` holds a page"),
    ],
)
def test_another_file_than_hotpot_is_refused(hotpot, text, said):
    refused(said, hotpot, text)


def test_one_question_without_pages_does_no_harm(hotpot):
    questions, encyclopedia = hotpot([ASKED, {**ASKED, "id": "h2", "context": []}])
    assert len(questions) == 2 and list(encyclopedia.pages) == ["A"]


# -- FEVER -----------------------------------------------------------------------------------------

CLAIM = {"id": 1, "claim": "c", "label": "REFUTES"}


@pytest.fixture
def fever(tmp_path):
    def load(rows, limit=None):
        path = tmp_path / "fever.jsonl"
        path.write_text(rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows)))
        return load_fever(path, limit)

    return load


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        (("id",), GONE, "`id` is missing"),
        (("id",), 0, "`id` = '0' occurs twice"),
        (("id",), 1.5, "`id` is a number; wanted is a text or a whole number"),
        (("claim",), GONE, "`claim` is missing"),
        (("claim",), "", "`claim` is empty"),
        (("claim",), ["c"], "`claim` is a list"),
        (("label",), GONE, "`label` is missing; wanted is one of SUPPORTS, REFUTES"),
        (("label",), "TRUE", "`label` = 'TRUE'; allowed are SUPPORTS, REFUTES, NOT ENOUGH INFO"),
        (("label",), ["REFUTES"], "`label` = ['REFUTES']; allowed"),
    ],
)
def test_a_claim_that_is_none_is_refused_also_past_the_limit(fever, path, new, said):
    message = refused(said, fever, [{**CLAIM, "id": 0}, changed(CLAIM, path, new)], 1)
    assert "fever.jsonl:2: " in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no row"),
        (json.dumps([CLAIM]), ":1: a list; wanted is JSONL, one object per line"),
        (json.dumps(CLAIM) + "\nclaim", ":2: not JSON"),
    ],
)
def test_another_file_than_fever_is_refused(fever, text, said):
    refused(said, fever, text)


def test_claims_up_to_the_limit_are_read(fever):
    assert [q.question_id for q in fever([CLAIM, {**CLAIM, "id": 2}], 1)] == ["1"]


# -- any file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_hotpot, load_fever])
def test_what_cannot_be_read_is_said(load, tmp_path):
    refused("nowhere: no such file", load, tmp_path / "nowhere")
    refused("cannot be read: Is a directory", load, tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    refused("binary: not a text in UTF-8", load, tmp_path / "binary")


def test_the_command_ends_with_2(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**ROW, "function": []}))
    command = ["agent", "evaluate", "m", "--benchmarks", "bfcl", "--bfcl-category", "irrelevance"]
    assert cli.main([*command, "--bfcl-file", str(rows)]) == 2
    assert "rows.jsonl:1: `function` is an empty list" in capsys.readouterr().err
    assert cli.main([*command, "--bfcl-file", str(tmp_path)]) == 2
    assert "a folder; wanted is a file" in capsys.readouterr().err
