"""The benches: their document, that both sides agree, and that a broken path is found out.

Nothing here is timed: rates only have to be there.
"""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.bench import agent, gpu, ingest, print_bench, run_bench, sample, score, train
from pipeline.bench.measure import Comparison, Rate, compare, rates
from pipeline.cli import main
from pipeline.errors import ConfigError
from pipeline.lm.training import autocast_dtype
from pipeline.stages import score as stage

BASELINES = {
    "ingest": ["datasets.load_dataset and map"],
    "sample": ["generate", "generate_batch"],
    "score": [
        "three unbatched passes",
        "padded batch",
        "the same without gain_floor",
        "sample, execute and score without gain_floor",
    ],
    "train": ["Trainer, padded, fp32 (ours fp32)"],
    "agent": ["one after the other"],
}
if autocast_dtype("auto", torch.device("cpu")) is not None:
    BASELINES["train"] = [
        "Trainer, padded, fp32 (ours bf16)",
        "Trainer, padded, bf16 (ours bf16)",
        *BASELINES["train"],
    ]
SIZES: dict[str, tuple[int, int | None]] = {
    "ingest": (10, None),
    "sample": (1, 24),
    "score": (1, None),
    "train": (12, 20),
    "agent": (3, 4),
}


@pytest.fixture(autouse=True)
def in_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)


def bench(name: str, pairs: int = 1) -> dict[str, Any]:
    return run_bench(name, "tiny", pairs, *SIZES[name])


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_document_has_its_shape_and_both_sides_agree(name: str) -> None:
    found = bench(name)
    assert list(found) == ["name", "machine", "comparisons", "ceiling_share", "growth"]
    assert found["name"] == name
    assert [row["baseline"] for row in found["comparisons"]] == BASELINES[name]
    for row in found["comparisons"]:
        assert row["agrees"] is True, row
        assert row["pairs"] == 1
        assert row["ratio_min"] <= row["ratio_median"] <= row["ratio_max"]
        assert row["ours_per_s"] > 0 and row["baseline_per_s"] > 0
    if name in ("ingest", "sample", "score"):
        n = SIZES[name][0]
        assert [row["documents"] for row in found["growth"]] == [n, 4 * n, 16 * n]
        assert found["growth"][0]["ratio_to_first"] == 1.0
    assert (found["ceiling_share"] is not None) == (name == "score")


def test_command_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "bench",
                "score",
                "--model",
                "tiny",
                "--pairs",
                "1",
                "--documents",
                "1",
                "--tokens",
                "70",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["name"] == "score"


def test_table_says_who_disagrees(capsys: pytest.CaptureFixture[str]) -> None:
    document = bench("train")
    document["comparisons"][0]["agrees"] = False
    print_bench(document)
    assert "NO" in capsys.readouterr().out


def test_the_table_is_whole_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = BASELINES["score"]
    row = {"ours_per_s": 1234.5, "baseline_per_s": 123.4, "pairs": 5, "agrees": True}
    row |= {"ratio_median": 10.12, "ratio_min": 9.87, "ratio_max": 12.34}
    about = {"device": "x86_64", "threads": 2, "load": 1.2}
    print_bench(
        {
            "name": "score",
            "machine": {**about, "cpu_ratio_median": dict.fromkeys(names, 10.25)},
            "comparisons": [{"baseline": name, **row} for name in names],
            "ceiling_share": 0.9,
            "growth": [{"documents": 2, "seconds_per_document": 1.2, "ratio_to_first": 1.0}],
        }
    )
    out = capsys.readouterr().out
    assert "\u2026" not in out and max(map(len, out.splitlines())) <= 80
    assert "candidates per second, medians of 5" in out
    for whole in ("against", "min..max", "CPU ratio", "agrees", "9.87..12.34", "10.25x"):
        assert whole in out


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="allowed are"):
        run_bench("speed", "tiny")
    with pytest.raises(ConfigError, match="--pairs 0"):
        run_bench("score", "tiny", 0)


# -- a path broken on purpose is reported --------------------------------------------------------


def test_sampling_that_draws_other_calls_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sample.sample_rows

    def broken(*args: Any) -> Any:
        found = real(*args)
        return [dataclasses.replace(found[0], arguments="1 + 1", reason=None), *found[1:]]

    monkeypatch.setattr(sample, "sample_rows", broken)
    assert [row["agrees"] for row in bench("sample")["comparisons"]] == [False, False]


def test_positions_that_are_off_by_one_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sample.read_positions

    def broken(*args: Any) -> Any:
        batch = real(*args)
        batch.p_api = [torch.roll(p, 1) for p in batch.p_api]
        return batch

    monkeypatch.setattr(sample, "read_positions", broken)
    assert [row["agrees"] for row in bench("sample")["comparisons"]] == [False, False]


def test_losses_that_are_off_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = stage.losses
    monkeypatch.setattr(
        stage, "losses", lambda *a, **o: [[v + 1e-3 for v in own] for own in real(*a, **o)]
    )
    assert [row["agrees"] for row in bench("score")["comparisons"][:2]] == [False, False]


def test_pruning_that_loses_a_call_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    # everything is kept, but what the floor has dropped
    monkeypatch.setattr(score, "_tau_f", lambda context: -5.0)
    assert [row["agrees"] for row in bench("score")["comparisons"]] == [False, False, False, False]


def test_training_that_sees_other_texts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = train.train

    def broken(model: Any, tokenizer: Any, texts: Any, *args: Any, **options: Any) -> Any:
        return real(model, tokenizer, [texts[0]] * len(texts), *args, **options)

    monkeypatch.setattr(train, "train", broken)
    assert bench("train")["comparisons"][0]["agrees"] is False


def test_ingest_that_keeps_duplicates_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ingest._ids
    monkeypatch.setattr(ingest, "_ids", lambda folder: dict(list(real(folder).items())[1:]))
    assert bench("ingest")["comparisons"][0]["agrees"] is False


def test_a_batch_of_episodes_that_says_something_else_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = agent._run

    def broken(tasks: Any, *args: Any) -> Any:
        return real(tasks if len(tasks) == 1 else tasks[::-1], *args)

    monkeypatch.setattr(agent, "_run", broken)
    assert bench("agent")["comparisons"][0]["agrees"] is False


# -- measuring -----------------------------------------------------------------------------------


def test_pairs_are_interleaved_and_the_order_turns() -> None:
    seen: list[str] = []

    def path(name: str) -> Callable[[], float]:
        return lambda: float(not seen.append(name))

    rates({"a": path("a"), "b": path("b"), "c": path("c")}, 2)
    assert "".join(seen) == "abcbca"


def test_ratio_is_ours_over_theirs() -> None:
    (found,) = compare(lambda: 1e9, {"slow": lambda: 1.0}, {"slow": True}, 3)
    assert found.as_dict()["ratio_median"] > 1000
    assert found.as_dict()["pairs"] == 3
    ours = tuple(Rate(rate, 1.0) for rate in (2.0, 8.0, 3.0))
    three = Comparison("x", ours, (Rate(1.0, 1.0),) * 3, True).as_dict()
    assert (three["ratio_min"], three["ratio_median"], three["ratio_max"]) == (2.0, 3.0, 8.0)


# -- the bench of a card, on a CPU ----------------------------------------------------------------


def test_every_step_of_the_gpu_bench_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--rehearse"]) == 0
    out = capsys.readouterr().out
    assert "rehearsal on a CPU" in out and ": agrees" in out
    for row in ("bf16 product", "score", "sample", "train"):
        assert row in out
    if not torch.cuda.is_available():
        assert gpu.main([]) == 2
        assert "no CUDA device answers" in capsys.readouterr().err


def test_the_gpu_bench_sees_a_wrong_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = gpu.three_losses, []

    def wrong(*arguments: Any, **options: Any) -> list[float]:
        calls.append(1)
        return [loss + 0.01 * (len(calls) == 2) for loss in real(*arguments, **options)]

    monkeypatch.setattr(gpu, "three_losses", wrong)
    assert gpu.main(["--rehearse"]) == 1
    assert "DISAGREES" in capsys.readouterr().out


def test_the_gpu_bench_keeps_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def endless(*_: Any) -> tuple[str, str]:
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # as if the time were over now
        while True:
            pass

    monkeypatch.setattr(gpu, "_sampling", endless)
    assert gpu.main(["--rehearse"]) == 1
    out = capsys.readouterr().out
    assert f"stopped after {gpu.LIMIT_S} s" in out
    assert "score" in out and "generate_batch" not in out
