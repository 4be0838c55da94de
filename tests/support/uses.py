"""A use of Pipeloom, as its pages describe it: commands and code that they print, run in a folder of the user's."""

from __future__ import annotations

import shlex
import shutil
from glob import glob
from pathlib import Path

from commands import pipeloom
from documents import blocks
from paths import ROOT

COLUMNS = 80


class Use:
    """Commands and code of the pages, in the order in which a user needs them.

    Attributes:
        pages: those that had to be opened, in order.
        commands: as they are printed there, without their comments.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages: list[str] = []
        self.commands: list[str] = []
        shutil.copytree(ROOT / "examples", folder / "examples")

    def text(self, page: str) -> str:
        """Return a page, which is then open."""
        if page not in self.pages:
            self.pages.append(page)
        return _path(page).read_text("utf-8")

    def printed(self, page: str, words: str, language: str) -> str:
        """Return the block of this language of a page that contains `words`; there is one."""
        self.text(page)
        (found,) = [block.text for block in blocks(_path(page)) if block.language == language and words in block.text]
        return found

    def code(self, page: str, words: str) -> str:
        """Return the Python block of a page that contains `words`."""
        return self.printed(page, words, "python")

    def run(self, page: str, beginning: str, more: str = "", *, wide: bool = False) -> str:
        """Run the command of a page that begins so, to its end, and return what it prints; no line is wider than 80 columns.

        Args:
            more: words added so that it ends soon, such as a smaller number of steps.
            wide: whether it prints text of a model, or a file, which is as wide as it is.
        """
        (line,) = [
            line
            for line in self.printed(page, beginning, "sh").replace("\\\n", " ").splitlines()
            if line.startswith(beginning)
        ]
        words = shlex.split(line, comments=True)
        self.commands.append(shlex.join(words))
        words, target = (words[:-2], words[-1]) if ">" in words else (words, "")
        return self._run([*words, *shlex.split(more)], target, wide)

    def python(self, name: str, text: str) -> str:
        """Save code as a file, run it, and return what it prints."""
        (self.folder / name).write_text(text, "utf-8")
        return self._run(["python", name], "", False)

    def _run(self, words: list[str], target: str, wide: bool) -> str:
        found = [path for word in words for path in sorted(glob(word, root_dir=self.folder)) or [word]]
        ended = pipeloom(*found[found[0] == "pipeloom" :], folder=self.folder, COLUMNS=str(COLUMNS))
        assert ended.returncode == 0, f"{shlex.join(words)}\n{ended.stdout}\n{ended.stderr}"
        if target:
            (self.folder / target).write_text(ended.stdout, "utf-8")
        lines = ended.stderr.splitlines() + ended.stdout.splitlines() * (not target and not wide)
        wider = [line for line in lines if len(line.replace(str(self.folder), ".")) > COLUMNS]  # a path is not broken
        assert not wider, "\n".join([shlex.join(words), *wider])
        return ended.stdout


def _path(page: str) -> Path:
    return ROOT / page if page == "README.md" else ROOT / "docs" / page
