"""Token ids of texts and calls, piece by piece.

An inserted call is `x[:i] + ids(call) + x[i:]`: the tokens of the text on both sides stay what they
were. Every piece is encoded without special tokens, without a dummy prefix, and with text that
looks like a special token taken as plain text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.calls import CallSyntax, call_pieces
from pipeline.errors import ConfigError

_ANCHOR = "\x02"  # a character that no tokenizer merges with its neighbour
TEXT, CALL, RESULT = 0, 1, 2


class PlacedCall(Protocol):
    """What is needed to insert a call: any record with these attributes."""

    @property
    def tool(self) -> str: ...
    @property
    def arguments(self) -> str: ...
    @property
    def result(self) -> str | None: ...
    @property
    def char_start(self) -> int: ...


@dataclass(frozen=True)
class EncodedDocument:
    """Token ids x_1..x_T of a text and where each token starts (code points)."""

    doc_id: str
    ids: list[int]
    char_starts: list[int]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _has_dummy_prefix(tokenizer: Any) -> bool:
    """SentencePiece-like tokenizers put a space before the first word of what they are given."""
    tokens = tokenizer.convert_ids_to_tokens(_encode(tokenizer, "x"))
    return bool(tokens) and tokens[0].startswith("▁")


def encode_piece(tokenizer: Any, text: str) -> list[int]:
    """Encode a piece that continues a text: no special tokens, no dummy prefix."""
    if not text:
        return []
    if not _has_dummy_prefix(tokenizer):
        return _encode(tokenizer, text)
    anchor = _encode(tokenizer, _ANCHOR)
    ids = _encode(tokenizer, _ANCHOR + text)
    if ids[: len(anchor)] != anchor:
        raise ConfigError("the tokenizer cannot encode a piece of text on its own")
    return ids[len(anchor) :]


def encode_pieces(tokenizer: Any, pieces: Iterable[str]) -> list[int]:
    """Encode pieces one by one and join them."""
    return [token for piece in pieces for token in encode_piece(tokenizer, piece)]


def encode_document(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Encode a text; returns its ids and the code point where each token starts.

    A token that starts in the middle of a character has the start of the token before it.
    """
    encoding = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True
    )
    starts: list[int] = []
    end = 0
    for start, stop in encoding["offset_mapping"]:
        if start > end and text[end:start].isspace():
            start = end  # tokenizers that trim offsets (NeoX) leave out the space before a word
        elif start < end:
            start = starts[-1]  # goes on with a character that the token before began
        starts.append(start)
        end = max(end, stop)
    return list(encoding["input_ids"]), starts


def context_token(tokenizer: Any) -> int | None:
    """The token before the first one of a text: BOS, else EOS, else none (method, section 5)."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None else tokenizer.eos_token_id


def open_token(tokenizer: Any, syntax: CallSyntax) -> int:
    """The id of the opening delimiter, which has to be one token."""
    ids = encode_piece(tokenizer, syntax.open)
    if len(ids) != 1:
        raise ConfigError(
            f"the opening delimiter {syntax.open!r} is {len(ids)} tokens for this tokenizer; set "
            "`call_format.rendering: special`, which adds it to the vocabulary"
        )
    return ids[0]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode ids to exactly the text they stand for."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def decode_piece(tokenizer: Any, before: int, ids: Sequence[int]) -> str:
    """Decode ids that follow the token `before`, keeping a leading space.

    (Decoders of SentencePiece-like tokenizers drop the first space of what they are given.)
    """
    head = decode(tokenizer, [before])
    return decode(tokenizer, [before, *ids])[len(head) :]


def augmented_ids(
    tokenizer: Any, text: str, calls: Sequence[PlacedCall], syntax: CallSyntax
) -> tuple[list[int], list[int]]:
    """Ids of a text with calls inserted, and the kind of each: TEXT, CALL or RESULT.

    A call whose place is not a token border of this tokenizer splits the text there.
    """
    ids: list[int] = []
    kinds: list[int] = []

    def add(tokens: Sequence[int], kind: int) -> None:
        ids.extend(tokens)
        kinds.extend([kind] * len(tokens))

    tokens, starts = encode_document(tokenizer, text)
    border = {start: index for index, start in reversed(list(enumerate(starts)))}
    done_token, done_char = 0, 0
    for call in sorted(calls, key=lambda c: c.char_start):
        index = border.get(call.char_start)
        if index is None or index < done_token:
            add(encode_piece(tokenizer, text[done_char : call.char_start]), TEXT)
            tail = encode_piece(tokenizer, text[call.char_start :])
            tokens, done_token = tail, 0
            border = {}
        else:
            add(tokens[done_token:index], TEXT)
            done_token = index
        done_char = call.char_start
        pieces = call_pieces(call.tool, call.arguments, call.result or "", syntax)
        add(encode_pieces(tokenizer, pieces[:-1]), CALL)
        add(encode_piece(tokenizer, pieces[-1]), RESULT)
    add(tokens[done_token:], TEXT)
    return ids, kinds


def check_tokenizer(tokenizer: Any, syntax: CallSyntax, tools: Sequence[str]) -> None:
    """Refuse a tokenizer on which a call does not survive the round trip."""
    open_token(tokenizer, syntax)
    for tool in tools:
        before, after = "The total is", " 888 bottles."
        pieces = call_pieces(tool, 'q="Zürich", n=37 * 2.5', "1,888.5 (max)", syntax)
        text, _ = encode_document(tokenizer, before + after)
        left, _ = encode_document(tokenizer, before)
        call = encode_pieces(tokenizer, pieces)
        wanted = before + "".join(pieces) + after
        if text[: len(left)] != left or not text[len(left) :]:
            continue_ids = encode_piece(tokenizer, after)
        else:
            continue_ids = text[len(left) :]
        found = decode(tokenizer, [*left, *call, *continue_ids])
        if found != wanted:
            raise ConfigError(
                "a call does not survive this tokenizer: "
                f"{wanted!r} comes back as {found!r}; use a tokenizer that keeps case and spaces"
            )
