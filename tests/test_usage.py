"""What commands say of themselves: help, examples, and the usage of the command that was meant."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

import pytest

from pipeline.cli import _parser, main
from pipeline.usage import EXAMPLES


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of all its verbs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from commands(verb)


ALL = {parser.prog.removeprefix("callsieve").strip(): parser for parser in commands(_parser())}


@pytest.mark.parametrize("command", sorted(ALL))
def test_every_option_is_explained_with_its_default(command: str) -> None:
    written = " ".join(ALL[command].format_help().split())
    for action in ALL[command]._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        assert action.help, (command, action.dest)
        if action.default not in (None, False, argparse.SUPPRESS, (0, 1)):
            assert f"(default: {action.default})" in written, (command, action.dest)
    assert "default: None" not in written and "default: False" not in written


@pytest.mark.parametrize("command", sorted(ALL))
def test_every_command_has_an_example_that_can_be_read(command: str) -> None:
    assert f"Example: callsieve {EXAMPLES[command]}" in ALL[command].format_help()
    example = EXAMPLES[command].partition(" < ")[0]
    found, rest = _parser().parse_known_args(shlex.split(example))
    assert found.run is not None
    assert not rest or found.overrides


def test_there_is_no_example_of_a_command_that_is_not_there() -> None:
    assert set(EXAMPLES) == set(ALL)


@pytest.mark.parametrize(
    ("line", "command", "message"),
    [
        ("tools call Calculator 1 2", "tools call", "unrecognised arguments: 2"),
        ("tools call Calculator", "tools call", "arguments are required: arguments"),
        ("tools list Calculator", "tools list", "unrecognised arguments: Calculator"),
        ("tools", "tools", "required: WHAT"),
        ("tools cal", "tools", "invalid choice: 'cal'"),
        ("agent demo stock grid", "agent demo", "unrecognised arguments: grid"),
        ("agent parse", "agent parse", "required: --protocol"),
        ("status runs/a runs/b", "status", "unrecognised arguments: runs/b"),
        ("bench score --pair x", "bench", "invalid int value: 'x'"),
        ("show runs/a -n 0", "show", "'0' is not a number from 1 on"),
        ("", "", "required: COMMAND"),
    ],
)
def test_a_wrong_command_shows_how_the_one_that_was_meant_is_used(
    line: str, command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    out, err = capsys.readouterr()
    name = f"callsieve {command}".strip()
    assert not out and err.startswith(f"usage: {name} [-h]")
    assert f"\n{name}: " in err and message in err
    assert err.endswith(f"\nexample: callsieve {EXAMPLES[command]}\n")


def test_help_of_the_benches_says_what_each_compares() -> None:
    written = ALL["bench"].format_help()
    for name in ("ingest", "sample", "score", "train", "agent"):
        assert f"\n  {name} " in written
    assert "(2,000 documents)" in written and "Trainer with padded batches" in written
