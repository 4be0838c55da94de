"""Dispatch and combine over 2 and 4 ranks against one rank that holds all experts: outputs and every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.config import load
from pipeloom.models import layers
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue
from pipeloom.ops.segments import Compute, begin, in_order
from pipeloom.ops.token_permute import TokenPermutation
from pipeloom.parallel import dispatch as dispatch_module
from pipeloom.parallel.dispatch import (
    AllToAll,
    DispatchPlan,
    ExpertParallel,
    begin_dispatch,
    combine_segments,
    dispatch_segments,
    group_by_expert,
    permute_for_dispatch,
    ungroup,
    unpermute_and_mix,
)
from pipeloom.parallel.expert import Experts
from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.parallel.router import Gate, Routing, drop_over_capacity, route
from pipeloom.parallel.sharding import shard_of, shardings_of
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

EXPERTS, HIDDEN, INNER = 8, 12, 20


@dataclass(frozen=True)
class Case:
    """One routing problem: tokens of each rank, choices, and what is special about the logits."""

    name: str
    tokens: tuple[int, ...]
    k: int = 2
    only: tuple[int, ...] = tuple(range(EXPERTS))  # experts that get anything
    capacity: int = 0


CASES = [
    Case("usual", (13, 9, 5, 11)),
    Case("three choices", (13, 9, 5, 11), k=3),
    Case("one choice", (13, 9, 5, 11), k=1),
    Case("one expert takes all", (13, 9, 5, 11), k=1, only=(5,)),
    Case("empty experts", (13, 9, 5, 11), only=(1, 2, 6)),
    Case("ranks without tokens", (0, 9, 0, 11)),
    Case("no tokens at all", (0, 0, 0, 0)),
    Case("drops", (13, 9, 5, 11), capacity=2),
    Case("drops of three", (13, 9, 5, 11), k=3, capacity=2),
]


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def routing_of(case: Case, logits: Tensor) -> Routing:
    masked = logits + torch.full((EXPERTS,), -30.0).index_fill(0, torch.tensor(case.only), 0.0)
    routing = route(Gate("softmax", EXPERTS, case.k), masked)
    return drop_over_capacity(routing, case.capacity) if case.capacity else routing


def experts_of(parallel: ExpertParallel | None) -> Experts:
    experts = Experts(EXPERTS, HIDDEN, INNER, parallel)
    layouts = shardings_of(experts)
    index = {"ep": parallel.axis.index if parallel is not None else 0}
    with torch.no_grad():
        for at, (name, parameter) in enumerate(experts.named_parameters()):
            whole = normal(*layouts[name].full_shape(parameter.shape), seed=at) / 4
            parameter.copy_(shard_of(whole, layouts[name], index))
    return experts


def through(
    x: Tensor, routing: Routing, experts: Experts, parallel: ExpertParallel | None
) -> tuple[Tensor, DispatchPlan]:
    """The whole way, segment by segment."""
    dispatch = begin_dispatch([routing], parallel)
    leaving = permute_for_dispatch(x, routing.weights, dispatch.leaving[0], parallel)
    (dispatch_plan,) = dispatch.plans()

    def compute(values: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, *rest = values
        return ungroup(
            experts(group_by_expert(rows, dispatch_plan), dispatch_plan.arrival.counts), dispatch_plan
        ), *rest

    segments = [*dispatch_segments(parallel), Compute("experts", compute), *combine_segments(parallel)]
    rows, weights, _ = in_order(segments, (*leaving, dispatch_plan))
    return unpermute_and_mix(rows, weights, dispatch_plan), dispatch_plan


def in_chunks(x: Tensor, routing: Routing, experts: Experts, parallel: ExpertParallel | None, n: int) -> Tensor:
    """Two communications are under way at once, autograd overlaps the backward by itself."""
    size = -(-x.shape[0] // n)
    bounds = [(at * size, min((at + 1) * size, x.shape[0])) for at in range(n)]
    bounds = [(min(a, x.shape[0]), b) for a, b in bounds]
    parts = [
        Routing(
            routing.experts[a:b],
            routing.weights[a:b],
            routing.kept[a:b] if routing.kept is not None else None,
            routing.tally,
        )
        for a, b in bounds
    ]
    dispatch_plans = begin_dispatch(parts, parallel).plans()
    there, back = dispatch_segments(parallel), combine_segments(parallel)
    assert isinstance(there[0], AllToAll)
    assert isinstance(back[-1], AllToAll)
    started = [
        begin(there[0], (*permute_for_dispatch(x[a:b], part.weights, dispatch_plan.leaving, parallel), dispatch_plan))
        for (a, b), part, dispatch_plan in zip(bounds, parts, dispatch_plans, strict=True)
    ]
    ends = []
    for finish, dispatch_plan in zip(started, dispatch_plans, strict=True):
        rows, *rest = in_order(there[1:], finish())
        rows = ungroup(experts(group_by_expert(rows, dispatch_plan), dispatch_plan.arrival.counts), dispatch_plan)
        ends.append(begin(back[-1], in_order(back[:-1], (rows, *rest))))
    return torch.cat(
        [
            unpermute_and_mix(*finish()[:2], dispatch_plan)
            for finish, dispatch_plan in zip(ends, dispatch_plans, strict=True)
        ]
    )


@dataclass
class Outcome:
    output: Tensor
    dx: Tensor
    dlogits: Tensor
    weights: dict[str, Tensor]


def one(case: Case, rank: int, parallel: ExpertParallel | None, chunks: int = 0, deferred: bool = False) -> Outcome:
    x = normal(case.tokens[rank], HIDDEN, seed=100 + rank).requires_grad_()
    logits = normal(case.tokens[rank], EXPERTS, seed=200 + rank).requires_grad_()
    experts = experts_of(parallel)
    grad_context = WeightGradContext()
    if deferred:
        grad_context.queue = WeightGradQueue()
        for part in (experts.gate_proj, experts.up_proj, experts.down_proj):
            part.set_weight_grad_context(grad_context)
    routing = routing_of(case, logits)
    if chunks:
        out = in_chunks(x, routing, experts, parallel, chunks)
    else:
        out, _ = through(x, routing, experts, parallel)
    out.backward(normal(case.tokens[rank], HIDDEN, seed=300 + rank))
    if grad_context.queue is not None:
        assert all(p.grad is None for p in experts.parameters())
        grad_context.queue.flush()
    weights = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
    assert x.grad is not None
    assert logits.grad is not None
    return Outcome(out.detach(), x.grad, logits.grad, weights)


def check(found: Outcome, want: Outcome, what: str, exact: bool = False) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-5}
    pairs = [(found.output, want.output, "output"), (found.dx, want.dx, "dx"), (found.dlogits, want.dlogits, "gate")]
    assert set(found.weights) == set(want.weights), what
    pairs += [(gradient, want.weights[name], name) for name, gradient in found.weights.items()]
    for a, b, name in pairs:
        torch.testing.assert_close(a, b, **tolerance, msg=lambda text, name=name: f"{what}, {name}: {text}")


def one_process(case: Case, world: int, parallel: ExpertParallel) -> Outcome:
    """This rank's outcome with all experts here; the expert gradients summed over the ranks' tokens, this rank's part."""
    mine = one(case, parallel.axis.index, None)
    every = [one(case, rank, None) for rank in range(world)]
    layouts = shardings_of(experts_of(parallel))
    index = {"ep": parallel.axis.index}
    sums = {name: torch.stack([o.weights[name] for o in every]).sum(0) for name in mine.weights}
    return Outcome(
        mine.output, mine.dx, mine.dlogits, {name: shard_of(g, layouts[name], index) for name, g in sums.items()}
    )


def every_case(rank: int, world: int) -> None:
    axis = Axis(tuple(range(world)), rank, dist.group.WORLD)
    flat = ExpertParallel(axis)
    for case in CASES:
        want = one_process(case, world, flat)
        check(one(case, rank, flat), want, case.name)
        check(one(case, rank, flat, deferred=True), want, f"{case.name}, deferred")
        check(one(case, rank, flat, chunks=3), want, f"{case.name}, chunks")


def test_two_ranks_are_one_rank() -> None:
    run_ranks(every_case, 2, 2)


def two_level_cases(rank: int) -> dict[str, tuple[int, int]]:
    """Case -> rows across nodes of this rank, two-level and flat, both as counted and as sent."""
    mesh = Mesh.of(MeshShape(dp=4, ep=4, ep_nodes=2))
    assert mesh is not None
    axis = mesh.ep
    same_order, levels = ExpertParallel(axis, 2), ExpertParallel(axis, 2, mesh.inside, mesh.across)
    every_case(rank, 4)
    crossings = {}
    for case in CASES:
        want = one(case, rank, same_order)
        check(one(case, rank, levels), want, f"{case.name}, two levels", exact=True)
        check(one(case, rank, levels, chunks=2), want, f"{case.name}, two levels, chunks")
        if case.k <= 2:
            check(one(case, rank, levels), one(case, rank, ExpertParallel(axis)), f"{case.name}, plain", exact=True)
        logits = normal(case.tokens[rank], EXPERTS, seed=200 + rank)
        routing = routing_of(case, logits)
        counted = [
            bytes_across_nodes(begin_dispatch([routing], p).plans(), p, 4 * HIDDEN) for p in (levels, same_order)
        ]
        kept = routing.kept if routing.kept is not None else torch.ones_like(routing.experts, dtype=torch.bool)
        other = kept & (routing.experts // 4 != rank // 2)
        assert counted == [4 * HIDDEN * int(other.any(1).sum()), 4 * HIDDEN * int(other.sum())], case.name
        crossings[case.name] = counted[0], counted[1]
    crossings["sent"] = sent_across(rank, levels), sent_across(rank, same_order)
    return crossings


def bytes_across_nodes(plans: list[DispatchPlan], parallel: ExpertParallel, row_bytes: int) -> int:
    """Bytes of rows that this rank sends to other nodes in one dispatch, by its plan."""
    sent = [plan.hops[0].send for plan in plans]
    if parallel.across is not None:
        return row_bytes * sum(sum(counts) - counts[parallel.across.index] for counts in sent)
    length = parallel.size // parallel.nodes
    here = parallel.axis.index // length
    return row_bytes * sum(count for counts in sent for rank, count in enumerate(counts) if rank // length != here)


def sent_across(rank: int, parallel: ExpertParallel) -> int:
    """Bytes of rows of the usual case that this rank gives to torch for the other node, in a dispatch."""
    real, total = dist.all_to_all_single, 0

    def counting(
        output: Tensor, given: Tensor, out: Any = None, into: Any = None, group: Any = None, **rest: Any
    ) -> Any:
        nonlocal total
        if given.is_floating_point() and given.shape[-1] == HIDDEN:
            members = dist.get_process_group_ranks(group)
            rows = sum(n for to, n in zip(members, into, strict=True) if to // 2 != rank // 2)
            total += rows * given.shape[-1] * given.element_size()
        return real(output, given, out, into, group=group, **rest)

    dist.all_to_all_single = counting
    try:
        case = CASES[0]
        x, logits = normal(case.tokens[rank], HIDDEN, seed=1), normal(case.tokens[rank], EXPERTS, seed=200 + rank)
        routing = routing_of(case, logits)
        (dispatch_plan,) = begin_dispatch([routing], parallel).plans()
        rows = permute_for_dispatch(x, routing.weights, dispatch_plan.leaving, parallel)
        in_order(dispatch_segments(parallel), (*rows, dispatch_plan))
    finally:
        dist.all_to_all_single = real
    return total


@pytest.mark.slow
def test_four_ranks_as_two_nodes_send_each_token_once_to_a_node() -> None:
    """Bitwise the flat way; what crosses is counted right, and is less where tokens have two experts in one node."""
    found = run_ranks(two_level_cases, 4)
    for counted in found:
        for levels, flat in counted.values():
            assert levels <= flat
        assert counted["sent"] == counted["usual"]
    assert sum(c["three choices"][0] for c in found) < 0.8 * sum(c["three choices"][1] for c in found)
    assert sum(c["ranks without tokens"][0] for c in found) > 0


class TwoEqualRanks:
    """Stands in for `all_to_all_single` of two ranks with equal tokens, and notes the order of what happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        monkeypatch.setattr(dist, "all_to_all_single", self.send)
        monkeypatch.setattr(dispatch_module, "gather_rows", self.gather)
        monkeypatch.setattr(Experts, "forward", self.compute)

    def send(self, received: Tensor, sent: Tensor, *sizes: Any, **keywords: Any) -> Any:
        name = "rows" if sizes else "counts"
        if name == "counts":
            received.copy_(sent[:1].expand_as(sent))
        else:
            received.zero_()
        self.events.append(f"start {name}")
        return SimpleNamespace(wait=lambda: self.events.append(f"wait for {name}"))

    def gather(self, x: Tensor, permutation: TokenPermutation) -> Tensor:
        self.events.append("gather")
        return x.index_select(0, permutation.token)

    def compute(self, rows: Tensor, counts: Any) -> Tensor:
        self.events.append("experts")
        return rows


@pytest.mark.parametrize(
    ("parts", "between"),
    [
        ({}, ["gather"]),
        ({"chunks": 2}, ["gather", "gather"]),
        ({"blocks": 2}, ["gather", "wait for rows", "experts", "start rows"]),
    ],
    ids=["whole", "chunks", "blocks"],
)
def test_something_is_computed_while_the_counts_travel(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, int], between: list[str]
) -> None:
    """Between the start of the (last) exchange of counts and the wait for it."""
    ranks = TwoEqualRanks(monkeypatch)
    shape = load("tiny", {"model.num_hidden_layers": 1, "model.num_experts": 4}).model.shape()
    block = layers(shape, 5, expert=ExpertParallel(Axis((0, 1), 0, None), **parts))[1]()
    with torch.no_grad():
        block(torch.zeros(2, 8, shape.hidden_size))
    started = len(ranks.events) - 1 - ranks.events[::-1].index("start counts")
    waited = len(ranks.events) - 1 - ranks.events[::-1].index("wait for counts")
    assert ranks.events[started + 1 : waited] == between
