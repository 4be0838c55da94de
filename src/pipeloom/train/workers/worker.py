"""One worker process: sets up torch.distributed, device, seeds and threads, runs its part, and maps errors to an exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from pipeloom.config import Layout
from pipeloom.errors import (
    INTERRUPTED,
    ConfigError,
    DistributedError,
    Interrupted,
    PipeloomError,
    Preempted,
    first_line,
    folded,
    from_machine,
    printable,
    sentence,
)
from pipeloom.runtime.health.links import Link, RunStore, inherited, meet, read_secret, within
from pipeloom.runtime.health.report import lost_peer, plain_words
from pipeloom.runtime.health.status import Limits, Status
from pipeloom.runtime.health.watchdog import Failure, Watchdog
from pipeloom.train.workers.context import Requests, WorkerContext
from pipeloom.train.workers.failures import FAILURES, STORE, RankLog, claim_message, record_failure, write_exit
from pipeloom.train.workers.network import allow_descriptors, require_interface
from pipeloom.train.workers.preflight import usable_devices, worker_threads

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]


_MEET_SECONDS = 300.0


def is_worker() -> bool:
    """Return whether this process was started as one of several workers, by torchrun or by `pipeloom train` itself."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_here() -> bool:
    """Return whether `pipeloom` itself started this worker, not torchrun."""
    return FAILURES in os.environ


def world_size_given() -> int | None:
    """Return WORLD_SIZE, or None if this process is not a worker. Raises ConfigError if it is not a number."""
    if not is_worker():
        return None
    return _number("WORLD_SIZE", 1)


def main(layout: Layout, body: Callable[[WorkerContext], None]) -> int:
    """Set up this worker, run `body`, and return the exit code: 0, that of a PipeloomError, 130, or 1 for a bug.

    An error is reported to the other workers and written to stderr: a PipeloomError as its message, any other with its
    traceback.
    """
    rank, requests = int(os.environ.get("RANK", 0)), Requests()
    with RankLog(rank) as log:
        requests.watch(signal.SIGUSR1)
        watching = _inherited_watchdog(layout)
        try:
            context = replace(start(layout, requests, watching), log=log)
            body(context)
            finish(context.watchdog)
            _record_end(context.watchdog, 0, "")
            return 0
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one does not change how this worker ends
            watchdog = watching[0] if watching else None
            code, text, blames, origin = _explain(error, watchdog, rank)
            _record_end(watchdog, code, text, blames)
            if isinstance(error, Preempted | Interrupted) and rank != 0:
                return code
            record_failure(rank, code, text, blames, origin)
            if text and claim_message(text):
                print(printable(text), file=sys.stderr, flush=True)
            return code


def _explain(error: BaseException, watchdog: Watchdog | None, rank: int) -> tuple[int, str, tuple[int, ...], int]:
    """Report the error that ended this worker to the other workers.

    Returns:
        the exit code, the text for stderr, the ranks to blame, and the rank that reported the failure first.
    """
    code, text = describe(error)
    if watchdog is None:
        return code, text, (rank,), rank
    if code == 0 or isinstance(error, Preempted | Interrupted):
        watchdog.close()
        return code, text, (), rank
    if lost_peer(error):
        cause = watchdog.cause(1.5)
        code = DistributedError.exit_code
        text = watchdog.status.signed(
            text if cause is None else f"{text}; stopped, because {cause.shown_on(watchdog.output)}"
        )
        failure = cause or watchdog.failed(text)
    else:
        trace = text if code == 1 and "\n" in text else ""
        what = text.splitlines()[-1] if trace else text or f"it exited with code {code}"
        failure = watchdog.failed(f"rank {rank} failed: {what}", (rank,), trace)
    blames = (rank,) if failure.origin == rank and not failure.blames else failure.blames
    if code != DistributedError.exit_code:
        blames = () if getattr(error, "of_all_ranks", False) else (rank,)
    return code, text, blames, failure.origin


def leave(code: int) -> NoReturn:
    """End the process. After a failure it ends at once: closing the groups would wait for workers that have exited."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)


def start(layout: Layout, requests: Requests | None = None, watching: list[Watchdog] | None = None) -> WorkerContext:
    """Join the workers and prepare torch for `layout`: threads, device, seeds, determinism.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them. Raises
    ConfigError for a device that does not exist, DistributedError if the workers cannot connect.

    Args:
        requests: records signals.
        watching: the watchdog that is running already; if empty, the one started here, over the workers' store, is added.
    """
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    requests = requests or Requests()
    watching = [] if watching is None else watching
    watchdog = watching[0] if watching else None
    train = layout.config.train
    rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
    local_rank, local_world = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world)
    torch.set_num_threads(worker_threads(train.threads, local_world))
    torch.manual_seed(train.seed)
    if train.deterministic or train.reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    devices = usable_devices(train, local_world)
    device = claim_device(devices, local_rank)
    require_interface(local_world, world)
    if device.type == "cpu":
        from pipeloom.train.tuning import tune_process

        tune_process()
    seconds = min(train.seconds or _MEET_SECONDS, 1e6)
    if watchdog is not None:
        watchdog.status.wait_between("the other workers at start-up")
        _obey_signals(requests, watchdog)
    store = workers_store(rank, world, timedelta(seconds=seconds))
    if watchdog is None:
        if world > 1:
            watchdog = _meeting_watchdog(layout, store, rank, world, seconds)
            watching.append(watchdog)
        _obey_signals(requests, watchdog)
    backend = backend_for(len(devices), local_world)
    if 0 < len(devices) < local_world and rank == 0:
        print(shared_devices(local_world, len(devices)), file=sys.stderr, flush=True)
    try:
        # the watchdog ends a wait that is too long and reports the reason, so torch's own limit must be a later one
        later = timedelta(seconds=seconds + 600.0)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=later)
    except RuntimeError as error:
        if watchdog is not None and lost_peer(error) and watchdog.cause(1.5) is not None:
            raise
        raise DistributedError(f"rank {rank} could not join the other workers: {first_line(error)}") from error
    if watchdog is not None:
        watchdog.status.leave()
    context = WorkerContext(rank, world, local_rank, device, store, requests, watchdog)
    context.close_to_strangers()
    return context


def _inherited_watchdog(layout: Layout) -> list[Watchdog]:
    """Yield this worker's watchdog over the launcher's sockets, or None under another launcher."""
    rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
    links = inherited()
    return [] if links is None else [_watch(links, layout, rank, world)]


def _meeting_watchdog(layout: Layout, store: Store, rank: int, world: int, seconds: float) -> Watchdog:
    """Return the watchdog of a worker that another launcher started."""
    secret = read_secret()
    if secret is None and rank == 0:
        warning = (
            "no PIPELOOM_SECRET: any process that reaches this run's store can impersonate a rank (docs/security.md)"
        )
        print(folded(warning), flush=True)
    patience = min(seconds, _MEET_SECONDS)
    run_store = RunStore(store, secret or b"", patience)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    links = meet(run_store, f"pipeloom/workers {attempt}", rank, world, patience)
    return _watch(links, layout, rank, world)


def _watch(links: Sequence[Link], layout: Layout, rank: int, world: int) -> Watchdog:
    def record(failure: Failure, code: int, words: str) -> None:
        record_failure(rank, code, words, failure.blames, failure.origin)
        write_exit(watchdog.folder, code, failure.text, failure.blames)

    watchdog = Watchdog(
        links, Status(rank), world, Limits(layout.config.train.seconds), record, output=os.environ.get(FAILURES)
    )
    watchdog.start()
    return watchdog


def _record_end(watchdog: Watchdog | None, code: int, text: str, blames: Sequence[int] = ()) -> None:
    """Write exit.json without a report to the other workers."""
    if watchdog is None:
        return
    if code or watchdog.number == 0:
        write_exit(watchdog.folder, code, text, blames)
    if not code:
        watchdog.close()


def finish(watchdog: Watchdog | None = None) -> None:
    """Leave the process group once all workers have arrived here; a peer that has exited already is not a failure."""
    import torch.distributed as dist

    if dist.is_initialized():
        if watchdog is not None:
            watchdog.status.wait_between("the other workers at the end")
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        if watchdog is not None:
            watchdog.close()
        dist.destroy_process_group()


def describe(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the text for stderr of an error that ended a worker."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, PipeloomError):
        return error.exit_code, sentence(str(error))
    if (known := from_machine(error)) is not None:
        return known
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0, ""
        return 1, str(error.code)
    if lost_peer(error):
        return DistributedError.exit_code, f"lost another worker: {plain_words(error)}"
    return 1, "".join(traceback.format_exception(error)).rstrip()


def _obey_signals(requests: Requests, watchdog: Watchdog | None) -> None:
    """From now on SIGTERM and SIGINT request a stop after the present step; before torch is loaded they end the process."""
    requests.watch(signal.SIGTERM, signal.SIGINT)
    if watchdog is not None and threading.current_thread() is threading.main_thread():
        watchdog.guard_signals()


def claim_device(devices: Sequence[int], local_rank: int) -> torch.device:
    """Return this worker's device of its host's `devices`, which are shared where there are fewer; none: the CPU.

    A CUDA device becomes the current one.
    """
    import torch

    if not devices:
        return torch.device("cpu")
    device = torch.device("cuda", devices[local_rank % len(devices)])
    torch.cuda.set_device(device)
    return device


def backend_for(devices: int, workers: int) -> str:
    """Return the backend of the process group for `workers` per host and `devices` GPUs (0: the workers use the CPU).

    It is gloo where workers share a GPU, because NCCL refuses two ranks on one device.
    """
    return "cpu:gloo,cuda:nccl" if devices >= workers else "gloo"


def shared_devices(workers: int, devices: int) -> str:
    """Return the note at the start of a run whose `workers` share `devices` GPUs."""
    return (
        f"{workers} workers share {devices} CUDA device{'s' * (devices > 1)}: what they exchange goes through the host's memory, "
        "which is slow"
    )


def workers_store(rank: int, world: int, timeout: timedelta) -> Store:
    """Return the workers' store: a file of Pipeloom's launcher, or the TCP store at MASTER_ADDR and MASTER_PORT.

    Raises DistributedError if the workers cannot reach it within `timeout`.
    """
    import torch.distributed as dist
    from torch.distributed import FileStore, HashStore, PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    path = os.environ.get(STORE)
    if path is not None:
        allow_descriptors()
        return _gather_at(FileStore(path, world), rank, world, timeout.total_seconds() + 60.0)
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT", 0)
    if world == 1 and port == 0:
        return HashStore()

    def join() -> Store:
        store: Store = next(iter(rendezvous("env://", rank, world, timeout=timeout)))[0]
        store.set_timeout(timeout)
        # torchrun may keep one store for all its restarts, in which an address of an ended worker must not be found
        return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    try:
        return within(timeout.total_seconds() + 5.0, join, f"rank {rank} did not reach port {port} of {host}")
    except dist.DistNetworkError as error:
        reason = "it is in use" if "EADDRINUSE" in str(error) else first_line(error)
        raise DistributedError(
            f"rank {rank} could not reach the rendezvous at {host}:{port} (MASTER_ADDR, MASTER_PORT): {reason}"
        ) from error
    except dist.DistError as error:
        raise DistributedError(
            f"rank {rank} waited {timeout.total_seconds():g} s for the {world} workers on port {port} of {host}: "
            f"{first_line(error)}"
        ) from error


def _gather_at(store: Store, rank: int, world: int, seconds: float) -> Store:
    """Wait for all workers, so that gloo's sockets are open only while they connect."""
    store.set(f"here/{rank}", "yes")
    keys = [f"here/{other}" for other in range(world)]
    until = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > until:
            absent = next(other for other, key in enumerate(keys) if not store.check([key]))
            raise DistributedError(f"rank {rank}: rank {absent} did not reach the start within {seconds:g} s")
        time.sleep(0.02)
    return store


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name} is {text!r:.200} in the environment; it must be a whole number")
    return int(text)
