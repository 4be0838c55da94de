"""A crew: forked gloo processes on loopback that run one case after another, so that a case costs no start-up."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes

from processes import free_port

# The imports of torch's inner modules are those that it puts off until a first backward or optimizer: every fork would make them.

Task = Callable[[Any], Any]  # a module's function; it and its argument travel by pickle
_GRACE = 3.0  # seconds that the other processes of a crew have once one has come to another end than they
_LIFE = 400  # tasks after which a crew is replaced, so that nothing that a case leaves behind adds up


class Hang(Exception):
    """A task did not end in time."""


def _member(rank: int, world: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    while True:
        try:
            task, argument = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(task(argument))


class Crew:
    """`world` processes in one process group; started when first needed, and again after a hang or a failure."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._members: list[tuple[Any, Connection]] = []
        self._tasks = 0

    def run(self, task: Task, argument: Any, timeout: float, failed: Callable[[Any], bool]) -> list[Any]:
        """`task(argument)` on every process; their results in rank order.

        Once a result is a `failed` one the others have a moment left, then are killed and missing from the results.
        Raises Hang where none failed and one does not end within `timeout` seconds, or ends its process.
        """
        if self._tasks >= _LIFE:
            self.stop()
        if not self._members:
            self._start()
        self._tasks += 1
        for _, pipe in self._members:
            pipe.send((task, argument))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._members)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self.stop()
                    raise Hang(f"process {rank} ended") from None
                if failed(results[rank]):
                    deadline = min(deadline, time.monotonic() + _GRACE)
        broken = any(map(failed, results.values()))
        if waiting or (broken and self.world > 1):
            self.stop()
        if waiting and not broken:
            raise Hang(f"processes {sorted(waiting.values())} do not end within {timeout:g} s")
        return [results[rank] for rank in sorted(results)]

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        port = free_port()
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(target=_member, args=(rank, self.world, port, there), daemon=True)
            process.start()
            there.close()
            self._members.append((process, here))

    def stop(self) -> None:
        """Kills the processes."""
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()
        self._members, self._tasks = [], 0
