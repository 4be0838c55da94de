"""Search over layouts: every one that the model and the devices allow is estimated, the most promising are predicted."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import combinations, count, islice, product
from operator import add, sub
from typing import Any

from pipeloom.errors import UsageError, divisors
from pipeloom.plan.export import train_flags
from pipeloom.plan.layout import CHUNKS, WHOLE_ROUNDS, PlannedLayout, problems
from pipeloom.plan.memory import state_bytes
from pipeloom.plan.predict import LayoutCosts, Planner, balanced, distinct
from pipeloom.plan.time import AxisRates, gathers_by_microbatch, hidden_by_pairs
from pipeloom.schedule.placement import named
from pipeloom.shapes.decoder import DecoderShape, context_problem
from pipeloom.shapes.ops import OFFLOADED, LayerOps

RECOMPUTED = ("none", "norms+activation", "full")
# Sets of modules whose inputs are copied; that of the attention's projection is its output, and leaves with its inputs alone.
OFFLOADS = tuple(
    "+".join(each)
    for n in range(1, len(OFFLOADED) + 1)
    for each in combinations(OFFLOADED, n)
    if "attn_proj" not in each or "core_attn" in each
)
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
_SIZES = ("dp", "tp", "cp", "pp", "ep", "m", "micro_batch", "slices", "vocabulary")
CLOSE = 1.06  # times the memory: estimates of more bytes are not predicted, since they are at most so much too high
SPREAD_CLOSE = 1.005  # the same with a spread output layer, whose schedules take long to place
LONG = 1.03  # times the seconds: estimates are at most so much too long, but for few
STEADY_LONG = 1.01  # the same for steps of at least two rounds, without pairs
RAMPS = 0.75  # of the estimated seconds beside a step's work: it takes no less
BACK_AND_FORTH_RAMPS = 0.4  # the same of schedules in the form of a V, whose ranks fill the ramps of others
SHORTER = 0.995  # times the best seconds: longer estimates are not predicted where links are slower, or memory is less
CORRECTIONS = 4  # times that the number of recomputed blocks is chosen: twice from estimates, then from predictions
ALIKE = 0.9995  # of the seconds that another ZeRO level takes by a prediction: the least by the ratio of the estimates
ROOM = 0.8  # of the memory: a layout that needs less gains no room from a higher ZeRO level
SMALLER = 0.75  # times the least memory of faster layouts, to be worth a row
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
        offload: sets of modules whose inputs may be copied to host memory, of layouts that recompute nothing.
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
    offload: tuple[str, ...] = ()
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
        if runtime == "megatron":
            fixed = request.fixed.get("offload")
            return replace(request, offload=OFFLOADS if fixed is None else (fixed,) * (fixed != "none"))
        request = replace(request, recompute=("none", "full"))  # other parts are Megatron's
        if runtime != "pipeloom":  # what other trainers do not do is not planned
            return request
        return replace(request, slices=(1, 2, 4, 8, 16, 32), vocabulary=("last", "pp"))

    @property
    def forms(self) -> list[dict[str, str]]:
        """The fields of `PlannedLayout` that say what a layout does not keep, with one set of what may be copied."""
        return [{"recompute": each} for each in self.recompute] + [{"offload": each} for each in self.offload[:1]]

    def of_model(self, planner: Planner) -> PlanRequest:
        """The request with what the planner's model has: in Megatron "activation" is a part of experts."""
        if planner.runtime.name != "megatron" or planner.shape.num_experts:
            return self
        parts = (each.removesuffix("+activation") for each in self.recompute)
        return replace(self, recompute=tuple(dict.fromkeys(parts)))

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

    @property
    def shortest(self) -> float:
        """The seconds that a step takes at the least."""
        ramps = BACK_AND_FORTH_RAMPS if self.layout.schedule in BACK_AND_FORTH else RAMPS
        return self.least + ramps * (self.seconds - self.least)


@dataclass(frozen=True)
class LayoutPlan:
    """The outcome of a search.

    Attributes:
        predictions: layouts that fit, the fastest first: the fastest with and without a pipeline, what was predicted on the way
            to them, and some that need less memory.
        space: what was looked at.
        too_large: layouts that were predicted and do not fit.
        smallest: where none fits, the prediction with the least memory.
    """

    predictions: tuple[LayoutCosts, ...]
    space: Space
    too_large: frozenset[PlannedLayout] = frozenset()
    smallest: LayoutCosts | None = None

    @property
    def best(self) -> LayoutCosts:
        return self.predictions[0]

    @property
    def looked_at(self) -> dict[str, int]:
        """Numbers of layouts: all but for recomputation and ZeRO levels, too slow or too large; estimated, and predicted."""
        space = self.space
        return {
            "layouts": len(space.bounds),
            "too_slow": len(space.bounds) - len(space.looked_at),
            "too_large": sum(map(space.is_too_large, space.looked_at)),
            "estimated": len(space.known),
            "predicted": len(self.predictions) + len(self.too_large),
        }

    @property
    def pareto(self) -> list[LayoutCosts]:
        """The predictions of which no other one is as fast with as little memory, the fastest first."""
        frontier: list[LayoutCosts] = []
        for each in self.predictions:
            if all(each.peak < other.peak for other in frontier):
                frontier.append(each)
        return frontier


class Space:
    """The layouts of a request, of which only those are estimated whose work allows a fast step.

    Attributes:
        bounds: layout without recomputation, with the lowest ZeRO level -> the least seconds of its steps: the mean rank's work
            with all that pairs can hide, and half of what it waits for the others.
        looked_at: those whose work allows to be the fastest.
        known: layout -> its estimate, where there was one.
    """

    def __init__(self, planner: Planner, request: PlanRequest, earlier: Space | None = None) -> None:
        """The space of `request`; `earlier`: of another memory, with the same planner."""
        self.planner, self.request = planner, request.of_model(planner)
        self.looked_at = list[PlannedLayout]()
        self.known: dict[PlannedLayout, Estimate] = {} if earlier is None else earlier.known
        self._least: dict[PlannedLayout, float] = {} if earlier is None else earlier._least
        self.bounds: dict[PlannedLayout, float] = {} if earlier is None else earlier.bounds
        self._estimator: _Estimator = _Estimator(planner) if earlier is None else earlier._estimator
        for sizes in _sizes(planner, request) if earlier is None else ():
            work, share, hidden = self._estimator.mean_work(sizes)
            for cut in _cuts(planner, request, sizes):
                waits = (cut.pp - 1) / 2 * (work - share) / _ramps(cut)
                self.bounds[cut] = cut.m * work - _pairs(cut) * hidden + waits + planner.device.host

    def estimate(self, layout: PlannedLayout) -> Estimate:
        """The estimate of one layout."""
        if layout not in self.known:
            self.known[layout] = self._estimator.estimate(layout)
        return self.known[layout]

    def is_close(self, estimate: Estimate) -> bool:
        close = SPREAD_CLOSE if estimate.layout.vocabulary == "pp" else CLOSE
        return estimate.memory <= close * self.request.memory

    def least_bytes(self, cut: PlannedLayout) -> float:
        """The bytes of the mean rank with the best ZeRO level, where all is recomputed that may be."""
        if cut not in self._least:
            smallest = replace(cut, recompute=self.request.recompute[-1])
            self._least[cut] = self._estimator.least_bytes(smallest, self.request.zero)
        return self._least[cut]

    def is_too_large(self, cut: PlannedLayout) -> bool:
        return self.least_bytes(cut) > CLOSE * self.request.memory

    def of(self, cut: PlannedLayout, form: Mapping[str, str]) -> Iterator[Estimate]:
        """Estimates with ZeRO levels: of a higher one where it is faster, or the lower one may not leave room."""
        best = Estimate(cut, math.inf, math.inf)  # of the lower levels
        for zero in self.request.zero[:1] if cut.dp * cut.cp == 1 else self.request.zero:
            estimate = self.estimate(replace(cut, zero=zero, **form))  # type: ignore[arg-type]
            needed = best.memory > ROOM * self.request.memory and estimate.memory < best.memory
            if estimate.seconds < best.seconds or needed:
                best = estimate
                yield estimate

    def every(self) -> Iterator[Estimate]:
        """The estimates of all layouts, but for blocks that are recomputed in part, and other sets of what is copied."""
        for cut, form in product(self.bounds, self.request.forms):
            yield from filter(self.is_offered, self.of(cut, form))

    def is_offered(self, estimate: Estimate) -> bool:
        layout = estimate.layout
        return self.request.allows(layout) and _is_offered(self.planner, layout, layout.schedule, layout.v)

    def smaller(self, bare: Estimate) -> Iterator[Estimate | _Partial]:
        """A layout that does not fit, with what may be recomputed or copied so that it may."""
        for recompute in self.request.recompute:
            some = self.estimate(replace(bare.layout, recompute=recompute))
            if some != bare and self.is_close(some) and self.is_offered(some):
                yield some
                if recompute == "full" and self.request.partial:
                    yield _Partial(self, bare, some)
        if self.request.offload:
            yield from filter(self.is_close, self._copied(bare))

    def _copied(self, bare: Estimate) -> Iterator[Estimate]:
        """The layout with a set of few bytes copied with which it may fit, should fit, and fits for certain."""
        layers = self.planner.layers(bare.layout)
        sizes = {
            module: sum(layer.tensors.get(name, 0.0) for layer in layers for name in names)
            for module, names in OFFLOADED.items()
        }
        totals = {each: sum(sizes[module] for module in each.split("+")) for each in self.request.offload}
        most = max(totals, key=totals.__getitem__)
        saved = bare.memory - self.estimate(replace(bare.layout, offload=most)).memory
        limits = [limit * self.request.memory for limit in (CLOSE, 1.0, 1 / CLOSE)] if saved > 0 else []
        needed = [(bare.memory - limit) / saved * totals[most] for limit in limits]
        fewest = [
            min((s for s in totals if totals[s] >= size), key=totals.__getitem__, default=most) for size in needed
        ]
        yield from (self.estimate(replace(bare.layout, offload=modules)) for modules in dict.fromkeys(fewest))


@dataclass(frozen=True)
class _Partial:
    """A layout of which not all blocks need be recomputed: its estimates with none and with all of them."""

    space: Space
    bare: Estimate
    full: Estimate

    @property
    def seconds(self) -> float:
        """Of the share of the blocks that must be recomputed at the least."""
        (a, b), memory = (self.bare, self.full), CLOSE * self.space.request.memory
        share = max(0.0, a.memory - memory) / (a.memory - b.memory) if a.memory > b.memory else 1.0
        return a.seconds + min(1.0, share) * (b.seconds - a.seconds)

    @property
    def blocks(self) -> int:
        """Of the largest stage, about."""
        return -(-self.space.planner.shape.num_hidden_layers // (self.full.layout.pp * self.full.layout.v))

    def of(self, count: int) -> Estimate:
        """The estimate with so many blocks of each stage recomputed."""
        return self.space.estimate(replace(self.full.layout, recompute_layers=count))

    def fewest(self) -> list[Estimate]:
        """The estimates with the fewest blocks that may fit, and that should, or with all but one; none for stages of one."""
        counts, memory = range(1, self.blocks), self.space.request.memory
        places = [
            bisect_left(counts, -limit * memory, key=lambda number: -self.of(number).memory) for limit in (CLOSE, 1.0)
        ]
        numbers = [number for at in places for number in counts[at : at + 1] or counts[-1:]]
        return [self.of(number) for number in dict.fromkeys(numbers)]

    def corrected(self, prediction: LayoutCosts) -> Estimate:
        """The estimate with as many blocks as the bytes of a prediction leave room for."""
        low = prediction.peak / self.of(prediction.layout.recompute_layers).memory
        saved = low * (self.bare.memory - self.full.memory) / self.blocks
        excess = prediction.peak - self.space.request.memory
        number = prediction.layout.recompute_layers + math.ceil(excess / saved) if saved > 0 else self.blocks
        return self.of(max(1, min(number, self.blocks - 1)))


def search(planner: Planner, request: PlanRequest) -> LayoutPlan:
    """The layouts of `request`, ranked. Raises UsageError where no layout exists for so many devices.

    Branch and bound: layouts are estimated in the order of their work, and predicted in that of their estimated seconds, a lower
    bound but for `too_long`, until the next one is above the best prediction. So more memory, devices' memory or space gives no
    slower layout where estimates hold.

    >>> from pipeloom import plan
    >>> planner = plan.Planner(plan.load_model("llama3-8b"), plan.load_device("h100"), plan.RUNTIMES["pipeloom"])
    >>> request = PlanRequest(4, memory=80 * 2**30, sequences=16, seq=2048, schedules=("1f1b",), fixed={"tp": 1})
    >>> best = search(planner, request).predictions[0]
    >>> best.layout.dp, best.layout.pp, best.peak < request.memory
    (2, 2, True)
    """
    space = Space(planner, request)
    if not any(True for _ in space.every()):
        raise UsageError(_no_layout(planner, request))
    known = [each for pipelined in (False, True) for each in _until_best(space, (pipelined,))]
    if _fitting(known, request):
        known += _smaller(space, known)
    else:
        known += _predictions(planner, _smallest(space))
    fitting = sorted(_fitting(known, request), key=lambda each: each.step.total)
    smallest = min(known, key=lambda each: each.peak, default=None)
    large = frozenset(each.layout for each in known) - {each.layout for each in fitting}
    return LayoutPlan(tuple(fitting), space, large, smallest)


def fastest(planner: Planner, request: PlanRequest, plan: LayoutPlan | None = None) -> LayoutCosts | None:
    """The first prediction of `search`, without the others; None where nothing fits.

    Args:
        plan: of a search with more memory, or with faster links: no layout is faster now, and only those are predicted whose
            estimates are `SHORTER` times the best seconds or less.
    """
    if plan is None:
        known = list(_until_best(Space(planner, request)))
    else:
        known = [planner.predict(each.layout) for each in _fitting(plan.predictions, request)[:1]]
        best = min((each.step.total for each in known), default=math.inf)
        space = Space(planner, request, plan.space if planner is plan.space.planner else None)
        known += _until_best(space, long=SHORTER, best=best, large=plan.too_large)
    return min(_fitting(known, request), key=lambda each: each.step.total, default=None)


def too_long(layout: PlannedLayout) -> float:
    """Return by how much the estimated seconds of a layout may be too long."""
    return LONG if layout.m < 2 * layout.pp or layout.schedule in OVERLAPPED else STEADY_LONG


def _fitting(predictions: Iterable[LayoutCosts], request: PlanRequest) -> list[LayoutCosts]:
    return [each for each in predictions if each.peak <= request.memory]


def _until_best(
    space: Space,
    pipelined: Collection[bool] = (False, True),
    long: float = LONG,
    best: float = math.inf,
    large: Collection[PlannedLayout] = (),
) -> Iterator[LayoutCosts]:
    """Yield predictions, of the fastest estimate first, until no other layout can be faster than the best that fits.

    Of layouts that do not fit, as few blocks of each stage are recomputed as do: the fewest with which they may by their
    estimates, and with which they should, and then as many as the bytes of the predictions leave room for.

    Estimates are too short by nearly the same share for layouts of one schedule, of which the least that was seen counts. A
    layout is left out if one that fits, with other micro-batches and slices alone, is estimated to take less time and no more
    bytes. Of rare layouts,
    such as those with fewer micro-batches than ranks of unlike layers, estimates are up to 12 % too high in bytes, and longer
    than `LONG` allows: one of these may be missed though it is the fastest.

    Args:
        best: seconds of the fastest prediction before.
        large: layouts that are known not to fit.
    """
    memory, order, bounds = space.request.memory, count(), space.bounds.items()
    queue: list[Any] = [(seconds, next(order), cut) for cut, seconds in bounds if (cut.pp > 1) in pipelined]
    heapify(queue)

    def push(more: Iterable[Estimate | _Partial]) -> None:
        for each in more:
            heappush(queue, (each.seconds, next(order), each))

    short: dict[tuple[object, ...], float] = {}
    exact: dict[PlannedLayout, float] = {}
    partial: dict[PlannedLayout, _Partial] = {}
    tried: dict[PlannedLayout, list[Estimate]] = {}
    # a layout that fits, whatever its micro-batches and slices -> the least of its estimated bytes
    fitted: dict[PlannedLayout, float] = {}
    while queue and queue[0][0] < long * best:
        *_, each = heappop(queue)
        if isinstance(each, PlannedLayout):
            space.looked_at.append(each)
            push(() if space.is_too_large(each) else space.of(each, {}))
            continue
        if isinstance(each, _Partial):
            partial[each.full.layout] = each
            tried[each.full.layout] = [some for some in each.fewest() if space.is_close(some)]
            push(tried[each.full.layout])
            continue
        layout, twin = each.layout, replace(each.layout, zero=0)
        schedule = (layout.schedule, layout.pp, layout.v, layout.slices, layout.vocabulary)
        cut = replace(layout, m=1, micro_batch=1, slices=1)
        likely, same = (each.seconds * ratio for ratio in (short.get(schedule, 1.0), ALIKE * exact.get(twin, 0.0)))
        if max(likely / min(long, too_long(layout)), same, each.shortest) >= best:
            continue
        if fitted.get(cut, math.inf) <= each.memory:
            continue
        fits = False
        near = [each] if space.is_close(each) and space.is_offered(each) and layout not in large else []
        for prediction in _predictions(space.planner, near):
            seconds, fits = prediction.step.total, prediction.peak <= memory
            exact[twin] = seconds / each.seconds
            short[schedule] = min(short.get(schedule, math.inf), seconds / each.seconds)
            if fits:
                best, fitted[cut] = min(best, seconds), each.memory
            yield prediction
            if layout.recompute_layers:
                whole = replace(layout, recompute_layers=0)
                other = partial[whole].corrected(prediction)
                if other not in tried[whole] and len(tried[whole]) < CORRECTIONS:
                    tried[whole].append(other)
                    push([other])
        if (layout.recompute, layout.offload) == ("none", "none") and not fits:
            push(space.smaller(each))


def _smallest(space: Space) -> list[Estimate]:
    """The estimates of the least memory, of sizes that were discarded by their mean rank too."""
    cuts = sorted(space.bounds, key=space.least_bytes)[: 4 * SMALLEST]
    estimates = [each for pair in product(cuts, space.request.forms) for each in space.of(*pair)]
    return sorted(filter(space.is_offered, estimates), key=lambda each: each.memory)[:SMALLEST]


def _smaller(space: Space, known: Iterable[LayoutCosts]) -> list[LayoutCosts]:
    """The prediction of the fastest layout that was looked at and needs much less memory than all faster ones, or none."""
    limit = SMALLER * min(each.peak for each in known)
    # a spread output layer takes as long as the rest of the search
    cuts = [each for each in space.looked_at if each.vocabulary == "last" and space.least_bytes(each) < limit]
    forms = dict.fromkeys((space.request.recompute[0], space.request.recompute[-1]))
    estimates = [each for cut, form in product(cuts, forms) for each in space.of(cut, {"recompute": form})]
    small = [each for each in estimates if each.memory < limit and space.is_offered(each)]
    fastest_first = sorted(small, key=lambda each: each.seconds)
    return list(islice(_predictions(space.planner, fastest_first), 1))


def _predictions(planner: Planner, estimates: Iterable[Estimate]) -> Iterator[LayoutCosts]:
    """Yield the predictions of layouts whose families take their sizes."""
    for each in estimates:
        with suppress(UsageError):
            yield planner.predict(each.layout)


def _no_layout(planner: Planner, request: PlanRequest) -> str:
    """Return a sentence that says why there is no layout, with the nearest one of those that `request.fixed` excludes."""

    def likeness(layout: PlannedLayout) -> tuple[int, float]:
        pairs = [(getattr(layout, key), value) for key, value in request.fixed.items()]
        same = sum(has == value for has, value in pairs)  # then those with parts in common, and near in numbers
        return same, sum(
            len({*a.split("+")} & {*b.split("+")}) if isinstance(b, str) else -abs(a - b) for a, b in pairs
        )

    words = f"{planner.shape.name} on {request.devices} devices with {request.sequences} sequences a step"
    layouts = [each.layout for each in Space(planner, replace(request, fixed={})).every()] if request.fixed else []
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
    """Return another layout of `request` that fits with the fewest changes of `layout`, of several the fastest; None: none fits.

    A change doubles or halves an axis, or chooses another schedule, ZeRO level or recomputation.
    """

    def changes(other: PlannedLayout) -> float:
        axes: float = sum(abs(math.log2(getattr(other, name) / getattr(layout, name))) for name in _AXES)
        return axes + sum(
            float(getattr(other, name) != getattr(layout, name)) for name in ("schedule", "zero", "recompute")
        )

    fitting = [each for each in Space(planner, request).every() if each.memory <= request.memory]
    different = [each for each in fitting if train_flags(each.layout, layout)]
    near = sorted(different, key=lambda each: (changes(each.layout), each.seconds))
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
    for change, step in steps(best.layout, request.of_model(planner)):
        layout = step if step.ep == best.layout.ep else replace(step, etp=_etp(planner, step.ep))
        if (
            layout == best.layout
            or not request.allows(layout, request.limits)
            or problems(planner.shape, layout)
            or not _is_offered(planner, layout, layout.schedule, layout.v)
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
    for recompute in request.recompute:
        yield f"recompute {recompute}", replace(layout, recompute=recompute, recompute_layers=0, offload="none")
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


def _sizes(planner: Planner, request: PlanRequest) -> Iterator[PlannedLayout]:
    """Every size of the axes that uses all devices, with every size of a micro-batch, slices, and place of the output layer."""
    shape, device = planner.shape, planner.device
    for tp in _powers(min(device.per_node, shape.num_attention_heads)):
        for cp in _powers(max(1, min(16, request.seq // PIECE_TOKENS))):
            if request.devices % (tp * cp):
                continue
            for pp in divisors(request.devices // (tp * cp)):
                dp = request.devices // (tp * cp * pp)
                if pp > shape.num_hidden_layers or request.sequences % dp:
                    continue
                ranks = dp * cp * (tp if planner.runtime.whole_experts else 1)
                expert_ranks = _powers(min(ranks, shape.num_experts)) if shape.num_experts else [1]
                # slices: with tokens enough for fast products
                most = 1 if pp == 1 or request.capacity else max(1, request.seq // cp // SLICE_TOKENS)
                cuts = product(
                    (each for each in request.slices if each <= most), request.vocabulary[: 1 + (pp <= MOST_SHARES)]
                )
                for micro_batch, ep, (slices, vocabulary) in product((1, 2, 4), expert_ranks, [*cuts]):
                    if request.sequences % (dp * micro_batch):
                        continue
                    ours = planner.runtime.name == "pipeloom"
                    chunks = request.fixed.get("ep_chunks", 1) if ours else 1
                    layout = PlannedLayout(
                        dp, tp, cp, pp, ep, m=request.sequences // (dp * micro_batch), micro_batch=micro_batch,
                        seq=request.seq, zero=request.zero[0], capacity=request.capacity, etp=_etp(planner, ep), slices=slices,
                        vocabulary=vocabulary, ep_chunks=chunks, cut="" if ours or pp == 1 else "balanced",
                    )  # fmt: skip
                    if request.allows(layout, _SIZES) and not problems(shape, layout):
                        yield layout


def _etp(planner: Planner, ep: int) -> int:
    """1 where an expert is whole on one rank of tp, else 0: a sharded runtime divides those that are not spread."""
    whole = planner.shape.num_experts and planner.runtime.whole_experts
    return int(bool(whole) and (ep > 1 or not planner.runtime.sharded))


def _cuts(planner: Planner, request: PlanRequest, layout: PlannedLayout) -> Iterator[PlannedLayout]:
    """A layout with every schedule and number of chunks."""
    alone = {*request.schedules[:1], "1f1b-overlap"}  # without a pipeline the others are alike
    for name in request.schedules:
        for v in CHUNKS[name] if layout.pp > 1 else (1,) if name in alone else ():
            if _is_offered(planner, layout, name, v):
                yield replace(layout, v=v, schedule=name)


def _is_offered(planner: Planner, layout: PlannedLayout, name: str, v: int) -> bool:
    """Return whether a schedule of v chunks is of use to a layout, and takes its sizes."""
    hides = layout.ep > 1 and not (layout.recompute == "full" and planner.runtime.name == "megatron")
    return (
        layout.pp * v <= planner.shape.num_hidden_layers
        and v in CHUNKS.get(name, ())
        and not (name in WHOLE_ROUNDS and layout.m % layout.pp)
        and not (name == "dualpipev" and layout.m < 2 * layout.pp)
        and not (name in OVERLAPPED and not hides)
        and not (layout.cp > 1 and layout.seq < layout.cp * PIECE_TOKENS)
        and (layout.slices == 1 or name in IN_SLICES)
        and (layout.vocabulary == "last" or _can_spread(layout.pp, v, name, layout.slices))
    )


def _can_spread(p: int, v: int, name: str, slices: int) -> bool:
    """Return whether a spread output layer is of use to a schedule, and quick to place."""
    return p <= MOST_SHARES and v <= 2 and p * slices <= MOST_SHARED_SLICES and name in SPREADING


@dataclass(frozen=True)
class _Rank:
    """Sums over the layers of one pipeline rank, of one micro-batch; of the temporaries the largest.

    `exchanged`: seconds of exchanges with experts on other ranks, of F and I; `stands`: those that chunks of the tokens do not
    hide; `output`: what the last layer saves, not in `saved`.
    """

    seconds: float
    exchanged: float
    stands: float
    saved: float
    output: float
    pending: float
    shared: float
    experts: float
    trained_shared: float
    trained_experts: float
    extra: float

    @property
    def hidden(self) -> float:
        """Seconds that pairs of a micro-batch save: dense layers hide the exchanges of others."""
        return hidden_by_pairs(self.seconds, self.exchanged, self.stands)


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
    exchanged: tuple[float, ...]
    stands: tuple[float, ...]

    @classmethod
    def of(cls, planner: Planner, layout: PlannedLayout, links: AxisRates) -> _Sums:
        times = planner.layer_seconds(planner.timed_layers(layout), layout, links)
        rows = [
            (each.total, 2 * each.exchanged, 2 * each.exchanged - each.beside_forward - each.beside_backward)
            for each in times
        ]
        return cls(planner.layers(layout), *zip(*rows, strict=True))

    @property
    def shares(self) -> bool:
        """The last layer is a rank's share of the output layer."""
        return self.layers[-1].kind == "S"

    @cached_property
    def peaks(self) -> list[float]:
        """Layer -> bytes of its backward's temporaries."""
        return [layer.backward_peak for layer in self.layers]

    @cached_property
    def largest(self) -> float:
        """Parameters of the largest layer."""
        return max(sum(each.parameters) for each in distinct(self.layers).values())

    @cached_property
    def totals(self) -> list[tuple[float, ...]]:
        """The sums over the first layers of what `_Rank` sums, the share of the output layer left out."""
        last = len(self.layers) - 1 - self.shares
        totals: list[tuple[float, ...]] = [(0.0,) * 10]
        for at, (layer, *times) in enumerate(zip(self.layers, self.seconds, self.exchanged, self.stands, strict=True)):
            saved = (layer.saved, 0.0) if at < last else (0.0, layer.saved)
            row = *times, *saved, layer.pending, *layer.parameters, *layer.trained.parameters
            totals.append(tuple(map(add, totals[-1], row)))
        return totals

    def cut(self, layout: PlannedLayout, bare: _Sums, share: float) -> _Cut:
        """The layers in balanced stages, and these on ranks: in a loop, or back and forth; a share is on each rank.

        Args:
            bare: the layers without recomputation, as are those of a stage behind its first `recompute_layers` blocks.
            share: of the model's blocks that are recomputed.
        """
        ranks, chunks = layout.pp, layout.v
        mean = [(1 - share) * a + share * b for a, b in zip(bare.seconds, self.seconds, strict=True)]
        of_stage = balanced(mean[: len(mean) - self.shares], ranks * chunks)
        sums, extra, start = [[0.0] * 10 for _ in range(ranks)], [0.0] * ranks, 0
        line = "vee" if layout.schedule in BACK_AND_FORTH else "loop"
        for rank, size in zip(named(line, ranks, chunks), of_stage, strict=True):
            end = start + size
            middle = min(end, max(start, 1) + layout.recompute_layers) if layout.recompute_layers else end
            for totals, first, last in ((self.totals, start, middle), (bare.totals, middle, end)):
                if first == last:
                    continue
                sums[rank] = list(map(sub, map(add, sums[rank], totals[last]), totals[first]))
            extra[rank] = max(extra[rank], *self.peaks[start:middle], *bare.peaks[middle:end])
            start = end
        sums = [[*each, most] for each, most in zip(sums, extra, strict=True)]
        if self.shares:
            output, seconds = self.layers[-1], self.seconds[-1]
            values = seconds, 0.0, 0.0, 0.0, 0.0, 0.0, *output.parameters, *output.trained.parameters, output.saved
            sums = [[a + b for a, b in zip(each, values, strict=True)] for each in sums]
        return _Cut(tuple(_Rank(*each) for each in sums), self.largest, self.shares * self.seconds[-1])


def estimate(planner: Planner, layout: PlannedLayout) -> Estimate:
    """The estimate of one layout, without its schedule."""
    return _Estimator(planner).estimate(layout)


class _Estimator:
    """Estimates of layouts that share the times of their layers and their cuts."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._sums: dict[tuple[object, ...], _Sums] = {}
        self._cuts: dict[tuple[object, ...], _Cut] = {}

    def estimate(self, layout: PlannedLayout) -> Estimate:
        links = AxisRates.of(layout, self.planner.device, self.planner.shape)
        key, sums = self._sums_of(layout, links)
        place = (key, layout.pp, layout.v, layout.schedule in BACK_AND_FORTH, layout.recompute_layers)
        if place not in self._cuts:
            bare, share = sums, 1.0
            if layout.recompute_layers:
                _, bare = self._sums_of(replace(layout, recompute="none"), links)
                share = layout.recomputed_share(self.planner.shape.num_hidden_layers, layout.pp * layout.v)
            self._cuts[place] = sums.cut(layout, bare, share)
        return _estimate(self.planner, layout, links, self._cuts[place])

    def _sums_of(self, layout: PlannedLayout, links: AxisRates) -> tuple[tuple[object, ...], _Sums]:
        """Return the sums of a layout's layers, and what they depend on."""
        gathers = (layout.dp, links.dp) if gathers_by_microbatch(layout, self.planner.runtime) else ()
        shares = layout.pp if layout.vocabulary == "pp" else 0
        axes = layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.seq, layout.slices, shares
        what = layout.recompute, layout.offload, layout.capacity, layout.ep_chunks
        key = (*axes, *what, links.tp, links.cp, links.ep, links.inside, *gathers)
        if key not in self._sums:
            self._sums[key] = _Sums.of(self.planner, layout, links)
        return key, self._sums[key]

    def mean_work(self, layout: PlannedLayout) -> tuple[float, float, float]:
        """Seconds of a micro-batch on the mean rank, of which a share of the output layer takes; and those that pairs hide."""
        _, sums = self._sums_of(layout, AxisRates.of(layout, self.planner.device, self.planner.shape))
        share, p = sums.shares * sums.seconds[-1], layout.pp
        work = (sum(sums.seconds) + (p - 1) * share) / p
        return work, share, hidden_by_pairs(work, sum(sums.exchanged) / p, sum(sums.stands) / p)

    def least_bytes(self, layout: PlannedLayout, levels: Sequence[int]) -> float:
        """The bytes of the mean pipeline rank: what it holds, and what 1F1B saves at the least."""
        runtime = self.planner.runtime
        _, sums = self._sums_of(replace(layout, zero=0), AxisRates.of(layout, self.planner.device, self.planner.shape))
        _, _, _, saved, _, _, *counts = (each / layout.pp for each in sums.totals[-1])
        replicas = layout.dp * layout.cp, layout.expert_replicas
        groups = list(zip(counts[:2], counts[2:], replicas, strict=True))
        alive = min(layout.m, 1 + (layout.pp - 1) / 2 / layout.slices)
        state = min(sum(state_bytes(groups, 0.0, replace(layout, zero=level), runtime)) for level in levels)
        held = state + (1 + runtime.margin) * saved * alive
        return held + runtime.workspace + runtime.overhead


def _pairs(layout: PlannedLayout) -> float:
    """Micro-batches that hide their exchanges in pairs."""
    m, p = layout.m, layout.pp
    return (m - min(m, p) / 2 if layout.v == 1 else max(0, m - p)) if layout.schedule in OVERLAPPED else 0


def _ramps(layout: PlannedLayout) -> int:
    """By how much the ramps of a schedule are shorter than 1F1B's."""
    split = OVERLAPPED.get(layout.schedule, layout.schedule) in ("zbv", "zb-h1")
    return layout.v * layout.slices * (3 if split else 1)


def _estimate(planner: Planner, layout: PlannedLayout, links: AxisRates, cut: _Cut) -> Estimate:
    """1F1B's laws: rank r works for all micro-batches, waits for the ranks before it at both ends of the step, and, but
    for interleaved, for those behind it twice, before its first backward and its last, as long as the p - r - 1 others there
    do not fill.

    Rank r of p keeps p - r micro-batches, in k slices, whose ramps take 1 / k, 1 + (p - r - 1) / k; interleaved,
    p + (p - 1 - 2 r) / v; zbv p, or what r + 1 of them need for W and half of those behind it save; zb-h1 as many as 1F1B, and
    what r / k of them need for W, or one more where that is larger. The last layer keeps one. With pairs all but p micro-batches
    hide their exchanges, of 1F1B all but p / 2, which then keeps twice as many, but for the one that the backward of a pair
    frees. A spread output layer keeps a forward more.
    """
    p, v, m, slices, runtime = layout.pp, layout.v, layout.m, layout.slices, planner.runtime
    plain = OVERLAPPED.get(layout.schedule, layout.schedule)
    paired = plain != layout.schedule
    pairs, ramps = _pairs(layout), _ramps(layout)
    chain = [rank.seconds - cut.share for rank in cut.ranks]  # all shares are computed at once
    longest, before, after = 0.0, 0.0, sum(chain)
    for at, (rank, mine) in enumerate(zip(cut.ranks, chain, strict=True)):
        after -= mine
        waiting = 2 * after - (p - at - 1) * mine if plain != "interleaved" else 0.0
        idle = before + max(0.0, waiting)
        longest = max(longest, m * rank.seconds - pairs * rank.hidden + idle / ramps)
        before += mine
    memory, optimizer, work = 0.0, 0.0, 0.0
    replicas, of_experts, waits = layout.dp * layout.cp, layout.expert_replicas, 0.0
    spread = (layout.vocabulary == "pp") / v / slices - paired * (v == 1)
    first = cut.ranks[0]
    for rank, places in cut.places.items():
        trained = rank.trained_shared, rank.trained_experts
        groups = (rank.shared, trained[0], replicas), (rank.experts, trained[1], of_experts)
        *standing, gathered = state_bytes(groups, cut.largest, layout, runtime)
        # our trainer's copies come and go
        state = sum(standing) + (1 + runtime.margin * (runtime.name == "pipeloom")) * gathered
        sums, gathers, spent = planner.state_seconds(*trained, layout, links)
        optimizer, work = max(optimizer, spent), max(work, rank.seconds - paired * rank.hidden)
        if rank is first and plain not in ("zbv", "zb-h1"):  # first to compute, and last
            hidden = rank.seconds * runtime.hides_state
            waits = max(0.0, sums - 2 / 3 * hidden) / v + max(0.0, gathers - hidden / 3) / v
        for at in places if plain in ("zbv", "zb-h1") else places[:1]:  # earlier ranks keep no less
            if plain == "interleaved":
                alive = p + (p - 1 - 2 * at) / v
            else:
                alive = p if plain == "zbv" else (1 + paired) * (1 + (p - at - 1) / slices)
            alive = min(m, alive + spread)
            held, extra = rank.saved * alive + rank.output, rank.extra / slices
            if plain == "zb-h1":
                held += rank.pending * min(m - alive, at / slices)
                extra = max(extra, (rank.pending - rank.saved) / slices)
            elif plain == "zbv":
                held -= max(0.0, rank.saved - rank.pending) * max(0.0, alive - (m + 1 + at) / 2)
                late = rank.pending * max(0, at + min(1, m - p)) + rank.saved * min(m, p - at - 1) / 2
                extra = max(extra, late / (1 + paired) - rank.saved * alive)
            held += extra
            memory = max(memory, state + (1 + runtime.margin) * held)
    memory += runtime.workspace + runtime.overhead
    alone = optimizer + planner.device.host
    return Estimate(layout, memory, longest + waits + alone, m * work + alone)
