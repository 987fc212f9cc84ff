"""Instruction files: versioned text in `data/agent`, with nothing volatile in them.

`{tools}` marks where the catalogue of tools goes; it is the only thing that is filled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.tools.arguments import linear_template
from pipeline.tools.base import ToolSpec

FOLDER = Path(__file__).resolve().parents[2] / "data" / "agent"


def load_instructions(name: str) -> str:
    """Read the instruction file `name` (for example `react-v1`).

    Raises ConfigError naming the files there are.
    """
    path = instruction_file(name)
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in FOLDER.glob("*.md")))
        raise ConfigError(f"instructions {name!r} do not exist; there are: {there}")
    return path.read_text(encoding="utf-8").strip()


def instructions_for(kind: str, family: str = "", version: str = "v1") -> str:
    """Read `FAMILY-KIND-VERSION`, or `KIND-VERSION` when the family has no file of that kind."""
    return load_instructions(name_for(kind, family, version))


def name_for(kind: str, family: str = "", version: str = "v1") -> str:
    """The name of the file that `instructions_for` reads."""
    special = f"{family}-{kind}-{version}"
    own = bool(family) and instruction_file(special).is_file()
    return special if own else f"{kind}-{version}"


def instruction_file(name: str) -> Path:
    """Where the instruction file `name` is."""
    return FOLDER / f"{name}.md"


def catalogue_text(specs: Sequence[ToolSpec], protocol: str) -> str:
    """Describe the tools in words, one a line, in the form in which the protocol calls them."""
    lines = []
    for spec in specs:
        form = linear_template(spec)
        if protocol == "react":
            form = f"{spec.name}[{form[len(spec.name) + 1 : -1]}]"
        lines.append(f"- {form}: {spec.description}")
    return "\n".join(lines)


def system_text(instructions: str, specs: Sequence[ToolSpec], protocol: str) -> str:
    """Put the tools in words where the instructions say `{tools}`, else after them.

    In `chat` the tools go with the request instead.
    """
    listed = catalogue_text(specs, protocol)
    if "{tools}" in instructions:
        return instructions.replace("{tools}", listed or "(none)")
    if protocol not in ("react", "inline") or not specs or not instructions:
        return instructions
    return f"{instructions}\n\nTools:\n{listed}"
