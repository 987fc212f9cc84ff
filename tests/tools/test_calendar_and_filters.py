"""Calendar, and the corpus filters of the method's section 8."""

import json
from datetime import date, datetime
from pathlib import Path

import pytest

from pipeline.tools.base import ToolError
from pipeline.tools.calendar import Calendar, CalendarConfig, build_calendar
from pipeline.tools.filters import (
    calculator_filter,
    calendar_filter,
    corpus_filter,
    date_from_url,
    translation_filter,
)


def test_document_date_is_today():
    assert Calendar().run({}, {"date": "2023-01-30"}) == "Today is Monday, January 30, 2023."
    assert Calendar().run({}, {"date": "2023-01-30T23:59:00Z"}).endswith("January 30, 2023.")
    assert Calendar().run({}, {"date": "2024-02-29"}) == "Today is Thursday, February 29, 2024."
    assert Calendar().run({}, {"date": datetime(1999, 12, 31, 5)}).endswith("December 31, 1999.")


def test_clock_is_used_only_without_a_document_date():
    calendar = Calendar(clock=lambda: date(2020, 7, 4))
    assert calendar.run({}, {"date": None}) == "Today is Saturday, July 4, 2020."
    assert calendar.run({}, {}) == "Today is Saturday, July 4, 2020."
    assert calendar.run({}, {"date": "2021-07-04"}) == "Today is Sunday, July 4, 2021."
    fixed = build_calendar(CalendarConfig(today="2022-01-01"))
    assert fixed.run({}, {}) == "Today is Saturday, January 1, 2022."


@pytest.mark.parametrize("stated", ["soon", "2023-02-30", "30/01/2023", 17])
def test_unreadable_date_is_an_error_not_the_clock(stated):
    with pytest.raises(ToolError) as raised:
        Calendar().run({}, {"date": stated})
    assert raised.value.kind == "bad_date"


def test_bad_fixed_date_is_refused():
    with pytest.raises(ValueError, match="someday"):
        CalendarConfig(today="someday")


NEVER = {"doc_id": "a", "seed": 0}  # a document that the 1 % draw leaves out


@pytest.mark.parametrize(
    "text",
    [
        "The shop sold 37 crates of 24 bottles, so 888 bottles left.",
        "Of 1,400 people, 400 agreed, a share of 0.29.",  # quotient to two decimals
        "She had 12, gave away 5 and kept 7.",
        "A quarter, 25%, of the 80 seats is 20.",
        "Length 2.5 m, width 4 m, area 10 m.",
        "x = 5",
        "The sum equals 12.",
        "Which is equal to $3.50 here.",
        "A total of 31 boats sailed.",
        "An AVERAGE of -4 degrees.",
    ],
)
def test_calculator_filter_keeps_text_with_a_sum(text):
    # The inverted filter of a public re-implementation drops exactly these.
    assert calculator_filter(text, **NEVER) is True


@pytest.mark.parametrize(
    "text",
    [
        "No number at all.",
        "Two numbers, 5 and 10.",  # 5 + 5 would need the same number twice
        "In 1987 there were 12 ships and 500 sailors.",
        "It took 1 of 7 days and 300 men.",  # 1 * 7 = 7 is the same 7
        "An average of several values, a total of many.",
        "In 3 of 10000 cases " + "word " * 120 + "there were 30000.",  # too far apart
    ],
)
def test_calculator_filter_drops_text_without(text):
    assert calculator_filter(text, **NEVER) is False


def test_window_counts_tokens_over_all_three_numbers():
    near = "3 " + "w " * 48 + "4 " + "w " * 48 + "12"
    far = "3 " + "w " * 60 + "4 " + "w " * 60 + "12"
    assert calculator_filter(near, **NEVER)
    assert not calculator_filter(far, **NEVER)


def test_one_percent_of_documents_with_three_numbers():
    text = "In 1987 there were 12 ships and 500 sailors."
    kept = [i for i in range(20_000) if calculator_filter(text, f"doc{i}", 3)]
    assert 140 <= len(kept) <= 260
    again = [i for i in range(20_000) if calculator_filter(text, f"doc{i}", 3)]
    other = [i for i in range(20_000) if calculator_filter(text, f"doc{i}", 4)]
    assert kept == again != other
    assert not any(calculator_filter("Only 2 and 71 here.", f"doc{i}", 3) for i in range(2_000))


def test_many_numbers_stay_cheap():
    import time

    text = " ".join(str(1_000_003 + 7 * i * i) for i in range(3_000))
    start = time.process_time()
    assert calculator_filter(text, **NEVER) is False
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("url", "day"),
    [
        ("https://news.example/2023/01/30/storm", "2023-01-30"),
        ("https://news.example/2023/1/3/storm", "2023-01-03"),
        ("https://news.example/world/2019/dec/05/vote", "2019-12-05"),
        ("https://blog.example/2021-06-09-title", "2021-06-09"),
        ("https://news.example/a/20230130/b", "2023-01-30"),
        ("https://news.example/2023/01/", None),
        ("https://news.example/2023/02/30/x", None),
        ("https://shop.example/item/120230130", None),
        ("https://news.example/id/2023130", None),
        ("https://news.example/2023/99/99/2024/05/06/x", "2024-05-06"),
        (None, None),
    ],
)
def test_date_from_url(url, day):
    assert date_from_url(url) == day


def test_calendar_filter():
    assert calendar_filter("2023-01-30", None)
    assert calendar_filter(None, "https://news.example/2023/01/30/storm")
    assert not calendar_filter(None, "https://news.example/storm")
    assert not calendar_filter("soon", None)


def fake_detector(chunk: str) -> str | None:
    first = chunk.split()[0]
    return {"e": "en", "s": "es"}.get(first[0])


def test_translation_filter_wants_foreign_between_english():
    english, spanish, unsure = ("e " * 10, "s " * 10, "? " * 10)
    assert translation_filter(english + spanish + english, fake_detector)
    assert translation_filter(english + unsure + spanish + unsure + english, fake_detector)
    assert not translation_filter(english + english + english, fake_detector)
    assert not translation_filter(spanish + english + english, fake_detector)
    assert not translation_filter(english + english + spanish, fake_detector)
    assert not translation_filter(spanish * 3, fake_detector)


def test_translation_filter_on_real_text():
    pytest.importorskip("py3langid")
    before = "The mayor stepped onto the balcony and thanked everyone who had come to the square. "
    foreign = "Vamos a construir juntos una ciudad más limpia para todos nuestros hijos y nietos. "
    after = "The crowd cheered for several minutes before the band began to play the old songs. "
    assert translation_filter(before + foreign + after)
    assert not translation_filter(before + after + before)


def test_corpus_filter_by_tool_name():
    document = {"text": "a total of 31", "doc_id": "d", "date": None, "url": None}
    assert corpus_filter("Calculator", document, 0)
    assert not corpus_filter("calendar", document, 0)
    assert corpus_filter("Calendar", {**document, "url": "/2023/01/30/"}, 0)
    assert corpus_filter("WikiSearch", document, 0)
    assert corpus_filter("time.convert_time", document, 0)
    assert corpus_filter("Units", {"text": "ran 5 miles"}, 0)
    assert not corpus_filter("Units", document, 0)


def test_filter_on_real_word_problems():
    data = Path(__file__).parents[3] / "shared/data/gsm8k_train_first3000.jsonl"
    if not data.exists():
        pytest.skip("the public data sets are not beside the project")
    rows = [json.loads(line) for line in data.read_text("utf-8").splitlines()[:200]]
    kept = sum(calculator_filter(f"{row['question']} {row['answer']}", "a", 0) for row in rows)
    assert kept > 180
