"""A search for the costs measured in the first steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeloom.config import Layout
from pipeloom.runtime import Pipeline
from pipeloom.schedule import Costs, Timeline
from pipeloom.schedule.transforms import half_split
from pipeloom.traces.measured import costs_of
from pipeloom.train.metrics import shared_cores
from pipeloom.train.report import Report
from pipeloom.train.schedule_search.request import outcome_of_rank_0, value_of_rank_0
from pipeloom.train.schedule_search.run import SearchOutcome, search_for
from pipeloom.train.schedule_search.saved import fingerprint, report_outcome, save_outcome
from pipeloom.train.schedule_search.trial import ABTrial

if TYPE_CHECKING:
    from pipeloom.train.context import WorkerContext


class MeasureThenSearch:
    """The first steps of a run with a search: the measured steps, the search, and the trial of its outcome against the family."""

    def __init__(self, layout: Layout, pipeline: Pipeline, context: WorkerContext, report: Report | None) -> None:
        assert layout.search is not None
        self._request = layout.search
        self._uneven = len(set(layout.microbatch_sizes)) > 1
        self._key = fingerprint(layout.config, context.device)
        self._pipeline, self._context, self._report = pipeline, context, report
        self._timelines: list[Timeline] = []
        self._outcome: SearchOutcome | None = None
        self._trial: ABTrial | None = None

    def after_step(self) -> bool:
        """Record the last step, and adopt the schedule of the next; collective. Return True once that is the final one."""
        if self._trial is not None:
            return self._after_trial_step(self._trial)
        self._timelines.append(self._pipeline.timeline())
        steps, count = len(self._timelines), self._request.measure
        if steps < count:
            # Half of the backwards are split in one step and the others in the next, so that every micro-batch is measured
            # both as B and as I and W, and uneven micro-batches bias neither.
            self._pipeline.adopt(half_split(self._request.family, steps))
            return False
        steady = self._timelines[1:]  # the first step includes warm-up
        words = f"measured in steps 2 to {count}"
        if self._report is not None:
            crowded = shared_cores(self._context.world_size, self._context.device)
            self._report.say(
                "searching for a schedule for the measured costs"
                + (f" ({crowded}: CPU cores are oversubscribed, so these include waits for a core)" * bool(crowded))
            )
        outcome = outcome_of_rank_0(self._context, lambda: search_for(self._request, self._costs(steady), words))
        assert outcome is not None
        self._pipeline.adopt(outcome.schedule)
        if self._report is not None:
            report_outcome(self._report, self._key, self._request, outcome)
        family = self._request.family
        if not self._request.trial or outcome.schedule.programs == family.programs:
            return True
        self._outcome = outcome
        self._trial = ABTrial((outcome.schedule, family), self._request.trial, outcome.objective)
        return False

    def _costs(self, steady: Sequence[Timeline]) -> Costs:
        """Return the fitted costs, with factors only for micro-batches that differ in rows: any others are noise."""
        costs = costs_of(steady)
        return costs if self._uneven else replace(costs, microbatch=())

    def _after_trial_step(self, trial: ABTrial) -> bool:
        assert self._outcome is not None
        trial.note(self._pipeline.timeline())
        if trial.next is not None:
            self._pipeline.adopt(trial.next)
            return False
        searched, of_family = value_of_rank_0(self._context, trial.medians)
        outcome, family = self._outcome, self._request.family
        falls_back = of_family < searched
        if falls_back:
            outcome = replace(outcome, schedule=family, value=outcome.baseline)
        self._pipeline.adopt(outcome.schedule)
        if self._report is not None:
            winner = family.name if falls_back else "the searched one"
            self._report.record("trial", searched=searched, family=of_family, kept=outcome.schedule.name)
            self._report.say(
                f"tried in turn, {self._request.trial} steps each: searched {searched * 1e3:.1f} ms, {family.name} "
                f"{of_family * 1e3:.1f} ms (medians); {winner} stays"
            )
            if falls_back:  # the search saved the schedule that is now dropped
                save_outcome(self._report, self._key, self._request, outcome)
        return True
