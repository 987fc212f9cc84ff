"""Arithmetic with the catalogue's Calculator: word problems whose answer is one number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from pipeline.agent.environments.encyclopedia import Question
from pipeline.agent.tasks import Task
from pipeline.tools.calculator import Calculator
from pipeline.tools.executor import Executor

_NUMBER = re.compile(r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")


def arithmetic_tools() -> Executor:
    """The Calculator behind the executor of the pipeline."""
    return Executor([Calculator()])


def arithmetic_tasks(questions: Sequence[Question]) -> list[Task]:
    """Make one task per word problem."""
    return [Task(q.text, q.question_id) for q in questions]


def number_in(answer: str | None) -> Fraction | None:
    """Return the one number that an answer states: after the last `=`, else the first; or None."""
    if answer is None:
        return None
    found = _NUMBER.search(answer.rsplit("=", 1)[-1])
    if found is None:
        return None
    top, _, bottom = found.group().replace(",", "").replace("−", "-").partition("/")
    if bottom and not int(bottom):
        return None
    return Fraction(top) / (int(bottom) if bottom else 1)


def number_right(answer: str | None, gold: str) -> bool:
    """Tell whether the answer's number is the gold number, to two decimals."""
    own, wanted = number_in(answer), number_in(gold)
    return own is not None and wanted is not None and abs(own - wanted) <= Fraction(1, 200)
