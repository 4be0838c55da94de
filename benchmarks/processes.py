"""Starts the gloo processes of a benchmark on this machine and brings their results back."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.runtime import Pipeline

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _child(
    function: Callable[..., Any], rank: int, world: int, port: int, results: Any, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    results.put((rank, function(rank, *arguments)))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """`function(rank, *arguments)` on each of `world` forked processes; their results in rank order.

    Where one fails, this program ends.
    """
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [
        context.Process(target=_child, args=(function, rank, world, port, results, arguments), daemon=True)
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    by_rank: dict[int, Any] = {}
    while len(by_rank) < world:
        try:
            by_rank.update([results.get(timeout=1)])
        except queue.Empty:
            failed = [rank for rank, worker in enumerate(workers) if worker.exitcode]
            if failed:  # its traceback is on stderr; the others are daemons, which end with this process
                sys.exit(f"rank {failed[0]} failed with exit code {workers[failed[0]].exitcode}")
    for worker in workers:
        worker.join()
    return [by_rank[rank] for rank in range(world)]


def step_bytes(pipeline: Pipeline, inputs: Tensor, targets: Tensor) -> int:
    """Return the most bytes that a step allocates at once, in this thread and in those of the copies."""
    live, run = LiveBytes(), threading.Thread.run

    def counted(thread: threading.Thread) -> None:
        with live:
            run(thread)

    threading.Thread.run = counted  # type: ignore[method-assign, assignment]
    try:
        with live:
            pipeline.step(inputs, targets)
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
    return live.peak
