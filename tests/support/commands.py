"""The command as a fork of the test's process, its workers as forks of it: torch, which takes seconds, is imported once."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import IO, Any

import torch

from pipeloom.cli import main
from pipeloom.train.workers import launch

_FORK = get_context("fork")
_INSTALLED = sys.prefix, str(Path(__file__).resolve().parents[2])  # a clone may itself be in the temporary folder


class _Process:
    """A fork that runs the command, with what tests and the launcher use of `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], out: int, err: int, prepare: Callable[[], None]
    ) -> None:
        self._process = _FORK.Process(target=_work, args=(list(words), dict(environment), out, err, prepare))
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if timeout is not None and self._process.exitcode is None:
            raise subprocess.TimeoutExpired("pipeloom", timeout)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedWorker(_Process):
    """A worker of the launcher; it inherits none of the other workers' sockets, so that they see its end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        stdout: int | None,
        preexec_fn: Callable[[], None],
        pass_fds: Collection[int],
        **_: Any,
    ) -> None:
        read, write = os.pipe()

        def prepare() -> None:
            Path("/proc/self/comm").write_text(f"rank {env['RANK']}")  # its environment there is its parent's
            preexec_fn()
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if int(name) not in pass_fds and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                        os.close(int(name))

        out, err = (write, write) if stdout == subprocess.PIPE else (1, 2)
        super().__init__(command[command.index("pipeloom") + 1 :], env, out, err, prepare)
        os.close(write)
        self.stdout = os.fdopen(read, errors="replace")


FORKING = SimpleNamespace(
    Popen=ForkedWorker, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT, DEVNULL=subprocess.DEVNULL
)
"""What the launcher uses of `subprocess`, with workers that are forked."""


class Command(_Process):
    """`pipeloom` with some words, or `python FILE`, in a folder and with an environment of its own; `prepare` is called first."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path | None = None,
        prepare: Callable[[], None] | None = None,
        **variables: str,
    ) -> None:
        kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        self._output: list[IO[str]] = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(2)]  # noqa: SIM115

        def begin() -> None:
            launch.subprocess = FORKING  # type: ignore[assignment]
            if folder is not None:
                os.chdir(folder)
            if prepare is not None:
                prepare()

        out, err = (file.fileno() for file in self._output)
        super().__init__(words, {**kept, **variables}, out, err, begin)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has printed once it has ended."""
        self.wait(timeout)
        for file in self._output:
            file.seek(0)
        out, err = (file.read() for file in self._output)
        return out, err


def pipeloom(
    *words: str, folder: Path | None = None, timeout: float = 600.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. Raises subprocess.TimeoutExpired."""
    command = Command(words, folder, None, **variables)
    try:
        out, err = command.communicate(timeout)
    finally:
        command.kill()  # its workers end with it
    return subprocess.CompletedProcess(words, command.returncode or 0, out, err)


def _work(words: list[str], environment: dict[str, str], out: int, err: int, prepare: Callable[[], None]) -> None:
    gc.freeze()  # what the test's process holds need not be looked through
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, number in ((out, 1), (err, 2)):
        os.dup2(descriptor, number)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", 1) for number in (1, 2))
    torch.set_num_threads(1)
    for name, file in [(name, str(getattr(module, "__file__", ""))) for name, module in sys.modules.items()]:
        if gettempdir() in file and not file.startswith(_INSTALLED):
            del sys.modules[name]  # of another test's folder
    prepare()
    if words[:1] == ["python"]:
        sys.path.insert(0, str(Path(words[1]).parent))
        runpy.run_path(words[1], run_name="__main__")
    else:
        main(words)
