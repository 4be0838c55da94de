"""O and L, executed: bitwise the gradients of the schedule without them, and saved storages in host memory meanwhile."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block, batch, mse
from pipeloom.errors import ConfigError
from pipeloom.ops.host_memory import HostBuffers
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.ops.saved_tensors import saving
from pipeloom.runtime import LocalPipeline
from pipeloom.runtime.offload import SavedTensors
from pipeloom.runtime.pipeline import run_beside
from pipeloom.schedule import Action, Costs, Schedule, simulate
from pipeloom.schedule.transforms import recompute
from segmented import Experts

S = pl.schedules
CPU = torch.device("cpu")
FAST = Costs(host_bandwidth=10)
SCHEDULES = [S.one_f_one_b(2, 4), S.zb_h1(2, 4), S.zbv(2, 4), S.dualpipev(2, 4), S.gpipe(1, 3)]


def result(schedule: Schedule, modules: list[nn.Module]) -> tuple[list[Any], LocalPipeline]:
    """Losses and gradients of two steps without an optimizer, every micro-batch with other data."""
    pipeline = LocalPipeline(modules, schedule, loss=mse)
    losses = [pipeline.step(*batch(2 * schedule.microbatches + 1, seed)) for seed in range(2)]
    return [*losses, *(parameter.grad for module in modules for parameter in module.parameters())], pipeline


@pytest.mark.slow
@pytest.mark.parametrize("share", [(1, 1), (4, 4), (1, 2)], ids=["whole", "parts", "half"])
@pytest.mark.parametrize("kind", [Block, lambda seed: Experts(seed, 3, None)], ids=["plain", "segments"])
@pytest.mark.parametrize("plain", SCHEDULES, ids=lambda schedule: schedule.name)
def test_every_bit_is_that_of_the_schedule_without_copies(plain: Schedule, kind: Any, share: tuple[int, int]) -> None:
    want, _ = result(plain, [kind(seed) for seed in range(4)])
    schedule = S.offload(plain, FAST, *share)
    assert schedule != plain
    got, pipeline = result(schedule, [kind(seed) for seed in range(4)])
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    peaks = simulate(plain).peak_activations
    assert all(stats.peak_activations <= peak for stats, peak in zip(pipeline.stats, peaks, strict=True))


def test_with_recomputation_it_equals_one_process() -> None:
    """What R saves travels as what F does, also of layers that are recomputed one by one within."""
    schedule = recompute(S.gpipe(1, 2), whole=True)
    cells = [*map(str, schedule.programs[0])]
    assert cells == ["0F0", "0F1", "0R0", "0B0", "0R1", "0B1"]
    cells = ["0F0", "0F1", "0R0", "0O0", "0L0", "0B0", "0R1", "0O1", "0L1", "0B1"]
    pl.verify([Block(seed) for seed in range(4)], schedule.with_programs([cells]), *batch(5), loss=mse)


@pytest.mark.parametrize("parts", [("",), (":1/2", ":2/2"), (":1/2",)], ids=["whole", "parts", "half"])
def test_a_micro_batch_whose_copy_is_on_the_host_is_not_alive(parts: tuple[str, ...]) -> None:
    """All three are again when their weight gradients wait for W; two slots let no more be alive in the forwards."""
    out = [f"0F{mb} " + " ".join(f"0O{mb}{part}" for part in parts) for mb in range(3)]
    back = [" ".join(f"0L{mb}{part}" for part in reversed(parts)) + f" 0I{mb}" for mb in range(3)]
    cells = " ".join([*out, *back, "0W0 0W1 0W2"]).split()
    schedule = Schedule.of([cells], placement=[0], microbatches=3).with_slots({"saved": 2})
    _, pipeline = result(schedule, [Block(0)])
    assert pipeline.peak_activations == simulate(schedule).peak_activations == (3,)


@pytest.mark.parametrize("cells", ["0F0 1F0 1O0 1L0 1B0 0B0", "0F0 1F0 1OKEPT0 1LKEPT0 1R0 1B0 0B0"])
def test_a_step_uses_the_host_memory_of_the_one_before(cells: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule.of([cells.split()], placement=[0, 0], microbatches=1)
    pipeline = LocalPipeline([Block(0), Block(1)], schedule, loss=mse)
    mapped: list[int] = []
    monkeypatch.setattr("mmap.mmap", lambda _, size: mapped.append(size) or bytearray(size))
    pipeline.step(*batch(2))
    assert mapped
    mapped.clear()
    pipeline.step(*batch(2))
    assert not mapped


def test_a_received_input_that_is_copied_is_not_held() -> None:
    seen: list[weakref.ref[Any]] = []
    alive: list[list[bool]] = []

    class Looks(Block):
        def forward(self, x: Tensor) -> Tensor:
            if len(seen) == 2:  # the thread that has copied the input leaves its function beside R0
                for _ in range(1000):
                    if seen[0]() is not None:
                        time.sleep(0.01)
            alive.append([storage() is not None for storage in seen])
            seen.append(weakref.ref(x.untyped_storage()))
            return super().forward(x)

    programs = ["0F0 0F1 0B0 0B1", "1F0 1OKEPT0 1F1 1LKEPT0 1R0 1B0 1B1"]
    schedule = Schedule.of([program.split() for program in programs], placement=[0, 1], microbatches=2)
    LocalPipeline([Block(0), Looks(1)], schedule, loss=mse).step(*batch(2))
    assert alive[2] == [False, True]  # when R0 runs, after F0 and F1


class Wide(nn.Module):
    """Saves many times the bytes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)).square())


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveBytes]:
    """Bytes of torch's allocator, also of tensors that threads make."""
    count, run = LiveBytes(), threading.Thread.run

    def counted(thread: threading.Thread) -> None:
        with count:
            run(thread)

    monkeypatch.setattr(threading.Thread, "run", counted)
    return count


def held(schedule: Schedule, live: LiveBytes) -> int:
    pipeline = LocalPipeline([Wide() for _ in range(4)], schedule, loss=mse)
    pipeline.step(*batch(64))
    inputs, targets = batch(64)
    live.now = live.peak = 0
    with live:
        pipeline.step(inputs, targets)
    assert live.now < live.peak / 100  # nothing stays behind
    return live.peak


def test_no_more_micro_batches_are_held_than_there_are_slots(live: LiveBytes) -> None:
    """8 micro-batches, all forwards first; with two slots the one in work and the one that is copied."""
    plain = S.gpipe(1, 8)
    schedule = S.offload(plain, FAST).with_slots({"saved": 2})
    assert held(schedule, live) < 0.35 * held(plain, live)


def test_a_storage_travels_whole_and_once_and_what_is_held_does_not(live: LiveBytes) -> None:
    x, weight = torch.randn(1000, requires_grad=True), torch.randn(1000, requires_grad=True)

    def loss() -> Tensor:
        y = x * 2.0
        first, second = y[:500], y.view(2, 500)[1]
        return (first * weight[:500] * second).sum() + (y.exp() * x).sum()

    loss().backward()
    want = [x.grad, weight.grad]
    x.grad = weight.grad = None
    with live:
        saved = SavedTensors(CPU, HostBuffers(CPU))
        saved.begin([weight, x])
        with saving(saved.pack):
            result = loss()
        before = live.now
        saved.complete()
        saved.to_host(1, None)
        assert before - live.now == pytest.approx(2 * 4000 + 2000, abs=100)  # y with its views, exp(y), and a product
        saved.to_device(1, None)
        assert before == pytest.approx(live.now, abs=100)
        result.backward()
    assert all(torch.equal(a, b) for a, b in zip([x.grad, weight.grad], want, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("cells", [("0O0:1/2", "0O0:1/4", "0L0:1/4", "0L0:1/2"), ("0O0:norms", "0L0:norms")])
def test_parts_of_two_sizes_or_with_a_name_are_refused(cells: tuple[str, ...]) -> None:
    schedule = Schedule.of([["0F0", *cells, "0B0"]], placement=[0], microbatches=1)
    with pytest.raises(ConfigError, match="is of the whole, or of one of so many equal parts as the other copies"):
        LocalPipeline([Block(0)], schedule, loss=mse)


def test_buffers_are_used_again_and_never_more_than_at_once() -> None:
    buffers = HostBuffers(CPU)
    first, second = buffers.take(100), buffers.take(100)
    buffers.give_back(first)
    assert buffers.take(100) is first
    buffers.give_back(first)
    buffers.give_back(second)
    third = buffers.take(150)
    assert third.nbytes == 150
    buffers.give_back(third)  # 350 bytes, 200 of which were in use at once
    assert {id(buffers.take(100)), id(buffers.take(100))} != {id(first), id(second)}


class FailsOnce(Block):
    """Raises in its second forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("the second forward")
        return super().forward(x)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "cells",
    [
        "0F0 0O0 0F1 0L0 0B0 0B1",
        "0F0 0O0:1/2 0O0:2/2 0F1 0L0:2/2 0L0:1/2 0B0 0B1",
        "0F0 1F0 1OKEPT0 0F1 1F1 1LKEPT0 1R0 1B0 0B0 1B1 0B1",
    ],
)
def test_a_copy_of_a_failed_step_does_not_touch_the_next_one(cells: str, fails: bool) -> None:
    """It ends, or fails, while the next step is about to copy the same micro-batch."""
    schedule = Schedule.of([cells.split()], placement=[0] * (1 + ("1F0" in cells)), microbatches=2)
    plain = LocalPipeline([Block(seed) for seed in range(4)], S.gpipe(1, 2), loss=mse)
    pipeline = LocalPipeline([FailsOnce(0), *(Block(seed) for seed in range(1, 4))], schedule, loss=mse)
    copy = next(cell for cell in cells.split() if "O" in cell)
    calls, late, ended = [], threading.Event(), threading.Event()

    def beside(action: Action, execute: Callable[[], object]) -> None:
        if str(action) == copy:
            calls.append(threading.current_thread())
            if len(calls) == 1:
                assert late.wait(60)
                if fails:
                    raise ValueError("of the step before")
            else:
                late.set()
                calls[0].join(60)
                ended.set()
        elif ended.is_set() and "L" in action.kind:
            time.sleep(0.2)  # the backward waits for it, and not for the one of the step before
        execute()

    run_beside(pipeline, beside)
    with pytest.raises(ValueError, match="the second forward"):
        pipeline.step(*batch(4))
    got = [pipeline.step(*batch(4, seed=1)), *(parameter.grad for parameter in pipeline.parameters())]
    assert len(calls) == 2
    want = [plain.step(*batch(4, seed=1)), *(parameter.grad for parameter in plain.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("failing", ["0L0:2/2", "0L0:1/2"])
def test_a_copy_back_that_fails_ends_the_backward_that_waits_for_it(failing: str) -> None:
    """The backward begins as soon as the copies back have begun, and waits inside for what it uses."""
    cells = "0F0 0O0:1/2 0O0:2/2 0L0:2/2 0L0:1/2 0B0"
    schedule = Schedule.of([cells.split()], placement=[0], microbatches=1)
    pipeline = LocalPipeline([Block(seed) for seed in range(4)], schedule, loss=mse)

    def beside(action: Action, execute: Callable[[], object]) -> None:
        if str(action) == failing:
            raise ValueError("no memory left")
        execute()

    run_beside(pipeline, beside)
    with pytest.raises(ValueError, match="no memory left"):
        pipeline.step(*batch(2))


def test_a_copy_back_may_end_after_a_backward_that_uses_nothing_of_it() -> None:
    """The first stage trains nothing."""
    cells = "0F0 0O0:1/2 0O0:2/2 1F0 0L0:2/2 0L0:1/2 1B0 0B0 0F1 1F1 1B1 0B1"
    schedule = Schedule.of([cells.split()], placement=[0, 0], microbatches=2)
    blocks = [Block(0).requires_grad_(False), Block(1)]
    calls, second = [], threading.Event()

    def note(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            second.set()

    blocks[0].register_forward_pre_hook(note)
    pipeline = LocalPipeline(blocks, schedule, loss=mse)

    def beside(action: Action, execute: Callable[[], object]) -> None:
        assert action.kind != "L:1/2" or second.wait(60)
        execute()

    run_beside(pipeline, beside)
    x, y = batch(4)
    loss = pipeline.step(x, y)
    plain = LocalPipeline([Block(0).requires_grad_(False), Block(1)], S.gpipe(1, 2), loss=mse)
    assert torch.equal(loss, plain.step(x, y))
    wanted = [parameter.grad for parameter in plain.parameters() if parameter.requires_grad]
    assert all(torch.equal(p.grad, grad) for p, grad in zip(blocks[1].parameters(), wanted, strict=True))
