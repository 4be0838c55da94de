"""The runs near a job that its own system takes, predicted, and the best of them in its own words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from operator import itemgetter

from pipeloom.errors import UsageError
from pipeloom.interop.megatron import PART_MODULES
from pipeloom.interop.systems import SYSTEMS
from pipeloom.interop.torch_runtime import PLACED
from pipeloom.plan.job import Job, normal
from pipeloom.plan.layout import CHUNKS, PlannedLayout
from pipeloom.plan.predict import LayoutCosts, Planner
from pipeloom.plan.search import OFFERED, OVERLAPPED, PlanRequest, estimate, steps
from pipeloom.schedule import Schedule
from pipeloom.schedule.placement import name_of
from pipeloom.shapes.ops import OFFLOADED, Runtime

RATIO_ERRORS = {"megatron": 0.023, "torchtitan": 0.032, "pipeloom": 0.024}
"""Runtime -> the median error of predicted ratios between published runs of one model (`benchmarks/planbench/releases.py`)."""
LEAST_GAIN = 0.03
RUNTIME_OF = {"megatron": "megatron", "torchtitan": "torchtitan", "automodel": "torchtitan", "pipeloom": "pipeloom"}
"""System -> whose tensors and kernels its runs have."""
_STEP = 0.002  # share of a step that a change must gain to be followed: less is not worth a flag
_MOST_STEPS = 12
_SURE = 0.98  # share of the least ratio so far of predicted seconds to estimated ones, below which none is expected
_AXES = ("dp", "tp", "cp", "pp", "ep")
_PAIRED = ("delay_wgrad", "overlap_experts")


def least_gain(system: str) -> tuple[float, str]:
    """Return the least share of a step that a prediction can promise to save, and how large its errors are."""
    name = RUNTIME_OF[system]
    words = f"the median error of ratios predicted for {name} is {100 * RATIO_ERRORS[name]:.1f} %"
    return max(LEAST_GAIN, RATIO_ERRORS[name]), words


@dataclass(frozen=True)
class Run:
    """A job, normal, with its predicted costs."""

    job: Job
    prediction: LayoutCosts

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.prediction.step.total


@dataclass
class Neighbourhood:
    """The runs that a job's system takes, and that are reached from it by changing one thing after the other.

    Attributes:
        planner: of a run that hides its sums of gradients.
        memory: bytes of a device.
        axes: whether the sizes of the axes may change; otherwise what a system lets a user move on the same devices.
    """

    planner: Planner
    memory: float
    axes: bool = True
    _known: dict[Job, Run | None] = field(default_factory=dict, init=False, repr=False)
    _planners: dict[Runtime, Planner] = field(default_factory=dict, init=False, repr=False)
    _least: float = field(default=_SURE, init=False, repr=False)  # of the predicted seconds over the estimated ones

    def planner_of(self, job: Job) -> Planner:
        """Return the planner of a job: Megatron communicates beside computation where it is told to."""
        runtime = replace(self.planner.runtime, sequence=job.sequence)
        if job.system == "megatron":
            beside = ("overlap_grads" in job.options, "overlap_tensor" in job.options)
            runtime = replace(runtime, hides_state=beside[0], overlaps_exchange=beside[1])
        if runtime not in self._planners:  # each keeps its predictions
            self._planners[runtime] = replace(self.planner, runtime=runtime)
        return self._planners[runtime]

    def run(self, job: Job) -> Run:
        """Return the job with its costs. Raises UsageError for one that cannot be predicted."""
        planner, layout, order = self.planner_of(job), job.layout, job.order
        if order is None or layout.pp == 1:
            prediction = planner.predict(layout)
        elif (order.ranks, order.chunks, order.microbatches) != (layout.pp, layout.v, layout.m):
            sizes = f"pp={order.ranks}, v={order.chunks}, m={order.microbatches}"
            raise UsageError(f"{layout.schedule} has {sizes}, and the job pp={layout.pp}, v={layout.v}, m={layout.m}")
        else:
            prediction = planner.with_schedule(_of_family(layout, order), order)
        stages = prediction.stages if job.layout.pp > 1 else ()
        return Run(normal(replace(job, layout=replace(job.layout, stages=stages, cut="even"))), prediction)

    def around(self, run: Run) -> list[Run]:
        """Return the runs one change away from `run` that the system takes, the fastest of those that fit first."""
        tried = map(self._taken, self._moves(run, self.axes))
        runs = {
            (each.job.layout, each.job.options, each.job.sequence): each
            for each in tried
            if each and each.job != run.job
        }
        return sorted(runs.values(), key=self.rank)

    def best(self, start: Run) -> Run:
        """Return the best run that is reached by following the best change from `start`: on its axes, then on any; or at once."""
        same = self._climbed(start, axes=False)
        if not self.axes:
            return same
        return min((self._climbed(each, axes=True) for each in (same, start)), key=self.rank)

    def _climbed(self, best: Run, *, axes: bool) -> Run:
        for _ in range(_MOST_STEPS):
            near = self._best_near(best, axes)
            if not self._gains(near, best):
                break
            best = near
        return best

    def _best_near(self, run: Run, axes: bool) -> Run:
        """Return the best of a run and those one change away, of which the ones with good estimates are predicted."""
        best, fits = run, run.prediction.peak <= self.memory
        moves = dict.fromkeys(map(_consistent, self._moves(run, axes)))
        jobs = [each for each in moves if not (fits and _frees(each.layout, run.job.layout))]  # which takes time
        for seconds, job in sorted(((self._estimated(job), job) for job in jobs), key=itemgetter(0)):
            if fits and seconds * self._least > best.seconds:
                break
            if (other := self._taken(job)) is not None:
                self._least = min(self._least, _SURE * other.seconds / seconds)
                best = min(best, other, key=self.rank)
        return best

    def _estimated(self, job: Job) -> float:
        """Return the estimated seconds of a job that a prediction may take; infinite where there is no estimate."""
        with suppress(UsageError, ValueError, ArithmeticError):  # more stages than layers
            return estimate(self.planner_of(job), _of_family(job.layout, job.order)).seconds
        return inf

    def rank(self, run: Run) -> tuple[float, float]:
        """Return the order of runs: bytes that are too many, then seconds."""
        return max(0.0, run.prediction.peak - self.memory), run.seconds

    def _gains(self, run: Run, other: Run) -> bool:
        (excess, seconds), (before, slower) = self.rank(run), self.rank(other)
        return excess < before or (excess == before and seconds < slower * (1 - _STEP))

    def _taken(self, job: Job) -> Run | None:
        job = _consistent(job)
        if job not in self._known:
            self._known[job] = None
            with suppress(UsageError):
                run = self.run(job)
                if not SYSTEMS[job.system].refusals(run.job):
                    self._known[job] = run
        return self._known[job]

    def _moves(self, run: Run, axes: bool) -> Iterator[Job]:
        job, layout = run.job, run.job.layout
        plain = replace(layout, stages=())
        cuts: list[PlannedLayout] = [*self._others(plain, axes), *_schedules(plain, job.system)]
        for other, cut in product(cuts, ("even", "balanced") if job.system != "pipeloom" else ("balanced",)):
            yield replace(job, layout=replace(other, cut=cut))
        yield replace(job, sequence=True)
        same = [
            replace(layout, recompute=each, recompute_layers=count) for each, count in _recomputed(layout, job.system)
        ]
        if job.system == "megatron":
            for module, more in product(OFFLOADED, ((), ("core_attn",))):
                same.append(replace(layout, offload=_toggled(layout.offload, (module, *more))))
            groups = (0, 2 * layout.pp) if layout.v > 1 else ()
            same += [replace(layout, group=group) for group in groups]
            same += [replace(layout, zero=1)] * (layout.zero == 0)
            hidden = "overlap_grads", "overlap_params"
            yield replace(job, options=tuple(sorted({*job.options, *hidden[: 1 + (layout.zero > 0)]})))
        yield from (replace(job, layout=other) for other in same)

    def _others(self, plain: PlannedLayout, axes: bool) -> Iterator[PlannedLayout]:
        """Yield the layout itself, and those with other axes or micro-batches, whose stages are cut anew."""
        yield plain
        request = PlanRequest(plain.world, self.memory, plain.sequences, plain.seq, (), recompute=())
        for _, other in steps(plain, request):
            changed = {axis for axis in _AXES if getattr(other, axis) != getattr(plain, axis)}
            if axes or not changed:
                etp = min(plain.etp, 1) if plain.etp != plain.tp else other.tp
                group = plain.group if plain.group and other.pp == plain.pp else 0
                yield replace(other, etp=etp, group=group)
        if plain.micro_batch % 2 == 0:
            yield replace(plain, micro_batch=plain.micro_batch // 2, m=2 * plain.m)


def _of_family(layout: PlannedLayout, order: Schedule | None) -> PlannedLayout:
    """Return the layout with a family that places its stages as the order of a file does (None: it is none's)."""
    if order is None:
        return layout
    if (placed := name_of(order.placement, order.ranks)) not in PLACED:
        raise UsageError(f"{layout.schedule}: a plan has its stages in a line, a loop or a V")
    return replace(layout, schedule=PLACED[placed])


def _schedules(plain: PlannedLayout, system: str) -> Iterator[PlannedLayout]:
    """Yield the layout with each schedule of the system, and each number of chunks."""
    for name in OFFERED[RUNTIME_OF[system]] if plain.pp > 1 else ():
        for v in CHUNKS[name]:
            if (name, v) != (plain.schedule, plain.v) and (name not in OVERLAPPED or plain.ep > 1):
                yield replace(plain, schedule=name, v=v, group=plain.group if v > 1 else 0)


def _recomputed(layout: PlannedLayout, system: str) -> Iterator[tuple[str, int]]:
    """Yield (what is recomputed, of how many blocks of a stage; 0: all)."""
    yield from (("none", 0), ("full", 0))
    if system != "megatron":
        return
    most = max(layout.stages, default=0)
    near = {layout.recompute_layers - 1, layout.recompute_layers + 1} if layout.recompute_layers else {most - 1}
    yield from (("full", count) for count in sorted(near | {1, 2, most // 4, most // 2}) if 0 < count < most)
    yield from ((_toggled(layout.recompute, (part,)), 0) for part in PART_MODULES)


def _frees(layout: PlannedLayout, before: PlannedLayout) -> bool:
    """Return whether more is recomputed or kept on the host than before."""
    pairs = [(layout.offload, before.offload), (layout.recompute, before.recompute)]
    return any(old != "full" and {*new.split("+")} - {*old.split("+"), "none"} for new, old in pairs)


def _toggled(text: str, words: tuple[str, ...]) -> str:
    """Return names joined by "+" with or without all of `words`; "none": no name."""
    names = set(text.split("+")) - {"none", "full"}
    return "+".join(sorted(names - {*words} if {*words} <= names else names | {*words})) or "none"


def _consistent(job: Job) -> Job:
    """Return the job with the options that its schedule and its sizes need."""
    layout, options = job.layout, set(job.options)
    paired = layout.schedule == "interleaved-overlap"
    if job.system == "megatron":
        options = options | {*_PAIRED} if paired else options - {*_PAIRED}
    if layout.zero == 0:
        options -= {"overlap_params"}
    if layout.v == 1:
        options -= {"overlap_warmup"}
    if layout.tp == 1:
        options -= {"overlap_tensor"}
    dispatcher = job.dispatcher if not paired or job.dispatcher not in ("", "allgather") else "alltoall"
    span = job.recompute_span if layout.recompute == "full" and not layout.recompute_layers else 1
    return replace(job, options=tuple(sorted(options)), dispatcher=dispatcher, recompute_span=span)


def _flags(job: Job) -> dict[str, str]:
    """Return flag or key -> its value, as the system's writer has them."""
    values: dict[str, str] = {}
    section = ""
    for line in SYSTEMS[job.system].write(job).splitlines():
        if line.startswith("["):
            section = f"{line.strip('[]')}."
            continue
        word, _, value = line.strip(" \\").partition(" ")
        key = f"{section}{word}"
        if key == "-":
            key = f"- {sum(each.startswith('- ') for each in values)}"
        values[key] = value.removeprefix("= ")
    return values


def changed_flags(job: Job, other: Job) -> dict[str, tuple[str | None, str | None]]:
    """Return flag or key -> (its value before, its value after), for those that differ; None: it is not there."""
    before, after = _flags(job), _flags(other)
    return {
        key: (before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    }


def diff_lines(job: Job, other: Job) -> list[str]:
    """Return the flags that go, behind "-", and those that come, behind "+"."""
    return [
        f"{sign} {key} {value}".rstrip()
        for key, pair in changed_flags(job, other).items()
        for sign, value in zip("-+", pair, strict=True)
        if value is not None
    ]
