"""Pipeline: a model's layers, a schedule, and the processes that run it."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.deprecation import made_internal
from pipeloom.errors import ConfigError, DistributedError, ScheduleError, UsageError, did_you_mean
from pipeloom.limits import of_annotated_types
from pipeloom.ops.checksum import checksums
from pipeloom.ops.layer import KEYWORD
from pipeloom.parallel.context import ContextParallel, share_tokens, whole_sequences
from pipeloom.parallel.data import GradientSync
from pipeloom.parallel.exchange import all_gather_json, all_gather_tree
from pipeloom.parallel.masters import Master
from pipeloom.parallel.mesh import Mesh, PipelineMesh, group_of_members
from pipeloom.parallel.sharding import ParameterSharding
from pipeloom.runtime import replicas
from pipeloom.runtime.actions.signals import SignalsBetweenProcesses, SignalsInProcess
from pipeloom.runtime.assembly import BuiltParameters, PipelineSpec, assemble, copy_state
from pipeloom.runtime.batch import (
    IGNORE_INDEX,
    GivenBatch,
    Microbatches,
    SequenceSlices,
    Weighing,
    Weight,
    chosen_sizes,
    cut_batch,
    join,
    require_gradients,
    require_targets,
    sum_over_replicas,
    weighed,
)
from pipeloom.runtime.engine import RankEngine, RankStats, clock_offset, measured_rank, merged_timeline
from pipeloom.runtime.executor import Executor
from pipeloom.runtime.flight import StepResult
from pipeloom.runtime.grad_sync import StepGradients, summed_over
from pipeloom.runtime.health import handshake
from pipeloom.runtime.health.fault_injection import Faults
from pipeloom.runtime.health.links import meet, run_store
from pipeloom.runtime.health.report import FailureReporter
from pipeloom.runtime.health.status import Limits, Names, Status
from pipeloom.runtime.health.watchdog import Watchdog
from pipeloom.runtime.loss import TOTAL, Loss, LossBroadcast, PendingLoss
from pipeloom.runtime.options import RuntimeOptions, device_of
from pipeloom.runtime.overlap import CommStream
from pipeloom.runtime.p2p.base import InProcessTransport, Mailroom, Transport
from pipeloom.runtime.p2p.connect import P2PConnections
from pipeloom.runtime.program import ProgramsOfRanks, RankProgram, as_executed, require_same_stages
from pipeloom.runtime.spread_vocabulary import SpreadVocabulary, require_shares
from pipeloom.runtime.stage_modules import LayerSource, carrying
from pipeloom.runtime.tensor_spec import ShapeCache, is_strided
from pipeloom.runtime.tied_weights import layer_of
from pipeloom.schedule.actions import SAVED, Action, fraction_of
from pipeloom.schedule.channels import Message
from pipeloom.schedule.check import check
from pipeloom.schedule.model import Schedule, require_is_schedule
from pipeloom.schedule.timeline import Timeline

_INTERNAL = frozenset(("control", "distributed", "group", "run_control", "stored_name", "watchdog"))
"""Names of `Pipeline` that were public before 0.3; until 0.4 they warn."""
_LOWERED = 64  # schedules whose programs are kept, for steps that run one of several


class Pipeline:
    """One process's part of a pipeline; every process of the mesh creates one, with the same arguments.

    `LocalPipeline` has the same methods, and runs all ranks in one process:

    >>> from pipeloom import schedules
    >>> layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    >>> schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    >>> pipeline = LocalPipeline(layers, schedule, loss=torch.nn.functional.mse_loss)
    >>> loss = pipeline.step(torch.rand(8, 4), torch.rand(8, 4))  # fills every .grad
    >>> loss.shape, layers[0].weight.grad is None
    (torch.Size([]), False)
    >>> pipeline.close()

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
        stages: number of layers of each stage position; default: by the layers' costs (`Layer.cost`, of modules their
            parameters without embeddings), evenly if one has none.
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

    if not TYPE_CHECKING:  # mypy reports unknown names, which a `__getattr__` would accept
        __getattr__ = made_internal("Pipeline", _INTERNAL, "0.4")

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
        spec = PipelineSpec(layers, schedule, loss, weight, ignore_index, stages, tied, options)
        self._take(spec, Mesh.resolve(mesh))
        _require_processes(schedule.ranks, self.ranks)
        if options.watchdog is not None:
            self._watched_by(options.watchdog)
        prefix, seed = self._shake_hands() if self._distributed else ("", spec.seed)
        with self._alarm.reporting():
            self._build({self.rank: self._status}, seed, summed_over(self.mesh, options))
            if self.mesh.dp.size > 1 and self.mesh.dp.index == self.mesh.tp.index == 0:
                self._warn_of_statistics()
            if self._distributed:
                self._connect(prefix)
        self._status.phase = "first step"

    @staticmethod
    def local(layers: Sequence[LayerSource], schedule: Schedule, *, loss: Loss, **arguments: Any) -> LocalPipeline:
        """Return a `LocalPipeline`: all ranks of the schedule in this process, with further arguments as of that class."""
        return LocalPipeline(layers, schedule, loss=loss, **arguments)

    def _take(self, spec: PipelineSpec, mesh: Mesh) -> None:
        """Take over the arguments."""
        self._spec = spec
        self.schedule = spec.schedule
        self.options = spec.options
        self.trace = spec.options.trace
        self.next_step = 0
        self._closed = False
        self.mesh = mesh
        self._context = ContextParallel(mesh.cp) if mesh.cp.size > 1 else None
        self.device = device_of(spec.options, mesh)
        self._line = mesh.pipeline
        self._status = Status(self.rank, Names(mesh))
        self._alarm = FailureReporter(self._status)

    def _build(
        self, statuses: Mapping[int, Status], seed: int, summed: str | None, separate_replicas: bool = False
    ) -> None:
        """Build the stages of the ranks in this process, and an engine for each of them."""
        spec, options, mesh = self._spec, self.options, self.mesh
        communications = {rank: CommStream(self.device, options.trace, status) for rank, status in statuses.items()}
        assembly = self._assembly = assemble(
            spec,
            communications,
            device=self.device,
            seed=seed,
            exchange=self._exchange,
            summed=summed,
            separate_replicas=separate_replicas,
        )
        for module in assembly.modules.values():
            share_tokens(module, self._context)
        specs = {rank: ShapeCache(options.shapes) for rank in statuses}
        self._connections = P2PConnections(mesh, specs[self.rank], self.device, options)
        self._gradients = StepGradients(assembly, mesh, options, self._alarm, summed, spec.schedule.stage_actions)
        first = mesh.dp.index == mesh.tp.index == 0  # a fault is injected into one pipeline
        fault = options.fault if first or getattr(options.fault, "rank", -1) < 0 else None  # all exchange inputs
        self._engines = [
            RankEngine(
                rank,
                spec,
                {number: assembly.stages[number] for number in spec.schedule.stages_of[rank]},
                communications[rank],
                self._transport,
                self._gradients.hooks(status, Faults(fault, rank)),
                specs[rank],
                self._spread_vocabulary(len(statuses)) if spec.schedule.vocabulary else None,
            )
            for rank, status in statuses.items()
        ]
        self._built = BuiltParameters(assembly.modules)
        self._signals: SignalsBetweenProcesses | None = None  # once a schedule has any
        self._compared = False  # whether replicas are known to hold the same values
        self._batches = replicas.BatchCheck(mesh, options.check_every)
        self._losses = LossBroadcast(mesh, spec.schedule, self.device, self._alarm, spec.terms)
        self.layouts: dict[str, ParameterSharding] = {each.name: each.sharding for each in assembly.held}
        self._lowered: dict[Schedule, ProgramsOfRanks] = {}
        self._follow(self._programs(spec.schedule))

    def _spread_vocabulary(self, ranks_here: int) -> SpreadVocabulary:
        """Return this rank's shares of the vocabulary, with a process group of their own."""
        schedule = self._spec.schedule
        layers = self._assembly.stages[schedule.vocabulary[self.rank]].modules
        return SpreadVocabulary.of(require_shares(layers, ranks_here), self.mesh, schedule)

    def _transport(self, program: RankProgram) -> Transport:
        """Return the transport for one run of `program`."""
        return self._connections.transport(program)

    def _shake_hands(self) -> tuple[str, int]:
        """Compare the arguments with those of the other ranks and start the watchdog. Return the prefix of the run's keys in the
        store, and rank 0's seed.
        """
        spec, options, everyone = self._spec, self.options, self.mesh.everyone
        facts = handshake.facts(spec, self.mesh)
        store = run_store(options.start_seconds)
        with self._alarm.waiting("the other ranks at start-up"):
            prefix, seed = handshake.shake_hands(store, everyone, facts, spec.seed, options.start_seconds)
            if options.monitor and options.watchdog is None:
                links = meet(store, prefix, everyone.index, everyone.size, options.start_seconds)
                watchdog = Watchdog(links, self._status, everyone.size, Limits(options.timeout))
                watchdog.start()
                self._watched_by(watchdog)
        return prefix, seed

    def _connect(self, prefix: str) -> None:
        """Connect with the other ranks, and give tied weights equal values."""
        self._status.wait_between("the other ranks at start-up")
        self._connections.open(prefix, self._engines[0].programs.of_rank(self.rank))
        self._gradients.start_equal(self._connections.sums)
        self._status.leave()

    def _watched_by(self, watchdog: Watchdog) -> None:
        watchdog.status = self._status
        self._alarm.watchdog = watchdog

    def _exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks of this pipeline, in rank order."""
        if self._group is None:
            return [value]
        with self._alarm.waiting("the other ranks at start-up"):
            return all_gather_json(value, self._group)

    def _warn_of_statistics(self) -> None:
        """Warn of running statistics, which data-parallel replicas gather each for itself."""
        for stage in self._assembly.stages.values():
            for layer, norm in stage.statistics():
                warnings.warn(
                    f"layer {layer!r} has running statistics ({norm}): each of the {self.mesh.dp.size} data-parallel replicas "
                    "gathers those of its own micro-batches and evaluates with them, and a checkpoint keeps the first one's; "
                    "track_running_stats=False, or a norm without statistics, is the same on all",
                    stacklevel=3,
                )

    def _programs(self, schedule: Schedule) -> ProgramsOfRanks:
        """Return the programs of `schedule`: pairs of stages without segments as a forward and a backward."""
        schedule = as_executed(schedule, self._assembly.segmented)
        return ProgramsOfRanks(schedule, [engine.rank for engine in self._engines], self.options)

    def _follow(self, programs: ProgramsOfRanks) -> None:
        """Run these programs from the next step on."""
        schedule = programs.schedule
        for engine in self._engines:
            engine.require_order(programs)
        for engine in self._engines:
            engine.programs = programs
        if self._signals is None and self._group is not None and programs.of_rank(self.rank).has_signals:
            self._signals = SignalsBetweenProcesses(group_of_members(self._line.ranks, backend="gloo"))
        self.schedule = schedule
        self._parts_unchecked = bool(schedule._recomputed_parts)
        # Of this process, and of each of its ranks.
        self._result, self._results = StepResult(), [StepResult() for _ in self._engines]

    # -- running ---------------------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        microbatches: Any = None,
        schedule: Any = None,
        **keywords: Any,
    ) -> Tensor:
        """Run forward and backward of the whole schedule; gradients are added to `.grad` of this rank's parameters.

        All ranks of a data-parallel replica pass the same batch, each replica its own (a rank with neither a first nor
        a last stage may pass tensors on the meta device). Tensors are cut along dimension 0; keyword arguments go to every
        layer that takes them. Context-parallel ranks pass the same whole sequences: each takes its tokens of inputs and
        targets, and its layers take theirs of keyword arguments (`ContextParallel.own_tokens`).

        Args:
            inputs: a tensor, or a tuple of what the first layer takes.
            targets: a tensor or a tuple; `loss` gets each micro-batch's part.
            microbatches: instead of a batch, (inputs, targets) of each micro-batch, or (inputs, targets, {keyword: value}):
                each of any shape, and each replica and step with a number of its own (but with experts that other replicas
                hold). Layers that draw random numbers get others than in a step of one batch.
            schedule: runs from this step on, as of `adopt`; such as that of a `plan_step`'s replica. Default: the last one.

        Returns:
            the mean loss over all counted targets of all replicas' batches, a 0-dim fp32 tensor, the same on every rank.

        Inputs, targets and keyword arguments are data: none may require a gradient. A layer may change its inputs in place
        where it may in one process, also at the start of a stage, but not of one that the schedule recomputes whole (`2R0`).

        Raises:
            UsageError: a keyword argument that no layer of any rank takes; inputs, targets or weights that cannot be split; a
                tensor among them that requires a gradient; targets without a row for each sample (see
                `RuntimeOptions.shared_targets`).
            DistributedError: ranks of one replica passed different batches (see `RuntimeOptions.check_every`).
        """
        return self._start_step(GivenBatch.of("step", inputs, targets, keywords, microbatches), schedule).wait()

    def forward_backward(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        microbatches: Any = None,
        schedule: Any = None,
        **keywords: Any,
    ) -> PendingLoss:
        """As `step`, but return when this rank is done: the loss may not have arrived from another rank yet."""
        given = GivenBatch.of("forward_backward", inputs, targets, keywords, microbatches)
        return self._start_step(given, schedule)

    def _start_step(self, given: GivenBatch, schedule: Schedule | None) -> PendingLoss:
        """Run a step until this rank is done."""
        self._require_open(given.method)
        self._require(given)
        if schedule is not None:
            require_is_schedule(schedule)
        wanted = schedule or self.schedule
        if wanted.forwards_alone:
            raise UsageError(
                f"{given.method}: the schedule {wanted.name!r} has no backward; call evaluate or predict with it"
            )
        given.require_count(wanted.microbatches)
        if schedule is not None:
            self.adopt(schedule)
        status, begun = self._status, time.monotonic()
        first = status.phase == "first step"
        self._before_step(given.arguments)
        batch = self._split(given, self.schedule.microbatches, must_fit=given.cut)
        buffers = self._checksums_of_replicas() if first else {}
        self._gradients.begin()
        executor = self._executor(None)
        self._losses.expect()
        with self._alarm.reporting():
            self._result = executor.run(batch)
        self._results = executor.results
        self._result.after = self._gradients.finish(self._connections.sums)
        self._result.end = time.perf_counter()
        self.next_step += 1
        if self._parts_unchecked:
            self._require_parts()
        if first:
            self._require_settled(buffers)
        elif status.phase == "step":
            status.slowest = max(status.slowest, time.monotonic() - begun)
        status.phase = "step"
        return self._losses.start(self._result.loss)

    def _before_step(self, arguments: Mapping[str, Any]) -> None:
        """Check what may have changed since the last step, and compare with other ranks where a comparison is due."""
        self._status.step = self.next_step
        require_gradients()
        self._built.require_same(self._status.phase == "first step", self.sync is not None)
        for engine in self._engines:
            engine.hooks.faults.at_step(self.next_step)
        if not self._compared:
            self._compare_replicas()
        if self._batches.due():
            with self._alarm.waiting("the other ranks' checksums of the batch"):
                differences = self._batches.differences(arguments, self._run_control)
            self._batches.require_none(differences, self.next_step)

    @property
    def loss_terms(self) -> dict[str, Tensor]:
        """Key of each loss that layers declare -> its mean in the last step or evaluation, without its weight: 0-dim, fp32.

        The same on every rank.
        """
        return self._losses.terms

    def _require_open(self, method: str) -> None:
        if self._closed:
            raise UsageError(f"{method}: the pipeline is closed; build it again")

    def _require(self, given: GivenBatch, targets: bool = True) -> None:
        """Raise UsageError for a keyword argument that no layer takes, and for no targets where they are needed."""
        for part in given.parts:
            self._assembly.keywords.require(given.method, part[2])
            if targets:
                require_targets(given.method, part[1])

    @torch.no_grad()
    def evaluate(self, inputs: Any = None, targets: Any = None, *, microbatches: Any = None, **keywords: Any) -> Tensor:
        """Return the mean loss, forward only. A batch with fewer rows than micro-batches is cut into one micro-batch per row.
        Micro-batches are given as to `step`, any number of them.

        Where layers exchange tokens between replicas (experts), all replicas' batches must have the same number of micro-batches.
        """
        self._require_open("evaluate")
        with self._status.during("evaluation"):
            if not self._compared:
                self._compare_replicas()
            given = GivenBatch.of("evaluate", inputs, targets, keywords, microbatches)
            count = given.forwards(self.schedule.microbatches)
            self._require(given)
            batch = self._split(given, count)
            self._gradients.publish()
            executor = self._executor(count)
            self._losses.expect()
            with self._alarm.reporting():
                result = executor.run(batch)
            return self._losses.start(result.loss).wait()

    @torch.no_grad()
    def predict(self, inputs: Any = None, *, microbatches: Any = None, **keywords: Any) -> Any:
        """Return the outputs of the last stage for the whole batch, on the rank that holds it; None on the others.

        Of `microbatches`, given as to `step`, a list with the output of each; their targets are not looked at.

        Where the vocabulary is spread over the ranks, all compute their share of the logits, and that rank gathers them.
        Context-parallel ranks compute the whole sequences each.
        """
        self._require_open("predict")
        spread = self._engines[0].vocabulary
        spread_layers = () if self._context is None else self._assembly.modules.values()
        with self._status.during("evaluation"), whole_sequences(spread_layers):
            given = GivenBatch.of("predict", inputs, None, keywords, microbatches)
            count = given.forwards(self.schedule.microbatches)
            if spread is None:
                self._gradients.publish()
            else:
                self._gradients.wait_for_weights(self.schedule.vocabulary[self.rank])  # no action reads the shares
            if spread is not None and spread.embedding is not None:
                with self._alarm.waiting("the other ranks' embeddings"):
                    given = given.with_inputs(lambda each: spread.look_up(0, each, training=False))
            self._require(given, targets=False)
            batch = self._split(given, count, whole=True)
            executor = self._executor(count, whole=True)
            with self._alarm.reporting():
                outputs = executor.run(batch, keep_outputs=True).outputs
        if len(self.schedule.routes) > 1 and self._group is not None:
            with self._alarm.reporting():
                gathered = all_gather_tree(list(outputs.items()), self._group, self.device)
            outputs = {mb: output for part in gathered for mb, output in part} if outputs else {}
        results: list[Any] = [None] * (1 if given.cut else batch.count)
        if len(outputs) == batch.count:
            results = [outputs[mb] for mb in sorted(outputs)]
            results = [join(results)] if given.cut else results
        if spread is not None:
            with self._alarm.waiting("the other ranks' logits"):
                results = [spread.logits(each) for each in results]
        return results[0] if given.cut or results[0] is None else results

    def _compare_replicas(self) -> None:
        """Compare what several processes hold, before the first step or evaluation after construction or a load."""
        if self._distributed and self.options.init != "none":
            with self._alarm.waiting(
                "the comparison of replicated weights, after construction or a load by every rank"
            ):
                self._gradients.wait_for_weights()
                mine = replicas.replicated(self._assembly, self.mesh)
                tensors = {key: each.tensor for key, each in mine.items()}
                differences = replicas.compare(tensors, self._run_control, self.mesh.shape)
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

    def _checksums_of_replicas(self) -> dict[tuple[str, torch.Size], int]:
        """Return name and shape -> checksum of each buffer of which another rank has a replica on another route."""
        replicated = self._assembly.replicated_layers if self._distributed else {}
        buffers = {n: b for n, b in self._assembly.buffers.items() if layer_of(n, replicated) and is_strided(b)}
        names = [(name, buffer.shape) for name, buffer in buffers.items()]
        return dict(zip(names, checksums(list(buffers.values())), strict=True))

    def _require_parts(self) -> None:
        """Raise UsageError, on every rank, for a recomputed part that no layer has called: only a forward shows the names."""
        ours = sorted(name for stage in self._assembly.stages.values() for name in stage.parts)
        names = {name for rank in self._exchange(ours) for name in rank if not fraction_of(f"{SAVED}:{name}")}
        for part in sorted(self.schedule._recomputed_parts - names):
            raise UsageError(
                f"the schedule recomputes part {part!r}, and no layer of these stages names a part so{did_you_mean(part, names)}"
            )
        self._parts_unchecked = False

    def _require_settled(self, before: Mapping[tuple[str, torch.Size], int]) -> None:
        """Raise UsageError for a buffer that the first step has changed, other than by giving it another shape."""
        with self._alarm.reporting():
            for (name, shape), value in self._checksums_of_replicas().items() if before else ():
                if before.get((name, shape), value) != value:
                    raise UsageError(
                        f"the first step changed buffer {name!r}, and under schedule {self.schedule.name!r} its stage has "
                        "replicas that get some of the micro-batches each, so it would differ from that of one process; "
                        "choose a schedule with one route"
                    )

    def _executor(self, forwards: int | None, whole: bool = False) -> Executor:
        """Return the executor of a training step, or of the forwards of so many micro-batches, uncut if `whole`."""
        return self._engines[0].executor(forwards, self.trace, whole, self._signals)

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
    def _group(self) -> Any:
        """The pipeline's process group; None for one process."""
        return self._line.group

    @property
    def _distributed(self) -> bool:
        """Return whether the mesh has other processes."""
        return self.mesh.everyone.group is not None

    @property
    def _control(self) -> Any:
        """A gloo group for small CPU messages between the pipeline's ranks; None for one process."""
        return self._connections.control

    @property
    def _run_control(self) -> Any:
        """A gloo group of all ranks of the run, by their numbers in `mesh.everyone`; None for one process."""
        return self._connections.run_control

    @property
    def peak_activations(self) -> int:
        """The most stage-micro-batches alive on this rank at once in the last step, counted."""
        return self._result.peak_alive

    @property
    def step_began(self) -> float:
        """`time.perf_counter` of this process's first action in the last step."""
        starts = [result.starts[0] for result in self._results if result.starts]
        if not starts:
            raise UsageError("no step has run yet")
        return min(starts)

    @property
    def loss_share(self) -> Tensor | None:
        """This process's share of the last step's loss, before the sum over ranks: 0-dim, fp32; None if it computes none."""
        return self._result.loss.get(TOTAL)

    @property
    def exposed(self) -> float | None:
        """Seconds for which this process's computation waited for expert all-to-alls in the last step: of tokens and
        gradients, and of their counts, which are exchanged first.

        None: not measured (on a GPU without `trace`).
        """
        measured = [result.exposed for result in self._results if result.exposed is not None]
        return sum(seconds.get("all-to-all", 0.0) for seconds in measured) if measured else None

    @property
    def sync(self) -> GradientSync | None:
        """The reduction of gradients over the mesh; None where no gradients are reduced."""
        return self._gradients.sync

    @property
    def stats(self) -> RankStats:
        """Return this rank's executed schedule and buffers, and figures of its last step."""
        (engine,), (result,) = self._engines, self._results
        shared, pool = self._connections.shared, self._connections.pool
        return engine.stats(
            result,
            received=(pool.made, pool.nbytes),
            send_segments=None if shared is None else sum(len(box.segments) for box in shared.outboxes.values()),
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which steps accumulate gradients in this process only; the next step outside it sums
        them over the replicas.
        """
        return nullcontext() if self.sync is None else self.sync.no_sync()

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
        return self._gradients.norm(self.counts_in_norm, self.mesh.everyone, self.device)

    @of_annotated_types
    def clip_grad_norm_(self, max_norm: float | Tensor) -> Tensor:
        """Scale all gradients in place so that `grad_norm` is at most `max_norm`; every rank must call it.

        As `torch.nn.utils.clip_grad_norm_` in one process.

        Args:
            max_norm: 0 or above.

        Returns:
            the norm before, as `grad_norm`.
        """
        if not max_norm >= 0:
            raise UsageError(f"clip_grad_norm_: max_norm is {max_norm}; it must be a number of at least 0")
        norm = self.grad_norm()
        self._gradients.clip(norm.item(), float(max_norm))
        return norm

    def adopt(self, schedule: Schedule) -> None:
        """Run `schedule` from the next step on, with the same stages, weights and connections; every rank must call it.

        Raises ConfigError where it needs other stages (another placement, other routes, split backwards where the first schedule
        had none), ScheduleError where it cannot run.
        """
        require_is_schedule(schedule)
        programs = self._lowered.pop(schedule, None)
        if programs is None:
            runs = schedule
            if schedule.positions == self.schedule.positions:  # else it is refused below
                runs = self._spec.recomputing(carrying(schedule, self.schedule.tensors))
            check(runs)
            require_same_stages(runs, self.schedule, self._spec.schedule.splits_backward)
            programs = self._programs(runs)
        self._follow(programs)
        self._lowered[schedule] = programs  # the last one used is the last to be dropped
        if len(self._lowered) > _LOWERED:
            del self._lowered[next(iter(self._lowered))]

    def timeline(self) -> Timeline:
        """This pipeline's last step as measured, in seconds, with the ranks' clocks aligned; collective over its ranks."""
        if not any(result.starts for result in self._results):
            raise UsageError("no step has run yet")
        with self.waiting("the other ranks' timelines"):
            offset = clock_offset(self._line, self._control)
            ranks = [measured_rank(result, offset) for result in self._results]
            if self._group is not None:
                ranks = [each for mine in all_gather_json(ranks, self._group) for each in mine]
        return merged_timeline(self.schedule, ranks)

    @property
    def _watchdog(self) -> Watchdog | None:
        """The watchdog of this process; None for one process, and without `RuntimeOptions.monitor`."""
        return self._alarm.watchdog

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
        """End the watchdog and the connections. Call it on every rank before the process group is destroyed; no step follows."""
        self._closed = self._group is not None
        if self.sync is not None:
            self.sync.weights.wait()
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

        These are whole, also where an optimizer steps `shards`. Call `weights_changed` after writing to them.

        Where optimizer states are sharded, this method, `parameters`, `modules` and `state_dict` wait for the weights that
        other replicas update. A parameter obtained earlier may hold old values between an optimizer's step and the pipeline's
        next step.
        """
        self._gradients.wait_for_weights()
        yield from self._assembly.parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The tensors of `shards`, for an optimizer; if there are none, one without elements: torch's optimizers need one."""
        tensors = [shard.tensor for shard in self.shards()]
        yield from tensors or [nn.Parameter(torch.empty(0, device=self.device))]

    def shards(self) -> list[Master]:
        """Return what an optimizer of this process steps: the parameters of this rank's stages.

        With `RuntimeOptions.shard_gradients`: this replica's elements of each one that trains, flat, in at least fp32. A step
        fills their `.grad`, and the next one, and everything that reads weights, takes over their new values on all replicas.
        """
        named = list(self.named_parameters())
        if not self.options.shard_gradients or self.sync is None:
            return [Master(name, p.shape, 0, p.numel(), p) for name, p in named]
        mine = self._gradients.shards()
        return [mine[name] for name, _ in named if name in mine]

    def weights_changed(self) -> None:
        """Note that this rank's parameters were written to, not by their optimizer; every rank must call it."""
        self._gradients.weights_changed()

    def _stored_name(self, name: str) -> str:
        """The name of this parameter in checkpoints: the first name of a weight with several, on every layout."""
        return self._assembly.first_names.get(name, name)

    def owns(self, name: str) -> bool:
        """Return whether this process is the one that counts the parameter in norms and writes it to checkpoints.

        Of the processes that hold the same values (tied weights, replicas, weights whole on tensor-parallel ranks) one does.
        """
        place, sharding = self.mesh.place, self.layouts[name]
        replica = self.mesh.dp.index if sharding.over("ep") is None else place.edp
        first = replica == 0 and (place.tp == 0 or not sharding.whole_over_tp)
        return first and name not in self._assembly.copies

    def counts_in_norm(self, name: str) -> bool:
        """Return whether this process adds its gradient of this name to a global norm; each replica adds its slice of a
        sharded gradient.
        """
        if not self.options.shard_gradients:
            return self.owns(name)
        sharded = not self.layouts[name].whole_over_tp
        return (sharded or self.mesh.place.tp == 0) and name not in self._assembly.copies

    def state_dict(self) -> dict[str, Tensor]:
        """Global name -> parameter or buffer of this rank's stages."""
        return {**dict(self.named_parameters()), **self._assembly.buffers}

    @of_annotated_types
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values by global name; every rank of the run must call it.

        Before the next step replicas are compared as `RuntimeOptions.init` says. Buffers that are not persistent may be missing.
        Raises UsageError, and copies nothing, when a name that this rank holds is missing or a value has another shape.
        """
        self._compared = False
        copy_state(self.state_dict(), state, self._assembly.transient_buffers)
        self.weights_changed()

    def train(self, mode: bool = True) -> None:
        for stage in self._assembly.stages.values():
            for module in stage.modules:
                module.train(mode)

    def eval(self) -> None:
        self.train(False)

    # -- a batch -----------------------------------------------------------------------------------------------------------

    def _split(self, given: GivenBatch, count: int, whole: bool = False, must_fit: bool = False) -> Microbatches:
        """Return a batch cut into so many micro-batches, or those given; `whole`: of whole sequences, without targets."""
        order = 0
        if self.mesh.dp.group is not None:
            program = self._engines[0].programs.of_rank(self.rank, None if torch.is_grad_enabled() else count, whole)
            order = program.orders[0 if self.mesh.ep.size > 1 else 1]
        total = partial(sum_over_replicas, mesh=self.mesh, device=self.device, alarm=self._alarm, order=order)
        weighing = Weighing(
            None if self._spec.weight is None else self._reported_weight,
            self._spec.ignore_index,
            float if whole else total,
            self.mesh.place.dp,
            self.next_step,
            self.options.shared_targets,
        )
        contexts = KEYWORD in self._assembly.keywords.names
        context = None if whole else self._context
        multiple = 1 if context is None else 2 * context.axis.size
        units = []
        for number, (inputs, targets, keywords) in enumerate(given.parts):
            sizes = chosen_sizes(inputs, count if given.cut else 1, self.options.microbatch_sizes, must_fit)
            slices = SequenceSlices.of(
                inputs, 1 if whole else self.schedule.slices, self.options.slice_tokens, multiple, must_fit
            )
            units += cut_batch(inputs, None if whole else targets, keywords, sizes, weighing, slices, context, number)
        # Another replica may have any number of micro-batches: with gaps no two samples of a step draw the same numbers.
        first = None if given.cut else (self.mesh.place.dp << 32,) * 2
        return weighed(units, weighing, contexts, first)

    def _reported_weight(self, targets: Any) -> float | Tensor:
        """The caller's weight of a micro-batch's targets; the other ranks are told of what it raises."""
        assert self._spec.weight is not None
        with self._alarm.reporting():
            return self._spec.weight(targets)


class LocalPipeline(Pipeline):
    """A `Pipeline` with all ranks in this process and one thread, for notebooks, debuggers and tests.

    The lowering, executor and channels are the same, over memory instead of a network. Where the methods of `Pipeline` describe
    one rank, these describe all: `stats` and `peak_activations` have one entry per rank. `rank`, `ranks` and `sync` are
    as of a pipeline of one process, and methods that concern other processes do nothing.

    Args:
        layers, schedule, loss, weight, ignore_index, stages, tied, options: as of `Pipeline`.
        separate_replicas: give each rank keyword arguments of its own, and the replicas of two routes buffers and attributes, as
            on several processes; replicas share parameters.
        check_first: False runs a schedule without checking it (for tests of the executor); a deadlock raises ScheduleError.
    """

    def __init__(
        self,
        layers: Sequence[LayerSource],
        schedule: Schedule,
        *,
        loss: Loss,
        weight: Weight | None = None,
        ignore_index: int | None = IGNORE_INDEX,
        stages: Sequence[int] | None = None,
        tied: Sequence[Sequence[str]] = (),
        options: RuntimeOptions = RuntimeOptions(),
        check_first: bool = True,
        separate_replicas: bool = False,
    ) -> None:
        spec = PipelineSpec(layers, schedule, loss, weight, ignore_index, stages, tied, options, check_first)
        self._take(spec, Mesh.of_pipeline(PipelineMesh((0,), 0, None)))
        self._mailroom: Mailroom = {}
        self._apart = separate_replicas
        statuses = {rank: Status(rank) for rank in range(schedule.ranks)}
        self._build(statuses, spec.seed, None, separate_replicas)
        self._status.phase = "first step"

    def _transport(self, program: RankProgram) -> Transport:
        return InProcessTransport(self._mailroom)

    def _executor(self, forwards: int | None, whole: bool = False) -> Any:
        self._mailroom.clear()  # of messages that a failed run has left
        signals = SignalsInProcess()
        executors = [engine.executor(forwards, self.trace, whole, signals) for engine in self._engines]
        return _ExecutorOfAllRanks(executors, self._apart)

    @property
    def stats(self) -> tuple[RankStats, ...]:  # type: ignore[override]  # of all ranks
        """Return each rank's executed schedule, and figures of its last step."""
        return tuple(engine.stats(result) for engine, result in zip(self._engines, self._results, strict=True))

    @property
    def peak_activations(self) -> tuple[int, ...]:  # type: ignore[override]  # of all ranks
        """rank -> the most stage-micro-batches alive at once in the last step, counted."""
        return tuple(result.peak_alive for result in self._results)


class _ExecutorOfAllRanks:
    """The executors of ranks that share a thread, run in turn: each as far as the messages that it waits for have been sent."""

    def __init__(self, executors: Sequence[Executor], apart: bool = False) -> None:
        self._executors, self._apart = executors, apart
        self.results: list[StepResult] = []

    def run(self, batch: Microbatches, keep_outputs: bool = False) -> StepResult:
        """Run every rank's program; return the sum of their results. Raises ScheduleError if they deadlock."""
        for executor in self._executors:
            executor.begin(_with_keywords_of_its_own(batch) if self._apart else batch, keep_outputs)
        while any(executor.next is not None for executor in self._executors):
            progress = False
            for executor in self._executors:
                executor.resume()
                while executor.next is not None and executor.missing() is None:
                    executor.execute(executor.next, executor.hooks.status)
                    progress = True
            if not progress:
                underway = [ended for executor in self._executors for ended in executor.underway]
                if underway:
                    futures.wait(underway, return_when=futures.FIRST_COMPLETED)
                    continue
                awaited = [(rank, each.missing()) for rank, each in enumerate(self._executors) if each.next is not None]
                stuck = "; ".join(f"rank {rank} waits for {each.words}" for rank, each in awaited if each is not None)
                raise ScheduleError(f"the schedule deadlocks: {stuck}")
        self.results = [executor.finish() for executor in self._executors]
        whole = StepResult()
        for result in self.results:
            for key, share in result.loss.items():
                whole.loss.add(share, key)
            whole.outputs.update(result.outputs)
        return whole


def _with_keywords_of_its_own(batch: Microbatches) -> Microbatches:
    """Return the batch as a rank has it whose keyword arguments no other rank changes, where they can be copied."""
    try:
        return replace(batch, keywords=copy.deepcopy(batch.keywords))
    except (TypeError, RuntimeError, AttributeError):
        return batch


def layers_of_ranks(pipeline: Pipeline) -> list[tuple[str, nn.Module]]:
    """Return the layers of all ranks here by name; one that several of them hold has as many entries."""
    stages = pipeline._assembly.stages.values()
    return [item for stage in stages for item in zip(stage.layers.names, stage.modules, strict=True)]


def call_before_layers(pipeline: Pipeline, call: Callable[[str, Action], None]) -> None:
    """Call `call(layer, action)` before each layer's forward, except in segmented stages and recomputed forwards."""

    def before(status: Status, layer: str) -> None:
        if status.action is not None:
            call(layer, status.action)

    for engine in pipeline._engines:
        engine.hooks = replace(engine.hooks, before_layer=partial(before, engine.hooks.status))


def run_beside(pipeline: Pipeline, call: Callable[[Action, Callable[[], object]], object]) -> None:
    """Let `call` run each action on another queue than that of computation: it gets the action and what executes it."""
    for engine in pipeline._engines:
        engine.hooks = replace(engine.hooks, beside=call)


def couple_sends(pipeline: Pipeline, leave: Callable[[dict[Message, float]], object]) -> None:
    """Let the messages between two computations move in one call, which holds both; `leave` as of `CoupledTransport`."""
    pipeline._connections.leave = leave


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
