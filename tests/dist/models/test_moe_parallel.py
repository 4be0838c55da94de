"""The decoder with experts over 2 and 4 ranks against one process: loss, every gradient, loads; every way of running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moe_steps
from layouts import worst
from moe_steps import Way, mesh_of, model, serial, step_on
from pipeloom.config import ModelSection
from pipeloom.models import MoeClasses, layers, moe
from pipeloom.models.gate import TopKGate
from pipeloom.parallel.dispatch import AllToAll, ExpertParallel
from pipeloom.parallel.expert import ExpertLinear, Experts
from processes import run_ranks

ROUTERS: list[dict[str, Any]] = [
    {"router": "softmax", "num_shared_experts": 1},
    {"router": "softmax", "num_experts_per_tok": 3, "capacity_factor": 0.7},
    {"router": "switch", "num_experts_per_tok": 1, "capacity_factor": 1.0},
    {"router": "gshard", "capacity_factor": 1.2},
    {"router": "noisy"},
    {"router": "sigmoid", "num_shared_experts": 1},
]
PADDED = [changes | {"pad_to_capacity": True} for changes in ROUTERS if "capacity_factor" in changes]
WAYS = [Way(), Way(split=True), Way(recompute=True), Way(chunks=3), Way(chunks=2, split=True, recompute=True)]
BLOCK_WAYS = [Way(blocks=2), Way(blocks=3, split=True), Way(blocks=8, recompute=True)]


def compare(shape: ModelSection, way: Way, mesh: Any, want: Any) -> None:
    loss, gradients, loads = step_on(mesh, shape, way)
    assert abs(loss - want[0]) < 1e-5 * want[0], (shape, way)
    error = worst(gradients, want[1])
    assert error < 1e-5, (shape, way, error, [n for n in gradients if worst({n: gradients[n]}, {n: want[1][n]}) > 1e-5])
    assert loads == want[2], (shape, way)


def over_two(rank: int) -> None:
    mesh = mesh_of(dp=2, ep=2)
    for at, changes in enumerate(ROUTERS):
        shape = model(**changes)
        want = serial(shape, 2)
        compare(shape, Way(), mesh, want)
        compare(shape, WAYS[1 + at % 4], mesh, want)
        if not shape.capacity_factor:
            compare(shape, BLOCK_WAYS[at % 3], mesh, want)
    shape = model(moe_layer_freq=(0, 1))
    compare(shape, WAYS[4], mesh, serial(shape, 2))
    shape = model(dropout=0.2, num_shared_experts=1)
    want = serial(shape, 2)
    for way in (Way(recompute=True), Way(chunks=2), Way(blocks=3)):
        compare(shape, way, mesh, want)


def over_four(rank: int) -> None:
    shapes = [model(**ROUTERS[at], num_experts=8) for at in (0, 1, 4)]
    wants = [serial(shape, 4) for shape in shapes]
    mesh, two_nodes, four_nodes = mesh_of(dp=4, ep=4), mesh_of(dp=4, ep=4, ep_nodes=2), mesh_of(dp=4, ep=4, ep_nodes=4)
    for shape, want, way in zip(shapes, wants, (Way(), Way(chunks=2), Way(blocks=2)), strict=True):
        compare(shape, way, mesh, want)
        compare(shape, Way(chunks=way.chunks, split=True), two_nodes, want)
        compare(shape, way, four_nodes, want)
    for order in ("tp-ep-dp-pp", "dp-tp-ep-pp"):  # replicas of an expert two ranks apart, and next to each other
        compare(shapes[0], Way(), mesh_of(dp=4, ep=2, order=order), wants[0])


def over_tensor_parallel(rank: int) -> None:
    """Two replicas of two tensor-parallel ranks: an expert's own inner width is cut over the same two."""
    mesh = mesh_of(dp=2, tp=2, ep=2)
    options = {"norm_topk_prob": False, "attention_bias": True, "head_dim": 12, "rms_norm_eps": 1e-3}
    mixed = {"moe_layer_freq": (1, 0), "intermediate_size": 40}
    for changes in (ROUTERS[1], ROUTERS[4], {"dropout": 0.2, **mixed}, options):
        shape = model(num_key_value_heads=4, **changes)
        want = serial(shape, 2)
        for way in (Way(), Way(sequence=True, split=True), Way(sequence=True, recompute=True, chunks=2)):
            compare(shape, way, mesh, want)


def padded(rank: int) -> None:
    """Rows beside the chosen ones change nothing: want is one process that computes none."""
    for changes in PADDED:
        want = serial(model(**changes | {"pad_to_capacity": False}), 2)
        loss, gradients, loads = serial(model(**changes), 2)
        assert abs(loss - want[0]) < 1e-5 * want[0]
        assert worst(gradients, want[1]) < 1e-5
        assert loads == want[2]
        assert loads[-1] > 0  # some choices are dropped
        for way in (Way(), Way(split=True, recompute=True)):
            compare(model(**changes), way, mesh_of(dp=2, ep=2), want)
    shape = model(num_key_value_heads=4, **PADDED[0])
    compare(shape, Way(sequence=True), mesh_of(dp=1, tp=2), serial(shape, 1))


@pytest.mark.parametrize(("function", "world"), [(over_two, 2), (over_four, 4), (over_tensor_parallel, 4), (padded, 2)])
def test_it_is_one_process(function: Callable[[int], None], world: int) -> None:
    run_ranks(function, world)


class SquaredExperts(nn.Module):
    """down(relu(up x)²): another number of matrices, another nonlinearity."""

    def __init__(self, experts: int, hidden: int, inner: int, parallel: Any = None, tensor: Any = None) -> None:
        super().__init__()
        self.up_proj = ExpertLinear(experts, hidden, inner, 1, parallel, tensor)
        self.down_proj = ExpertLinear(experts, inner, hidden, 2, parallel, tensor)

    def forward(self, rows: torch.Tensor, counts: Any) -> torch.Tensor:
        return self.down_proj(self.up_proj(rows, counts).relu().square(), counts)  # type: ignore[no-any-return]


class NeighbourRouter(TopKGate):
    """Sends each choice to the expert after the one that the gate chose."""

    def choose(self, tokens: torch.Tensor, draws: Any) -> Any:
        routing = super().choose(tokens, draws)
        counts = routing.tally.counts.roll(1)
        experts = (routing.experts + 1) % self.gate.experts
        return replace(routing, experts=experts, tally=replace(routing.tally, counts=counts))


def own_classes(rank: int) -> None:
    usual = serial(model(), 2)
    moe_steps.layers = partial(layers, classes=MoeClasses(SquaredExperts, NeighbourRouter))
    want, mesh = serial(model(), 2), mesh_of(dp=2, ep=2)
    assert not any("experts.gate_proj" in name for name in want[1])
    assert want[2] == [usual[2][3], *usual[2][:3], usual[2][4]], "block 0 has the loads of the neighbours"
    for way in (Way(), Way(split=True, chunks=2)):
        compare(model(), way, mesh, want)
    compare(model(), Way(sequence=True), mesh_of(dp=1, tp=2), serial(model(), 1))


@pytest.mark.core
def test_own_experts_and_an_own_router_over_ranks_are_those_of_one_process() -> None:
    run_ranks(own_classes, 2)


def broken(rank: int, what: str) -> float:
    """The error of a step in which something is wrong on purpose."""
    mesh, shape = mesh_of(dp=2, ep=2), model(aux_loss_coef=0.5)
    _, want, _ = serial(shape, 2)
    unpermute_and_mix, carry, group_by_expert = moe.unpermute_and_mix, TopKGate.attach_aux_loss, moe.group_by_expert
    if what == "the gate gets no gradient":
        moe.unpermute_and_mix = lambda rows, weights, dispatch_plan: unpermute_and_mix(
            rows, weights.detach(), dispatch_plan
        )
    elif what == "the share of the auxiliary loss is left out":
        TopKGate.attach_aux_loss = lambda self, weights, tally, *_: carry(self, weights, tally, None)
    elif what == "experts get each other's rows":
        moe.group_by_expert = lambda rows, dispatch_plan: group_by_expert(rows, dispatch_plan).roll(1, 0)
    return worst(step_on(mesh, shape, Way())[1], want)


@pytest.mark.core
@pytest.mark.parametrize(
    "what",
    ["the gate gets no gradient", "the share of the auxiliary loss is left out", "experts get each other's rows"],
)
def test_what_is_wrong_is_noticed(what: str) -> None:
    assert all(error > 1e-2 for error in run_ranks(partial(broken, what=what), 2))


def events(rank: int, way: Way, shared: int = 0, nodes: int = 1, world: int = 2) -> list[str]:
    """What starts, ends and computes in one forward of a block, in order; with shared experts in its backward too."""
    log: list[str] = []

    def logged(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            log.append(name)
            return function(*arguments, **more)

        return wrapped

    start = AllToAll.exchange

    def starting(self: AllToAll, values: Any, plan: Any, back: bool, routes: Any = None) -> Any:
        name = f"{self.name}{' inside' if self.quick else ''}{'' if back == self.back else ' backward'}"
        log.append(f"start {name}")
        pending = start(self, values, plan, back, routes)
        return SimpleNamespace(wait=logged(pending.wait, f"end {name}"))

    AllToAll.exchange = starting  # type: ignore[method-assign]
    Experts.forward = logged(Experts.forward, "experts")
    moe.SharedExpert.forward = logged(moe.SharedExpert.forward, "shared")  # type: ignore[method-assign]
    F.scaled_dot_product_attention = logged(F.scaled_dot_product_attention, "attention")
    mesh = mesh_of(dp=world, ep=world, ep_nodes=nodes)
    levels = (mesh.inside, mesh.across) if nodes > 1 else (None, None)
    expert = ExpertParallel(mesh.ep, nodes, *levels, chunks=way.chunks, blocks=way.blocks)
    block = layers(model(num_shared_experts=shared), 5, expert=expert)[1]()
    x = torch.randn(2, 8, 32, requires_grad=True)
    if not shared:
        block(x)
        return log
    weight = block.mlp.shared_expert.down_proj.weight
    weight.register_hook(lambda gradient: log.append("shared backward"))
    block(x).sum().backward()
    return log


@pytest.mark.core
def test_shared_experts_compute_while_tokens_are_under_way() -> None:
    """Forward behind the dispatch, and backward behind the dispatch's backward."""
    assert run_ranks(partial(events, way=Way(), shared=1), 2)[0] == [
        *("attention", "start dispatch", "shared", "end dispatch", "experts", "start combine", "end combine"),
        *("start combine backward", "end combine backward"),
        *("start dispatch backward", "shared backward", "end dispatch backward"),
    ]


@pytest.mark.core
def test_a_chunk_travels_inside_its_node_while_the_next_crosses_nodes() -> None:
    """And on the way back a chunk crosses nodes while the next one is summed inside its node; both beside the experts."""
    log = run_ranks(partial(events, way=Way(chunks=2), nodes=2, world=4), 4)[0]
    assert log == [
        *("attention", "start dispatch", "start dispatch", "end dispatch"),
        *("start dispatch inside", "end dispatch", "start dispatch inside", "end dispatch inside", "experts"),
        *("start combine inside", "end dispatch inside", "experts", "start combine inside", "end combine inside"),
        *("start combine", "end combine inside", "start combine", "end combine", "end combine"),
    ]


@pytest.mark.core
def test_what_runs_while_rows_are_under_way() -> None:
    """In chunks the experts of other tokens, in sequence blocks the attention of other tokens; neither otherwise."""
    plain, chunks, blocks = (run_ranks(partial(events, way=way), 2)[0] for way in (Way(), Way(chunks=3), Way(blocks=3)))
    whole = ["attention", "start dispatch", "end dispatch", "experts", "start combine", "end combine"]
    assert plain == whole
    assert chunks == [
        *("attention", "start dispatch", "start dispatch", "start dispatch"),
        *("end dispatch", "experts", "start combine") * 3,
        *("end combine", "end combine", "end combine"),
    ]
    assert blocks == [
        *("attention", "start dispatch", "attention", "end dispatch", "experts", "start combine", "start dispatch"),
        *("attention", "end dispatch", "experts", "start combine", "start dispatch"),
        *("end dispatch", "experts", "start combine", "end combine", "end combine", "end combine"),
    ]
