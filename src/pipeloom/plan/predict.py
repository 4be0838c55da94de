"""The costs of a layout: memory of every rank and seconds of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median

from pipeloom.errors import ArgumentError, UsageError
from pipeloom.plan.export import recomputed_blocks
from pipeloom.plan.layout import CHUNKS, WHOLE_ROUNDS, PlannedLayout, even_stages, problems
from pipeloom.plan.measured import MeasuredLayers
from pipeloom.plan.memory import OfRanks, RankMemory, planned_bytes, ranks_of, run_bytes
from pipeloom.plan.messages import message_bytes
from pipeloom.plan.time import (
    AxisRates,
    Device,
    StageSeconds,
    StepTime,
    busy_parts,
    costs,
    expert_nodes,
    exposed,
    stage_times,
    state_seconds,
    with_pairs,
)
from pipeloom.schedule import Costs, Schedule, Timeline, simulate
from pipeloom.schedule.actions import COMPUTE
from pipeloom.schedule.families import canonical_name
from pipeloom.schedule.slices import SequenceCuts, balanced_cuts
from pipeloom.schedule.transforms import of_zero, recompute_stages, transformed
from pipeloom.shapes.cut import balance, spans
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.layers import attention_share
from pipeloom.shapes.ops import LayerOps, Runtime, Split, layers_of, parameters_of


@dataclass(frozen=True)
class LayoutCosts(OfRanks):
    """Predicted costs of one layout.

    Attributes:
        stages: layers of each stage by position.
        ranks: pipeline rank -> its memory on one device.
        step: seconds.
        tokens: per second and device.
        ahead: blocks that predict tokens further ahead, before the output layer.
        ep_nodes: nodes that the ranks of an ep group are on.
        searched: the schedule, where a search found it or a job's file has it; None: the family's.
        placed: costs by which the entries of a spread output layer were placed.
    """

    layout: PlannedLayout
    stages: tuple[int, ...]
    ranks: tuple[RankMemory, ...]
    step: StepTime
    tokens: float
    ahead: int = 0
    ep_nodes: int = 1
    searched: Schedule | None = None
    placed: Costs | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule of a step."""
        return self.searched or built(self.layout, self.placed)

    @property
    def short(self) -> Schedule:
        """The family's schedule with as few micro-batches as the step was predicted from."""
        return built(shortened(self.layout), self.placed)

    @property
    def text(self) -> str:
        """The layout in words."""
        return self.layout.text() + (" (own order)" if self.searched is not None else "")


@dataclass(frozen=True)
class Planner:
    """Predicts layouts of one model on one kind of device under one runtime.

    `factors`: layer -> measured over predicted seconds of F, and of I and W (`calibrated`); empty: 1.
    With `measured_layers` times are those of the pipeline alone: without sums over replicas, optimizer and hosts.
    """

    shape: DecoderShape
    device: Device
    runtime: Runtime
    measured_layers: MeasuredLayers | None = None
    factors: tuple[tuple[float, float], ...] = ()
    _predictions: dict[PlannedLayout, LayoutCosts] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def row(self) -> float:
        """Bytes of one token between two stages."""
        return float(self.runtime.element * self.shape.hidden_size)

    def layers(self, layout: PlannedLayout) -> list[LayerOps]:
        """[embedding, block, …, output layer (or its norm and a share)] of one device, for a whole micro-batch."""
        return self._layers(layout, layout.micro_batch * layout.seq // layout.cp)

    def timed_layers(self, layout: PlannedLayout) -> list[LayerOps]:
        """The same for a mean slice of a micro-batch, whose products have fewer rows; `stage_seconds` counts all slices."""
        if layout.slices == 1:
            return self.layers(layout)
        return self._layers(layout, layout.micro_batch * layout.seq // layout.cp // layout.slices)

    def cuts(self, layout: PlannedLayout) -> SequenceCuts | None:
        """Cuts of sequences into slices of equal time; None: they are whole."""
        if layout.slices == 1:
            return None
        attention = attention_share(self.layers(replace(layout, slices=1)))
        return balanced_cuts(layout.seq, layout.slices, attention, layout.slice_multiple)

    def _layers(self, layout: PlannedLayout, tokens: int) -> list[LayerOps]:
        split = Split(
            self.runtime, tokens, layout.seq, layout.tp, layout.ep, layout.cp, layout.capacity, layout.etp or layout.tp
        )
        shares = layout.pp * layout.tp if layout.vocabulary == "pp" else 0
        return list(_kept(self.shape, split, layout.recompute, layout.offload, shares))

    def cut(self, layout: PlannedLayout, layers: list[LayerOps], links: AxisRates, positions: int) -> tuple[int, ...]:
        """The layers of each stage, of which a share of the output layer is none."""
        layers = [layer for layer in layers if layer.kind != "S"]
        if layout.stages:
            return layout.stages
        if layout.cut == "even":
            return even_stages(self.shape.num_hidden_layers, positions, self.shape.num_nextn_predict_layers)
        seconds = [each.total for each in self.layer_seconds(layers, layout, links)]
        if layout.recompute_layers:  # the mean over blocks with and without, whose places depend on the cut
            whole = replace(layout, recompute="none", recompute_layers=0)
            bare = self.layer_seconds(self.timed_layers(whole)[: len(layers)], whole, links)
            share = layout.recomputed_share(self.shape.num_hidden_layers, positions)
            seconds = [(1 - share) * a.total + share * b for a, b in zip(bare, seconds, strict=True)]
        return balanced(seconds, positions)

    def layer_seconds(self, layers: list[LayerOps], layout: PlannedLayout, links: AxisRates) -> list[StageSeconds]:
        """Layer -> seconds of one micro-batch; those of the same object are computed once."""
        times = {key: self.stage_seconds([layer], layout, links) for key, layer in distinct(layers).items()}
        seconds = [times[id(layer)] for layer in layers]
        return (
            [each.scaled(*both) for each, both in zip(seconds, self.factors, strict=True)] if self.factors else seconds
        )

    def stage_seconds(self, layers: Sequence[LayerOps], layout: PlannedLayout, links: AxisRates) -> StageSeconds:
        """Seconds of one micro-batch on a stage with these layers, which are of `timed_layers`."""
        if self.measured_layers is not None:
            return self.measured_layers.stage(layers, layout)
        times = stage_times(layers, layout, self.runtime, self.device, links)
        return times if layout.slices == 1 else times.times(layout.slices)

    def costs(
        self, times: Sequence[StageSeconds], layout: PlannedLayout, links: AxisRates, schedule: Schedule
    ) -> Costs:
        """`Costs` in seconds of stages with these times, shares of the output layer last."""
        stages, share = list(times), times[-1]
        if layout.vocabulary == "pp":
            stages[-layout.pp :] = [share.times(0.0)] * layout.pp
        planned = costs(stages, layout, self.row, links)
        planned = with_pairs(planned, stages) if schedule.has_pairs else planned
        if (measured := self.measured_layers) is not None:
            planned = replace(planned, p2p=measured.p2p, bandwidth=measured.bandwidth)
        if layout.vocabulary == "pp":  # a broadcast and a reduction each take as long as a message between stages
            fused = dict(schedule.options).get("vocabulary") != "two"  # then S computes the input gradient too
            scores, gradients = share.forward, share.weight_grad
            scores, gradients = scores + fused * share.input_grad, gradients + (not fused) * share.input_grad
            hop = max(planned.hop(rank - 1, rank) for rank in range(1, layout.pp))
            planned = replace(planned, scores=scores, scores_grad=gradients, broadcast=hop, combine=hop)
        cuts = self.cuts(layout)
        return planned if cuts is None else cuts.costs(planned)

    def state_seconds(
        self, shared: float, experts: float, layout: PlannedLayout, links: AxisRates
    ) -> tuple[float, float, float]:
        """As `plan.time.state_seconds`; not measured with the layers."""
        if self.measured_layers is not None:
            return 0.0, 0.0, 0.0
        return state_seconds(shared, experts, layout, self.runtime, self.device, links)

    def state_in_step(
        self, timeline: Timeline, groups: Sequence[Sequence[LayerOps]], layout: PlannedLayout, links: AxisRates
    ) -> tuple[float, float]:
        """Seconds of (sums of gradients and gathers of weights as far as they are not hidden, the optimizer).

        Args:
            groups: stage -> its layers.
        """
        times = [self.state_seconds(*parameters_of(group, trained=True), layout, links) for group in groups]
        counted = [(sums, gathers, max(1, len(group))) for (sums, gathers, _), group in zip(times, groups, strict=True)]
        optimizer = max(sum(times[stage][2] for stage in mine) for mine in timeline.schedule.stages_of)
        if self.runtime.hides_state:
            return exposed(timeline, counted), optimizer
        return max(sum(sum(counted[stage][:2]) for stage in mine) for mine in timeline.schedule.stages_of), optimizer

    def predict(self, layout: PlannedLayout) -> LayoutCosts:
        """The costs of `layout`. Raises UsageError for one that the model, or its schedule's family, does not allow."""
        if layout not in self._predictions:  # the search and its report ask for the same neighbours
            self._predictions[layout] = self._predicted(layout)
        return self._predictions[layout]

    def with_schedule(self, layout: PlannedLayout, schedule: Schedule) -> LayoutCosts:
        """The costs of `layout` under a schedule on the same placement in place of its family's."""
        return self._predicted(layout, schedule)

    def _predicted(self, layout: PlannedLayout, searched: Schedule | None = None) -> LayoutCosts:
        other = self.runtime.name if self.runtime.name != "pipeloom" else ""
        if other and layout.vocabulary == "pp":
            raise UsageError(f"vocabulary=pp: {other} does not spread the output layer; nearest: vocabulary=last")
        if other and layout.ep_chunks > 1:
            raise UsageError(
                f"ep_chunks={layout.ep_chunks}: {other} does not cut a micro-batch's exchange with experts; nearest: ep_chunks=1"
            )
        if reasons := problems(self.shape, layout):
            raise UsageError("; ".join(reasons))
        family, layers, links, stages, placed = self._parts(layout)
        schedule = searched or family
        of_stage = spans(schedule, stages)
        seconds, in_seconds = self._stages(layout, schedule, links, of_stage)
        makespan, busy, timeline = _pipeline(layout, in_seconds, searched, placed)
        state = self.state_in_step(timeline, [layers[slice(*each)] for each in of_stage], layout, links)
        host = self.device.host if self.measured_layers is None else 0.0
        spent = busy_parts(busy, seconds, layout.m, layout.pp, schedule.has_pairs)
        step = StepTime(*spent, max(0.0, makespan - busy), *state, host)
        tokens = layout.sequences * layout.seq / step.total / layout.world
        nodes = expert_nodes(layout, self.device)
        if self.runtime.name == "pipeloom":
            few = searched or built(shortened(layout, MEMORY_ROUNDS), placed)
            timeline = self._trained(layout, few, stages, timeline)
        else:
            sizes = planned_bytes(layers, of_stage, layout, schedule, self.runtime)
            timeline = replace(timeline, costs=replace(timeline.costs, bytes=sizes))
        return LayoutCosts(
            *(layout, stages, tuple(ranks_of(timeline, self.runtime)), step, tokens),
            *(self.shape.num_nextn_predict_layers, nodes, searched, placed),
        )

    def _trained(
        self, layout: PlannedLayout, schedule: Schedule, stages: tuple[int, ...], planned: Timeline
    ) -> Timeline:
        """The schedule as our trainer runs it, with its bytes, as a dry run has them; `planned`: without recomputed blocks and
        what ZeRO adds."""
        bare = replace(layout, recompute="none") if layout.recompute == "full" else layout
        layers, of_stage = self.layers(bare), spans(schedule, stages)
        numbers: Collection[int] = ()
        if layout.recompute_layers:
            ahead = self.shape.num_nextn_predict_layers
            numbers = recomputed_blocks(stages, layout.recompute_layers, ahead)
        elif bare != layout:
            numbers = range(sum(stages) - 2)
        again = [at - 1 in numbers for at in range(len(layers))]
        blocks = [stage for stage, span in enumerate(of_stage) if any(again[slice(*span)])]
        run = recompute_stages(transformed(schedule, of_zero(layout.zero, spread=layout.vocabulary == "pp")), blocks)
        sizes = run_bytes(run, of_stage, layout, layers, self.timed_layers(bare), again, self.runtime, parts=False)
        # what is recomputed is a part of B's seconds
        run_costs = replace(planned.costs, recompute=0.0, bytes=sizes)
        if schedule is planned.schedule and layout.zero < 2:  # the same actions, under other letters
            timeline = replace(planned, schedule=run, costs=run_costs)
        else:
            timeline = simulate(run, run_costs)
        tokens = layout.micro_batch * layout.seq // layout.cp // (layout.tp if self.runtime.sequence else 1)
        cuts = self.cuts(layout)
        shares = (1.0,) if cuts is None else cuts.sizes
        messages = message_bytes(
            run,
            lambda message: tokens * self.row * shares[message.slice or 0],
            depth=2,
            ahead=True,
            shared=self.runtime.copies_mixed,  # on a CPU
        )
        return replace(timeline, messages=tuple(each.beside for each in messages))

    def _stages(
        self,
        layout: PlannedLayout,
        schedule: Schedule,
        links: AxisRates,
        of_stage: Sequence[tuple[int, int]],
    ) -> tuple[list[StageSeconds], Costs]:
        """Return the stages' times, and `Costs` in seconds."""
        timed = _first_recomputed(self.timed_layers, layout, of_stage)
        if self.factors:
            each = self.layer_seconds(timed, layout, links)
            seconds = [StageSeconds.sum(each[slice(*span)]) for span in of_stage]
        else:
            times = {span: self.stage_seconds(timed[slice(*span)], layout, links) for span in set(of_stage)}
            seconds = [times[span] for span in of_stage]
        return seconds, self.costs(seconds, layout, links, schedule)

    def _parts(
        self, layout: PlannedLayout
    ) -> tuple[Schedule, list[LayerOps], AxisRates, tuple[int, ...], Costs | None]:
        # the stages of the shorter step from which a long one is extrapolated are those of the long one
        short, layers = shortened(layout), self.layers(layout)
        schedule, links = built(replace(short, vocabulary="last")), AxisRates.of(layout, self.device, self.shape)
        stages = self.cut(layout, self.timed_layers(layout), links, schedule.positions)
        count = self.shape.num_hidden_layers + self.shape.num_nextn_predict_layers + 2
        if sum(stages) != count or len(stages) != schedule.positions:
            raise UsageError(
                f"stages={list(stages)}: they must be {schedule.positions} stages of {count} layers in all"
            )
        layers = _first_recomputed(self.layers, layout, spans(schedule, stages))
        if layout.vocabulary == "last":
            return schedule, layers, links, stages, None
        placed = self._placed(layout, layers, spans(schedule, stages))
        return built(short, placed), layers, links, stages, placed

    def _placed(self, layout: PlannedLayout, layers: list[LayerOps], of_stage: list[tuple[int, int]]) -> Costs:
        """Costs in proportion to operations, by which our trainer places S and T."""
        flops = [layer.flops / 3 for layer in layers]
        work = [sum(flops[slice(*span)]) for span in of_stage]
        unit = 3 * sum(work) / len(work)
        # rounded, so that layouts of the same proportions share a schedule
        each = tuple(round(stage / unit, 12) for stage in work)
        share = round(flops[-1] / unit, 12)
        costs, cuts = Costs(each, each, each, scores=2 * share, scores_grad=share), self.cuts(layout)
        return costs if cuts is None else cuts.costs(costs)

    def calibrated(self, layout: PlannedLayout, measured: Sequence[tuple[Sequence[int], float, float]]) -> Planner:
        """This planner with the layers' seconds scaled to what was measured under a layout.

        Of stages with the output layer, blocks are scaled as the median block of the others, and the output layer takes the rest.

        Args:
            measured: (stages that were measured together, their seconds of F, and of B) of one micro-batch.
        """
        schedule, _, links, stages, _ = self._parts(layout)
        spans_of = spans(schedule, stages)
        layers = self.layer_seconds(_first_recomputed(self.timed_layers, layout, spans_of), layout, links)
        groups = [[at for stage in mine for at in range(*spans_of[stage])] for mine, *_ in measured]
        seconds = [each.forward for each in layers], [each.input_grad + each.weight_grad for each in layers]
        columns = [[each[1] for each in measured], [each[2] for each in measured]]
        factors = [_factors(*both, groups) for both in zip(seconds, columns, strict=True)]
        return replace(self, factors=tuple(zip(*factors, strict=True)))

    def stage_costs(self, layout: PlannedLayout) -> Costs:
        """`Costs` of the layout's stages in seconds and bytes, for `simulate` and `search`.

        "params", "grads", "optimizer", "gathered" and "buffers" stand for the whole step.
        """
        schedule, layers, links, stages, _ = self._parts(layout)
        of_stage = spans(schedule, stages)
        _, in_seconds = self._stages(layout, schedule, links, of_stage)
        return replace(in_seconds, bytes=planned_bytes(layers, of_stage, layout, schedule, self.runtime))

    def measured(self, prediction: LayoutCosts, microbatches: int, seconds: float) -> LayoutCosts:
        """The prediction with the pipeline's times scaled so that the layout with `microbatches` takes the measured `seconds`.

        All times, where less is left of them than what is outside of the pipeline takes.
        """
        reference, step = self.predict(replace(prediction.layout, m=microbatches)).step, prediction.step
        pipeline = {"compute", "exchange", "idle"}
        inside = sum(each for name, each in reference.parts().items() if name in pipeline)
        factor, outside = (seconds - reference.total) / inside + 1, 1.0
        if factor <= 0:
            factor = outside = seconds / reference.total
        scaled = StepTime(**{n: (factor if n in pipeline else outside) * each for n, each in step.parts().items()})
        return replace(prediction, step=scaled, tokens=prediction.tokens * step.total / scaled.total)


def _factors(seconds: Sequence[float], measured: Sequence[float], groups: Sequence[Sequence[int]]) -> list[float]:
    """Return layer -> measured over predicted seconds, as for `Planner.calibrated`."""
    factors, last = [1.0] * len(seconds), len(seconds) - 1
    for group, whole in zip(groups, measured, strict=True):
        for at in group:
            factors[at] = whole / sum(seconds[each] for each in group)
    others = [factors[group[0]] for group in groups if last not in group]
    for group, whole in zip(groups, measured, strict=True):
        if others and last in group:
            block = median(others)
            rest = whole - block * sum(seconds[at] for at in group if at != last)
            if rest > 0:
                for at in group:
                    factors[at] = block
                factors[last] = rest / seconds[last]
    return factors


def _first_recomputed(
    layers_of_layout: Callable[[PlannedLayout], list[LayerOps]],
    layout: PlannedLayout,
    of_stage: Sequence[tuple[int, int]],
) -> list[LayerOps]:
    """The layers of a layout; where `recompute_layers` is not 0, only so many blocks of each stage are recomputed."""
    layers = layers_of_layout(layout)
    if not layout.recompute_layers:
        return layers
    mixed = layers_of_layout(replace(layout, recompute="none"))
    for span in of_stage:
        blocks = [at for at in range(*span) if layers[at].kind in "tm"]
        for at in blocks[: layout.recompute_layers]:
            mixed[at] = layers[at]
    return mixed


@lru_cache(maxsize=4096)
def _kept(shape: DecoderShape, split: Split, part: str, offload: str, shares: int) -> tuple[LayerOps, ...]:
    """The model's layers with a part recomputed, and inputs of modules on the host; those of one kind are one object."""
    layers = layers_of(shape, split, shares)
    if not any(layer.trained.ops for layer in layers):
        names = sorted({name for layer in layers for op in layer.ops for name, _ in op.modules})
        raise ArgumentError("target_modules", f" choose none of the planned layers; nearest: {', '.join(names)}")
    copies = {key: layer.recomputed(part).offloaded(offload) for key, layer in distinct(layers).items()}
    return tuple(copies[id(layer)] for layer in layers)


def distinct(layers: Sequence[LayerOps]) -> dict[int, LayerOps]:
    """Identity -> layer; blocks of one kind are one object."""
    return {id(layer): layer for layer in layers}


def balanced(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """The number of layers of each stage, with the longest stage as short as possible; seconds count to 1/4096 of a layer's."""
    longest = max(seconds)
    return _balanced(tuple(round(4096 * each / longest) for each in seconds), stages)


@lru_cache(maxsize=8192)
def _balanced(costs: tuple[int, ...], stages: int) -> tuple[int, ...]:
    return tuple(balance(costs, stages))


SHORT_ROUNDS = 8  # of micro-batches, from which a longer step is extrapolated: in each round every rank gets one
SHORT_STEP = 2048  # forwards, with which a step is simulated within milliseconds, unless its output layer is spread
SPREAD_ROUNDS = 64  # times ranks, in which a spread output layer is placed, by rules that few ranks choose late
MEMORY_ROUNDS = 4  # with which a step has the peaks of a longer one
_STEADY_ROUNDS = 5  # before the last one, which the steady state is measured in


def shortened(layout: PlannedLayout, rounds: int = 0) -> PlannedLayout:
    """The layout with as few micro-batches as show its peaks and its steady state.

    All of them in families that the search does not try, and where rounds are larger the fewer there are: where p does not
    divide m in `interleaved`.
    """
    name = canonical_name(layout.schedule)
    uneven = name in WHOLE_ROUNDS and (layout.m % (layout.group or layout.pp) or layout.slices > 1)
    forwards = _round_size(layout) * layout.slices * layout.pp * layout.v
    few = rounds or max(SHORT_ROUNDS, SHORT_STEP // forwards)
    if layout.vocabulary == "pp":
        few = max(SHORT_ROUNDS, SPREAD_ROUNDS // layout.pp)
    more = layout.m // _round_size(layout) - few
    if name not in CHUNKS or uneven or more <= 0:
        return layout
    return replace(layout, m=layout.m - more * _round_size(layout))


def _round_size(layout: PlannedLayout) -> int:
    return layout.group or -(-layout.pp // layout.slices)


def _pipeline(
    layout: PlannedLayout, costs: Costs, searched: Schedule | None, placed: Costs | None
) -> tuple[float, float, Timeline]:
    """(makespan, mean busy time of a rank) in seconds, and a timeline that shows the peaks."""
    run = simulate(searched or built(shortened(layout), placed), costs)
    makespan, busy = run.makespan, list(run.busy)
    if rounds := (layout.m - run.schedule.microbatches) // _round_size(layout):
        pace, work = _round_times(run, _round_size(layout) * layout.slices)
        for rank, seconds in enumerate(work):
            busy[rank] += rounds * seconds
        ranks = zip(run.starts, run.ends, run.schedule.queues, strict=True)
        ramps = [starts[(at := queues[COMPUTE])[0]] + run.makespan - ends[at[-1]] for starts, ends, queues in ranks]
        # a rank that works more than the others may not have held them up yet
        makespan = max(makespan + rounds * pace, *(a + b for a, b in zip(busy, ramps, strict=True)))
    return makespan, sum(busy) / layout.pp, run


def _round_times(run: Timeline, units: int) -> tuple[float, list[float]]:
    """Seconds that a round of so many units takes in the steady state, and rank -> those in which it computes."""
    schedule = run.schedule
    stride, none, last = schedule._kind_stride, schedule._no_action, schedule.routes[0][-1]
    forwards = range(last * schedule.units, (last + 1) * schedule.units)
    rank = schedule.placement[last]
    begun = [
        start
        for code, start in zip(schedule._split_entries(rank)[0], run.starts[rank], strict=True)
        if code in forwards
    ]
    half = schedule.units // units // 2 * units
    middle, work = range(half, half + units), [0.0] * schedule.ranks
    for rank, (starts, ends) in enumerate(zip(run.starts, run.ends, strict=True)):
        firsts, seconds = schedule._split_entries(rank)
        for at in schedule.queues[rank][COMPUTE]:
            codes = (firsts[at],) if seconds[at] == none else (firsts[at], seconds[at])
            for code in codes:
                if code % stride % schedule.units in middle:
                    work[rank] += (ends[at] - starts[at]) / len(codes)
    return (begun[-units - 1] - begun[-(_STEADY_ROUNDS + 1) * units - 1]) / _STEADY_ROUNDS, work


@lru_cache(maxsize=256)
def _built(layout: PlannedLayout, placed: Costs | None) -> Schedule:
    return layout.built(placed)


def built(layout: PlannedLayout, placed: Costs | None = None) -> Schedule:
    """The layout's schedule; layouts that differ elsewhere share it."""
    names = ("schedule", "pp", "m", "v", "slices", "vocabulary", "group")
    return _built(PlannedLayout(**{name: getattr(layout, name) for name in names}), placed)
