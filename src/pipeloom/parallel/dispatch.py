"""Dispatch and combine: rows to their experts and back over the expert-parallel ranks, as segments of a layer.

A dispatch plan holds the rows that each rank sends to each other rank, and is computed before any row is sent.
The segments pass on these values: rows, the weights of the mixture, the dispatch plan, and then any others of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.limits import require_divides
from pipeloom.ops.segments import Compute, Pending, Segment, Values, in_turns, standstill
from pipeloom.ops.token_permute import TokenPermutation, assign, combine_rows, count_keys, gather_rows, permute
from pipeloom.parallel.collectives import PendingCollective, start_collective
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.router import Routing


@dataclass(frozen=True)
class ExpertParallel:
    """Placement of experts: rank i of the axis holds the i-th block of consecutive experts, all of equal size.

    Attributes:
        axis: the expert-parallel ranks.
        nodes: number of machines that the axis spans, each with consecutive ranks. A token's outputs are summed node by node.
        inside, across: for two-level dispatch: the ranks of this node, and the ranks at this rank's position in each node;
            rank i has position i % L in node i // L, L = size / nodes. None for flat dispatch, directly to the experts.
        chunks: parts of a micro-batch's tokens whose dispatch, experts and combine overlap each other.
        blocks: parts of each sequence whose dispatch, experts and combine overlap the attention of the next.
    """

    axis: Axis
    nodes: int = 1
    inside: Axis | None = None
    across: Axis | None = None
    chunks: int = 1
    blocks: int = 1

    def __post_init__(self) -> None:
        require_divides("nodes", self.nodes, self.axis.size, f"{self.axis.size} expert-parallel ranks")

    @classmethod
    def of(cls, group: Any) -> ExpertParallel | None:
        """Return the placement over a process group, or `group` itself if it is a placement or None."""
        if group is None or isinstance(group, ExpertParallel):
            return group
        return cls(Axis(tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), group))

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def two_level(self) -> bool:
        return self.inside is not None

    def own(self, experts: int) -> tuple[int, ...]:
        """Return the number of experts of each rank. Raises ArgumentError if the ranks do not divide `experts`."""
        require_divides("ep", self.size, experts, f"{experts} experts")
        return (experts // self.size,) * self.size


@dataclass(frozen=True)
class AllToAllSplit:
    """Split sizes of one all-to-all: number of rows to send to, and to receive from, each rank of the axis."""

    axis: Axis
    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True)
class ExpertRows:
    """Permutation of rows from the order of arrival to the order of the experts: by expert, then by source rank.

    Attributes:
        order: the permutation and its inverse, or None if the rows already arrive in that order.
        counts: number of rows of each expert of this rank.
    """

    order: tuple[Tensor, Tensor] | None
    counts: tuple[int, ...]


@dataclass(frozen=True)
class DispatchPlan:
    """Plan of the dispatch of one routing to the experts; the combine reverses it.

    Attributes:
        leaving: tokens -> rows that leave this rank: one for each choice, or with two levels one for each node of a token.
        hops: all-to-alls in order: none for one rank, one if flat, two if two-level (across nodes, then inside).
        arrival: order of the rows at the experts.
        routes: two-level: for each row [rows, k] its experts in the node that it goes to, -1 for choices of other nodes. They
            cross nodes with the rows, so before the first hop they are those of the rows that leave, after it of those that came.
        fan: two-level, after the first hop: rows that came across -> rows for this node's ranks.
    """

    leaving: TokenPermutation
    hops: tuple[AllToAllSplit, ...]
    arrival: ExpertRows
    routes: Tensor | None = None
    fan: TokenPermutation | None = None


@dataclass(frozen=True)
class Dispatch:
    """Pending dispatch of several routings: the rows to send are known, the exchange of row counts is still running.

    Attributes:
        leaving: for each routing, tokens -> rows that leave this rank.
        plans: waits for the counts and returns the plan of each routing; called once, in the same order on all ranks of the axis.
    """

    leaving: Sequence[TokenPermutation]
    plans: Callable[[], list[DispatchPlan]]


def begin_dispatch(routings: Sequence[Routing], parallel: ExpertParallel | None) -> Dispatch:
    """Start the exchange of row counts of all routings, one small message per pair of ranks. Collective over the axis.

    Computation before `Dispatch.plans`, such as gathering the rows to send, overlaps with the exchange.
    """
    parallel = parallel if parallel is not None and parallel.size > 1 else None
    if routings[0].rows is not None:
        return _padded(routings, parallel)
    if parallel is None:
        return _at_home(routings)
    return _two_level(routings, parallel) if parallel.two_level else _flat(routings, parallel)


def _padded(routings: Sequence[Routing], parallel: ExpertParallel | None) -> Dispatch:
    """Send as many rows to each expert as its capacity: the same from all ranks, which have as many tokens, known to the host."""
    plans = []
    for routing in routings:
        assert routing.rows is not None
        experts, rows = routing.tally.counts.numel(), routing.rows
        assignment, counts = assign(routing.experts, experts, routing.kept)
        leaving = assignment.padded(counts, rows)
        if parallel is None:
            plans.append(DispatchPlan(leaving, (), ExpertRows(None, (rows,) * experts)))
            continue
        local_experts = parallel.own(experts)[0]
        sizes = (rows * local_experts,) * parallel.size
        arrival = _even_arrival(parallel.size, local_experts, rows, counts.device)
        plans.append(DispatchPlan(leaving, (AllToAllSplit(parallel.axis, sizes, sizes),), arrival))
    return Dispatch([plan.leaving for plan in plans], lambda: plans)


@lru_cache(maxsize=16)
def _even_arrival(size: int, local_experts: int, rows: int, device: torch.device) -> ExpertRows:
    """Return the order of as many rows from each rank for each expert."""
    keys = torch.arange(local_experts) * size + torch.arange(size).unsqueeze(1)
    return _arrival(keys, torch.full_like(keys, rows), local_experts, device)


def _at_home(routings: Sequence[Routing]) -> Dispatch:
    assigned = [assign(routing.experts, routing.tally.counts.numel(), routing.kept) for routing in routings]

    @cache
    def counts() -> list[list[int]]:
        read: list[list[int]] = torch.stack([rows for _, rows in assigned]).tolist()
        return read

    leaving = [
        assignment if routing.kept is None else assignment.first(sum(counts()[at]))
        for at, ((assignment, _), routing) in enumerate(zip(assigned, routings, strict=True))
    ]

    def finish() -> list[DispatchPlan]:
        return [
            DispatchPlan(each, (), ExpertRows(None, tuple(rows))) for each, rows in zip(leaving, counts(), strict=True)
        ]

    return Dispatch(leaving, finish)


def _flat(routings: Sequence[Routing], parallel: ExpertParallel) -> Dispatch:
    size, total = parallel.size, routings[0].tally.counts.numel()
    local_experts = parallel.own(total)[0]
    per_node = total // parallel.nodes
    leaving, counts = [], []
    for routing in routings:
        nodes = routing.experts // per_node if parallel.nodes > 1 else None
        assignment, rows = assign(routing.experts, total, routing.kept, nodes, parallel.nodes)
        leaving.append(assignment)
        counts.append(rows.view(size, local_experts))
    exchange = _CountExchange(torch.stack(counts, dim=1), parallel.axis)  # rank, routing, expert of the rank
    if any(routing.kept is not None for routing in routings):  # else all rows leave, and gathering them overlaps
        sent_rows = exchange.tables[0].sum((0, 2)).tolist()
        leaving = [assignment.first(rows) for assignment, rows in zip(leaving, sent_rows, strict=True)]

    def finish() -> list[DispatchPlan]:
        sending, receiving = exchange.tables
        # chunks arrive by rank, then by expert
        keys = torch.arange(local_experts) * size + torch.arange(size).unsqueeze(1)
        plans = []
        for assignment, sent, received in zip(leaving, sending.unbind(1), receiving.unbind(1), strict=True):
            split = AllToAllSplit(parallel.axis, tuple(sent.sum(1).tolist()), tuple(received.sum(1).tolist()))
            arrival = _arrival(keys, received, local_experts, assignment.order.device)
            plans.append(DispatchPlan(assignment, (split,), arrival))
        return plans

    return Dispatch(leaving, finish)


def _two_level(routings: Sequence[Routing], parallel: ExpertParallel) -> Dispatch:
    """Send a row once to each node with an expert of its token, to the rank at this rank's position, which forwards it.

    Each rank sends every other rank the number of rows for that rank's node and of choices of each expert there. The counts
    from ranks at the same position give the rows that a rank forwards. Those from the other positions, over all nodes, give the
    rows that are forwarded to it. So no second exchange of counts is needed inside the node.
    """
    across, inside = parallel.across, parallel.inside
    assert across is not None
    assert inside is not None
    total = routings[0].tally.counts.numel()
    nodes, places = parallel.nodes, inside.size
    local_experts, per_node = parallel.own(total)[0], total // nodes
    assigned, counts = [], []
    for routing in routings:
        experts = routing.experts if routing.kept is None else torch.where(routing.kept, routing.experts, -per_node)
        node = torch.div(experts, per_node, rounding_mode="floor")
        every = torch.arange(nodes, device=experts.device)
        needed = (node.unsqueeze(-1) == every).any(1)
        assignment, rows = assign(every.expand(experts.shape[0], -1), nodes, needed)
        assigned.append((assignment, experts, node))
        wanted = count_keys(torch.where(experts < 0, total, experts), total + 1)[:total]
        counts.append(torch.cat([rows.unsqueeze(1), wanted.view(nodes, per_node)], dim=1))
    # ranks are numbered node · places + place; every place of a node receives the same counts
    table = torch.stack(counts, dim=1).repeat_interleave(places, dim=0)
    tables = _CountExchange(table, parallel.axis).tables
    sent_counts, received_counts = (x.view(nodes, places, len(routings), 1 + per_node) for x in tables)
    leaving, routes = [], []
    for (assignment, experts, node), rows in zip(assigned, sent_counts[:, 0, :, 0].sum(0).tolist(), strict=True):
        leaving.append(assignment.first(rows))
        token = leaving[-1].token
        choices, target = experts.index_select(0, token), (leaving[-1].order % nodes).unsqueeze(1)
        routes.append(torch.where(node.index_select(0, token) == target, choices % per_node, -1))

    def finish() -> list[DispatchPlan]:
        # chunks arrive by place, expert and node
        place = torch.arange(places).view(-1, 1, 1)
        keys = torch.arange(local_experts).view(-1, 1) * parallel.size + torch.arange(nodes) * places + place
        plans = []
        for at, (assignment, route) in enumerate(zip(leaving, routes, strict=True)):
            sent, received = sent_counts[:, inside.index, at, 0], received_counts[:, inside.index, at, 0]
            first = AllToAllSplit(across, tuple(sent.tolist()), tuple(received.tolist()))
            by_expert = received_counts[:, :, at, 1:].view(nodes, places, places, local_experts)
            handed_on = by_expert[:, inside.index].sum((0, 2))
            handed_here = by_expert[:, :, inside.index].permute(1, 2, 0)
            second = AllToAllSplit(inside, tuple(handed_on.tolist()), tuple(handed_here.sum((1, 2)).tolist()))
            arrival = _arrival(keys, handed_here, local_experts, route.device)
            plans.append(DispatchPlan(assignment, (first, second), arrival, route))
        return plans

    return Dispatch(leaving, finish)


def _arrival(keys: Tensor, received: Tensor, local_experts: int, device: torch.device) -> ExpertRows:
    """Return the order of arriving chunks of `received` rows sorted by `keys`, expert first; both are CPU tensors."""
    chunks, rows = keys.flatten(), received.flatten()
    experts = torch.div(chunks, max(len(chunks) // local_experts, 1), rounding_mode="floor")
    counts = torch.zeros(local_experts, dtype=torch.int64).index_add_(0, experts, rows)
    order = torch.argsort(torch.repeat_interleave(chunks, rows), stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return ExpertRows((order.to(device), inverse.to(device)), tuple(counts.tolist()))


class _CountExchange:
    """Pending all-to-all of a table [rank, …] with one row per rank; only `tables` blocks."""

    def __init__(self, sending: Tensor, axis: Axis) -> None:
        self._sent = sending.contiguous()
        self._received = torch.empty_like(self._sent)
        self._work = start_collective(dist.all_to_all_single, self._received, self._sent, group=axis.group)

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """The table, and the rows from each rank, both on the CPU: the one thing of a layer that the host reads."""
        with standstill("count exchange"):
            self._work.wait()
            both: Any = torch.stack([self._sent, self._received]).cpu()
        return both[0], both[1]


ROWS, WEIGHTS, PLAN = 0, 1, 2


@dataclass(frozen=True)
class AllToAll:
    """One all-to-all of the dispatch plan; its backward is the same exchange in the other direction.

    Attributes:
        name: "dispatch" or "combine".
        split: index into the dispatch plan's `hops`.
        back: whether rows leave the experts rather than go to them.
        places: the values that move, tensors [rows, width].
        quick: whether the exchange stays inside a node.
        routes: whether the rows' routes move with them, in the forward.
        first: position of the rows; places count from there.
    """

    name: str
    split: int
    back: bool
    places: tuple[int, ...] = (ROWS,)
    quick: bool = False
    routes: bool = False
    first: int = 0

    @property
    def filled(self) -> tuple[int, ...]:
        """Return the positions whose values the forward replaces."""
        return tuple(self.first + place for place in ((*self.places, PLAN) if self.routes else self.places))

    def start(self, values: Values) -> Pending:
        dispatch_plan: DispatchPlan = values[self.first + PLAN]
        return self.exchange(values, dispatch_plan, self.back, dispatch_plan.routes if self.routes else None)

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        return self.exchange(gradients, saved[self.first + PLAN], not self.back)

    def exchange(
        self, values: Values, dispatch_plan: DispatchPlan, back: bool, routes: Tensor | None = None
    ) -> Pending:
        split = dispatch_plan.hops[self.split]
        transfers: dict[int, PendingCollective[Any]] = {}
        if split.axis.size > 1:
            rows = {self.first + place: values[self.first + place] for place in self.places}
            transfers = {at: _start_all_to_all(each, split, back) for at, each in rows.items() if each is not None}
            if routes is not None:
                moving = _start_all_to_all(routes, split, back)
                with_routes = replace(moving, finish=lambda: replace(dispatch_plan, routes=moving.finish()))
                transfers[self.first + PLAN] = with_routes
        return _Moving(values, transfers)


def _start_all_to_all(rows: Tensor, split: AllToAllSplit, back: bool) -> PendingCollective[Any]:
    send, receive = (split.receive, split.send) if back else (split.send, split.receive)
    given = rows.contiguous()
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    counts = list(receive), list(send)
    work = start_collective(dist.all_to_all_single, received, given, *counts, group=split.axis.group)
    return PendingCollective(work, lambda: received, given, "all-to-all")


class _Moving(NamedTuple):
    """The values of a layer, some of which are being exchanged."""

    values: Values
    transfers: Mapping[int, PendingCollective[Any]]

    def wait(self) -> Values:
        arrived = {at: each.result() for at, each in self.transfers.items()}
        return tuple(arrived.get(at, value) for at, value in enumerate(self.values))


def permute_for_dispatch(
    x: Tensor, weights: Tensor, leaving: TokenPermutation, parallel: ExpertParallel | None
) -> tuple[Tensor, Tensor]:
    """Tokens x [tokens, width] and weights [tokens, k] -> the rows and weights that leave for the experts."""
    two_level = parallel is not None and parallel.size > 1 and parallel.two_level
    return gather_rows(x, leaving), (gather_rows(weights, leaving) if two_level else weights)


def dispatch_segments(parallel: ExpertParallel | None) -> list[Segment]:
    """From `permute_for_dispatch` to the experts' rank; the first segment is the one that is worth hiding."""
    if parallel is None or parallel.size == 1:
        return []
    if not parallel.two_level:
        return [AllToAll("dispatch", 0, back=False)]
    return [
        AllToAll("dispatch", 0, back=False, places=(ROWS, WEIGHTS), routes=True),
        Compute("fan out", _fan_out),
        AllToAll("dispatch", 1, back=False, quick=True),
    ]


def combine_segments(parallel: ExpertParallel | None) -> list[Segment]:
    """From the experts to `unpermute_and_mix`; the last segment is the one that is worth hiding."""
    if parallel is None or parallel.size == 1:
        return []
    if not parallel.two_level:
        return [AllToAll("combine", 0, back=True)]
    return [
        AllToAll("combine", 1, back=True, quick=True),
        Compute("mix", _mix_in_node),
        AllToAll("combine", 0, back=True),
    ]


def chunk_segments(parallel: ExpertParallel, compute: Callable[[Values], Values], first: Compute) -> list[Segment]:
    """Dispatch, experts and combine of several runs of tokens: dispatch(i+1) beside experts(i) beside combine(i-1) (Tutel,
    arXiv 2206.03382), and with two levels the hops inside a node beside those between nodes.

    Args:
        compute: (rows, weights, dispatch plan) -> the same of the experts' outputs. Those of run i are the values 3i to 3i + 2.
        first: computed while the first dispatches are under way.
    """

    def of_run(segment: Segment, at: int) -> Segment:
        start = 3 * at
        if not isinstance(segment, Compute):
            assert isinstance(segment, AllToAll)
            return replace(segment, first=start)
        inner = segment.run
        return Compute(segment.name, lambda v: (*v[:start], *inner(v[start : start + 3]), *v[start + 3 :]))

    whole = [*dispatch_segments(parallel), Compute("experts", compute), *combine_segments(parallel)]
    runs = [[of_run(segment, at) for segment in whole] for at in range(parallel.chunks)]
    return in_turns(runs, lambda communication: cast("AllToAll", communication).filled, first)


def group_by_expert(rows: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
    """Sort rows from the order of arrival to the order of experts."""
    order = dispatch_plan.arrival.order
    return rows if order is None else permute(rows, *order)


def ungroup(rows: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
    """The inverse of `group_by_expert`."""
    order = dispatch_plan.arrival.order
    return rows if order is None else permute(rows, *order[::-1])


def unpermute_and_mix(rows: Tensor, weights: Tensor | None, dispatch_plan: DispatchPlan) -> Tensor:
    """Combine the returned rows by the weights of the mixture -> tokens [tokens, width].

    With two levels each row already is one node's part of the mixture, and `weights` is not used.
    """
    if dispatch_plan.fan is not None or weights is None:
        tokens, parts = dispatch_plan.leaving.slot.shape
        weights = torch.ones(tokens, parts, dtype=torch.float32, device=rows.device)
    return combine_rows(rows, weights, dispatch_plan.leaving)


def _fan_out(values: Values) -> Values:
    """Spread the rows that came across over this node's ranks, by the routes that came with them."""
    rows, weights, dispatch_plan, *rest = values
    (first, second), routes = dispatch_plan.hops, dispatch_plan.routes
    nodes = first.axis.size
    source = torch.repeat_interleave(torch.arange(nodes), torch.tensor(first.receive)).to(routes.device)
    experts = len(dispatch_plan.arrival.counts) * second.axis.size
    whole, _ = assign(routes.clamp_min(0) * nodes + source.unsqueeze(1), experts * nodes, routes >= 0)
    fan = whole.first(sum(second.send))
    return gather_rows(rows, fan), weights, replace(dispatch_plan, routes=None, fan=fan), *rest


def _mix_in_node(values: Values) -> Values:
    dispatch_plan: DispatchPlan = values[PLAN]
    assert dispatch_plan.fan is not None
    rows, weights, *rest = values
    return combine_rows(rows, weights, dispatch_plan.fan), None, *rest
