"""A command line run in this process, and what it answers."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from pipeloom.cli import app
from pipeloom.cli.failures import exit_code_of

Workers = Callable[[Callable[[], int]], int]
"""Stands for `start_workers`: gets a function that runs the command line again, and returns the exit code of the workers."""


@dataclass(frozen=True)
class Answer:
    """What a command line gave: exit code, seconds of CPU time, what it printed, and the traceback of an exception inside."""

    code: int
    seconds: float
    out: str
    err: str
    trace: str = ""

    @property
    def said(self) -> str:
        """All that it printed."""
        return self.out + self.err


def answer_of(words: Sequence[str], workers: Mapping[str, Workers]) -> Answer:
    """Run a command line; `workers`: name of a module -> what replaces its `start_workers`."""
    traces: list[str] = []

    def run() -> Any:
        try:
            return app(list(words), prog_name="pipeloom", standalone_mode=False)
        except Exception:
            traces.append(traceback.format_exc())
            raise

    def command() -> int:
        return exit_code_of(run, as_json="--json" in words, given=words)

    out = io.StringIO()
    with (
        contextlib.ExitStack() as replaced,
        tempfile.TemporaryFile("w+", errors="replace") as err,  # with a descriptor, which faulthandler needs
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        for module, work in workers.items():
            replaced.enter_context(patch(f"{module}.start_workers", lambda *_, work=work: work(command)))
        begun = time.process_time()
        code = command()
        seconds = time.process_time() - begun
        err.seek(0)
        return Answer(code, seconds, out.getvalue(), err.read(), traces[-1] if traces else "")


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    """The working directory is `folder`, so that relative paths do no harm."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
