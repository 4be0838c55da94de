"""LocalPipeline: all ranks of a schedule in one process and one thread, for notebooks, debuggers and tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import ScheduleError, UsageError
from pipeloom.parallel.grad_norm import clip, global_norm, squares
from pipeloom.parallel.mesh import Mesh, PipelineMesh
from pipeloom.parallel.sharding import ParameterSharding
from pipeloom.runtime.assembly import Assembly, SharedBuild, assemble, copy_state, holders_of, unique_parameters
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
)
from pipeloom.runtime.built_parameters import BuiltParameters
from pipeloom.runtime.clock import clock_for
from pipeloom.runtime.executor import Executor, StepHooks, StepResult
from pipeloom.runtime.grad_sync import checked_max_norm
from pipeloom.runtime.health.fault_injection import Faults
from pipeloom.runtime.health.status import Status
from pipeloom.runtime.layer_names import carrying
from pipeloom.runtime.loss import Loss, PendingLoss, require_weighing
from pipeloom.runtime.measured_timeline import measured_rank, timeline_of
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.runtime.p2p.base import Communicator, InProcessBatches, InProcessTransport, Mailroom
from pipeloom.runtime.program import RankProgram, RankPrograms, as_executed, require_same_stages
from pipeloom.runtime.stage_modules import (
    KnownKeywords,
    LayerSource,
    layer_name,
    model_names,
    require_arguments,
    split_layers,
)
from pipeloom.runtime.stats import RankStats
from pipeloom.runtime.tensor_spec import ShapeCache
from pipeloom.runtime.tied_weights import SharedParameters, Tie, merged, share, shared_groups
from pipeloom.schedule.check import check
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.timeline import Timeline


class LocalPipeline:
    """A `Pipeline` with all ranks in this process: the same lowering, executor and channels, over memory instead of a network.

    It has the methods of `Pipeline`; where those describe one rank, these describe all: `stats` and `peak_activations`
    have one entry per rank. Methods that concern other processes do nothing.

    Args:
        layers, schedule, loss, weight, ignore_index, stages, tied, options: as of `Pipeline`.
        separate_replicas: give the replicas of two routes buffers and attributes of their own, as on several processes; they
            share parameters.
        check_first: False runs a schedule without checking it (for tests of the executor); a deadlock raises ScheduleError.

    Attributes:
        schedule: the executed schedule, in which pairs of stages without segments are replaced by a forward and a backward.
        options: as given.
        mesh: one process.
        device: where the stages are.
        layouts: global name -> how the parameter is spread over the mesh: whole.
        next_step: the number of the next step, from which layers derive random numbers.
        trace: whether the next steps are timed as `RuntimeOptions.trace` says; settable.
        rank, ranks, group, control, run_control, distributed, sync: as of a pipeline of one process.
    """

    rank = 0
    ranks = 1
    group = control = run_control = sync = None
    distributed = False

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
        require_arguments(layers, schedule, loss)
        require_weighing(loss, weight, ignore_index)
        declared = model_names(layers, schedule.positions, stages)
        schedule = carrying(schedule, declared.tensors)
        if check_first:
            check(schedule)
        self.schedule = schedule
        self._terms = declared.terms
        self.options = options
        self.trace = options.trace
        self._weight = weight
        self._ignore_index = ignore_index
        self.next_step = 0
        self.mesh = Mesh.of_pipeline(PipelineMesh((0,), 0, None))
        device = self.device = options.device if options.device is not None else torch.device("cpu")
        names = [layer_name(layer, at) for at, layer in enumerate(layers)]
        shared = SharedParameters(layers, names)
        ranges = split_layers(len(layers), schedule.positions, stages)
        shared_build = SharedBuild(shared, schedule, separate=separate_replicas)
        seed = torch.initial_seed() if options.seed is None else options.seed
        self._statuses = [Status(rank) for rank in range(schedule.ranks)]
        self._assemblies: list[Assembly] = [
            assemble(
                layers,
                schedule,
                rank,
                stages,
                tied,
                options,
                device,
                status,
                seed,
                lambda mine: [mine],
                None,
                shared_build,
            )
            for rank, status in enumerate(self._statuses)
        ]
        modules = {name: module for assembly in self._assemblies for name, module in assembly.modules.items()}
        for tie in {tie for assembly in self._assemblies for tie in assembly.ties}:
            share(tie, modules)
        shared.require_tied(tied, holders_of(names, ranges, schedule))
        for group in merged([*tied, *shared_groups([shared.facts()])]):
            share(Tie(group, ()), modules)
        self._keywords = KnownKeywords.of(
            stage.layers for assembly in self._assemblies for stage in assembly.stages.values()
        )
        self._parameters = unique_parameters(modules)
        self._modules = modules
        self._built = BuiltParameters(modules, None)
        self.layouts: dict[str, ParameterSharding] = {
            each.name: each.sharding for a in self._assemblies for each in a.held
        }
        self._loss = loss
        self._splits_backward = schedule.splits_backward
        self._specs = [ShapeCache(options.shapes) for _ in self._assemblies]
        self._hooks = [StepHooks(status, Faults(options.fault, rank)) for rank, status in enumerate(self._statuses)]
        self._follow(schedule)

    def _follow(self, schedule: Schedule) -> None:
        """Run `schedule` from the next step on."""
        segmented = frozenset(stage for assembly in self._assemblies for stage in assembly.segmented)
        schedule = as_executed(schedule, segmented, self.options)
        self._programs = [RankPrograms(schedule, rank, self.options) for rank in range(schedule.ranks)]
        for programs, assembly in zip(self._programs, self._assemblies, strict=True):
            for index, stage in assembly.stages.items():
                stage.require_order(schedule.name, programs.step.stages[index])
        self.schedule = schedule
        self._results = [StepResult() for _ in self._programs]
        self._pending = PendingLoss(lambda: torch.zeros(1 + len(self._terms)), self._terms)

    # -- running ---------------------------------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any = None, **keywords: Any) -> Tensor:
        """Run forward and backward of the whole schedule; return the mean loss."""
        require_gradients("step")
        self._keywords.require("step", keywords)
        require_targets("step", targets)
        return self.forward_backward(inputs, targets, **keywords).wait()

    def forward_backward(self, inputs: Any, targets: Any = None, **keywords: Any) -> PendingLoss:
        """As `step`; the loss is already computed when it returns."""
        require_gradients("forward_backward")
        self._built.require_same()
        batch = self._split("forward_backward", inputs, targets, keywords, self.schedule.microbatches)
        self._results = self._run([programs.step for programs in self._programs], batch)
        self.next_step += 1
        return self._sum_of_losses(self._results)

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any = None, **keywords: Any) -> Tensor:
        """Return the mean loss, forward only."""
        batch = self._split("evaluate", inputs, targets, keywords, forward_count(self.schedule.microbatches, inputs))
        results = self._run([programs.forwards(batch.count) for programs in self._programs], batch)
        return self._sum_of_losses(results).wait()

    def _sum_of_losses(self, results: Sequence[StepResult]) -> PendingLoss:
        sums = torch.stack([result.loss.together(self._terms, self.device) for result in results]).sum(0)
        self._pending = PendingLoss(lambda: sums, self._terms)
        return self._pending

    @property
    def loss_terms(self) -> dict[str, Tensor]:
        """The loss terms of the last step, as `Pipeline.loss_terms` gives them."""
        return self._pending.terms()

    @torch.no_grad()
    def predict(self, inputs: Any, **keywords: Any) -> Any:
        """Return the outputs of the last stage for the whole batch."""
        batch = self._split("predict", inputs, None, keywords, forward_count(self.schedule.microbatches, inputs))
        results = self._run([programs.forwards(batch.count) for programs in self._programs], batch, keep_outputs=True)
        outputs = {mb: output for result in results for mb, output in result.outputs.items()}
        return join([outputs[mb] for mb in range(batch.count)])

    def _run(
        self, programs: Sequence[RankProgram], batch: Microbatches, keep_outputs: bool = False
    ) -> list[StepResult]:
        """Every rank's program, a rank running as far as the messages that it waits for have been sent."""
        for assembly in self._assemblies:
            assembly.communications.timed = self.trace
        mailroom, communicator = Mailroom(), Communicator(self.schedule.ranks)
        executors = [
            Executor(
                program,
                assembly.stages,
                InProcessTransport(mailroom)
                if program.batches is None
                else InProcessBatches(communicator, rank, program.batches),
                hooks,
                loss=self._loss,
                specs=specs,
                communications=assembly.communications,
                clock=clock_for(self.device, self.trace),
                checksums=self.options.checksum,
            )
            for rank, (program, assembly, hooks, specs) in enumerate(
                zip(programs, self._assemblies, self._hooks, self._specs, strict=True)
            )
        ]
        for executor in executors:
            executor.begin(batch, keep_outputs)
        while any(executor.unfinished for executor in executors):
            progress = False
            for executor in executors:
                while executor.unfinished and executor.missing() is None:
                    executor.execute_next()
                    progress = True
            if not progress:
                awaited = [(rank, each.missing()) for rank, each in enumerate(executors) if each.unfinished]
                stuck = "; ".join(f"rank {rank} waits for {m.words}" for rank, m in awaited if m is not None)
                raise ScheduleError(f"the schedule deadlocks: {stuck}")
        return [executor.finish() for executor in executors]

    def _split(self, method: str, inputs: Any, targets: Any, keywords: Mapping[str, Any], count: int) -> Microbatches:
        self._keywords.require(method, keywords)
        require_targets(method, targets)
        sizes = chosen_sizes(inputs, count, self.options.microbatch_sizes)
        weighing = Weighing(
            self._weight, self._ignore_index, step=self.next_step, shared_targets=self.options.shared_targets
        )
        return split_batch(inputs, targets, keywords, sizes, weighing)

    def adopt(self, schedule: Schedule) -> None:
        """Run `schedule` from the next step on, with the same stages and weights; errors as of `Pipeline.adopt`."""
        if schedule.positions == self.schedule.positions:  # else it is refused below
            schedule = carrying(schedule, self.schedule.tensors)
        check(schedule, transport="batched" if self.options.transport == "batched" else "individual")
        require_same_stages(schedule, self.schedule, self._splits_backward)
        self._follow(schedule)

    # -- the last step ---------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> tuple[RankStats, ...]:
        """Return each rank's executed schedule, and figures of its last step."""
        return tuple(
            RankStats.of(self.schedule, rank, programs.step, result)
            for rank, (programs, result) in enumerate(zip(self._programs, self._results, strict=True))
        )

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """rank -> the most stage-micro-batches alive at once in the last step, counted."""
        return tuple(result.peak_alive for result in self._results)

    @property
    def step_began(self) -> float:
        """`time.perf_counter` of the first action in the last step."""
        starts = [result.starts[0] for result in self._results if result.starts]
        if not starts:
            raise UsageError("no step has run yet")
        return min(starts)

    @property
    def loss_share(self) -> Tensor | None:
        """The last step's loss, of which this process computes every share: 0-dim, fp32; None if no step ran."""
        shares = [result.loss.total for result in self._results if result.loss.total is not None]
        return torch.stack(shares).sum() if shares else None

    @property
    def exposed(self) -> float | None:
        """Seconds for which computation waited for expert all-to-alls in the last step, summed over all ranks.

        None: not measured.
        """
        measured = [result.exposed for result in self._results if result.exposed is not None]
        return sum(seconds.get("all-to-all", 0.0) for seconds in measured) if measured else None

    def timeline(self) -> Timeline:
        """The last step as measured, in seconds; all ranks share one thread, so only one computes at a time."""
        if not any(result.starts for result in self._results):
            raise UsageError("no step has run yet")
        return timeline_of(self.schedule, [measured_rank(result, 0.0) for result in self._results])

    def waiting(self, what: str, phase: str | None = None) -> AbstractContextManager[None]:
        """Return an empty context: there is no other process to wait for."""
        return contextlib.nullcontext()

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """Return an empty context: no message of another process can be missing."""
        return contextlib.nullcontext()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return an empty context: there are no replicas."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Do nothing: there is no watchdog to end."""

    # -- what it holds ---------------------------------------------------------------------------------------------------

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Layer name -> module, of all ranks."""
        return self._modules

    @property
    def layer_names(self) -> tuple[tuple[str, ...], ...]:
        """The names of the layers of each stage."""
        stages = {index: stage for assembly in self._assemblies for index, stage in assembly.stages.items()}
        return tuple(stage.layers.names for _, stage in sorted(stages.items()))

    def stored_name(self, name: str) -> str:
        """The name of this parameter in checkpoints: the first name of a weight with several."""
        first_names = {n: first for assembly in self._assemblies for n, first in assembly.first_names.items()}
        return first_names.get(name, name)

    def owns(self, name: str) -> bool:
        """Return whether this process counts the parameter in norms and writes it to checkpoints: always."""
        return True

    def counts(self, name: str) -> bool:
        """Return whether this process adds its gradient of this name to a global norm: always."""
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Global name -> parameter or buffer."""
        buffers = {name: buffer for assembly in self._assemblies for name, buffer in assembly.buffers.items()}
        return {**dict(self.named_parameters()), **buffers}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy values by global name; errors as of `Pipeline.load_state_dict`."""
        transient = frozenset[str]().union(*(assembly.transient_buffers for assembly in self._assemblies))
        copy_state(self.state_dict(), state, transient)

    def train(self, mode: bool = True) -> None:
        for _, module in layers_of_ranks(self):
            module.train(mode)

    def eval(self) -> None:
        self.train(False)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, parameter) of all ranks."""
        yield from self._parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._parameters.values()

    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients, each weight counted once: a 0-dim tensor in fp32, or fp64 where gradients are."""
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        wide = any(gradient.dtype in (torch.float64, torch.complex128) for gradient in gradients)
        norm = global_norm(squares(gradients))
        return torch.tensor(norm, dtype=torch.float64 if wide else torch.float32, device=self.device)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients in place so that `grad_norm` is at most `max_norm`; return the norm before."""
        most = checked_max_norm(max_norm)
        norm = self.grad_norm()
        clip([parameter.grad for parameter in self.parameters() if parameter.grad is not None], norm.item(), most)
        return norm

    def zero_grad(self) -> None:
        """Set every gradient to None."""
        for parameter in self.parameters():
            parameter.grad = None


def layers_of_ranks(pipeline: LocalPipeline) -> list[tuple[str, nn.Module]]:
    """Return the layers of all ranks by name; one that several ranks hold has as many entries."""
    return [item for assembly in pipeline._assemblies for item in assembly.modules.items()]


def call_before_layers(pipeline: LocalPipeline, call: Callable[[str, int], None]) -> None:
    """Call `call(layer, microbatch)` before each layer's forward, except in segmented stages and recomputed forwards."""

    def before(status: Status, layer: str) -> None:
        if status.action is not None:
            call(layer, status.action.microbatch)

    pipeline._hooks = [replace(hooks, before_layer=partial(before, hooks.status)) for hooks in pipeline._hooks]
