"""`simulate`: a schedule and costs in, a timeline out. `period`: the time from step to step without a barrier."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import mul

from pipeloom.errors import ScheduleError
from pipeloom.schedule.actions import COMPUTE, COPY_IN, COPY_OUT, WEIGHT_GRADIENT
from pipeloom.schedule.calls import Calls
from pipeloom.schedule.channels import Edge
from pipeloom.schedule.check import check
from pipeloom.schedule.costs import TIME_TOLERANCE, Costs, PairTimes, durations
from pipeloom.schedule.graph import Graph, NamedNeeds, WalkCosts, WalkResult, walk
from pipeloom.schedule.model import Schedule, of_schedule
from pipeloom.schedule.timeline import Timeline


@of_schedule
def simulate(schedule: Schedule, costs: Costs | None = None, *, overlap_p2p: bool = True, label: str = "") -> Timeline:
    """Return the timeline in which every action starts as early as its rank's order and its messages allow, from time 0.

    A message leaves when its action ends and arrives one hop later (`Costs.hop`). With `overlap_p2p` it travels while its
    receiver computes; without, the hop begins only when the receiver needs the message and is free. Senders wait as
    `Costs.sends` says: by default never.
    A pair takes the time that `PairTimes` gives. Linear in the number of actions. `label` is its name in tables and drawings.

    >>> from pipeloom import schedules
    >>> timeline = simulate(schedules.one_f_one_b(ranks=2, microbatches=3), Costs(forward=1, input_grad=1, weight_grad=1))
    >>> timeline.makespan, timeline.peak_activations
    (12.0, (2, 1))

    Raises:
        ScheduleError: the schedule cannot run to its end.
        UsageError: the costs are no `Costs`, or do not have one value for each stage.
    """
    cost_model = costs if costs is not None else Costs()
    if cost_model.sends != "free":
        check(schedule, sends=cost_model.sends)
    run = run_once(schedule, cost_model, overlap_p2p=overlap_p2p)
    if run.stuck:
        check(schedule)
        raise ScheduleError(f"ranks {run.stuck} cannot finish")  # pragma: no cover - check has raised
    starts, ends = tuple(map(tuple, run.starts)), tuple(map(tuple, run.ends))
    return Timeline(schedule, cost_model, starts, ends, overlap_p2p=overlap_p2p, label=label)


@of_schedule
def period(schedule: Schedule, costs: Costs | None = None, limit: int = 64, *, overlap_p2p: bool = True) -> float:
    """Limit of end(k+1) - end(k) when every rank starts step k+1 as soon as it has finished its own step k.

    The step is a max-plus linear map of the ranks' clocks, so its growth settles into a cycle (Baccelli et al.,
    Synchronization and Linearity, chapter 3); a few walks find it. After `limit` walks without a cycle: the mean growth of
    their second half.
    """
    cost_model = costs if costs is not None else Costs()
    history = [[0.0] * schedule.ranks]
    for _ in range(limit):
        run = run_once(schedule, cost_model, history[-1], overlap_p2p=overlap_p2p)
        history.append([max(ends) if ends else clock for ends, clock in zip(run.ends, history[-1], strict=True)])
        for back in range(1, min(5, len(history))):
            growth = [now - then for now, then in zip(history[-1], history[-1 - back], strict=True)]
            if max(growth) - min(growth) <= 1e-9 * max(1.0, max(growth)):
                return round(max(growth) / back, 9)
    half = len(history) // 2
    return max(now - then for now, then in zip(history[-1], history[half], strict=True)) / (len(history) - 1 - half)


SIMULATED = 12  # times as long as the makespan alone `simulate` takes


class Makespans:
    """The makespans of one schedule for other factors of its micro-batches (`Costs.microbatch`), one after the other.

    Its entries are put once in an order in which each stands behind what it waits for; to go through them takes a tenth of the
    time of `simulate`, which serves where there are pairs, queues, slices, tensors by name, or senders that wait.

    Attributes:
        work: a measure of the time of one makespan: entries to go through.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs, self.work = schedule, costs, schedule.actions
        # (rank, number of the entry waited for, column of times)
        self.entries: list[tuple[int, int, int]] | None = None
        special = schedule.has_pairs or schedule.has_queues or schedule.slices > 1 or bool(schedule.tensors)
        if special or costs.sends != "free":
            self.work *= SIMULATED
            return
        units, graph = schedule.units, Graph.of(schedule, full=True)
        whole, none = (weights_of(schedule, replace(costs, microbatch=(factor,) * units)) for factor in (1.0, 0.0))
        free = [0.0] * len(whole.duration)
        late, latency = whole.hop or free, none.hop or free
        starts = walk(schedule, graph, WalkCosts([1.0] * len(free), None, {})).starts
        order = sorted((start, rank, at) for rank, times in enumerate(starts) for at, start in enumerate(times))
        columns: dict[tuple[float, float, float], int] = {}
        number, home, work = {graph.always: 0}, [-1], [[0.0] * units for _ in starts]
        self.entries = []
        for _, rank, at in order:
            code = schedule.codes[rank][at]
            time = whole.duration[code], late[code] - latency[code], latency[code]
            need = number[graph.needs[code]]
            column = columns.setdefault(time, len(columns)) * units + code % units
            self.entries.append((rank, 0 if home[need] == rank else need, column))
            work[rank][code % units] += time[0]
            number.update(dict.fromkeys(graph.events_of([code]), len(home)))
            home.append(rank)
        self._columns = list(columns)
        self._work = list(map(tuple, work))

    def of(self, factors: Sequence[float], limit: float = math.inf) -> float:
        """The makespan with these factors; infinite where it is above `limit`, beyond rounding."""
        limit *= 1 + TIME_TOLERANCE
        if self.entries is None:
            makespan = self.timeline(factors).makespan
            return makespan if makespan <= limit else math.inf
        busy = {row: sum(map(mul, factors, row)) for row in {*self._work}}
        spare = [limit - busy[row] for row in self._work]  # for which a rank may wait
        if min(spare) < 0:
            return math.inf
        times = [time * factor for time, _, _ in self._columns for factor in factors]
        hops = [size * factor + latency for _, size, latency in self._columns for factor in factors]
        clocks, ends = [0.0] * len(spare), [0.0]
        done = ends.append
        for rank, need, column in self.entries:
            clock, arrival = clocks[rank], ends[need] + hops[column]
            if arrival > clock:
                spare[rank] -= arrival - clock
                if spare[rank] < 0:
                    return math.inf
                clock = arrival
            clocks[rank] = clock = clock + times[column]
            done(clock)
        return max(clocks)

    def timeline(self, factors: Sequence[float]) -> Timeline:
        """The whole timeline with these factors."""
        return simulate(self.schedule, replace(self.costs, microbatch=tuple(factors)))


@of_schedule
def worst_peaks(schedule: Schedule) -> tuple[int, ...]:
    """rank -> the most stage-micro-batches alive there at once (`Timeline.peak_activations`), whatever the actions' times.

    The most are alive on a rank where what frees beside its computation, copies to the host among it, takes longer than all else
    together, and other entries of such queues no time: then nothing is freed there before something has to wait for it.
    """
    peaks = list(simulate(schedule).peak_activations)
    rank_of = [schedule.placement[stage] for stage in range(schedule.stages) for _ in range(schedule.units)]
    for rank in range(schedule.ranks) if schedule.has_queues else ():
        beside = [0.0 if not kind.frees else schedule.actions + 1.0 for kind in schedule.kinds]
        times = [
            1.0 if kind.queue == COMPUTE else after * (there == rank)
            for kind, after in zip(schedule.kinds, beside, strict=True)
            for there in rank_of
        ]
        run = walk(schedule, Graph.of(schedule), WalkCosts([*times, 0.0], None, defaultdict(lambda: 1.0)))
        timeline = Timeline(schedule, Costs(), tuple(map(tuple, run.starts)), tuple(map(tuple, run.ends)))
        peaks[rank] = max(peaks[rank], timeline.peak_activations[rank])
    return tuple(peaks)


def run_once(
    schedule: Schedule, costs: Costs, clocks: Sequence[float] | None = None, *, overlap_p2p: bool = True
) -> WalkResult:
    """One walk of the schedule with these costs, its ranks starting at `clocks`."""
    costs.check_links(schedule.ranks)
    full = not overlap_p2p or bool(schedule.tensors)
    return walk(schedule, Graph.of(schedule, full=full), weights_of(schedule, costs), clocks, overlap_p2p)


def weights_of(schedule: Schedule, costs: Costs) -> WalkCosts:
    """Return the times that `walk` adds up, for these costs."""
    duration = durations(schedule, costs)
    pairs: dict[int, float] = {}
    if schedule.has_pairs:
        times, stages, m = PairTimes.of(costs, schedule.stages), schedule.stages, schedule.units
        limit, stride = schedule._pair_stride, schedule._kind_stride
        splits = [(WEIGHT_GRADIENT not in kind.produces, bool(kind.fuses)) for kind in schedule.kinds]
        table: dict[tuple[int, int, bool, tuple[float, float], bool], float] = {}
        factors = costs.time_factors(schedule)
        for program in schedule.codes:
            for code in program:
                if code >= limit:
                    forward, backward = divmod(code, limit)
                    sizes = factors[(forward - 1) % m], factors[backward % m]
                    split, recomputed = splits[backward // stride]
                    key = (forward - 1) // m, backward // m % stages, split, sizes, recomputed
                    if key not in table:
                        table[key] = times.time(*key)
                    pairs[code] = table[key]
    shared = {
        (rank, queue): (link, queue) for rank, link in enumerate(costs.host_links) for queue in (COPY_OUT, COPY_IN)
    }
    named = _named_hops(schedule, costs)
    calls = Calls.of(schedule, costs)
    return WalkCosts(duration, _hops(schedule, costs), pairs, named, costs.hop, shared, costs.slowed, calls)


def _named_hops(schedule: Schedule, costs: Costs) -> dict[int, list[tuple[int, float]]] | None:
    """`WalkCosts.named`."""
    if not schedule.tensors:
        return None
    needs, units, place = NamedNeeds.of(schedule), schedule.units, schedule.placement
    factors = costs.size_factors(schedule)
    needs_of_node: dict[int, list[tuple[int, float]]] = {}
    for stage, edges in enumerate(needs.edges):
        for unit, factor in enumerate(factors if edges else ()):
            needs_of_node[stage * units + unit] = [
                (event + unit, costs.hop(*_ends(place, edge, stage % schedule.stages), factor, edge.name))
                for event, edge in edges
            ]
    return needs_of_node if any(hop for needs_ in needs_of_node.values() for _, hop in needs_) else None


def _ends(place: Sequence[int], edge: Edge, receiver: int) -> tuple[int, int]:
    """(source rank, destination rank) of the message along `edge` that the stage `receiver` receives."""
    there, here = place[edge.producer], place[edge.consumer]
    return (there, here) if receiver == edge.consumer else (here, there)


def _hops(schedule: Schedule, costs: Costs) -> list[float] | None:
    """code -> time of the message that it waits for, None when all are free."""
    before, after = schedule.neighbours

    def column(neighbour: Sequence[int | None]) -> list[float]:
        hops: list[float] = []
        for stage, rank in enumerate(schedule.placement):
            other = neighbour[stage]
            here = schedule.placement[other] if other is not None else rank
            if by_size:
                hops += [costs.hop(here, rank, factor) for factor in factors]
            else:
                hops += [costs.hop(here, rank)] * len(factors)
        return hops

    factors = costs.size_factors(schedule)
    by_size = (bool(costs.microbatch) or schedule.slices > 1) and costs.message > 0

    forward, backward = column(before), column(after)
    if not any(forward) and not any(backward):
        return None
    hops = {-1: forward, 0: [0.0] * schedule._kind_stride, 1: backward}
    steps = [kind.waits_for.step if kind.waits_for is not None else 0 for kind in schedule.kinds]
    return [*chain.from_iterable(hops[step] for step in steps), 0.0]
