"""How commands say what they take: help with defaults and an example, and the longer options."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from pipeline.arguments import day, positive

EXAMPLES = {
    "": "run configs/quickstart.yaml",
    "run": "run configs/quickstart.yaml --select.tau_f 0.5",
    "ingest": "ingest configs/quickstart.yaml --run-dir runs/quickstart",
    "sample": "sample configs/quickstart.yaml --run-dir runs/quickstart --shards 0/4",
    "execute": "execute configs/quickstart.yaml --run-dir runs/quickstart",
    "score": "score configs/quickstart.yaml --run-dir runs/quickstart",
    "select": "select configs/quickstart.yaml --run-dir runs/quickstart --select.tau_f 0.5",
    "augment": "augment configs/quickstart.yaml --run-dir runs/quickstart",
    "finetune": "finetune configs/quickstart.yaml --run-dir runs/quickstart",
    "evaluate": "evaluate configs/quickstart.yaml --run-dir runs/quickstart --json",
    "status": "status runs/quickstart",
    "show": "show runs/quickstart --tool Calculator --reason kept -n 3",
    "report": "report runs/quickstart",
    "export": "export runs/quickstart --format jsonl -o texts.jsonl",
    "diff": "diff runs/a runs/b",
    "tools": "tools list",
    "tools list": "tools list --config configs/quickstart.yaml",
    "tools call": 'tools call Calculator "400 / 1400"',
    "tools serve": "tools serve --http 8000",
    "agent": "agent demo stock",
    "agent run": 'agent run MODEL "How much is 29 * 34?" --tools Calculator',
    "agent evaluate": "agent evaluate MODEL --benchmarks arithmetic,library --limit 10",
    "agent demo": "agent demo stock",
    "agent parse": "agent parse --protocol react < turn.txt",
    "generate": 'generate runs/quickstart/07-model "7 boxes of 12 eggs are" --no-calls',
    "bench": "bench score --pairs 3",
}
"""By command, without its first word, which is always `callsieve`."""

_BENCHES = """\
Measure our paths against baselines, in one run: the work is the same, both sides have to agree,
and runs of ours and of a baseline take turns. Above 1x ours is faster.

  ingest  the stage against datasets.load_dataset with the same cuts in a map (2,000 documents)
  sample  calls over shared keys against `generate` and `generate_batch` (4 texts)
  score   the losses of candidate calls against three passes for each, unbatched and in a padded
          batch with all logits, and against a bare forward pass (8 texts)
  train   packed fine-tuning against transformers.Trainer with padded batches, in bf16 and fp32
          where the CPU has both (8 steps of 4 texts)
  agent   episodes that step together against one after the other (32 episodes, 32 tokens a turn)"""


class Parser(argparse.ArgumentParser):
    """A parser of arguments whose messages are about the command that was meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})
        command = self.prog.removeprefix("callsieve").strip()
        self._example = f"callsieve {EXAMPLES[command]}" if command in EXAMPLES else None
        self.epilog = self._example and f"Example: {self._example}"

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        """As ever; `parser` is the one of the innermost command."""
        found, rest = super().parse_known_args(*args, **options)
        found.parser = getattr(found, "parser", self)
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, how the command is used, and an example; exit code 2."""
        self.print_usage(sys.stderr)
        example = f"example: {self._example}\n" if self._example else ""
        self.exit(2, f"{self.prog}: {message}\n{example}")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, but not that a switch is off, nor twice where the help says more of it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


# -- longer options -------------------------------------------------------------------------------


def add_generate(generate: argparse.ArgumentParser) -> None:
    """Add what is continued, with which tools, and when it ends."""
    generate.add_argument("model", help="a tuned model, e.g. runs/quickstart/07-model")
    generate.add_argument("prompt", help="the text to continue, in quotes")
    generate.add_argument(
        "--tools",
        metavar="A,B",
        help="which tools may be called (default: those that the model was tuned with)",
    )
    generate.add_argument("--config", metavar="FILE", help="take the tools' settings from it")
    generate.add_argument(
        "--date", type=day, help="today for Calendar, e.g. 2023-01-30 (default: the date of today)"
    )
    generate.add_argument(
        "--max-new-tokens", type=positive, default=48, metavar="N", help="stop after so many tokens"
    )
    generate.add_argument(
        "--call-k",
        type=positive,
        metavar="K",
        help="a call starts when [ is among the K likeliest tokens (default: as the model was "
        "tuned, `evaluate.call_k`)",
    )
    generate.add_argument(
        "--max-calls", type=int, default=1, metavar="N", help="at most so many calls"
    )
    generate.add_argument("--no-calls", action="store_true", help="never start a call")
    generate.add_argument(
        "--constrain",
        action="store_true",
        help="a call that has begun cannot be malformed: only tokens that continue a call of one "
        "of the tools are let through, up to the arrow (its values may still be wrong)",
    )


def add_bench(bench: argparse.ArgumentParser) -> None:
    """Add what is measured, with what and how often."""
    bench.description = _BENCHES
    bench.add_argument(
        "name", choices=("ingest", "sample", "score", "train", "agent"), help="what is measured"
    )
    bench.add_argument(
        "--model",
        default=".cache/models/SmolLM2-135M-Instruct",
        help="a model folder or hub id; tiny: try it out in seconds",
    )
    bench.add_argument(
        "--pairs", type=int, default=5, metavar="N", help="interleaved pairs of runs per baseline"
    )
    bench.add_argument(
        "--documents",
        type=int,
        metavar="N",
        help="how many documents (agent: episodes) a run works on (default: see above)",
    )
    bench.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="length of a document in tokens (ingest: words; agent: of a turn; default: see above)",
    )
