"""The few-shot prompts: one file per tool, read as written, told apart by their content.

A file holds an instruction and demonstrations whose calls have no results; the text `x` is added by
the program after `Input:` and `Output:`, never through a template, so nothing in a text can break
it. Calls in the file are written in the `text` form and rewritten for the `special` form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.calls import CallSyntax, parse_call, render
from pipeline.errors import ConfigError
from pipeline.paths import BUNDLED, PROJECT, find


@dataclass(frozen=True)
class Prompt:
    """The few-shot prompt P(x) of a tool, around the text x: `head` + before + x + between + x."""

    tool: str
    head: str
    before: str = "\n\nInput:\n"
    between: str = "\n\nOutput:\n"


def prompt_file(folder: str | Path, tool: str) -> Path:
    """Where the prompt of a tool is: `FOLDER/Tool.txt`, one's own before the bundled one."""
    return find(Path(folder) / f"{tool}.txt")


def _searched(folder: str | Path) -> str:
    """The folders in which `find` looks for a prompt, for people."""
    own = Path(folder).absolute()
    if Path(folder).parts[:1] and Path(folder).parts[0] in BUNDLED and own != PROJECT / folder:
        return f"{own}, nor in {PROJECT / folder}"
    return str(own)


def load_prompt(folder: str | Path, tool: str, syntax: CallSyntax) -> Prompt:
    """Read the prompt of a tool. Raises ConfigError when it is missing or shows no call."""
    path = prompt_file(folder, tool)
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no prompt for the tool {tool} in {_searched(folder)}; write an "
            f"instruction and three or four examples with calls such as [{tool}(...)] into it"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the prompt is not UTF-8 text") from None
    rewritten, calls = _rewrite(text, tool, syntax)
    if not calls:
        raise ConfigError(f"{path}: the prompt shows no call of the form [{tool}(...)]")
    return Prompt(tool, rewritten)


def _rewrite(text: str, tool: str, syntax: CallSyntax) -> tuple[str, int]:
    """Write the calls of a prompt in the syntax of the run; returns the text and their number."""
    out, position, calls = [], 0, 0
    for match in re.finditer(rf" ?\[(?={re.escape(tool)}\()", text):
        call = parse_call(text[match.end() :])
        if call is None or match.start() < position:
            continue
        end = match.end() + call.end
        if text[end : end + 1] != "]":
            continue
        out.append(text[position : match.start()])
        written = render(call.tool, call.arguments, None, syntax)
        out.append(written if text[match.start()] == " " else written.lstrip(" "))
        position, calls = end + 1, calls + 1
    return "".join(out) + text[position:], calls
