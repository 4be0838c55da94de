"""Named tensors: what is refused, and what goes with autocast, frozen layers, absent gradients, segments and other schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import gradients, worst
from named_models import CASES, WIDTH, Down, Up, data, mse, nn_linear, plain
from pipeloom.errors import ConfigError, UsageError
from pipeloom.runtime import Layer, LocalPipeline, LossTerm, RuntimeOptions
from segmented import expert_layers

SCHEDULE = pl.schedules.build("1f1b", 3, 4)
DOWN, MIDDLE, UP = Layer("down", Down, writes=("skip",)), Layer("middle", nn_linear), Layer("up", Up, reads=("skip",))


def pipeline(*layers: Layer, schedule: pl.Schedule = SCHEDULE, **options: Any) -> LocalPipeline:
    return LocalPipeline(list(layers), schedule, loss=mse, options=RuntimeOptions(seed=0, **options))


REFUSED = {
    "layer 'up' reads tensor 'skap', which no layer writes; did you mean 'skip'?": [
        DOWN,
        MIDDLE,
        Layer("up", Up, reads={"skip": "skap"}),
    ],
    "layer 'up' reads tensor 'skip', which only 'down' writes, and that is not before it": [MIDDLE, UP, DOWN],
    "layer 'up' reads tensor 'skip' as the keyword 'ship', which its forward does not take; did you mean 'skip'": [
        DOWN,
        MIDDLE,
        Layer("up", Up, reads={"ship": "skip"}),
    ],
    "layer 'down': writes has the name 'output'; give a Python identifier other than 'output'": [
        Layer("down", Down, writes={"skip": "output"}),
        MIDDLE,
        UP,
    ],
    "layers 'down' and 'up' both have a loss 'a'; name them apart": [
        Layer("down", Down, losses={"a": LossTerm(mse)}),
        MIDDLE,
        Layer("up", Up, losses={"a": LossTerm(mse)}),
    ],
    "layer 'up': reads has the name 'microbatch'; give a Python identifier other than 'output', 'microbatch' and 'slice_state'": [
        DOWN,
        MIDDLE,
        Layer("up", Up, reads={"microbatch": "skip"}),
    ],
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_before_anything_runs(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipeline(*REFUSED[words])
    assert words in str(caught.value)


def test_a_schedule_with_other_messages_is_refused() -> None:
    schedule = SCHEDULE.with_tensors([("skip", 0, [1])])
    with pytest.raises(
        ConfigError, match=r"'skip' from 0 to \[1\], and the layers on these stages read 'skip' from 0 to \[2\]"
    ):
        pipeline(DOWN, MIDDLE, UP, schedule=schedule)
    own = pipeline(DOWN, MIDDLE, UP, schedule=SCHEDULE.with_tensors([("skip", 0, [2])]))
    assert own.schedule.tensors == pipeline(DOWN, MIDDLE, UP).schedule.tensors == (pl.NamedTensor("skip", 0, (2,)),)


class Writes(nn.Module):
    """Returns what it is told to."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.linear = nn_linear()
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.linear(x))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda y: y, "layer 'down' declares ['skip'] in writes and losses, and returned Tensor"),
        (lambda y: (y, y), "layer 'down' declares ['skip'] in writes and losses, and returned Tensor"),
        (lambda y: (y, {"skap": y}), "layer 'down' declares ['skip'] in writes and losses, and returned ['skap']"),
        (lambda y: (y, {"skip": 1.0}), "layer 'down' wrote float as 'skip'; a name must stand for a tensor or None"),
        (lambda y: (y, {"skip": y, "b": y}), "and returned ['b', 'skip']"),
    ],
)
def test_a_layer_that_returns_something_else(result: Any, words: str) -> None:
    x = torch.randn(4, WIDTH)
    with pytest.raises(UsageError) as caught:
        pipeline(Layer("down", lambda: Writes(result), writes=("skip",)), MIDDLE, UP).step(x, x)
    assert words in str(caught.value)


def test_predict_computes_no_losses() -> None:
    case = CASES["heads"]
    x, y, _ = data(case, 9)
    own = LocalPipeline(case.layers(), pl.schedules.build("1f1b", 3, 4), loss=case.loss)
    modules = own.modules
    out = x
    with torch.no_grad():
        for name, module in modules.items():
            out = torch.tanh(module.linear(out)) if name in ("a1", "a5") else module(out)
    assert (own.predict(x) - out).abs().max() <= 1e-6
    before = own.evaluate(x, y)
    own.predict(x)
    assert own.evaluate(x, y) == before


def test_a_term_of_a_micro_batch_without_targets_does_not_count() -> None:
    """Rows of ignored targets: the terms have the shares of the loss."""

    def ignoring(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn_linear()

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return x, {"early": self.linear(x)}

    x, y = torch.randn(8, WIDTH), torch.randint(0, WIDTH, (8,))
    y[2:4] = -100
    y[7] = -100
    layers = [MIDDLE, Layer("head", Head, losses={"early": LossTerm(ignoring, 0.5)}), Layer("last", nn_linear)]
    own = LocalPipeline(layers, SCHEDULE, loss=ignoring)
    loss = own.step(x, y)
    m = own.modules
    hidden = m["middle"](x)
    early, late = ignoring(m["head"].linear(hidden), y), ignoring(m["last"](hidden), y)
    assert abs(loss - (late + 0.5 * early)) <= 1e-6
    assert abs(own.loss_terms["early"] - early) <= 1e-6


def test_readers_without_a_gradient() -> None:
    """One reader detaches the tensor, another uses it, a third reads a tensor that no reader has a gradient for."""

    class Reads(nn.Module):
        def __init__(self, detach: bool) -> None:
            super().__init__()
            self.linear, self.detach = nn_linear(), detach

        def forward(self, x: Tensor, skip: Tensor, nothing: Tensor | None = None) -> Tensor:
            assert nothing is None
            return self.linear(x) * (skip.detach() if self.detach else skip)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn_linear(), nn_linear()

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
            return x, {"used": self.a(x), "unused": self.b(x), "nothing": None}

    layers = [
        Layer("two", Two, writes=("used", "unused", "nothing")),
        Layer("r0", lambda: Reads(True), reads={"skip": "used", "nothing": "nothing"}),
        Layer("r1", lambda: Reads(False), reads={"skip": "used"}),
        Layer("r2", lambda: Reads(True), reads={"skip": "unused"}),
    ]
    x, y = torch.randn(2, 8, WIDTH)
    for family, ranks in (("1f1b", 4), ("zbv", 2)):
        own = pipeline(*layers, schedule=pl.schedules.build(family, ranks, 4))
        for _ in range(2):
            own.zero_grad()
            own.step(x, y)
        m = {name: module for name, module in own.modules.items()}
        found = gradients(own)
        own.zero_grad()
        used, unused = m["two"].a(x), m["two"].b(x).detach()
        out = m["r0"].linear(x) * used.detach()
        out = m["r1"].linear(out) * used
        mse(m["r2"].linear(out) * unused, y).backward()
        want = gradients(own)
        assert "two.b.weight" not in want
        assert worst({k: found.get(k, torch.zeros(1)) for k in want}, want) <= 1e-6
        assert not found.get("two.b.weight", torch.zeros(1)).any()


def test_a_segmented_stage_that_reads_by_name_runs_whole() -> None:
    """Its pairs are taken apart, those of other stages overlap, and the gradients are those of one process."""

    class Gate(nn.Module):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return x * torch.sigmoid(skip)

    class Keep(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return x + 1, {"skip": x * 2}

    experts = expert_layers(4, 2, None)
    layers = [
        experts[0],
        Layer("keep", Keep, writes=("skip",)),
        *experts[1:3],
        Layer("gate", Gate, reads=("skip",)),
        experts[3],
    ]
    schedule = pl.schedules.build("1f1b-overlap", 3, 6)
    own = LocalPipeline(layers, schedule, loss=mse, options=RuntimeOptions(seed=0))
    paired = {
        a.stage for program in own.schedule.programs for cell in program if isinstance(cell, pl.Pair) for a in cell
    }
    assert schedule.has_pairs
    assert paired <= {1}  # stages 0 and 2 write and read
    x, y = torch.randn(2, 12, 6)
    own.step(x, y)
    found = gradients(own)
    own.zero_grad()
    out, skip = x, x
    total = torch.zeros(())
    for rows in torch.split(torch.arange(12), 2):
        out = x[rows]
        for name, module in own.modules.items():
            if name == "keep":
                out, skip = out + 1, out * 2
            elif name == "gate":
                out = out * torch.sigmoid(skip)
            else:
                out = module(out)
        total = total + mse(out, y[rows]) / 6
    total.backward()
    assert worst(found, gradients(own)) <= 1e-5


def test_another_schedule_carries_them_too() -> None:
    case = CASES["residual stream"]
    x, y, keywords = data(case, 9)
    own = LocalPipeline(case.layers(), pl.schedules.build("zb-h1", 3, 4), loss=case.loss)
    own.adopt(pl.schedules.build("1f1b", 3, 4))
    assert own.schedule.tensors
    loss = own.step(x, y)
    want_loss, want, _ = plain(case, own.state_dict(), x, y, keywords, [3, 2, 2, 2])
    assert abs(loss.item() - want_loss) <= 2e-6
    assert worst(gradients(own), want) <= 5e-6


def test_messages_are_counted() -> None:
    """U-Net on 3 ranks of 3 layers each: three skips cross from rank 0 to rank 2, in each of 4 micro-batches."""
    case = CASES["u-net"]
    x, y, _ = data(case, 8)
    own = LocalPipeline(case.layers(), pl.schedules.build("1f1b", 3, 4), loss=case.loss)
    own.step(x, y)
    by_hand = [(tensor.name, tensor.producer, tensor.consumers) for tensor in own.schedule.tensors]
    assert by_hand == [("skip0", 0, (2,)), ("skip1", 0, (2,)), ("skip2", 0, (2,))]
    assert [stats.messages_sent for stats in own.stats] == [4 * 4, 4 * 2, 4 * 4]
    assert [stats.messages_received for stats in own.stats] == [4 * 4, 4 * 2, 4 * 4]
