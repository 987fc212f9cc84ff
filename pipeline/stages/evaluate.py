"""Stage `evaluate`: the four arms on questions with live calls, and on held-out perplexity.

    callsieve evaluate CONFIG --run-dir D

The arms: `base`; `control` (base + the same texts without calls); `tuned_disabled` (the opening
token of a call has probability 0); `tuned`. All are zero-shot and greedy. The perplexity is that of
texts without calls on which no arm was trained. Each arm is kept as it is finished, so a killed
stage goes on with the next one.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.agent.transcripts import write_runs
from pipeline.config import Config, Model
from pipeline.context import Context
from pipeline.errors import WorkError
from pipeline.evaluation.agent_arms import run_agents
from pipeline.evaluation.live import live_calls
from pipeline.evaluation.metrics import is_correct
from pipeline.evaluation.questions import KINDS, Question, load_questions, spread
from pipeline.evaluation.statistics import binomial_error, compare, perplexity_of
from pipeline.lm.checkpoint import load_model
from pipeline.lm.forward import LanguageModel
from pipeline.lm.generation import generate
from pipeline.lm.grammar import CallGrammar
from pipeline.lm.jobs import Generation
from pipeline.lm.perplexity import text_losses
from pipeline.lm.tokens import open_token
from pipeline.shards import RunFolder, read_json, write_json, write_text

ARMS = ("base", "control", "tuned_disabled", "tuned")
COMPARISONS = (("tuned", "tuned_disabled"), ("tuned", "control"), ("tuned", "base"))


def run(context: Context) -> None:
    """Write `results.json` and `traces.jsonl` in `08-evaluation`.

    Raises ConfigError for bad questions, WorkError when a checkpoint is missing.
    """
    began = time.monotonic()
    config, folder = context.config, context.folder
    questions = load_questions(config.evaluate.questions, config.evaluate.limit)
    texts = held_out_texts(folder, config.evaluate.held_out_documents)
    work = folder.stage("evaluate") / ".arms"
    lm: LanguageModel | None = None
    path_of_lm = None
    for arm in ARMS:
        path = work / f"{arm}.json"
        if (read_json(path) or {}).get("fingerprint") == context.fingerprint:
            continue
        settings = model_of(arm, config, folder)
        if lm is None or path_of_lm != settings.path:
            lm = None
            gc.collect()  # two models need not be in memory at the same time
            lm, path_of_lm = LanguageModel(*load_model(settings)), settings.path
        found = evaluate_arm(context, arm, lm, questions, texts)
        if config.evaluate.agents is not None:
            with context.progress(None, "runs of the agent loop") as bar:
                bar.set_description(f"evaluate {arm}")
                agents = run_agents(config, arm, lm, questions, bar.update)
            found["agents"], found["agent_traces"] = agents
        write_json(path, {"fingerprint": context.fingerprint, **found})
    arms = {arm: read_json(work / f"{arm}.json") for arm in ARMS}
    traces = [trace for arm in ARMS for trace in arms[arm]["traces"]]
    lines = [json.dumps(trace, ensure_ascii=False) + "\n" for trace in traces]
    write_text(folder.stage("evaluate") / "traces.jsonl", "".join(lines))
    results: dict[str, Any] = {
        "arms": {arm: arms[arm]["measures"] for arm in ARMS},
        "questions": len(questions),
        "held_out_documents": len(texts),
        "comparisons": comparisons({arm: arms[arm]["traces"] for arm in ARMS}),
    }
    if config.evaluate.agents is not None:
        results["agents"] = [row for arm in ARMS for row in arms[arm]["agents"]]
        runs = [run for arm in ARMS for run in arms[arm]["agent_traces"]]
        write_runs(folder.stage("evaluate") / "agent-traces.jsonl", runs)
    write_json(folder.stage("evaluate") / "results.json", results)
    for tool, calls in results["arms"]["tuned"]["tools"].items():
        context.count(tool, "calls", calls["calls"])
        context.count(tool, "failed_calls", calls["failed_calls"])
    marker = {
        "fingerprint": context.fingerprint,
        "seconds": round(time.monotonic() - began, 3),
        "counts": context.take_counts(),
    }
    write_json(folder.stage_marker("evaluate"), marker)
    shutil.rmtree(work, ignore_errors=True)


def model_of(arm: str, config: Config, folder: RunFolder) -> Model:
    """Which model an arm is; raises WorkError when it has not been trained."""
    if arm == "base":
        return config.model
    stage = folder.stage("finetune")
    path = stage / "control" if arm == "control" else stage
    if not (path / "callsieve.json").is_file():
        raise WorkError(f"{path}: no finished checkpoint; run `finetune` first")
    return dataclasses.replace(config.model, path=str(path), gguf_file=None)


def held_out_texts(folder: RunFolder, count: int) -> list[str]:
    """Texts on which nothing was trained: the validation split, then documents without calls."""
    data = folder.stage("augment") / "data"
    validation = _column(sorted(data.glob("validation-*.parquet")), "text")
    used = set(_column(sorted(data.glob("*.parquet")), "id"))
    texts = spread(validation, count)
    if len(texts) < count and folder.parts("ingest"):
        table = folder.read_all("ingest", ["doc_id", "text"])
        rows = sorted(table.to_pylist(), key=lambda row: str(row["doc_id"]))
        others = [row["text"] for row in rows if row["doc_id"] not in used]
        texts += spread(others, count - len(texts))
    return texts


def _column(files: Sequence[Path], name: str) -> list[str]:
    tables = [pq.read_table(file, columns=[name]) for file in files]
    return [value for table in tables for value in table[name].to_pylist()]


def evaluate_arm(
    context: Context,
    arm: str,
    lm: LanguageModel,
    questions: Sequence[Question],
    texts: Sequence[str],
) -> dict[str, Any]:
    """Answer all questions and measure the perplexity: `measures` and one trace per question."""
    settings, syntax = context.config.evaluate, context.config.call_format.syntax
    calls = None
    if arm.startswith("tuned"):
        calls = live_calls(
            context.executor(),
            {i: {"date": q.date, "doc_id": q.id} for i, q in enumerate(questions)},
            syntax=syntax,
            call_k=settings.call_k,
            max_calls=settings.max_calls,
            enabled=arm == "tuned",
            masks=CallGrammar(lm.tokenizer) if settings.constrain else None,
        )
    with context.progress(len(questions), "questions") as bar:
        bar.set_description(f"evaluate {arm}")
        answers = generate(
            lm.model,
            lm.tokenizer,
            [question.prompt for question in questions],
            max_new_tokens=settings.max_new_tokens,
            calls=calls,
            max_rows=settings.max_rows,
            on_done=lambda index, generation: bar.update(1),
        )
    traces = [_trace(arm, q, a) for q, a in zip(questions, answers, strict=True)]
    measures: dict[str, Any] = {
        "tasks": {
            kind: summarise([t for t in traces if t["kind"] == kind])
            for kind in KINDS
            if any(t["kind"] == kind for t in traces)
        },
        "overall": summarise(traces),
        "tools": _per_tool(traces),
        "perplexity": None,
        "perplexity_standard_error": None,
    }
    if texts:
        muted = open_token(lm.tokenizer, syntax) if arm == "tuned_disabled" else None
        losses = text_losses(lm, texts, muted=muted, max_length=context.config.finetune.max_length)
        value, error = perplexity_of(*zip(*losses, strict=True))
        measures["perplexity"], measures["perplexity_standard_error"] = value, error
    return {"measures": measures, "traces": traces}


def _trace(arm: str, question: Question, answer: Generation) -> dict[str, Any]:
    return {
        "arm": arm,
        "id": question.id,
        "kind": question.kind,
        "prompt": question.prompt,
        "date": question.date,
        "answers": list(question.answers),
        "text": answer.text,
        "correct": is_correct(question, answer.plain),
        "calls": [dataclasses.asdict(call) for call in answer.calls],
        "finish": answer.finish,
        "tokens_in": answer.tokens_in,
        "tokens_out": answer.tokens_out,
    }


def summarise(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy with its standard error, call rate, calls and failed calls of some answers.

    `call_rate` is the share of questions with at least one well-formed call; `calls` counts every
    attempt, `failed_calls` those without a result.
    """
    n = len(traces)
    correct = sum(trace["correct"] for trace in traces)
    calls = [call for trace in traces for call in trace["calls"]]
    failed = sum(call["error_kind"] is not None for call in calls)
    called = sum(any(call["tool"] for call in trace["calls"]) for trace in traces)
    return {
        "n": n,
        "correct": correct,
        "accuracy": correct / n if n else 0.0,
        "standard_error": binomial_error(correct, n),
        "call_rate": called / n if n else 0.0,
        "calls": len(calls),
        "failed_calls": failed,
        "failed_share": failed / len(calls) if calls else 0.0,
    }


def _per_tool(traces: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Calls and failed calls per tool; attempts that name no tool are under `malformed`."""
    tools: dict[str, dict[str, int]] = {}
    for trace in traces:
        for call in trace["calls"]:
            own = tools.setdefault(call["tool"] or "malformed", {"calls": 0, "failed_calls": 0})
            own["calls"] += 1
            own["failed_calls"] += call["error_kind"] is not None
    return dict(sorted(tools.items()))


def comparisons(traces: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Paired comparisons of arms, overall and per kind of question."""
    found = []
    for first, second in COMPARISONS:
        pairs = list(zip(traces[first], traces[second], strict=True))
        for task in ("overall", *KINDS):
            own = [(a, b) for a, b in pairs if task in ("overall", a["kind"])]
            if own:
                outcome = compare([a["correct"] for a, _ in own], [b["correct"] for _, b in own])
                found.append({"first": first, "second": second, "task": task, **outcome})
    return found
