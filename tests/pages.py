"""Pages under test: read by a parser, and opened in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page(HTMLParser):
    """The tags, attributes and visible words of a page."""

    def __init__(self, page: Path | str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(page if isinstance(page, str) else page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def dump_dom(page: Path, fragment: str = "", *options: str) -> str:
    """Load a page in a real browser and return what its script has made of it."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
        f"--user-data-dir={page.parent / 'browser'}", *options, page.as_uri() + fragment,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def choose(page: Path, field: str, value: str) -> str:
    """Do as a visitor does who sets a field of a page; returns what its status lines say then."""
    driver = page.with_name("driver.html")
    driver.write_text(
        f"""<iframe src="{page.name}"></iframe><p></p><script>
        addEventListener("load", () => {{
          const inner = document.querySelector("iframe").contentDocument;
          const field = inner.getElementById({field!r});
          field.value = {value!r};
          field.dispatchEvent(new Event("input"));
          const said = [...inner.querySelectorAll("[role=status]")].map((e) => e.textContent);
          document.querySelector("p").textContent = said.join("; ");
        }});</script>""",
        encoding="utf-8",
    )
    files = ("--allow-file-access-from-files", "--disable-web-security")
    return Page(dump_dom(driver, "", *files)).words.strip()
