"""Search over layouts: every one that the model and the devices allow is estimated, the most promising are predicted."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import add, sub
from typing import Any

from pipeloom.errors import UsageError, divisors
from pipeloom.plan.layout import CHUNKS, WHOLE_ROUNDS, PlannedLayout, problems
from pipeloom.plan.memory import state_bytes
from pipeloom.plan.predict import LayoutCosts, Planner, balanced, distinct
from pipeloom.plan.time import AxisRates, gathers_by_microbatch
from pipeloom.schedule.placement import named
from pipeloom.shapes.decoder import DecoderShape, context_problem
from pipeloom.shapes.ops import LayerOps

RECOMPUTED = ("none", "norms+activation", "full")
# Families whose pairs hide the exchange with experts on other ranks, and the same ones without pairs.
OVERLAPPED = {"1f1b-overlap": "1f1b", "interleaved-overlap": "interleaved", "dualpipev": "zbv"}
BACK_AND_FORTH = ("zbv", "dualpipev")
IN_SLICES = ("1f1b", "zb-h1")
# With a spread output layer: what split backwards win is lost to the waits for S and T.
SPREADING = ("1f1b", "interleaved")
MOST_SHARES = 8  # pipeline ranks, and two chunks: above, placing S and T takes longer than the rest of the search
MOST_SHARED_SLICES = 128  # pipeline ranks times slices, with S and T
OFFERED = {
    "megatron": ("1f1b", "interleaved", "interleaved-overlap"),
    "torchtitan": ("1f1b", "interleaved", "zbv", "dualpipev"),
    "pipeloom": tuple(CHUNKS),
}
_SPREAD = ("dp", "tp", "cp", "pp", "ep", "m", "micro_batch", "recompute")
CLOSE = 1.06  # times the memory: estimates of more bytes are not predicted, since they are at most so much too high
LONG = 1.03  # times the seconds: estimates are at most so much too long, but for few
REPEATED = 4 / 3  # times the seconds of a step that recomputes nothing: at most those of one that recomputes all
CORRECTIONS = 3  # times that the number of recomputed blocks is chosen: from an estimate, then from predictions
ALIKE = 0.9995  # of the seconds that another ZeRO level takes by a prediction: the least by the ratio of the estimates
ROOM = 0.8  # of the memory: a layout that needs less gains no room from a higher ZeRO level
SMALLER = 0.95  # times the least memory of faster layouts, to be worth a row
SMALLER_ROWS = 8  # most layouts that are predicted because they need less memory than faster ones
SMALLEST = 16  # layouts of the least estimated memory that are predicted before the search says that none fits
PIECE_TOKENS = 4096  # fewest of a sequence on a rank of cp
STEP_TOKENS = 2**22
SLICE_TOKENS = 1024  # fewest of a slice on a rank of cp, with which products are still near their rate


@dataclass(frozen=True)
class PlanRequest:
    """The question to the planner.

    Attributes:
        devices: their number.
        memory: bytes that a device may use.
        sequences: of a step, over all replicas.
        seq: tokens of a sequence.
        schedules: names of families that may be used.
        zero: levels that may be used; a higher one only where it is faster, or the lower one needs `ROOM` of the memory.
        capacity: factor of the experts.
        fixed: name of a field of `PlannedLayout` -> the value that it must have.
        limits: as `fixed`, values that the model's layers require (`limits_of_source`).
        recompute: what may be recomputed.
        partial: whether only some blocks of a stage may be.
        slices: numbers of slices of a sequence that may be used, with schedules of one chunk.
        vocabulary: where the output layer may be: on the last rank, or spread over at most `MOST_SHARES` ranks of one or two
            chunks.
    """

    devices: int
    memory: float
    sequences: int
    seq: int
    schedules: tuple[str, ...]
    zero: tuple[int, ...] = (1,)
    capacity: float = 0.0
    fixed: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    recompute: tuple[str, ...] = RECOMPUTED
    partial: bool = False
    slices: tuple[int, ...] = (1,)
    vocabulary: tuple[str, ...] = ("last",)

    @classmethod
    def of(
        cls, runtime: str, devices: int, memory: float, sequences: int | None, seq: int, **fields: Any
    ) -> PlanRequest:
        """The layouts that a runtime can run; without `sequences` as many as make a step of 4 Mi tokens."""
        sequences = sequences or max(1, STEP_TOKENS // seq)
        zero = {"torchtitan": (3,), "pipeloom": (1, 2, 3)}.get(runtime, (1,))
        if "zero" in fields.get("fixed", {}):
            zero = (int(fields["fixed"]["zero"]),)
        fields |= {"partial": runtime != "torchtitan"}
        request = cls(devices, memory, sequences, seq, OFFERED[runtime], zero, **fields)
        if runtime != "megatron":  # these parts are Megatron's
            request = replace(request, recompute=("none", "full"))
        if runtime != "pipeloom":  # what other trainers do not do is not planned
            return request
        return replace(request, slices=(1, 2, 4, 8, 16, 32), vocabulary=("last", "pp"))

    def allows(self, layout: PlannedLayout, keys: Collection[str] | None = None) -> bool:
        """Return whether a layout has the values that are fixed, and those of the limits; `keys`: look at these alone."""
        required = {**self.fixed, **self.limits}
        return all(getattr(layout, key) == value for key, value in required.items() if keys is None or key in keys)


def limits_of_source(shape: DecoderShape, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return field of `PlannedLayout` -> the value that it must have, for a model that the layers of `transformers` compute.

    Args:
        values: its `config.json`.
    """
    limits: dict[str, Any] = {"tp": 1, "ep": 1}
    if context_problem(values):
        limits |= {"cp": 1, "slices": 1}
    return limits if shape.counted is None or shape.counted.spreadable else limits | {"vocabulary": "last"}


@dataclass(frozen=True)
class Estimate:
    """A layout with its estimated bytes on the fullest device and seconds of a step, `least` of which are work of one rank."""

    layout: PlannedLayout
    memory: float
    seconds: float
    least: float = 0.0


@dataclass(frozen=True)
class LayoutPlan:
    """The outcome of a search.

    Attributes:
        predictions: layouts that fit, the fastest first: the fastest with and without a pipeline, what was predicted on the way
            to them, and some that need less memory.
        estimates: all layouts of the space.
        discarded: the number of those whose estimated bytes are too many.
        too_large: layouts that were predicted and do not fit.
        smallest: where none fits, the prediction with the least memory.
    """

    predictions: tuple[LayoutCosts, ...]
    estimates: tuple[Estimate, ...]
    discarded: int
    too_large: frozenset[PlannedLayout]
    smallest: LayoutCosts | None = None

    @property
    def predicted(self) -> int:
        """The number of layouts that were predicted; those not discarded either are slower by their estimates."""
        return len(self.predictions) + len(self.too_large)

    @property
    def best(self) -> LayoutCosts:
        return self.predictions[0]

    @property
    def looked_at(self) -> dict[str, int]:
        """Numbers of layouts: estimated, discarded for their bytes, and predicted; the others are slower by their estimates."""
        return {"estimated": len(self.estimates), "too_large": self.discarded, "predicted": self.predicted}

    @property
    def pareto(self) -> list[LayoutCosts]:
        """The predictions of which no other one is as fast with as little memory, the fastest first."""
        frontier: list[LayoutCosts] = []
        for each in self.predictions:
            if all(each.peak < other.peak for other in frontier):
                frontier.append(each)
        return frontier


def search(planner: Planner, request: PlanRequest, estimates: Sequence[Estimate] = ()) -> LayoutPlan:
    """The layouts of `request`, ranked. Raises UsageError where no layout exists for so many devices.

    Branch and bound: estimated seconds are a lower bound, but for `LONG`, and layouts are predicted in their order until the next
    estimate is above the best prediction. So more memory, devices' memory or space gives no slower layout where estimates hold.

    >>> from pipeloom import plan
    >>> planner = plan.Planner(plan.load_model("llama3-8b"), plan.load_device("h100"), plan.RUNTIMES["pipeloom"])
    >>> request = PlanRequest(4, memory=80 * 2**30, sequences=16, seq=2048, schedules=("1f1b",), fixed={"tp": 1})
    >>> best = search(planner, request).predictions[0]
    >>> best.layout.dp, best.layout.pp, best.peak < request.memory
    (2, 2, True)

    Args:
        estimates: of an earlier search, which differed in `request.memory` at most.
    """
    estimates = estimates or _sorted_estimates(planner, request)
    if not estimates:
        raise UsageError(_no_layout(planner, request))
    close = _close(estimates, request)
    known: list[LayoutCosts] = []
    for pipelined in (False, True):
        known += _all_but_slower(planner, request, [each for each in close if (each.layout.pp > 1) == pipelined])
    if _fitting(known, request):
        known += _smaller(planner, request, close, known)
    else:
        known += _predictions(planner, _smallest(planner, estimates))
    fitting = sorted(_fitting(known, request), key=lambda each: each.step.total)
    smallest = min(known, key=lambda each: each.peak, default=None)
    large = frozenset(each.layout for each in known) - {each.layout for each in fitting}
    return LayoutPlan(tuple(fitting), tuple(estimates), len(estimates) - len(close), large, smallest)


def fastest(
    planner: Planner, request: PlanRequest, estimates: Sequence[Estimate] = (), long: float = LONG
) -> LayoutCosts | None:
    """The first prediction of `search`, without the others; None where nothing fits. `long`: in place of `LONG`."""
    close = _close(estimates or _sorted_estimates(planner, request), request)
    known = _all_but_slower(planner, request, close, long)
    return min(_fitting(known, request), key=lambda each: each.step.total, default=None)


def fastest_elsewhere(planner: Planner, request: PlanRequest, plan: LayoutPlan) -> LayoutCosts | None:
    """The layout that is estimated as the fastest with the slower links of `planner`, predicted.

    No layout is faster than it was, so that all with a longer estimate in `plan` than the best takes now are out.
    """
    most = LONG * planner.predict(plan.best.layout).step.total
    of = _Estimator.of(planner, request).estimate
    close = [each for each in _close(plan.estimates, request) if each.layout not in plan.too_large]
    longest = {True: REPEATED * most, False: most}  # where all blocks are recomputed, fewer may be
    near = [of(each.layout) for each in close if each.seconds <= longest[each.layout.recompute == "full"]]
    near.append(of(plan.best.layout))  # which is not among them where it recomputes some blocks
    return fastest(planner, request, sorted(near, key=lambda each: each.seconds), long=1.0)


def _sorted_estimates(planner: Planner, request: PlanRequest) -> list[Estimate]:
    return sorted(_estimates(planner, request), key=lambda each: each.seconds)


def _close(estimates: Iterable[Estimate], request: PlanRequest) -> list[Estimate]:
    return [each for each in estimates if each.memory <= CLOSE * request.memory]


def _all_but_slower(
    planner: Planner, request: PlanRequest, estimates: Sequence[Estimate], long: float = LONG
) -> list[LayoutCosts]:
    """Predictions of the layouts that may be the fastest that fits, those with some blocks recomputed among them."""
    known = list(_until_best(planner, request, estimates, long))
    return [*known, *_partial(planner, request, estimates, known, long)]


def _fitting(predictions: Iterable[LayoutCosts], request: PlanRequest) -> list[LayoutCosts]:
    return [each for each in predictions if each.peak <= request.memory]


def _until_best(
    planner: Planner,
    request: PlanRequest,
    estimates: Sequence[Estimate],
    long: float = LONG,
    best: float = math.inf,
) -> Iterator[LayoutCosts]:
    """Yield predictions, of the fastest estimate first, until no other layout can be faster than the best that fits.

    Estimates are too short by nearly the same share for layouts of one schedule, of which the least that was seen counts. A step
    takes at least half as long beside its work as estimated, but for hundredths of a percent.

    Args:
        best: seconds of the fastest prediction before.
    """
    short: dict[tuple[object, ...], float] = {}
    exact: dict[PlannedLayout, float] = {}
    for each in estimates:
        if each.seconds >= long * best:
            return
        layout, twin = each.layout, replace(each.layout, zero=0)
        schedule = (layout.schedule, layout.pp, layout.v, layout.slices, layout.vocabulary)
        likely, same = (each.seconds * ratio for ratio in (short.get(schedule, 1.0), ALIKE * exact.get(twin, 0.0)))
        if max(likely / long, same, (each.least + each.seconds) / 2) >= best:
            continue
        for prediction in _predictions(planner, [each]):
            seconds = prediction.step.total
            exact[twin] = seconds / each.seconds
            short[schedule] = min(short.get(schedule, math.inf), seconds / each.seconds)
            if prediction.peak <= request.memory:
                best = min(best, seconds)
            yield prediction


def _partial(
    planner: Planner,
    request: PlanRequest,
    estimates: Iterable[Estimate],
    known: Iterable[LayoutCosts],
    long: float = LONG,
) -> Iterator[LayoutCosts]:
    """Yield predictions of layouts that recompute as few blocks of each stage as fit, as far as one can be faster than `known`.

    The fewest by the estimates are predicted first, and then as many as the bytes of these predictions leave room for.

    Args:
        estimates: those close to the memory; all blocks recomputed take at most `REPEATED` times as long as none.
    """
    best = min((each.step.total for each in _fitting(known, request)), default=math.inf)
    estimator, tried = _Estimator.of(planner, request), set[PlannedLayout]()
    # a layout that recomputes all blocks -> a number of them, and the bytes with so many
    peaks: dict[PlannedLayout, tuple[int, float]] = {}
    for each in estimates if request.partial else ():
        layout = each.layout
        if layout.recompute == "full" and not layout.recompute_layers and each.seconds <= REPEATED * best:
            levels = [zero for zero in request.zero if zero > layout.zero and layout.dp * layout.cp > 1]
            for whole in (layout, *(replace(layout, zero=zero) for zero in levels)):
                bare = estimator.estimate(replace(whole, recompute="none"))
                if CLOSE * bare.memory > request.memory and bare.seconds < long * best:
                    peaks[whole] = 0, bare.memory
    for _ in range(CORRECTIONS):
        near = []
        for whole, (count, peak) in peaks.items():
            bare, full = (estimator.estimate(replace(whole, recompute=each)) for each in ("none", "full"))
            blocks = -(-planner.shape.num_hidden_layers // (whole.pp * whole.v))
            saved = (bare.memory - full.memory) / blocks
            needed = max(1, count + math.ceil((peak - request.memory) / saved)) if saved > 0 else blocks
            needed = min(needed, blocks - 1)  # what a block saves is the mean of stages that differ
            some = replace(whole, recompute_layers=needed)
            if needed and some not in tried and request.allows(some):
                near.append(estimator.estimate(some))
        predicted = list(_until_best(planner, request, sorted(near, key=lambda each: each.seconds), long, best))
        yield from predicted
        best = min([best, *(each.step.total for each in _fitting(predicted, request))])
        tried |= {each.layout for each in predicted}
        peaks = {
            replace(each.layout, recompute_layers=0): (each.layout.recompute_layers, each.peak) for each in predicted
        }


def _smallest(planner: Planner, estimates: Iterable[Estimate]) -> list[Estimate]:
    """The estimates of the least memory, those that were discarded by their mean rank estimated whole."""
    rough = sorted(estimates, key=lambda each: each.memory)[: 16 * SMALLEST]
    whole = [estimate(planner, each.layout) if each.seconds == math.inf else each for each in rough]
    return sorted(whole, key=lambda each: each.memory)[:SMALLEST]


def _smaller(
    planner: Planner, request: PlanRequest, estimates: Sequence[Estimate], known: Sequence[LayoutCosts]
) -> Iterator[LayoutCosts]:
    """Yield predictions of a few layouts that need less memory than all faster ones."""
    least, rows = min(each.peak for each in known), 0
    for each in estimates:
        spread = each.layout.vocabulary == "pp"  # takes as long as the rest of the search
        if rows < SMALLER_ROWS and each.memory < SMALLER * least and not spread:
            for prediction in _predictions(planner, [each]):
                least, rows = min(least, prediction.peak), rows + 1
                yield prediction


def _predictions(planner: Planner, estimates: Iterable[Estimate]) -> Iterator[LayoutCosts]:
    """Yield the predictions of layouts whose families take their sizes."""
    for each in estimates:
        with suppress(UsageError):
            yield planner.predict(each.layout)


def _no_layout(planner: Planner, request: PlanRequest) -> str:
    """Return a sentence that says why there is no layout, with the nearest one of those that `request.fixed` excludes."""

    def likeness(layout: PlannedLayout) -> tuple[int, float]:
        pairs = [(getattr(layout, key), value) for key, value in request.fixed.items()]
        numbers = [(has, value) for has, value in pairs if not isinstance(value, str)]
        return sum(has == value for has, value in pairs), -sum(abs(has - value) for has, value in numbers)

    words = f"{planner.shape.name} on {request.devices} devices with {request.sequences} sequences a step"
    layouts = [each.layout for each in _estimates(planner, replace(request, fixed={}))] if request.fixed else []
    if not layouts:
        fewer = 1 << (request.devices.bit_length() - 1)
        return f"--devices {request.devices}: there is no layout of {words}; nearest: a power of two, such as {fewer}"
    near = max(layouts, key=likeness)
    fixed, other = (
        ",".join(f"{key}={value}" for key, value in values.items())
        for values in (request.fixed, {key: getattr(near, key) for key in request.fixed})
    )
    return f"--fixed {fixed}: there is no such layout of {words}; nearest: {other}"


_AXES = ("dp", "tp", "cp", "pp", "ep", "v", "micro_batch")


def closest(planner: Planner, request: PlanRequest, layout: PlannedLayout) -> LayoutCosts | None:
    """Return the layout of `request` that fits with the fewest changes of `layout`, of several the fastest; None: none fits.

    A change doubles or halves an axis, or chooses another schedule, ZeRO level or recomputation.
    """

    def changes(other: PlannedLayout) -> float:
        axes: float = sum(abs(math.log2(getattr(other, name) / getattr(layout, name))) for name in _AXES)
        return axes + sum(
            float(getattr(other, name) != getattr(layout, name)) for name in ("schedule", "zero", "recompute")
        )

    fitting = [each for each in _estimates(planner, request) if each.memory <= request.memory]
    near = sorted(fitting, key=lambda each: (changes(each.layout), each.seconds))
    predictions = _predictions(planner, near[:SMALLEST])
    return next((each for each in predictions if each.peak <= request.memory), None)


def neighbouring(
    planner: Planner, best: LayoutCosts, request: PlanRequest
) -> Iterator[tuple[str, LayoutCosts | Estimate]]:
    """(what changes, its costs) of every layout one step from the best one that the model and the families allow.

    Where the bytes are too many, or a layout is slower and spreads the output layer, whose entries take long to place, the costs
    are an estimate.
    """
    error = best.step.total / estimate(planner, best.layout).seconds
    for change, layout in steps(best.layout, request):
        if (
            not request.allows(layout, request.limits)
            or problems(planner.shape, layout)
            or not _is_offered(planner, layout)
        ):
            continue
        estimated = estimate(planner, layout)
        estimated = replace(estimated, seconds=error * estimated.seconds)
        slower = estimated.seconds > best.step.total
        if estimated.memory > CLOSE * request.memory or (slower and layout.vocabulary == "pp"):
            yield change, estimated
        else:
            yield from ((change, prediction) for prediction in _predictions(planner, [estimated]))


def steps(layout: PlannedLayout, request: PlanRequest) -> Iterator[tuple[str, PlannedLayout]]:
    """(what changes, the layout) of every layout one step away that keeps devices and sequences."""
    for grown in ("tp", "pp", "cp", "dp"):
        for shrunk in ("tp", "pp", "cp", "dp"):
            a, b = getattr(layout, grown), getattr(layout, shrunk)
            if grown == shrunk or b % 2 or ("cp" in (grown, shrunk) and layout.cp == 1 and grown != "cp"):
                continue
            changed = replace(layout, **{grown: 2 * a, shrunk: b // 2})
            sequences = layout.sequences
            if sequences % (changed.dp * changed.micro_batch):
                continue
            yield (
                f"{grown} {2 * a}, {shrunk} {b // 2}",
                replace(changed, m=sequences // (changed.dp * changed.micro_batch)),
            )
    for ep in (layout.ep * 2, layout.ep // 2):
        if ep and ep != layout.ep:
            yield f"ep {ep}", replace(layout, ep=ep)
    for v, name in _schedules(layout):
        if name in request.schedules:
            yield f"v {v}" if v != layout.v else f"schedule {name}", replace(layout, v=v, schedule=name)
    if layout.m % 2 == 0:
        yield (
            f"micro_batch {2 * layout.micro_batch}",
            replace(layout, micro_batch=2 * layout.micro_batch, m=layout.m // 2),
        )
    for recompute in (each for each in request.recompute if each != layout.recompute or layout.recompute_layers):
        yield f"recompute {recompute}", replace(layout, recompute=recompute, recompute_layers=0)
    if layout.vocabulary == "pp":
        yield "vocabulary last", replace(layout, vocabulary="last")
    for slices in request.slices if layout.pp > 1 else ():
        if slices in (2 * layout.slices, layout.slices // 2):
            yield f"slices {slices}", replace(layout, slices=slices)


def _schedules(layout: PlannedLayout) -> Iterator[tuple[int, str]]:
    """(chunks, family) with or without pairs, and of twice or half of the chunks."""
    others = OVERLAPPED | {plain: paired for paired, plain in OVERLAPPED.items()}
    if layout.ep > 1 and layout.schedule in others:
        yield layout.v, others[layout.schedule]
    for v in (layout.v * 2, layout.v // 2) if layout.pp > 1 and layout.schedule not in BACK_AND_FORTH else ():
        if v:
            yield v, ("interleaved" if v > 1 else "1f1b") + "-overlap" * (layout.schedule in OVERLAPPED)


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n <= most]


def _spreads(planner: Planner, request: PlanRequest) -> Iterator[PlannedLayout]:
    """Every size of the axes that uses all devices, with every size of a micro-batch and what may be recomputed."""
    shape, device = planner.shape, planner.device
    for tp in _powers(min(device.per_node, shape.num_attention_heads)):
        for cp in _powers(max(1, min(16, request.seq // PIECE_TOKENS))):
            if request.devices % (tp * cp):
                continue
            for pp in divisors(request.devices // (tp * cp)):
                dp = request.devices // (tp * cp * pp)
                if pp > shape.num_hidden_layers or request.sequences % dp:
                    continue
                # Megatron gives each expert to one rank of tp, the others divide it
                etp = 1 if shape.num_experts and planner.runtime.whole_experts else 0
                expert_ranks = (
                    _powers(min(dp * cp * (tp if etp else 1), shape.num_experts)) if shape.num_experts else [1]
                )
                for micro_batch in (1, 2, 4):
                    if request.sequences % (dp * micro_batch):
                        continue
                    for ep in expert_ranks:
                        for recompute in request.recompute:
                            layout = PlannedLayout(
                                dp, tp, cp, pp, ep, m=request.sequences // (dp * micro_batch), micro_batch=micro_batch,
                                seq=request.seq, recompute=recompute, capacity=request.capacity, etp=etp,
                                ep_chunks=request.fixed.get("ep_chunks", 1),
                            )  # fmt: skip
                            if request.allows(layout, _SPREAD) and not problems(shape, layout):
                                yield layout


def _estimates(planner: Planner, request: PlanRequest) -> Iterator[Estimate]:
    """Estimates of all layouts; where the mean rank of one has too many bytes, these alone, with the highest ZeRO level."""
    estimator = _Estimator.of(planner, request)
    for layout in _spreads(planner, request):
        links = AxisRates.of(layout, planner.device, planner.shape)
        levels = request.zero[:1] if layout.dp * layout.cp == 1 else request.zero
        sums: dict[str, list[float]] = {}
        for smallest in _cuts(planner, request, replace(layout, zero=max(levels))):
            if smallest.vocabulary not in sums:
                sums[smallest.vocabulary] = _model_sums(planner.layers(smallest))
            least = _least_bytes(planner, smallest, sums[smallest.vocabulary])
            if least > CLOSE * request.memory and request.allows(smallest):
                yield Estimate(smallest, least, math.inf)
                continue
            best = Estimate(smallest, math.inf, math.inf)  # of the lower levels
            for zero in levels:
                candidate = smallest if zero == smallest.zero else replace(smallest, zero=zero)
                if not request.allows(candidate):
                    continue
                estimate = estimator.estimate(candidate, links)
                if estimate.seconds < best.seconds or best.memory > ROOM * request.memory:
                    best = estimate
                    yield estimate


def _cuts(planner: Planner, request: PlanRequest, layout: PlannedLayout) -> Iterator[PlannedLayout]:
    """A layout with every schedule, number of chunks and of slices, and place of the output layer."""
    for name in request.schedules if layout.pp > 1 else request.schedules[:1]:
        for v in CHUNKS[name] if layout.pp > 1 else (1,):
            if not _suits(planner, layout, name, v):
                continue
            for slices, vocabulary in product(_slices(request, layout, name), request.vocabulary):
                if vocabulary == "last" or _can_spread(layout.pp, v, name, slices):
                    cut = replace(layout, v=v, schedule=name, slices=slices, vocabulary=vocabulary)
                    if vocabulary == "last" or not problems(planner.shape, cut):
                        yield cut


def _model_sums(layers: Sequence[LayerOps]) -> list[float]:
    """Bytes that a micro-batch's blocks save, and parameters and trained ones (of all ranks, of experts) of a model's layers."""
    last = len(layers) - 1 - (layers[-1].kind == "S")
    rows = [(*layer.parameters, *layer.trained.parameters) for layer in layers]
    return [sum(layer.saved for layer in layers[:last]), *map(sum, zip(*rows, strict=True))]


def _least_bytes(planner: Planner, layout: PlannedLayout, sums: Sequence[float]) -> float:
    """The bytes of the mean pipeline rank, given the model's `_model_sums`: what it holds, and what 1F1B saves at the least."""
    saved, shared, experts, *trained = (each / layout.pp for each in sums)
    groups = [(shared, trained[0], layout.dp * layout.cp), (experts, trained[1], layout.expert_replicas)]
    alive = min(layout.m, 1 + (layout.pp - 1) / 2 / layout.slices)
    held = sum(state_bytes(groups, 0.0, layout, planner.runtime)) + (1 + planner.runtime.margin) * saved * alive
    return held + planner.runtime.workspace + planner.runtime.overhead


def _suits(planner: Planner, layout: PlannedLayout, name: str, v: int) -> bool:
    """Return whether a schedule of v chunks is of use to a layout, and takes its sizes."""
    hides = layout.ep > 1 and not (layout.recompute == "full" and planner.runtime.name == "megatron")
    return not (
        layout.pp * v > planner.shape.num_hidden_layers
        or v not in CHUNKS.get(name, ())
        or (name in WHOLE_ROUNDS and layout.m % layout.pp)
        or (name == "dualpipev" and layout.m < 2 * layout.pp)
        or (name in OVERLAPPED and not hides)
        or (layout.cp > 1 and layout.seq < layout.cp * PIECE_TOKENS)
    )


def _can_spread(p: int, v: int, name: str, slices: int) -> bool:
    """Return whether a spread output layer is of use to a schedule, and quick to place."""
    return p <= MOST_SHARES and v <= 2 and p * slices <= MOST_SHARED_SLICES and name in SPREADING


def _is_offered(planner: Planner, layout: PlannedLayout) -> bool:
    """Return whether the search would look at a layout's schedule."""
    name, v = layout.schedule, layout.v
    return (
        _suits(planner, layout, name, v)
        and (layout.slices == 1 or name in IN_SLICES)
        and (layout.vocabulary == "last" or _can_spread(layout.pp, v, name, layout.slices))
    )


def _slices(request: PlanRequest, layout: PlannedLayout, schedule: str) -> tuple[int, ...]:
    """The numbers of slices to estimate: more than one for schedules of one chunk, with tokens enough for fast products."""
    if layout.pp == 1 or schedule not in IN_SLICES or layout.capacity:
        return request.slices[:1]
    tokens = layout.seq // layout.cp
    return tuple(count for count in request.slices if count == 1 or tokens >= count * SLICE_TOKENS)


@dataclass(frozen=True)
class _Rank:
    """Sums over the layers of one pipeline rank, of one micro-batch; of the temporaries the largest.

    `hidden`: seconds that a pair of the rank's layers with themselves saves; `output`: what the last layer saves, not in `saved`.
    """

    seconds: float
    hidden: float
    saved: float
    output: float
    pending: float
    shared: float
    experts: float
    trained_shared: float
    trained_experts: float
    extra: float


@dataclass(frozen=True)
class _Cut:
    """The ranks of a cut, the largest layer of the model, and the seconds of a rank's share of the output layer."""

    ranks: tuple[_Rank, ...]
    largest: float
    share: float

    @cached_property
    def places(self) -> dict[_Rank, list[int]]:
        """Different rank -> its places, in order."""
        places: dict[_Rank, list[int]] = {}
        for at, rank in enumerate(self.ranks):
            places.setdefault(rank, []).append(at)
        return places


@dataclass(frozen=True)
class _Sums:
    """The layers of a model under a layout, and their times."""

    layers: list[LayerOps]
    seconds: tuple[float, ...]
    hidden: tuple[float, ...]

    @classmethod
    def of(cls, planner: Planner, layout: PlannedLayout, links: AxisRates) -> _Sums:
        times = planner.layer_seconds(planner.timed_layers(layout), layout, links)
        hidden = tuple(each.hidden(each) for each in times)
        return cls(planner.layers(layout), tuple(each.total for each in times), hidden)

    @cached_property
    def totals(self) -> list[tuple[float, ...]]:
        """The sums over the first layers of what `_Rank` sums, the share of the output layer left out."""
        last = len(self.layers) - 1 - (self.layers[-1].kind == "S")
        totals: list[tuple[float, ...]] = [(0.0,) * 9]
        for at, (layer, seconds, hidden) in enumerate(zip(self.layers, self.seconds, self.hidden, strict=True)):
            saved = (layer.saved, 0.0) if at < last else (0.0, layer.saved)
            row = seconds, hidden, *saved, layer.pending, *layer.parameters, *layer.trained.parameters
            totals.append(tuple(map(add, totals[-1], row)))
        return totals

    def cut(self, ranks: int, chunks: int, *, vee: bool) -> _Cut:
        """The layers in balanced stages, and these on ranks: in a loop, or back and forth; a share is on each rank."""
        shares = self.layers[-1].kind == "S"
        of_stage = balanced(self.seconds[: len(self.seconds) - shares], ranks * chunks)
        sums, extra, start = [[0.0] * 9 for _ in range(ranks)], [0.0] * ranks, 0
        peaks = [layer.backward_peak for layer in self.layers]
        for rank, count in zip(named("vee" if vee else "loop", ranks, chunks), of_stage, strict=True):
            end = start + count
            sums[rank] = list(map(sub, map(add, sums[rank], self.totals[end]), self.totals[start]))
            extra[rank] = max(extra[rank], *peaks[start:end])
            start = end
        sums = [[*each, most] for each, most in zip(sums, extra, strict=True)]
        if shares:
            share, seconds = self.layers[-1], self.seconds[-1]
            values = seconds, 0.0, 0.0, 0.0, 0.0, *share.parameters, *share.trained.parameters, share.saved
            sums = [[a + b for a, b in zip(each, values, strict=True)] for each in sums]
        largest = max(sum(each.parameters) for each in distinct(self.layers).values())
        return _Cut(tuple(_Rank(*each) for each in sums), largest, shares * self.seconds[-1])


def estimate(planner: Planner, layout: PlannedLayout) -> Estimate:
    """The estimate of one layout, without its schedule."""
    return _Estimator(planner).estimate(layout)


class _Estimator:
    """Estimates of layouts of one request, which share the times of their layers and their cuts."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._sums: dict[tuple[object, ...], _Sums] = {}
        self._cuts: dict[tuple[object, ...], _Cut] = {}

    @classmethod
    def of(cls, planner: Planner, request: PlanRequest) -> _Estimator:
        """The estimator of all requests to the planner for such sequences."""
        return planner._estimators.setdefault((request.seq, request.capacity), cls(planner))  # type: ignore[no-any-return]

    def estimate(self, layout: PlannedLayout, links: AxisRates | None = None) -> Estimate:
        if layout.recompute_layers:  # between none and all blocks of a stage
            bare, full = (
                self.estimate(replace(layout, recompute=each, recompute_layers=0)) for each in ("none", "full")
            )
            share = layout.recomputed_share(self.planner.shape.num_hidden_layers, layout.pp * layout.v)
            memory, seconds = (
                a + share * (b - a) for a, b in ((bare.memory, full.memory), (bare.seconds, full.seconds))
            )
            return Estimate(layout, memory, seconds)
        links = links or AxisRates.of(layout, self.planner.device, self.planner.shape)
        gathers = layout.dp if gathers_by_microbatch(layout, self.planner.runtime) else 0
        shares = layout.pp if layout.vocabulary == "pp" else 0
        axes = layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.recompute, layout.ep_chunks
        key = (*axes, links, gathers, layout.slices, shares)
        if key not in self._sums:
            self._sums[key] = _Sums.of(self.planner, layout, links)
        vee = layout.schedule in BACK_AND_FORTH
        place = (key, layout.pp, layout.v, vee)
        if place not in self._cuts:
            self._cuts[place] = self._sums[key].cut(layout.pp, layout.v, vee=vee)
        return _estimate(self.planner, layout, links, self._cuts[place])


def _estimate(planner: Planner, layout: PlannedLayout, links: AxisRates, cut: _Cut) -> Estimate:
    """1F1B's laws: rank r works for all micro-batches, waits for the ranks before it at both ends of the step, and for those
    behind it twice, before its first backward and its last, as long as the p - r - 1 other micro-batches there do not fill.

    Rank r of p keeps p - r micro-batches, in k slices, whose ramps take 1 / k, 1 + (p - r - 1) / k; interleaved,
    p + (p - 1 - 2 r) / v; zbv p; zb-h1 as many as 1F1B, and what r / k of them need for W. The last layer keeps one. With pairs
    all but p micro-batches hide their exchanges; 1F1B then keeps twice as many, but for the one that the backward of a pair
    frees. A spread output layer keeps a forward more.
    """
    p, v, m, slices, runtime = layout.pp, layout.v, layout.m, layout.slices, planner.runtime
    plain = OVERLAPPED.get(layout.schedule, layout.schedule)
    paired = plain != layout.schedule
    pairs, ramps = paired * max(0, m - p), v * slices * (3 if plain in ("zbv", "zb-h1") else 1)
    chain = [rank.seconds - cut.share for rank in cut.ranks]  # all shares are computed at once
    longest, before, after = 0.0, 0.0, sum(chain)
    for at, (rank, mine) in enumerate(zip(cut.ranks, chain, strict=True)):
        after -= mine
        waiting = 2 * after - (p - at - 1) * mine
        idle = before + waiting if waiting > 0 else before
        longest = max(longest, m * rank.seconds - pairs * rank.hidden + idle / ramps)
        before += mine
    memory, optimizer, work = 0.0, 0.0, 0.0
    replicas, of_experts, waits = layout.dp * layout.cp, layout.expert_replicas, 0.0
    spread = (layout.vocabulary == "pp") / v / slices - paired * (v == 1)
    first = cut.ranks[0]
    for rank, places in cut.places.items():
        trained = rank.trained_shared, rank.trained_experts
        groups = (rank.shared, trained[0], replicas), (rank.experts, trained[1], of_experts)
        state = sum(state_bytes(groups, cut.largest, layout, runtime))
        sums, gathers, spent = planner.state_seconds(*trained, layout, links)
        optimizer, work = max(optimizer, spent), max(work, rank.seconds - paired * rank.hidden)
        if rank is first and plain not in ("zbv", "zb-h1"):  # first to compute, and last
            hidden = rank.seconds * runtime.hides_state
            waits = max(0.0, sums - 2 / 3 * hidden) / v + max(0.0, gathers - hidden / 3) / v
        for at in places if plain == "zb-h1" else places[:1]:  # earlier ranks keep no less
            if plain == "interleaved":
                alive = p + (p - 1 - 2 * at) / v
            else:
                alive = p if plain == "zbv" else (1 + paired) * (1 + (p - at - 1) / slices)
            alive = min(m, alive + spread)
            held = rank.saved * alive + rank.output + rank.extra / slices
            if plain == "zb-h1":
                held += rank.pending * min(m - alive, at / slices)
            memory = max(memory, state + (1 + runtime.margin) * held)
    memory += runtime.workspace + runtime.overhead
    alone = optimizer + planner.device.host
    return Estimate(layout, memory, longest + waits + alone, m * work + alone)
