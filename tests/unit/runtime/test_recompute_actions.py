"""R and the block (R;B), executed: bitwise the gradients of the schedule without them, dropout on, and only the inputs held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block, batch, mse
from pipeloom.errors import ConfigError, UsageError
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.runtime import LocalPipeline, in_part
from pipeloom.schedule import Schedule, simulate
from pipeloom.schedule.transforms import recompute
from segmented import Experts

S = pl.schedules


class Noisy(Block):
    """A block with torch's dropout, a counter and a running mean."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.dropout, self.calls = nn.Dropout(0.4), 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(self.dropout(x) * (1 + self.calls / 8)) + self.mean


def result(schedule: Schedule, modules: list[nn.Module]) -> tuple[list[Any], LocalPipeline]:
    """Losses, gradients and buffers of two steps without an optimizer, every micro-batch with other data."""
    torch.manual_seed(3)
    pipeline = LocalPipeline(modules, schedule, loss=mse)
    losses = [pipeline.step(*batch(2 * schedule.microbatches + 1, seed)) for seed in range(2)]
    gradients = [parameter.grad for module in modules for parameter in module.parameters()]
    return [*losses, *gradients, *(buffer for module in modules for buffer in module.buffers())], pipeline


SCHEDULES = {
    "1f1b": S.one_f_one_b(2, 4),
    "interleaved": S.interleaved(2, 4),
    "zb-h1": S.zb_h1(2, 4),
    "zbv": S.zbv(2, 4),
    "dualpipev": S.dualpipev(2, 4),
    "one rank": S.gpipe(1, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["block", "whole"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", [Noisy, lambda seed: Experts(seed, 3, None)], ids=["dropout", "segments"])
def test_every_bit_is_that_of_the_schedule_without_recomputation(name: str, whole: bool, kind: Any) -> None:
    plain = SCHEDULES[name]
    want, _ = result(plain, [kind(seed) for seed in range(4)])
    schedule = recompute(plain, whole)
    got, pipeline = result(schedule, [kind(seed) for seed in range(4)])
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert tuple(stats.peak_activations for stats in pipeline.stats) == simulate(schedule).peak_activations


@pytest.mark.parametrize("whole", [False, True], ids=["block", "whole"])
def test_a_recomputed_schedule_equals_one_process(whole: bool) -> None:
    schedule = recompute(S.zb_h1(2, 4), whole, [(0, 0), (0, 3), (1, 1), (1, 2)])  # some stages and micro-batches
    pl.verify([Noisy(seed) for seed in range(4)], schedule, *batch(9), loss=mse)


class Parted(nn.Module):
    """A norm whose output the next layer saves, and a part with a part inside, torch's dropout and a counter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm, self.inner, self.table = nn.LayerNorm(WIDTH), Noisy(seed), nn.Parameter(torch.ones(WIDTH))
        self.out = Block(seed).linear

    def forward(self, x: Tensor) -> Tensor:
        changed = in_part("norms", self.norm, x).mul_(1.5)  # what the next layer saves is not the part's output
        x = x + self.out(changed)
        return x + self.out(in_part("norms", self.norm, in_part("mlp", self._mixed, x)).flatten(0, 1).view(x.shape))

    def _mixed(self, x: Tensor) -> Tensor:
        return self.inner(in_part("norms", torch.tanh, x * self.table)) * self.table


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", [("norms",), ("mlp",), ("norms", "mlp"), ("2/2",), ("1/4", "norms"), ("norms", "offload")], ids="+".join
)
@pytest.mark.parametrize("name", ["zb-h1", "interleaved", "dualpipev"])
@pytest.mark.parametrize("kind", [Parted, lambda seed: Experts(seed, 3, None)], ids=["dropout", "segments"])
def test_parts_are_recomputed_bit_by_bit(name: str, parts: tuple[str, ...], kind: Any) -> None:
    plain = SCHEDULES[name]
    want, _ = result(plain, [kind(seed) for seed in range(4)])
    schedule = plain
    for part in parts:
        schedule = S.offload(schedule) if part == "offload" else recompute(schedule, part=part)
    got, _ = result(schedule, [kind(seed) for seed in range(4)])
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_part_of_a_layer_with_experts_is_recomputed_after_a_plain_stage_has_run() -> None:
    """Its weight gradients wait for its communications, those of the plain stage wait for nothing."""
    plain = Schedule.of([["0F0", "1F0", "1B0", "0B0"]], placement=[0, 0], microbatches=1)
    schedule = plain.with_programs([["0F0", "1F0", "1B0", "0R0:mlp", "0B0"]])
    want, got = (result(each, [Experts(0, 3, None), Block(1)])[0] for each in (plain, schedule))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Wide(nn.Module):
    """Saves 32 times the bytes of its input, and has a table that no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(8, 16 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return in_part("mlp", self._inner, x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.down(in_part("activation", lambda inner: torch.tanh(inner).square(), self.up(x)))


def held(schedule: Schedule) -> tuple[int, int]:
    """The most bytes alive in a step, and the most when a loss is computed, at the end of a forward."""
    live, at_loss = LiveBytes(), [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        at_loss.append(live.now)
        return mse(output, target)

    pipeline = LocalPipeline([Wide() for _ in range(4)], schedule, loss=loss)
    pipeline.step(*batch(64))
    inputs, targets = batch(64)
    at_loss.clear()
    with live:
        pipeline.step(inputs, targets)
    return live.peak, max(at_loss[: schedule.microbatches])


def test_until_r_only_the_stages_input_is_held() -> None:
    """All forwards first: 8 micro-batches of 4 layers, of which a whole stage of 4, or one layer, is there at once."""
    plain = S.gpipe(1, 8)
    (everything, _), (whole, at_loss), (block, _) = map(held, (plain, recompute(plain, whole=True), recompute(plain)))
    assert whole < 0.25 * everything
    assert block < 0.7 * whole
    assert at_loss < 0.4 * whole  # F saves nothing, not even while it runs, and keeps no copy of the table


@pytest.mark.parametrize(("part", "share"), [("activation", 0.65), ("mlp", 0.1), ("2/4", 0.8)])
def test_what_a_part_and_the_users_of_its_output_save_is_not_held(part: str, share: float) -> None:
    plain = S.gpipe(1, 8)
    (_, everything), (_, at_loss) = map(held, (plain, recompute(plain, part=part)))
    assert (share - 0.15) * everything < at_loss <= share * everything


def test_what_cannot_be_recomputed_is_refused() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2.0))

    class Differentiates(Changes):
        def forward(self, x: Tensor) -> Tensor:
            slope = torch.autograd.grad(self.linear(x).square().sum(), self.linear.weight)[0].norm()
            return self.linear(x) / slope

    schedule = recompute(S.one_f_one_b(2, 2), whole=True)
    words = r"modified by an inplace operation: [\s\S]*stage 1 is recomputed, and a layer changes the stage's input in place"
    with pytest.raises(RuntimeError, match=words):
        LocalPipeline([Block(0), Changes()], schedule, loss=mse).step(*batch(4))
    with pytest.raises(UsageError, match=r"recompute it in blocks \(R;B\)"):
        LocalPipeline([Block(0), Differentiates()], schedule, loss=mse).step(*batch(4))
    pl.verify([Block(0), Differentiates()], recompute(S.one_f_one_b(2, 2)), *batch(4), loss=mse)

    class Parts(nn.Module):
        def __init__(self, run: Any) -> None:
            super().__init__()
            self.linear, self.run = nn.Linear(WIDTH, WIDTH), run

        def forward(self, x: Tensor) -> Tensor:
            return in_part("mlp", lambda x: self.run(self.linear(x), x), self.linear(x))

    runs = {
        r"modified by an inplace operation: [\s\S]*part 'mlp' is recomputed, and its input": lambda y, x: (
            y + x.mul_(2.0)
        ),
        "computes gradients in its forward, and": lambda y, x: torch.autograd.grad(y.sin().sum(), x)[0],
        "part 'mlp' saves .* tensors in a forward": lambda y, x, turn=iter(range(9)): y.sin() if next(turn) % 2 else y,
    }
    for words, run in runs.items():
        with pytest.raises((RuntimeError, UsageError), match=words):
            LocalPipeline([Parts(run)], recompute(S.gpipe(1, 1), part="mlp"), loss=mse).step(*batch(4))
    behind = S.gpipe(1, 1).with_programs([["0F0", "0I0", "0R0:mlp", "0W0"]])
    with pytest.raises(ConfigError, match=r"0R0:mlp stands behind the backward's I.* put it before 0I0"):
        LocalPipeline([Block(0)], behind, loss=mse)


def test_evaluation_of_a_recomputed_schedule_recomputes_nothing() -> None:
    modules = [Noisy(seed) for seed in range(2)]
    pipeline = LocalPipeline(modules, recompute(S.one_f_one_b(2, 2), whole=True), loss=mse)
    pipeline.evaluate(*batch(4))
    assert [module.calls for module in modules] == [2, 2]


def test_a_part_that_no_layer_names_is_refused_with_the_names_that_exist() -> None:
    plain = S.one_f_one_b(2, 2)
    modules: list[nn.Module] = [Block(0), Parted(1)]  # a stage without the part may stand beside one with it
    pipeline = LocalPipeline(modules, recompute(plain, part="norms"), loss=mse)
    pipeline.step(*batch(4))
    pipeline.adopt(recompute(plain, part="norm"))
    words = "recomputes part 'norm', and no layer of these stages names a part so; did you mean 'norms'"
    with pytest.raises(UsageError, match=words):
        pipeline.step(*batch(4))
    with pytest.raises(UsageError, match=r"part 'mlp', and no layer of these stages names a part so$"):
        LocalPipeline([Block(0), Block(1)], recompute(plain, part="mlp"), loss=mse).step(*batch(4))
    LocalPipeline([Block(0), Block(1)], recompute(plain, part="1/4"), loss=mse).step(*batch(4))
