"""A text with live calls on a terminal, as it is written.

A call is shown when its result has been inserted, in colour; until then nothing of it is. What
comes after the text (the calls with their outcome) is the same as in `terminal.print_generation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from pipeline.report.terminal import call_style, plain, print_outcomes


class GenerationStream:
    """Prints a prompt and then what is new of its continuation; `on_text` is for `generate`."""

    def __init__(self, prompt: str, console: Console | None = None) -> None:
        self.console = console or Console()
        self.prompt: str | None = prompt  # None when it has been printed
        self.shown = 0  # characters of the continuation

    def on_text(self, index: int, text: str, calls: Sequence[Any]) -> None:
        """Show the text from where it was left; half a character waits for its other half."""
        if self.prompt is not None:
            self._print(Text(plain(self.prompt), style="dim"))
            self.prompt = None
        whole = text.rstrip("\ufffd")
        for call in sorted(calls, key=lambda call: call.start):
            if call.start >= self.shown and call.end <= len(whole):
                self._print(Text(plain(whole[self.shown : call.start])))
                self._print(Text(plain(whole[call.start : call.end]), style=call_style(call)))
                self.shown = call.end
        self._print(Text(plain(whole[self.shown :])))
        self.shown = max(self.shown, len(whole))

    def finish(self, made: Any) -> None:
        """Show what is left of a finished `generation.Generation`, and its calls."""
        self.on_text(0, made.text, made.calls)
        self._print(Text(plain(made.text[self.shown :])))
        self.console.print()
        print_outcomes(made, self.console)

    def _print(self, text: Text) -> None:
        self.console.print(text, end="", soft_wrap=True)
        self.console.file.flush()
