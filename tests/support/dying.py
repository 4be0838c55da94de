"""Ranks that may die: forked gloo processes whose ends and last words are kept."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from processes import free_port


@dataclass(frozen=True)
class End:
    """How a rank ended: exit code (negative: the signal), and what it wrote to stderr."""

    code: int
    words: str


def _run(
    function: Callable[..., Any], rank: int, world: int, port: int, folder: Path, arguments: tuple[Any, ...]
) -> None:
    descriptor = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # pytest has put its own there
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    try:
        function(rank, *arguments)
    except BaseException as error:
        os.write(2, "".join(traceback.format_exception(error)).encode())
        os._exit(getattr(error, "exit_code", 1))
    os._exit(0)


def run_until_dead(
    function: Callable[..., Any],
    world: int,
    folder: Path,
    *arguments: Any,
    timeout: float = 300.0,
    stopped: int | None = None,
) -> list[End]:
    """Each rank's end, in rank order; raises AssertionError when one lives longer than `timeout` seconds.

    Args:
        stopped: a rank that stops itself by SIGSTOP; it is killed once the others have ended.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    started = time.monotonic()
    workers = [
        context.Process(target=_run, args=(function, rank, world, port, folder, arguments), daemon=True)
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    ends: dict[int, int] = {}
    try:
        while len(ends) < world:
            assert time.monotonic() < started + timeout, f"ranks {sorted(set(range(world)) - set(ends))} live on"
            if stopped is not None and len(ends) == world - 1:
                workers[stopped].kill()
            for rank, worker in enumerate(workers):
                if rank not in ends and worker.exitcode is not None:
                    ends[rank] = worker.exitcode
            time.sleep(0.01)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return [End(ends[rank], (folder / f"{rank}.err").read_text()) for rank in range(world)]
