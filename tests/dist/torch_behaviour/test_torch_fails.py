"""What torch's own pipeline runtime does where ours gives serial gradients or one sentence.

A test that fails here says that torch has changed, and that a claim of ours is no longer true.
"""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import Any

import pytest
import torch
from awkward import MODELS
from test_boundaries import SPLIT, Normed
from torch.distributed.pipelining.schedules import _Action, _validate_schedule
from torch_runtime import TorchPipeline

import pipeloom as pl
from models import batch, blocks, serial, worst
from pipeloom.errors import ScheduleError
from pipeloom.schedule.csv_form import from_csv
from processes import run_ranks

S = pl.schedules
GPIPE = S.gpipe(2, 4)
pytestmark = [pytest.mark.torch_behaviour]


def quiet_failures(rank: int, folder: Path) -> dict[str, Any]:
    """What runs to its end, and is wrong."""
    x, y = batch(8)
    wanted = serial(blocks(2), x, y, [2] * 4)[1]
    pipeline = TorchPipeline(rank, blocks(2), GPIPE, folder)
    pipeline.step(x, y)
    once = pipeline.gradients()
    pipeline.evaluate(x, y)
    evaluated = pipeline.gradients()
    torch_schedule = pipeline.runtime
    (stage,) = torch_schedule._stages
    buffers = [info.buffer for infos in stage.args_recv_info.values() for info in infos if info.buffer is not None]
    second = TorchPipeline(rank, blocks(2), GPIPE, folder)
    second.step(x, y)
    second.step(x, y)
    twice = second.gradients()
    normed = TorchPipeline(rank, [lambda: Normed(0), lambda: Normed(1)], GPIPE, folder)
    normed.step(x, y)
    (module,) = normed.modules.values()
    return {
        "one step": worst(once, {name: wanted[name] for name in once}),
        "evaluation before the optimizer": worst(evaluated, {name: wanted[name] for name in once}),
        "two steps": worst(twice, {name: 2 * wanted[name] for name in twice}),
        "counter": module.norm.num_batches_tracked.item(),
        "buffers": len({buffer.data_ptr() for buffer in buffers}),
    }


def test_gradients_are_rescaled_and_counters_advanced(tmp_path: Path) -> None:
    first, last = run_ranks(quiet_failures, 2, tmp_path)
    for report in (first, last):
        assert report["one step"] <= 1e-6
        assert report["evaluation before the optimizer"] == pytest.approx(0.75, rel=1e-3)  # divided by m = 4 again
        assert report["two steps"] == pytest.approx(0.375, rel=1e-3)  # (g / 4 + g) instead of 2 g
        assert report["counter"] == 5  # four micro-batches, and one of the shape discovery
    assert last["buffers"] == 4  # one a micro-batch


def other_batches(rank: int, folder: Path, sizes: list[int]) -> None:
    faulthandler.disable()  # gloo aborts the process; pytest's handler would print the stack of every thread
    pipeline = TorchPipeline(rank, blocks(2), GPIPE, folder)
    for rows in sizes:
        pipeline.step(*batch(rows))


@pytest.mark.parametrize("sizes", [[7], [8, 16]], ids=["m does not divide", "a later step of another size"])
def test_other_batches_end_the_processes(sizes: list[int], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"Failed to run stage backward|ended with|[Cc]onnection|size"):
        run_ranks(other_batches, 2, tmp_path, sizes, timeout=30)


def boundary(rank: int, folder: Path, model: str) -> None:
    TorchPipeline(rank, MODELS[model](), S.interleaved(2, 4, 2), folder).step(*batch(8))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("several tensors, None, int and bool", "is None. Stage args must be tensors"),
        ("views of one storage", "contiguous"),
    ],
)
def test_boundaries_that_fail(model: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"{words}|[Cc]onnection|ended with"):
        run_ranks(boundary, 2, tmp_path, model, timeout=30)


def frozen(rank: int, folder: Path) -> tuple[list[str], list[str]]:
    layers = MODELS["frozen leading layers"]()
    x, y = batch(4)
    pipeline = TorchPipeline(rank, layers, SPLIT, folder)
    pipeline.step(x, y)
    want = serial(layers, x, y, [2, 2])[1]
    own = {f"layer{stage}" for stage in SPLIT.stages_of[rank]}
    return sorted(pipeline.gradients()), sorted(name for name in want if name.partition(".")[0] in own)


def test_frozen_leading_layers_with_split_backward(tmp_path: Path) -> None:
    """The first stage that trains, on rank 0, gets no gradient for its matrices."""
    got, want = run_ranks(frozen, 2, tmp_path)[0]
    assert "layer2.linear.weight" in want
    assert "layer2.linear.weight" not in got


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1,1F1"], "an action twice"),
        (["0F0,0F7,0B0,0B7", "1F0,1B0,1F1,1B1"], "micro-batch 7 of 2"),
        (["0F0,0F1,0B0,0B1", "1F0garbage,1B0,1F1,1B1"], "characters after an action"),
        (["0F0,0F1,0B0,0B1,0B0", "1F0,1B0,1F1,1B1"], "a backward twice"),
    ],
    ids=["doubled forward", "micro-batch 7", "garbage", "doubled backward"],
)
def test_its_validator_accepts_what_check_refuses(rows: list[str], what: str) -> None:
    actions: Any = {rank: [_Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)}
    _validate_schedule(actions, 2, 2, 2)
    with pytest.raises(ScheduleError):
        pl.check(from_csv("\n".join(rows)))


def test_the_reference_itself_is_right() -> None:
    """Block's serial gradients against finite differences, so that both runtimes are measured against something."""
    x, y = (value.double() for value in batch(4))
    module = blocks(1)[0]().double()
    weight = module.linear.weight
    ((module(x) - y) ** 2).mean().backward()
    step = 1e-6
    with torch.no_grad():
        weight[1, 2] += step
        above = ((module(x) - y) ** 2).mean()
        weight[1, 2] -= 2 * step
        below = ((module(x) - y) ** 2).mean()
    assert weight.grad[1, 2].item() == pytest.approx(((above - below) / (2 * step)).item(), rel=1e-5)
