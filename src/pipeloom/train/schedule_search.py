"""`[schedule] name = "search"` in training: costs given, or measured in the first steps; one search; one schedule for all ranks.

A search may end by the clock, so searches on several ranks could end with different schedules: rank 0 searches, and broadcasts
the result to the other ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.config import Config, Layout, stage_costs
from pipeloom.config.layout import stage_sizes
from pipeloom.config.search import SearchRequest
from pipeloom.errors import CapacityError, PipeloomError
from pipeloom.limits import expanded
from pipeloom.measure.device_profile import measured_costs, profiled, searched_bytes, split_layer_bytes
from pipeloom.parallel.exchange import broadcast_json
from pipeloom.runtime import Pipeline
from pipeloom.schedule import Costs, Schedule, Timeline, check, simulate
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.costs import DEVICE, TIME_TOLERANCE
from pipeloom.schedule.json_form import from_json, to_dict
from pipeloom.schedule.model import places_of
from pipeloom.schedule.transforms import half_split
from pipeloom.traces.measured import costs_of
from pipeloom.train.report.metrics import shared_cores
from pipeloom.train.report.report import Report, reported
from pipeloom.train.workers.context import WorkerContext


@dataclass(frozen=True)
class SearchOutcome:
    """A searched schedule beside the family that it is compared with.

    Attributes:
        schedule: the schedule to run.
        costs: the costs that it was searched for.
        objective: quantity that `value`, `baseline` and `lower_bound` give, in the unit of the costs.
        value: objective of `schedule`, simulated with the costs.
        was: objective of the family, simulated with the costs.
        lower_bound: bound on the objective for schedules within the memory, on the placements searched.
        source: origin of the costs, in words.
        seconds: duration of the search; 0 for an outcome reused from an earlier run.
        stage_layers: the cut of the model into stages, where that was searched; else empty.
    """

    schedule: Schedule
    costs: Costs
    objective: str
    value: float
    was: float
    lower_bound: float
    source: str
    seconds: float = 0.0
    stage_layers: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """Return value / lower bound - 1, or 0 without a bound."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0


# Attributes of an outcome that the log and the saved file have too.
_FIGURES = ("was", "objective", "value", "lower_bound", "source", "seconds", "stage_layers")


def to_plain(request: SearchRequest, outcome: SearchOutcome) -> dict[str, Any]:
    """Return `outcome` as JSON can hold it: the form of its schedule, and under `searched` the figures for the log."""
    figures = {name: getattr(outcome, name) for name in _FIGURES}
    figures |= {"family": request.family.name, "gap": outcome.gap, "memory": request.memory}
    return to_dict(outcome.schedule) | {"searched": {**figures, "costs": set_fields(outcome.costs)}}


def from_plain(plain: Mapping[str, Any]) -> SearchOutcome:
    """Invert `to_plain`. Of a schedule's options, those that its JSON form does not hold are lost."""
    figures = plain["searched"]
    values: dict[str, Any] = {name: figures[name] for name in _FIGURES}
    values["stage_layers"] = tuple(values["stage_layers"])
    return SearchOutcome(from_json(json.dumps(plain)), Costs(**figures["costs"]), **values)


def search_for(
    request: SearchRequest,
    costs: Costs,
    source: str,
    cut: Sequence[int] = (),
    costs_of: Callable[[tuple[int, ...]], Costs] | None = None,
) -> SearchOutcome:
    """Search for `request`: the best schedule found for `costs`, or the request's family where that is as good.

    Args:
        cut: stage -> its layers, from which cuts are searched too, for a limit in bytes.
        costs_of: the costs of other cuts; None: `cut` stays.

    Raises UsageError for costs of another number of stages, CapacityError if no schedule fits into the memory.
    """
    from pipeloom.solver import search
    from pipeloom.solver.in_bytes import search_cuts_in_bytes, search_in_bytes
    from pipeloom.solver.merge_backward import merge_backwards

    family, objective = request.family, request.objective
    baseline = value_of(family, costs, objective)
    sizes, best_cut = (request.ranks, request.microbatches), tuple(cut)
    limits: dict[str, Any] = request.options.model_dump(include={"time_limit", "iterations", "seed"})
    limits |= {"placement": request.placement, "chunks": request.chunks, "objective": objective}
    try:
        if costs_of is not None:
            best_cut, result = search_cuts_in_bytes(best_cut, costs_of, *sizes, request.memory, **limits)
            costs = costs_of(best_cut)
        elif request.in_bytes:
            result = search_in_bytes(*sizes, costs, request.memory, **limits)
        else:
            result = search(*sizes, costs, memory_limit(request, costs), **limits)
    except CapacityError:
        if not fits(request, family, costs):
            raise
        return SearchOutcome(family, costs, objective, baseline, baseline, 0.0, source)
    if result.interrupted:
        raise KeyboardInterrupt
    named = [family, merge_backwards(family, costs, objective)]
    candidates = [*(schedule for schedule in named if fits(request, schedule, costs)), result.schedule]
    best = min(candidates, key=lambda schedule: value_of(schedule, costs, objective))
    value = value_of(best, costs, objective)
    bound = min(value, result.lower_bound)
    return SearchOutcome(best, costs, objective, value, baseline, bound, source, result.seconds, best_cut)


def memory_limit(request: SearchRequest, costs: Costs) -> float:
    """Return the limit of a request for micro-batches of these sizes: as many of the largest ones."""
    return request.memory * max(costs.microbatch, default=1.0)


def fits(request: SearchRequest, schedule: Schedule, costs: Costs) -> bool:
    """Return whether a schedule fits the memory of a request on every rank."""
    timeline = simulate(schedule, costs)
    if request.in_bytes:
        return max(timeline.peak_bytes[DEVICE]) <= request.memory
    return max(timeline.peak_memory) <= memory_limit(request, costs) + TIME_TOLERANCE


def value_of(schedule: Schedule, costs: Costs, objective: str) -> float:
    """Return the makespan or the largest span, whichever is the objective, of a simulated step."""
    return simulate(schedule, costs).value(objective)


FILE = "schedule.json"


def fingerprint(config: Config, device: torch.device) -> str:
    """Return a hash of the version, the device's name and the settings that the costs and the schedule depend on."""
    from pipeloom import __version__

    schedule = config.schedule.model_dump()
    schedule["options"] = {key: value for key, value in schedule["options"].items() if key != "reuse"}
    train = config.train
    facts = [
        __version__,
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        config.model.model_dump(),
        config.parallel.model_dump(),
        schedule,
        {key: value for key, value in train.model_dump().items() if key not in ("steps", "seed", "timeout")},
        config.optimizer.barrier,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def earlier_outcome(config: Config, request: SearchRequest, device: torch.device) -> SearchOutcome | None:
    """Return the outcome of the latest run with the same `fingerprint` that fits the request; None if there is none."""
    key = fingerprint(config, device)
    for path in sorted(expanded(config.log.dir).glob(f"*/{FILE}"), reverse=True):
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["searched"]["fingerprint"] != key:
                continue
            outcome = from_plain(saved)
            schedule = outcome.schedule
            check(schedule)
            same_sizes = schedule.ranks == request.ranks and schedule.microbatches == request.microbatches
            if same_sizes and fits(request, schedule, outcome.costs):
                source = f"and schedule of {path}, as schedule.options.reuse allows"
                return replace(outcome, source=source, seconds=0.0)
        except (OSError, ValueError, KeyError, TypeError, PipeloomError):  # not written by a search, or damaged
            continue
    return None


def report_outcome(report: Report, key: str, request: SearchRequest, outcome: SearchOutcome) -> None:
    """Print and record the outcome, and save it in the run's folder; `key` is the run's `fingerprint`."""
    report.record("search", **to_plain(request, outcome)["searched"])
    path = save_outcome(report, key, request, outcome)
    word = "makespan" if outcome.objective == "makespan" else "largest span"
    report.say(
        f"searched schedule: {word} {_time(outcome.value, request)}, was {_time(outcome.was, request)} with "
        f"{request.family.name}, bound {_time(outcome.lower_bound, request)}, gap {100 * outcome.gap:.1f} % "
        f"(costs {outcome.source}" + (f"; searched for {outcome.seconds:.1f} s" if outcome.seconds else "") + ")"
    )
    if request.in_bytes:
        report.say(f"  {_bytes_words(request, outcome)}")
    report.say(f"  saved to {path}; reuse it with --schedule.name {path}")


def save_outcome(report: Report, key: str, request: SearchRequest, outcome: SearchOutcome) -> Path:
    """Write the schedule into the run's folder, with everything that a later run needs to reuse it; return the file."""
    path = report.folder.root / FILE
    saved = to_plain(request, outcome)
    saved["searched"]["fingerprint"] = key
    path.write_text(json.dumps(saved, allow_nan=False) + "\n", encoding="utf-8")
    return path


def set_fields(costs: Costs) -> dict[str, Any]:
    """Return the fields of `costs` that differ from the default."""
    return {each.name: value for each in fields(Costs) if (value := getattr(costs, each.name)) != each.default}


def _bytes_words(request: SearchRequest, outcome: SearchOutcome) -> str:
    """Return the bytes of the fullest rank under both schedules, and how much is recomputed and copied, in words."""
    schedule = outcome.schedule
    peak, of_family = (max(simulate(each, outcome.costs).peak_bytes[DEVICE]) for each in (schedule, request.family))
    copied = sum(map(len, places_of(schedule, "O").values()))
    return (
        f"at most {size_words(peak)} of {size_words(request.memory)} per device ({request.family.name}: "
        f"{size_words(of_family)}); of {schedule.stages * schedule.microbatches} stage-micro-batches {len(schedule._remade)} "
        f"are recomputed, {copied} copied to host memory"
    )


def _time(value: float, request: SearchRequest) -> str:
    return f"{value:.6g}" if request.costs is not None else f"{value * 1e3:.1f} ms"


def resolve_before_start(layout: Layout, context: WorkerContext, report: Report | None) -> Layout:
    """Return `layout` with its searched schedule, if that can be found before the first step: for given costs, within bytes, or
    in a saved run.

    Collective; `report` is rank 0's. Return the layout as it is if nothing is searched, or if the costs are measured in steps.
    """
    request = layout.search
    if request is None:
        return layout
    outcome = None
    if request.options.reuse:
        outcome = outcome_of_rank_0(context, request, lambda: earlier_outcome(layout.config, request, context.device))
    if outcome is None and request.before_start:
        costs, source, costs_of = _costs_before_start(layout, request, context, report)

        def find() -> SearchOutcome:
            if report is not None:
                report.say(f"searching for a schedule for the costs {source}")
            return search_for(request, costs, source, layout.stage_layers if costs_of is not None else (), costs_of)

        outcome = outcome_of_rank_0(context, request, find)
    if outcome is None:
        return layout
    if report is not None:
        report_outcome(report, fingerprint(layout.config, context.device), request, outcome)
        if outcome.stage_layers:
            report.say(f"    and --parallel.stages '{_stages_text(layout, outcome.stage_layers)}'")
    return replace(
        layout, schedule=outcome.schedule, search=None, stage_layers=outcome.stage_layers or layout.stage_layers
    )


def _stages_text(layout: Layout, cut: Sequence[int]) -> str:
    """Return a cut as `parallel.stages` has it, such as Ett|ttL."""
    letters = "".join(size.letter for size in stage_sizes(layout.config))
    return "|".join(letters[start:end] for start, end in pairwise(accumulate(cut, initial=0)))


PROFILE_REPEATS = 5
"""Steps of the layers that are measured before a search within bytes: medians of fewer are unsteady, more take longer."""


def _costs_before_start(
    layout: Layout, request: SearchRequest, context: WorkerContext, report: Report | None
) -> tuple[Costs, str, Callable[[tuple[int, ...]], Costs] | None]:
    """Return the costs of a search before the first step, given or measured, with bytes where they limit it; their source; and
    where layers are measured and `parallel.stages` is not set, the costs of any cut of the model into stages.
    """
    if request.costs is not None:
        costs = request.costs
        if request.in_bytes:  # R takes the time of F
            sizes = searched_bytes(layout, split_layer_bytes(layout), context.device.type)
            costs = replace(costs, recompute=costs.forward, bytes=sizes.bytes, microbatch=sizes.microbatch)
        return costs, "as given", None
    if report is not None:
        report.say("measuring a layer of each kind, to search for a schedule")
    with torch.random.fork_rng([]):
        profile = profiled(layout, context.device, PROFILE_REPEATS, context.waiting)

    def costs_of(cut: tuple[int, ...]) -> Costs:
        return measured_costs(replace(layout, stage_layers=cut), profile)

    words = "measured in a layer of each kind"
    return costs_of(layout.stage_layers), words, None if layout.config.parallel.stages else costs_of


def estimated(layout: Layout, context: WorkerContext) -> Layout:
    """Return `layout` with a schedule searched for the given costs, or without any for costs in proportion to the stages' FLOPs.

    For runs of one step, which cannot measure costs first; collective.
    """
    request = layout.search
    if request is None:
        return layout
    times = tuple(float(flops) / 3 for flops in stage_costs(layout.config, layout.stage_layers))
    options = request.options.model_copy(update={"reuse": False})
    given = replace(request, costs=request.costs or Costs(times, times, times), options=options)
    return resolve_before_start(replace(layout, search=given), context, None)


def outcome_of_rank_0(
    context: WorkerContext, request: SearchRequest, find: Callable[[], SearchOutcome | None]
) -> SearchOutcome | None:
    """Call `find` on rank 0, and return its result on every worker; collective."""

    def plain() -> dict[str, Any] | None:
        outcome = find()
        return None if outcome is None else to_plain(request, outcome)

    result = value_of_rank_0(context, plain)
    return None if result is None else from_plain(result)


def value_of_rank_0(context: WorkerContext, find: Callable[[], Any]) -> Any:
    """Call `find` on rank 0, and return its result, a JSON value, on every worker; collective."""
    value = find() if context.rank == 0 else None
    if context.world_size == 1:
        return value
    with context.waiting("the schedule that rank 0 searches", "search"):
        return broadcast_json(value, dist.group.WORLD, 0)


def trial_medians(steps: Sequence[float]) -> tuple[float, float]:
    """Return the medians of two schedules that were tried in alternating steps, because a simulation leaves out effects on caches
    and cores; without each one's first step, which allocates buffers, unless it is the only one."""
    first, second = (steps[at::2] for at in (0, 1))
    return median(first[1:] or first), median(second[1:] or second)


def fitted_costs(steps: Sequence[Timeline], rows: Sequence[int]) -> Costs:
    """Return the costs fitted to `steps`, with the micro-batches' rows as factors, which weigh memory too; measured ones are
    noisy.
    """
    sizes = rows if len(set(rows)) > 1 else ()
    return replace(costs_of(steps), microbatch=tuple(size * len(sizes) / sum(sizes) for size in sizes))


class MeasureThenSearch:
    """The first steps of a run with a search: the measured steps, the search, and the trial of its outcome against the family."""

    def __init__(self, layout: Layout, pipeline: Pipeline, context: WorkerContext, report: Report | None) -> None:
        assert layout.search is not None
        self._request = layout.search
        self._sizes = layout.microbatch_sizes
        self._key = fingerprint(layout.config, context.device)
        self._pipeline, self._context, self._report = pipeline, context, reported(report)
        self._timelines: list[Timeline] = []
        self._outcome: SearchOutcome | None = None
        self._tried: list[float] = []  # trial steps of the searched schedule and of the family, in turn

    def after_step(self) -> bool:
        """Record the last step, and adopt the schedule of the next; collective. Return True once that is the final one."""
        if self._outcome is not None:
            return self._after_trial_step(self._outcome)
        self._timelines.append(self._pipeline.timeline())
        steps, count = len(self._timelines), self._request.options.measure
        if steps < count:
            # Half of the backwards are split in one step and the others in the next, so that every micro-batch is measured
            # both as B and as I and W, and uneven micro-batches bias neither.
            self._pipeline.adopt(half_split(self._request.family, steps))
            return False
        steady = self._timelines[1:]  # the first step includes warm-up
        words = f"measured in steps 2 to {count}"
        crowded = shared_cores(self._context.world_size, self._context.device)
        waits = f" ({crowded}: CPU cores are oversubscribed, so these include waits for a core)" if crowded else ""
        self._report.say(f"searching for a schedule for the measured costs{waits}")
        outcome = outcome_of_rank_0(
            self._context, self._request, lambda: search_for(self._request, fitted_costs(steady, self._sizes), words)
        )
        assert outcome is not None
        self._pipeline.adopt(outcome.schedule)
        if self._context.rank == 0:
            report_outcome(self._report, self._key, self._request, outcome)
        family = self._request.family
        if not self._request.trial or outcome.schedule.programs == family.programs:
            return True
        self._outcome = outcome
        return False

    def _after_trial_step(self, outcome: SearchOutcome) -> bool:
        family = self._request.family
        self._tried.append(self._pipeline.timeline().value(outcome.objective))
        if len(self._tried) < 2 * self._request.trial:
            self._pipeline.adopt((outcome.schedule, family)[len(self._tried) % 2])
            return False
        searched, of_family = value_of_rank_0(self._context, lambda: trial_medians(self._tried))
        falls_back = of_family < searched
        if falls_back:
            outcome = replace(outcome, schedule=family, value=outcome.was)
        self._pipeline.adopt(outcome.schedule)
        winner = family.name if falls_back else "the searched one"
        self._report.record("trial", searched=searched, family=of_family, kept=outcome.schedule.name)
        self._report.say(
            f"tried in turn, {self._request.trial} steps each: searched {searched * 1e3:.1f} ms, {family.name} "
            f"{of_family * 1e3:.1f} ms (medians); {winner} stays"
        )
        if falls_back and self._context.rank == 0:  # the search saved the schedule that is now dropped
            save_outcome(self._report, self._key, self._request, outcome)
        return True
