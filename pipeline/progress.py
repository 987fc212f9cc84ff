"""Progress on standard error: a moving bar on a terminal, a plain line now and then in a log.

A log gets a line with counts every 20 seconds at most, of all bars together; a bar that stands in
it also says how it ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

EVERY_S = 20.0
Item = TypeVar("Item")


def progress(total: int | None, unit: str, about: str) -> tqdm[Any] | Lines:
    """A bar that counts `unit`s on a terminal, or the lines that stand for it in a log."""
    if not sys.stderr.isatty():
        return Lines(total, unit, about)
    return tqdm(
        total=total,
        unit=f" {unit}",
        desc=about,
        file=sys.stderr,
        dynamic_ncols=True,
        mininterval=0.5,
        leave=False,
    )


def counted(items: Iterable[Item], unit: str, about: str) -> Iterator[Item]:
    """Pass on items and show how many they are."""
    with progress(None, unit, about) as bar:
        for item in items:
            yield item
            bar.update()


def line_written() -> None:
    """Another line was written to the log: the next one of a bar has time."""
    Lines._written = time.monotonic()


class Lines:
    """What a bar of tqdm can do, as far as it is used here, in whole lines."""

    _written = 0.0  # when the last line of any bar was, or when the first bar began

    def __init__(self, total: int | None, unit: str, about: str) -> None:
        self.n, self.total = 0, total
        self._unit, self._about, self._more = unit, about, ""
        self._began = time.monotonic()
        Lines._written = Lines._written or self._began
        self._told: int | None = None  # the last count that was written

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._told not in (None, self.n):
            self._write()

    def update(self, n: float | None = 1) -> None:
        """Count `n` more."""
        self.n += int(n or 0)
        self.refresh()

    def set_description(self, about: str) -> None:
        self._about = about

    def set_postfix(self, refresh: bool = True, **values: Any) -> None:
        self._more = ", ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in values.items()
        )

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self._more = text

    def refresh(self) -> None:
        """Write a line when it is time for one."""
        if time.monotonic() - Lines._written >= EVERY_S:
            self._write()

    def _write(self) -> None:
        self._told, Lines._written = self.n, time.monotonic()
        count = f"{self.n:,}" + ("" if self.total is None else f" of {self.total:,}")
        more = f", {self._more}" if self._more else ""
        seconds = time.monotonic() - self._began
        line = f"{self._about}: {count} {self._unit} in {seconds:.0f} s{more}"
        print(line, file=sys.stderr, flush=True)
