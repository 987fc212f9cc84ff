"""Token ids of texts and calls: nothing around an inserted call changes, nothing is lost."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import tiny

from pipeline.calls import TEXT, CallSyntax, call_pieces, render
from pipeline.errors import ConfigError
from pipeline.lm import tokens
from pipeline.lm.checkpoint import add_markers
from pipeline.lm.tokens import (
    CALL,
    RESULT,
    augmented_ids,
    check_tokenizer,
    context_token,
    decode,
    decode_piece,
    encode_document,
    encode_piece,
    encode_pieces,
    open_token,
)

SPECIAL = CallSyntax("special")
MORE_TEXTS = (
    *tiny.TEXTS,
    "a  b\n\nc \t d",
    "[see] it [Cal] (x) -> y ]",
    "<s> and </s> and <|endoftext|> are words here.",
    "日本語の 😀😀 テキスト。",
    "x",
)


@dataclass(frozen=True)
class Call:
    tool: str
    arguments: str
    result: str | None
    char_start: int


@pytest.fixture(params=tiny.KINDS)
def tokenizer(request: Any) -> Any:
    return tiny.make_tokenizer(request.param)


def test_three_tokenizers_differ_as_they_should() -> None:
    ids = {kind: tiny.make_tokenizer(kind)("so [x")["input_ids"] for kind in tiny.KINDS}
    assert ids["bos"][0] == tiny.make_tokenizer("bos").bos_token_id
    assert ids["metaspace"][0] == tiny.make_tokenizer("metaspace").bos_token_id
    assert tiny.make_tokenizer("bytes").bos_token_id is None
    metaspace = tiny.make_tokenizer("metaspace")
    assert metaspace.convert_ids_to_tokens(ids["metaspace"])[1].startswith("▁")
    offsets = tiny.make_tokenizer("bos")("so is", return_offsets_mapping=True)["offset_mapping"]
    assert offsets[-1] == (3, 5)  # trimmed: the space at 2 belongs to the token and is left out


# -- documents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", MORE_TEXTS)
def test_a_text_comes_back_and_every_token_knows_its_place(tokenizer: Any, text: str) -> None:
    ids, starts = encode_document(tokenizer, text)
    assert decode(tokenizer, ids) == text
    assert len(starts) == len(ids) and starts == sorted(starts) and starts[0] == 0
    for i in range(len(ids)):
        before = decode(tokenizer, ids[:i])
        if not before.endswith("\ufffd"):  # between characters
            assert text[: starts[i]] == before
    # a token in the middle of a character has the place of the one before
    between = [i for i in range(len(ids)) if not decode(tokenizer, ids[:i]).endswith("\ufffd")]
    assert set(starts) == {len(decode(tokenizer, ids[:i])) for i in between}


def test_no_special_token_is_added_or_read_from_text(tokenizer: Any) -> None:
    ids, _ = encode_document(tokenizer, MORE_TEXTS[-3])
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert not special & set(ids)
    assert not special & set(encode_piece(tokenizer, " <s></s><|endoftext|>"))


def test_empty_text(tokenizer: Any) -> None:
    assert encode_document(tokenizer, "") == ([], [])
    assert encode_piece(tokenizer, "") == []


def test_token_before_a_text() -> None:
    assert context_token(tiny.make_tokenizer("bos")) == tiny.make_tokenizer("bos").bos_token_id
    assert context_token(tiny.make_tokenizer("bytes")) == 0  # the end of a text stands in
    assert context_token(tiny.make_tokenizer("bare")) is None


# -- pieces ---------------------------------------------------------------------------------------

PIECES = (" [", "Calculator(37 * 24) ->", " 888]", "\n", "]", "x", " x", "  x", "日本", " :: ", "é")


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_is_encoded_as_it_would_be_inside_of_a_text(tokenizer: Any, piece: str) -> None:
    ids = encode_piece(tokenizer, piece)
    assert ids == reference.piece_ids(tokenizer, piece)
    (opening,) = encode_piece(tokenizer, " [")
    assert decode_piece(tokenizer, opening, ids) == piece  # a leading space stays, none is added


def test_pieces_are_encoded_one_by_one(tokenizer: Any) -> None:
    assert encode_pieces(tokenizer, PIECES) == [
        token for piece in PIECES for token in encode_piece(tokenizer, piece)
    ]
    # a result that would fuse with its surroundings does not
    assert encode_pieces(tokenizer, ["1", "2"]) == [
        *encode_piece(tokenizer, "1"),
        *encode_piece(tokenizer, "2"),
    ]


def test_the_opening_delimiter_is_one_token(tokenizer: Any) -> None:
    assert [open_token(tokenizer, TEXT)] == encode_piece(tokenizer, " [")
    with pytest.raises(ConfigError, match=r"rendering: special"):
        open_token(tokenizer, CallSyntax("special"))  # not added yet


# -- calls in a text ------------------------------------------------------------------------------


def place(text: str, before: str) -> int:
    return text.index(before)


@pytest.mark.parametrize("syntax", [TEXT, SPECIAL])
def test_an_inserted_call_leaves_both_sides_as_they_were(tokenizer: Any, syntax: Any) -> None:
    dummy = tokenizer.convert_ids_to_tokens(encode_document(tokenizer, "x")[0])[0].startswith("▁")
    if syntax.rendering == "special":
        tokenizer = copy.deepcopy(tokenizer)
        add_markers(tiny.make_model("llama", tokenizer), tokenizer, syntax)
    text = tiny.TEXTS[0]
    ids, starts = encode_document(tokenizer, text)
    for i in range(int(dummy), len(ids)):  # nothing stands before a dummy space
        call = Call("Calculator", "37 * 24", "888", starts[i])
        found, kinds = augmented_ids(tokenizer, text, [call], syntax)
        added = [token for token, kind in zip(found, kinds, strict=True) if kind in (CALL, RESULT)]
        assert found == ids[:i] + added + ids[i:]
        if syntax.rendering == "text":
            pieces = reference.called("Calculator", "37 * 24", "888")
            assert added == [t for piece in pieces for t in reference.piece_ids(tokenizer, piece)]
        called = render("Calculator", "37 * 24", "888", syntax)
        assert decode(tokenizer, found) == text[: starts[i]] + called + text[starts[i] :]


def test_several_calls_in_any_order(tokenizer: Any) -> None:
    text = tiny.TEXTS[1]
    calls = [
        Call("Calendar", "", "Today is Monday, May 4, 2020.", place(text, " five days")),
        Call("Calculator", "12 * 3", "36", place(text, " 36")),
        Call("WikiSearch", "Lyon", "a city “in” France…", place(text, " Lyon")),
    ]
    found, kinds = augmented_ids(tokenizer, text, calls, TEXT)
    wanted, done = "", 0
    for call in sorted(calls, key=lambda c: c.char_start):
        wanted += text[done : call.char_start]
        wanted += render(call.tool, call.arguments, call.result)
        done = call.char_start
    assert decode(tokenizer, found) == wanted + text[done:]
    plain = [token for token, kind in zip(found, kinds, strict=True) if kind == tokens.TEXT]
    assert plain == encode_document(tokenizer, text)[0]
    results = [token for token, kind in zip(found, kinds, strict=True) if kind == RESULT]
    shown = decode(tokenizer, results).split("]")
    assert [part.strip() for part in shown[:3]] == [
        "36", "Today is Monday, May 4, 2020.", "a city “in” France…"
    ]  # fmt: skip


def test_call_where_this_tokenizer_has_no_border(tokenizer: Any) -> None:
    """The places of a run belong to its own tokenizer; another one has to split a word."""
    text = "It took 1240 bottles, so it did."
    for start in range(1, len(text)):
        call = Call("Calculator", "1 + 1", "2", start)
        found, _ = augmented_ids(tokenizer, text, [call], TEXT)
        assert decode(tokenizer, found) == text[:start] + " [Calculator(1 + 1) -> 2]" + text[start:]


# -- refusals -------------------------------------------------------------------------------------


def test_tokenizers_on_which_a_call_survives(tokenizer: Any) -> None:
    check_tokenizer(tokenizer, TEXT, ["Calculator", "Calendar", "WikiSearch"])
    own = copy.deepcopy(tokenizer)
    add_markers(tiny.make_model("llama", own), own, SPECIAL)
    check_tokenizer(own, SPECIAL, ["Calculator"])


@pytest.mark.parametrize(
    "make", [tiny.lower_casing_tokenizer, tiny.respacing_tokenizer], ids=["lower", "respace"]
)
def test_tokenizers_on_which_a_call_does_not_survive(make: Any) -> None:
    with pytest.raises(ConfigError, match="a call does not survive this tokenizer"):
        check_tokenizer(make(), TEXT, ["Calculator"])


def test_tokenizer_that_splits_the_opening_delimiter() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({sign: n for n, sign in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    with pytest.raises(ConfigError, match=r"' \[' is 2 tokens .*rendering: special"):
        check_tokenizer(PreTrainedTokenizerFast(tokenizer_object=core), TEXT, ["Calculator"])


def test_added_markers_get_different_rows() -> None:
    import torch

    for kind in tiny.KINDS:
        tokenizer = copy.deepcopy(tiny.make_tokenizer(kind))
        model = tiny.make_model("gpt2", tokenizer)
        before = model.get_input_embeddings().weight.detach().clone()
        add_markers(model, tokenizer, SPECIAL)
        ids = tokenizer.convert_tokens_to_ids(list(SPECIAL.markers))
        assert ids == list(range(len(before), len(before) + 3))
        rows = model.get_input_embeddings().weight[ids]
        assert torch.pdist(rows).min() > 1e-3
        assert torch.equal(model.get_input_embeddings().weight[: len(before)], before)
        add_markers(model, tokenizer, SPECIAL)  # again: nothing changes
        assert len(tokenizer) == len(before) + 3
        ids = encode_pieces(tokenizer, ["so", *call_pieces("T", "1 + 1", "2", SPECIAL), " 2"])
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        assert shown == "so<API>T(1 + 1) → 2</API> 2"  # not erased with the special tokens
