"""Stage `execute`: candidate calls -> calls with results (method, section 3).

    callsieve execute CONFIG --run-dir RUN

A failure of a tool is a row with `error_kind`, never an exception that stops the stage.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.context import Context
from pipeline.records import Candidate, Document, ExecutedCall, extend
from pipeline.tools.base import UNREADABLE_KINDS

_AT_ONCE = 256


def run(
    candidates: list[Candidate], documents: list[Document], context: Context
) -> Iterator[ExecutedCall]:
    """Execute the calls of one shard, in the order they came."""
    executor = context.executor()
    about = {d.doc_id: {"doc_id": d.doc_id, "date": d.date, "url": d.url} for d in documents}
    with context.progress(len(candidates), "calls") as bar:
        for start in range(0, len(candidates), _AT_ONCE):
            chunk = candidates[start : start + _AT_ONCE]
            answers = executor.execute_many([(c.tool, c.arguments, about[c.doc_id]) for c in chunk])
            for candidate, answer in zip(chunk, answers, strict=True):
                context.count(candidate.tool, "candidates")
                if answer.error_kind not in UNREADABLE_KINDS:
                    context.count(candidate.tool, "samples_parsed", candidate.sample_count)
                if answer.error_kind is None:
                    context.count(candidate.tool, "executed")
                    context.count(candidate.tool, "samples_executed", candidate.sample_count)
                else:
                    context.count(candidate.tool, f"error:{answer.error_kind}")
                yield extend(
                    candidate,
                    ExecutedCall,
                    result=answer.result,
                    error_kind=answer.error_kind,
                    error=answer.error,
                    seconds=answer.seconds,
                    cached=answer.cached,
                )
            bar.update(len(chunk))
