"""The search that `[schedule] name = "search"` requests: rank 0 searches, and broadcasts the result to the other ranks.

A search may end by the clock, so searches on several ranks could end with different schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pipeloom import errors
from pipeloom.config import Layout, stage_costs
from pipeloom.errors import PipeloomError
from pipeloom.parallel.exchange import broadcast_json
from pipeloom.schedule import Costs
from pipeloom.train.report import Report
from pipeloom.train.schedule_search.run import SearchOutcome, from_plain, search_for, to_plain
from pipeloom.train.schedule_search.saved import earlier_outcome, fingerprint, report_outcome

if TYPE_CHECKING:
    from pipeloom.train.workers.context import WorkerContext


def resolve_before_start(layout: Layout, context: WorkerContext, report: Report | None) -> Layout:
    """Return `layout` with its searched schedule, if that can be found before the first step: for given costs, or in a saved run.

    Collective; `report` is rank 0's. Return the layout as it is if nothing is searched, or if the costs are to be measured.
    """
    request = layout.search
    if request is None:
        return layout

    def find() -> SearchOutcome | None:
        known = earlier_outcome(layout.config, request, context.device) if request.reuse else None
        if known is not None or request.costs is None:
            return known
        if report is not None:
            report.say("searching for a schedule for the costs given")
        return search_for(request, request.costs, "as given")

    outcome = outcome_of_rank_0(context, find)
    if outcome is None:
        return layout
    if report is not None:
        report_outcome(report, fingerprint(layout.config, context.device), request, outcome)
    return replace(layout, schedule=outcome.schedule, search=None)


def estimated(layout: Layout, context: WorkerContext) -> Layout:
    """Return `layout` with a schedule searched for the given costs, or without any for costs in proportion to the stages' FLOPs.

    For runs of one step, which cannot measure costs first; collective.
    """
    request = layout.search
    if request is None:
        return layout
    stage_times = tuple(float(flops) / 3 for flops in stage_costs(layout.config, layout.stage_layers))
    costs = request.costs or Costs(stage_times, stage_times, stage_times)
    outcome = outcome_of_rank_0(context, lambda: search_for(request, costs, ""))
    assert outcome is not None
    return replace(layout, schedule=outcome.schedule, search=None)


def outcome_of_rank_0(context: WorkerContext, find: Callable[[], SearchOutcome | None]) -> SearchOutcome | None:
    """Call `find` on rank 0, and return its result on every worker; collective."""

    def plain() -> dict[str, Any] | None:
        outcome = find()
        return None if outcome is None else to_plain(outcome)

    result = value_of_rank_0(context, plain)
    return None if result is None else from_plain(result)


def value_of_rank_0(context: WorkerContext, find: Callable[[], Any]) -> Any:
    """Call `find` on rank 0, and return its result, a JSON value, on every worker; collective.

    A PipeloomError of `find` is raised on every worker.
    """
    result: dict[str, Any] = {}
    if context.rank == 0:
        try:
            result["value"] = find()
        except PipeloomError as error:
            result["error"] = [type(error).__name__, str(error)]
    if context.world_size > 1:
        with context.waiting("the schedule that rank 0 searches", "search"):
            result = broadcast_json(result, dist.group.WORLD, 0)
    if "error" in result:
        kind, text = result["error"]
        raise getattr(errors, kind, PipeloomError)(text)
    return result["value"]
