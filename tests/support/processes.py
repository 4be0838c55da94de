"""Distributed tests: a function run on gloo processes on loopback, forked from the test's own process."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(ready: Callable[[], object], seconds: float = 120.0) -> bool:
    """Return whether `ready` became true in time."""
    until = time.monotonic() + seconds
    while not ready() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(ready())


def _child(
    function: Callable[..., Any], rank: int, world: int, port: int, results: Any, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the test's process holds need not be looked through
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
        results.put((rank, "ok", function(rank, *arguments)))
        with contextlib.suppress(RuntimeError):  # another rank has ended: it is that rank's end that counts
            dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        results.put((rank, "error", "".join(traceback.format_exception(error))))
        raise SystemExit(1) from None


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 600.0) -> list[Any]:
    """`function(rank, *arguments)` on each of `world` processes; their results in rank order.

    Raises AssertionError with the first traceback when one fails, or when they take longer than `timeout` seconds.
    """
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    port = free_port()
    workers = [
        context.Process(target=_child, args=(function, rank, world, port, results, arguments), daemon=True)
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    try:
        return _collect(results, workers, timeout)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _collect(results: Any, workers: list[Any], timeout: float) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(found) < len(workers):
        try:
            rank, state, value = results.get(timeout=0.5)
        except queue.Empty:
            assert time.monotonic() < deadline, (
                f"ranks {sorted(set(range(len(workers))) - set(found))} take over {timeout} s"
            )
            dead = [r for r, w in enumerate(workers) if w.exitcode not in (None, 0) and r not in found]
            assert not dead or not results.empty(), f"ranks {dead} ended with {[workers[r].exitcode for r in dead]}"
            continue
        assert state == "ok", f"rank {rank}:\n{value}"
        found[rank] = value
    for worker in workers:
        worker.join(timeout=10)
    return [found[rank] for rank in range(len(workers))]
