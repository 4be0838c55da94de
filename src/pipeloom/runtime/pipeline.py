"""Pipeline: a model's layers, a schedule, and the processes that run it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.errors import ConfigError, DistributedError, UsageError
from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.mesh import Mesh, PipelineMesh
from pipeloom.runtime import handshake
from pipeloom.runtime.alarm import Alarm
from pipeloom.runtime.assembly import assemble
from pipeloom.runtime.batch import (
    Microbatches,
    Weighing,
    Weight,
    as_inputs,
    batch_rows,
    chosen_sizes,
    join,
    split_batch,
)
from pipeloom.runtime.connections import Connections
from pipeloom.runtime.gradients import Gradients
from pipeloom.runtime.holdings import Holdings
from pipeloom.runtime.layers import LayerSource
from pipeloom.runtime.losses import LossSpread, PendingLoss
from pipeloom.runtime.lowering import RankProgram
from pipeloom.runtime.names import Names
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.rank import Loss, Rank
from pipeloom.runtime.status import Status
from pipeloom.runtime.trace import clock_offset, gather_timeline
from pipeloom.runtime.where import device_of, mesh_of, sum_over_replicas
from pipeloom.runtime.work import StepResult
from pipeloom.schedule.channels import Message
from pipeloom.schedule.check import check
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import Timeline

_STAGES_DEPEND_ON: dict[str, Callable[[Schedule], Any]] = {
    "placement": lambda schedule: schedule.placement,
    "micro-batches": lambda schedule: schedule.microbatches,
    "routes": lambda schedule: (schedule.routes, schedule.route_of),
}


class Pipeline(Holdings):
    """One process's part of a pipeline; every process of the mesh makes one, with the same arguments.

    Args:
        layers: the model, in order: factories (with a `name`, their parameters' prefix), or modules on the meta device. A
            rank builds its own stages' layers only.
        schedule: what to run; it is checked first.
        loss: `loss(output, targets)`, the mean over one micro-batch's targets.
        mesh: a Mesh of pipelines side by side (data and tensor parallel); or one pipeline's processes: a PipelineMesh, a
            torch DeviceMesh with an axis `pp` (other axes are the caller's), or None for all processes.
        weight: `weight(targets)` of a micro-batch in the step's mean; default: the number of targets.
        stages: layers of each stage position; default: spread evenly.
        tied: groups of parameter names that are one weight.
        options: see RuntimeOptions.

    Attributes:
        mesh: the processes of the run; a plain pipeline is a mesh too.
        next_step: the number of the next step, which layers that draw random numbers ask for; set it to resume, or to
            repeat a step.

    Raises:
        ScheduleError: a schedule that cannot run. ConfigError: sizes that do not fit. DistributedError: ranks that disagree.
    """

    def __init__(
        self,
        layers: Sequence[LayerSource],
        schedule: Schedule,
        *,
        loss: Loss,
        mesh: Mesh | PipelineMesh | DeviceMesh | None = None,
        weight: Weight | None = None,
        stages: Sequence[int] | None = None,
        tied: Sequence[Sequence[str]] = (),
        options: RuntimeOptions = RuntimeOptions(),
    ) -> None:
        check(schedule, transport="batched" if options.transport == "batched" else "individual")
        self.schedule = schedule
        self.options = options
        self.mesh = mesh_of(mesh)
        self._line = self.mesh.pipeline
        self.device = device_of(options, self.mesh)
        self.next_step = 0
        self._weight = weight
        self._result = StepResult()
        if self.ranks != schedule.ranks:
            raise ConfigError(f"the schedule has {schedule.ranks} ranks, and the pipeline {self.ranks} processes")
        prefix = ""
        if self.distributed:
            names = [str(getattr(layer, "name", at)) for at, layer in enumerate(layers)]
            facts = handshake.facts(schedule, names, stages, tied, options, self.mesh)
            prefix = handshake.shake_hands(self.mesh.everyone, facts, options.timeout)
        first = self.mesh.place.dp == self.mesh.place.tp == 0  # a fault is made in one pipeline
        assembled = assemble(
            layers, schedule, self.rank, stages, tied, loss, options if first else options.without_fault(), self.device
        )
        super().__init__(assembled, self.mesh, options)
        self._rank: Rank = assembled.rank
        self._rank.status = Status(self.rank, Names(self.mesh))
        self._alarm = Alarm(self._rank.status)
        self._losses = LossSpread(self.mesh, schedule, self.device, self._alarm)
        self._connections = Connections(self.mesh, self._rank, self.device, options)
        self._gradients = Gradients(self._assembly, self.mesh, options, self._alarm)
        if self.distributed:
            self._connections.open(prefix)
            self._gradients.start_equal(self._connections.sums)
            if options.monitor:
                self._connections.watch(prefix, self._alarm)

    # -- running ---------------------------------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any, **keywords: Any) -> Tensor:
        """Forward and backward of the whole schedule; gradients add to `.grad` of this rank's parameters.

        Every rank of a data-parallel replica passes the same batch, each replica its own (a rank with neither a first nor
        a last stage may pass tensors on the meta device). Tensors are cut along dimension 0; keyword arguments go to every
        layer that takes them.

        Returns:
            the mean loss over all targets of all replicas' batches, a 0-dim fp32 tensor, the same on every rank.
        """
        return self.forward_backward(inputs, targets, **keywords).wait()

    def forward_backward(self, inputs: Any, targets: Any, **keywords: Any) -> PendingLoss:
        """As `step`, but returns when this rank is done: the loss is still on its way from a rank that may not be."""
        self._rank.status.step = self.next_step
        self._rank.faults.at_step(self.next_step)
        batch = self._split(inputs, targets, keywords, self.schedule.microbatches)
        self._gradients.begin()
        self._result = self._run(self._rank.program(), batch)
        self._gradients.finish(self._connections.sums)
        self.next_step += 1
        return self._losses.start(self._result.loss)

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any, **keywords: Any) -> Tensor:
        """The mean loss, forward only. A batch of fewer rows than micro-batches is cut into one micro-batch a row.

        Where layers exchange tokens between replicas (experts), all replicas' batches must have as many micro-batches.
        """
        batch = self._split(inputs, targets, keywords, self._forward_count(inputs))
        return self._losses.start(self._run(self._rank.program(batch.count), batch).loss).wait()

    @torch.no_grad()
    def predict(self, inputs: Any, **keywords: Any) -> Any:
        """The outputs of the last stage for the whole batch, on the rank that holds it; None on the others."""
        batch = self._split(inputs, None, keywords, self._forward_count(inputs))
        outputs = self._run(self._rank.program(batch.count), batch, keep_outputs=True).outputs
        if len(self.schedule.routes) > 1 and self.group is not None:
            gathered: list[Any] = [None] * self.ranks
            with self._alarm.telling():
                dist.all_gather_object(gathered, outputs, group=self.group)
            outputs = {mb: output for part in gathered for mb, output in part.items()} if outputs else {}
        return join([outputs[mb] for mb in sorted(outputs)]) if len(outputs) == batch.count else None

    def _run(self, program: RankProgram, batch: Microbatches, keep_outputs: bool = False) -> StepResult:
        transport = self._connections.transport(program)
        with self._alarm.telling():
            return drive(self._rank.run(program, batch, transport, keep_outputs=keep_outputs))

    # -- what it holds ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's place in its pipeline."""
        return self._line.rank

    @property
    def ranks(self) -> int:
        """Of the pipeline."""
        return len(self._line.ranks)

    @property
    def group(self) -> Any:
        """The pipeline's process group; None for one process."""
        return self._line.group

    @property
    def distributed(self) -> bool:
        """Whether other processes take part."""
        return self.mesh.everyone.group is not None

    @property
    def control(self) -> Any:
        """A gloo group for small CPU messages between the pipeline's ranks; None for one process."""
        return self._connections.control

    @property
    def run_control(self) -> Any:
        """The same between all ranks of the run, by their numbers in `mesh.everyone`."""
        return self._connections.run_control

    @property
    def peak_activations(self) -> int:
        """The most stage-micro-batches alive on this rank at once in the last step, counted."""
        return self._result.peak_alive

    @property
    def exposed(self) -> float | None:
        """Seconds for which this rank's computation stood still for expert all-to-alls in the last step.

        None: not measured (on a GPU without `trace`).
        """
        return self._result.exposed

    @property
    def sync(self) -> GradientSync | None:
        """The reduction of gradients over the mesh; None where there is none, and `.grad` is all there is."""
        return self._gradients.sync

    def no_sync(self) -> AbstractContextManager[None]:
        """Steps inside add to this process's gradients only; the next step outside sums all of that over the replicas."""
        return self._gradients.no_sync()

    def zero_grad(self) -> None:
        """Sets every gradient to None."""
        self._gradients.zero(self._assembly.parameters)

    def adopt(self, schedule: Schedule) -> None:
        """Runs `schedule` from the next step on, over the same stages, weights and connections; every rank calls it alike.

        Raises ConfigError where it needs other stages (placement, routes, micro-batches, backwards that are split where none
        was at the start), ScheduleError where it cannot run.
        """
        check(schedule, transport="batched" if self.options.transport == "batched" else "individual")
        for words, of in _STAGES_DEPEND_ON.items():
            if of(schedule) != of(self.schedule):
                raise ConfigError(f"the pipeline cannot change its {words} from {of(self.schedule)} to {of(schedule)}")
        if schedule.splits_backward and not all(stage.splits for stage in self._rank.stages.values()):
            raise ConfigError("the pipeline was made for a schedule that splits no backward, and this one does")
        self.schedule = schedule
        self._rank.follow(schedule)
        self._result = StepResult()

    def timeline(self) -> Timeline:
        """This pipeline's last step as measured, in seconds, with the ranks' clocks aligned; collective over its ranks."""
        if not self._result.starts:
            raise UsageError("no step has run yet")
        offset = clock_offset(self._line, self._connections.sums)
        return gather_timeline(self._rank.schedule, self._line, self._result, offset)

    def close(self) -> None:
        """Ends the watchdog. Call it on every rank before the process group is destroyed."""
        self._losses.close()
        if self._alarm.monitor is not None:
            self._alarm.monitor.close()
            self._alarm.monitor = None
        self._connections.close()

    # -- a batch -----------------------------------------------------------------------------------------------------------

    def _forward_count(self, inputs: Any) -> int:
        return min(self.schedule.microbatches, batch_rows(as_inputs(inputs)))

    def _split(self, inputs: Any, targets: Any, keywords: Mapping[str, Any], count: int) -> Microbatches:
        sizes = chosen_sizes(inputs, count, self.options.microbatch_sizes)
        total = partial(sum_over_replicas, mesh=self.mesh, device=self.device, alarm=self._alarm)
        weighing = Weighing(self._weight, float if targets is None else total, self.mesh.place.dp, self.next_step)
        return split_batch(inputs, targets, keywords, sizes, weighing)


def drive(run: Generator[Message, None, StepResult]) -> StepResult:
    """Runs one rank's engine to its end, on a transport that waits by itself."""
    while True:
        try:
            message = next(run)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        raise DistributedError(f"{message.words} never comes: there is no other rank in this process")
