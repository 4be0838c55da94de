"""Pipeline: a model's layers, a schedule, and the processes that run it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.errors import ConfigError, DistributedError, UsageError
from pipeloom.ops.checksum import checksums
from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.exchange import all_gather_json, all_gather_tree
from pipeloom.parallel.mesh import Mesh, PipelineMesh
from pipeloom.parallel.sharding import ParameterSharding
from pipeloom.runtime import replicas
from pipeloom.runtime.assembly import assemble, copy_state
from pipeloom.runtime.batch import (
    IGNORE_INDEX,
    Microbatches,
    Weighing,
    Weight,
    chosen_sizes,
    forward_count,
    join,
    require_gradients,
    require_targets,
    split_batch,
    sum_over_replicas,
)
from pipeloom.runtime.built_parameters import BuiltParameters
from pipeloom.runtime.clock import clock_for
from pipeloom.runtime.executor import Executor, StepHooks, StepResult
from pipeloom.runtime.grad_sync import StepGradients, checked_max_norm, summed_over
from pipeloom.runtime.health import handshake
from pipeloom.runtime.health.fault_injection import Faults
from pipeloom.runtime.health.links import RunStore, run_store
from pipeloom.runtime.health.report import FailureReporter
from pipeloom.runtime.health.status import Limits, Names, Status
from pipeloom.runtime.health.watchdog import Watchdog, start_watchdog
from pipeloom.runtime.layer_names import carrying
from pipeloom.runtime.loss import Loss, LossBroadcast, PendingLoss, require_weighing
from pipeloom.runtime.measured_timeline import clock_offset, gather_timeline
from pipeloom.runtime.options import RuntimeOptions, device_of
from pipeloom.runtime.p2p.connect import P2PConnections
from pipeloom.runtime.program import RankProgram, RankPrograms, as_executed, require_same_stages
from pipeloom.runtime.stage_modules import KnownKeywords, LayerSource, layer_name, model_names, require_arguments
from pipeloom.runtime.stats import RankStats
from pipeloom.runtime.tensor_spec import ShapeCache, is_strided
from pipeloom.runtime.tied_weights import layer_of
from pipeloom.schedule.check import check
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import Timeline


class Pipeline:
    """One process's part of a pipeline; every process of the mesh creates one, with the same arguments.

    Args:
        layers: the model, in order: factories (with a `name`, their parameters' prefix), or modules. A rank calls only the
            factories of its own stages, and materializes only its own stages' modules on the meta device.
        schedule: the schedule to run; it is checked first.
        loss: `loss(output, targets)`, the mean over one micro-batch's targets, as cross entropy is with its default
            `reduction="mean"`. A step's loss is the mean of these, weighted by `weight`: for a loss with `reduction="sum"`
            it is the mean of the micro-batches' sums (for m equal micro-batches, the batch's sum / m), not their sum.
        mesh: a Mesh of parallel pipelines (data and tensor parallel); or one pipeline's processes: a PipelineMesh, a
            torch DeviceMesh with an axis `pp` (over other axes the caller sums the gradients), or None for all processes.
        weight: `weight(targets)`, at least 0: the weight of a micro-batch's loss in the step's mean. Default:
            the number of targets (elements of their first tensor with a row for each sample; without one, the micro-batch's
            rows) other than `ignore_index`. A micro-batch of weight 0 is not given to the loss; its gradient is zero.
        ignore_index: the target that the loss skips, as in torch's cross entropy; None: every target counts. Only the
            default weight uses it.
        stages: number of layers of each stage position; default: spread evenly.
        tied: groups of names of parameters that share one weight.
        options: see RuntimeOptions.

    Attributes:
        schedule: the executed schedule, in which pairs of stages without segments are replaced by a forward and a backward.
        options: as given.
        mesh: the processes of the run; a plain pipeline is a mesh too.
        device: where the stages are.
        layouts: global name -> how the parameter is spread over the mesh.
        next_step: the number of the next step, from which layers derive random numbers; set it to resume, or to repeat
            a step.
        trace: whether the next steps are timed as `RuntimeOptions.trace` says; settable.

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
        ignore_index: int | None = IGNORE_INDEX,
        stages: Sequence[int] | None = None,
        tied: Sequence[Sequence[str]] = (),
        options: RuntimeOptions = RuntimeOptions(),
    ) -> None:
        require_arguments(layers, schedule, loss)
        require_weighing(loss, weight, ignore_index)
        declared = model_names(layers, schedule.positions, stages)
        schedule = carrying(schedule, declared.tensors)
        check(schedule, transport="batched" if options.transport == "batched" else "individual")
        self.schedule = schedule
        self.options = options
        self.mesh = Mesh.resolve(mesh)
        self._line = self.mesh.pipeline
        self.device = device_of(options, self.mesh)
        self.next_step = 0
        self._weight = weight
        self._ignore_index = ignore_index
        self._terms = declared.terms
        self._result = StepResult()
        _require_processes(schedule.ranks, self.ranks)
        prefix, seed = "", torch.initial_seed() if options.seed is None else options.seed
        self._alarm = FailureReporter(Status(self.rank, Names(self.mesh)))
        if options.watchdog is not None:
            self._watched_by(options.watchdog)
        if self.distributed:
            names = [layer_name(layer, at) for at, layer in enumerate(layers)]
            facts = handshake.facts(schedule, names, stages, tied, ignore_index, options, self.mesh)
            facts |= handshake.declared_facts(layers)
            store = run_store(options.start_seconds)
            with self._alarm.waiting("the other ranks at start-up"):
                prefix, seed = handshake.shake_hands(store, self.mesh.everyone, facts, seed, options.start_seconds)
                if options.monitor and options.watchdog is None:
                    self._watched_by(self._started_watchdog(store, prefix))
        with self._alarm.reporting():
            self._build(layers, stages, tied, loss, prefix, seed)

    def _build(self, layers: Sequence[LayerSource], stages: Any, tied: Any, loss: Loss, prefix: str, seed: int) -> None:
        """Builds this rank's stages and connects them; the other ranks are told of a failure."""
        schedule, options, status = self.schedule, self.options, self._alarm.status
        first = self.mesh.place.dp == self.mesh.place.tp == 0  # a fault is made in one pipeline
        assembled = assemble(
            layers,
            schedule,
            self.rank,
            stages,
            tied,
            options,
            self.device,
            status,
            seed,
            self._exchange,
            summed_over(self.mesh, options),
        )
        self._assembly = assembled
        self._built = BuiltParameters(assembled.modules, summed_over(self.mesh, options))
        self._compared = False  # whether replicas are known to hold the same values
        self._batches = replicas.BatchCheck(self.mesh, options.check_every)
        self.layouts: dict[str, ParameterSharding] = {each.name: each.sharding for each in assembled.held}
        self._loss = loss
        self._status = status
        self.trace = options.trace
        self._splits_backward = schedule.splits_backward
        self._specs = ShapeCache(options.shapes)
        self._follow(schedule)
        if first and self.mesh.dp.size > 1:
            self._warn_of_statistics()
        self._losses = LossBroadcast(self.mesh, schedule, self.device, self._alarm, self._terms)
        self._connections = P2PConnections(self.mesh, self._specs, self.device, options)
        self._gradients = StepGradients(self._assembly, self.mesh, options, self._alarm)
        faults = Faults(options.fault if first else options.without_fault().fault, self.rank)
        sync = self._gradients.sync
        self._hooks = (
            StepHooks(status, faults)
            if sync is None
            else StepHooks(
                status,
                faults,
                sync.last_backward,
                sync.stage_done,
                self._gradients.before_layer if sync.sharded else None,
                self._gradients.before_kind,
            )
        )
        self._keywords = KnownKeywords.of(stage.layers for stage in assembled.stages.values())
        if self.distributed:
            status.wait_between("the other ranks at start-up")
            self._connections.open(prefix, self._programs.step)
            self._keywords = handshake.shared_keywords(
                run_store(options.start_seconds), self.mesh, prefix, self._keywords, options.start_seconds
            )
            self._gradients.start_equal(self._connections.sums)
            status.leave()
        status.phase = "first step"

    def _warn_of_statistics(self) -> None:
        """Warn of running statistics, which data-parallel replicas gather each for itself."""
        for stage in self._assembly.stages.values():
            for layer, norm in stage.statistics():
                warnings.warn(
                    f"layer {layer!r} has running statistics ({norm}): each of the {self.mesh.dp.size} data-parallel replicas "
                    "gathers those of its own micro-batches and evaluates with them, and a checkpoint keeps the first one's; "
                    "track_running_stats=False, or a norm without statistics, is the same on all",
                    stacklevel=4,
                )

    def _started_watchdog(self, store: RunStore, prefix: str) -> Watchdog:
        everyone, options = self.mesh.everyone, self.options
        limits = Limits(options.timeout)
        return start_watchdog(
            store, prefix, everyone.index, everyone.size, self._alarm.status, limits, options.start_seconds
        )

    def _watched_by(self, watchdog: Watchdog) -> None:
        watchdog.status = self._alarm.status
        self._alarm.watchdog = watchdog

    def _exchange(self, value: Any) -> list[Any]:
        """The values of all ranks of this pipeline, in rank order."""
        if self.group is None:
            return [value]
        with self._alarm.waiting("the other ranks at start-up"):
            return all_gather_json(value, self.group)

    # -- running ---------------------------------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any = None, **keywords: Any) -> Tensor:
        """Run forward and backward of the whole schedule; gradients are added to `.grad` of this rank's parameters.

        All ranks of a data-parallel replica pass the same batch, each replica its own (a rank with neither a first nor
        a last stage may pass tensors on the meta device). Tensors are cut along dimension 0; keyword arguments go to every
        layer that takes them.

        Args:
            inputs: a tensor, or a tuple of what the first layer takes.
            targets: a tensor or a tuple; `loss` gets each micro-batch's part.

        Returns:
            the mean loss over all counted targets of all replicas' batches, a 0-dim fp32 tensor, the same on every rank.

        Inputs, targets and keyword arguments are data: none may require a gradient. A layer may change its inputs in place
        where it may in one process, also at the start of a stage, but not under `recompute`.

        Raises:
            UsageError: a keyword argument that no layer of any rank takes; inputs, targets or weights that cannot be split; a
                tensor among them that requires a gradient; targets without a row for each sample (see
                `RuntimeOptions.shared_targets`).
            DistributedError: ranks of one replica passed different batches (see `RuntimeOptions.check_every`).
        """
        require_gradients("step")
        self._keywords.require("step", keywords)
        require_targets("step", targets)
        return self.forward_backward(inputs, targets, **keywords).wait()

    def forward_backward(self, inputs: Any, targets: Any = None, **keywords: Any) -> PendingLoss:
        """As `step`, but return when this rank is done: the loss may not have arrived from another rank yet."""
        require_gradients("forward_backward")
        self._built.require_same()
        status, begun = self._status, time.monotonic()
        status.step = self.next_step
        self._hooks.faults.at_step(self.next_step)
        self._compare_replicas()
        self._compare_batches({"inputs": inputs, "targets": targets, **keywords})
        batch = self._split("forward_backward", inputs, targets, keywords, self.schedule.microbatches)
        before = self._buffers_of_replicas() if status.phase == "first step" else {}
        self._gradients.begin()
        executor = self._executor(self._programs.step)
        self._losses.expect()
        with self._alarm.reporting():
            self._result = executor.run(batch)
        self._result.after = self._gradients.finish(self._connections.sums)
        self._result.end = time.perf_counter()
        self.next_step += 1
        if before:
            with self._alarm.reporting():
                self._require_settled(before)
        if status.phase == "step":
            status.slowest = max(status.slowest, time.monotonic() - begun)
        status.phase = "step"
        return self._losses.start(self._result.loss)

    @property
    def loss_terms(self) -> dict[str, Tensor]:
        """Key of each loss that layers declare -> its mean in the last step or evaluation, without its weight: 0-dim, fp32.

        The same on every rank.
        """
        return self._losses.terms

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any = None, **keywords: Any) -> Tensor:
        """Return the mean loss, forward only. A batch with fewer rows than micro-batches is cut into one micro-batch per row.

        Where layers exchange tokens between replicas (experts), all replicas' batches must have the same number of micro-batches.
        """
        with self._status.during("evaluation"):
            self._compare_replicas()
            batch = self._split(
                "evaluate", inputs, targets, keywords, forward_count(self.schedule.microbatches, inputs)
            )
            executor = self._executor(self._programs.forwards(batch.count))
            self._losses.expect()
            with self._alarm.reporting():
                result = executor.run(batch)
            return self._losses.start(result.loss).wait()

    @torch.no_grad()
    def predict(self, inputs: Any, **keywords: Any) -> Any:
        """Return the outputs of the last stage for the whole batch, on the rank that holds it; None on the others."""
        with self._status.during("evaluation"):
            batch = self._split("predict", inputs, None, keywords, forward_count(self.schedule.microbatches, inputs))
            executor = self._executor(self._programs.forwards(batch.count))
            with self._alarm.reporting():
                outputs = executor.run(batch, keep_outputs=True).outputs
        if len(self.schedule.routes) > 1 and self.group is not None:
            with self._alarm.reporting():
                gathered = all_gather_tree(list(outputs.items()), self.group, self.device)
            outputs = {mb: output for part in gathered for mb, output in part} if outputs else {}
        return join([outputs[mb] for mb in sorted(outputs)]) if len(outputs) == batch.count else None

    def _compare_replicas(self) -> None:
        """Before the first step or evaluation after construction or a load: what several processes hold must be equal."""
        if self._compared:
            return
        if self.distributed and self.options.init != "none":
            with self._alarm.waiting(
                "the comparison of replicated weights, after construction or a load by every rank"
            ):
                self._gradients.wait_for_weights()
                mine = replicas.replicated(self._assembly, self.mesh)
                differences = replicas.compare({key: each.tensor for key, each in mine.items()}, self.run_control)
                replicas.require_alike(differences, self.mesh)
                if differences and self.options.init == "check":
                    raise DistributedError(
                        f"replicas do not start equal: {replicas.words(differences, self.mesh)}; "
                        f'init = "broadcast" gives all of them the first one\'s values'
                    )
                if differences:
                    replicas.make_equal(mine, differences, self.mesh, self.rank, self._connections.sums)
                    self._gradients.weights_changed()
                    replicas.say(differences, self.mesh)
        self._compared = True

    def _buffers_of_replicas(self) -> dict[str, tuple[torch.Size, int]]:
        """Return the shape and a checksum of each buffer of which another route has a replica."""
        replicated = self._assembly.replicated_layers if len(self.schedule.routes) > 1 else {}
        buffers = {n: b for n, b in self._assembly.buffers.items() if layer_of(n, replicated) and is_strided(b)}
        sums = checksums(list(buffers.values()))
        return {name: (b.shape, value) for (name, b), value in zip(buffers.items(), sums, strict=True)}

    def _require_settled(self, before: Mapping[str, tuple[torch.Size, int]]) -> None:
        """Raise UsageError for a buffer that the first step has changed, other than by giving it another shape."""
        for name, (shape, value) in self._buffers_of_replicas().items():
            if name in before and before[name][0] == shape and before[name][1] != value:
                raise UsageError(
                    f"the first step changed buffer {name!r}, and under schedule {self.schedule.name!r} its stage has replicas "
                    "that get some of the micro-batches each, so it would differ from that of one process; choose a schedule "
                    "with one route"
                )

    def _compare_batches(self, arguments: Mapping[str, Any]) -> None:
        """Compare what the ranks of a replica were passed, if a comparison is due."""
        if self._batches.due():
            with self._alarm.waiting("the other ranks' checksums of the batch"):
                differences = self._batches.differences(arguments, self.run_control)
            self._batches.require_none(differences, self.next_step)

    def _executor(self, program: RankProgram) -> Executor:
        self._assembly.communications.timed = self.trace
        return Executor(
            program,
            self._assembly.stages,
            self._connections.transport(program),
            self._hooks,
            loss=self._loss,
            specs=self._specs,
            communications=self._assembly.communications,
            clock=clock_for(self.device, self.trace),
            checksums=self.options.checksum,
        )

    def _follow(self, schedule: Schedule) -> None:
        """Run `schedule` from the next step on."""
        schedule = as_executed(schedule, self._assembly.segmented, self.options)
        programs = RankPrograms(schedule, self.rank, self.options)
        for index, stage in self._assembly.stages.items():
            stage.require_order(schedule.name, programs.step.stages[index])
        self.schedule = schedule
        self._programs = programs

    # -- what it is part of, and the last step ---------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank in its pipeline."""
        return self._line.rank

    @property
    def ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(self._line.ranks)

    @property
    def group(self) -> Any:
        """The pipeline's process group; None for one process."""
        return self._line.group

    @property
    def distributed(self) -> bool:
        """Return whether the mesh has other processes."""
        return self.mesh.everyone.group is not None

    @property
    def control(self) -> Any:
        """A gloo group for small CPU messages between the pipeline's ranks; None for one process."""
        return self._connections.control

    @property
    def run_control(self) -> Any:
        """A gloo group of all ranks of the run, by their numbers in `mesh.everyone`; None for one process."""
        return self._connections.run_control

    @property
    def peak_activations(self) -> int:
        """The most stage-micro-batches alive on this rank at once in the last step, counted."""
        return self._result.peak_alive

    @property
    def step_began(self) -> float:
        """`time.perf_counter` of this rank's first action in the last step."""
        if not self._result.starts:
            raise UsageError("no step has run yet")
        return self._result.starts[0]

    @property
    def loss_share(self) -> Tensor | None:
        """This rank's share of the last step's loss, before the sum over ranks: 0-dim, fp32; None if it computes none."""
        return self._result.loss.total

    @property
    def exposed(self) -> float | None:
        """Seconds for which this rank's computation waited for expert all-to-alls in the last step: of tokens and
        gradients, and of their counts, which are exchanged first.

        None: not measured (on a GPU without `trace`).
        """
        return None if self._result.exposed is None else self._result.exposed.get("all-to-all", 0.0)

    @property
    def sync(self) -> GradientSync | None:
        """The reduction of gradients over the mesh; None where no gradients are reduced."""
        return self._gradients.sync

    @property
    def stats(self) -> RankStats:
        """Return this rank's executed schedule and buffers, and figures of its last step."""
        shared = self._connections.shared
        return RankStats.of(
            self.schedule,
            self.rank,
            self._programs.step,
            self._result,
            receive_buffers=self._connections.pool.made,
            send_segments=None if shared is None else sum(len(box.segments) for box in shared.outboxes.values()),
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which steps accumulate gradients in this process only; the next step outside it sums
        them over the replicas.
        """
        return self._gradients.no_sync()

    def zero_grad(self) -> None:
        """Set every gradient to None."""
        self._gradients.zero(self._assembly.parameters)

    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients of the last step, over all ranks; every rank must call it.

        Each weight counts once, however many ranks hold a part or a copy of it: tensor-parallel and expert-parallel parts,
        data-parallel replicas, tied weights and the replicas of two routes. A norm over `parameters()` is this rank's alone.

        Returns:
            a 0-dim tensor, the same on every rank: fp32, or fp64 where gradients are. 0 without gradients.

        Raises:
            UsageError: the last step ran under `no_sync`, so the gradients are not summed yet.
        """
        return self._gradients.norm(self.counts, self.mesh.everyone, self.device)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients in place so that `grad_norm` is at most `max_norm`; every rank must call it.

        As `torch.nn.utils.clip_grad_norm_` in one process.

        Args:
            max_norm: 0 or above.

        Returns:
            the norm before, as `grad_norm`.
        """
        most = checked_max_norm(max_norm)
        norm = self.grad_norm()
        self._gradients.clip(norm.item(), most)
        return norm

    def adopt(self, schedule: Schedule) -> None:
        """Run `schedule` from the next step on, with the same stages, weights and connections; every rank must call it.

        Raises ConfigError where it needs other stages (another placement, other routes or micro-batches, split backwards where
        the first schedule had none), ScheduleError where it cannot run.
        """
        if schedule.positions == self.schedule.positions:  # else it is refused below
            schedule = carrying(schedule, self.schedule.tensors)
        check(schedule, transport="batched" if self.options.transport == "batched" else "individual")
        require_same_stages(schedule, self.schedule, self._splits_backward)
        self._follow(schedule)
        self._result = StepResult()

    def timeline(self) -> Timeline:
        """This pipeline's last step as measured, in seconds, with the ranks' clocks aligned; collective over its ranks."""
        if not self._result.starts:
            raise UsageError("no step has run yet")
        with self.waiting("the other ranks' timelines"):
            offset = clock_offset(self._line, self._connections.control)
            return gather_timeline(self.schedule, self._line, self._result, offset)

    def waiting(self, what: str, phase: str | None = None) -> AbstractContextManager[None]:
        """Return a context for a communication between the run's ranks outside of steps: the watchdog reports that this rank
        waits for `what`, and sends a failure in it to the other ranks.

        Args:
            phase: "save" or "load", which may take longer than a step; None: the current one.
        """
        return self._alarm.waiting(what, phase)

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """Return a context in which to read a value of this pipeline's device, such as a loss: on a GPU the host waits there
        until the messages of other ranks have arrived, and the watchdog reports it.
        """
        return self._alarm.waiting_for_device(self.device)

    def close(self) -> None:
        """End the watchdog. Call it on every rank before the process group is destroyed."""
        self._gradients.wait_for_weights()
        self._losses.close()
        self._status.leave()
        if self._alarm.watchdog is not None and self.options.watchdog is None:
            self._alarm.watchdog.close()
            self._alarm.watchdog = None
        self._connections.close()

    # -- what it holds ---------------------------------------------------------------------------------------------------

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Layer name -> module, of this rank's stages."""
        self._gradients.wait_for_weights()
        return self._assembly.modules

    @property
    def layer_names(self) -> tuple[tuple[str, ...], ...]:
        """The names of the layers of each stage here, in order of the stages."""
        return tuple(stage.layers.names for _, stage in sorted(self._assembly.stages.items()))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, parameter) of this rank's stages; a weight tied within the rank once, under its first name.

        Where optimizer states are sharded, this method, `parameters`, `modules` and `state_dict` wait for the weights that
        other replicas update. A parameter obtained earlier may hold old values between an optimizer's step and the pipeline's
        next step.
        """
        self._gradients.wait_for_weights()
        yield from self._assembly.parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages."""
        for _, parameter in self.named_parameters():
            yield parameter

    def stored_name(self, name: str) -> str:
        """The name of this parameter in checkpoints: the first name of a weight with several, on every layout."""
        return self._assembly.first_names.get(name, name)

    def owns(self, name: str) -> bool:
        """Return whether this process is the one that counts the parameter in norms and writes it to checkpoints.

        Of the processes that hold the same values (tied weights, replicas, weights whole on tensor-parallel ranks) one does.
        """
        place, sharding = self.mesh.place, self.layouts[name]
        replica = place.dp if sharding.over("ep") is None else place.edp
        first = replica == 0 and (place.tp == 0 or sharding.over("tp") is not None)
        return first and name not in self._assembly.copies

    def counts(self, name: str) -> bool:
        """Return whether this process adds its gradient of this name to a global norm; each replica adds its slice of a
        sharded gradient.
        """
        if not self.options.shard_gradients:
            return self.owns(name)
        sharded = self.layouts[name].over("tp") is not None
        return (sharded or self.mesh.place.tp == 0) and name not in self._assembly.copies

    def state_dict(self) -> dict[str, Tensor]:
        """Global name -> parameter or buffer of this rank's stages."""
        return {**dict(self.named_parameters()), **self._assembly.buffers}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy values by global name; every rank of the run must call it.

        Before the next step replicas are compared as `RuntimeOptions.init` says. Buffers that are not persistent may be missing.
        Raises UsageError, and copies nothing, when a name that this rank holds is missing or a value has another shape.
        """
        self._compared = False
        copy_state(self.state_dict(), state, self._assembly.transient_buffers)

    def train(self, mode: bool = True) -> None:
        for stage in self._assembly.stages.values():
            for module in stage.modules:
                module.train(mode)

    def eval(self) -> None:
        self.train(False)

    # -- a batch -----------------------------------------------------------------------------------------------------------

    def _split(self, method: str, inputs: Any, targets: Any, keywords: Mapping[str, Any], count: int) -> Microbatches:
        self._keywords.require(method, keywords)
        require_targets(method, targets)
        sizes = chosen_sizes(inputs, count, self.options.microbatch_sizes)
        total = partial(sum_over_replicas, mesh=self.mesh, device=self.device, alarm=self._alarm)
        weighing = Weighing(
            None if self._weight is None else self._reported_weight,
            self._ignore_index,
            float if targets is None else total,
            self.mesh.place.dp,
            self.next_step,
            self.options.shared_targets,
        )
        return split_batch(inputs, targets, keywords, sizes, weighing)

    def _reported_weight(self, targets: Any) -> float | Tensor:
        """The caller's weight of a micro-batch's targets; the other ranks are told of what it raises."""
        assert self._weight is not None
        with self._alarm.reporting():
            return self._weight(targets)


def _require_processes(wanted: int, processes: int) -> None:
    """Raise ConfigError where the schedule has another number of ranks than the pipeline has processes."""
    if wanted == processes:
        return
    ranks = f"the schedule has {wanted} rank{'s' * (wanted > 1)}"
    if not dist.is_initialized():
        raise ConfigError(
            f"{ranks}, and this process is alone, because torch.distributed is not initialized: start it with torchrun "
            f'--nproc-per-node {wanted} and call torch.distributed.init_process_group("gloo") before Pipeline, or run all '
            "ranks in this process with LocalPipeline"
        )
    raise ConfigError(
        f"{ranks}, and the pipeline {processes} process{'es' * (processes > 1)}: make a schedule of {processes}, or "
        f"start {wanted} processes for each pipeline"
    )
