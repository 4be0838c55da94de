"""The output layer's weight gradients wait for the cool-down: the order, and gradients that do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, batch, blocks, gradients, mse, serial, worst
from pipeloom.errors import ConfigError
from pipeloom.ops.deferred import Desk, Ledger
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions

S = pl.schedules
SCHEDULES = [
    S.gpipe(2, 4),
    S.one_f_one_b(3, 5),
    S.interleaved(2, 5, 2),
    S.zb_h1(2, 4),
    S.zbv(2, 4),
    S.one_f_one_b(1, 3),
]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).sin())
            self.linear.bias.fill_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def layers(schedule: pl.Schedule) -> list[Layer]:
    return [*blocks(schedule.positions), Layer("head", Head)]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_gradients_stay(schedule: pl.Schedule, limit: int, recompute: Any) -> None:
    sizes = [1 + at % 3 for at in range(schedule.microbatches)]
    options = RuntimeOptions(head_deferral=limit, recompute=recompute, microbatch_sizes=tuple(sizes))
    stages = [1] * schedule.positions
    stages[-1] = 2
    pipeline = LocalPipeline(layers(schedule), schedule, loss=mse, stages=stages, options=options)
    x, y = batch(sum(sizes))
    for _ in range(2):  # nothing is left over from a step
        pipeline.zero_grad()
        pipeline.step(x, y)
        _, want = serial(layers(schedule), x, y, sizes)
        assert worst(gradients(pipeline), want) < 2e-6


class Noting:
    """A head whose backward and weight gradient are written down."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def __call__(self) -> nn.Module:
        notes = self.notes

        class Owing(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, ledger: Ledger | None, number: int) -> Tensor:
                ctx.ledger, ctx.number = ledger, number
                notes.append(f"F{number}")
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Any:
                notes.append(f"B{ctx.number}")
                ctx.ledger.owe(lambda: notes.append(f"W{ctx.number}"))
                return gradients[0], None, None

        class Owes(nn.Module):
            calls = 0

            def defer_to(self, desk: Desk) -> None:
                self.desk = desk

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return Owing.apply(x, self.desk.ledger, self.calls - 1)

        return Owes()


def order(schedule: pl.Schedule, limit: int) -> str:
    notes: list[str] = []
    stages = [1] * schedule.positions
    stages[-1] = 2
    made = [*blocks(schedule.positions), Layer("head", Noting(notes))]
    options = RuntimeOptions(head_deferral=limit)
    LocalPipeline(made, schedule, loss=mse, stages=stages, options=options).step(*batch(2 * schedule.microbatches))
    return " ".join(notes)


def test_all_wait_for_the_end_where_nothing_is_waited_for() -> None:
    """1F1B's last rank has no cool-down of its own: the others' begins when it has sent its last gradient."""
    assert order(S.one_f_one_b(2, 4), 0) == "F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3"


def test_the_last_ones_wait_within_a_limit() -> None:
    assert order(S.one_f_one_b(2, 4), 2) == "F0 B0 W0 F1 B1 W1 F2 B2 F3 B3 W2 W3"
    assert order(S.gpipe(2, 3), 1) == "F0 F1 F2 B0 W0 B1 W1 B2 W2"


def test_they_are_computed_while_the_cool_down_waits() -> None:
    """Interleaved: the last rank waits in its cool-down for gradients of its first chunk, and has something to do."""
    notes = order(S.interleaved(2, 4, 2), 0).split()
    assert notes[-1].startswith("W")
    assert notes.index("W0") > notes.index("F3")
    assert [note for note in notes if note.startswith("W")] == ["W0", "W1", "W2", "W3"]


def test_a_stage_is_done_when_its_debts_are_paid() -> None:
    """What reduces gradients is told of the last stage after the last weight gradient."""
    notes: list[str] = []
    made = [*blocks(2), Layer("head", Noting(notes))]
    pipeline = LocalPipeline(
        made, S.one_f_one_b(2, 3), loss=mse, stages=[1, 2], options=RuntimeOptions(head_deferral=0)
    )
    for assembly in pipeline._assemblies:
        assembly.rank.finished = lambda stage: notes.append(f"done {stage}")
    pipeline.step(*batch(6))
    assert notes.index("done 1") > notes.index("W2")
    assert notes.count("done 0") == notes.count("done 1") == 1


def test_what_it_may_be() -> None:
    with pytest.raises(ConfigError, match=r"head_deferral is -1; it must be at least 0 \(all\), or None"):
        RuntimeOptions(head_deferral=-1)
