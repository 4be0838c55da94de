"""Data parallelism: each dp rank processes different micro-batches, and the gradients of all dp ranks are summed, by collectives
or through memory that the ranks of a machine share.

Gradients are sums, not means: the runtime weights the loss of each micro-batch by its share of the tokens of all dp ranks, so
gradients are never rescaled.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipeloom.errors import UsageError
from pipeloom.limits import usable_cores
from pipeloom.ops.deferred import StageBackward
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.parallel.buckets import Bucket, BucketParameter, FlatParameters, make_buckets
from pipeloom.parallel.collectives import (
    PendingCollective,
    start_all_reduce,
    start_collective,
    start_gather_slices,
    start_reduce_scatter,
)
from pipeloom.parallel.mesh import Axis, Mesh, group_of_members
from pipeloom.parallel.shared_memory_sum import SharedBuffers
from pipeloom.parallel.zero import StageShards

Reduction = Callable[[], Tensor]
"""A reduction in progress: waits for it, and returns the sum or this rank's slice of it."""


class Reducer:
    """Starts the reductions of buckets. Every rank of their axes constructs a Reducer with the same buckets.

    Args:
        sharded: whether a rank gets only its slice of each bucket.
        share_memory: sum through shared memory where all ranks of a bucket's axis can; the buckets then live there.
        timeout: seconds to wait for another rank's gradients in shared memory before that rank is taken for dead.
    """

    def __init__(
        self, buckets: Sequence[Bucket], mesh: Mesh, *, sharded: bool, share_memory: bool, timeout: float
    ) -> None:
        self._sharded = sharded
        self._timeout = timeout
        self._shared: dict[Bucket, tuple[SharedBuffers, int]] = {}  # bucket -> its buffers, and its number among them
        for axis in dict.fromkeys(bucket.axis for bucket in buckets) if share_memory else ():
            mine = [bucket for bucket in buckets if bucket.axis == axis]
            if axis.size == 1 or any(bucket.flat.device.type != "cpu" for bucket in mine):
                continue
            shared = SharedBuffers.connect(axis, [b.size for b in mine], [b.dtype for b in mine])
            if shared is None:
                continue
            shared.sharded = sharded
            shared.spins = mesh.everyone.size <= usable_cores()
            for at, bucket in enumerate(mine):
                bucket.flat = bucket.part = shared.own[at]
                self._shared[bucket] = shared, at

    def start(self, bucket: Bucket) -> Reduction:
        """Start the reduction of a bucket that holds all its gradients."""
        if bucket in self._shared:
            buffers, at = self._shared[bucket]
            buffers.start(at)

            def finish() -> Tensor:
                buffers.wait(at, self._timeout)
                return bucket.flat[bucket.share] if self._sharded else bucket.flat

            return finish
        if bucket.axis.size == 1:
            return lambda: bucket.flat
        if self._sharded:
            return start_reduce_scatter(bucket.flat.view(bucket.axis.size, -1), bucket.axis).wait
        return start_all_reduce(bucket.flat, bucket.axis).wait


class StepStream:
    """The stream that was current on `device` when the step began; on a CPU nothing.

    Autograd calls a parameter's hook on the stream that was current when the parameter's node was created. That stream may differ
    from the step's, and it is not ordered after a gradient that a layer has added to its buffer without autograd.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def begin(self) -> None:
        """Record the current stream as the step's."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Run the work inside on the step's stream: after all work on the current stream so far, and before its later work."""
        here = None if self._stream is None else torch.cuda.current_stream(self._device)
        if here is None or here == self._stream:
            yield
            return
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)


CAPACITY = 25 * 2**20  # bytes of a bucket, as in torch's DDP: larger ones start late, smaller ones cost a call each
# the "stage" of a weight that other pipeline ranks hold too: done once its gradient is summed over them
AFTER_TIES = -1


class WeightGathers:
    """Gathers of the slices that other ranks have stepped, overlapped with this rank's next forward.

    They use separate process groups; otherwise the small sums and exchanges of the next step would queue behind them.
    Construction is collective over the buckets' axes, and so is `start`.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._axes: dict[tuple[int, ...], Axis] = {}
        for bucket in buckets:
            axis = bucket.axis
            if axis.size > 1 and axis.ranks not in self._axes:
                group = group_of_members(axis.ranks)
                self._axes[axis.ranks] = replace(axis, group=group)
        self._pending: dict[Bucket, PendingCollective[Tensor]] = {}

    @property
    def pending(self) -> bool:
        """Return whether any gather is still to be waited for."""
        return bool(self._pending)

    def start(self, flats: Sequence[FlatParameters]) -> None:
        """Start to gather the other ranks' slices, once all of this rank's are written: those of the first layers first.

        Args:
            flats: in the order in which their gradients are reduced, the same on all ranks of an axis.
        """
        self.wait()
        for flat in reversed(flats):
            if not flat.stays:
                flat.release()
            elif flat.sharded:
                axis = self._axes[flat.bucket.axis.ranks]
                self._pending[flat.bucket] = start_gather_slices(flat.flat, axis)

    def wait(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Wait for the slices of the parameters in these buckets, or for all of them (None)."""
        for bucket in list(self._pending) if buckets is None else buckets:
            if bucket in self._pending:
                self._pending.pop(bucket).wait()


class GradientSync:
    """Sums the gradients of one process's stages over dp (those of experts over edp, and `partial` ones also over tp).

    A step calls `begin`, then runs forwards and backwards and calls `stage_done` after the last backward of each stage, which
    starts the reductions of that stage, and ends with `finish`. After that, `.grad` of each parameter is a view of its bucket.
    The gradient of a bf16 parameter is accumulated and summed in fp32 (`gradient(name)`), and `.grad` is that sum in bf16. If
    gradients are sharded, only this rank's slice of a bucket holds the sum (ZeRO stage 1, arXiv 1910.02054), and `.grad` is None.

    Under `no_sync` nothing is reduced: `.grad` holds what this rank has accumulated since the last reduction. The next
    synchronized step reduces all of that once and adds it to the gradients that were reduced before. `zero_grad`, or setting a
    `.grad` to None, drops a gradient, reduced or not. A gradient is None only if it is None on every replica, as it would be in
    one process; otherwise None on a replica counts as zeros.

    Every rank of the mesh constructs one with its parameters in the same order as its replicas, and calls the methods in the
    same order.

    Args:
        held: the parameters, in forward order.
        mesh: mesh with the axes dp, edp and tp of the reductions.
        sharded: whether each rank receives only its slice of the sum.
        share_memory: sum through shared memory if all ranks of an axis run on the CPUs of one machine.
        capacity: largest size of a bucket in bytes.
        timeout: seconds to wait for the gradients of another rank in shared memory.
        stage_backward: backward pass of a stage, whose gradients decide when a bucket is complete; None counts every pass.
        main: accumulates the gradients into the buckets; None constructs one.
        gathered, reduced: the stages that gather their parameters, and whose gradients are reduced, by actions (`StageShards`);
            only if gradients are sharded.

    Attributes:
        changed: callbacks for when parameters were written by something other than the optimizer, so that fp32 copies of them
            are refreshed.
        absent: after a step, the parameters without a gradient: no micro-batch of any replica used them.
        fills_grad: whether `.grad` of bf16 parameters is filled; an optimizer that reads the buckets turns it off.
        stepped_by: the `Masters` built last, whose values replace the parameters'.
        shards: the buckets that follow actions of the schedule; None: there are no such stages.
        weights: pending gathers of sharded parameters; wait for them before reading parameters.
    """

    def __init__(
        self,
        held: Sequence[BucketParameter],
        mesh: Mesh,
        *,
        sharded: bool = False,
        share_memory: bool = False,
        capacity: int = CAPACITY,
        timeout: float = 300.0,
        stage_backward: StageBackward | None = None,
        main: MainGradients | None = None,
        gathered: Collection[int] = (),
        reduced: Collection[int] = (),
    ) -> None:
        self.main = main if main is not None else MainGradients()
        self.main.accepting = False
        self.mesh = mesh
        self.sharded = sharded
        self.buckets = make_buckets(held, mesh, capacity)
        self.weights = WeightGathers(self.buckets if sharded else ())
        self.shards = (
            StageShards(self.buckets, self.main, gathered, reduced, share_memory, timeout)
            if sharded and (gathered or reduced)
            else None
        )
        self._by_actions = self.shards.reduced if self.shards is not None else frozenset[Bucket]()
        others = [bucket for bucket in self.buckets if bucket not in self._by_actions]
        self._reducer = Reducer(others, mesh, sharded=sharded, share_memory=share_memory, timeout=timeout)
        self.syncing = True
        self._stage_backward = stage_backward
        # Buckets that a pass inside a layer adds to, so that their gradients may be incomplete when the stage's own pass ends.
        self._inner: set[Bucket] = set()
        self._first = stage_backward is not None
        self.absent: set[nn.Parameter] = set()
        self.fills_grad = True
        self.stepped_by: object = None
        self.changed: list[Callable[[], None]] = []
        self._flats: list[FlatParameters] = []
        self._views: dict[str, Tensor] = {}
        self._parameter_of: dict[str, nn.Parameter] = {}
        self._pending: dict[Bucket, Reduction] = {}
        self._open: dict[Bucket, set[int]] = {}  # bucket -> stages that are not done
        self._awaited: dict[Bucket, set[nn.Parameter]] = {}  # parameters that the last backward has not reached
        self._complete: set[Bucket] = set()  # buckets whose gradients of this step are complete
        self._lock = threading.Lock()
        self._stream = StepStream(self.buckets[0].flat.device if self.buckets else torch.device("cpu"))
        self._hooks: list[Any] = []  # autograd's nodes live only as long as something holds them
        for bucket in self.buckets:
            if bucket in self._by_actions:
                self._parameter_of |= {slot.held.name: slot.held.parameter for slot in bucket.slots}
                continue
            for slot, view in bucket.views(bucket.flat):
                self._parameter_of[slot.held.name] = slot.held.parameter
                self.main.attach(slot.held.parameter, view)
                self._views[slot.held.name] = view
            for parameter in bucket.parameters if bucket.axis.size > 1 else ():
                node: Any = get_gradient_edge(parameter).node
                node.register_hook(partial(self._reached, bucket, parameter))
                self._hooks.append(node)

    @property
    def held(self) -> list[Tensor]:
        """The gradients' buffers, and this rank's shares of parameters that are gathered."""
        shares = [] if self.shards is None else [flat.share for flat in self.shards.parameters.values()]
        return [*(each for bucket in self.buckets for each in (bucket.flat, bucket.part)), *shares]

    @property
    def gathered(self) -> list[Tensor]:
        """The buffers whose storages have a size only while the parameters in them are gathered."""
        return [] if self.shards is None else [flat.flat for flat in self.shards.parameters.values()]

    def begin(self) -> None:
        """Prepare the buckets for a step; call it before the first forward."""
        self._stream.begin()
        self._pending, self._awaited, self._complete = {}, {}, set()
        if self.shards is not None:
            self.shards.begin()
            self.shards.release_all()
        # In the order in which they start, the same on all replicas, whose schedules may complete stages in different ones.
        late = sorted(self.buckets, key=lambda bucket: AFTER_TIES in bucket.stages)
        self._open = {bucket: set(bucket.stages) for bucket in late if bucket not in self._by_actions}
        for bucket in self.buckets:
            self._open_bucket(bucket)
        self.absent = set()
        self.main.accepting = True

    def last_backward(self, stage: int) -> None:
        """Call this before the last backward of a stage if it is a single autograd call and defers no weight gradient.

        The reduction of a bucket then starts as soon as its last gradient is complete and overlaps with the rest of the
        backward. It does not in the first step, which detects layers that accumulate gradients in a nested backward pass
        (reentrant checkpointing). The buckets of such layers, and all later ones, wait for the end of the stage.
        """
        if self.syncing and not self._first:
            for bucket, stages in self._open.items():
                if stages and (stages != {stage} or bucket in self._inner):
                    return
                if stages:
                    self._awaited[bucket] = set(bucket.parameters)

    def stage_done(self, stage: int) -> None:
        """Start the reductions of a stage after its last backward (AFTER_TIES: after the sum over pipeline ranks)."""
        for stages in self._open.values():
            stages.discard(stage)
        if self.syncing:
            with self._lock:
                for bucket, stages in self._open.items():
                    if stages:
                        break
                    self._start(bucket)

    def complete(self, stage: int) -> None:
        """Wait for the reductions of a stage whose last backward is done, so that an action after it can read `.grad`.

        Nothing happens before the stage's last backward, or where gradients are sharded.
        """
        if not self.sharded:
            self._finish([bucket for bucket in self.buckets if stage in bucket.stages and not self._open[bucket]])

    def finish(self) -> None:
        """Start the remaining reductions of the step and wait for all of them."""
        self._finish(self.buckets)
        self.main.accepting = False
        self._first = False

    def _finish(self, buckets: Iterable[Bucket]) -> None:
        """Complete the gradients of these buckets, unless they are complete."""
        buckets = [bucket for bucket in buckets if bucket not in self._complete]
        self._complete.update(buckets)
        if self.syncing:
            for bucket in buckets:
                self._start(bucket)
            marks = self._start_marks()
            for bucket in buckets:
                bucket.part = self._pending[bucket]().view(-1)
            sums: dict[Bucket, Tensor] = {}
            for marked, pending in marks:
                sums |= zip(marked, torch.split(pending.wait(), [len(each.slots) for each in marked]), strict=True)
            self._sum_partial(buckets)
            for bucket in buckets:
                self.absent |= self._absent_everywhere(bucket, sums.get(bucket))
        for bucket in buckets:
            if not self.syncing:
                self.main.finalize(bucket.parameters)
                self.absent |= self.main.absent.intersection(bucket.parameters)
            if bucket.before is not None:
                self.absent -= set(bucket.parameters) - bucket.absent_before
            if self.syncing and bucket.before is not None:
                bucket.part += bucket.before
                bucket.before = None
            bucket.content = "reduced" if self.syncing else "local"
            self._show(bucket)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank without reducing them, for the steps inside the context.

        Raises UsageError where actions of the schedule reduce them.
        """
        if self._by_actions:
            raise UsageError(
                "no_sync: the schedule reduces gradients by REDUCE_GRAD, and accumulates none without; leave it out"
            )
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def flat_parameters(self) -> list[FlatParameters]:
        """Return the parameters of each bucket as one buffer."""
        if not self._flats:
            sharded = self.shards.parameters if self.shards is not None else {}
            self._flats = [sharded.get(bucket) or FlatParameters(bucket, self.sharded) for bucket in self.buckets]
        return self._flats

    @property
    def unsummed(self) -> bool:
        """Return whether gradients come from a step under `no_sync`."""
        return any(bucket.content == "local" for bucket in self.buckets)

    def require_summed(self) -> None:
        """Raise UsageError if gradients come from a step under `no_sync`."""
        if self.unsummed:
            raise UsageError(
                "the gradients are not summed over the replicas yet, as they come from a step under no_sync(): they can be "
                "dropped, and changed after a step outside"
            )

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for bucket in self.buckets:
            bucket.content, bucket.before = "empty", None
            for parameter in bucket.parameters:
                parameter.grad = None

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter in its shape, or None if no micro-batch of any replica used the parameter.

        Raises UsageError for a parameter that is not trainable.
        """
        if name not in self._views:
            raise UsageError(f"no gradient is kept for {name!r}")
        return None if self._parameter_of[name] in self.absent else self._views[name]

    @torch.no_grad()
    def whole_gradients(self) -> dict[str, Tensor | None]:
        """Return the gradient of each parameter by name, in its shape and gathered from all replicas if gradients are sharded.

        None marks a missing gradient, as in `gradient`. This is a collective call over the replicas.
        """
        whole: dict[str, Tensor | None] = {}
        for bucket in self.buckets:
            flat = bucket.flat
            if self.sharded and bucket.axis.size > 1:
                flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.flat.device)
                flat[bucket.share] = bucket.part
                start_gather_slices(flat, bucket.axis).wait()
            for slot, view in bucket.views(flat):
                whole[slot.held.name] = None if slot.held.parameter in self.absent else view
        return whole

    def put_back(self, absent: set[nn.Parameter]) -> None:
        """Mark the buckets as reduced again, after the reduced gradients of a step were copied back into their parts.

        Args:
            absent: value of `self.absent` after that step.
        """
        self.absent = absent
        for bucket in self.buckets:
            bucket.content = "reduced"
            self._show(bucket)

    # -- states of a bucket ----------------------------------------------------------------------------------------------

    def _open_bucket(self, bucket: Bucket) -> None:
        """Prepare a bucket for a step: save gradients that are already reduced, and keep local ones to accumulate into."""
        if self.in_grad(bucket):
            self._read_grads(bucket)
        for parameter in bucket.parameters:
            parameter.grad = None
        if bucket.content == "reduced":
            bucket.before = bucket.part.clone()
            bucket.absent_before = frozenset(self.absent.intersection(bucket.parameters))
        if bucket.content != "local":
            self.main.reset(bucket.parameters)

    def _read_grads(self, bucket: Bucket) -> None:
        """Apply what the caller did to `.grad` since the last step: drop gradients set to None, copy in replaced ones."""
        if all(parameter.grad is None for parameter in bucket.parameters):
            bucket.content, bucket.before = "empty", None
            return
        for slot, view in bucket.views(bucket.flat):
            parameter, gradient = slot.held.parameter, slot.held.parameter.grad
            if gradient is None:
                self.absent.add(parameter)
                self.main.absent.add(parameter)
                bucket.absent_before |= {parameter}
                view.zero_()
                if bucket.before is not None:
                    bucket.before[slot.start : slot.stop].zero_()
            elif gradient is not self._views[slot.held.name]:
                if bucket.visible or not torch.equal(gradient, view.to(gradient.dtype)):
                    view.copy_(gradient)  # else the fp32 sum is as filled, and more precise
                self.absent.discard(parameter)
                self.main.absent.discard(parameter)
        if bucket.content == "empty":
            bucket.content = "local"

    def _start(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket, unless it has started."""
        if bucket in self._pending:
            return
        self._awaited.pop(bucket, None)
        if bucket in self._by_actions:
            self._pending[bucket] = lambda: bucket.part
            return
        self.main.finalize(bucket.parameters)
        if bucket.axis.size > 1 or bucket.partial:
            bucket.mark(self.main.absent)
        self._pending[bucket] = self._reducer.start(bucket)

    def _start_marks(self) -> list[tuple[list[Bucket], PendingCollective[Tensor]]]:
        """Start summing the marks of all buckets, with one all-reduce per axis; needed only if gradients are sharded."""
        axes = dict.fromkeys(bucket.axis for bucket in self.buckets if bucket.axis.size > 1) if self.sharded else ()
        started = []
        for axis in axes:
            buckets = [bucket for bucket in self.buckets if bucket.axis == axis]
            marks = torch.cat([self._marks(bucket) for bucket in buckets])
            started.append((buckets, start_all_reduce(marks, axis)))
        return started

    def _marks(self, bucket: Bucket) -> Tensor:
        if self.shards is not None and bucket in self._by_actions:
            return self.shards.marks(bucket)
        return bucket.flat[bucket.marks].real.float()

    def _absent_everywhere(self, bucket: Bucket, sums: Tensor | None) -> set[nn.Parameter]:
        """Return the parameters without a gradient on any rank of the axis.

        Args:
            sums: sums of the marks; None reads them from the bucket.
        """
        absent = self.main.absent.intersection(bucket.parameters)
        if self.shards is not None and bucket in self._by_actions:
            absent = self.shards.absent((bucket,))
        if not absent or not (bucket.axis.size > 1 or bucket.partial):
            return absent
        # Waits for a GPU, but only if a gradient is absent.
        totals = (bucket.flat[bucket.marks] if sums is None else sums).tolist()
        return {parameter for parameter, total in zip(bucket.parameters, totals, strict=True) if not total}

    def _sum_partial(self, buckets: Iterable[Bucket]) -> None:
        """Sum partial gradients over tp too: each tp rank computed them from its own tokens only."""
        if self.mesh.tp.size == 1:
            return
        for pending in [start_all_reduce(bucket.part, self.mesh.tp) for bucket in buckets if bucket.partial]:
            pending.wait()

    def in_grad(self, bucket: Bucket) -> bool:
        """Return whether `.grad` of the bucket's parameters holds their gradients after a step."""
        return (bucket.visible or self.fills_grad) and not self.sharded

    def _show(self, bucket: Bucket) -> None:
        """Fill `.grad`: with views of the buffer, or of one copy of it in the parameters' dtype."""
        if self.in_grad(bucket):
            views = self._views
            if not bucket.visible:
                copy = bucket.flat.to(bucket.parameters[0].dtype)
                views = {slot.held.name: view for slot, view in bucket.views(copy)}
            for slot in bucket.slots:
                absent = slot.held.parameter in self.absent
                slot.held.parameter.grad = None if absent else views[slot.held.name]

    def _reached(self, bucket: Bucket, parameter: nn.Parameter, *_: Any) -> None:
        """Handle a complete gradient of a parameter in the current backward pass, and start reductions that can start."""
        if self._stage_backward is not None and not self._stage_backward.running:
            self._inner.add(bucket)
            return
        if bucket not in self._awaited:
            return
        with self._lock:  # on a GPU, autograd runs hooks in its own threads
            self._awaited.get(bucket, set()).discard(parameter)
            for waiting, awaited in list(self._awaited.items()):  # in the order of `_open`
                if awaited:
                    return  # buckets start in the same order on every rank
                with self._stream.in_order():
                    self._start(waiting)


def allreduce_gradients(parameters: Iterable[nn.Parameter], group: Any = None) -> None:
    """Set every `.grad` to the sum over the group, for training loops without a Pipeline.

    All ranks of the group pass the same parameters in the same order. A gradient that is None on every rank stays None;
    otherwise None counts as zeros. One collective per dtype.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for members in by_dtype.values():
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in members]
        present = [float(p.grad is not None) for p in members]
        marks = torch.tensor(present, dtype=grads[0].dtype, device=grads[0].device)
        flat = torch.cat([gradient.reshape(-1) for gradient in [*grads, marks]])
        start_collective(dist.all_reduce, flat, None, dist.ReduceOp.SUM, group=group).wait()
        *pieces, marks = torch.split(flat, [*(p.numel() for p in members), len(members)])
        anywhere = present if all(present) else marks.tolist()
        for parameter, piece, mark in zip(members, pieces, anywhere, strict=True):
            parameter.grad = piece.view(parameter.shape) if mark else None
