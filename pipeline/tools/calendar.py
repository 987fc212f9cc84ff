"""Calendar: the date of the document, else of a clock, as one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Literal

from pipeline.tools.base import STRICT, ToolError, ToolSpec

# Not the `calendar` module's names: those follow the locale of the machine.
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)


@dataclass(frozen=True)
class CalendarConfig:
    """`today` (an ISO date) stands for the clock where a document has no date."""

    __pydantic_config__ = STRICT

    name: Literal["Calendar"] = "Calendar"
    today: str | None = None

    def __post_init__(self) -> None:
        if self.today is not None and parse_date(self.today) is None:
            raise ValueError(f"today: {self.today!r} is not an ISO date such as 2023-01-30")


class Calendar:
    """Says what day it is: the document's date if it has one, else the clock's."""

    # Not cached: without a document date the answer changes with the day.
    spec = ToolSpec(
        name="Calendar",
        version="1",
        description=(
            "Tells today's date with the day of the week, for example "
            "'Today is Monday, January 30, 2023.' It takes no arguments. In a dated document, "
            "today is the day of the document."
        ),
        parameters={"type": "object", "properties": {}, "additionalProperties": False},
        result_limit=60,
        timeout_s=5.0,
        reads_document=True,
        cacheable=False,
    )

    def __init__(self, clock: Callable[[], date] = date.today) -> None:
        self.clock = clock

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """`Today is <weekday>, <month> <day>, <year>.`; raises ToolError of kind bad_date."""
        stated = document.get("date")
        if stated is None or stated == "":
            return format_date(self.clock())
        day = parse_date(stated)
        if day is None:
            raise ToolError("bad_date", f"the document's date {str(stated)[:40]!r} is no ISO date")
        return format_date(day)


def build_calendar(config: CalendarConfig) -> Calendar:
    """The Calendar of a configuration."""
    if config.today is None:
        return Calendar()
    fixed = parse_date(config.today)
    assert fixed is not None  # checked by the configuration
    return Calendar(clock=lambda: fixed)


def format_date(day: date) -> str:
    """`Today is Monday, January 30, 2023.`"""
    return f"Today is {_DAYS[day.weekday()]}, {_MONTHS[day.month - 1]} {day.day}, {day.year}."


def parse_date(value: object) -> date | None:
    """A date, datetime or ISO string as a date; None if it cannot be read."""
    if isinstance(value, datetime):
        return value.date()
    if isinstance(value, date):
        return value
    if not isinstance(value, str):
        return None
    try:
        return datetime.fromisoformat(value.strip()).date()
    except ValueError:
        return None
