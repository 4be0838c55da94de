"""The way of one micro-batch's tokens to their experts and back: which rows go where, agreed on before any row moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        fan: two-level: rows that came across -> rows for this node's ranks.
        arrival: at the experts.
    """

    leaving: TokenPermutation
    hops: tuple[AllToAllSplit, ...]
    fan: TokenPermutation | None
    arrival: ExpertRows


def plan_dispatch(routings: Sequence[Routing], parallel: ExpertParallel | None) -> list[DispatchPlan]:
    """A trip for each routing; collective over the axis, with small messages only."""
    if parallel is None or parallel.size == 1:
        return [_at_home(routing) for routing in routings]
    if parallel.two_level:
        return [_two_level(routing, parallel) for routing in routings]
    return _flat(routings, parallel)


def _at_home(routing: Routing) -> DispatchPlan:
    leaving, counts = assign(routing.experts, routing.tally.counts.numel(), routing.kept)
    return DispatchPlan(leaving, (), None, ExpertRows(None, None, tuple(counts.tolist())))


def _flat(routings: Sequence[Routing], parallel: ExpertParallel) -> list[DispatchPlan]:
    size, total = parallel.size, routings[0].tally.counts.numel()
    own = parallel.own(total)[0]
    per_node = total // parallel.nodes
    leaving, counts = [], []
    for routing in routings:
        nodes = routing.experts // per_node if parallel.nodes > 1 else None
        assignment, found = assign(routing.experts, total, routing.kept, nodes, parallel.nodes)
        leaving.append(assignment)
        counts.append(found.view(size, own))
    sending = torch.stack(counts, dim=1)  # rank, routing, expert of the rank
    tables = _exchange_counts(sending, parallel.axis)
    dispatch_plans = []
    for at, assignment in enumerate(leaving):
        sent, received = (table[:, at] for table in tables)
        split = AllToAllSplit(parallel.axis, tuple(sent.sum(1).tolist()), tuple(received.sum(1).tolist()))
        keys = torch.arange(own) * size + torch.arange(size).unsqueeze(1)  # chunks arrive by rank, then by expert
        dispatch_plans.append(
            DispatchPlan(assignment, (split,), None, _arrival(keys, received, own, assignment.order.device))
        )
    return dispatch_plans


def _two_level(routing: Routing, parallel: ExpertParallel) -> DispatchPlan:
    """A row goes once to each node that holds an expert of its token, to the rank at this rank's place, and from there on."""
    across, inside = parallel.across, parallel.inside
    assert across is not None
    assert inside is not None
    total = routing.tally.counts.numel()
    own = parallel.own(total)[0]
    per_node = total // parallel.nodes
    tokens = routing.experts.shape[0]
    device = routing.experts.device
    chosen = routing.experts if routing.kept is None else torch.where(routing.kept, routing.experts, -per_node)
    node = torch.div(chosen, per_node, rounding_mode="floor")
    every = torch.arange(parallel.nodes, device=device)
    needed = (node.unsqueeze(-1) == every).any(1)
    leaving, counts = assign(every.expand(tokens, -1), parallel.nodes, needed)
    tables = _exchange_counts(counts.view(-1, 1), across)
    first = AllToAllSplit(across, *(tuple(table.flatten().tolist()) for table in tables))
    # what each row is to do in its node: the experts there, -1 for choices of other nodes
    target = leaving.order % parallel.nodes
    own_choices = chosen.index_select(0, leaving.token)
    inside_node = torch.where(
        node.index_select(0, leaving.token) == target.unsqueeze(1), own_choices % per_node, own_choices.new_tensor(-1)
    )
    tasks = _exchange(inside_node, first)
    source = torch.repeat_interleave(torch.arange(across.size), torch.tensor(first.receive)).to(device)
    keys = tasks.clamp_min(0) * across.size + source.unsqueeze(1)
    fan, found = assign(keys, per_node * across.size, tasks >= 0)
    sent, received = _exchange_counts(found.view(inside.size, own * across.size), inside)
    second = AllToAllSplit(inside, tuple(sent.sum(1).tolist()), tuple(received.sum(1).tolist()))
    # chunks arrive by place, expert and node; ranks are numbered node · places + place
    places = torch.arange(inside.size).view(-1, 1, 1)
    canonical = torch.arange(own).view(-1, 1) * parallel.size + torch.arange(across.size) * inside.size + places
    return DispatchPlan(leaving, (first, second), fan, _arrival(canonical, received, own, device))


def _arrival(keys: Tensor, received: Tensor, own: int, device: torch.device) -> ExpertRows:
    """`keys`: what to sort the chunks by, expert first; `received`: rows of each chunk; both in order of arrival, on the CPU."""
    chunks, rows = keys.flatten(), received.flatten()
    experts = torch.div(chunks, max(len(chunks) // own, 1), rounding_mode="floor")
    counts = torch.zeros(own, dtype=torch.int64).index_add_(0, experts, rows)
    order = torch.argsort(torch.repeat_interleave(chunks, rows), stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return ExpertRows(order.to(device), inverse.to(device), tuple(counts.tolist()))


def _exchange_counts(sending: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """[rank, …] rows for each rank -> (the same, rows from each rank), both on the CPU."""
    sending = sending.contiguous()
    received = torch.empty_like(sending)
    if axis.size == 1:
        return sending.cpu(), sending.cpu()
    with standstill("count exchange"):
        start(dist.all_to_all_single, received, sending, group=axis.group).wait()
        both: Any = torch.stack([sending, received]).cpu()
    return both[0], both[1]


def _exchange(values: Tensor, split: AllToAllSplit) -> Tensor:
    """Rows [send, …] over the hop -> [receive, …]."""
    received = values.new_empty((sum(split.receive), *values.shape[1:]))
    with standstill("exchange of routes"):
        sizes = list(split.receive), list(split.send)
        start(dist.all_to_all_single, received, values.contiguous(), *sizes, group=split.axis.group).wait()
    return received
