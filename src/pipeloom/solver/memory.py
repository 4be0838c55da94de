"""The search within a limit of memory: the order alone, with copies to host memory, with recomputation, then small ones with all.

Each search starts from the best schedule so far and has a share of the budget. Their bound holds for all of them: a micro-batch
holds at least what recomputation needs of it, and neither recomputation nor copies take time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from pipeloom.errors import ArgumentError, CapacityError
from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.actions import SAVED
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.solver.copies import search_with_copies
from pipeloom.solver.driver import SearchDriver
from pipeloom.solver.instance import Instance
from pipeloom.solver.programs import LARGEST_ANNEALED, search_programs
from pipeloom.solver.recompute import search_with_recomputation


def per_rank_limits(placement: Sequence[int], costs: Costs, limits: Sequence[float]) -> Costs:
    """Return costs under which the largest limit on every rank allows what `limits`, one per rank, allow under `costs`.

    An activation counts the more, the less memory its rank has. Times of copies stay. Raises UsageError for another number of
    limits than ranks.
    """
    ranks, stages = max(placement) + 1, len(placement)
    if len(limits) != ranks:
        raise ArgumentError(
            "memory", f" has {len(limits)} values and the schedule {ranks} ranks: give one number or {ranks}"
        )
    # Less by a trifle, so that rounding excludes nothing that fits exactly.
    factors = [max(limits) / limits[rank] * (1 - 1e-12) for rank in placement]
    activation = costs.per_stage("activation", stages)
    sizes = dict(costs.bytes)
    sizes.setdefault(SAVED, costs.saved(stages))
    return replace(costs, activation=tuple(a * f for a, f in zip(activation, factors, strict=True)), bytes=sizes)


def offer_start(driver: SearchDriver, start: Schedule, costs: Costs, limits: Sequence[float]) -> None:
    """Offer a user's own schedule as it is, if it fits `limits`, one per rank."""
    instance = next((each for each in driver.instances if each.placement == start.placement), None)
    if instance is None or instance.microbatches != start.microbatches:
        sizes = f"{start.ranks} ranks, {start.microbatches} micro-batches and the placement {list(start.placement)}"
        raise ArgumentError(
            "start", f" has {sizes:.200}; give the same ranks, microbatches and placement to the search"
        )
    timeline = simulate(start, costs, overlap_p2p=instance.overlap_p2p)
    if all(peak <= limit + TIME_TOLERANCE for peak, limit in zip(timeline.peak_memory, limits, strict=True)):
        driver.incumbent.offer(timeline.value(driver.objective), start.name, instance, start)


def search_within_memory(
    driver: SearchDriver, roomy: Sequence[Instance], seed: int, recomputes: bool, copies: bool
) -> None:
    """Search the order alone, with recomputation and with copies, as far as allowed.

    Args:
        roomy: the instances in which one micro-batch fits as it is.

    Raises CapacityError if no schedule fits the memory.
    """
    budget, incumbent, instances = driver.budget, driver.incumbent, driver.instances
    allowed, span = budget.allowed, budget.deadline - budget.begin
    phases: list[tuple[int, Callable[[], None]]] = []  # (weight, search)
    if roomy:
        driver.instances = roomy
        phases.append((1, driver.run))
    if copies:
        phases.append((2, lambda: search_with_copies(instances, incumbent, budget, driver.given)))
    if recomputes:
        phases.append((1, lambda: search_with_recomputation(instances, incumbent, budget, Random(seed))))
    if instances[0].nodes <= LARGEST_ANNEALED:
        phases.append((6, lambda: search_programs(instances, incumbent, budget, Random(seed), recomputes, copies)))
    done, whole = 0, sum(weight for weight, _ in phases)
    for weight, phase in phases:
        done += weight
        budget.allowed, budget.deadline = allowed * done // whole, budget.begin + span * done / whole
        try:
            phase()
        except CapacityError:
            continue  # of the order alone: what is recomputed or copied may fit
        except KeyboardInterrupt:
            if incumbent.best is None:
                raise
            driver.interrupted = True
        if driver.interrupted or incumbent.proved:
            break
    if incumbent.best is None:
        ways = " or ".join(["recomputation"] * recomputes + ["copies to the host"] * copies)
        raise CapacityError(
            f"memory is {instances[0].memory_limit:g}; no schedule was found that fits it, not with {ways}: "
            "give more memory or fewer chunks"
        )
