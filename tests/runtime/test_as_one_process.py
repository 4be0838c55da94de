"""Layers as people write them train as in one process, gradients that are None too, or a sentence says why they do not."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from one_process import Plain, built, differences, in_a_pipeline, one_process
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import pipeloom as pl
from fuzz._layers import Straight
from models import WIDTH, batch, gradients, mse
from pipeloom.errors import UsageError
from pipeloom.ops.products import plain_operations_only
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.schedule.model import Schedule
from processes import run_ranks

ONE_ROUTE = [pl.schedules.build(name, 2, 4) for name in ("1f1b", "zb-h1", "zbv")]
SPLIT = pl.schedules.build("zb-h1", 2, 4)

schedules = pytest.mark.parametrize("schedule", ONE_ROUTE, ids=lambda schedule: schedule.name)


# -- inputs and gradients ----------------------------------------------------------------------------------------------


class ByKeyword(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(input=x))


@schedules
def test_a_linear_layer_takes_its_input_by_keyword(schedule: Schedule) -> None:
    assert differences([ByKeyword, Plain, Plain, ByKeyword], schedule) == []


class Rounded(Plain):
    """Its function gives no gradient to its input: to that of the layer, or to a linear layer inside."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.scale = inside, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(self.linear(x) if self.inside else x, self.scale)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("inside", [False, True])
@schedules
def test_a_function_that_gives_its_input_no_gradient_leaves_none_before_it(schedule: Schedule, inside: bool) -> None:
    assert differences([Plain, Plain, lambda: Rounded(inside), Plain], schedule) == []


class Split(Plain):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        out = super().forward(x)
        return out.detach() * 2, out


class WantsGradient(Plain):
    """Asks for the gradient of an input that carries none, as force fields do with positions."""

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        positions.requires_grad_()
        (force,) = torch.autograd.grad(super().forward(positions).sum(), positions, create_graph=True)
        return x + force


@schedules
def test_a_layer_asks_for_the_gradient_of_an_input_that_carries_none(schedule: Schedule) -> None:
    assert differences([Plain, Split, WantsGradient, Plain], schedule) == []


class Detaches(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach_())


@schedules
def test_a_layer_detaches_its_input_in_place(schedule: Schedule) -> None:
    assert differences([Plain, Plain, Detaches, Plain], schedule, steps=20) == []


class Retains(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        x.retain_grad()
        return super().forward(x)


@schedules
def test_a_layer_retains_the_gradient_of_its_input(schedule: Schedule) -> None:
    gradients = []
    for pipelined in (False, True):
        modules = built([Plain, Plain, Retains, Plain])
        if pipelined:
            in_a_pipeline(modules, schedule, steps=20)
        else:
            one_process(modules, schedule.microbatches, steps=20)
        assert isinstance(modules[2], Retains)
        gradients.append(modules[2].last.grad)
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-4)


# -- weight gradients that wait ----------------------------------------------------------------------------------------


class Clamped(Plain):
    """A hook changes a gradient in place that a linear layer's output has too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.first(x))
        inner.register_hook(lambda gradient: gradient.clamp_(-0.001, 0.001))
        return inner + self.linear(x)


def test_a_gradient_that_a_hook_changes_before_its_weight_gradient_is_refused() -> None:
    layers = [Plain, Clamped, Clamped, Plain]
    assert differences(layers, ONE_ROUTE[0]) == []
    with pytest.raises(UsageError, match="changed in place between its I and its W, by a hook on a gradient or by"):
        differences(layers, SPLIT)


class OfABuffer(Plain):
    """A linear layer of a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.3)
        return x + self.linear(self.mean)


def test_an_input_that_another_forward_changes_before_its_weight_gradient_is_refused() -> None:
    layers = [Plain, Plain, Plain, OfABuffer]
    assert differences(layers, ONE_ROUTE[0]) == []
    with pytest.raises(UsageError, match="changed in place between its I and its W"):
        differences(layers, SPLIT)


# -- state of a layer, and recomputation -------------------------------------------------------------------------------


class OwnGenerators(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.torch = {"a": torch.Generator().manual_seed(1)}

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.python.random() + self.numpy.random() + torch.rand((), generator=self.torch["a"]).item()
        return super().forward(torch.tanh(self.linear(x)) * drawn)


class Mean(Plain):
    """Keeps a tensor as an attribute, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean((0, 1))
        return super().forward(x * self.mean)


class Counts:
    def __init__(self) -> None:
        self.calls = 0


class Counting(Plain):
    """Counts in a list, in a dict, in an object, and in an attribute that its first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.list, self.dict, self.object = [0], {"a": {"b": 1.0}}, Counts()

    def forward(self, x: Tensor) -> Tensor:
        self.list[0] += 1
        self.dict["a"]["b"] *= 1.1
        self.object.calls += 1
        self.late = getattr(self, "late", 0) + 1
        return super().forward(x * (self.list[0] + self.dict["a"]["b"] + self.object.calls + self.late) / 10)


STATEFUL = [OwnGenerators, Mean, Counting]


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("recompute", ["none", "full"])
@schedules
def test_a_layer_that_is_recomputed_reads_the_state_of_its_forward(
    schedule: Schedule, recompute: str, kind: type[Plain]
) -> None:
    assert differences([kind] * 4, schedule, recompute) == []


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_layer_whose_state_depends_on_the_order_is_refused_under_two_routes(kind: type[Plain]) -> None:
    with pytest.raises(UsageError, match=r"changes its attribute .* choose a schedule with one route"):
        differences([kind] * 4, pl.schedules.build("dualpipe", 2, 4))


class Replaced(Plain):
    """Replaces a tensor that does not train in each forward: a weight under a mask, say.

    Args:
        masked: weight -> the one that replaces it.
    """

    def __init__(self, masked: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fixed, self.masked = torch.ones(WIDTH), masked

    def forward(self, x: Tensor) -> Tensor:
        self.fixed = self.masked(self.fixed)
        return super().forward(x * self.fixed.to_dense().float())


def test_an_attribute_that_is_replaced_by_equal_values_does_not_depend_on_the_order() -> None:
    two_routes = pl.schedules.build("dualpipe", 2, 4)
    assert differences([lambda: Replaced(torch.clone)] * 4, two_routes) == []
    others = [lambda t: t * 1.5, lambda t: t.double(), lambda t: t.to_dense().to_sparse()]
    for masked in others:
        with pytest.raises(UsageError, match=r"changes its attribute 'fixed', .* choose a schedule with one route"):
            differences([lambda masked=masked: Replaced(masked)] * 4, two_routes)


class History(Plain):
    """Keeps what its forwards have found, and reads it."""

    def __init__(self, empty: Any, keep: Callable[[Any, Tensor], None], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.past, self.keep, self.read = empty, keep, read

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.keep(self.past, out.detach().mean())
        return out - self.read(self.past)


HISTORIES: dict[str, Callable[[], nn.Module]] = {
    "tensors in a list": lambda: History([], list.append, lambda past: torch.stack(past).mean()),
    "floats in a list": lambda: History(
        [], lambda past, mean: past.append(mean.item()), lambda past: sum(past) / len(past)
    ),
    "pairs in a list": lambda: History([], lambda past, mean: past.append((1, mean)), lambda past: past[0][1]),
    "tensors in a dict": lambda: History({}, lambda past, mean: past.update({len(past): mean}), lambda past: past[0]),
    "tensors in a deque": lambda: History(deque(), deque.append, lambda past: past[0]),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_layer_that_reads_its_history_is_right_or_refused(name: str) -> None:
    for schedule in ONE_ROUTE:
        for recompute in ("none", "full"):
            assert differences([HISTORIES[name]] * 4, schedule, recompute) == []
    with pytest.raises(UsageError, match=r"changes its attribute 'past', .* choose a schedule with one route"):
        differences([HISTORIES[name]] * 4, pl.schedules.build("dualpipe", 2, 4))


class Table(Plain):
    """Makes tables in its first forward: a buffer, an attribute, an entry of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(0), persistent=False)
        self.ones, self.tables = torch.empty(0), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.table.numel():
            self.table = torch.linspace(0, 1, WIDTH)
            self.ones, self.tables[WIDTH] = torch.ones(WIDTH), 1 + self.table
        return super().forward(x * self.tables[WIDTH] + self.table * self.ones)


class TakesAway(Plain):
    """Leaves something in itself during its forward only, behind the last operation that a backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.inner = [Counts()]

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None or self.inner[0].calls:
            raise AssertionError("the forward before has not come to its end")
        self.kept, self.inner[0].calls = x, 1
        out = super().forward(self.kept)
        self.kept, self.inner[0].calls = None, 0
        return out


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("kind", [Table, TakesAway, scripted])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_layer_that_depends_on_no_order_runs_everywhere(recompute: str, kind: Callable[[], nn.Module]) -> None:
    for schedule in (*ONE_ROUTE, pl.schedules.build("dualpipe", 2, 4)):
        assert differences([kind] * 4, schedule, recompute) == []


class Drawing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.linear(x)) * (random.random() + np.random.rand()))


def test_a_layer_that_is_recomputed_draws_again_what_python_and_numpy_drew() -> None:
    found = []
    for pipelined in (False, True):
        random.seed(0)
        np.random.seed(0)
        modules = built([Drawing, Plain, Plain, Plain])
        found.append(in_a_pipeline(modules, SPLIT, "full") if pipelined else one_process(modules, SPLIT.microbatches))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for (_, a), (_, b) in zip(*found, strict=True))


class InPlace(Plain):
    """Changes in place: an attribute, two buffers of one memory, or a parameter that does not train."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.attribute = what, torch.ones(WIDTH)
        whole = torch.ones(2 * WIDTH)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[:WIDTH])
        self.average = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean((0, 1))
        if self.what == "attribute":
            self.attribute.lerp_(mean, 0.1)
        elif self.what == "buffers":
            self.whole.mul_(0.9)
        elif self.what == "parameter":
            with torch.no_grad():
                self.average.lerp_(mean, 0.1)
        elif self.what == "data":
            self.average.data.lerp_(mean, 0.1)
        else:
            self.average.data = self.average.data * 0.9 + mean
        return super().forward(x * (self.attribute + self.part + self.average))


CHANGES = {
    "attribute": "a tensor of shape .6. among its attributes in place: make it a buffer",
    "buffers": "buffers that share memory",
    "parameter": "its parameter 'average': make it a buffer",
    "data": "its parameter 'average': make it a buffer",
    "new data": "its parameter 'average': make it a buffer",
}


@pytest.mark.parametrize("what", CHANGES)
def test_state_that_a_recomputed_forward_would_change_twice_is_refused(what: str) -> None:
    layers = [lambda: InPlace(what)] * 4
    assert differences(layers, SPLIT) == []
    with pytest.raises(UsageError, match=CHANGES[what]):
        differences(layers, SPLIT, "full")


@pytest.mark.parametrize("what", ["parameter", "data", "new data"])
def test_a_parameter_that_a_forward_changes_is_refused_under_two_routes(what: str) -> None:
    with pytest.raises(UsageError, match="changes its parameter 'average', and under this schedule stage"):
        differences([lambda: InPlace(what)] * 4, pl.schedules.build("dualpipe", 2, 4))


class Decays(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.99)
        return super().forward(x)


@schedules
def test_a_weight_that_a_forward_changes_unseen_is_refused(schedule: Schedule) -> None:
    with pytest.raises(UsageError, match=r"changes its weight 'linear.weight' through .data"):
        differences([Decays] * 4, schedule)


class DecaysBias(Plain):
    """Changes a weight that no backward needs, where autograd sees it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.bias.mul_(0.9)
        return super().forward(x)


@schedules
def test_a_weight_that_no_backward_needs_may_be_changed_in_place(schedule: Schedule) -> None:
    assert differences([DecaysBias] * 4, schedule) == []


# -- tensors between stages --------------------------------------------------------------------------------------------


class Aliases(Plain):
    """Its output two times: itself, a view of it, or off the graph."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        out = self.linear(x)
        return out, {"same": out, "view": out[..., :2], "detached": out.detach()}[self.what]


class ChangesOne(Plain):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        changed = x.mul_(2) if other.requires_grad else other.mul_(0.5)
        return super().forward(x + changed) + other.sum()


@pytest.mark.parametrize("what", ["same", "view", "detached"])
@schedules
def test_changing_one_of_two_inputs_of_one_memory_is_refused(schedule: Schedule, what: str) -> None:
    with pytest.raises(UsageError, match="beside another tensor of the same memory"):
        differences([Plain, lambda: Aliases(what), ChangesOne, Plain], schedule)


class Conjugates(nn.Module):
    """Complex numbers that are marked as conjugates, and real ones that are marked as negatives."""

    def forward(self, x: Tensor) -> Any:
        both = torch.complex(x, 2 * x).conj()
        return both, both.imag


class Joins(Plain):
    def forward(self, both: Tensor, imaginary: Tensor) -> Tensor:  # type: ignore[override]
        both = both.conj()
        return super().forward(both.real + 3 * both.imag + imaginary)


def conjugates(rank: int, transport: str, checksum: bool) -> tuple[float, dict[str, list[float]]]:
    options = RuntimeOptions(transport=transport, checksum=checksum, monitor=False)  # type: ignore[arg-type]
    layers = [Layer(f"layer{at}", lambda m=m: m) for at, m in enumerate(built([Plain, Conjugates, Joins, Plain]))]
    pipeline = Pipeline(layers, ONE_ROUTE[0], loss=mse, options=options)
    loss = pipeline.step(*batch(8)).item()
    pipeline.close()
    return loss, {name: gradient.tolist() for name, gradient in gradients(pipeline).items()}


@pytest.mark.dist
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("transport", ["individual", "batched", "shared"])
def test_conjugates_and_negatives_cross_as_the_numbers_that_they_are(transport: str, checksum: bool) -> None:
    want = dict(one_process(built([Plain, Conjugates, Joins, Plain]), 4, steps=1))
    for loss, found in run_ranks(conjugates, 2, transport, checksum):
        assert loss == pytest.approx(want["loss 0"].item(), rel=1e-5)
        for name, gradient in found.items():
            assert torch.allclose(
                torch.tensor(gradient), want[f"{name.removeprefix('layer')} in step 0"], rtol=1e-4, atol=1e-6
            )


# -- hooks on the nodes that accumulate gradients ----------------------------------------------------------------------


class KeepsSums(Plain):
    """Adds its gradients to sums of its own as soon as they are accumulated, as some optimizers' wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.held = []
        for name, parameter in list(self.named_parameters()):
            total = torch.zeros_like(parameter)
            self.register_buffer(name.replace(".", "_"), total)
            self.held.append(parameter.expand_as(parameter))
            self.held[-1].grad_fn.next_functions[0][0].register_hook(
                lambda *_, parameter=parameter, total=total: self.add(parameter, total)
            )

    def add(self, parameter: nn.Parameter, total: Tensor) -> None:
        if parameter.grad is not None:
            total.add_(parameter.grad)
        parameter.grad = None


class Halves(Plain):
    """Halves its gradients before they are accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in self.parameters()]
        for node in self.held:
            node.register_prehook(lambda values: tuple(None if value is None else 0.5 * value for value in values))


@pytest.mark.parametrize("kind", [KeepsSums, Halves])
@schedules
def test_hooks_on_the_accumulation_of_gradients(schedule: Schedule, kind: type[Plain]) -> None:
    assert differences([Plain, kind, kind, Plain], schedule) == []


# -- tensors past the pipeline -----------------------------------------------------------------------------------------


class Stash:
    """What one layer leaves for another."""

    def __init__(self) -> None:
        self.value: Tensor | None = None


class Leaves(Plain):
    def __init__(self, stash: Stash) -> None:
        super().__init__()
        self.stash = (stash,)  # a tuple is not looked into, so only the graph shows it

    def forward(self, x: Tensor) -> Tensor:
        self.stash[0].value = x
        return super().forward(x)


class Finds(Leaves):
    def forward(self, x: Tensor) -> Tensor:
        return Plain.forward(self, x) + self.stash[0].value


@schedules
def test_a_tensor_that_another_stage_left_is_refused(schedule: Schedule) -> None:
    stash = Stash()
    layers = [Plain, lambda: Leaves(stash), Plain, lambda: Finds(stash)]
    assert differences(layers, pl.schedules.build("1f1b", 1, 4)) == []
    with pytest.raises(
        UsageError, match=r"computed before the stage's forward, with its graph .* or pass it on by name"
    ):
        differences(layers, schedule)


class WithNaN(Plain):
    """A buffer and an attribute with a NaN, which no forward changes."""

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([float("nan")] + [1.0] * (WIDTH - 1)))
        self.scales = [shared]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.mask.nan_to_num(2.0) * self.scales[0].nan_to_num(0.5)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_state_with_a_nan_that_is_not_changed_is_no_change(name: str, recompute: Any) -> None:
    """NaN equals nothing, so that a comparison of values alone would find a change."""
    shared = torch.tensor([float("nan")] * WIDTH)
    layers = [lambda: WithNaN(shared)] * 4
    differing = differences(layers, pl.schedules.build(name, 2, 4), recompute)
    assert [name for name in differing if "mask" not in name] == []  # which differs from itself


# -- another linear function in the place of torch's -------------------------------------------------------------------


class Doubling(TorchFunctionMode):
    """Quantization-aware training, say: linear layers get other inputs than they are called with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            args = (2 * args[0], *args[1:])
        return func(*args, **(kwargs or {}))


class InFunctionMode(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with Doubling():
            return super().forward(x)


@pytest.mark.parametrize("recompute", ["none", "full"])
@schedules
def test_a_function_mode_changes_what_linear_layers_compute(schedule: Schedule, recompute: str) -> None:
    assert differences([InFunctionMode] * 4, schedule, recompute) == []


@pytest.mark.parametrize("where", [F, nn.Linear], ids=["functional.linear", "Linear.forward"])
@schedules
def test_another_function_in_the_place_of_torchs(
    schedule: Schedule, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "linear" if where is F else "forward"
    original = getattr(where, name)
    calls = []

    @functools.wraps(original)
    def doubled(*args: Any) -> Any:
        calls.append(args)
        at = 0 if where is F else 1
        return original(*args[:at], 2 * args[at], *args[at + 1 :])

    want = one_process(built([Plain] * 4), 4)
    monkeypatch.setattr(where, name, doubled)
    assert differences([Plain] * 4, schedule) == []
    assert len(calls) == 2 * 5 * 4 * 4  # in one process and in the pipeline: 5 steps of 4 micro-batches, 4 layers
    assert not torch.equal(want[0][1], one_process(built([Plain] * 4), 4)[0][1])


def test_a_default_device_leaves_weight_gradients_to_the_pipeline() -> None:
    """torch.set_default_device is a function mode, too."""
    assert not plain_operations_only()
    with torch.device("cpu"):
        assert not plain_operations_only()
        with Doubling():
            assert plain_operations_only()
