"""The search for what to copy to host memory: orders constructed beside the queues of the copies, and then simulated with them.

A rank's memory holds what its forwards have saved until it is copied, what is copied back for the next backwards, and what its
weight gradients wait for. `_Construction` follows an order of forwards and input gradients, the families' and those of the
search, and runs a forward once it fits beside these, and a weight gradient where the rank would wait or needs its memory. Copies
back are added to its timeline where they end in time. The simulation of the result decides: while it exceeds the memory, the
order is constructed again for less.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from pipeloom.errors import ScheduleError
from pipeloom.schedule import Schedule, check
from pipeloom.schedule.actions import SAVED
from pipeloom.schedule.costs import TIME_TOLERANCE, StageCosts
from pipeloom.schedule.families.construct.list_scheduling import Turns
from pipeloom.schedule.offload import copies_beside
from pipeloom.schedule.timeline import Timeline
from pipeloom.solver.construct import LARGEST_WALKED, plain_orders, sequences_of
from pipeloom.solver.evaluate import evaluate
from pipeloom.solver.incumbent import Budget, Incumbent
from pipeloom.solver.instance import Instance, Sequences

# In how many parts what a forward saves is copied: more parts free memory earlier, and take longer to simulate.
COPIED_PARTS = (4, 1)
# Shares of the memory for which orders are constructed: what they leave is for copies back that come earlier than planned.
MEMORY_SHARES = (1.0, 0.97, 0.94, 0.9, 0.85, 0.79, 0.72, 0.64)
# Room that a construction leaves for copies back, in units of the largest.
RESERVES = (0.0, 1.0)
# The share of a search's time after which no more orders are constructed.
ORDERS_SHARE = 0.8


@dataclass(frozen=True)
class CopyPlan:
    """An order to be constructed, and how.

    Attributes:
        along: rank -> its forwards and input gradients in order (other nodes are ignored).
        origin: the family or rule that it is from.
        count: in how many equal parts what a forward saves is copied.
        reserve: room left for copies back, in units of the largest copy, once the rank has run a backward.
    """

    instance: Instance
    along: Sequences
    origin: str
    count: int
    reserve: float

    def timed(self, share: float = 1.0) -> Timeline | None:
        """Return the order in this share of the memory, with waits for copies and without them; None if it gets stuck."""
        return _Construction(self, share * self.instance.memory_limit).run()


def search_with_copies(
    instances: Sequence[Instance], incumbent: Incumbent, budget: Budget, starts: Sequence[Schedule] = ()
) -> None:
    """Offer schedules that copy to host memory to `incumbent`, while the budget lasts.

    The families with copies beside their own times come first, whatever the budget: the result is never longer than those.
    """
    walked = [instance for instance in instances if instance.nodes <= LARGEST_WALKED]
    if incumbent.best is not None:
        starts = [*starts, incumbent.best.schedule]
    orders = [(instance, schedule) for instance in walked for schedule in plain_orders(instance, starts)]
    plain = [(instance.simulated(schedule), instance) for instance, schedule in orders]
    for simulated, instance in sorted(plain, key=lambda each: each[0].value(each[1].objective)):
        _offer_beside(simulated, instance, incumbent)
    plans: list[tuple[float, int, CopyPlan]] = []
    for instance, schedule in orders:
        sequences = sequences_of(instance, schedule)
        for count, reserve in product(COPIED_PARTS, RESERVES):
            plan = CopyPlan(instance, sequences, schedule.name, count, reserve)
            timeline = plan.timed()
            if timeline is not None and incumbent.improves(timeline.value(instance.objective)):
                plans.append((timeline.value(instance.objective), len(plans), plan))
        if budget.spent > ORDERS_SHARE:
            break
    plans.sort(key=lambda plan: plan[:2])
    for value, _, plan in plans:
        if not incumbent.improves(value) or not budget.in_time:
            break
        _offer(plan, incumbent)


def _offer_beside(timeline: Timeline, instance: Instance, incumbent: Incumbent) -> None:
    """Offer a schedule with copies beside its own times, as the transform `offload` has them; they make no schedule shorter."""
    for count in COPIED_PARTS:
        if not incumbent.improves(timeline.value(instance.objective)):
            return
        candidate = fitted(instance, timeline, count, incumbent, math.inf)
        if candidate is not None:
            incumbent.offer_fitting(instance, candidate, f"{timeline.schedule.name}, copied")


def _offer(plan: CopyPlan, incumbent: Incumbent) -> None:
    """Offer the longest of the plan's orders that fits with its copies, if that improves."""
    for share in MEMORY_SHARES:
        timeline = plan.timed(share)
        if timeline is None or not incumbent.improves(timeline.value(plan.instance.objective)):
            return
        schedule = fitted(plan.instance, timeline, plan.count, incumbent)
        if schedule is not None:
            incumbent.offer_fitting(plan.instance, schedule, f"{plan.origin}, copied")
            return


def fitted(
    instance: Instance, timeline: Timeline, count: int, incumbent: Incumbent, tries: float = 2
) -> Schedule | None:
    """Return the timeline's schedule with copies in `count` parts and the most slots that fit; None if none fits or improves.

    Args:
        tries: how many numbers of slots are tried, from the largest that the memory could hold.
    """
    costs, limit = instance.costs, instance.memory_limit + TIME_TOLERANCE
    schedule = copies_beside(timeline, range(instance.stages), count, count)
    if not schedule.has_queues:
        return None
    largest = max(costs.per_stage("activation", instance.stages))
    most = math.floor(limit / largest * count + TIME_TOLERANCE)
    if tries > most - count and not _fits(instance, schedule.with_slots({SAVED: (count + 1) / count}), limit):
        return None  # the fewest that serve any order leave the most memory free
    for slots in range(most, max(count, math.floor(max(0, most - tries))), -1):
        candidate = schedule.with_slots({SAVED: slots / count})
        try:
            check(candidate)
        except ScheduleError:
            return None  # fewer slots deadlock, too
        result = instance.simulated(candidate)
        if not incumbent.improves(result.value(instance.objective)):
            return None
        if max(result.peak_memory) <= limit:
            return candidate
    return None


def _fits(instance: Instance, schedule: Schedule, limit: float) -> bool:
    """Return whether a schedule fits the memory, or deadlocks."""
    try:
        return max(instance.simulated(schedule).peak_memory) <= limit
    except ScheduleError:
        return True


class _Construction:
    """The construction of a `CopyPlan`."""

    def __init__(self, plan: CopyPlan, memory: float) -> None:
        self.instance = instance = plan.instance
        self.memory, self.count = memory + TIME_TOLERANCE, plan.count
        self.table = table = instance.table
        stages, m, stride, ranks = instance.stages, instance.microbatches, table.stride, instance.ranks
        self.amount, self.copy = [0.0] * stride, [0.0] * stride
        evaluation = evaluate(instance, plan.along)
        if evaluation is not None:
            times = StageCosts(instance.costs, stages)
            shares, sizes = (instance.costs.per_stage(name, stages) for name in ("kept", "activation"))
            for node in range(stride):
                stage, factor = node // m, table.factors[node % m]
                if evaluation.start[stride + node] - evaluation.end[node] >= 2 * factor * times.copy[stage]:
                    self.amount[node] = max(0.0, table.change[node] - factor * shares[stage] * sizes[stage])
                    self.copy[node] = factor * times.copy[stage]
        self.orders = [[node for node in sequence if node < 2 * stride] for sequence in plan.along]
        largest = [max((self.amount[n] for n in order if n < stride), default=0.0) for order in self.orders]
        self.reserved = [plan.reserve * amount for amount in largest]
        self.position, self.level, self.begun = [0] * ranks, [0.0] * ranks, [False] * ranks
        self.weights: list[deque[int]] = [deque() for _ in range(ranks)]
        self.out_free = [0.0] * ranks
        self.copies: list[deque[tuple[float, float]]] = [deque() for _ in range(ranks)]  # (end, amount) of copies out
        self.sequences: Sequences = [[] for _ in range(ranks)]
        self.start, self.end = [math.inf] * table.none, [*([math.inf] * table.none), 0.0]
        self.free, self.turns = [0.0] * ranks, Turns(ranks)

    def run(self) -> Timeline | None:
        left = self.instance.nodes
        for now, rank in self.turns:
            while self.copies[rank] and self.copies[rank][0][0] <= now + TIME_TOLERANCE:
                self.level[rank] -= self.copies[rank].popleft()[1]
            node = self._choose(rank, now)
            if node is not None:
                self._run(rank, now, node)
                left -= 1
        if left:
            return None
        starts, ends = (
            tuple(tuple(map(times.__getitem__, sequence)) for sequence in self.sequences)
            for times in (self.start, self.end)
        )
        schedule = self.instance.schedule_of(self.sequences)
        return Timeline(schedule, self.instance.costs, starts, ends, overlap_p2p=self.instance.overlap_p2p)

    def _choose(self, rank: int, now: float) -> int | None:
        """Return the node that `rank` runs now; None if it waits."""
        following = self.copies[rank][0][0] if self.copies[rank] else math.inf
        full = False
        for node in self.orders[rank][self.position[rank] : self.position[rank] + 1]:
            arrival = self.end[self.table.predecessor[node]] + self.table.hop[node]
            full = not self._has_room(rank, node)
            if arrival <= now + TIME_TOLERANCE and not full:
                return node
            if arrival > now + TIME_TOLERANCE:
                following, full = min(following, arrival), False
        weights = self.weights[rank]
        if weights and (full or following - now >= self.table.time[weights[0]] - TIME_TOLERANCE):
            return weights.popleft()
        self.turns.call(rank, following)
        return None

    def _has_room(self, rank: int, node: int) -> bool:
        need = self.table.rise[node]
        if node < self.table.stride:
            need += self.reserved[rank] * self.begun[rank]
        else:
            need += self.amount[node - self.table.stride]
        return self.level[rank] + need <= self.memory

    def _run(self, rank: int, now: float, node: int) -> None:
        table = self.table
        end = now + table.time[node]
        self.start[node], self.end[node] = now, end
        self.sequences[rank].append(node)
        self.level[rank] += table.change[node]
        self.position[rank] += node < 2 * table.stride
        if node < table.stride and self.amount[node]:
            for part in range(1, self.count + 1):
                there = now + part / self.count * (end - now)
                self.out_free[rank] = max(self.out_free[rank], there) + self.copy[node] / self.count
                self.copies[rank].append((self.out_free[rank], self.amount[node] / self.count))
        elif table.stride <= node < 2 * table.stride:
            self.begun[rank] = True
            self.level[rank] += self.amount[node - table.stride]  # that has been copied back
            self.weights[rank].append(node + table.stride)
        self.free[rank] = end
        self.turns.call(rank, end)
        successor = table.successor[node]
        if successor != table.none:
            home = table.rank[successor]
            self.turns.call(home, max(end + table.hop[successor], self.free[home]))
