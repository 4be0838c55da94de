"""Reduction of a step's gradients over ranks: of weights that several pipeline ranks hold, and over the replicas."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.ops.checksum import checksums
from pipeloom.ops.segments import standstill
from pipeloom.parallel.buckets import Bucket
from pipeloom.parallel.collectives import carrier_of
from pipeloom.parallel.data import AFTER_TIES, GradientSync
from pipeloom.parallel.grad_norm import clip, global_norm, square_norm
from pipeloom.parallel.masters import Master, Masters
from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.runtime import tied_weights as ties
from pipeloom.runtime.actions.registry import StepHooks
from pipeloom.runtime.assembly import IN_MAIN_GRADIENTS, Assembly
from pipeloom.runtime.health.fault_injection import Faults
from pipeloom.runtime.health.report import FailureReporter
from pipeloom.runtime.health.status import Status
from pipeloom.runtime.options import RuntimeOptions

_WIDE = (torch.float64, torch.complex128)
_GATHERED = "the weights of which each replica holds a share"
_STEPPED = "the weights that other replicas have stepped"
_SUMMED = "the sum of the gradients over the replicas"
_NOT_IN_GRAD = (
    "RuntimeOptions(shard_gradients=True) leaves each replica a slice of every gradient, so .grad of whole parameters stays "
    "None, and an optimizer of them changes nothing: give it pipeline.parameters(), or the tensors of pipeline.shards()"
)


class StepGradients:
    """Handling of one rank's gradients before a step, as its stages complete, and after it.

    Args:
        summed: the processes over which every gradient is summed, in words; None: it is not.
        stage_actions: of the schedule.

    Attributes:
        sync: the reduction over the replicas; None for one pipeline without main gradients, which has `.grad` only.
    """

    def __init__(
        self,
        assembly: Assembly,
        mesh: Mesh,
        options: RuntimeOptions,
        alarm: FailureReporter,
        summed: str | None,
        stage_actions: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self._line = mesh.pipeline
        self._alarm = alarm
        self._masters: Masters | None = None  # where the caller's optimizer steps shards
        self._published: list[int] | None = None  # None: a step has been made since
        self._shared = ties.by_holders(assembly.ties)
        self._tied = ties.by_holders({tie: weight for tie, weight in assembly.ties.items() if len(tie.names) > 1})
        self._by_name = assembly.parameters
        self._before: list[Tensor | None] = []
        self._warned = False
        self.sync: GradientSync | None = None
        if summed is None:
            return
        self.sync = GradientSync(
            assembly.held,
            mesh,
            sharded=options.shard_gradients,
            share_memory=options.transport in ("auto", "shared"),
            timeout=options.sum_seconds,
            stage_backward=assembly.grad_context.stage_backward,
            main=assembly.grad_context.main,
            gathered=stage_actions.get("UNSHARD", ()),
            reduced=stage_actions.get("REDUCE_GRAD", ()),
        )
        bucket_of = {parameter: bucket for bucket in self.sync.buckets for parameter in bucket.parameters}
        self._buckets_of: dict[str, tuple[Bucket, ...]] = {
            layer: tuple(dict.fromkeys(bucket_of[p] for p in module.parameters() if p in bucket_of))
            for layer, module in assembly.modules.items()
        }

    def hooks(self, status: Status, faults: Faults) -> StepHooks:
        """Return what a step calls while it runs: here, and the given ones."""
        if self.sync is None:
            return StepHooks(status, faults)
        return StepHooks(
            status,
            faults,
            before_last_backward=self.sync.last_backward,
            stage_done=self.sync.stage_done,
            before_layer=self.before_layer if self.sync.sharded else None,
            before_kind=self.before_kind,
            shards=self.sync.shards,
        )

    def start_equal(self, group: Any) -> None:
        """Give tied weights the first holder's values: each layer has drawn its own."""
        for holders, weights in self._tied.items():
            ties.start_equal(holders, self._line.rank, weights, group)

    def shards(self) -> dict[str, Master]:
        """Return name -> the elements that this process steps: those of an optimizer that was built on `sync`, or else such that
        steps fill their `.grad` from now on, and whatever reads weights takes their values over.
        """
        masters = self.sync.stepped_by if self.sync is not None else None
        if not isinstance(masters, Masters):
            masters = self._masters = Masters(list(self._by_name.items()), self.sync)
            masters.take_gradients()
            self._published = self._values()
        return {master.name: master for master in masters.all}

    @property
    def _stepped(self) -> Masters | None:
        """The shares that the caller's optimizer steps; None where `Optimizer` was built later, which publishes its own."""
        return self._masters if self.sync is not None and self.sync.stepped_by is self._masters else None

    def publish(self) -> None:
        """Give the other replicas what the caller's optimizer may have changed since the last time.

        The first time behind a step it is collective over the replicas. Later it is where values have changed, as they have on
        each replica or on none.
        """
        if (masters := self._stepped) is not None and (values := self._values()) != self._published:
            masters.publish()
            self._published = values

    def _values(self) -> list[int]:
        """Return checksums of what the caller's optimizer steps: it may write past the counts of changes in place."""
        return checksums([master.tensor for master in self._masters.all]) if self._masters is not None else []

    def weights_changed(self) -> None:
        """Note that the parameters were written to by other code than the optimizer."""
        if self.sync is not None and self.sync.shards is not None:
            self.sync.shards.note_change()
        for call in self.sync.changed if self.sync is not None else ():
            call()
        self._published = self._values()

    def before_layer(self, layer: str) -> None:
        """Wait, inside an action, for the slices of a layer's weights that other replicas have stepped."""
        if self.sync is not None and self.sync.weights.pending:
            self._alarm.status.wait_inside(_STEPPED)
            with standstill(_STEPPED, "dp"):
                self.sync.weights.wait(self._buckets_of[layer])
            self._alarm.status.wait_inside(None)

    def wait_for_weights(self, stage: int | None = None) -> None:
        """Wait for the slices of all weights here that other replicas have stepped, and gather those, of all stages or of one,
        that are not whole.
        """
        self.publish()
        if self.sync is not None and self.sync.shards is not None:
            with self._alarm.waiting(_GATHERED):
                self.sync.shards.gather_between(stage)
        if self.sync is not None and self.sync.weights.pending:
            with self._alarm.waiting(_STEPPED):
                self.sync.weights.wait()

    def before_kind(self, stage: int) -> None:
        """Complete the gradients of a stage after its last backward, for a registered kind that may read or step them."""
        if self.sync is not None:
            self._alarm.status.wait_inside(_SUMMED)
            with standstill(_SUMMED, "dp"):
                self.sync.complete(stage)
            self._alarm.status.wait_inside(None)

    def begin(self) -> None:
        """Prepare the gradients before a step's first forward."""
        if self.sync is not None:
            if self.sync.sharded and self.sync.fills_grad and not self._warned:
                self._warned = True
                warnings.warn(_NOT_IN_GRAD, stacklevel=4)
            if (masters := self._stepped) is not None:
                masters.return_gradients()
                masters.publish()
                self._published = None
            self.sync.begin()
            return
        shared = self._shared_weights
        self._before = [weight.grad for weight in shared]
        for weight in shared:
            weight.grad = None  # only this step's gradient is summed over the holders

    def finish(self, group: Any) -> dict[str, float]:
        """Complete the gradients after a step's last action; return kind of communication -> its seconds.

        Args:
            group: for sums over the pipeline's ranks.
        """
        begun = time.perf_counter()
        with self._alarm.reporting():
            if self.sync is None:
                for holders, weights in self._shared.items():
                    parts = [weight.grad for weight in weights]
                    for weight, total in zip(weights, self._sum(holders, weights, parts, group), strict=True):
                        weight.grad = total
                for weight, old in zip(self._shared_weights, self._before, strict=True):
                    if old is not None:
                        weight.grad = old if weight.grad is None else weight.grad.add_(old)
                return {"p2p": time.perf_counter() - begun} if self._shared else {}
            if self.sync.syncing:
                self._sum_in_place(self.sync, group)
            tied = time.perf_counter()
            self._alarm.status.wait_between(_SUMMED)
            self.sync.finish()
            if (masters := self._stepped) is not None:
                masters.take_gradients()
            self._alarm.status.leave()
        return {"p2p": tied - begun, "dp": time.perf_counter() - tied}

    @torch.no_grad()
    def _sum_in_place(self, sync: GradientSync, group: Any) -> None:
        for holders, weights in self._shared.items():
            sync.main.finalize(weights)
            parts = [None if weight in sync.main.absent else sync.main.of(weight) for weight in weights]
            like = [sync.main.of(weight) for weight in weights]
            for weight, total in zip(weights, self._sum(holders, like, parts, group), strict=True):
                if total is not None:
                    sync.main.of(weight).copy_(total)
                    sync.main.absent.discard(weight)
            del total  # It is a view of all these sums, which would stay beside those of the next holders.
        sync.stage_done(AFTER_TIES)

    def _sum(
        self, holders: tuple[int, ...], like: Sequence[Tensor], parts: Sequence[Tensor | None], group: Any
    ) -> list[Tensor | None]:
        self._alarm.status.wait_between("the gradients of weights that other ranks hold too")
        return ties.sum_over(holders, self._line.rank, like, parts, group)

    @property
    def _shared_weights(self) -> list[nn.Parameter]:
        return [weight for weights in self._shared.values() for weight in weights]

    def zero(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Release every gradient."""
        if self.sync is not None:
            self.sync.zero_grad()
        shards = [master.tensor for master in self._masters.all] if self._masters is not None else []
        for parameter in (*parameters.values(), *shards):
            parameter.grad = None

    def norm(self, counts: Callable[[str], bool], everyone: Axis, device: torch.device) -> Tensor:
        """Return the norm over all ranks of the last step's gradients; collective.

        Args:
            counts: whether this process counts a parameter; each element must be counted once over the mesh.
        """
        counted = [gradient for name, gradient in self._reduced() if counts(name)]
        carrier = carrier_of(device, everyone.group)
        with self._alarm.waiting_for_device(device):
            square = square_norm(counted)
        row = torch.tensor(
            [*square, float(any(each.dtype in _WIDE for each in counted))], dtype=torch.float64, device=carrier
        )
        rows = [row]
        if everyone.group is not None:
            rows = [torch.empty_like(row) for _ in range(everyone.size)]
            with self._alarm.reporting():
                self._alarm.status.wait_between("the other ranks' parts of the gradient norm")
                dist.all_gather(rows, row, group=everyone.group)
                rows = [each.cpu() for each in rows]  # under NCCL the host waits here
                self._alarm.status.leave()
        totals, remainders, wide = zip(*(each.tolist() for each in rows), strict=True)
        norm = global_norm([*totals, *remainders])
        return torch.tensor(norm, dtype=torch.float64 if any(wide) else torch.float32, device=device)

    @torch.no_grad()
    def clip(self, norm: float, most: float) -> None:
        """Scales this process's gradients as `norm`, the global one, asks."""
        clip([gradient for _, gradient in self._reduced()], norm, most)

    def _reduced(self) -> list[tuple[str, Tensor]]:
        """Return (name, gradient) for all parameters with one; for a sharded gradient, only the elements summed in this process.

        Raises UsageError if gradients have not been summed over the replicas yet.
        """
        if self.sync is None:
            return [(name, p.grad) for name, p in self._by_name.items() if p.grad is not None]
        self.sync.require_summed()
        if (masters := self._stepped) is not None:  # what the caller's optimizer reads
            return [(each.name, each.tensor.grad) for each in masters.all if each.tensor.grad is not None]
        gradients = []
        for bucket in self.sync.buckets:
            in_grad = self.sync.in_grad(bucket)
            mine = bucket.share if self.sync.sharded and bucket.axis.size > 1 else slice(0, bucket.size)
            for slot, section in bucket.sections(mine):
                gradient = slot.held.parameter.grad if in_grad else None
                if not in_grad and bucket.content != "empty" and slot.held.parameter not in self.sync.absent:
                    gradient = bucket.part[section.start - mine.start : section.stop - mine.start]
                if gradient is not None:
                    gradients.append((slot.held.name, gradient))
        return gradients


def summed_over(mesh: Mesh, options: RuntimeOptions) -> str | None:
    """Return in words what every gradient is summed over; None without a reduction."""
    if mesh.dp.size > 1:
        return "data-parallel replicas"
    if mesh.tp.size > 1:
        return "tensor-parallel ranks"
    return IN_MAIN_GRADIENTS if options.main_gradients or options.shard_gradients else None
