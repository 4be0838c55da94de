"""The gradients of a step beyond one rank: of weights that several pipeline ranks hold, and over the replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.parallel.data import AFTER_TIES, GradientSync
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import ties
from pipeloom.runtime.alarm import Alarm
from pipeloom.runtime.assembly import Assembly
from pipeloom.runtime.options import RuntimeOptions

_AFTER_THE_WATCHDOG = 5.0  # seconds: it knows better which rank is late and why


class Gradients:
    """What happens to one rank's gradients before a step, as its stages end, and after it.

    Attributes:
        sync: the reduction over the replicas; None where `.grad` is all there is: one pipeline without main gradients.
    """

    def __init__(self, assembly: Assembly, mesh: Mesh, options: RuntimeOptions, alarm: Alarm) -> None:
        self._line = mesh.pipeline
        self._alarm = alarm
        self._shared = ties.by_holders(assembly.ties)
        self._before: list[Tensor | None] = []
        self.sync: GradientSync | None = None
        if mesh.dp.size == mesh.tp.size == 1 and not (options.main_gradients or options.shard_gradients):
            return
        self.sync = GradientSync(
            assembly.held,
            mesh,
            sharded=options.shard_gradients,
            share_memory=options.transport in ("auto", "shared"),
            timeout=options.timeout + _AFTER_THE_WATCHDOG,
        )
        self._names = {each.parameter: each.name for each in assembly.held}
        for desk in assembly.desks:
            desk.main = self.sync.main
        for stage in assembly.rank.stages.values():
            stage.add_in_place()
        assembly.rank.finishing = self.sync.last_backward
        assembly.rank.finished = self.sync.stage_done

    def start_equal(self, group: Any) -> None:
        """Weights that several pipeline ranks hold begin with the first one's values."""
        for holders, weights in self._shared.items():
            ties.start_equal(holders, self._line.rank, weights, group)

    def begin(self) -> None:
        """Before a step's first forward."""
        if self.sync is not None:
            self.sync.begin()
            return
        shared = self._shared_weights
        self._before = [weight.grad for weight in shared]
        for weight in shared:
            weight.grad = None  # only this step's part is summed over the holders

    def finish(self, group: Any) -> None:
        """After a step's last action; `group`: for sums over the pipeline's ranks."""
        with self._alarm.telling():
            if self.sync is None:
                for holders, weights in self._shared.items():
                    parts = [weight.grad for weight in weights]
                    for weight, total in zip(weights, self._sum(holders, weights, parts, group), strict=True):
                        weight.grad = total
                for weight, old in zip(self._shared_weights, self._before, strict=True):
                    if old is not None and weight.grad is not None:
                        weight.grad += old
                return
            if self.sync.syncing:
                self._sum_in_place(self.sync, group)
            self._alarm.status.wait_between("the sum of the gradients over the replicas")
            self.sync.finish()
            self._alarm.status.leave()

    @torch.no_grad()
    def _sum_in_place(self, sync: GradientSync, group: Any) -> None:
        for holders, weights in self._shared.items():
            sync.main.complete(weights)
            parts = [sync.gradient(self._names[weight]) for weight in weights]
            for part, total in zip(parts, self._sum(holders, weights, parts, group), strict=True):
                part.copy_(total)
        sync.stage_done(AFTER_TIES)

    def _sum(
        self, holders: tuple[int, ...], weights: Sequence[nn.Parameter], parts: Sequence[Tensor | None], group: Any
    ) -> list[Tensor]:
        self._alarm.status.wait_between("the gradients of weights that other ranks hold too")
        own = [w.new_zeros(w.shape) if part is None else part for w, part in zip(weights, parts, strict=True)]
        return ties.sum_over(holders, self._line.rank, own, group)

    @property
    def _shared_weights(self) -> list[nn.Parameter]:
        return [weight for weights in self._shared.values() for weight in weights]

    def zero(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Drops every gradient."""
        if self.sync is not None:
            self.sync.zero_grad()
        for parameter in parameters.values():
            parameter.grad = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside talk to no other replica about gradients."""
        with self.sync.no_sync() if self.sync is not None else contextlib.nullcontext():
            yield
