"""Blocks of documents, and the way in which tests run them: in the test's own process."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from typer.testing import CliRunner

from pipeloom.cli import app
from pipeloom.errors import PipeloomError

_FENCE = re.compile(r"(?:^<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: the line on which it begins, its language, its text, and the HTML comment right before it."""

    line: int
    language: str
    text: str
    comment: str

    @property
    def skipped(self) -> bool:
        """Return whether the comment says why the block cannot run."""
        return self.comment.startswith("not run: ")


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text("utf-8")
    return [
        Block(text.count("\n", 0, at.start(2)) + 1, at[2].replace("bash", "sh"), at[3], at[1] or "")
        for at in _FENCE.finditer(text)
    ]


def run_console(text: str, changes: Sequence[tuple[str, str]]) -> str:
    """Run the commands of a block in the working directory, and return what they print on standard output.

    A command whose comment begins with "exit code N" must be refused with this code, and prints its error.

    Args:
        changes: (pattern, words): words that are added to the commands in which the pattern is found.
    """
    printed = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        added = [word for pattern, more in changes if re.search(pattern, line) for word in shlex.split(more)]
        variables = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, variables[name] = words.pop(0).partition("=")
        words, target = (words[:-2], words[-1]) if ">" in words else (words, "")
        words = [path for word in words for path in sorted(glob(word)) or [word]]
        output = _run(words + added, variables, line) if words else ""
        if target:
            Path(target).write_text(output, "utf-8")
        printed.append(output)
    return "".join(printed)


def _run(words: Sequence[str], variables: dict[str, str], line: str) -> str:
    if words[0] == "python":
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(words[1], run_name="__main__")
        return output.getvalue()
    assert words[0] == "pipeloom", line
    result = CliRunner(env=variables).invoke(app, words[1:])
    error = result.exception if isinstance(result.exception, PipeloomError) else None
    refused = re.search(r"# exit code (\d+)", line)
    code = result.exit_code if error is None else error.exit_code
    assert code == int(refused[1] if refused else 0), f"{line}\n{result.output}\n{result.exception!r}"
    return result.stdout if error is None else f"{result.stdout}{error}\n"


def run_python(rank: int, text: str, prepare: Callable[[], dict[str, Any]]) -> str:
    """Run a block on one rank of a process group, with the names that `prepare` returns; return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        names = prepare()
        dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None  # there is a group already
        exec(compile(text, "<block>", "exec"), names)
    return output.getvalue()
