"""Launcher: starts the workers of one machine, watches them, and returns the exit code of the one that failed first.

The parent does not import torch, and opens no listening socket: the workers rendezvous through a file in a folder of mode 0700,
and the socket pairs of their control plane are created here, before the workers start. Only gloo listens, on the loopback
interface of a network namespace that the workers alone use (`private_network`).
"""

from __future__ import annotations

import contextlib
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

from pipeloom.errors import INTERRUPTED, DistributedError, Preempted, UsageError, printable
from pipeloom.runtime.health.links import LINKS, neighbours
from pipeloom.runtime.health.watchdog import NOTICE
from pipeloom.train.workers.failures import FAILURES, OBEYED, STORE, WorkerFailure, first_failure, read_failures
from pipeloom.train.workers.network import NETWORK, Network, allow_descriptors, private_network, wanted

_PR_SET_PDEATHSIG = 1
_KEPT_LINES = 400
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Patience:
    """Times, in seconds, that the launcher waits.

    Attributes:
        reports: time for the other workers to end by themselves after one has failed.
        term: time between SIGTERM and SIGKILL, after Ctrl-C.
        poll: time between two polls of the workers.
    """

    reports: float = 3.0
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
    """Signals that the parent has received.

    Attributes:
        ends: SIGINT, SIGTERM and SIGHUP. The first one decides how the run ends; a second one ends it at once.
        save: whether a SIGUSR1 is still to be passed on.
    """

    ends: list[int] = field(default_factory=list)
    save: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code of a run that ends as requested."""
        return INTERRUPTED if self.ends[:1] == [signal.SIGINT] else Preempted.exit_code

    def install(self) -> Callable[[], None]:
        """Note signals from now on. Return a function that restores the old handlers.

        If a signal to end has arrived, that function makes the process ignore further ones: it is about to end, with an exit
        code that they must not change.
        """
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def handle(number: int, frame: object) -> None:
            if number == signal.SIGUSR1:
                self.save = True
            else:
                self.ends.append(number)

        old = {number: signal.signal(number, handle) for number in (*_ENDING, signal.SIGUSR1)}

        def restore() -> None:
            for number, handler in old.items():
                signal.signal(number, signal.SIG_IGN if self.ends and number in _ENDING else handler)

        return restore


def launch(
    command: Sequence[str],
    world_size: int,
    *,
    environment: Mapping[str, str] | None = None,
    patience: Patience | None = None,
    obedient: bool = False,
) -> int:
    """Run `world_size` copies of `command`, each with torchrun's variables in its environment; return the exit code.

    Rank 0 writes to this process's stdout and stderr. The output of the others is shown, each line with its rank, if a worker
    fails. The exit code is 0, that of the first worker that failed (6 for one killed by a signal), 75 after a SIGTERM that the
    workers obeyed, or 130 after SIGINT. A second signal kills the workers. SIGUSR1 is passed on. No worker outlives this call,
    nor this process.

    Several workers get a private network with nothing but a loopback interface, unless `environment` has
    PIPELOOM_NETWORK=host: then they use the machine's.

    Args:
        environment: variables of the workers; None: those of this process.
        patience: times to wait; None: the defaults.
        obedient: the workers save and end by themselves after SIGINT; others get SIGTERM, and `patience.term` seconds to end.

    Raises:
        ConfigError: another value of PIPELOOM_NETWORK.
        UsageError: no temporary folder can be created.
    """
    patience = patience or Patience()
    base = dict(os.environ if environment is None else environment)
    signals = _Signals()
    restore = signals.install()
    workers: list[_Worker] = []
    with _private_folder() as folder:
        try:
            with contextlib.ExitStack() as stack:
                links, network = _socket_pairs(world_size, stack), _network(world_size, base, stack)
                for rank in range(world_size):
                    workers.append(_start(command, rank, world_size, base, links[rank], folder, network))
            for worker in workers:
                _read_output(worker)
            return _watch(workers, signals, patience, Path(folder), obedient)
        finally:
            _end(workers, 0.0)
            restore()


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder of mode 0700. Raises UsageError if that fails."""
    try:
        return tempfile.TemporaryDirectory(prefix="pipeloom-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(f"cannot create a temporary folder (TMPDIR): {error.strerror or error}") from None


def _socket_pairs(world: int, stack: contextlib.ExitStack) -> list[dict[int, int]]:
    """Return, for each worker, neighbour on the control plane -> descriptor of a socket that is connected to it.

    `stack` closes all of them here: only the workers keep them, so that the exit of one closes its connections.
    """
    links: list[dict[int, int]] = [{} for _ in range(world)]
    pairs = [(rank, peer) for rank in range(world) for peer in neighbours(rank, world) if rank < peer]
    allow_descriptors(2 * len(pairs) + 4 * world + 64)
    for rank, peer in pairs:
        ends = socket.socketpair()
        links[rank][peer], links[peer][rank] = (stack.enter_context(end).fileno() for end in ends)
    return links


def _network(world: int, environment: Mapping[str, str], stack: contextlib.ExitStack) -> Network:
    """Return the network of the workers: a private one, or the machine's, with a warning if no private one can be created."""
    if wanted(environment.get(NETWORK, "")) and world > 1:
        try:
            return stack.enter_context(private_network())
        except OSError as error:
            print(
                "pipeloom: other users of this machine can connect to the workers, because the system refuses them a "
                f"network of their own ({printable(str(error.strerror))}); see docs/security.md",
                file=sys.stderr,
                flush=True,
            )
    return Network()


def _start(
    command: Sequence[str],
    rank: int,
    world: int,
    base: Mapping[str, str],
    links: Mapping[int, int],
    folder: str,
    network: Network,
) -> _Worker:
    environment = {
        **base,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        FAILURES: folder,
        STORE: str(Path(folder) / "store"),
        LINKS: ",".join(f"{peer}:{descriptor}" for peer, descriptor in links.items()),
    }
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise a lost peer prints pages of C++ frames
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        environment["GLOO_SOCKET_IFNAME"] = loopback  # replaces the user's value: these workers are on one machine
    environment["TORCH_GLOO_LAZY_INIT"] = "0"  # connect all at the start, before the sockets are closed to strangers
    process = subprocess.Popen(
        list(command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.PIPE,
        stderr=None if rank == 0 else subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=tuple(links.values()),
        preexec_fn=_before_exec(os.getpid(), network),
    )
    return _Worker(rank, process)


def _before_exec(parent: int, network: Network) -> Callable[[], None]:
    """Return a function that prepares a worker's process: it joins the network, dies with the parent, and ignores Ctrl-C."""
    library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def prepare() -> None:
        network.enter()  # first: the change of credentials would reset the parent-death signal below
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # until the worker has installed its handler
        if library is not None:
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(DistributedError.exit_code)

    return prepare


def _read_output(worker: _Worker) -> None:
    stream = worker.process.stdout
    if stream is None:
        return

    def read() -> None:
        for line in stream:
            if line.startswith(NOTICE):
                print(printable(line.rstrip("\n")), file=sys.stderr, flush=True)
            else:
                worker.lines.append(line.rstrip("\n"))

    worker.reader = threading.Thread(target=read, name=f"output of rank {worker.rank}", daemon=True)
    worker.reader.start()


def _watch(workers: list[_Worker], signals: _Signals, patience: Patience, folder: Path, obedient: bool) -> int:
    """Wait for the end of the workers, and pass signals on; return the run's exit code."""
    ended: list[_Worker] = []
    forwarded = False
    while len(ended) < len(workers):
        interrupted = signals.exit_code == INTERRUPTED
        if len(signals.ends) > 1:
            _end(workers, 0.0)
            return signals.exit_code
        if interrupted and not obedient:
            _end(workers, patience.term)
            return INTERRUPTED
        if signals.save:
            signals.save = False
            _signal(workers[:1], signal.SIGUSR1)  # one request reaches all ranks; two could count for different steps
        if signals.ends and not forwarded:
            forwarded = True
            if interrupted:
                _signal(workers, signal.SIGINT)
            _signal(workers, signal.SIGTERM)  # ends a worker that has no handler for SIGINT yet
        for worker in workers:
            if worker not in ended and worker.process.poll() is not None:
                ended.append(worker)
        obeyed = (0, *OBEYED, *((-signal.SIGTERM,) if forwarded else ()))
        if any(worker.process.returncode not in obeyed for worker in ended) or read_failures(folder):
            return _fail(workers, signals, patience, folder)
        time.sleep(patience.poll)
    if not any(worker.process.returncode for worker in ended):
        return 0
    return signals.exit_code


def _fail(workers: list[_Worker], signals: _Signals, patience: Patience, folder: Path) -> int:
    """Let the other workers report and end, print which worker failed first, and return its exit code.

    The other workers have heard of the failure through the control plane. SIGTERM ends those that have not connected to it yet.
    A worker that has not ended after `patience.reports` seconds, because it is frozen or in a long computation, is killed.
    """
    codes: dict[int, int] = {}
    until = time.monotonic() + patience.reports
    told = False
    while True:
        for worker in workers:
            if worker.rank not in codes and (code := worker.process.poll()) is not None:
                codes[worker.rank] = code
        failures = read_failures(folder)
        silent = {rank for note in failures.values() for rank in note.blames if rank != note.origin} - failures.keys()
        left = {worker.rank for worker in workers} - codes.keys()
        if left <= silent or time.monotonic() > until or signals.exit_code == INTERRUPTED:
            break
        if not told:
            told = True
            _signal(workers, signal.SIGTERM)
        time.sleep(patience.poll)
    _end(workers, 0.0)
    for worker in workers:
        if worker.reader is not None:
            worker.reader.join(timeout=1.0)
    failures = read_failures(folder)
    unprompted = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
    rank = first_failure(unprompted or codes or {0: 1}, failures)
    show_output(workers, rank or 0, failures)
    if rank is None:
        print("pipeloom: no rank failed: the run stalled, and its workers were stopped", file=sys.stderr, flush=True)
        return DistributedError.exit_code
    code = codes.get(rank)
    if code == UsageError.exit_code:  # a run that was refused: no rank has failed
        return code
    others = len(workers) - 1
    if others and rank in failures and not failures[rank].blames:
        print(f"pipeloom: the ranks failed together: exit code {failures[rank].exit_code}", file=sys.stderr, flush=True)
        return failures[rank].exit_code
    stopped = f"; the other {others} were stopped" if others > 1 else "; the other one was stopped" if others else ""
    process = workers[rank].process.pid
    if code is not None:
        fate = _fate(code)
    elif rank in failures or any(note.origin == rank for note in failures.values()):
        fate = "it did not end, and was killed"
    else:
        fate = "it was stuck, and was killed"
    print(f"pipeloom: rank {rank} (process {process}) failed first: {fate}{stopped}", file=sys.stderr, flush=True)
    return code if code is not None and code > 0 else DistributedError.exit_code


def show_output(workers: list[_Worker], first: int, failures: Mapping[int, WorkerFailure]) -> None:
    """Print the output of the workers, that of the first to fail before the others, each text once.

    Rank 0 has no output here: it writes to the terminal itself.
    """
    printed = {failures[0].text.strip()} if 0 in failures else set()
    for worker in sorted(workers, key=lambda worker: (worker.rank != first, worker.rank)):
        text = "\n".join(worker.lines).strip()
        reason = failures[worker.rank].text.strip() if worker.rank in failures else ""
        if reason in printed:
            text = text.removesuffix(reason).strip()
        if text and text not in printed:
            printed.add(text)
            printed.add(reason)
            head = f"[rank {worker.rank}] "
            lines = (line if line.startswith(head) else head + line for line in text.splitlines())
            print(printable("\n".join(lines)), file=sys.stderr, flush=True)


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
    """Send SIGTERM (unless `grace` is 0), and SIGKILL after `grace` seconds; return once all have exited."""
    if grace > 0:
        _signal(workers, signal.SIGTERM)
        until = time.monotonic() + grace
        while time.monotonic() < until and any(worker.process.poll() is None for worker in workers):
            time.sleep(0.02)
    _signal(workers, signal.SIGKILL)
    for worker in workers:
        worker.process.wait()
