"""Runs of the agent loop turn by turn, as HTML: a list of them with its filters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipeline.report.episodes import LABELS, Entry, Episode, cut
from pipeline.report.html import options, safe, words

LIST_LIMIT = 8_000_000  # characters of HTML from which on no further run is written

# What a part of a turn begins with, and how it is shown; `says` is what stands before a marker.
_PART = re.compile(
    r"^[ \t]*[*#]*[ \t]*(?:(?P<thought>thought)|(?P<action>action)|(?P<answer>final answer|answer))"
    r"[ \t]*\d*[ \t]*\**:\**[ \t]*|(?P<call><tool_call>)|(?P<think><think>)|"
    r"(?P<says></think>|</tool_call>)",
    re.IGNORECASE | re.MULTILINE,
)
_EMPTY = "<span class=soft>(no words)</span>"
_STYLE = {"think": "thought", "call": "action"}


def runs_list(episodes: Sequence[Episode], *, opened: bool = False) -> tuple[str, int]:
    """Return the filters and the runs as HTML, and how many there are of them.

    The list ends after `LIST_LIMIT` characters. `opened` shows the turns at once.
    """
    parts: list[str] = []
    size = 0
    for episode in episodes:
        if size > LIST_LIMIT:
            break
        parts.append(_run(episode, opened))
        size += len(parts[-1])
    controls = _controls(episodes[: len(parts)]) if len(episodes) > 1 else ""
    return controls + "".join(parts), len(parts)


def _controls(episodes: Sequence[Episode]) -> str:
    rows = [_data(episode) for episode in episodes]
    fields = []
    for name, title in _FIELDS.items():
        values = dict.fromkeys(row[name] for row in rows if row[name])
        if values:
            fields.append(f"<label>{title}<select id={name}>{options(values)}</select></label>")
    return (
        f'<div class=controls data-items=".run" data-noun=runs>{"".join(fields)}'
        '<label>text<input id=run-words type=search placeholder="words to look for"></label>'
        "<span class=soft role=status></span></div>"
    )


_FIELDS = {
    "benchmark": "benchmark",
    "arm": "arm",
    "strategy": "strategy",
    "exit": "ended by",
    "verdict": "answer",
}


def _data(episode: Episode) -> dict[str, str]:
    """What a run is filtered by; empty where it is not known."""
    verdict = {True: "right", False: "wrong", None: ""}[episode.right]
    own = {name: episode.labels.get(name, "") for name in LABELS}
    return {**own, "exit": episode.ended, "verdict": verdict}


def _run(episode: Episode, opened: bool) -> str:
    data = _data(episode)
    attributes = "".join(f' data-{name}="{safe(value)}"' for name, value in data.items())
    state = data["verdict"] or ("ended" if episode.ended == "finished" else "stopped")
    none = "the file ends here" if episode.result is None else "not executed"
    entries = "".join(_entry(entry, number, none) for entry, number in _numbered(episode))
    left = f"<p class=soft>{episode.left_out:,} more are not shown</p>" if episode.left_out else ""
    question = safe(episode.question) or "(the beginning is not in the file)"
    return (
        f"<details class='run {state}'{attributes}{' open' if opened else ''}><summary>"
        f"<span class=question>{question}</span><span class=facts>{''.join(_facts(episode))}"
        f"</span></summary><div class=turns>{entries}</div>{left}{_outcome(episode)}</details>"
    )


def _facts(episode: Episode) -> Iterator[str]:
    data = _data(episode)
    if data["verdict"]:
        yield f"<span class=verdict>{data['verdict']}</span>"
    if episode.ended != data["verdict"]:
        yield f"<span class=reason>{words(episode.ended)}</span>"
    for name in LABELS:
        if data[name]:
            yield f"<span>{words(data[name])}</span>"
    yield f"<span>{episode.steps:,} step{'' if episode.steps == 1 else 's'}</span>"
    yield f"<span>{episode.tokens_in + episode.tokens_out:,} tokens</span>"
    if episode.result is not None:
        yield f"<span>{episode.result.seconds:.2f} s</span>"
    yield f"<span>task <code>{safe(cut(episode.task_id))}</code></span>"


def _numbered(episode: Episode) -> Iterator[tuple[Entry, int]]:
    """Entries with their step; where the file does not tell it, the turns are counted."""
    turns = 0
    for entry in episode.entries:
        turns += entry.kind == "turn"
        yield entry, turns if entry.step is None else entry.step


def _entry(entry: Entry, number: int, none: str) -> str:
    facts = f"<div class=soft>{safe(cut(' · '.join(entry.facts)))}</div>" if entry.facts else ""
    if entry.kind == "turn":
        return f"<div class=turn><b class=step>{number}</b><div>{_turn(entry)}{facts}</div></div>"
    if entry.kind == "nudge":
        body = _part("nudge", "The loop says", safe(entry.text))
    else:
        body = _result(entry, none)
    return f"<div class=turn><b class=step></b><div>{body}{facts}</div></div>"


def _result(entry: Entry, none: str) -> str:
    call = _part("action", "Call", safe(entry.call)) if entry.call else ""
    style = "observation failed" if entry.failed else "observation"
    text = f"(no result: {none})" if entry.text is None else safe(entry.text)
    return call + _part(style, f"Observation: {safe(entry.tool)}", text)


def _part(style: str, label: str, html: str) -> str:
    return f"<div class='part {style}'><span class=label>{label}</span>{html}</div>"


def _turn(entry: Entry) -> str:
    """Write a turn: each of its parts in its own style, inline calls marked."""
    text = entry.text or ""
    borders = [(0, 0, "says")]
    for found in _PART.finditer(text):
        kind = str(found.lastgroup)
        borders.append((found.start(), found.end(), _STYLE.get(kind, kind)))
    ends = [start for start, _, _ in borders[1:]] + [len(text)]
    parts = []
    for (start, begin, kind), end in zip(borders, ends, strict=True):
        body = _marked(text, begin, end, entry.marks).strip()
        if body or kind != "says":
            label = safe(text[start:begin].strip(" \t*#:<>/").replace("_", " "))
            parts.append(_part(kind, "" if kind == "says" else label, body or _EMPTY))
    return "".join(parts) or _part("says", "", _EMPTY)


def _marked(text: str, begin: int, end: int, marks: Sequence[tuple[int, int]]) -> str:
    """Escape a piece of a text, with its inline calls as `mark`."""
    pieces, position = [], begin
    for first, last in marks:
        first, last = max(first, position), min(last, end)
        if first < last:
            pieces += [safe(text[position:first]), f"<mark>{safe(text[first:last])}</mark>"]
            position = last
    return "".join([*pieces, safe(text[position:end])])


def _outcome(episode: Episode) -> str:
    """What came of a run: its answer, or why there is none."""
    result = episode.result
    if result is None:
        return "<p class=outcome>Unfinished: the file ends before this run does.</p>"
    said = "; ".join(cut(text) for text in (result.detail, episode.note) if text)
    detail = f" <span class=soft>{safe(said)}</span>" if said else ""
    ended = f"<span class=reason>{words(episode.ended)}</span>"
    if result.answer is not None:
        return f"<p class=outcome>{ended} Answer: <b>{safe(cut(result.answer))}</b>{detail}</p>"
    forced = ""
    if result.forced_answer is not None:
        forced = f" (demanded at the step limit, not counted: {safe(cut(result.forced_answer))})"
    return f"<p class=outcome>{ended} No answer{forced}.{detail}</p>"
