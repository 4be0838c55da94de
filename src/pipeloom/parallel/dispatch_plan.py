"""The way of one micro-batch's tokens to their experts and back: which rows go where, agreed on before any row moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import ArgumentError, divisors, nearest
from pipeloom.ops.segments import standstill
from pipeloom.ops.token_permute import TokenPermutation, assign
from pipeloom.parallel.mesh import Axis
from pipeloom.parallel.router import Routing
from pipeloom.parallel.through_host import start


@dataclass(frozen=True)
class ExpertParallel:
    """Placement of experts: rank i of the axis holds the i-th run of experts, all runs equally long.

    Attributes:
        axis: the expert-parallel ranks.
        nodes: machines that the axis spans, each a run of ranks. A token's outputs are summed node by node.
        inside, across: two-level: the ranks of this node, and those at this rank's place in each node; rank i is at place
            i % L of node i // L, L = size / nodes. None: flat, every row goes straight to its expert.
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
        if self.nodes < 1 or self.axis.size % self.nodes:
            near = nearest(self.nodes, divisors(self.axis.size))
            raise ArgumentError(
                "nodes", f"={self.nodes} does not divide {self.axis.size} expert-parallel ranks; {near}"
            )

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def two_level(self) -> bool:
        return self.inside is not None

    def own(self, experts: int) -> tuple[int, ...]:
        """Experts of each rank. Raises ArgumentError when they cannot be equally many."""
        if experts % self.size:
            raise ArgumentError(
                "ep", f"={self.size} does not divide {experts} experts; {nearest(self.size, divisors(experts))}"
            )
        return (experts // self.size,) * self.size


@dataclass(frozen=True)
class AllToAllSplit:
    """One all-to-all: rows for each rank of the axis, and rows from each."""

    axis: Axis
    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True)
class ExpertRows:
    """Rows as they arrive, and as the experts want them: by expert, those of one by the rank that they came from.

    Attributes:
        order, inverse: permutations of rows, or None where they arrive as wanted.
        counts: rows of each expert of this rank.
    """

    order: Tensor | None
    inverse: Tensor | None
    counts: tuple[int, ...]


@dataclass(frozen=True)
class DispatchPlan:
    """The plan of one all-to-all there and back.

    Attributes:
        leaving: tokens -> rows that leave this rank: one for each choice, or with two levels one for each node of a token.
        hops: in order: none (one rank), one, or two (across nodes, then inside).
        arrival: at the experts.
        routes: two-level: for each row [rows, k] its experts in the node that it goes to, -1 for choices of other nodes. They
            cross nodes with the rows, so before the first hop they are those of the rows that leave, after it of those that came.
        fan: two-level, after the first hop: rows that came across -> rows for this node's ranks.
    """

    leaving: TokenPermutation
    hops: tuple[AllToAllSplit, ...]
    arrival: ExpertRows
    routes: Tensor | None = None
    fan: TokenPermutation | None = None

    def fanned(self) -> DispatchPlan:
        """Return the plan with `fan`, once the rows' routes have crossed."""
        assert self.routes is not None
        first, second = self.hops
        nodes = first.axis.size
        source = torch.repeat_interleave(torch.arange(nodes), torch.tensor(first.receive)).to(self.routes.device)
        keys = self.routes.clamp_min(0) * nodes + source.unsqueeze(1)
        experts = len(self.arrival.counts) * second.axis.size
        fan, _ = assign(keys, experts * nodes, self.routes >= 0, rows=sum(second.send))
        return replace(self, routes=None, fan=fan)


class Dispatch:
    """The dispatch of several routings, whose counts of rows are on their way: what leaves is known, what arrives is not yet.

    Attributes:
        leaving: for each routing, tokens -> rows that leave this rank.
    """

    def __init__(self, leaving: Sequence[TokenPermutation], finish: Callable[[], list[DispatchPlan]]) -> None:
        self.leaving = tuple(leaving)
        self._finish = finish

    def plans(self) -> list[DispatchPlan]:
        """Wait for the counts; return the plan of each routing. Called once, in one order on all ranks of the axis."""
        return self._finish()


def begin_dispatch(routings: Sequence[Routing], parallel: ExpertParallel | None) -> Dispatch:
    """Start the exchange of counts for each routing: one small message to each rank of the axis. Collective over the axis.

    What is computed before `Dispatch.plans`, such as gathering the rows that leave, hides the exchange.
    """
    if parallel is None or parallel.size == 1:
        return _at_home(routings)
    return _two_level(routings, parallel) if parallel.two_level else _flat(routings, parallel)


def _at_home(routings: Sequence[Routing]) -> Dispatch:
    assigned = [assign(routing.experts, routing.tally.counts.numel(), routing.kept) for routing in routings]

    def finish() -> list[DispatchPlan]:
        return [
            DispatchPlan(leaving, (), ExpertRows(None, None, tuple(counts.tolist()))) for leaving, counts in assigned
        ]

    return Dispatch([leaving for leaving, _ in assigned], finish)


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

    def finish() -> list[DispatchPlan]:
        sending, receiving = exchange.wait()
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
    """A row goes once to each node that holds an expert of its token, to the rank at this rank's place, and from there on.

    Each rank tells each other rank how many rows it sends to that rank's node, and how many choices of each expert there.
    From its own place in other nodes a rank learns so what it has to hand on, and from the other places in its node, over all
    nodes, what will be handed to it: no second exchange is needed inside the node.
    """
    across, inside = parallel.across, parallel.inside
    assert across is not None
    assert inside is not None
    total = routings[0].tally.counts.numel()
    local_experts, per_node, nodes, places = (
        parallel.own(total)[0],
        total // parallel.nodes,
        parallel.nodes,
        inside.size,
    )
    leaving, routes, counts = [], [], []
    for routing in routings:
        experts = routing.experts if routing.kept is None else torch.where(routing.kept, routing.experts, -per_node)
        node = torch.div(experts, per_node, rounding_mode="floor")
        every = torch.arange(nodes, device=experts.device)
        needed = (node.unsqueeze(-1) == every).any(1)
        assignment, rows = assign(every.expand(experts.shape[0], -1), nodes, needed)
        leaving.append(assignment)
        target = (assignment.order % nodes).unsqueeze(1)
        choices = experts.index_select(0, assignment.token)
        in_target = node.index_select(0, assignment.token) == target
        routes.append(torch.where(in_target, choices % per_node, choices.new_tensor(-1)))
        wanted = torch.bincount(torch.where(experts < 0, total, experts).flatten(), minlength=total + 1)[:total]
        counts.append(torch.cat([rows.unsqueeze(1), wanted.view(nodes, per_node)], dim=1))
    # ranks are numbered node · places + place; every place of a node is told the same
    table = torch.stack(counts, dim=1).repeat_interleave(places, dim=0)
    exchange = _CountExchange(table, parallel.axis)

    def finish() -> list[DispatchPlan]:
        told, heard = (x.view(nodes, places, len(routings), 1 + per_node) for x in exchange.wait())
        # chunks arrive by place, expert and node
        place = torch.arange(places).view(-1, 1, 1)
        keys = torch.arange(local_experts).view(-1, 1) * parallel.size + torch.arange(nodes) * places + place
        plans = []
        for at, (assignment, route) in enumerate(zip(leaving, routes, strict=True)):
            sent, received = told[:, inside.index, at, 0], heard[:, inside.index, at, 0]
            first = AllToAllSplit(across, tuple(sent.tolist()), tuple(received.tolist()))
            handed_on = heard[:, inside.index, at, 1:].view(nodes, places, local_experts).sum((0, 2))
            handed_here = (
                heard[:, :, at, 1:].view(nodes, places, places, local_experts)[:, :, inside.index].permute(1, 2, 0)
            )
            second = AllToAllSplit(inside, tuple(handed_on.tolist()), tuple(handed_here.sum((1, 2)).tolist()))
            arrival = _arrival(keys, handed_here, local_experts, route.device)
            plans.append(DispatchPlan(assignment, (first, second), arrival, route))
        return plans

    return Dispatch(leaving, finish)


def _arrival(keys: Tensor, received: Tensor, local_experts: int, device: torch.device) -> ExpertRows:
    """`keys`: what to sort the chunks by, expert first; `received`: rows of each chunk; both in order of arrival, on the CPU."""
    chunks, rows = keys.flatten(), received.flatten()
    experts = torch.div(chunks, max(len(chunks) // local_experts, 1), rounding_mode="floor")
    counts = torch.zeros(local_experts, dtype=torch.int64).index_add_(0, experts, rows)
    order = torch.argsort(torch.repeat_interleave(chunks, rows), stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return ExpertRows(order.to(device), inverse.to(device), tuple(counts.tolist()))


class _CountExchange:
    """The exchange of a table [rank, …], a row for each rank, under way; it waits for the others in `wait` only."""

    def __init__(self, sending: Tensor, axis: Axis) -> None:
        self._sent = sending.contiguous()
        self._received = torch.empty_like(self._sent)
        self._work = start(dist.all_to_all_single, self._received, self._sent, group=axis.group)

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the table, and the rows from each rank, both on the CPU."""
        with standstill("count exchange"):
            self._work.wait()
            both: Any = torch.stack([self._sent, self._received]).cpu()
        return both[0], both[1]
