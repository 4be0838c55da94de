"""One headless Chromium for the tests of a file; they are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeloom.draw import html
from pipeloom.schedule import Timeline

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def browser() -> Iterator[Any]:
    """A running browser; skips the test, with the reason, where Playwright or Chromium is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield running
        finally:
            running.close()


class Opened:
    """A page opened from disk, offline, with what it said on the console and what it requested."""

    def __init__(self, running: Any, folder: Path, timelines: Timeline | Sequence[Timeline], **options: Any) -> None:
        self.file = folder / "page.html"
        page = {name: options.pop(name, None) for name in ("title", "bound", "limit")}
        page |= {name: options.pop(name) for name in ("below", "rows") if name in options}
        self.file.write_text(html(timelines, **page), encoding="utf-8")
        settings = {"viewport": {"width": 1280, "height": 800}, "accept_downloads": True, "offline": True} | options
        self.context = running.new_context(**settings)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.failures: list[str] = []
        self.page.on("requestfailed", lambda request: self.failures.append(f"{request.url}: {request.failure}"))
        self.page.goto(self.file.as_uri())

    def run(self, script: str, argument: Any = None) -> Any:
        """The value of a JavaScript function of one argument."""
        return self.page.evaluate(script, argument)

    def place(self, rank: int, at: int, pane: int = 0) -> tuple[float, float]:
        """Where the middle of a cell is in the window."""
        x, y = self.run(
            """([pane, rank, at]) => {
                const p = pipeloom.panes[pane], program = p.schedule.programs[rank];
                p.stage.scrollIntoView({block: "nearest"});
                const box = p.stage.getBoundingClientRect();
                const middle = (program.start[at] + program.end[at]) / 2;
                return [box.left + p.layout.x(middle, pipeloom.view), box.top + p.layout.top(rank) + p.layout.row / 4];
            }""",
            [pane, rank, at],
        )
        return x, y

    def close(self) -> None:
        self.context.close()
