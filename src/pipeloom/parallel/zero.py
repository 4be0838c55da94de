"""Parameters and gradients that the actions of a schedule gather, free and reduce (ZeRO stages 2 and 3, arXiv 1910.02054).

A stage that gathers has its parameters whole only between UNSHARD and RESHARD; at all other times a replica holds its share. The
storage of the whole is resized in place, so what autograd saved of a parameter is there again after the next gather. torch's
`fully_shard` does not serve: its hooks gather, free and reduce in an order of their own, and it knows no main gradients.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeloom.ops.main_gradient import MainGradients
from pipeloom.parallel.buckets import Bucket, FlatParameters
from pipeloom.parallel.collectives import start_gather_slices, start_reduce_scatter
from pipeloom.parallel.mesh import Axis, group_of_members
from pipeloom.parallel.shared_memory_sum import SharedBuffers


class StageExchange:
    """The gathers and reductions of the buckets of one axis, in a process group of their own.

    Processes of one machine read each other's shares and gradients in memory. gloo's sockets take five to ten times as much of a
    processor's time, which the computation beside it lacks. The shares lie in that memory; gradients are copied to it, one bucket
    at a time, since there is room for them only until they are reduced.

    Args:
        axis: the replicas. Construction is collective over it.
        gathered, reduced: the buckets.
        share_memory: whether to share memory where all processes can.
        timeout: seconds to wait for another process there.
    """

    def __init__(
        self, axis: Axis, gathered: Sequence[Bucket], reduced: Sequence[Bucket], share_memory: bool, timeout: float
    ) -> None:
        self.axis = replace(axis, group=group_of_members(axis.ranks))
        self._timeout = timeout
        self._number = {bucket: at for at, bucket in enumerate(gathered)}
        sizes = [bucket.size // axis.size for bucket in gathered]
        dtypes = [bucket.parameters[0].dtype for bucket in gathered]
        sizes.append(max((bucket.size * bucket.dtype.itemsize for bucket in reduced), default=1))
        on_cpu = all(bucket.flat.device.type == "cpu" for bucket in (*gathered, *reduced))
        self._memory = (
            SharedBuffers.connect(self.axis, sizes, [*dtypes, torch.uint8]) if share_memory and on_cpu else None
        )

    def share(self, bucket: Bucket, values: Tensor) -> Tensor:
        """Return a tensor with these values of this replica's share, which the others can gather."""
        return values.clone() if self._memory is None else self._memory.own[self._number[bucket]].copy_(values)

    def gather(self, bucket: Bucket, share: Tensor, flat: Tensor) -> None:
        """Gather the shares of all replicas into `flat`. Afterwards each may write to its share: all have read it."""
        if self._memory is None:
            start_gather_slices(flat, self.axis, share).result()
            return
        at = self._number[bucket]
        self._memory.start(at, lambda shares: torch.cat(list(shares), out=flat))
        self._memory.wait(at, self._timeout)

    def reduce_scatter(self, bucket: Bucket, full: Tensor) -> Tensor:
        """Return this replica's share of the sum of `full` over the replicas."""
        if self._memory is None:
            return start_reduce_scatter(full.view(self.axis.size, -1), self.axis).result().view(-1)
        at, mine = len(self._number), bucket.share
        room = self._memory.own[at][: full.nbytes].view(full.dtype)
        for others in (slice(0, mine.start), slice(mine.stop, bucket.size)):
            room[others] = full[others]
        total = torch.empty_like(full[mine])

        def add(rooms: Sequence[Tensor]) -> None:
            parts = [each[: full.nbytes].view(full.dtype)[mine] for each in rooms]
            parts[self.axis.index] = full[mine]
            torch.add(parts[0], parts[1], out=total)
            for part in parts[2:]:
                total.add_(part)  # in the order of the replicas

        self._memory.start(at, add)
        self._memory.wait(at, self._timeout)
        return total


class ShardedParameters(FlatParameters):
    """The parameters of one bucket, whole only while they are gathered.

    A step gathers them into `flat`. Between steps they are gathered into memory of their own, which whoever reads it may keep
    (a checkpoint that is being written).

    Attributes:
        share: this replica's elements, in the parameters' dtype.
    """

    stays = False

    def __init__(self, bucket: Bucket, exchange: StageExchange) -> None:
        super().__init__(bucket, sharded=True)
        self._exchange = exchange
        self.share = exchange.share(bucket, self.flat[self.mine])
        self._whole: Tensor | None = self.flat  # between steps
        self._changed = True  # the whole, by something other than an optimizer
        self.flat = torch.empty_like(self.flat)
        self._views = [(slot.held.parameter, view) for slot, view in bucket.views(self.flat)]
        self._gathered = True
        self._free()

    @property
    def held(self) -> Tensor:
        return self.share

    def values(self, section: slice) -> Tensor:
        return self.share[section.start - self.mine.start : section.stop - self.mine.start]

    def gather(self) -> None:
        """Gather the whole for a step from the shares of all replicas; collective over the bucket's axis."""
        self.release()
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.itemsize)
        self._gathered = True
        self._gather_into(self.flat)

    @torch.no_grad()
    def gather_between(self) -> None:
        """Gather the whole between steps, unless it is there; collective as `gather`."""
        if self._whole is None:
            self._whole = torch.empty(self.flat.shape, dtype=self.flat.dtype, device=self.flat.device)
            self._gather_into(self._whole)
            for slot, view in self.bucket.views(self._whole):
                slot.held.parameter.data = view

    @torch.no_grad()
    def _gather_into(self, flat: Tensor) -> None:
        self._exchange.gather(self.bucket, self.share, flat)

    def note_change(self) -> None:
        """Note that the whole was written to, not by the optimizer: its values go to the share."""
        self._changed = self._whole is not None

    @torch.no_grad()
    def read(self) -> None:
        if self._changed and self._whole is not None:
            self.share.copy_(self._whole[self.mine])
        self._changed = False

    def release(self) -> None:
        """Free the whole."""
        self.read()
        if self._whole is not None:
            self._whole = None
            for parameter, view in self._views:
                parameter.data = view
        self._free()

    def _free(self) -> None:
        if self._gathered:
            self.flat.untyped_storage().resize_(0)
            self._gathered = False


class StageShards:
    """The buckets of one process's stages that follow a schedule's UNSHARD, RESHARD and REDUCE_GRAD.

    Those of weights that several stages hold do not. Construction is collective over the buckets' axes; so are `gather` and
    `reduce`, which one thread at a time calls, in the order of the schedule, in process groups of their own.

    Args:
        buckets: of all stages.
        main: what accumulates the gradients.
        gathered: the stages that gather their parameters.
        reduced: the stages whose gradients are reduced by actions.
        share_memory, timeout: as of `StageExchange`.

    Attributes:
        parameters: bucket -> its parameters, of the stages that gather them.
        reduced: the buckets whose gradients are reduced by actions.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        main: MainGradients,
        gathered: Collection[int],
        reduced: Collection[int],
        share_memory: bool,
        timeout: float,
    ) -> None:
        self._main = main
        self._gathered: dict[int, list[ShardedParameters]] = defaultdict(list)
        self._reduced: dict[int, list[Bucket]] = defaultdict(list)
        alone = [bucket for bucket in buckets if len(bucket.stages) == 1 and bucket.axis.size > 1]
        gathers, reduces = ([b for b in alone if min(b.stages) in stages] for stages in (gathered, reduced))
        self.reduced = frozenset(reduces)
        self._exchanges: dict[tuple[int, ...], StageExchange] = {}
        for axis in dict.fromkeys(bucket.axis for bucket in alone if bucket in {*gathers, *reduces}):
            there, taken_over = ([bucket for bucket in each if bucket.axis == axis] for each in (gathers, reduces))
            self._exchanges[axis.ranks] = StageExchange(axis, there, taken_over, share_memory, timeout)
        self.parameters = {bucket: ShardedParameters(bucket, self._exchange(bucket)) for bucket in gathers}
        for bucket, flat in self.parameters.items():
            self._gathered[min(bucket.stages)].append(flat)
        for bucket in reduces:
            self._reduced[min(bucket.stages)].append(bucket)
            self._attach(bucket, bucket.flat.new_empty(0))
            bucket.part = bucket.flat
        self.begin()

    def _exchange(self, bucket: Bucket) -> StageExchange:
        return self._exchanges[bucket.axis.ranks]

    # -- parameters ------------------------------------------------------------------------------------------------------

    def gather(self, stage: int) -> None:
        """UNSHARD: gather the parameters of a stage."""
        for flat in self._gathered[stage]:
            flat.gather()

    def release(self, stage: int) -> None:
        """RESHARD: free them."""
        for flat in self._gathered[stage]:
            flat.release()

    def gather_between(self, stage: int | None = None) -> None:
        """Gather the parameters of a stage, or of all (None), between steps."""
        for flat in self.parameters.values() if stage is None else self._gathered[stage]:
            flat.gather_between()

    def release_all(self) -> None:
        """Free the parameters of all stages."""
        for flat in self.parameters.values():
            flat.release()

    def note_change(self) -> None:
        """Note that parameters that are whole now were written to, not by the optimizer."""
        for flat in self.parameters.values():
            flat.note_change()

    # -- gradients -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a step: drop what an earlier one left."""
        self._full: dict[int, deque[list[Tensor]]] = defaultdict(deque)
        self._summed: set[Bucket] = set()
        self._present: dict[Bucket, set[nn.Parameter]] = defaultdict(set)

    def open(self, stage: int) -> None:
        """Make the buffers to which the next backwards of a stage add, before the first of these."""
        for bucket in self._reduced[stage]:
            self._attach(bucket, torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.flat.device))
            self._main.reset(bucket.parameters)

    def take(self, stage: int) -> None:
        """Take over what the backwards of a stage have added, behind the last one before a REDUCE_GRAD."""
        for bucket in self._reduced[stage]:
            self._main.finalize(bucket.parameters)
            self._present[bucket] |= set(bucket.parameters) - self._main.absent
        self._full[stage].append([bucket.flat for bucket in self._reduced[stage]])
        for bucket in self._reduced[stage]:
            self._attach(bucket, bucket.flat.new_empty(0))

    @torch.no_grad()
    def reduce(self, stage: int) -> None:
        """REDUCE_GRAD: add the sum over the replicas of what was taken to this replica's share."""
        fulls = self._full[stage].popleft()
        for at, bucket in enumerate(self._reduced[stage]):
            part = self._exchange(bucket).reduce_scatter(bucket, fulls[at])
            fulls[at] = part  # the full gradients are freed
            if bucket in self._summed:
                bucket.part += part
            else:
                bucket.part = part
                self._summed.add(bucket)

    def marks(self, bucket: Bucket) -> Tensor:
        """Return 1 for each parameter of the bucket with a gradient here in this step, else 0: [parameters]."""
        present = [float(parameter in self._present[bucket]) for parameter in bucket.parameters]
        return torch.tensor(present, dtype=torch.float32, device=bucket.flat.device)

    def absent(self, buckets: Iterable[Bucket]) -> set[nn.Parameter]:
        """Return the parameters without a gradient here in this step."""
        return {p for bucket in buckets for p in bucket.parameters if p not in self._present[bucket]}

    def _attach(self, bucket: Bucket, flat: Tensor) -> None:
        bucket.flat = flat
        for slot in bucket.slots:
            whole = flat[slot.start : slot.stop].view(slot.held.parameter.shape) if len(flat) else flat
            self._main.attach(slot.held.parameter, whole)
