"""Pipeline: a model's layers, a schedule, and the processes that run it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.errors import ConfigError, DistributedError, UsageError
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime import handshake, ties
from pipeloom.runtime.assembly import Assembly, assemble
from pipeloom.runtime.batch import Microbatches, Weight, as_inputs, batch_rows, chosen_sizes, join, split_batch
from pipeloom.runtime.buffers import BufferPool
from pipeloom.runtime.layers import LayerSource
from pipeloom.runtime.losses import PendingLoss
from pipeloom.runtime.lowering import RankProgram, forward_only, lower
from pipeloom.runtime.machines import share_memory
from pipeloom.runtime.monitor import Monitor
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.rank import Loss, Rank, StepResult
from pipeloom.runtime.shared_memory import SharedLinks, SharedMemoryTransport
from pipeloom.runtime.torch_transport import Links, TorchTransport
from pipeloom.runtime.trace import clock_offset, gather_timeline
from pipeloom.runtime.transport import InProcessTransport, Mailroom, PeerGone, Transport
from pipeloom.schedule.channels import Message
from pipeloom.schedule.check import check
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import Timeline

_LOSS_TAG = 16
_STAGES_DEPEND_ON: dict[str, Callable[[Schedule], Any]] = {
    "placement": lambda schedule: schedule.placement,
    "micro-batches": lambda schedule: schedule.microbatches,
    "routes": lambda schedule: (schedule.routes, schedule.route_of),
    "split of the backward": lambda schedule: schedule.splits_backward,
}


class Pipeline:
    """One process's part of a pipeline; every process of the mesh makes one, with the same arguments.

    Args:
        layers: the model, in order: factories (with a `name`, their parameters' prefix), or modules on the meta device. A
            rank builds its own stages' layers only.
        schedule: what to run; it is checked first.
        loss: `loss(output, targets)`, the mean over one micro-batch's targets.
        mesh: the pipeline's processes; a PipelineMesh, a torch DeviceMesh with an axis `pp`, or None for all processes.
        weight: `weight(targets)` of a micro-batch in the step's mean; default: the number of targets.
        stages: layers of each stage position; default: spread evenly.
        tied: groups of parameter names that are one weight.
        options: see RuntimeOptions.

    Raises:
        ScheduleError: a schedule that cannot run. ConfigError: sizes that do not fit. DistributedError: ranks that disagree.
    """

    def __init__(
        self,
        layers: Sequence[LayerSource],
        schedule: Schedule,
        *,
        loss: Loss,
        mesh: PipelineMesh | DeviceMesh | None = None,
        weight: Weight | None = None,
        stages: Sequence[int] | None = None,
        tied: Sequence[Sequence[str]] = (),
        options: RuntimeOptions = RuntimeOptions(),
    ) -> None:
        check(schedule, transport="batched" if options.transport == "batched" else "individual")
        self.schedule = schedule
        self.options = options
        self.mesh = _mesh(mesh)
        self.device = _device(options, self.mesh)
        self._weight = weight
        self._steps = 0
        self._result = StepResult()
        self._programs: dict[int | None, RankProgram] = {}
        self._monitor: Monitor | None = None
        self._shared_links: SharedLinks | None = None
        self._loss_sends: list[tuple[Any, Tensor]] = []
        if len(self.mesh.ranks) != schedule.ranks:
            raise ConfigError(
                f"the schedule has {schedule.ranks} ranks, and the pipeline {len(self.mesh.ranks)} processes"
            )
        prefix = ""
        if self.mesh.group is not None:
            names = [str(getattr(layer, "name", at)) for at, layer in enumerate(layers)]
            facts = handshake.facts(schedule, names, stages, tied, options)
            prefix = handshake.shake_hands(self.mesh, facts, options.timeout)
        self._assembly: Assembly = assemble(layers, schedule, self.mesh.rank, stages, tied, loss, options, self.device)
        self._rank: Rank = self._assembly.rank
        self._pool = BufferPool(self.device)
        self._shared = ties.by_holders(self._assembly.ties)
        if self.mesh.group is not None:
            self._start_distributed(prefix)

    # -- running ---------------------------------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any, **keywords: Any) -> Tensor:
        """Forward and backward of the whole schedule; gradients add to `.grad` of this rank's parameters.

        Every rank passes the same batch (a rank with neither a first nor a last stage may pass tensors on the meta device).
        Tensors are cut along dimension 0; keyword arguments go to every layer that takes them.

        Returns:
            the mean loss over all targets of the batch, a 0-dim fp32 tensor, the same on every rank.
        """
        return self.forward_backward(inputs, targets, **keywords).wait()

    def forward_backward(self, inputs: Any, targets: Any, **keywords: Any) -> PendingLoss:
        """As `step`, but returns when this rank is done: the loss is still on its way from a rank that may not be."""
        self._steps += 1
        self._rank.status.step = self._steps - 1
        self._rank.faults.at_step(self._steps - 1)
        batch = self._split(inputs, targets, keywords, self.schedule.microbatches)
        shared = [weight for weights in self._shared.values() for weight in weights]
        before = [weight.grad for weight in shared]
        for weight in shared:
            weight.grad = None  # only this step's part is summed over the holders
        self._result = self._run(self._program(None), batch)
        with self._telling():
            for holders, weights in self._shared.items():
                ties.sum_gradients(holders, self.rank, weights, self._control())
        for weight, old in zip(shared, before, strict=True):
            if old is not None and weight.grad is not None:
                weight.grad += old
        return self._spread(self._result.loss)

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any, **keywords: Any) -> Tensor:
        """The mean loss, forward only. A batch of fewer rows than micro-batches is cut into one micro-batch a row."""
        batch = self._split(inputs, targets, keywords, self._forward_count(inputs))
        return self._spread(self._run(self._program(batch.count), batch).loss).wait()

    @torch.no_grad()
    def predict(self, inputs: Any, **keywords: Any) -> Any:
        """The outputs of the last stage for the whole batch, on the rank that holds it; None on the others."""
        batch = self._split(inputs, None, keywords, self._forward_count(inputs))
        outputs = self._run(self._program(batch.count), batch, keep_outputs=True).outputs
        if len(self.schedule.routes) > 1 and self.mesh.group is not None:
            gathered: list[Any] = [None] * self.ranks
            dist.all_gather_object(gathered, outputs, group=self.mesh.group)
            outputs = {mb: output for part in gathered for mb, output in part.items()} if outputs else {}
        return join([outputs[mb] for mb in sorted(outputs)]) if len(outputs) == batch.count else None

    def _run(self, program: RankProgram, batch: Microbatches, keep_outputs: bool = False) -> StepResult:
        transport = self._transport(program)
        with self._telling():
            return drive(self._rank.run(program, batch, transport, keep_outputs=keep_outputs))

    # -- what it holds ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def ranks(self) -> int:
        return len(self.mesh.ranks)

    @property
    def group(self) -> Any:
        """The pipeline's process group; None for one process."""
        return self.mesh.group

    @property
    def control(self) -> Any:
        """A gloo group for small CPU messages between the ranks; None for one process."""
        return None if self.mesh.group is None else self._links.control

    @property
    def peak_activations(self) -> int:
        """The most stage-micro-batches alive on this rank at once in the last step, counted."""
        return self._result.peak_alive

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, parameter) of this rank's stages; a weight tied within the rank once, under its first name."""
        yield from self._assembly.parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._assembly.parameters.values()

    def owns(self, name: str) -> bool:
        """False where another rank holds the first copy of this tied weight: norms and checkpoints count it once."""
        return name not in self._assembly.copies

    def zero_grad(self) -> None:
        """Sets every gradient to None."""
        for parameter in self.parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Global name -> parameter or buffer of this rank's stages."""
        return {**dict(self.named_parameters()), **self._assembly.buffers}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies values by global name; raises UsageError when one of this rank's is missing."""
        for name, value in self.state_dict().items():
            if name not in state:
                raise UsageError(f"the state holds no {name!r}")
            with torch.no_grad():
                value.copy_(state[name])

    def adopt(self, schedule: Schedule) -> None:
        """Runs `schedule` from the next step on, over the same stages, weights and connections; every rank calls it alike.

        Raises ConfigError where it needs other stages (placement, routes, micro-batches, a backward that is split or not),
        ScheduleError where it cannot run.
        """
        check(schedule, transport="batched" if self.options.transport == "batched" else "individual")
        for words, of in _STAGES_DEPEND_ON.items():
            if of(schedule) != of(self.schedule):
                raise ConfigError(f"the pipeline cannot change its {words} from {of(self.schedule)} to {of(schedule)}")
        self.schedule = self._rank.schedule = schedule
        self._programs.clear()
        self._result = StepResult()

    def train(self, mode: bool = True) -> None:
        for stage in self._rank.stages.values():
            for module in stage.modules:
                module.train(mode)

    def eval(self) -> None:
        self.train(False)

    def timeline(self) -> Timeline:
        """The last step as measured, in seconds, with the ranks' clocks aligned; collective."""
        if not self._result.starts:
            raise UsageError("no step has run yet")
        offset = clock_offset(self.mesh, self._control())
        return gather_timeline(self.schedule, self.mesh, self._result, offset)

    def close(self) -> None:
        """Ends the watchdog. Call it on every rank before the process group is destroyed."""
        with contextlib.suppress(RuntimeError):  # a peer that is gone
            for work, _ in self._loss_sends:
                work.wait()
        self._loss_sends = []
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._shared_links is not None:
            self._shared_links.close()

    # -- set-up ----------------------------------------------------------------------------------------------------------

    def _start_distributed(self, prefix: str) -> None:
        batched = self.options.transport == "batched"
        channels = self._program(None).channels
        self._shared_links = share_memory(self.mesh, self.device, self.options, channels, prefix)
        self._links = Links(self.mesh, self._program(None).all_channels, self.device, batched)
        for holders, weights in self._shared.items():
            ties.start_equal(holders, self.rank, weights, self._control())
        if self.options.monitor:
            default: Any = dist.distributed_c10d._get_default_store()
            store = default.clone()  # its own connection: the main thread may be inside a wait on the other
            peers = {rank for channel in channels for rank in channel[:2]} - {self.rank}
            self._monitor = Monitor(
                store, prefix, self._rank.status, sorted(peers), self.ranks, self.options.timeout, self.options.notice
            )
            self._monitor.start()

    def _control(self) -> Any:
        if self.mesh.group is None:
            return None
        return self._links.control if self.device.type == "cpu" else self.mesh.group

    def _program(self, forward_count: int | None) -> RankProgram:
        """The training program, or the forward-only one of so many micro-batches; lowered once each."""
        if forward_count not in self._programs:
            schedule = self.schedule if forward_count is None else forward_only(self.schedule, forward_count)
            self._programs[forward_count] = lower(schedule, self.rank, self.options)
        return self._programs[forward_count]

    def _transport(self, program: RankProgram) -> Transport:
        if self.mesh.group is None:
            return InProcessTransport(Mailroom())
        if self._shared_links is not None:
            return SharedMemoryTransport(self._shared_links, self._pool)
        batched = self.options.transport == "batched"
        return TorchTransport(self._links, program.acknowledges, self._rank.book, self._pool, batched)

    def _forward_count(self, inputs: Any) -> int:
        return min(self.schedule.microbatches, batch_rows(as_inputs(inputs)))

    def _split(self, inputs: Any, targets: Any, keywords: Mapping[str, Any], count: int) -> Microbatches:
        sizes = chosen_sizes(inputs, count, self.options.microbatch_sizes)
        return split_batch(inputs, targets, keywords, sizes, self._weight, max(self._steps - 1, 0))

    def _spread(self, loss: Tensor | None) -> PendingLoss:
        """The sum of all ranks' shares of the loss. The rank that knows it sends it and does not wait: no barrier."""
        total = loss.clone() if loss is not None else torch.zeros((), dtype=torch.float32, device=self.device)
        if self.mesh.group is None:
            return PendingLoss(lambda: total)
        if len(self.schedule.routes) > 1:
            reduction = self.mesh.group.allreduce([total])
            return PendingLoss(lambda: self._await_loss(reduction, total, None))
        source = self.schedule.placement[self.schedule.routes[0][-1]]
        if self.rank != source:
            receipt = self.mesh.group.recv([total], source, _LOSS_TAG)
            return PendingLoss(lambda: self._await_loss(receipt, total, source))
        for work, _ in self._loss_sends:  # of the step before: long received
            work.wait()
        others = [rank for rank in range(self.ranks) if rank != source]
        self._loss_sends = [(self.mesh.group.send([total], rank, _LOSS_TAG), total) for rank in others]
        known = total.clone()
        return PendingLoss(lambda: known)

    def _await_loss(self, work: Any, loss: Tensor, source: int | None) -> Tensor:
        with self._telling():
            try:
                work.wait()
            except RuntimeError as error:
                if source is None:
                    raise
                raise PeerGone(source, f"it never sent the loss: {error}") from None
        return loss

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """An exception inside is told to the other ranks."""
        try:
            yield
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        """Tells the other ranks; raises DistributedError in place of an error that only says that a peer has gone."""
        status = self._rank.status
        peer: int | None = None
        if isinstance(error, PeerGone):
            peer = error.rank
        elif status.waiting is not None and isinstance(error, RuntimeError):  # gloo's words for a closed connection
            peer = status.waiting.channel.source
        if peer is not None:
            text = f"rank {peer} is gone: rank {self.rank}, {status.words}: {error}"
        else:
            trace = "".join(traceback.format_exception(error)).rstrip()
            text = f"rank {self.rank} failed: {status.words}\n{trace}"
        if self._monitor is not None:
            text = self._monitor.failed(text)
            self._monitor = None
        if peer is not None:
            raise DistributedError(
                f"[rank {self.rank}] {status.words}\n[rank {self.rank}] stopped, because {text}"
            ) from None


def drive(run: Generator[Message, None, StepResult]) -> StepResult:
    """Runs one rank's engine to its end, on a transport that waits by itself."""
    while True:
        try:
            message = next(run)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        raise DistributedError(f"{message.words} never comes: there is no other rank in this process")


def _mesh(mesh: PipelineMesh | DeviceMesh | None) -> PipelineMesh:
    if isinstance(mesh, PipelineMesh):
        return mesh
    return PipelineMesh.whole_world() if mesh is None else PipelineMesh.of_device_mesh(mesh)


def _device(options: RuntimeOptions, mesh: PipelineMesh) -> torch.device:
    if options.device is not None:
        return torch.device(options.device)
    if mesh.group is not None and "nccl" in str(dist.get_backend_config(mesh.group)) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
