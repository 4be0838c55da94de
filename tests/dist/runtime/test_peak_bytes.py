"""Peak memory in bytes, counted at run time, is what the simulator says: overlapped pairs free segment by segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import mse
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.ops.segments import Compute, Done, Pending, Segment, Values, in_order
from pipeloom.runtime import Layer, LocalPipeline
from pipeloom.schedule import Costs, Schedule
from pipeloom.schedule.transforms import unpair

WIDTH, ROWS, LAYERS = 32, 256, 4
HALF = WIDTH * ROWS * 4 * 2  # bytes that half of a block keeps for its backward: its input (or sum) and the tanh
TALKS = Costs(all_to_all=0.3, activation=2.0 * LAYERS * HALF)


class Exchange:
    """A communication that is over at once, but at which a pair takes turns."""

    quick = False

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, values: Values) -> Pending:
        return Done(values)

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        return Done(gradients)


class Block(nn.Module):
    """Two halves with exchanges between them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def segments(self) -> Sequence[Segment]:
        return (
            Compute("attention", lambda values: (values[0] + torch.tanh(self.attention(values[0])),)),
            Exchange("dispatch"),
            Compute("experts", lambda values: (values[0] + torch.tanh(self.experts(values[0])),)),
            Exchange("combine"),
            Compute("sum", lambda values: values),
        )

    def forward(self, x: Tensor) -> Tensor:
        (out,) = in_order(self.segments(), (x,))
        return out  # type: ignore[no-any-return]


class Plain(Block):
    """The same without segments: nothing in it can take turns."""

    segments = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.attention(x))
        return x + torch.tanh(self.experts(x))


def layers(schedule: Schedule, block: type[nn.Module]) -> list[Layer]:
    return [Layer(f"block{at}", block) for at in range(LAYERS * schedule.positions)]


def peak(pipeline: Any, schedule: Schedule) -> int:
    """Bytes at once in a step, gradients and whatever else was there before it left out."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, schedule.microbatches * ROWS, WIDTH, generator=generator)
    pipeline.step(x, y)  # makes the gradients and the transport's buffers
    with LiveBytes() as live:
        pipeline.step(x, y)
    return live.peak


def expected(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    return pl.simulate(schedule, costs).peak_memory


def on_one_rank() -> dict[str, Schedule]:
    build = pl.schedules.build
    schedules = {
        name: build(name, 1, 6, chunks)
        for name, chunks in (
            ("interleaved", 4),
            ("interleaved-overlap", 4),
            ("1f1b-overlap", None),
            ("dualpipev", None),
        )
    }
    return schedules | {f"{name}, unpaired": unpair(schedule) for name, schedule in schedules.items()}


@pytest.mark.parametrize("block", [Block, Plain])
@pytest.mark.parametrize("name", on_one_rank())
def test_one_rank(name: str, block: type[nn.Module]) -> None:
    """To a third of an activation: what is computed with at the moment comes on top."""
    schedule = on_one_rank()[name]
    costs = TALKS if block is Block else Costs(activation=TALKS.activation)
    (simulated,) = expected(schedule, costs)
    measured = peak(LocalPipeline(layers(schedule, block), schedule, loss=mse), schedule)
    assert 0 < measured - simulated < TALKS.activation / 2, (measured, simulated)  # type: ignore[operator]


@pytest.mark.core
def test_overlapped_pairs_are_worth_an_activation() -> None:
    """interleaved-overlap holds one more stage-micro-batch than interleaved; in bytes that is nothing, and unpaired all of it."""
    schedules = on_one_rank()
    measured = {
        name: peak(LocalPipeline(layers(schedules[name], Block), schedules[name], loss=mse), schedules[name])
        for name in ("interleaved", "interleaved-overlap", "interleaved-overlap, unpaired")
    }
    first, paired, unpaired = measured.values()
    assert paired < 1.02 * first
    assert unpaired - first > 0.9 * TALKS.activation  # type: ignore[operator]
