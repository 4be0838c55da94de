"""State that layers of two stages share: refused where a forward changes it, in one process and in several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dying import run_until_dead
from one_process import Plain, differences
from torch import Tensor, nn
from torch.nn.utils import prune

import pipeloom as pl
from models import WIDTH, batch, mse
from pipeloom.errors import UsageError
from pipeloom.runtime import Layer, Pipeline
from pipeloom.schedule.model import Schedule
from processes import run_ranks

ALONE = pl.schedules.build("1f1b", 1, 4)
SCHEDULES = [
    *(pl.schedules.build(name, 2, 4) for name in ("1f1b", "zb-h1", "zbv", "dualpipe")),
    pl.schedules.interleaved(ranks=2, chunks=2, microbatches=4),
]
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)

LEFT: dict[str, Any] = {}
LATEST: Any = None


class Statistics(nn.Module):
    """Running statistics, by one of torch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * (1 + 0.1 * float(self.seen % 5))


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * (self.calls % 5))


class Draws(nn.Module):
    """A generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + torch.rand((), generator=self.generator))


class With(Plain):
    """A layer with a part that another layer has, too."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(super().forward(x))


class Stash:
    def __init__(self) -> None:
        self.value: Any = None


class Leaves(Plain):
    """Leaves a detached tensor for another layer in an object, a dict or a variable."""

    def __init__(self, stash: Stash, way: str) -> None:
        super().__init__()
        self.stash, self.way = stash, way

    def forward(self, x: Tensor) -> Tensor:
        global LATEST
        out = super().forward(x)
        if self.way == "object":
            self.stash.value = out.detach()
        elif self.way == "number":
            self.stash.value = out.mean().item()
        elif self.way == "in place":
            if self.stash.value is None:
                self.stash.value = torch.zeros_like(out)
            self.stash.value.copy_(out.detach())
        elif self.way == "global dict":
            LEFT["value"] = out.detach()
        else:
            assert self.way == "global variable"
            LATEST = out.detach()
        return out


class Finds(Leaves):
    def forward(self, x: Tensor) -> Tensor:
        left = {"global dict": LEFT.get("value"), "global variable": LATEST}.get(self.way, self.stash.value)
        return Plain.forward(self, x) + left


def closed_over() -> list[Callable[[], nn.Module]]:
    """Two layers whose code refers to a variable of the function around it."""
    left: Any = None

    class Writes(Plain):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal left
            left = super().forward(x).detach()
            return super().forward(x)

    class Reads(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + left

    return [Writes, Reads]


PARTS = [Statistics, Counter, Attribute, Draws]
WAYS = ["object", "number", "in place", "global dict", "global variable"]


def sharing(case: Any, at_first: Any = None) -> list[Callable[[], nn.Module]]:
    """Two layers that share what `case` says; `at_first`: what a layer finds that nobody has left anything."""
    global LATEST
    LEFT["value"] = LATEST = at_first
    if case == "closure":
        return closed_over()
    if isinstance(case, str):
        stash = Stash()
        stash.value = at_first
        return [lambda: Leaves(stash, case), lambda: Finds(stash, case)]
    part = case()
    return [lambda: With(part)] * 2


cases = pytest.mark.parametrize("case", [*PARTS, *WAYS, "closure"])


def agree(case: Any, order: Callable[[Any, Any], list[Any]], schedule: Schedule) -> list[str]:
    """What differs from one process, of which either has state of its own."""
    made = iter(
        [sharing(case), sharing(case)]
    )  # `differences` builds one process's layers first, and then the pipeline's
    kept: list[list[Any]] = []

    def layer(at: int) -> nn.Module:
        if at == 0:
            kept.append(order(*next(made)))
        return kept[-1][at]()

    return differences([lambda at=at: layer(at) for at in range(4)], schedule)


@cases
@schedules
def test_state_of_two_stages_that_a_forward_changes_is_refused(schedule: Schedule, case: Any) -> None:
    with pytest.raises(UsageError, match=r"which a layer of another stage shares|choose a schedule with one route"):
        agree(case, lambda a, b: [Plain, a, Plain, b], schedule)


@cases
def test_state_of_two_layers_of_a_stage_is_as_in_one_process(case: Any) -> None:
    for schedule in (ALONE, SCHEDULES[0]):
        assert agree(case, lambda a, b: [a, b, Plain, Plain], schedule) == []


class Angles(nn.Module):
    """What several layers share and nobody changes: a buffer, a cache of the first forward, a value computed anew and alike."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(3.0))
        self.cache: dict[int, Tensor] = {}
        self.made: Tensor | None = None
        self.mask = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = self.steps.cos()
        self.cache.setdefault(len(x), torch.ones(WIDTH))
        self.mask = torch.ones(3)
        return x * (self.made * self.mask)[:, None] * self.cache[len(x)]


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if len(s.routes) == 1], ids=lambda schedule: schedule.name)
def test_what_no_forward_changes_may_be_shared(schedule: Schedule) -> None:
    assert agree(Angles, lambda a, b: [Plain, a, Plain, b], schedule) == []


class Collects(Plain):
    """Puts its own loss on a list, for the last layer to add."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.losses = losses

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.losses.append(out.square().mean())
        return out


def on_ranks(rank: int, case: str) -> None:
    if case == "losses":
        losses: list[Tensor] = []
        first, last = (lambda: Collects(losses)), (lambda: Collects(losses))
    elif case == "part":
        part = Counter()
        first = last = lambda: With(part)
    else:
        first, last = sharing(case, torch.zeros(()))
    layers = [Layer(f"layer{at}", make) for at, make in enumerate((first, Plain, Plain, last))]
    Pipeline(layers, pl.schedules.build("1f1b", 2, 4), loss=mse).step(*batch(8))


@pytest.mark.dist
@pytest.mark.parametrize("case", ["part", "object", "global dict", "global variable", "losses"])
def test_state_of_layers_on_two_ranks_is_refused(case: str, tmp_path: Path) -> None:
    """Each rank has a copy of its own, so that neither would notice."""
    ends = run_until_dead(on_ranks, 2, tmp_path, case)
    assert all(end.code != 0 for end in ends)
    assert any("which a layer of another stage shares" in end.words for end in ends)


def one_memory(rank: int, case: str) -> None:
    modules = [Plain() for _ in range(4)]
    weight = modules[0].linear.weight
    tied = []
    if case == "buffer":
        modules[3].register_buffer("weights", weight.detach())
    elif case == "overlapping":
        whole = torch.randn(2 * WIDTH, WIDTH)
        modules[0].linear.weight, modules[3].linear.weight = (
            nn.Parameter(whole[:WIDTH]),
            nn.Parameter(whole[1 : WIDTH + 1]),
        )
    elif case == "side by side":
        whole = torch.randn(2 * WIDTH, WIDTH)
        modules[0].linear.weight, modules[3].linear.weight = nn.Parameter(whole[:WIDTH]), nn.Parameter(whole[WIDTH:])
    else:
        modules[1 if case == "one rank" else 3].linear.weight = nn.Parameter(weight.data)
    if case == "tied":
        tied = [("layer0.linear.weight", "layer3.linear.weight")]
    layers = [Layer(f"layer{at}", lambda module=module: module) for at, module in enumerate(modules)]
    pipeline = Pipeline(layers, pl.schedules.build("1f1b", 2, 4), loss=mse, tied=tied)
    pipeline.step(*batch(8))
    pipeline.close()


@pytest.mark.dist
@pytest.mark.parametrize("case", ["parameter", "buffer", "overlapping"])
def test_two_tensors_of_one_memory_on_two_ranks_are_refused(case: str, tmp_path: Path) -> None:
    ends = run_until_dead(one_memory, 2, tmp_path, case)
    assert all("are two tensors of one memory, which ranks do not share" in end.words for end in ends)


@pytest.mark.dist
@pytest.mark.parametrize("case", ["one rank", "tied", "side by side"])
def test_tensors_of_one_memory_may_be_tied_or_on_one_rank_or_side_by_side(case: str) -> None:
    assert run_ranks(one_memory, 2, case) == [None, None]


class Scaled(Plain):
    """Trains a tensor that is no parameter."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def scaled(rank: int) -> None:
    scale = torch.ones(WIDTH, requires_grad=True)
    makes: list[Callable[[], nn.Module]] = [lambda: Scaled(scale), Plain, Plain, lambda: Scaled(scale)]
    layers = [Layer(f"layer{at}", make) for at, make in enumerate(makes)]
    Pipeline(layers, pl.schedules.build("1f1b", 2, 4), loss=mse).step(*batch(8))


@pytest.mark.dist
def test_a_tensor_that_trains_on_two_ranks_is_refused(tmp_path: Path) -> None:
    ends = run_until_dead(scaled, 2, tmp_path)
    assert all("scale' requires a gradient, and layers of two ranks hold it" in end.words for end in ends)


class Counted(Plain):
    """Counts its forwards in a dict that all layers share."""

    def __init__(self, counts: dict[str, int]) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        self.counts["F"] = self.counts.get("F", 0) + 1
        return super().forward(x)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_counts_in_a_dict_may_be_shared(schedule: Schedule) -> None:
    counts: dict[str, int] = {}
    assert differences([lambda: Counted(counts) for _ in range(4)], schedule) == []
    assert counts["F"]


def computed_twice(rank: int) -> bool:
    """Modules that both ranks hold, with a weight that is computed from others, as `torch.nn.utils.prune` makes it."""
    kept = [Plain() for _ in range(2)]
    for each in kept:
        prune.random_unstructured(each.linear, "weight", amount=0.5)  # type: ignore[no-untyped-call]
    pipeline = Pipeline(kept, pl.schedules.build("chimera", 2, 2), loss=mse)
    pipeline.step(*batch(4))
    return all(p.grad is not None for p in pipeline.parameters())


@pytest.mark.dist
def test_a_weight_that_is_computed_from_others_may_be_on_two_ranks() -> None:
    assert run_ranks(computed_twice, 2) == [True, True]
