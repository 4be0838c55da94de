"""Gates that draw in a pipeline: sources set by the pipeline, the same numbers in every schedule, replayed by recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, batch, mse
from pipeloom.errors import ConfigError
from pipeloom.models import GateShape, MoELayer, TopKGate
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.random_state import RandomSource
from pipeloom.ops.segments import Compute, Segment, in_order
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions
from pipeloom.schedule import Schedule
from pipeloom.schedule.transforms import recompute

S = pl.schedules
ROUTERS = [("switch", 1), ("noisy", 2), ("gshard", 2)]


class Mixture(nn.Module):
    """A layer of one's own with the mixture's segments among its own, as documented; or without `microbatch` and losses."""

    def __init__(self, router: str, k: int, losses: float) -> None:
        super().__init__()
        shape = GateShape(WIDTH, 4, k, router=router, aux_loss_coef=losses, z_loss_coef=losses)
        self.norm, self.moe = nn.LayerNorm(WIDTH), MoELayer(TopKGate(shape), partial(nn.Linear, WIDTH, WIDTH))

    def segments(self, *, microbatch: MicrobatchContext | None = None) -> Sequence[Segment]:
        return [
            Compute("norm", lambda values: (self.norm(values[0]), values[0])),
            *self.moe.segments(microbatch=microbatch),
            Compute("sum", lambda values: (values[0] + values[1],)),
        ]

    def forward(self, x: Tensor, microbatch: MicrobatchContext | None = None) -> Tensor:
        out: Tensor = in_order(self.segments(microbatch=microbatch), (x,))[0]
        return out


class Unaware(Mixture):
    def segments(self) -> Sequence[Segment]:  # type: ignore[override]
        return super().segments()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = in_order(self.segments(), (x,))[0]
        return out


def layers(kind: type[Mixture], router: str, k: int, losses: float) -> list[Layer]:
    return [Layer(f"layer{at}", partial(kind, router, k, losses)) for at in range(4)]


def result(schedule: Schedule, made: list[Layer], seed: int = 7, **options: Any) -> list[Tensor]:
    """The loss and gradients of a step."""
    torch.manual_seed(3)
    pipeline = LocalPipeline(made, schedule, loss=mse, options=RuntimeOptions(seed=seed, **options))
    loss = pipeline.step(*batch(schedule.microbatches + 1))
    return [loss, *(p.grad for _, p in sorted(pipeline.named_parameters()) if p.grad is not None)]


@pytest.mark.parametrize(("router", "k"), ROUTERS)
def test_sources_are_those_of_the_seed_and_the_names(router: str, k: int) -> None:
    """Of whole modules as of factories; a source that is there stays."""
    made: list[Any] = layers(Mixture, router, k, 0.1)
    made[1] = made[1]()
    made[2] = made[2]()
    made[2].moe.gate.source = RandomSource(1, "mine")
    pipeline = LocalPipeline(made, S.gpipe(2, 2), loss=mse, options=RuntimeOptions(seed=7))
    found = [module.moe.gate.source for module in pipeline.modules.values()]
    assert found == [
        RandomSource(7, "layer0.moe.gate"),
        RandomSource(7, "1.moe.gate"),
        RandomSource(1, "mine"),
        RandomSource(7, "layer3.moe.gate"),
    ]


@pytest.mark.parametrize(("router", "k"), ROUTERS)
def test_every_schedule_draws_the_numbers_of_one_process(router: str, k: int) -> None:
    want = result(S.gpipe(1, 4), layers(Mixture, router, k, 0.1))
    for schedule in (S.zb_h1(2, 4), S.dualpipev(2, 4)):
        for got, wanted in zip(result(schedule, layers(Mixture, router, k, 0.1)), want, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    other = result(S.gpipe(1, 4), layers(Mixture, router, k, 0.1), seed=8)
    assert not torch.allclose(other[0], want[0])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["block", "whole", "mlp", "1/2", "2/2", "option"])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("kind", [Mixture, Unaware], ids=["source", "torch"])
def test_recomputation_replays_the_draws(kind: type[Mixture], name: str, how: str) -> None:
    """Bit by bit, those of sources and those of torch's generator."""
    made = partial(layers, kind, "gshard", 2, 0.1 if kind is Mixture else 0.0)
    plain, options = S.build(name, 2, 4), {}
    if how == "option":
        schedule, options = plain, {"recompute": "full"}
    else:
        schedule = recompute(plain, how == "whole", part=how if how not in ("block", "whole") else "")
    want, got = result(plain, made()), result(schedule, made(), **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_layer_whose_losses_would_not_be_weighted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer 'layer0' has a gate's losses inside.* take the keyword 'microbatch'"):
        LocalPipeline(layers(Unaware, "softmax", 2, 0.1), S.gpipe(1, 2), loss=mse)
    LocalPipeline(layers(Unaware, "softmax", 2, 0.0), S.gpipe(1, 2), loss=mse)


def test_verify_accepts_gates_that_draw() -> None:
    made = layers(Mixture, "gshard", 2, 0.1)
    pl.verify(made, S.zb_h1(2, 4), *batch(5), loss=mse, steps=1, options=RuntimeOptions(seed=7))
