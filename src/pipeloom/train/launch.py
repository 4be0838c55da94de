"""Starts the workers of one machine, watches them, and ends with the exit code of the one that failed first.

The parent needs no torch. It opens the rendezvous port itself and hands the open socket to rank 0, so that no other
program can take the port in between.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeloom.errors import DistributedError, Preempted, UsageError
from pipeloom.train.failures import FAILURES, Failure, first_failure, read_failures, tell_peers

INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1
_KEPT_LINES = 400


@dataclass
class Patience:
    """Seconds that the launcher waits.

    Attributes:
        reports: for the other workers to end by themselves, once one has failed.
        term: between SIGTERM and SIGKILL.
        poll: between two looks at the workers.
    """

    reports: float = 10.0
    term: float = 3.0
    poll: float = 0.03


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[str]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    reader: threading.Thread | None = None


@dataclass
class _Signals:
    """What the parent was told while it waits."""

    interrupts: int = 0
    terminations: int = 0

    def install(self) -> Callable[[], None]:
        """Counts SIGINT, SIGTERM and SIGHUP from now on; returns what puts the old handlers back."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def handle(number: int, frame: object) -> None:
            if number == signal.SIGINT:
                self.interrupts += 1
            else:
                self.terminations += 1

        old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

        def restore() -> None:
            for number, handler in old.items():
                signal.signal(number, handler)

        return restore


def launch(
    command: Sequence[str],
    world_size: int,
    *,
    environment: Mapping[str, str] | None = None,
    patience: Patience | None = None,
) -> int:
    """Runs `world_size` copies of `command`, each with torchrun's variables in its environment; returns the exit code.

    Rank 0 writes to this process's stdout and stderr. What the others write is shown, with their rank in front, if a
    worker fails. The exit code is 0, that of the first worker that failed (6 for one that died by a signal), 75 after a
    SIGTERM that the workers obeyed, or 130 after SIGINT. No worker outlives this call, nor this process.

    Raises DistributedError when MASTER_PORT is set and in use.
    """
    patience = patience or Patience()
    base = dict(os.environ if environment is None else environment)
    listener = _listen(base.get("MASTER_PORT"))
    signals = _Signals()
    restore = signals.install()
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
        try:
            with listener:
                port = listener.getsockname()[1]
                for rank in range(world_size):
                    workers.append(_start(command, rank, world_size, base, (port, listener.fileno()), folder))
            for worker in workers:
                _read_output(worker)
            return _watch(workers, signals, patience, Path(folder))
        finally:
            _end(workers, 0.0)
            restore()


def _listen(wanted: str | None) -> socket.socket:
    if wanted is not None and not (wanted.isdigit() and int(wanted) < 65536):
        raise UsageError(f"MASTER_PORT is {wanted!r}; it must be a port number between 1 and 65535, or not be set")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", int(wanted or 0)))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise DistributedError(
            f"port {wanted} (MASTER_PORT) cannot be used: {error.strerror}; choose another, or unset it for a free one"
        ) from None
    return listener


def _start(
    command: Sequence[str], rank: int, world: int, base: Mapping[str, str], meeting: tuple[int, int], folder: str
) -> _Worker:
    port, descriptor = meeting
    environment = {
        **base,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        FAILURES: folder,
    }
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a lost peer prints pages of C++ frames
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    if rank == 0:
        environment["PIPELOOM_MASTER_FD"] = str(descriptor)
    process = subprocess.Popen(
        list(command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.PIPE,
        stderr=None if rank == 0 else subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(descriptor,) if rank == 0 else (),
        preexec_fn=_bind_to_parent(os.getpid()),
    )
    return _Worker(rank, process)


def _bind_to_parent(parent: int) -> Callable[[], None]:
    """What a worker does before its program starts: die with the parent, and leave Ctrl-C to it."""
    library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def bind() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if library is not None:
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(DistributedError.exit_code)

    return bind


def _read_output(worker: _Worker) -> None:
    stream = worker.process.stdout
    if stream is None:
        return

    def read() -> None:
        for line in stream:
            worker.lines.append(line.rstrip("\n"))

    worker.reader = threading.Thread(target=read, name=f"output of rank {worker.rank}", daemon=True)
    worker.reader.start()


def _watch(workers: list[_Worker], signals: _Signals, patience: Patience, folder: Path) -> int:
    """Waits for the workers' end, whichever way it comes; returns the exit code."""
    ended: list[_Worker] = []
    forwarded = False
    while len(ended) < len(workers):
        if signals.interrupts:
            _end(workers, patience.term)
            return INTERRUPTED
        if signals.terminations > 1:
            _end(workers, 0.0)
            return Preempted.exit_code
        if signals.terminations and not forwarded:
            forwarded = True
            _signal(workers, signal.SIGTERM)
        for worker in workers:
            if worker not in ended and worker.process.poll() is not None:
                ended.append(worker)
        obeyed = (0, Preempted.exit_code, *((-signal.SIGTERM,) if forwarded else ()))
        if any(worker.process.returncode not in obeyed for worker in ended):
            return _fail(workers, ended, signals, patience, folder)
        time.sleep(patience.poll)
    return Preempted.exit_code if any(worker.process.returncode for worker in ended) else 0


def _fail(workers: list[_Worker], ended: list[_Worker], signals: _Signals, patience: Patience, folder: Path) -> int:
    """Lets the others report, ends them, says who was first; returns that one's exit code."""
    dead = [worker for worker in ended if (worker.process.returncode or 0) < 0]
    for worker in dead:
        tell_peers(folder, f"rank {worker.rank} (process {worker.process.pid}) was {_fate(worker.process.returncode)}")
    reaped = {worker.rank: worker.process.returncode for worker in ended}
    until = time.monotonic() + patience.reports
    while time.monotonic() < until and not signals.interrupts and len(reaped) < len(workers):
        for worker in workers:
            if worker.rank not in reaped and worker.process.poll() is not None:
                reaped[worker.rank] = worker.process.returncode
        time.sleep(patience.poll)
    _end(workers, patience.term)
    for worker in workers:
        if worker.reader is not None:
            worker.reader.join(timeout=1.0)
    failures = read_failures(folder)
    rank = first_failure(reaped, failures)
    _show(workers, rank, failures)
    code = reaped[rank]
    others = len(workers) - 1
    stopped = f"; the other {others} were stopped" if others > 1 else "; the other one was stopped" if others else ""
    process = workers[rank].process.pid
    print(
        f"pipeloom: rank {rank} (process {process}) failed first: {_fate(code)}{stopped}", file=sys.stderr, flush=True
    )
    return code if code > 0 else DistributedError.exit_code


def _show(workers: list[_Worker], first: int, failures: Mapping[int, Failure]) -> None:
    """What the workers wrote, the first to fail before the others, each text once. Rank 0 has written its own."""
    shown = {failures[0].text.strip()} if 0 in failures else set()
    for worker in sorted(workers, key=lambda worker: (worker.rank != first, worker.rank)):
        text = "\n".join(worker.lines).strip()
        if text and text not in shown:
            shown.add(text)
            head = f"[rank {worker.rank}] "
            lines = (line if line.startswith(head) else head + line for line in text.splitlines())
            print("\n".join(lines), file=sys.stderr, flush=True)


def _fate(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _signal(workers: Sequence[_Worker], number: signal.Signals) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(number)


def _end(workers: Sequence[_Worker], grace: float) -> None:
    """SIGTERM, then SIGKILL after `grace` seconds; returns when all are gone."""
    if grace > 0:
        _signal(workers, signal.SIGTERM)
        until = time.monotonic() + grace
        while time.monotonic() < until and any(worker.process.poll() is None for worker in workers):
            time.sleep(0.02)
    _signal(workers, signal.SIGKILL)
    for worker in workers:
        worker.process.wait()
