"""What the pages share: the frame with its policy, and escaping.

Every text that comes from a document, a model, a tool or the configuration is escaped, and a
page's own policy forbids any script but the one written into it and any request to elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from html import escape

from pipeline.report.assets import SCRIPT, STYLE

# Control characters, which HTML does not allow, and those that turn the direction of a text.
_HIDDEN = dict.fromkeys(
    (*(c for c in range(32) if c not in (9, 10)), *range(127, 160), *range(0x202A, 0x202F),
     *range(0x2066, 0x206A)), "·",
)  # fmt: skip


def document(title: str, body: str) -> str:
    """Return a whole page around a body that is HTML already."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title)} - Callsieve</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def safe(text: object) -> str:
    """Escape a text for HTML; control characters become `·`."""
    return escape(str(text).translate(_HIDDEN))


def words(name: object) -> str:
    """Write a name of ours (`max_steps`) in words, escaped."""
    return safe(str(name).replace("_", " "))


def counts(found: Mapping[str, int]) -> str:
    """Write counts per name, escaped: `finished 3, max steps 1`."""
    return ", ".join(f"{words(name)} {n:,}" for name, n in found.items())


def calls_text(calls: Mapping[str, int]) -> str:
    """Write calls per tool, escaped."""
    return ", ".join(f"{safe(tool)} {n:,}" for tool, n in calls.items())


def errors_text(errors: Mapping[str, Mapping[str, int]]) -> str:
    """Write errors per tool and kind, escaped."""
    return "; ".join(f"{safe(tool)}: {counts(kinds)}" for tool, kinds in errors.items())


def options(values: Iterable[str]) -> str:
    """Return the options of a filter; the first lets everything through."""
    own = (f'<option value="{safe(v)}">{words(v)}</option>' for v in values)
    return f'<option value="">all</option>{"".join(own)}'


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Return the row of figures at the top of a page: (value, what it is)."""
    cells = (f"<div class=tile><b>{value}</b><span>{name}</span></div>" for value, name in values)
    return f"<div class=tiles>{''.join(cells)}</div>"
