"""Rehearsal of a schedule: real processes, transports and messages, and emulated computation of given costs.

Emulated layers take given times instead of computing: they sleep, or spin on a GPU, and pass on their input.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.parts import in_part
from pipeloom.ops.segments import Compute, Pending, Segment, Values, in_order, in_turns
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.runtime.health.watchdog import Watchdog
from pipeloom.runtime.pipeline import couple_sends, run_beside
from pipeloom.schedule import Action, Costs, Schedule, Timeline, simulate
from pipeloom.schedule.actions import COPY_IN, COPY_OUT, fraction_of, kind_of
from pipeloom.schedule.channels import Message
from pipeloom.schedule.check import TransportName
from pipeloom.schedule.costs import StageCosts, durations
from pipeloom.schedule.model import parts
from pipeloom.schedule.segments import LayerSegments, PhaseTimes, segment_costs

_BACK_TO_BACK = 0.002
"""Seconds after a sleep within which the next one makes up for its oversleeping. The executor needs about 0.3 ms from one
action to the next; after a longer gap the rank waited for a message, and has nothing to make up for."""

_CALIBRATION_CYCLES = 50_000_000


class Clock:
    """The device of one process, as its emulated layers use it.

    On a CPU it sleeps until a deadline. What follows a sleep at once is counted from that deadline, not from the sleep's end, so
    that the errors of sleeps do not add up. On a GPU a computation is a spinning kernel.

    Args:
        device: device that the computations occupy; None: the CPU.

    Attributes:
        seconds: (part of a layer, "F", "I" or "W") -> durations of its computations on a CPU.
        free: link -> time at which the last communication started on it so far ends.
        exposed: seconds for which the device has waited for communication, without the errors of sleeps.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.free: dict[str, float] = defaultdict(float)
        self.exposed = self._due = self._woken = 0.0
        self._cycles = cycles_per_second(device) if device is not None and device.type == "cuda" else 0.0

    def compute(self, name: str, kind: str, seconds: float) -> None:
        """Occupy the device for `seconds`; on a GPU, enqueue a kernel that does. `name` and `kind` are the key in `seconds`."""
        if self._cycles:
            # The only kernel of torch that occupies a GPU for a given time; its own tests use it too.
            torch.cuda._sleep(round(seconds * self._cycles))  # type: ignore[no-untyped-call]
            return
        begun = time.perf_counter()
        self._sleep(self._now() + seconds)
        self.seconds[name, kind].append(self._woken - begun)

    def communicate(self, link: str, seconds: float) -> float:
        """Start a communication behind those on its link; return the time at which it ends."""
        end = self.free[link] = max(self._now(), self.free[link]) + seconds
        return end

    def wait(self, end: float) -> None:
        """Wait for a communication that ends at `end`."""
        left = end - self._now()
        if left > 0:
            self.exposed += left
            self._sleep(end)

    def _now(self) -> float:
        """Return the time, or how far the device was due to be if it has just slept too long."""
        now = time.perf_counter()
        return now - (self._woken - self._due if now - self._woken < _BACK_TO_BACK else 0.0)

    def _sleep(self, due: float) -> None:
        time.sleep(max(0.0, due - time.perf_counter()))
        self._due, self._woken = due, time.perf_counter()


def cycles_per_second(device: torch.device) -> float:
    """Return the cycles per second that a spinning kernel counts on this GPU.

    Only the last of four kernels is timed: a GPU that was idle raises its clock during the first ones.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        for _ in range(4):
            begin.record()
            torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
            end.record()
            end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return _CALIBRATION_CYCLES / (milliseconds * 1e-3)


@dataclass(frozen=True)
class _Work:
    """The times of one part of a layer for one micro-batch, and the queue for its W; None: W runs at once."""

    clock: Clock
    name: str
    times: PhaseTimes
    queue: WeightGradQueue | None


class _Emulated(torch.autograd.Function):
    """Passes on a copy of its input, and takes the times of F, I and W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, work: _Work, saved: Tensor | None) -> Tensor:
        ctx.work = work
        if saved is not None:
            ctx.save_for_backward(saved)
        work.clock.compute(work.name, "F", work.times.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        work: _Work = ctx.work
        _ = ctx.saved_tensors  # waits until it is back from the host
        work.clock.compute(work.name, "I", work.times.input_grad)
        later = partial(work.clock.compute, work.name, "W", work.times.weight_grad)
        if work.queue is None:
            later()
        else:
            work.queue.put(later)
        return gradients[0], gradients[0].new_zeros(()), None, None


class EmulatedLayer(nn.Module):
    """A layer with given times of attention, and if it has any, of dispatch, experts and combine; each hop is a timer.

    Args:
        times: times of one micro-batch, in seconds.
        factors: factor on the times of each micro-batch, or of each of its slices; empty: 1 for all.
        saves: number of tensors of one size that a part of the layer saves, one after the other in equal shares of its time.
        parts: name of a part -> time of its R; in the forward it is a share of the layer's.
    """

    def __init__(
        self,
        clock: Clock,
        times: LayerSegments,
        factors: Sequence[float] = (),
        saves: int = 0,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.clock, self.times, self.factors = clock, times, factors
        self.saves, self.parts = saves, parts or {}
        self.weight = nn.Parameter(torch.zeros(()))
        self.grad_context = WeightGradContext()

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None:
        self.grad_context = grad_context

    def segments(self, microbatch: MicrobatchContext | None = None) -> Sequence[Segment]:
        times, factor = self.times, factor_of(self.factors, microbatch)
        parts = {name: factor * seconds for name, seconds in self.parts.items()}
        attention = self.part("attention", times.attention.times(factor), parts=parts)
        if not times.exchanges:
            return (attention,)
        combine_backward, dispatch_backward = times.backward_talk
        share = factor / times.chunks
        chunks = [
            [
                *self._hops("dispatch", share, times.dispatch, dispatch_backward),
                self.part("experts", times.experts.times(share), at),
                *self._hops("combine", share, times.combine, combine_backward)[::-1],
            ]
            for at in range(times.chunks)
        ]
        if times.chunks == 1:
            return (attention, *chunks[0])
        chunk_of = {id(segment): at for at, chunk in enumerate(chunks) for segment in chunk}
        turns = in_turns(chunks, lambda timed: (chunk_of[id(timed)],), Compute("nothing", lambda values: values))
        split = Compute("attention", lambda values: attention.run(values) * times.chunks)
        return [split, *turns, Compute("sum", lambda values: (sum(values) / times.chunks,))]

    def _hops(self, name: str, share: float, seconds: float, backward_seconds: float) -> list[Segment]:
        """Return an all-to-all: between nodes, then inside a node if that takes time."""
        across = TimedExchange(name, self.clock, share * seconds, share * backward_seconds)
        if not (inside := share * self.times.inside):
            return [across]
        hop = TimedExchange(name, self.clock, inside, inside, "inside", quick=True)
        return [across, Compute(name, lambda values: values), hop]

    def part(
        self, name: str, times: PhaseTimes, at: int = 0, parts: Mapping[str, float] = MappingProxyType({})
    ) -> Compute:
        """Return a computation of the value `at` that takes these times; `parts`: name of a part in it -> time of its R."""

        def run(values: Values) -> Values:
            queue = self.grad_context.queue  # of the micro-batch whose forward runs now
            out, count = values[at], max(1, self.saves)
            work = _Work(self.clock, name, times.times(1 / count), queue)
            for _ in range(count):
                saved = torch.ones((), device=out.device) if self.saves else None
                if saved is not None:
                    out = out + self.weight * saved  # saves it before the time of this share begins
                out = _Emulated.apply(out, self.weight, work, saved)  # type: ignore[no-untyped-call]
            for part, seconds in parts.items():  # they take no time of their own in F, and this in R
                out = in_part(part, partial(self._run_part, part, chain((0.0,), repeat(seconds))), out)
            return (*values[:at], out, *values[at + 1 :])

        return Compute(name, run)

    def forward(self, x: Tensor, microbatch: MicrobatchContext | None = None) -> Tensor:
        (out,) = in_order(self.segments(microbatch), (x,))
        return out  # type: ignore[no-any-return]

    def _run_part(self, name: str, calls: Iterator[float], x: Tensor) -> Tensor:
        if seconds := next(calls):
            self.clock.compute(name, "R", seconds)
        return x.clone()


@dataclass(frozen=True)
class _Timer:
    """An all-to-all whose end is known from its start."""

    clock: Clock
    values: Values
    end: float

    def wait(self) -> Values:
        self.clock.wait(self.end)
        return self.values


@dataclass(frozen=True)
class TimedExchange:
    """An emulated all-to-all; those of one process on one link run one after the other."""

    name: str
    clock: Clock
    seconds: float
    backward_seconds: float
    link: str = "across"
    quick: bool = False

    def start(self, values: Values) -> Pending:
        return _Timer(self.clock, values, self.clock.communicate(self.link, self.seconds))

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        return _Timer(self.clock, gradients, self.clock.communicate(self.link, self.backward_seconds))


def factor_of(factors: Sequence[float], microbatch: MicrobatchContext | None) -> float:
    """Return the factor on the times of a micro-batch, or of a slice of one."""
    if not factors or microbatch is None:
        return 1.0
    place = microbatch.place
    return factors[microbatch.index if place is None else microbatch.index * place.count + place.index]


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal's schedule and settings.

    Attributes:
        schedule: the schedule, already checked.
        costs: costs of a stage; those of a pair follow from `all_to_all`. `message` is the bytes of each message.
        segments: the layers of each stage, in the unit of the costs; empty: one, of which half is experts where any communicate.
        unit: seconds that a cost of 1 takes.
        steps: number of recorded steps; one step that is not recorded precedes them.
        slow: stage -> factor by which its emulated times exceed its costs, to show the effect of a slow stage.
        transport: name of the transport that carries the messages; coupled ones (`Costs.sends`) move in calls of their own, and
            take `Costs.p2p` from when both ranks have reached them.
    """

    schedule: Schedule
    costs: Costs
    unit: float
    steps: int = 8
    slow: Mapping[int, float] = field(default_factory=dict)
    transport: TransportName = "auto"
    segments: Sequence[LayerSegments] = ()

    @property
    def communicates(self) -> bool:
        """Return whether any stage has all-to-all costs, which pairs can hide."""
        return any(self.costs.per_stage("all_to_all", self.schedule.stages))

    @property
    def seconds(self) -> Costs:
        """The costs in seconds; the costs of pairs follow from the emulated segments."""
        costs = self.costs.scaled(self.unit)
        if not self.communicates:
            return costs
        return segment_costs([*self._segments()], **vars(costs))

    def simulated(self) -> Timeline:
        """Return the timeline simulated with the costs, in seconds; messages take no time in it, unless sends are coupled."""
        return simulate(self.schedule, self.seconds)

    def work(self) -> list[float]:
        """Return stage -> the sum of its F, I and W costs, in seconds."""
        stages = self.schedule.stages
        rows = [self.costs.per_stage(name, stages) for name in ("forward", "input_grad", "weight_grad")]
        return [self.unit * sum(column) for column in zip(*rows, strict=True)]

    @property
    def slice_tokens(self) -> tuple[int, ...]:
        """The tokens of each slice, of 4 bytes each: together a message, but at least one each."""
        count = self.schedule.slices
        shares = self.costs.slice_sizes or (1 / count,) * count
        return tuple(max(1, round(self.costs.message / 4 * share)) for share in shares)

    def layers(self, rank: int, clock: Clock) -> list[Layer]:
        """Return the layers of each stage position, of all as many, as `Pipeline` takes them on this rank."""
        stages = {self.schedule.position_of[stage]: stage for stage in reversed(self.schedule.stages_of[rank])}
        segments = self._segments()
        count = len(segments[0])
        even = self.schedule.slices == 1 and not self.costs.microbatch
        names, again = sorted(self.schedule._recomputed_parts), StageCosts(self.costs, self.schedule.stages)
        factors = () if even else self.costs.time_factors(self.schedule)
        actions = {action for cell in self.schedule.programs[rank] for action in parts(cell)}
        copies = {action.kind for action in actions if kind_of(action.kind).queue == COPY_OUT}
        saves = max(((fraction_of(kind) or (1, 1))[1] for kind in copies), default=0)

        def build(position: int, at: int) -> nn.Module:
            stage = stages[position]
            factor, part = self.slow.get(stage, 1.0), segments[stage][at]
            each = self.unit * factor / count
            slowed = replace(part, attention=part.attention.times(factor), experts=part.experts.times(factor))
            named = {name: each * again.time_of(f"recompute:{name}")[stage] for name in names}
            return EmulatedLayer(clock, slowed, factors, saves=saves, parts=named)

        return [
            Layer(f"stage.{position}.{at}", partial(build, position, at))
            for position in range(self.schedule.positions)
            for at in range(count)
        ]

    def beside(self, rank: int) -> Callable[[Action, Callable[[], object]], None]:
        """Return what lets this rank's actions on other queues than that of computation take their times, by sleeping.

        What comes from the host is there after that time; what goes there leaves once it is complete, and then takes its time.
        """
        seconds = durations(self.schedule, self.seconds)
        cells = zip(self.schedule.codes[rank], self.schedule.programs[rank], strict=True)
        of_action = {cell: seconds[code] for code, cell in cells if isinstance(cell, Action)}
        clocks: dict[str, Clock] = defaultdict(Clock)

        def run(action: Action, execute: Callable[[], object]) -> None:
            queue = kind_of(action.kind).queue
            if queue != COPY_IN:
                execute()
            clocks[queue].compute(str(action), action.kind, of_action[action])
            if queue == COPY_IN:
                execute()

        return run

    def leave(self, clock: Clock) -> Callable[[Mapping[Message, float]], None]:
        """Return what holds a rank in a call of coupled sends until its messages have travelled."""
        seconds, factors, slices = self.seconds, self.costs.size_factors(self.schedule), self.schedule.slices

        def wait(moved: Mapping[Message, float]) -> None:
            def arrival(message: Message) -> float:
                source, destination, _ = message.channel
                factor = factors[message.microbatch * slices + (message.slice or 0)]
                return moved[message] + seconds.hop(source, destination, factor, message.edge.name)

            clock.wait(max(map(arrival, moved)))

        return wait

    def _segments(self) -> list[tuple[LayerSegments, ...]]:
        """Return stage -> its layers in seconds."""
        names, stages = ("forward", "input_grad", "weight_grad", "all_to_all"), self.schedule.stages
        times = zip(*(self.costs.per_stage(name, stages) for name in names), strict=True)
        layers = [tuple(self.segments)] * stages if self.segments else [(self._halves(*each),) for each in times]
        return [tuple(layer.times(self.unit) for layer in each) for each in layers]

    def _halves(self, forward: float, input_grad: float, weight_grad: float, share: float) -> LayerSegments:
        """Return a stage as one layer; without an all-to-all, all of the time is in the attention segment."""
        if not self.communicates:
            return LayerSegments(PhaseTimes(forward, input_grad, weight_grad), PhaseTimes(0, 0, 0))
        half = PhaseTimes((1 - share) * forward, (1 - share) * input_grad, weight_grad).times(0.5)
        there, back = share * forward / 2, share * input_grad / 2
        return LayerSegments(half, half, there, there, back, back)


def run(
    rehearsal: Rehearsal, device: torch.device, watchdog: Watchdog | None, connected: Callable[[], None]
) -> tuple[Timeline, ...]:
    """Run the rehearsal in this process; return its recorded steps, in seconds, the same on every rank.

    Args:
        watchdog: this process's; None: the pipeline starts one.
        connected: is called once the process groups exist.
    """
    schedule, rank = rehearsal.schedule, dist.get_rank() if dist.is_initialized() else 0
    coupled = rehearsal.costs.sends == "coupled"
    options = RuntimeOptions(
        transport="individual" if coupled else rehearsal.transport,
        overlap_p2p=False if coupled else None,
        device=device,
        timeout=patience(rehearsal),
        watchdog=watchdog,
        trace=device.type == "cuda",
        slice_tokens=rehearsal.slice_tokens if schedule.slices > 1 else None,
    )
    clock = Clock(device)
    pipeline = Pipeline(rehearsal.layers(rank, clock), schedule, loss=_loss, options=options)
    if coupled:
        couple_sends(pipeline, rehearsal.leave(clock))
    if schedule.has_queues:
        run_beside(pipeline, rehearsal.beside(rank))
    connected()
    batch = torch.ones(schedule.microbatches, sum(rehearsal.slice_tokens), device=device)
    recorded = []
    for step in range(rehearsal.steps + 1):
        if dist.is_initialized():
            with pipeline.waiting("the other ranks before a step"):
                dist.barrier()
        pipeline.step(batch, batch)
        timeline = pipeline.timeline()
        if step:
            given = replace(timeline.costs, sends="coupled", p2p=rehearsal.seconds.p2p) if coupled else timeline.costs
            recorded.append(replace(timeline, costs=given))
    pipeline.close()
    return tuple(recorded)


def patience(rehearsal: Rehearsal) -> float:
    """Return the seconds without progress after which a rank counts as stuck: at least 20 simulated steps."""
    return max(60.0, 20.0 * rehearsal.simulated().makespan)


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return output.mean()
