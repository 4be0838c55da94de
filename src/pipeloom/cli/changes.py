"""Schedules in place of a measured one, on its placement and within a memory: of `improve` and `show --search`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipeloom.draw.figures import in_columns, number
from pipeloom.errors import PipeloomError
from pipeloom.schedule import Costs, Schedule, Timeline, simulate
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.check import check
from pipeloom.schedule.families import ONE_ROUTE, build
from pipeloom.schedule.placement import name_of
from pipeloom.schedule.transforms import split_cooldown
from pipeloom.solver.order import search_order
from pipeloom.traces.measured import Prediction, settled, with_overhead

LEAST_SAVED = 0.01  # of a measured step: less is within the noise of its actions
_AS_SHORT = 1e-3  # share of a step by which a schedule with a name may be longer than a searched one, and be chosen


@dataclass(frozen=True)
class Change:
    """A schedule, simulated with measured costs.

    Attributes:
        words: how to get it.
        makespan: seconds.
        peak: the most stage-micro-batches alive on a rank, or bytes.
    """

    words: str
    schedule: Schedule
    makespan: float
    peak: float

    @classmethod
    def of(cls, words: str, timeline: Timeline) -> Change:
        return cls(words, timeline.schedule, timeline.makespan, max(timeline.peak_memory))


@dataclass(frozen=True)
class Alternatives:
    """A measured schedule, and others in its place.

    Attributes:
        now: the measured schedule.
        changes: what fits into the memory, simple ones first; the measured schedule is the first if it does.
        split: the best with backwards split, where the measured schedule has them whole and `changes` leave them so.
        in_bytes: whether peaks are bytes.
    """

    now: Change
    changes: Sequence[Change]
    split: Change | None
    in_bytes: bool

    @property
    def best(self) -> Change | None:
        """The change to make; None where the measured schedule fits and nothing saves enough."""
        least = min(each.makespan for each in self.changes)
        best = next(each for each in self.changes if each.makespan <= least + _AS_SHORT * self.now.makespan)
        return best if self.now not in self.changes or self.saved(best) >= LEAST_SAVED else None

    def saved(self, change: Change) -> float:
        """Return the share of the step that a change saves."""
        return 1 - change.makespan / self.now.makespan if self.now.makespan else 0.0

    def assumptions(self) -> str:
        """Return in words what the search takes for granted."""
        schedule = self.now.schedule
        where = name_of(schedule.placement, schedule.ranks) or ",".join(map(str, schedule.placement))
        split = "I and W as measured (half of B each where it never ran split)"
        return f"the same placement ({where}), {split}, and activations held until W"

    def values(self) -> dict[str, object]:
        """Return the JSON form."""

        def plain(each: Change | None) -> dict[str, object] | None:
            if each is None:
                return None
            return {"change": each.words, "makespan": each.makespan, "peak": each.peak, "saved": self.saved(each)}

        return {
            "now": plain(self.now),
            "changes": [plain(each) for each in self.changes],
            "best": plain(self.best),
            "split": plain(self.split),
            "assumptions": self.assumptions(),
        }

    def lines(self, factor: float, unit: str) -> list[str]:
        """Return a table, the change to make, and what is assumed; `factor`: seconds in `unit`."""

        def row(each: Change) -> list[str]:
            peak = size_words(each.peak) if self.in_bytes else number(each.peak)
            return [each.words, number(each.makespan * factor), f"{100 * self.saved(each):.1f} %", peak]

        ordered = sorted((each for each in self.changes if each is not self.now), key=lambda each: each.makespan)
        lines = in_columns([["simulated", f"step, {unit}", "saved", "peak"], *map(row, [self.now, *ordered])])
        if self.best is None:
            lines.append(f"nothing worth changing: no schedule within this memory saves {100 * LEAST_SAVED:.0f} %")
        else:
            lines.append(f"change: {self.best.words}, which saves {100 * self.saved(self.best):.1f} % of the step")
        if self.split is not None and self.saved(self.split) >= LEAST_SAVED:
            saved = f"saves {100 * self.saved(self.split):.1f} % if each takes half of B (--split)"
            lines.append(f"with backwards split into I and W: {self.split.words}, which {saved}")
        counted = "predicted bytes of activations" if self.in_bytes else "stage-micro-batches"
        return [*lines, f"the peak counts {counted}; assumed:", f"  {self.assumptions()}"]


def compare(
    steps: Sequence[Timeline],
    prediction: Prediction,
    memory: Sequence[float] | None,
    seconds: float,
    split: bool = False,
) -> Alternatives:
    """Compare the measured schedule with families, transforms and the result of a search.

    Args:
        steps: the last of which has the schedule.
        prediction: of the steps, with their costs.
        memory: rank -> the largest peak of memory, in units of `Costs.activation`; None: the measured schedule's.
        seconds: of the search.
        split: whether backwards may be split that the measured schedule has whole.
    """
    # Micro-batches count as alike: how long each of the next step's takes is not known, and torch's runtime keeps their order.
    schedule = settled(steps)[-1].schedule
    costs = with_overhead(replace(prediction.costs, microbatch=()), settled(steps))
    timeline = simulate(schedule, costs)
    now = Change.of("the measured schedule", timeline)
    limits = (now.peak,) * schedule.ranks if memory is None else tuple(memory)

    def fits(run: Timeline) -> bool:
        return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(run.peak_memory, limits, strict=True))

    whole = not schedule.splits_backward
    changes, splits = [now] if fits(timeline) else [], list[Change]()
    for words, other in _others(schedule, costs):
        with suppress(PipeloomError):  # a family that these costs or sizes do not suit
            check(other)
            run = simulate(other, costs)
            if fits(run):
                (splits if whole and other.splits_backward else changes).append(Change.of(words, run))
    turns = (True, False) if whole and not split else (False,)
    for wholly in turns:
        share = seconds / len(turns)
        best = search_order(schedule.microbatches, costs, limits, schedule.placement, share, whole=wholly)
        (splits if whole and not wholly else changes).append(Change.of("searched", simulate(best, costs)))
    if split:
        return Alternatives(now, [*changes, *splits], None, bool(costs.bytes))
    return Alternatives(now, changes, min(splits, key=lambda each: each.makespan, default=None), bool(costs.bytes))


def _others(schedule: Schedule, costs: Costs) -> Iterator[tuple[str, Schedule]]:
    """Yield (words, schedule) of transforms of the schedule and of the families of one route on its placement."""
    if len(schedule.routes) > 1:
        return
    with suppress(PipeloomError):  # one that is split already
        yield "transform split_cooldown", split_cooldown(schedule)
    place = name_of(schedule.placement, schedule.ranks)
    for name in ONE_ROUTE.get(place or "", ()):
        try:
            other = build(name, schedule.ranks, schedule.microbatches, schedule.chunks, {}, costs)
        except PipeloomError:
            continue
        if other.placement == schedule.placement and other.codes != schedule.codes:
            yield f"family {name}", other
