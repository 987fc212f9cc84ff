"""The funnel of real runs adds up, and knows every reason that a stage can count."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny

from pipeline import runner
from pipeline.config import parse_config
from pipeline.lm.checkpoint import save_checkpoint
from pipeline.records import REASONS
from pipeline.report.funnel import EXPLANATIONS, STEPS, build_funnel, stage_counts
from pipeline.report.terminal import corpus_text
from pipeline.shards import RunFolder
from pipeline.tools.base import ERROR_KINDS

PIPELINE = Path(__file__).parents[1] / "pipeline"
# these steps count other things than the step before: positions of documents, samples of positions
OTHER_UNIT = {"documents", "positions", "samples"}
# counted for other readers than the funnel
ELSEWHERE = {"tokens", "closed", "samples_parsed", "samples_executed"}


@pytest.fixture(scope="module")
def own(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """GPT-2, which reads 1024 tokens and no more, on short texts and one that is too long."""
    folder = tmp_path_factory.mktemp("funnel")
    lm = tiny.taught_lm("gpt2", "bos")
    save_checkpoint(lm.model, lm.tokenizer, folder / "model", {})
    texts = [*tiny.TEXTS, " ".join(tiny.TEXTS * 5), "so [Calculator(12 * 3)] 36 pens and 7 more it"]
    lines = [json.dumps({"text": text, "date": "2020-05-04"}) + "\n" for text in texts]
    (folder / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    return tiny.raw_config(
        inputs,
        corpus={"sources": [{"path": str(folder / "corpus.jsonl")}], "max_words": 2000},
        model={"path": str(folder / "model"), "device": "cpu"},
        shards=2,
    )


MASKED = {"constrain": True, "numbers": "from_context", "words": "from_context", "m": 4, "k": 6}


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (
            {"sample": {"tau_s": 1e-4, "k": 4, "m": 4, "max_new_tokens": 14}, "gain_floor": 0.0},
            {"below_tau_s", "beyond_k", "never_closed", "malformed", "opens_already"},
        ),
        (
            {"sample": {**MASKED, "max_new_tokens": 40}, "gain_floor": 0.05,
             "select": {"tau_f": 0.05, "max_calls_per_tool": 1}},
            {"no_call_possible", "merged", "pruned_call", "over_cap", "below_threshold"},
        ),
    ],
    ids=["free", "masks"],
)  # fmt: skip
def test_every_step_is_what_was_there_less_what_left(
    own: dict[str, Any], changes: dict[str, Any], reasons: set[str], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    runner.run(parse_config({**own, **changes}), folder, last="select", say=lambda _: None)
    funnel, left = build_funnel(folder), set()
    for tool, steps in funnel["tools"].items():
        assert [step["step"] for step in steps] == [step.name for step in STEPS]
        for before, step in pairwise(steps):
            left |= set(step["left"])
            if step["step"] not in OTHER_UNIT:
                gone = sum(step["left"].values())
                assert before["count"] == step["count"] + gone, (tool, step)
        measures, counts = funnel["sampling"][tool], stage_counts(folder, "sample")[tool]
        lost = measures["never_closed"] + measures["malformed"]
        assert measures["samples"] == measures["closed"] + lost == counts["samples"]
        assert measures["closed"] == counts["merged"] + counts["candidates"]
        assert measures["executed_share"] <= measures["parsed_share"] <= measures["closed_share"]
        kept = steps[-1]["count"]
        assert measures["kept_per_1000_tokens"] == round(1000 * kept / measures["tokens"], 4)
    assert left >= reasons | {"too_long_for_model"}


def _counted() -> set[str]:
    """Every reason that stands in a call of `count` in the stages, and those behind variables."""
    found = set()
    for folder in ("stages", "lm"):
        for path in (PIPELINE / folder).glob("*.py"):
            source = path.read_text(encoding="utf-8")
            if path.stem in ("evaluate", "augment"):  # they have numbers of their own
                continue
            for call in re.findall(r"\bcount\(([^()]*)", source):
                found |= set(re.findall(r'"([a-z_]+)"', call))
    found |= {"never_closed", "malformed"}  # of Sampled.reason
    return found | set(REASONS) | {f"error:{kind}" for kind in ERROR_KINDS}


def test_the_funnel_knows_every_reason_that_is_counted() -> None:
    steps = {step.what for step in STEPS}
    left = [name for step in STEPS for name in step.left]
    corpus = {"read", "split", "bad_date"}
    counted = _counted()
    assert {"too_long_for_model", "never_closed", "beyond_k", "tokens"} <= counted
    for what in counted - steps - ELSEWHERE - corpus - {"tool_error"}:
        known = [name for name in left if what == name or name == "error:" == what[:6]]
        assert known, f"{what} is counted and stands nowhere in the funnel"
        assert what.startswith("error:") or what in EXPLANATIONS


def test_the_corpus_line_says_what_was_left_out_and_which_dates_were_not_readable() -> None:
    corpus = {"read": 1019, "documents": 59, "split": 50, "bad_date": 2, "left": {
        "rejected:too_short": 3, "duplicate_document": 1, "rejected:empty": 4}}  # fmt: skip
    assert corpus_text(corpus) == (
        "corpus: 1,019 read, 59 documents; left out: empty 4, too short 3, the same text again 1; "
        "dates that could not be read (kept without one): 2"
    )
    assert corpus_text({"read": 1, "left": {}}) == "corpus: 1 read, 0 documents"
