"""Open-book look-up: Search, Lookup and Finish over an offline encyclopedia (Yao et al. 2023).

`Search[entity]` shows the first five sentences of a page, or `Could not find [entity].
Similar: [...]`. `Lookup[keyword]` shows the next sentence of the open page that holds the keyword,
`(Result 1 / 3) ...`. `Finish[answer]` is the protocol's own way to end.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.agent.tasks import Task
from pipeline.agent.toolbox import EnvironmentTools
from pipeline.tools.base import ToolSpec, one_string

FIRST_SENTENCES = 5
SIMILAR = 5


@dataclass(frozen=True)
class Question:
    """A question or a claim with its accepted answer; the answer never gets into a Task."""

    question_id: str
    text: str
    gold: str
    heading: str = "Question"


class Encyclopedia:
    """Pages by title, each a list of sentences."""

    def __init__(self, pages: Mapping[str, Sequence[str]]) -> None:
        self.pages = {
            title: [s.strip() for s in page if s.strip()] for title, page in pages.items()
        }
        self._titles = {plain(title): title for title in self.pages}
        self._words = {
            title: Counter(_words(title)) + Counter(_words(" ".join(page)))
            for title, page in self.pages.items()
        }

    def find(self, entity: str) -> str | None:
        """Return the title of the page of that name, regardless of case, accents and spaces."""
        return self._titles.get(plain(entity))

    def similar(self, entity: str) -> list[str]:
        """Return the titles nearest to a name: close spellings, then pages with its words."""
        close = difflib.get_close_matches(plain(entity), self._titles, SIMILAR, cutoff=0.6)
        found = [self._titles[name] for name in close]
        wanted = set(_words(entity))
        scored = [
            (sum(word in _words(title) for word in wanted), sum(words[w] for w in wanted), title)
            for title, words in self._words.items()
        ]
        ranked = sorted((s for s in scored if s[1]), key=lambda s: (-s[0], -s[1], s[2]))
        found += [title for *_, title in ranked if title not in found]
        return found[:SIMILAR]

    def tools(self) -> EnvironmentTools:
        """Make the tools of one episode: they share the page that is open."""
        reader = _Reader(self)
        return EnvironmentTools([Search(reader), Lookup(reader)])


def make_tasks(questions: Sequence[Question], encyclopedia: Encyclopedia) -> list[Task]:
    """Make one task per question, each with tools of its own."""
    return [
        Task(q.text, q.question_id, heading=q.heading, tools=encyclopedia.tools) for q in questions
    ]


class _Reader:
    """What is open, and where the look-up of a keyword stands."""

    def __init__(self, encyclopedia: Encyclopedia) -> None:
        self.encyclopedia = encyclopedia
        self.page: list[str] | None = None
        self.keyword = ""
        self.shown = 0

    def open(self, title: str | None) -> None:
        self.page = None if title is None else self.encyclopedia.pages[title]
        self.keyword, self.shown = "", 0


@dataclass(frozen=True)
class Search:
    """Opens the page of an entity."""

    reader: _Reader
    spec = ToolSpec(
        name="Search",
        version="1",
        description="Opens the page of an entity and shows its first five sentences, "
        "or names similar pages.",
        parameters=one_string("entity", "The title of a page, for example Lake Garda"),
        result_limit=4000,
        cacheable=False,
    )

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """Open a page, or close the open one and name similar titles."""
        entity = arguments["entity"].strip()
        title = self.reader.encyclopedia.find(entity)
        self.reader.open(title)
        if title is None:
            similar = ", ".join(repr(name) for name in self.reader.encyclopedia.similar(entity))
            return f"Could not find [{entity}]. Similar: [{similar}]"
        return " ".join(self.reader.encyclopedia.pages[title][:FIRST_SENTENCES])


@dataclass(frozen=True)
class Lookup:
    """Finds a keyword on the open page, one sentence at a time."""

    reader: _Reader
    spec = ToolSpec(
        name="Lookup",
        version="1",
        description="Shows the next sentence of the open page that holds a keyword.",
        parameters=one_string("keyword", "A word or phrase to find on the open page"),
        result_limit=4000,
        cacheable=False,
    )

    def run(self, arguments: dict[str, Any], document: Mapping[str, Any]) -> str:
        """Show the next hit; asking again for the same keyword goes on."""
        reader, keyword = self.reader, arguments["keyword"].strip().lower()
        if reader.page is None:
            return "No page is open. Search for one first."
        if keyword != reader.keyword:
            reader.keyword, reader.shown = keyword, 0
        hits = [sentence for sentence in reader.page if keyword and keyword in sentence.lower()]
        if reader.shown >= len(hits):
            return "No more results." if hits else f"No sentence holds [{keyword}]."
        reader.shown += 1
        return f"(Result {reader.shown} / {len(hits)}) {hits[reader.shown - 1]}"


def plain(text: str) -> str:
    """Fold case, accents, punctuation and spaces away."""
    folded = unicodedata.normalize("NFKD", text.casefold())
    kept = "".join(c for c in folded if not unicodedata.combining(c))
    return " ".join(re.findall(r"\w+", kept))


def _words(text: str) -> list[str]:
    return [word for word in plain(text).split() if word not in _STOP]


_STOP = {"a", "an", "and", "at", "by", "for", "from", "in", "is", "of", "on", "the", "to", "was"}
