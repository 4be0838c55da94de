"""One worker process: torch.distributed, device, seeds and threads on the way in, an exit code on the way out."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from pipeloom.config import Layout
from pipeloom.errors import ConfigError, DistributedError, PipeloomError, Preempted
from pipeloom.train.failures import FAILURES, death_notice, record_failure

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

INTERRUPTED = 130
_LOST = re.compile(r"[Cc]onnection (closed|reset)|gloo/transport|remote process exited|Timed out waiting")


@dataclass(frozen=True)
class WorkerContext:
    """What a worker knows of its place.

    Attributes:
        rank: global rank; 0 writes to the terminal.
        world_size: workers of the run.
        local_rank: among the workers of this machine.
        device: where this worker computes.
        store: key-value store that all workers share.
        stop: set by SIGTERM.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: Store
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def stop_requested(self) -> bool:
        """Whether this worker was told to stop after the present step. Other workers may not know yet."""
        return self.stop.is_set()


def is_worker() -> bool:
    """Whether somebody (torchrun, or `pipeloom train` itself) started this process as one of several workers."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size_given() -> int | None:
    """The number of workers that were started, None when this process is no worker; ConfigError if it is no number."""
    if not is_worker():
        return None
    return _number("WORLD_SIZE", 1)


def main(layout: Layout, body: Callable[[WorkerContext], None]) -> int:
    """Starts this worker, runs `body`, and returns the exit code: 0, that of a PipeloomError, 130, or 1 for a bug.

    What went wrong is written to stderr; PipeloomErrors as their sentence, others with their traceback.
    """
    stop = _stop_on_sigterm()
    try:
        context = start(layout, stop)
        body(context)
        finish()
        return 0
    except BaseException as error:
        code, text = describe(error)
        rank = int(os.environ.get("RANK", 0))
        if code == Preempted.exit_code and rank != 0:
            return code
        record_failure(rank, code, text)
        print(text, file=sys.stderr, flush=True)
        return code


def leave(code: int) -> NoReturn:
    """Ends the process. After a failure at once: closing the groups would wait for workers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)


def start(layout: Layout, stop: threading.Event | None = None) -> WorkerContext:
    """Joins the workers and prepares torch for `layout`: threads, device, seeds, determinism.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them. Raises
    ConfigError for a device that is not there, DistributedError when the workers cannot meet.
    """
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    _die_with_parent()
    train = layout.config.train
    rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
    local_rank, local_world = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world)
    torch.set_num_threads(max(1, _cores() // local_world))
    torch.manual_seed(train.seed)
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = _device(train.device, local_rank, local_world)
    timeout = timedelta(seconds=train.timeout)
    store = _meet(rank, world, timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except RuntimeError as error:
        raise DistributedError(f"rank {rank} could not join the other workers: {_first_line(error)}") from error
    return WorkerContext(rank, world, local_rank, device, store, stop or threading.Event())


def finish() -> None:
    """Leaves the process group, when all workers have come here; a peer that is gone already is no failure."""
    import torch.distributed as dist

    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        dist.destroy_process_group()


def describe(error: BaseException) -> tuple[int, str]:
    """(exit code, what to write to stderr) for an error that ended a worker."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, PipeloomError):
        return error.exit_code, str(error)
    if isinstance(error, SystemExit):
        return (error.code if isinstance(error.code, int) else int(error.code is not None)), ""
    if isinstance(error, RuntimeError) and _LOST.search(str(error)):
        where = next(
            frame for frame in reversed(traceback.extract_tb(error.__traceback__)) if "torch" not in frame.filename
        )
        reason = death_notice() or _first_line(error).rpartition("] ")[2].partition(". ")[0]
        return DistributedError.exit_code, f"lost another worker in {where.name} (line {where.lineno}): {reason}"
    return 1, "".join(traceback.format_exception(error)).rstrip()


def _stop_on_sigterm() -> threading.Event:
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    return stop


def _die_with_parent() -> None:
    """Where the kernel does not do it: a thread that ends this worker when the launcher is gone."""
    parent = os.getppid()
    if FAILURES not in os.environ or sys.platform == "linux":
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(DistributedError.exit_code)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _device(name: str, local_rank: int, local_world: int) -> torch.device:
    import torch

    found = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and found < local_world):
        return torch.device("cpu")
    if found < local_world:
        there = f"{found} CUDA device{'s' * (found != 1)}" if found else "no CUDA device"
        raise ConfigError(
            f'train.device = "cuda": this machine has {there} for {local_world} worker{"s" * (local_world > 1)}; '
            f'use "cpu"' + (f", or parallel.pp = {found}" if found else "")
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _meet(rank: int, world: int, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT; rank 0 serves it, on the socket that our launcher opened."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.rendezvous import rendezvous

    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT", 0)
    descriptor = os.environ.pop("PIPELOOM_MASTER_FD", None)
    try:
        if FAILURES in os.environ or port == 0:
            served = {"master_listen_fd": int(descriptor)} if descriptor is not None else {}
            return TCPStore(host, port, world, rank == 0, timeout, **served)  # type: ignore[arg-type]
        store: Store = next(iter(rendezvous("env://", rank, world, timeout=timeout)))[0]
        store.set_timeout(timeout)
        return store
    except dist.DistNetworkError as error:
        reason = "it is in use" if "EADDRINUSE" in str(error) else _first_line(error)
        raise DistributedError(
            f"rank {rank} cannot meet the others on port {port} of {host} (MASTER_PORT, MASTER_ADDR): {reason}"
        ) from error
    except dist.DistError as error:
        died = death_notice()
        raise DistributedError(
            f"rank {rank} waited {timeout.total_seconds():g} s for the {world} workers on port {port} of {host}: "
            f"{died or _first_line(error)}"
        ) from error


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r} in the environment; it must be a whole number")
    return int(text)


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
