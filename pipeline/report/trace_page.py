"""A page of its own about a trace file: every run of it, turn by turn as it happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipeline.agent.diagnosis import diagnose_outcomes, summarise
from pipeline.agent.limits import EXIT_REASONS
from pipeline.errors import ConfigError
from pipeline.report.episodes import LABELS, Episode, in_turn
from pipeline.report.html import calls_text, counts, document, errors_text, safe, tiles, words
from pipeline.report.runs_list import runs_list
from pipeline.report.traces import Trace, read_trace
from pipeline.shards import write_text

EPISODES_SHOWN = 1000  # runs on a page
OPENED = 3  # up to so many runs are shown with their turns at once


def write_trace_report(path: Path) -> Path:
    """Write the page beside a trace file (`trace.jsonl`: `trace.html`) and return its path.

    Raises ConfigError for a file that is no trace (see `read_trace`).
    """
    target = path.with_suffix(".html")
    if target == path:
        raise ConfigError(f"{path}: the page would replace it; give the trace another name")
    write_text(target, trace_html(path))
    return target


def trace_html(path: Path) -> str:
    """Return the page."""
    trace = read_trace(path)
    episodes = trace.episodes
    listed, shown = runs_list(_chosen(episodes), opened=len(episodes) <= OPENED)
    body = [
        f"<header><h1>{safe(path.name)}</h1>{_notes(trace, shown)}</header>",
        tiles(_figures(episodes)),
        _summary(episodes) if len(episodes) > 1 else "",
        f"<section><h2>Turn by turn</h2>{listed}</section>",
    ]
    return document(path.name, "\n".join(part for part in body if part))


def _chosen(episodes: Sequence[Episode]) -> list[Episode]:
    """Pick the runs of a page, of every benchmark, arm and strategy in turn; their order stays."""
    mixed = in_turn(episodes, lambda episode: tuple(episode.labels.get(name) for name in LABELS))
    chosen = {id(episode) for episode in list(mixed)[:EPISODES_SHOWN]}
    return [episode for episode in episodes if id(episode) in chosen]


def _notes(trace: Trace, shown: int) -> str:
    notes = []
    left = len(trace.episodes) - shown
    if left:
        notes.append(f"{left:,} of {len(trace.episodes):,} runs are left out of this page.")
    if trace.cut_line is not None:
        notes.append(
            f"Line {trace.cut_line:,} of the file, its last, is cut off: what wrote it was "
            "stopped, or is still writing."
        )
    return "".join(f"<p class=soft>{note}</p>" for note in notes)


def _figures(episodes: Sequence[Episode]) -> list[tuple[str, str]]:
    """Steps and tokens so far; the time is known of the runs that ended."""
    tokens = sum(episode.tokens_in + episode.tokens_out for episode in episodes)
    seconds = [episode.result.seconds for episode in episodes if episode.result]
    alone = len(episodes) == 1
    figures = [
        (words(episodes[0].ended), "ended by") if alone else (f"{len(episodes):,}", "runs"),
        (f"{sum(episode.steps for episode in episodes):,}", "steps"),
        (f"{tokens:,}", "tokens"),
    ]
    if seconds:
        what = "from the question to the end" if alone else "of runs that ended, added up"
        figures.append((f"{sum(seconds):,.2f} s", what))
    return figures


def _summary(episodes: Sequence[Episode]) -> str:
    """Why the runs ended, what was called, and where to look."""
    summary = summarise([episode.result for episode in episodes if episode.result is not None])
    ended = Counter(episode.ended for episode in episodes)
    judged = [(episode.outcome, episode.note) for episode in episodes if episode.outcome]
    reasons = {name: ended[name] for name in (*EXIT_REASONS, *sorted(ended)) if ended[name]}
    rows = (
        ("ended by", counts(reasons)),
        ("calls", calls_text(summary.calls)),
        ("errors", errors_text(summary.errors)),
    )
    body = "".join(
        f"<tr><td class='soft name'>{name}</td><td>{text}</td></tr>" for name, text in rows if text
    )
    said = [*summary.diagnosis, *diagnose_outcomes(judged)]
    sentences = "".join(f"<li>{safe(sentence)}</li>" for sentence in said)
    return (
        f"<section><h2>Why the runs ended</h2><div class=panel><table><tbody>{body}</tbody></table>"
        f"</div>{f'<ul class=diagnosis>{sentences}</ul>' if sentences else ''}</section>"
    )
