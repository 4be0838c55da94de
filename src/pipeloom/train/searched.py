"""`[schedule] name = "search"` in training: costs given, or measured in the first steps; one search; one schedule for all.

Rank 0 searches and every other rank gets the result, so that what a clock decides is decided once. The schedule is kept in
the run's folder, as `schedule.json`, and an earlier run's is taken over where everything that it depends on is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from pipeloom.config import Config, Layout, stage_costs
from pipeloom.config.first_schedule import half_split
from pipeloom.config.search import SearchRequest
from pipeloom.errors import PipeloomError
from pipeloom.runtime import Pipeline
from pipeloom.schedule import Costs, Schedule, Timeline, check, simulate
from pipeloom.schedule.files import load
from pipeloom.schedule.json_form import to_dict
from pipeloom.train.find import EPS, Found, find_schedule, value_of
from pipeloom.train.measured import costs_of
from pipeloom.train.metrics import shared_cores
from pipeloom.train.report import Report

if TYPE_CHECKING:
    from pipeloom.train.worker import WorkerContext

T = TypeVar("T")
FILE = "schedule.json"


def settle(layout: Layout, context: WorkerContext, report: Report | None) -> Layout:
    """`layout` with its searched schedule, if that can be known before the first step: for given costs, or by an earlier run.

    Every worker calls it; `report` is rank 0's. The layout as it is when nothing is searched, or costs are to be measured.
    """
    request = layout.search
    if request is None:
        return layout

    def find() -> Found | None:
        known = _earlier(layout.config, request, context.device) if request.reuse else None
        if known is not None or request.costs is None:
            return known
        if report is not None:
            report.say("searching a schedule for the costs given")
        return find_schedule(request, request.costs, "as given", layout.config.schedule.transport)

    found = _by_rank_0(context, find)
    if found is None:
        return layout
    if report is not None:
        _tell(report, (layout.config, context.device), request, found)
    return replace(layout, schedule=found.schedule, search=None)


def estimated(layout: Layout, context: WorkerContext) -> Layout:
    """`layout` with a schedule searched for the costs given, else for the layers' operations: for what runs one step only."""
    request = layout.search
    if request is None:
        return layout
    each = tuple(float(flops) / 3 for flops in stage_costs(layout.config, layout.stage_layers))
    costs = request.costs or Costs(each, each, each)
    found = _by_rank_0(context, lambda: find_schedule(request, costs, "", layout.config.schedule.transport))
    return replace(layout, schedule=found.schedule, search=None)


class Trial:
    """Two schedules that take a step each in turn. A simulation does not know what an order does to caches and cores."""

    def __init__(self, schedules: tuple[Schedule, Schedule], count: int, objective: str) -> None:
        self.schedules = schedules
        self._count, self._objective = count, objective
        self._values: list[float] = []

    @property
    def next(self) -> Schedule | None:
        """Whose turn it is; None when each has had `count`."""
        made = len(self._values)
        return self.schedules[made % 2] if made < 2 * self._count else None

    def note(self, step: Timeline) -> None:
        self._values.append(step.value(self._objective))

    def medians(self) -> tuple[float, float]:
        """Of each one's steps but the first, in which buffers are made, unless it is the only one."""
        first, second = (self._values[at::2] for at in (0, 1))
        return median(first[1:] or first), median(second[1:] or second)


class Measuring:
    """The first steps of a search: those measured, the search, and the trial of what was found beside the family."""

    def __init__(self, layout: Layout, pipeline: Pipeline, context: WorkerContext, report: Report | None) -> None:
        assert layout.search is not None
        self._request = layout.search
        self._config = layout.config
        self._pipeline, self._context, self._report = pipeline, context, report
        self._timelines: list[Timeline] = []
        self._found: Found | None = None
        self._trial: Trial | None = None

    def after_step(self) -> bool:
        """Looks at the step just made, collectively; True when the pipeline has its schedule, and nothing is left to do."""
        if self._trial is not None:
            return self._after_trial_step(self._trial)
        self._timelines.append(self._pipeline.timeline())
        made, count = len(self._timelines), self._request.measure
        if made < count:
            # the other half of the backwards in turn, so that uneven micro-batches favour neither B nor I and W
            self._pipeline.adopt(half_split(self._request.family, made))
            return False
        settled = self._timelines[1:]  # things still warm up in the first
        words = f"measured in steps 2 to {count}"
        transport = self._config.schedule.transport
        if self._report is not None:
            crowded = shared_cores(self._context.world_size, self._context.device)
            self._report.say(
                "searching a schedule for the measured costs"
                + (f" ({crowded}: they hold waits for cores)" * bool(crowded))
            )
        found = _by_rank_0(self._context, lambda: find_schedule(self._request, costs_of(settled), words, transport))
        self._pipeline.adopt(found.schedule)
        if self._report is not None:
            _tell(self._report, (self._config, self._context.device), self._request, found)
        family = self._request.family
        if not self._request.trial or found.schedule.programs == family.programs:
            return True
        self._found = found
        self._trial = Trial((found.schedule, family), self._request.trial, found.objective)
        return False

    def _after_trial_step(self, trial: Trial) -> bool:
        assert self._found is not None
        trial.note(self._pipeline.timeline())
        if trial.next is not None:
            self._pipeline.adopt(trial.next)
            return False
        searched, usual = _by_rank_0(self._context, trial.medians)
        found, family = self._found, self._request.family
        falls = usual < searched
        if falls:
            found = replace(found, schedule=family, value=found.was)
        self._pipeline.adopt(found.schedule)
        if self._report is not None:
            kept = family.name if falls else "the searched one"
            self._report.record("trial", searched=searched, family=usual, kept=found.schedule.name)
            self._report.say(
                f"tried in turn, {self._request.trial} steps each: searched {searched * 1e3:.1f} ms, {family.name} "
                f"{usual * 1e3:.1f} ms (medians); {kept} stays"
            )
            if falls:  # the other one is there since the search
                _keep(self._report, (self._config, self._context.device), self._request, found)
        return True


def _by_rank_0(context: WorkerContext, find: Callable[[], T]) -> T:
    """What `find` returns on rank 0, on every worker; a PipeloomError that it raises there is raised everywhere."""
    box: list[Any] = [None, None]
    if context.rank == 0:
        try:
            box[0] = find()
        except PipeloomError as error:
            box[1] = error
    if context.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    found: T = box[0]
    return found


def fingerprint(config: Config, device: torch.device) -> str:
    """Of all that costs and schedule depend on, as far as it is known."""
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


def _earlier(config: Config, request: SearchRequest, device: torch.device) -> Found | None:
    """What an earlier run with these settings found, the latest first; None without one."""
    key = fingerprint(config, device)
    for path in sorted(Path(config.log.dir).expanduser().glob(f"*/{FILE}"), reverse=True):
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))["searched"]
            if kept["fingerprint"] != key:
                continue
            schedule = load(path)
            costs = Costs(**kept["costs"])
            check(schedule)
            if schedule.ranks != request.ranks or schedule.microbatches != request.microbatches:
                continue
            if max(simulate(schedule, costs).peak_memory) > request.memory + EPS:
                continue
            value, was = (
                value_of(schedule, costs, request.objective),
                value_of(request.family, costs, request.objective),
            )
            return Found(
                schedule,
                costs,
                request.objective,
                value,
                was,
                float(kept["lower_bound"]),
                f"and schedule of {path}, as schedule.options.reuse allows",
            )
        except (OSError, ValueError, KeyError, TypeError, PipeloomError):  # not one of ours, or damaged
            continue
    return None


def _tell(report: Report, place: tuple[Config, torch.device], request: SearchRequest, found: Found) -> None:
    """Says what was found, and keeps it in the run's folder."""
    report.record("search", **_facts(request, found))
    path = _keep(report, place, request, found)
    word = "makespan" if found.objective == "makespan" else "largest span"
    report.say(
        f"searched schedule: {word} {_time(found.value, request)}, was {_time(found.was, request)} with "
        f"{request.family.name}, bound {_time(found.lower_bound, request)}, gap {100 * found.gap:.1f} % "
        f"(costs {found.source}" + (f"; searched for {found.seconds:.1f} s" if found.seconds else "") + ")"
    )
    report.say(f"  kept in {path}: a run with that as its schedule.name starts with it")


def _keep(report: Report, place: tuple[Config, torch.device], request: SearchRequest, found: Found) -> Path:
    """Writes the schedule into the run's folder, with all that a later run needs to take it over."""
    path = report.folder.root / FILE
    kept = to_dict(found.schedule) | {"searched": _facts(request, found) | {"fingerprint": fingerprint(*place)}}
    path.write_text(json.dumps(kept, allow_nan=False) + "\n", encoding="utf-8")
    return path


def _facts(request: SearchRequest, found: Found) -> dict[str, Any]:
    return {
        "objective": found.objective,
        "value": found.value,
        "was": found.was,
        "family": request.family.name,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "memory": request.memory,
        "source": found.source,
        "costs": {
            name: value
            for name, value in asdict(found.costs).items()
            if name in ("forward", "input_grad", "weight_grad", "backward", "p2p", "held") and value is not None
        },
    }


def _time(value: float, request: SearchRequest) -> str:
    return f"{value:.6g}" if request.costs is not None else f"{value * 1e3:.1f} ms"
