"""Stage `finetune`: the augmented data set -> two models in `07-model`.

    callsieve finetune CONFIG --run-dir D

`tuned` learns the texts with their calls and lies in `07-model` itself, an ordinary checkpoint.
`control` learns the same texts without calls, in the same order and for as many steps, and lies in
`07-model/control`: what the one does better than the other comes from the calls. `callsieve.json`
beside each checkpoint is written last and says how the model writes its calls; it is the proof that
the checkpoint is complete.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
from accelerate import Accelerator
from transformers import GenerationConfig

from pipeline.calls import CallSyntax
from pipeline.config import Config
from pipeline.context import Context
from pipeline.errors import WorkError
from pipeline.lm.checkpoint import (
    load_for_run,
    load_model,
    pick_device,
    read_extra,
    save_checkpoint,
)
from pipeline.lm.packing import Example, make_examples
from pipeline.lm.training import Progress, Trained, train
from pipeline.shards import RunFolder, write_json

Arm = Literal["tuned", "control"]
ARMS: tuple[Arm, ...] = ("tuned", "control")
_MARK = "callsieve.json"


@dataclass(frozen=True)
class DatasetCall:
    """A kept call as the data set stores it."""

    tool: str
    arguments: str
    result: str
    char_start: int


@dataclass(frozen=True)
class DatasetText:
    """A document of the data set with its kept calls, in order of position."""

    id: str
    text: str
    text_augmented: str
    calls: list[DatasetCall]

    def text_of(self, arm: Arm) -> str:
        """What an arm learns; calls are inserted later, token by token (a run has none)."""
        return self.text if arm == "control" or self.calls else self.text_augmented


def run(context: Context) -> None:
    """Train `tuned` and `control`; one that is finished is not trained again.

    Raises WorkError when the data set is missing or empty.
    """
    began = time.monotonic()
    config, folder = context.config, context.folder
    texts = read_split(folder, "train")
    if not texts:
        raise WorkError(f"{folder.stage('augment')}: no text to train on; run `augment` first")
    validation = read_split(folder, "validation")
    accelerator = Accelerator(cpu=pick_device(config.model.device).type == "cpu")
    for arm in ARMS:
        if _finished(model_folder(folder, arm), context.fingerprint) is None:
            _train_arm(context, arm, texts, validation, accelerator)
            accelerator.free_memory()
            gc.collect()
    if accelerator.is_main_process:
        shutil.rmtree(folder.stage("finetune") / ".training", ignore_errors=True)
        marker = {
            "fingerprint": context.fingerprint,
            "seconds": round(time.monotonic() - began, 3),
            "counts": context.take_counts(),
            "arms": {arm: read_extra(model_folder(folder, arm))["training"] for arm in ARMS},
        }
        write_json(folder.stage_marker("finetune"), marker)
    accelerator.wait_for_everyone()


def model_folder(folder: RunFolder, arm: Arm) -> Path:
    """Where the checkpoint of an arm lies."""
    stage = folder.stage("finetune")
    return stage if arm == "tuned" else stage / arm


def read_split(folder: RunFolder, split: str) -> list[DatasetText]:
    """Read one split of the augmented data set; empty when there is none."""
    return list(_read(sorted((folder.stage("augment") / "data").glob(f"{split}-*.parquet"))))


def _read(files: Sequence[Path]) -> Iterator[DatasetText]:
    names = [field.name for field in dataclasses.fields(DatasetCall)]
    for file in files:
        for row in pq.read_table(
            file, columns=["id", "text", "text_augmented", "calls"]
        ).to_pylist():
            calls = [DatasetCall(**{name: call[name] for name in names}) for call in row["calls"]]
            yield DatasetText(row["id"], row["text"], row["text_augmented"], calls)


def _train_arm(
    context: Context,
    arm: Arm,
    texts: Sequence[DatasetText],
    validation: Sequence[DatasetText],
    accelerator: Accelerator,
) -> None:
    config, folder = context.config, context.folder
    settings = config.finetune
    master = dataclasses.replace(config.model, dtype="float32")
    if arm == "tuned":
        model, tokenizer = load_for_run(dataclasses.replace(config, model=master))
    else:
        model, tokenizer = load_model(master)
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )

    def examples(documents: Sequence[DatasetText]) -> list[list[Example]]:
        return [
            make_examples(
                tokenizer,
                document.text_of(arm),
                document.calls if arm == "tuned" else (),
                config.call_format.syntax,
                max_length=settings.max_length,
                call_weight=settings.call_weight,
                mask_results=settings.mask_results,
            )
            for document in documents
        ]

    def save(trained: Any, target: Path, progress: Progress) -> None:
        save_checkpoint(trained, tokenizer, target, describe(config, arm))

    work = folder.stage("finetune") / ".training" / arm
    packed = examples(texts)
    count = sum(len(example) for text in packed for example in text)
    context.count("*", f"{arm}:tokens", count)
    context.count("*", f"{arm}:cut_texts", sum(len(text) > 1 for text in packed))
    with context.progress(None, "steps") as bar:
        bar.set_description(f"finetune {arm}")
        trained = train(
            model,
            tokenizer,
            packed,
            examples(validation),
            settings,
            accelerator=accelerator,
            folder=work,
            save=save,
            seed=config.seed,
            fingerprint=context.fingerprint,
            on_event=lambda event, **values: _log(folder, accelerator, event, arm, values),
            bar=bar,
        )
    if accelerator.is_main_process:
        _publish(trained, model_folder(folder, arm), context.fingerprint)
        shutil.rmtree(work, ignore_errors=True)
    accelerator.wait_for_everyone()


def _log(
    folder: RunFolder, accelerator: Accelerator, event: str, arm: Arm, values: dict[str, Any]
) -> None:
    if accelerator.is_main_process:
        folder.log(event, arm=arm, **values)


def describe(config: Config, arm: Arm) -> dict[str, Any]:
    """What `callsieve.json` says about a checkpoint: how it writes calls, and to which tools."""
    syntax = config.call_format.syntax
    return {
        "arm": arm,
        "base": config.model.path,
        "syntax": {"rendering": syntax.rendering, "empty_result": syntax.empty_result},
        "tools": [dict(tool) for tool in config.tools] if arm == "tuned" else [],
        "call_k": config.evaluate.call_k,
        "max_calls": config.evaluate.max_calls,
    }


def read_syntax(extra: dict[str, Any]) -> CallSyntax:
    """The call syntax that `callsieve.json` of a checkpoint names."""
    return CallSyntax(**extra["syntax"])


def _finished(folder: Path, fingerprint: str) -> dict[str, Any] | None:
    extra = read_extra(folder)
    return extra if extra.get("fingerprint") == fingerprint else None


def _publish(trained: Trained, target: Path, fingerprint: str) -> None:
    """Put the best checkpoint in its place, file by file, `callsieve.json` last.

    The files are linked, so the best checkpoint stays whole should this be interrupted.
    """
    target.mkdir(parents=True, exist_ok=True)
    (target / _MARK).unlink(missing_ok=True)
    for file in sorted(trained.folder.iterdir()):
        if file.name == _MARK:
            continue
        temporary = target / f"{file.name}.tmp"
        temporary.unlink(missing_ok=True)
        try:
            os.link(file, temporary)
        except OSError:
            shutil.copy2(file, temporary)
        os.replace(temporary, target / file.name)
    training = {
        "steps": trained.steps,
        "best_step": trained.best_step,
        "perplexity_before": trained.perplexity_before,
        "perplexity": trained.perplexity,
        "tokens": trained.tokens,
        "seconds": round(trained.seconds, 3),
    }
    extra = read_extra(trained.folder)
    write_json(target / _MARK, {**extra, "training": training, "fingerprint": fingerprint})
