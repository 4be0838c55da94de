"""A step's loss on its way from the ranks that know a share of it to all ranks of the mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime.alarm import Alarm
from pipeloom.runtime.transport import PeerGone
from pipeloom.schedule.model import Schedule

_LOSS_TAG = 16


class PendingLoss:
    """The loss of a step that this rank has finished and another may not have."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish
        self._loss: Tensor | None = None

    def wait(self) -> Tensor:
        """The mean loss over all targets of the batch, a 0-dim fp32 tensor, the same on every rank."""
        if self._loss is None:
            self._loss = self._finish()
        return self._loss


class LossSpread:
    """Brings the loss to every rank without a barrier: whoever knows it sends it and goes on."""

    def __init__(self, mesh: Mesh, schedule: Schedule, device: torch.device, alarm: Alarm) -> None:
        self._line = mesh.pipeline
        self._device = device
        self._alarm = alarm
        self._sends: list[tuple[Any, Tensor]] = []
        one_pipeline = mesh.everyone.size == len(mesh.pipeline.ranks)
        self._source = schedule.placement[schedule.routes[0][-1]]
        self._group = mesh.everyone.group
        self._sum = not one_pipeline or len(schedule.routes) > 1
        self._counts = mesh.tp.index == 0  # the tp ranks of a last stage all know the same share

    def start(self, share: Tensor | None) -> PendingLoss:
        """The sum of all shares, each of them a part of the step's mean; `share` is None on a rank that knows none."""
        known = share is not None and self._counts
        total = share.clone() if known and share is not None else torch.zeros((), device=self._device)
        if self._group is None:
            return PendingLoss(lambda: total)
        line = self._line
        if self._sum:
            with self._alarm.telling():
                reduction = self._group.allreduce([total])
            return PendingLoss(lambda: self._await(reduction, total, None))
        if line.rank != self._source:
            with self._telling(self._source, "it never sent the loss"):
                receipt = line.group.recv([total], self._source, _LOSS_TAG)
            return PendingLoss(lambda: self._await(receipt, total, self._source))
        self._send(total)
        own = total.clone()
        return PendingLoss(lambda: own)

    def _send(self, total: Tensor) -> None:
        with self._alarm.telling():
            for work, _ in self._sends:  # of the step before: long received
                work.wait()
        self._sends = []
        for rank in range(len(self._line.ranks)):
            if rank != self._source:
                with self._telling(rank, "it did not take the loss"):
                    self._sends.append((self._line.group.send([total], rank, _LOSS_TAG), total))

    def _await(self, work: Any, loss: Tensor, source: int | None) -> Tensor:
        with self._telling(source, "it never sent the loss"):
            self._alarm.status.wait_between("the loss")
            work.wait()
            self._alarm.status.leave()
        return loss

    @contextlib.contextmanager
    def _telling(self, peer: int | None, words: str) -> Iterator[None]:
        """An error inside is told to the other ranks; None: it may be any peer's."""
        with self._alarm.telling():
            try:
                yield
            except RuntimeError as error:
                if peer is None:
                    raise
                raise PeerGone(peer, f"{words}: {error}") from None

    def close(self) -> None:
        """Waits for what was sent; a peer that is gone does not matter."""
        with contextlib.suppress(RuntimeError):
            for work, _ in self._sends:
                work.wait()
        self._sends = []
