"""Check the bundled data: sums, dates, facts, form, totals, no overlap of questions and corpus.

    python scripts/check_data.py [--data data]

Reads corpus/*.jsonl, encyclopedia/*.jsonl and questions/*.jsonl, prints a table and every
violation as file:line, and exits with 1 when there is one. Standard library only.

Covered: whatever a row claims in `checks`, the form of each row, uniqueness, and overlap between
questions and corpus. Not covered: whether the encyclopedia tells the truth, and claims that a text
makes without listing them in `checks`.
"""

import argparse
import ast
import calendar
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

TOPICS = ("news", "shop", "science", "travel", "sport", "history")
KINDS = ("arithmetic", "date", "lookup")
FOLDERS = ("corpus", "encyclopedia", "questions")
OPTIONAL = str | None
FIELDS: dict[str, dict[str, Any]] = {
    "corpus": dict(text=str, date=OPTIONAL, url=OPTIONAL, source=str, topic=str, checks=list),
    "encyclopedia": dict(title=str, text=str),
    "questions": dict(
        id=str, kind=str, prompt=str, answer=str, aliases=list, date=OPTIONAL, checks=list
    ),
}
WORDS = {"corpus": (40, 110), "encyclopedia": (30, 70), "questions": (5, 80)}
BODY = {"corpus": "text", "encyclopedia": "text", "questions": "prompt"}
SHINGLE_WORDS = 8
SENTENCE_WORDS = 4  # a shorter sentence in both places is chance: "It was raining."

WEEKDAYS, MONTHS = tuple(calendar.day_name), tuple(calendar.month_name)[1:]
NUMBER = re.compile(
    r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)(\s?%|\s(?:percent|per cent)\b)?"
)
ROUNDED = re.compile(
    r"\b(about|around|roughly|approximately|nearly|almost|some|rounded)\b", re.IGNORECASE
)
FOREIGN_CHARACTER = re.compile(r"[^\x20-\x7e–—‘’“”…°€£]|[\[\]]")  # brackets are call syntax
MONTH = "|".join(MONTHS)
DAY_MONTH = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?(?: of)?"
ISO_DATE = re.compile(r"\b\d{4}-\d{2}-\d{2}\b")
WRITTEN_DATES = (
    re.compile(rf"\b(?P<month>{MONTH}) (?P<day>\d{{1,2}})(?:st|nd|rd|th)?,? (?P<year>\d{{4}})\b"),
    re.compile(rf"\b{DAY_MONTH} (?P<month>{MONTH}),? (?P<year>\d{{4}})\b"),
)


class Wrong(ValueError):
    """A claim that does not hold; the message says what was found and what is right."""


@dataclass(frozen=True)
class Row:
    """One JSON object and where it stands."""

    folder: str
    place: str  # file:line, the file relative to the folder above the data
    value: Mapping[str, Any]

    @property
    def body(self) -> str:
        return self.value[BODY[self.folder]]

    @property
    def answers(self) -> tuple[str, ...]:
        """Accepted answers of a question; a document, where the results stand in it, has none."""
        if self.folder != "questions":
            return ()
        return (self.value["answer"], *self.value["aliases"])

    @property
    def day(self) -> date | None:
        return date.fromisoformat(self.value["date"]) if self.value["date"] else None


@dataclass
class Report:
    """Everything that was found: the table's figures and the violations, in order."""

    rows: Counter[str] = field(default_factory=Counter)  # per file
    checks: Counter[tuple[str, str]] = field(default_factory=Counter)  # per file and sort of check
    plain: Counter[str] = field(default_factory=Counter)  # documents without checks, per file
    violations: list[str] = field(default_factory=list)

    def add(self, place: str, message: str) -> None:
        self.violations.append(f"{place}: {message}")


# Reading and form


def read_rows(data: Path, folder: str, report: Report) -> Iterator[Row]:
    """Rows of one folder whose form is right; every other line becomes a violation."""
    files = sorted((data / folder).glob("*.jsonl"))
    if not files:
        report.add(f"{data.name}/{folder}", "missing: no *.jsonl file here")
    for path in files:
        name = f"{data.name}/{folder}/{path.name}"
        report.rows[name] = 0
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            place = f"{name}:{number}"
            try:
                value = json.loads(line.decode("utf-8"))
            except ValueError as error:  # covers UnicodeDecodeError and JSONDecodeError
                report.add(place, f"not a JSON object in UTF-8: {error}")
                continue
            problems = list(form_problems(folder, path.stem, value))
            for problem in problems:
                report.add(place, problem)
            report.rows[name] += 1
            if not problems:
                yield Row(folder, place, value)


def form_problems(folder: str, stem: str, value: Any) -> Iterator[str]:
    """What is wrong with the fields of one row, without looking at its claims."""
    if not isinstance(value, dict):
        yield f"expected a JSON object, got {type(value).__name__}"
        return
    fields = FIELDS[folder]
    yield from (f"field {name!r} is missing" for name in fields if name not in value)
    yield from (f"unknown field {name!r}" for name in value if name not in fields)
    wrong = [k for k, kinds in fields.items() if k in value and not isinstance(value[k], kinds)]
    yield from (f"field {name!r} has the type {type(value[name]).__name__}" for name in wrong)
    if wrong or fields.keys() - value.keys():
        return
    for name in ("checks", "aliases"):
        if not all(isinstance(item, str) for item in value.get(name, [])):
            yield f"field {name!r} must hold strings only"
            return
    for name in ("text", "title", "prompt", "answer"):
        if name in value:
            yield from prose_problems(name, value[name])
    low, high = WORDS[folder]
    words = len(value[BODY[folder]].split())
    if not low <= words <= high:
        yield f"{words} words, allowed are {low} to {high}"
    if folder != "encyclopedia":
        yield from date_problems(value["date"])
    if folder == "corpus":
        if value["topic"] not in TOPICS:
            yield f"topic {value['topic']!r} is none of {', '.join(TOPICS)}"
        if value["source"] != f"bundled/{stem}":
            yield f"source {value['source']!r} should be 'bundled/{stem}'"
    if folder == "questions" and value["kind"] not in KINDS:
        yield f"kind {value['kind']!r} is none of {', '.join(KINDS)}"


def prose_problems(name: str, text: str) -> Iterator[str]:
    if not text or text != " ".join(text.split()):
        yield f"field {name!r} is empty or has a line break, a double space or a space at an end"
    for found in sorted(set(FOREIGN_CHARACTER.findall(text))):
        yield f"field {name!r} holds {found!r}; allowed are ASCII but brackets and –—‘’“”…°€£"


def date_problems(value: str | None) -> Iterator[str]:
    try:
        if value is not None and date.fromisoformat(value).isoformat() != value:
            yield f"date {value!r} is not of the form YYYY-MM-DD"
    except ValueError:
        yield f"date {value!r} is not a date of the form YYYY-MM-DD"


def normal(text: str) -> str:
    """Lower case, words and numbers only: what counts when two texts are compared."""
    return " ".join(re.findall(r"[^\W_]+", text.casefold()))


def check_unique(rows: Iterable[Row], name: str, report: Report) -> None:
    seen: dict[str, str] = {}
    for row in rows:
        first = seen.setdefault(normal(row.value[name]), row.place)
        if first != row.place:
            report.add(row.place, f"same {name} as {first}: {row.value[name][:60]!r}")


# Claims


def written(text: str, words: str) -> list[int]:
    """Where `words` stand in the text as whole words, in any case."""
    pattern = rf"(?<!\w){re.escape(words)}(?!\w)"
    return [match.start() for match in re.finditer(pattern, text, re.IGNORECASE)]


def numbers(text: str) -> list[tuple[str, int]]:
    """Numbers and their positions, without commas; a percentage counts with and without `%`."""
    found = []
    for match in NUMBER.finditer(text):
        digits = re.match(r"[\d,]*\d(?:\.\d+)?", match[0])[0].replace(",", "")  # type: ignore[index]
        found.append((digits, match.start()))
        if match[1]:
            found.append((digits + "%", match.start()))
    return found


def evaluate(expression: str) -> Fraction:
    """Exact value of + - * / and parentheses; `N%` is N / 100. Raises Wrong.

    Apart from the Calculator on purpose: data and tool check each other, and this one never rounds.
    """
    if not re.fullmatch(r"[\d.%()+*/ -]+", expression):
        raise Wrong(f"{expression!r} is not made of numbers, + - * / and parentheses")
    source = re.sub(r"(\d+(?:\.\d+)?)%", r"(\1/100)", expression)

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float()):
                return Fraction(ast.get_source_segment(source, node) or "")
            case ast.BinOp(left, ast.Add(), right):
                return value(left) + value(right)
            case ast.BinOp(left, ast.Sub(), right):
                return value(left) - value(right)
            case ast.BinOp(left, ast.Mult(), right):
                return value(left) * value(right)
            case ast.BinOp(left, ast.Div(), right):
                return value(left) / value(right)
        raise Wrong(f"{expression!r} is not made of numbers, + - * / and parentheses")

    try:
        return value(ast.parse(source, mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise Wrong(f"{expression!r} cannot be computed: {error}") from error


def operands(expression: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?%?", expression)


def check_result(row: Row, left: str, right: str) -> None:
    """The result is exact, or rounded half up and called so next to it. Raises Wrong."""
    if not re.fullmatch(r"\d+(\.\d{1,2})?%?", right):
        raise Wrong(f"the result {right!r} should have digits and at most two decimals")
    exact = evaluate(left) * (100 if right.endswith("%") else 1)
    claimed = Decimal(right.rstrip("%"))
    if Fraction(claimed) == exact:
        return
    unit = Decimal(1).scaleb(-len(right.rstrip("%").partition(".")[2]))
    nearest = (Decimal(exact.numerator) / exact.denominator).quantize(unit, ROUND_HALF_UP)
    if nearest != claimed:
        raise Wrong(f"{left} is {round(float(exact), 4):g}, not {right.rstrip('%')}")
    ends = [place for digits, place in numbers(row.body) if digits == right] or [len(row.body)]
    if not any(ROUNDED.search(row.body[max(0, end - 40) : end + 30]) for end in ends):
        raise Wrong(f"{right} is rounded and the text does not say so (about, roughly, ...)")


def check_arithmetic(row: Row, left: str, right: str) -> None:
    """`37 * 24 = 888`: right, and operands before the result. Raises Wrong."""
    check_result(row, left, right)
    stand: dict[str, int] = {}  # where each number stands first
    for digits, place in numbers(row.body):
        stand.setdefault(digits, place)
    if row.folder == "questions":
        if right.rstrip("%") not in row.answers:
            raise Wrong(f"the result {right} is not the answer {row.value['answer']!r}")
        year = {str(row.day.year)} if row.day else set()
        for operand in set(operands(left)) - stand.keys() - year:
            raise Wrong(f"{operand} stands neither in the prompt nor as the year of its date")
        return
    for number in (*operands(left), right):
        if number not in stand:
            raise Wrong(f"{number} is not in the text as a number of its own")
    for operand in operands(left):
        # The first place counts: a result that stands before its operands gives the sum away.
        if stand[right] <= stand[operand]:
            raise Wrong(f"the result {right} stands before {operand}")


def known_day(row: Row, text: str) -> date:
    """The date of a claim, which the row must know: its own date, or written out in its text."""
    try:
        day = date.fromisoformat(text)
    except ValueError as error:
        raise Wrong(f"{text!r} is not a date of the form YYYY-MM-DD") from error
    month = MONTHS[day.month - 1]
    ordinal = "(st|nd|rd|th)?"
    form = rf"\b({month} {day.day}{ordinal}|{day.day}{ordinal} (of )?{month}|{text})\b"
    if day != row.day and not re.search(form, row.body):
        raise Wrong(f"{text} is neither the date of this row nor written in it")
    return day


def check_weekday(row: Row, day_text: str, right: str) -> None:
    """`weekday 2023-01-30 = Monday`. Raises Wrong."""
    actual = WEEKDAYS[known_day(row, day_text).weekday()]
    if right != actual:
        raise Wrong(f"{day_text} is a {actual}, not a {right}")
    if not written(row.body, right) and right not in row.answers:
        raise Wrong(f"{right} stands neither in the text nor in the answer")


def check_days(row: Row, start: str, end: str, right: str) -> None:
    """`days 2023-01-30 2023-02-14 = 15`. Raises Wrong."""
    actual = str((known_day(row, end) - known_day(row, start)).days)
    if right != actual:
        raise Wrong(f"from {start} to {end} it is {actual} days, not {right}")
    if right not in row.answers and all(digits != right for digits, _ in numbers(row.body)):
        raise Wrong(f"{right} stands neither in the text nor in the answer")


def entity(title: str) -> str:
    """How a text names an entry: its title without a note in parentheses."""
    return re.sub(r"\s*\([^)]*\)$", "", title)


def check_fact(row: Row, title: str, fact: str, entries: Mapping[str, str]) -> None:
    """`fact TITLE | STRING`: the entry and the row both hold it, the row after the name."""
    if title not in entries:
        raise Wrong(f"the encyclopedia has no entry {title!r}")
    if not written(entries[title], fact):
        raise Wrong(f"the entry {title!r} does not hold {fact!r}")
    names = written(row.body, entity(title))
    if not names:
        raise Wrong(f"{entity(title)!r} is not named in the text")
    places = written(row.body, fact)
    if row.folder == "questions":
        if fact.casefold() not in {answer.casefold() for answer in row.answers}:
            raise Wrong(f"{fact!r} is neither the answer {row.value['answer']!r} nor an alias")
    elif not places:
        raise Wrong(f"{fact!r} is not in the text")
    elif max(places) < min(names):
        raise Wrong(f"{fact!r} stands before the name {entity(title)!r}")


def sort_of(check: str) -> str:
    word = check.split(" ", 1)[0]
    return word if word in ("weekday", "days", "fact") else "arithmetic"


def check_claim(row: Row, check: str, entries: Mapping[str, str]) -> None:
    """One entry of `checks`, of whatever sort. Raises Wrong."""
    left, equals, right = check.partition(" = ")
    match sort_of(check), left.split():
        case "weekday", [_, day] if equals:
            check_weekday(row, day, right)
        case "days", [_, start, end] if equals:
            check_days(row, start, end, right)
        case "fact", _:
            title, bar, fact = check.removeprefix("fact ").partition(" | ")
            if not bar:
                raise Wrong("expected 'fact TITLE | STRING'")
            check_fact(row, title, fact, entries)
        case "arithmetic", _ if equals:
            check_arithmetic(row, left, right)
        case _:
            raise Wrong(
                "expected 'EXPRESSION = RESULT', 'weekday DATE = NAME', 'days DATE DATE = N' "
                "or 'fact TITLE | STRING'"
            )


def check_answer(row: Row) -> None:
    """The answer of a question follows from a check or, for a date, from the day. Raises Wrong."""
    answer, kind = row.value["answer"], row.value["kind"]
    for accepted in row.answers:
        if written(row.body, accepted):
            raise Wrong(f"the answer {accepted!r} already stands in the prompt")
    sorts = {sort_of(check) for check in row.value["checks"]}
    if kind != "date":
        wanted = "fact" if kind == "lookup" else "arithmetic"
        if wanted not in sorts:
            raise Wrong(f"a question of kind {kind} needs a check of the sort {wanted}")
        return
    results = {check.rpartition(" = ")[2] for check in row.value["checks"]}
    if row.day:
        month = MONTHS[row.day.month - 1]
        results |= {str(row.day.year), month, f"{month} {row.day.day}", f"{row.day.day} {month}"}
    if answer not in results:
        raise Wrong(f"the answer {answer!r} follows neither from the checks nor from the date")


# Overlap between questions and corpus


def sum_key(check: str) -> tuple[tuple[Fraction, ...], str]:
    """Operands without their order, and the operations: 37 * 24 and 24 * 37 are the same."""
    left = check.partition(" = ")[0]
    values = sorted(evaluate(number) for number in operands(left))
    return tuple(values), "".join(sorted(re.findall(r"[-+*/]", left)))


def sum_numbers(check: str) -> frozenset[str]:
    """Every number of a sum as it would be written, per cent or not."""
    return frozenset(re.findall(r"\d+(?:\.\d+)?", check))


def days_of(row: Row) -> set[str]:
    """Dates that a row knows: its own, those of its checks, those written out with a year."""
    days = {row.value["date"]} if row.value["date"] else set()
    for text in (row.body, *row.value["checks"]):
        days.update(ISO_DATE.findall(text))
    for match in (m for form in WRITTEN_DATES for m in form.finditer(row.body)):
        month = MONTHS.index(match["month"].capitalize()) + 1
        days.add(f"{match['year']}-{month:02}-{int(match['day']):02}")
    return days


def sentences(text: str) -> set[str]:
    parts = (normal(part) for part in re.split(r"(?<=[.!?])\s+", text))
    return {part for part in parts if len(part.split()) >= SENTENCE_WORDS}


def shingles(text: str) -> set[str]:
    words = normal(text).split()
    return {" ".join(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)}


def traces(row: Row) -> Iterator[tuple[str, Any]]:
    """What a question must not share with a document."""
    for check in row.value["checks"]:
        if sort_of(check) == "arithmetic":
            yield "sum", sum_key(check)
        elif sort_of(check) == "fact":
            yield "fact about", check.removeprefix("fact ").partition(" | ")[0]
    yield from (("date", day) for day in sorted(days_of(row)))
    yield from (("sentence", sentence) for sentence in sorted(sentences(row.body)))
    yield from (("eight words", words) for words in sorted(shingles(row.body)))


def check_overlap(corpus: list[Row], questions: list[Row], report: Report) -> None:
    first: dict[tuple[str, Any], str] = {}
    held = []  # numbers of each document, for sums that no check of it names
    for row in corpus:
        held.append(frozenset(digits for digits, _ in numbers(row.body)))
        for trace in traces(row):
            first.setdefault(trace, row.place)
    for row in questions:
        shared: dict[tuple[str, str], Any] = {}
        for what, trace in traces(row):
            if (what, trace) in first:
                shared.setdefault((what, first[what, trace]), trace)
        for (what, place), trace in shared.items():
            shown = trace if isinstance(trace, str) else " ".join(sorted(map(str, trace[0])))
            report.add(row.place, f"overlaps with {place}: {what} {shown!r}")
        known = {place for _, place in shared}
        for check in row.value["checks"]:
            for document, digits in zip(corpus, held, strict=True):
                if document.place not in known and restates(check, document, digits):
                    report.add(row.place, f"overlaps with {document.place}: it states {check!r}")


def restates(check: str, document: Row, digits: frozenset[str]) -> bool:
    """Whether a document tells a question's sum or fact without naming it in its checks."""
    if sort_of(check) == "arithmetic":
        return sum_numbers(check) <= digits
    if sort_of(check) == "fact":
        title, _, fact = check.removeprefix("fact ").partition(" | ")
        return bool(written(document.body, entity(title)) and written(document.body, fact))
    return False


# The whole


def check_totals(corpus: list[Row], entries: int, questions: int, report: Report) -> None:
    """The minimum that the project promises to bundle."""
    plain = sum(not row.value["checks"] for row in corpus)
    for count, least, what in (
        (len(corpus), 300, "documents"),
        (entries, 400, "encyclopedia entries"),
        (questions, 200, "questions"),
        (plain, 30, "plain documents, without checks"),
    ):
        if count < least:
            report.add("totals", f"{count} {what}, at least {least} are needed")
    for topic in sorted(set(TOPICS) - {row.value["topic"] for row in corpus}):
        report.add("totals", f"no document on the topic {topic!r}")


def check_data(data: Path) -> Report:
    """Check a data folder; never raises for what is in the files."""
    report = Report()
    rows = {folder: list(read_rows(data, folder, report)) for folder in FOLDERS}
    for folder, name in (
        ("corpus", "text"),
        ("encyclopedia", "title"),
        ("encyclopedia", "text"),
        ("questions", "id"),
        ("questions", "prompt"),
    ):
        check_unique(rows[folder], name, report)
    entries = {row.value["title"]: row.value["text"] for row in rows["encyclopedia"]}
    for row in rows["corpus"] + rows["questions"]:
        file = row.place.rpartition(":")[0]
        report.plain[file] += not row.value["checks"]
        for check in row.value["checks"]:
            report.checks[file, sort_of(check)] += 1
            try:
                check_claim(row, check, entries)
            except Wrong as error:
                report.add(row.place, f"{check!r}: {error}")
        if row.folder == "questions":
            try:
                check_answer(row)
            except Wrong as error:
                report.add(row.place, str(error))
    check_overlap(rows["corpus"], rows["questions"], report)
    check_totals(rows["corpus"], len(entries), len(rows["questions"]), report)
    return report


def print_report(report: Report) -> None:
    sorts = ("arithmetic", "weekday", "days", "fact")
    width = max((len(file) for file in report.rows), default=4)
    print(f"{'file':{width}}  {'rows':>5}", *(f"{sort:>10}" for sort in sorts), f"{'none':>6}")
    for file, rows in report.rows.items():
        counts = (f"{report.checks[file, sort]:>10}" for sort in sorts)
        none = rows if "/encyclopedia/" in file else report.plain[file]
        print(f"{file:{width}}  {rows:>5}", *counts, f"{none:>6}")
    print()
    for violation in report.violations:
        print(violation)
    print(f"Violations: {len(report.violations)}" if report.violations else "No violation.")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "data"
    parser.add_argument("--data", type=Path, default=default, help="the data folder")
    report = check_data(parser.parse_args().data)
    print_report(report)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
