"""The bundled data is right, and its check finds what it is there to find."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "check_data.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_data", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_data"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check_data = load_script()

# Right rows with made-up names, so that they cannot meet anything that is bundled. Each test breaks
# one of them in one place.
FILLER = (
    "Nobody at the kiosk wanted to talk about it afterwards, least of all the two porters, who "
    "had carried everything up the stairs and down again while it hailed outside."
)
ENTRY = {
    "title": "Quorlham",
    "text": "Quorlham is a market town on the river Vessingo. It was granted its charter in 1291, "
    "keeps a covered bridge of black oak, and was the birthplace of the bell founder Ottokar "
    "Brunnwald, whose heaviest work still hangs in the tower.",
}
DOCUMENT: dict[str, Any] = {
    "text": "The porters of Quorlham took 7013 plates and 4919 saucers to the ballroom near the "
    "Vessingo, so they carried 11932 pieces on Monday, March 4, and were paid 13 days after "
    "March 4, with about 1.43 plates for each saucer. " + FILLER,
    "date": "2047-03-17",
    "url": None,
    "source": "bundled/planted",
    "topic": "news",
    "checks": [
        "7013 + 4919 = 11932",
        "weekday 2047-03-04 = Monday",
        "days 2047-03-04 2047-03-17 = 13",
        "7013 / 4919 = 1.43",
        "fact Quorlham | Vessingo",
    ],
}
SUM_QUESTION: dict[str, Any] = {
    "id": "planted-1",
    "kind": "arithmetic",
    "prompt": "An otter swam 8123 strokes upstream and then 5077 more. Its strokes number",
    "answer": "13200",
    "aliases": ["13,200"],
    "date": None,
    "checks": ["8123 + 5077 = 13200"],
}
DATE_QUESTION: dict[str, Any] = {
    "id": "planted-2",
    "kind": "date",
    "prompt": "The otter keeps a diary, and under her last entry stands the word",
    "answer": "Friday",
    "aliases": [],
    "date": "2047-05-10",
    "checks": ["weekday 2047-05-10 = Friday"],
}
FACT_QUESTION: dict[str, Any] = {
    "id": "planted-3",
    "kind": "lookup",
    "prompt": "Few otters know that the charter of Zandhelm was sealed in the year",
    "answer": "1388",
    "aliases": [],
    "date": None,
    "checks": ["fact Zandhelm | 1388"],
}
OTHER_ENTRY = {
    "title": "Zandhelm",
    "text": "Zandhelm is a harbour on the northern shore of lake Ommer. It received its charter in "
    "1388, lost its walls in a fire, and is known for smoked eel, for a lighthouse built of "
    "pink stone and for a regatta of bathtubs in late summer.",
}
FILES = {
    "corpus": [DOCUMENT],
    "encyclopedia": [ENTRY, OTHER_ENTRY],
    "questions": [SUM_QUESTION, DATE_QUESTION, FACT_QUESTION],
}


def plant(data: Path, folder: str, rows: list[dict[str, Any]]) -> None:
    write(data / folder / "planted.jsonl", rows)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with nothing but the right rows from above."""
    for folder, rows in FILES.items():
        (tmp_path / "data" / folder).mkdir(parents=True)
        plant(tmp_path / "data", folder, rows)
    return tmp_path / "data"


@pytest.fixture
def bundled(tmp_path: Path) -> Path:
    """A copy of the bundled data."""
    for folder in check_data.FOLDERS:
        shutil.copytree(ROOT / "data" / folder, tmp_path / "data" / folder)
    return tmp_path / "data"


@pytest.fixture(scope="module")
def before() -> list[str]:
    """Violations of the bundled data as it stands."""
    return list(check_data.check_data(ROOT / "data").violations)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def find_check(data: Path, sort: str) -> tuple[Path, int, str]:
    """First claim of a sort in the corpus: file, row from 0, claim."""
    for path in sorted((data / "corpus").glob("*.jsonl")):
        for number, row in enumerate(read(path)):
            for check in row["checks"]:
                if check_data.sort_of(check) == sort:
                    return path, number, check
    raise AssertionError(f"no check of the sort {sort} in the corpus")


def break_check(data: Path, sort: str, wrong: str) -> str:
    """Put another result into the first claim of a sort; its place and the broken claim."""
    path, number, check = find_check(data, sort)
    broken = check.rpartition(" = ")[0] + " = " + wrong
    rows = read(path)
    rows[number]["checks"] = [broken if c == check else c for c in rows[number]["checks"]]
    write(path, rows)
    return f"data/corpus/{path.name}:{number + 1}: {broken!r}"


def planted_violations(data: Path) -> list[str]:
    return [line for line in check_data.check_data(data).violations if "planted" in line]


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def document(old: str, new: str) -> dict[str, Any]:
    """The right document with one thing replaced in its text."""
    assert old in DOCUMENT["text"]
    return {**DOCUMENT, "text": DOCUMENT["text"].replace(old, new)}


def test_bundled_data_is_right() -> None:
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "No violation." in result.stdout


@pytest.mark.parametrize(
    ("sort", "wrong"),
    [("arithmetic", "987654"), ("weekday", "Doomsday"), ("days", "987654")],
)
def test_wrong_claim_in_bundled_data_is_reported(
    bundled: Path, before: list[str], sort: str, wrong: str
) -> None:
    start = break_check(bundled, sort, wrong)
    new = set(check_data.check_data(bundled).violations) - set(before)
    assert [violation for violation in new if violation.startswith(start)]


def test_bundled_fact_missing_from_the_encyclopedia_is_reported(
    bundled: Path, before: list[str]
) -> None:
    path, number, check = find_check(bundled, "fact")
    title, _, fact = check.removeprefix("fact ").partition(" | ")
    for file in (bundled / "encyclopedia").glob("*.jsonl"):
        rows = read(file)
        for row in rows:
            if row["title"] == title:
                row["text"] = row["text"].replace(fact, "something")
        write(file, rows)
    place = f"data/corpus/{path.name}:{number + 1}: {check!r}: "
    message = f"{place}the entry {title!r} does not hold {fact!r}"
    assert message in set(check_data.check_data(bundled).violations) - set(before)


def test_question_that_repeats_a_bundled_sum_is_reported(bundled: Path, before: list[str]) -> None:
    path, number, check = find_check(bundled, "arithmetic")
    left, _, answer = check.partition(" = ")
    numbers = " and ".join(check_data.operands(left))
    question = {
        **SUM_QUESTION,
        "prompt": f"Somebody wrote {numbers} on a wall and got",
        "answer": answer,
        "checks": [check],
    }
    plant(bundled, "questions", [question])
    start = "data/questions/planted.jsonl:1: overlaps with "
    new = set(check_data.check_data(bundled).violations) - set(before)
    place = f"{start}data/corpus/{path.name}:{number + 1}: sum "
    assert [violation for violation in new if violation.startswith(place)]


def test_wrong_sum_fails_the_command(bundled: Path) -> None:
    start = break_check(bundled, "arithmetic", "987654")
    command = [sys.executable, str(SCRIPT), "--data", str(bundled)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert start in result.stdout


def test_right_rows_are_accepted(data: Path) -> None:
    assert planted_violations(data) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**DOCUMENT, "checks": ["7013 - 4919 = 2095"]}, "7013 - 4919 is 2094, not 2095"),
        ({**DOCUMENT, "checks": ["7013 / 4919 = 1.42"]}, "is 1.4257, not 1.42"),
        ({**DOCUMENT, "checks": ["7013 / 0 = 11932"]}, "cannot be computed"),
        ({**DOCUMENT, "checks": ["7013 ** 2 = 11932"]}, "is not made of numbers"),
        ({**DOCUMENT, "checks": ["weekday 2047-03-04 = Tuesday"]}, "is a Monday, not a Tuesday"),
        ({**DOCUMENT, "checks": ["weekday 2047-03-17 = Sunday"]}, "Sunday stands neither"),
        ({**DOCUMENT, "checks": ["weekday 2047-03-11 = Monday"]}, "2047-03-11 is neither"),
        ({**DOCUMENT, "checks": ["days 2047-03-04 2047-03-17 = 14"]}, "it is 13 days, not 14"),
        ({**DOCUMENT, "checks": ["days 2047-02-30 2047-03-17 = 15"]}, "is not a date"),
        ({**DOCUMENT, "checks": ["fact Quorlhem | Vessingo"]}, "has no entry 'Quorlhem'"),
        ({**DOCUMENT, "checks": ["fact Quorlham | hailed"]}, "entry 'Quorlham' does not hold"),
        ({**DOCUMENT, "checks": ["fact Quorlham | 1291"]}, "'1291' is not in the text"),
        ({**DOCUMENT, "checks": ["today is Monday"]}, "expected 'EXPRESSION = RESULT'"),
        (document("11932", "many"), "11932 is not in the text as a number of its own"),
        (document("4919 saucers", "some saucers"), "4919 is not in the text"),
        (document("The porters", "All 11932 done, the porters"), "11932 stands before 7013"),
        (document("about 1.43", "1.43"), "the text does not say so"),
        (document("Vessingo", "river"), "'Vessingo' is not in the text"),
        (document("of Quorlham", "of the town"), "'Quorlham' is not named in the text"),
        (
            document("The porters of Quorlham", "By the Vessingo porters of Quorlham")
            | {"checks": ["fact Quorlham | porters"]},
            "does not hold 'porters'",
        ),
        (document("ballroom", "ballroom [1]"), "holds '['"),
        (document(FILLER, ""), "a space at an end"),
        ({**DOCUMENT, "text": "It hailed.", "checks": []}, "words, allowed are 40 to 110"),
        ({**DOCUMENT, "topic": "cooking"}, "topic 'cooking' is none of"),
        ({**DOCUMENT, "source": "bundled/other"}, "should be 'bundled/planted'"),
        ({**DOCUMENT, "date": "2047-02-30"}, "'2047-02-30' is not a date"),
        ({**DOCUMENT, "checks": [5]}, "must hold strings only"),
        ({**DOCUMENT, "author": "me"}, "unknown field 'author'"),
        (without(DOCUMENT, "url"), "field 'url' is missing"),
    ],
)
def test_wrong_document_is_reported(data: Path, row: dict[str, Any], message: str) -> None:
    plant(data, "corpus", [row])
    violations = planted_violations(data)
    assert any(line.startswith("data/corpus/planted.jsonl:1: ") for line in violations)
    assert any(message in line for line in violations), violations


def test_fact_before_its_name_is_reported(data: Path) -> None:
    moved = document("near the Vessingo", "upstairs")
    moved["text"] = "The Vessingo was rising. " + moved["text"]
    plant(data, "corpus", [moved])
    [violation] = planted_violations(data)
    assert "'Vessingo' stands before the name 'Quorlham'" in violation


def test_fact_missing_from_its_entry_is_reported(data: Path) -> None:
    text = ENTRY["text"].replace("Vessingo", "Nameless")
    plant(data, "encyclopedia", [{**ENTRY, "text": text}, OTHER_ENTRY])
    [violation] = planted_violations(data)
    assert violation.startswith("data/corpus/planted.jsonl:1: 'fact Quorlham | Vessingo': ")
    assert "the entry 'Quorlham' does not hold 'Vessingo'" in violation


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**SUM_QUESTION, "answer": "13201"}, "the result 13200 is not the answer '13201'"),
        ({**SUM_QUESTION, "checks": []}, "needs a check of the sort arithmetic"),
        (
            {**SUM_QUESTION, "prompt": "After 8123 and 5077 strokes, 13200 in all, the otter did"},
            "the answer '13200' already stands in the prompt",
        ),
        (
            {**SUM_QUESTION, "prompt": "After 8123 and 5077 strokes, 13,200 in all, the otter did"},
            "the answer '13,200' already stands in the prompt",
        ),
        ({**SUM_QUESTION, "prompt": SUM_QUESTION["prompt"] + " "}, "a space at an end"),
        ({**SUM_QUESTION, "kind": "sum"}, "kind 'sum' is none of"),
        ({**DATE_QUESTION, "answer": "Saturday"}, "'Saturday' follows neither"),
        ({**FACT_QUESTION, "answer": "1389"}, "'1388' is neither the answer '1389' nor"),
    ],
)
def test_wrong_question_is_reported(data: Path, row: dict[str, Any], message: str) -> None:
    plant(data, "questions", [row])
    violations = planted_violations(data)
    assert any(message in line for line in violations), violations


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {
                **SUM_QUESTION,
                "prompt": "A potter fired 4919 jugs in May and 7013 in June. Her jugs number",
                "answer": "11932",
                "aliases": [],
                "checks": ["4919 + 7013 = 11932"],
            },
            "sum",
        ),
        (
            {
                **SUM_QUESTION,
                "prompt": "A potter fired 11932 jugs and sold 7013 of them. Her jugs number",
                "answer": "4919",
                "aliases": [],
                "checks": ["11932 - 7013 = 4919"],
            },
            "it states '11932 - 7013 = 4919'",
        ),
        ({**DATE_QUESTION, "date": "2047-03-04", "answer": "March 4", "checks": []}, "date"),
        (
            {
                **FACT_QUESTION,
                "prompt": "Few otters know that the charter of Quorlham was sealed in the year",
                "answer": "1291",
                "checks": ["fact Quorlham | 1291"],
            },
            "fact about 'Quorlham'",
        ),
        (
            {**DATE_QUESTION, "prompt": "Carried everything up the stairs and down again on a"},
            "eight words 'carried everything up the stairs and down again'",
        ),
    ],
)
def test_overlap_is_reported(data: Path, row: dict[str, Any], message: str) -> None:
    plant(data, "questions", [row])
    violations = planted_violations(data)
    assert violations
    for violation in violations:
        place = "data/questions/planted.jsonl:1: overlaps with data/corpus/planted.jsonl:1: "
        assert violation.startswith(place)
    assert any(message in line for line in violations), violations


def test_shared_sentence_is_reported(data: Path) -> None:
    plant(data, "corpus", [document(FILLER, "No otter was harmed. " + FILLER)])
    prompt = "No otter was harmed. " + DATE_QUESTION["prompt"]
    plant(data, "questions", [{**DATE_QUESTION, "prompt": prompt}])
    [violation] = planted_violations(data)
    assert "sentence 'no otter was harmed'" in violation


@pytest.mark.parametrize("folder", ["corpus", "encyclopedia", "questions"])
def test_double_is_reported(data: Path, folder: str) -> None:
    plant(data, folder, [*FILES[folder], FILES[folder][0]])
    number = len(FILES[folder]) + 1
    violations = planted_violations(data)
    assert any(
        line.startswith(f"data/{folder}/planted.jsonl:{number}: same ") for line in violations
    )


def test_broken_lines_are_reported_with_their_number(data: Path) -> None:
    good = json.dumps(DOCUMENT).encode()
    (data / "corpus" / "planted.jsonl").write_bytes(b'{"text": \n[1]\n\xff\xfe\n' + good + b"\n")
    violations = planted_violations(data)
    lines = [violation.split(":")[1] for violation in violations]
    assert lines == ["1", "2", "3"]


def test_missing_files_are_reported(data: Path) -> None:
    shutil.rmtree(data / "encyclopedia")
    violations = check_data.check_data(data).violations
    assert "data/encyclopedia: missing: no *.jsonl file here" in violations
    assert "totals: 0 encyclopedia entries, at least 400 are needed" in violations


def test_missing_topic_and_plain_documents_are_reported(bundled: Path) -> None:
    for path in (bundled / "corpus").glob("*.jsonl"):
        write(path, [row for row in read(path) if row["checks"] and row["topic"] != "sport"])
    violations = check_data.check_data(bundled).violations
    assert "totals: no document on the topic 'sport'" in violations
    assert "totals: 0 plain documents, without checks, at least 30 are needed" in violations


@pytest.mark.parametrize(
    ("expression", "value"),
    [("10 - 2 - 3", "5"), ("2 + 3 * 4", "14"), ("(1 + 2) / 3", "1"), ("640 * 15%", "96")],
)
def test_sums_are_computed_as_usual(expression: str, value: str) -> None:
    assert check_data.evaluate(expression) == check_data.evaluate(value)


def test_decimals_are_exact() -> None:
    assert check_data.evaluate("0.1 + 0.2") == check_data.evaluate("0.3")
