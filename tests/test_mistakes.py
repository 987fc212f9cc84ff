"""The mistakes that public re-implementations of Toolformer made, each with the test that sees it.

`PLANTS` makes each mistake on purpose, in a copy of the project, and its test has to fail there
(marked slow). The fast checks here hold the list together and add what no other module tests.

| mistake | test that fails |
|---|---|
| call inserted in the middle instead of prepended | test_loss: every_stored_loss |
| off by one in p_i | test_sampling: p_api_at_every_position |
| off by one in the sampling prefix | test_sampling: shared_keys_draw, the_stage_agrees |
| off by one in the place of insertion | test_sampling: the_stage_agrees |
| BOS shifts the weights by one | test_loss: known_model, every_stored_loss |
| weights not normalised | test_loss: weights_of_the_paper |
| padding tokens weighted | test_loss: plain_losses_agree, losses_agree |
| `min` with the call-only baseline dropped | test_loss: every_stored_loss |
| sign of the gain inverted | test_loss: every_stored_loss |
| sign of the decision inverted | test_select: kept_iff |
| context cropped so that the call is not in it | here: a_call_before_a_long_text |
| results missing from the training text | test_augment: calls_of_all_tools_stand |
| results missing from the training ids | test_tokens: an_inserted_call_leaves_both_sides |
| a tokenizer that lower-cases or respaces | test_tokens: a_call_does_not_survive |
| call tokenised differently inside the text | test_tokens: pieces_are_encoded_one_by_one |
| calculator cannot read its own demonstrations | test_calls: reads_its_own_demonstrations; tools/ |
| right-associative `10-2-3` | tools/test_calculator: reference_cases |
| rounding at each step | tools/test_calculator: spellings |
| `eval` on model output | tools/test_calculator: failures_by_kind |
| first `]` taken for the end of the call | test_calls: first_bracket_of_a_document |
| backslashes and braces break a template | test_calls: a_prompt_is_used; here: braces_of_a_text |
| shard counters drift | test_runner: one_and_four_shards |
| resume counters drift | test_runner: killed_in_every_stage |
| counters drift when memory runs out | test_sampling: counts_do_not_drift |
| documents with one call dropped on export | test_augment: special_rendering_and_code_points |
| text after the result not generated again | test_generation: a_call_is_made_and_its_result_used |
| calculator corpus filter inverted | tools/test_calendar_and_filters: corpus_filter_by_tool_name |
| (ours) pruning loses calls | test_filter: pruning_keeps_exactly_the_same_calls |
| (ours) noise belongs to the batch, not to the sample | test_sampling: noise_does_not_depend |
| (ours) look-ahead leaks pass | test_select: leaks_are_rejected |
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import reference
import tiny

from pipeline.lm.loss import LossRequest, loss_weights, losses
from pipeline.lm.tokens import encode_pieces
from pipeline.records import ExecutedCall
from pipeline.stages import sample, score

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Plant:
    """A mistake: text of a module, what to put in its place, and the test that must fail."""

    mistake: str
    module: str
    text: str
    wrong: str
    test: str


EVERY_LOSS = "test_loss.py::test_every_stored_loss_agrees_with_the_reference"
PLANTS = (
    Plant(
        "call in the middle",
        "lm/loss.py",
        "[[*requests[i].prefix, *requests[i].text][: lengths[i]] for i in batch]",
        "[[*requests[i].prefix[:1], *requests[i].text[: max(requests[i].positions)],"
        " *requests[i].prefix[1:], *requests[i].text[max(requests[i].positions) :]][: lengths[i]]"
        " for i in batch]",
        EVERY_LOSS,
    ),
    Plant(
        "off by one in p_i",
        "lm/sampling.py",
        "start = before + prompt.offset(document.ids) - 1",
        "start = before + prompt.offset(document.ids)",
        "test_sampling.py::test_p_api_at_every_position",
    ),
    Plant(
        "off by one in the sampling prefix",
        "lm/sampling.py",
        "decoder.place(slot, row.doc, prompt.offset(document.ids) + row.position)",
        "decoder.place(slot, row.doc, prompt.offset(document.ids) + row.position + 1)",
        "test_sampling.py::test_the_stage_agrees_with_the_reference",
    ),
    Plant(
        "off by one in the place of insertion",
        "stages/sample.py",
        "start = encoded[n].char_starts[i]\n",
        "start = (*encoded[n].char_starts, len(documents[n].text))[i + 1]\n",
        "test_sampling.py::test_the_stage_agrees_with_the_reference",
    ),
    Plant(
        "BOS shifts the weights",
        "lm/loss.py",
        "offset = len(requests[index].prefix)\n",
        "offset = len(requests[index].prefix) - 1\n",
        "test_loss.py::test_known_model",
    ),
    Plant(
        "weights not normalised",
        "lm/loss.py",
        "return raw / raw.sum()",
        "return raw",
        "test_loss.py::test_weights_of_the_paper",
    ),
    Plant(
        "padding weighted",
        "lm/loss.py",
        "counts = [len(rows[i]) - 1 for i in batch]",
        "counts = [ids_BL.shape[1] - 1 for _ in batch]",
        "test_loss.py::test_plain_losses_agree_with_the_reference",
    ),
    Plant(
        "min dropped",
        "stages/score.py",
        "best = min(call.loss_none, without[n]) if n in without else None",
        "best = call.loss_none if n in without else None",
        EVERY_LOSS,
    ),
    Plant(
        "sign of the gain",
        "stages/score.py",
        "best - result[n]",
        "result[n] - best",
        EVERY_LOSS,
    ),
    Plant(
        "sign of the decision",
        "stages/select.py",
        "call.gain < threshold.tau_f",
        "call.gain > threshold.tau_f",
        "test_select.py::test_kept_iff_the_gain_reaches_tau_f",
    ),
    Plant(
        "context cropped",
        "stages/score.py",
        "[*self.start, *encode_pieces(self.lm.tokenizer, pieces), *self.separator]",
        "[*self.start, *encode_pieces(self.lm.tokenizer, pieces), *self.separator]"
        "[-max(0, 512 - len(self.text[doc_id])) or 10**6 :]",
        "test_mistakes.py::test_a_call_before_a_long_text_is_in_the_context",
    ),
    Plant(
        "results missing from the training text",
        "stages/augment.py",
        'render(call["tool"], call["arguments"], call["result"], syntax)',
        'render(call["tool"], call["arguments"], None, syntax)',
        "test_augment.py::test_calls_of_all_tools_stand_at_their_places",
    ),
    Plant(
        "results missing from the training ids",
        "lm/tokens.py",
        'call_pieces(call.tool, call.arguments, call.result or "", syntax)',
        'call_pieces(call.tool, call.arguments, "", syntax)',
        "test_tokens.py::test_an_inserted_call_leaves_both_sides_as_they_were",
    ),
    Plant(
        "tokenizer that changes calls accepted",
        "lm/tokens.py",
        "if found != wanted:",
        'if found.lower().split() != wanted.lower().split() and "[" not in found:',
        "test_tokens.py::test_tokenizers_on_which_a_call_does_not_survive",
    ),
    Plant(
        "call tokenised differently",
        "lm/tokens.py",
        "return [token for piece in pieces for token in encode_piece(tokenizer, piece)]",
        'return encode_piece(tokenizer, "".join(pieces))',
        "test_tokens.py::test_pieces_are_encoded_one_by_one",
    ),
    Plant(
        "calculator without commas",
        "tools/calculator.py",
        'r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?P<fraction>\\.[0-9]*)?"',
        'r"(?P<whole>[0-9]+)?(?P<fraction>\\.[0-9]*)?"',
        "tools/test_calculator.py::test_spellings",
    ),
    Plant(
        "right-associative",
        "tools/calculator.py",
        "            right = self.product()\n",
        "            right = self.sum()\n",
        "tools/test_calculator.py::test_reference_cases",
    ),
    Plant(
        "rounding at each step",
        "tools/calculator.py",
        "    return value\n\n\ndef _power(",
        "    return Fraction(round(value, 2))\n\n\ndef _power(",
        "tools/test_calculator.py::test_spellings",
    ),
    Plant(
        "eval",
        "tools/calculator.py",
        "return format_value(evaluate(expression))",
        "return str(eval(expression))",
        "tools/test_calculator.py::test_failures_by_kind",
    ),
    Plant(
        "first bracket ends the call",
        "calls.py",
        "    end = scan_balanced(body, len(head))\n",
        '    end = body.find("]") - 1 if "]" in body else None\n',
        "test_calls.py::test_the_first_bracket_of_a_document_is_not_the_end_of_a_call",
    ),
    Plant(
        "backslashes in a template",
        "lm/prompts.py",
        "return Prompt(tool, rewritten)",
        'return Prompt(tool, re.sub("^", rewritten, "", count=1))',
        "test_calls.py::test_a_prompt_is_used_as_written",
    ),
    Plant(
        "shard counters drift",
        "context.py",
        "taken, self.counts = self.counts, {}",
        "taken = {tool: dict(own) for tool, own in self.counts.items()}",
        "test_runner.py::test_one_and_four_shards",
    ),
    Plant(
        "resume counters drift",
        "runner.py",
        "        if folder.done(stage, index, config.shards, context.fingerprint):\n",
        "        if folder.part(stage, index, config.shards).exists():\n",
        "test_runner.py::test_killed_in_every_stage_and_run_again",
    ),
    Plant(
        "counters drift when memory runs out",
        "stages/sample.py",
        "context.counts = before",
        "pass",
        "test_sampling.py::test_counts_do_not_drift_when_memory_runs_out",
    ),
    Plant(
        "documents with one call dropped",
        "stages/augment.py",
        "                    if own:\n",
        "                    if len(own) > 1:\n",
        "test_augment.py::test_special_rendering_and_code_points",
    ),
    Plant(
        "text after the result not generated again",
        "lm/decoding.py",
        "        row.text_start = end\n",
        '        row.text_start = end\n        self._finish(row, "eos")\n',
        "test_generation.py::test_a_call_is_made_and_its_result_used",
    ),
    Plant(
        "corpus filter inverted",
        "tools/filters.py",
        'return calculator_filter(text, str(document.get("doc_id") or ""), seed)',
        'return not calculator_filter(text, str(document.get("doc_id") or ""), seed)',
        "tools/test_calendar_and_filters.py::test_corpus_filter_by_tool_name",
    ),
    # promises of this project
    Plant(
        "pruning loses calls",
        "stages/score.py",
        "calls[n].loss_none - found[n] >= floor",
        "calls[n].loss_none - found[n] >= 2 * floor",
        "test_filter.py::test_pruning_keeps_exactly_the_same_calls",
    ),
    Plant(
        "noise belongs to the batch",
        "lm/noise.py",
        "[_step_key(k, s) for k, s in zip(keys, steps, strict=True)]",
        "[_step_key(n, s) for n, s in enumerate(steps)]",
        "test_sampling.py::test_noise_does_not_depend_on_the_batch",
    ),
    Plant(
        "look-ahead leaks pass",
        "leaks.py",
        "before, after = text[:char_start], text[char_start:]",
        "before, after = text, text[char_start:]",
        "test_select.py::test_leaks",
    ),
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.mistake)
def test_every_mistake_can_still_be_made_and_has_its_test(plant: Plant) -> None:
    source = (ROOT / "pipeline" / plant.module).read_text(encoding="utf-8")
    assert source.count(plant.text) == 1, f"{plant.module} has changed: plant this one anew"
    file, _, name = plant.test.partition("::")
    assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert name.removeprefix("test_").split("[")[0]


def test_the_table_names_tests_that_exist() -> None:
    rows = [line.split("|")[1:3] for line in (__doc__ or "").splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    tests = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    names = " ".join(re.findall(r"^def test_(\w+)", tests, re.MULTILINE))
    for mistake, where in rows[1:]:
        for name in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", re.sub(r"\w+:", "", where)):
            assert name in names, f"{mistake.strip()}: no test {name}"


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.mistake)
def test_the_planted_mistake_is_seen(plant: Plant, tmp_path: Path) -> None:
    copy = tmp_path / "project"
    for name in ("pipeline", "tests", "configs", "data"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    module = copy / "pipeline" / plant.module
    module.write_text(module.read_text(encoding="utf-8").replace(plant.text, plant.wrong))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"tests/{plant.test}"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    # 1: a test failed. 2 would be a module that cannot be imported, 4 a test that does not exist.
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-1000:]


# -- what no other module tests -------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "kind"), [("llama", "bytes"), ("neox", "metaspace")])
def test_a_call_before_a_long_text_is_in_the_context(
    shape: str, kind: str, inputs: Path, tmp_path: Path
) -> None:
    """At the end of a text of many hundred tokens, another result still gives another loss."""
    lm = tiny.make_lm(shape, kind)
    text = " ".join(tiny.TEXTS * 4)
    document = tiny.document(text)
    length = len(reference.text_ids(lm.tokenizer, text))
    assert length > 512
    calls = [
        ExecutedCall(
            call_id=f"{n}",
            doc_id=document.doc_id,
            tool="Calculator",
            char_start=0,
            token_index=length - 3,
            arguments="37 * 24",
            sample_count=1,
            p_api=0.1,
            loss_none=1.0,
            result=result,
            error_kind=None,
            error=None,
            seconds=0.0,
            cached=False,
        )
        for n, result in enumerate(("888", "Rome is old"))
    ]
    context = tiny.make_context(tmp_path, tiny.make_config(inputs), lm)
    scored = list(score.run(calls, [document], {}, context))
    for call in scored:
        wanted = reference.losses_of_call(lm, text, call, None)
        assert call.loss_result == pytest.approx(wanted.result, abs=1e-4)
        assert call.loss_call == pytest.approx(wanted.call, abs=1e-4)
    assert abs(scored[0].loss_result - scored[1].loss_result) > 1e-4


def test_the_weights_begin_at_the_token_after_the_call(inputs: Path) -> None:
    """The loss changes with x_i..x_{i+4} and with no other token of what follows."""
    lm = tiny.make_lm("llama", "bos")
    start = reference.before_all(lm.tokenizer)
    z = encode_pieces(lm.tokenizer, [*reference.called("Calculator", "1 + 1", "2"), "\n"])
    text = reference.text_ids(lm.tokenizer, tiny.TEXTS[0])
    i = 4

    def loss(ids: list[int]) -> float:
        return losses(lm, [LossRequest([*start, *z], ids, [i])], loss_weights())[0][0]

    whole = loss(text)
    for j in range(i, len(text)):
        other = [*text[:j], (text[j] + 7) % 300 + 100, *text[j + 1 :]]
        assert (abs(loss(other) - whole) > 1e-6) == (j < i + 5), j


def test_backslashes_and_braces_of_a_text_change_nothing(inputs: Path, tmp_path: Path) -> None:
    """A text is never put through a template: what it holds comes out of every stage as it is."""
    lm = tiny.taught_lm("llama", "bytes")
    text = r"C:\new\1 \g<0> {x} {{0}} %s $HOME ${y} costs 12 boxes of 5, so 60 in all \\ [ok]."
    document = tiny.document(text, ("Calculator",))
    context = tiny.make_context(tmp_path, tiny.make_config(inputs, sample={"k": 50, "m": 1}), lm)
    for call in sample.run([document], context):
        prompt = tiny.PROMPTS["Calculator"]
        wanted = reference.p_at(lm, prompt, text, call.token_index)
        assert call.p_api == pytest.approx(wanted, rel=1e-4)
        ids = reference.text_ids(lm.tokenizer, text)
        assert lm.tokenizer.decode(ids[: call.token_index]) == text[: call.char_start]
