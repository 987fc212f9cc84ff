"""What is wrong with a value of a configuration, and what is allowed there, in plain words.

The checks are pydantic's; what is said of them comes from the types of the settings.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import MinLen
from pydantic.fields import FieldInfo

from pipeline.errors import unknown_key

_LONGEST = 80  # characters of a value that are shown


@dataclass(frozen=True)
class Example:
    """In the type of a setting: how a value can be written."""

    text: str


@dataclass(frozen=True)
class Place:
    """Where a value stands: its keys, its type, and the section around it."""

    keys: tuple[str, ...]
    hint: Any
    section: Any

    @property
    def path(self) -> str:
        return ".".join(self.keys)


def refusals(errors: Sequence[Any], root: Any, under: str | None = None) -> list[str]:
    """Say what is wrong, a line for each place; `errors` are those of pydantic's ValidationError.

    `root` is the type that was wanted, `under` the key that it stands under. Where something is
    wrong inside a value, nothing is said of the value as a whole.
    """
    found: dict[tuple[str, ...], str] = {}
    for error in errors:
        there = place(root, error["loc"])
        keys = there.keys if under is None else (under, *there.keys)
        found.setdefault(keys, _refusal(error, dataclasses.replace(there, keys=keys)))
    inside = {keys[:n] for keys in found for n in range(len(keys))}
    return [line for keys, line in found.items() if keys not in inside]


def place(root: Any, location: Sequence[Any]) -> Place:
    """Find a value by pydantic's `location`, where the name of a choice follows its key."""
    keys: list[str] = []
    whole = hint = root
    section = None
    for part in location:
        choices = choices_of(hint)
        if len(choices) > 1:
            hint = next((own for own in choices if part in _names(own)), hint)
        else:
            keys.append(str(part))
            section = _bare(choices[0])
            whole = hint = _inside(section, str(part))
    return Place(tuple(keys), whole, section)


def choices_of(hint: Any) -> list[Any]:
    """The types that a value can have, None aside."""
    bare = _bare(hint)
    if get_origin(bare) in (Union, UnionType):
        return [own for own in get_args(bare) if own is not NoneType]
    return [hint]


def _bare(hint: Any) -> Any:
    """A type without its notes."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def sections_in(hint: Any) -> list[Any]:
    """The dataclasses inside a type such as `Mapping[str, Section]` or `A | B | None`."""
    if dataclasses.is_dataclass(hint):
        return [hint]
    return [section for argument in get_args(hint) for section in sections_in(argument)]


def _names(choice: Any) -> tuple[Any, ...]:
    """What pydantic calls a choice: by its tag, its class, or the type of its value."""
    if dataclasses.is_dataclass(choice):
        tags = [f.default for f in dataclasses.fields(choice) if f.name in ("name", "kind")]
        return (getattr(choice, "__name__", ""), *tags)
    name = getattr(_bare(choice), "__name__", "")
    return (name, f"constrained-{name}")


def _inside(hint: Any, key: str) -> Any:
    """The type of what stands under a key of a section, a mapping or a list."""
    bare = _bare(hint)
    if dataclasses.is_dataclass(bare):
        return get_type_hints(bare, include_extras=True).get(key, Any)
    inner = [own for own in get_args(bare) if own is not ...]
    return inner[-1] if inner else Any


# -- what is said ---------------------------------------------------------------------------------


def _refusal(error: Any, there: Place) -> str:
    value = error.get("input")
    if error["type"] == "value_error":  # of a check of our own
        return f"`{there.path}`: {error['ctx']['error']}"
    if error["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        return _wrong_choice(value, there, error["ctx"]["discriminator"].strip("'"))
    if error["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
        return unknown_key(there.path, [f.name for f in dataclasses.fields(there.section)])
    if error["type"] in {"missing", "missing_argument"}:
        return f"`{there.path}` is missing; it has to be {in_words(there.hint)}"
    return (
        f"`{there.path}` = {shown(value)}: has to be {in_words(there.hint)}{_advice(value, there)}"
    )


def _wrong_choice(value: Any, there: Place, tag: str) -> str:
    """What to say of a mapping whose tag (`name`, `kind`) is none of those that there are."""
    what = "tool" if tag == "name" else tag
    allowed = [str(getattr(choice, tag)) for choice in choices_of(there.hint)]
    path = f"{there.path}.{tag}"
    if tag not in value:
        return f"`{path}` is missing. Allowed: {', '.join(allowed)}"
    close = difflib.get_close_matches(str(value[tag]), allowed, 1, 0.55)
    hint = f"; did you mean {close[0]}?" if close else "."
    return f"`{path}`: {shown(value[tag])} is no {what}{hint} Allowed: {', '.join(allowed)}"


def shown(value: Any) -> str:
    """A value as a configuration writes it, shortened."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def in_words(hint: Any) -> str:
    """What a value of a type is, such as `a whole number from 1 on`."""
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    tag = next((own.discriminator for own in notes if isinstance(own, FieldInfo)), None)
    choices = choices_of(hint)
    if tag:
        kinds = ", ".join(getattr(choice, str(tag)) for choice in choices)
        return f"a mapping whose `{tag}` is one of {kinds}"
    bare = choices[0] if len(choices) == 1 else hint
    if len(choices) > 1:
        words = ", or ".join(in_words(choice) for choice in choices)
    elif bare is not hint:
        words = in_words(bare)
    else:
        words = _one_in_words(hint, notes)
    is_optional = NoneType in get_args(hint)
    example = next((f", e.g. {own.text}" for own in notes if isinstance(own, Example)), "")
    return f"{words}{', or null' if is_optional else ''}{example}"


def _one_in_words(hint: Any, notes: Sequence[Any]) -> str:
    bare = _bare(hint)
    filled = any(isinstance(note, MinLen) for note in notes)
    if dataclasses.is_dataclass(bare):
        return f"a mapping (keys: {', '.join(f.name for f in dataclasses.fields(bare))})"
    if get_origin(bare) is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(bare))
    if get_origin(bare) is tuple:
        items = "a list of at least one item" if filled else "a list"
        return f"{items}, each item {in_words(_inside(bare, ''))}"
    if get_origin(bare) is not None and issubclass(get_origin(bare), Mapping):
        inner = _inside(bare, "")
        return "a mapping" if inner is Any else f"a mapping, each value {in_words(inner)}"
    plain = {
        bool: "true or false",
        str: "text that is not empty" if filled else "text",
        int: "a whole number",
        float: "a number",
    }
    return f"{plain.get(bare, 'a value')}{_range(notes, 1 if bare is int else None)}"


def _range(notes: Sequence[Any], step: int | None) -> str:
    """The bounds of a number; whole numbers (with a `step` of 1) go from one on."""
    bounds: dict[str, Any] = {}
    for note in notes:
        for name in ("ge", "gt", "le", "lt"):
            if getattr(note, name, None) is not None:
                bounds[name] = getattr(note, name)
    if step is not None and "gt" in bounds:
        bounds["ge"] = bounds.pop("gt") + step
    low = f" from {bounds['ge']:g}" if "ge" in bounds else ""
    if "gt" in bounds:
        low = f" above {bounds['gt']:g}"
    if "lt" in bounds:
        return f"{low}{' and' if low else ''} below {bounds['lt']:g}"
    if "le" in bounds:
        return f"{low} to {bounds['le']:,.10g}"
    return f"{low} on" if "ge" in bounds else low


def _advice(value: Any, there: Place) -> str:
    """How to write what was probably meant."""
    kinds = {_kind(choice) for choice in choices_of(there.hint)}
    fields = dataclasses.fields(there.section) if dataclasses.is_dataclass(there.section) else ()
    own = next((f for f in fields if f.name == there.keys[-1]), None)
    if value is None and own is not None and _has_default(own):
        return "; leave it out for its default"
    if isinstance(value, bool | int | float) and str in kinds:
        return f"; put it in quotes: '{shown(value)}'"
    if isinstance(value, float) and int in kinds and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, str) and kinds & {int, float} and _is_number(value):
        return "; write it without quotes"
    if tuple in kinds and isinstance(value, str) and _kind(_inside(there.hint, "")) is str:
        return f"; a list of one is written [{shown(value)}]"
    if isinstance(value, str) and Literal in kinds:
        allowed = [str(own) for choice in choices_of(there.hint) for own in get_args(choice)]
        close = difflib.get_close_matches(value, allowed, 1)
        return f"; did you mean {close[0]!r}?" if close else ""
    return ""


def _kind(hint: Any) -> Any:
    bare = _bare(hint)
    return get_origin(bare) or bare


def _has_default(own: dataclasses.Field[Any]) -> bool:
    return own.default is not dataclasses.MISSING or own.default_factory is not dataclasses.MISSING


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
