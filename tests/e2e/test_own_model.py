"""The example of a model of one's own, in one process and in two, and the comparison that it calls."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from documents import run_python
from paths import ROOT
from pipeloom.errors import UsageError, VerifyError
from pipeloom.models.lora import LoraOptions, with_adapters
from pipeloom.runtime import Layer, LocalPipeline, LossTerm
from processes import run_ranks

EXAMPLE = ROOT / "examples/own_model.py"
WIDTH = 8


def test_the_example_gives_the_same_losses_in_one_process_and_in_two() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    one = output.getvalue().splitlines()
    two = run_ranks(run_python, 2, EXAMPLE.read_text("utf-8"), lambda: {"__name__": "__main__"})[0].splitlines()
    assert one[0].startswith("verified: 6 steps equal one process")
    assert one[1:] == two[1:]
    assert len(one) == 22
    assert all(float(one[20].split()[at].strip(",")) < float(one[1].split()[at].strip(",")) - 1 for at in (3, -1))


class Shifted(nn.Module):
    """A linear layer, of which a test can make the gradient wrong by a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = factor

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y: Tensor = self.linear(x) if shift is None else self.linear(x) + shift
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.factor)
        return y


def mean(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def built(second: float) -> list[Layer]:
    """Four layers; the third one's gradient is right where it is built first, and off by `second` after that."""
    factors = iter([1.0, second, 1.0, second])
    return [*(Layer(name, Shifted) for name in "ab"), Layer("c", lambda: Shifted(next(factors))), Layer("d", Shifted)]


def test_a_right_gradient_passes() -> None:
    torch.manual_seed(0)
    x, y, shift = torch.randn(3, 5, 4)
    result = pl.verify(built(1.0), pl.schedules.zbv(2, 4), x, y, loss=mean, shift=shift)
    assert result.passed
    assert result.steps == 6
    assert set(result.errors) == {f"{layer}.linear.{name}" for layer in "abcd" for name in ("weight", "bias")}


def test_a_wrong_gradient_is_named_with_its_stage_size_and_rule() -> None:
    torch.manual_seed(0)
    x, y, shift = torch.randn(3, 5, 4)
    with pytest.raises(VerifyError) as caught:
        pl.verify(built(1.01), pl.schedules.zbv(2, 4), x, y, loss=mean, shift=shift)
    assert re.fullmatch(
        r"step 0 under zbv: the gradient of 'c\.linear\.bias' \(layer 'c' of stage 2\) differs from one process by 0\.99 % of "
        r"its largest value; the stage contract \(docs/own_model\.md, 'backwards'\): .*",
        str(caught.value),
    )
    pl.verify(built(1.01), pl.schedules.zbv(2, 4), x, y, loss=mean, shift=shift, tolerance=0.02)


class Masking(Shifted):
    """Its gradient is None in one of the two."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        return nn.functional.linear(x, weight.detach() if self.factor != 1 else weight, bias)


class Settling(Shifted):
    """Right while it trains, and not in evaluation mode."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.linear(x) * (1 if self.training else self.factor)  # type: ignore[no-any-return]


def test_missing_gradients_and_evaluation_are_compared() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 4)
    for kind, words in (
        (Masking, r"the gradient of 'b\.linear\.weight' \(layer 'b' of stage 1\) .* altogether .* 'parameters'"),
        (Settling, r"step 3 under 1f1b: the output of layer 'b' of stage 1, micro-batch 0, .* 'evaluation'"),
    ):
        factors = iter([1.0, 1.5])
        layers = [Layer("a", Shifted), Layer("b", lambda kind=kind, factors=factors: kind(next(factors)))]
        with pytest.raises(VerifyError, match=words):
            pl.verify(layers, pl.schedules.one_f_one_b(2, 2), x, y, loss=mean)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),  # the bias has no gradient but rounding
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
        lambda: nn.Linear(4, 4).double(),  # whose loss comes in fp32
    ],
    ids=["norm", "in place", "script", "double"],
)
def test_rounding_is_no_difference(make: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 4)
    dtype = next(make().parameters()).dtype
    layers = [Layer(name, make) for name in "abcd"]
    pl.verify(layers, pl.schedules.zbv(2, 4), x.to(dtype), y.to(dtype), loss=mean)


def test_what_cannot_be_copied_is_said() -> None:
    layer = nn.Linear(4, 4)
    layer.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"verify copies modules, and one cannot be copied .* give factories"):
        pl.verify([layer, nn.Linear(4, 4)], pl.schedules.one_f_one_b(2, 2), *torch.randn(2, 4, 4), loss=mean)


def test_modules_stay_as_they_are() -> None:
    """Modules instead of factories, one parameter in two of them, and a buffer."""
    modules = [Shifted() for _ in range(4)]
    modules[3].linear.weight = modules[0].linear.weight
    x, y = torch.randn(2, 5, 4)
    before = [parameter.clone() for module in modules for parameter in module.parameters()]
    pl.verify(
        modules, pl.schedules.interleaved(2, 4, 2), x, y, loss=mean, tied=[("0.linear.weight", "3.linear.weight")]
    )
    assert all(map(torch.equal, before, [parameter for module in modules for parameter in module.parameters()]))
    assert modules[0].linear.weight is modules[3].linear.weight


def test_tensors_by_name_and_losses_on_the_way_are_compared() -> None:
    class First(Shifted):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
            y = super().forward(x, shift)
            return y, {"skip": y, "early": y * 2}

    class Last(Shifted):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + skip

    def layers(weights: list[float]) -> list[Layer]:
        """Each call of the term counts as often as `weights` says."""
        first = Layer(
            "a", First, writes=("skip",), losses={"early": LossTerm(lambda o, t: next(each) * mean(o, t), 0.5)}
        )
        each = iter(weights)
        return [first, Layer("b", Shifted), Layer("c", Shifted), Layer("d", Last, reads=("skip",))]

    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 4)
    schedule = pl.schedules.zbv(2, 4)
    pl.verify(layers([1.0] * 100), schedule, x, y, loss=mean)
    with pytest.raises(VerifyError, match="the loss differs"):
        pl.verify(layers([1.0] * 4 + [1.1] * 96), schedule, x, y, loss=mean)


class Masked(nn.Module):
    """Multiplies by a mask, which it finds in a keyword argument of any form."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, **given: Any) -> Tensor:
        x = x["x"] if isinstance(x, dict) else x
        mask = given["mask"]
        while not isinstance(mask, Tensor):
            mask = mask["inner"] if isinstance(mask, dict) else mask[0]
        out: Tensor = torch.tanh(self.linear(x)) * mask
        return out


class Masks(NamedTuple):
    first: Tensor


@pytest.mark.parametrize(
    "form", [lambda m: {"inner": m}, lambda m: [m], lambda m: (m,), lambda m: [{"inner": Masks(m)}]]
)
def test_tensors_inside_keyword_arguments_are_cut_with_the_batch(form: Any) -> None:
    """One row a micro-batch: a mask of the whole batch would fit by broadcasting, and nothing would fail."""
    made = torch.Generator().manual_seed(1)
    x, y, mask = (torch.rand(4, 3, WIDTH, generator=made) for _ in range(3))
    named = [Layer(f"layer{number}", Masked) for number in range(4)]
    pipeline = LocalPipeline(named, pl.schedules.zbv(2, 4), loss=mean)
    loss = pipeline.step(({"x": x},), y, mask=form(mask)).item()
    out = x
    for layer in named:
        out = torch.tanh(pipeline.modules[layer.name].linear(out)) * mask  # type: ignore[operator]
    assert loss == pytest.approx(mean(out, y).item(), rel=1e-5)
    pl.verify(named, pl.schedules.zbv(2, 4), ({"x": x},), y, loss=mean, mask=form(mask), steps=1)
    with pytest.raises(UsageError, match="requires a gradient"):
        pipeline.step(({"x": x},), y, mask=form(mask.requires_grad_()))


def test_a_module_that_is_several_layers_is_verified_as_one() -> None:
    x, y = (torch.rand(4, 3, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    shared = nn.Linear(WIDTH, WIDTH)
    layers = [shared, nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, WIDTH)]
    result = pl.verify(layers, pl.schedules.one_f_one_b(2, 2), x, y, loss=mean)
    assert set(result.errors) == {f"{number}.{name}" for number in (0, 1, 3) for name in ("weight", "bias")}


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = torch.tanh(self.linear(x)) + skip
        return out, {"early": out}


class Writer(Reader):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        return torch.tanh(self.linear(x)), {"skip": x}


def test_adapters_leave_what_layers_declare() -> None:
    """Named tensors and losses of the way go on; a layer that is a linear layer itself gets an adapter too."""
    x, y = (torch.rand(4, 3, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (4, 5))
    plain = [
        Layer("a", Writer, writes=("skip",)),
        *(Layer(name, lambda: nn.Linear(WIDTH, WIDTH)) for name in "bc"),
        Layer("d", Reader, reads=("skip",), losses={"early": LossTerm(mean, 0.5)}),
    ]
    layers = with_adapters(plain, LoraOptions(r=2, lora_alpha=4.0), 0)
    pipelines = [LocalPipeline(each, pl.schedules.zbv(2, 2), loss=mean) for each in (plain, layers)]
    losses = [pipeline.step(x, y).item() for pipeline in pipelines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # an adapter begins with a product of 0
    trained = {name for name, parameter in pipelines[1].named_parameters() if parameter.grad is not None}
    wanted = {f"{name}.lora_{each}.weight" for name in ("a.linear", "b", "c", "d.linear") for each in "AB"}
    assert trained == wanted
    pl.verify(layers, pl.schedules.zbv(2, 2), x, y, loss=mean)
