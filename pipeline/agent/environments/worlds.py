"""Questions at the library desk and the stock desk: small worlds drawn from a seed.

The first world of each is the reference case. Every question has an exact answer, and every world
is a catalogue or a stock of its own, so nothing that another question showed is of use.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.agent.environments import desks
from pipeline.agent.environments.arithmetic import number_right
from pipeline.agent.environments.encyclopedia import Question
from pipeline.agent.tasks import Task
from pipeline.agent.toolbox import EnvironmentTools

SEED = 7
STOCK_RULE = (
    "An article has to be ordered when the pieces in stock and those on their way are together "
    "below its threshold; ordered is what is then missing to the threshold."
)
TITLES = (
    "Il Gattopardo",
    "Se questo e' un uomo",
    "I promessi sposi",
    "La coscienza di Zeno",
    "Il barone rampante",
    "Le citta' invisibili",
    "Lessico famigliare",
    "Il nome della rosa",
    "Il deserto dei Tartari",
    "Cristo si e' fermato a Eboli",
    "La luna e i falo'",
    "Gli indifferenti",
    "Il fu Mattia Pascal",
    "I Malavoglia",
    "L'isola di Arturo",
    "Uno, nessuno e centomila",
)

Drawn = tuple[list[Question], list[Task]]


@dataclass(frozen=True)
class Library:
    """A catalogue, what is lent out of it, and the titles that are asked for."""

    owned: Mapping[str, int]
    lent: Mapping[str, int]
    asked: tuple[str, ...]

    @property
    def question(self) -> str:
        """How many copies are free."""
        together = " together" if len(self.asked) > 1 else ""
        return f"How many copies of {' and '.join(self.asked)} are free{together}?"

    @property
    def answer(self) -> str:
        """The number of copies that are owned and not lent out."""
        return str(sum(self.owned[title] - self.lent[title] for title in self.asked))

    def tools(self) -> EnvironmentTools:
        """The tools of one run."""
        return EnvironmentTools(desks.library_tools(self.owned, self.lent))


@dataclass(frozen=True)
class Stock:
    """Articles, and which of them is asked for: whether it is to be ordered, or how much of it."""

    rows: Mapping[str, Mapping[str, int]]
    sku: str
    how_many: bool = False

    @property
    def question(self) -> str:
        """The question, with the rule that decides it and the form of the answer."""
        if self.how_many:
            return f"How many pieces of {self.sku} have to be ordered? {STOCK_RULE}"
        return f"Does {self.sku} have to be ordered? {STOCK_RULE} Answer yes or no."

    @property
    def answer(self) -> str:
        """Yes or no, or the number of pieces (0 where nothing is ordered)."""
        row = self.rows[self.sku]
        missing = max(0, row["threshold"] - row["stock"] - row["incoming"])
        if self.how_many:
            return str(missing)
        return "yes" if missing else "no"

    def tools(self) -> EnvironmentTools:
        """The tools of one run."""
        return EnvironmentTools(desks.stock_tools(self.rows))


def library_tasks(count: int) -> Drawn:
    """The first `count` questions at the library desk."""
    generator = random.Random(SEED)
    worlds = [Library(desks.OWNED, desks.LENT, ("Il Gattopardo",))]
    while len(worlds) < count:
        titles = generator.sample(TITLES, generator.randint(3, 5))
        owned = {title: generator.randint(1, 12) for title in titles}
        lent = {title: generator.randint(0, copies) for title, copies in owned.items()}
        asked = generator.sample(titles, 1 + len(worlds) % 2)
        worlds.append(Library(owned, lent, tuple(asked)))
    return _tasks("library", worlds[:count])


def stock_tasks(count: int) -> Drawn:
    """The first `count` questions at the stock desk: every other one asks for a number."""
    generator = random.Random(SEED)
    worlds = [Stock(desks.STOCK, "SKU-11")]
    while len(worlds) < count:
        numbers = generator.sample(range(10, 100), 3)
        rows = {f"SKU-{number}": _article(generator) for number in numbers}
        worlds.append(Stock(rows, generator.choice(list(rows)), how_many=len(worlds) % 2 == 1))
    return _tasks("stock", worlds[:count])


def _article(generator: random.Random) -> dict[str, int]:
    """An article that has to be ordered as often as not."""
    threshold = generator.randint(5, 30)
    below = generator.random() < 0.5
    low, high = (0, threshold - 1) if below else (threshold, threshold + 20)
    together = generator.randint(low, high)
    stock = generator.randint(0, together)
    return {"stock": stock, "threshold": threshold, "incoming": together - stock}


def _tasks(name: str, worlds: Sequence[Library | Stock]) -> Drawn:
    ids = [f"{name}-{n}" for n in range(1, len(worlds) + 1)]
    drawn = list(zip(ids, worlds, strict=True))
    questions = [Question(identity, world.question, world.answer) for identity, world in drawn]
    return questions, [Task(w.question, identity, tools=w.tools) for identity, w in drawn]


def stock_right(answer: str | None, gold: str) -> bool:
    """Tell whether an answer begins with the gold yes or no, or states the gold number."""
    if gold not in ("yes", "no"):
        return number_right(answer, gold)
    said = re.findall(r"[a-z]+", (answer or "").lower())
    return said[:1] == [gold]
