"""What happens when a rank raises, dies, loses a message, or comes with another plan: all ranks end, and say why."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pipeloom as pl
from dying import End, run_until_dead
from models import Block, batch, blocks, mse
from pipeloom.config.fault import parse_fault
from pipeloom.errors import ConfigError, DistributedError
from pipeloom.runtime import Layer, LossTerm, Pipeline, RuntimeOptions
from pipeloom.runtime.loss import LossBroadcast, PendingLoss
from processes import run_ranks

S = pl.schedules
LOOPED = S.interleaved(3, 7, 2)
TRANSPORTS = ["shared", "individual"]
LIMIT = 6.0  # seconds; no healthy rank of these stands still for a tenth of it


def train(rank: int, layers: Any, options: RuntimeOptions) -> None:
    pipeline = Pipeline(layers, LOOPED, loss=mse, options=options)
    for step in range(4):
        pipeline.step(*batch(14, seed=step))
    pipeline.close()


def run(folder: Path, fault: str, transport: Any, **options: Any) -> list[End]:
    chosen = RuntimeOptions(transport=transport, fault=parse_fault(fault), **options)
    return run_until_dead(train, 3, folder, blocks(6), chosen)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_message_is_reported_by_every_rank(transport: Any, tmp_path: Path) -> None:
    """Rank 0 sends the outputs of stage 0 first; its third is micro-batch 2's."""
    ends = run(tmp_path, "drop-send:0:2", transport, timeout=LIMIT)
    assert [end.code for end in ends] == [6, 6, 6]
    for rank, end in enumerate(ends):
        assert "the step stalls: rank" in end.words
        assert f"[rank {rank}] step 0, " in end.words
        assert "waits for" in end.words
    if (
        transport == "shared"
    ):  # a message says which it is; on gloo the next one takes its place, and the last one is missed
        waits = "F of stage 1 micro-batch 2: waits for the output of stage 0 micro-batch 2 from rank 0"
        assert waits in ends[1].words
    assert "from rank 0" in ends[1].words


@pytest.mark.core
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_named(transport: Any, victim: int, tmp_path: Path) -> None:
    ends = run(tmp_path, f"kill:{victim}:1", transport)
    assert [end.code for end in ends] == [-9 if rank == victim else 6 for rank in range(3)], [end.words for end in ends]
    for rank, end in enumerate(ends):
        if rank != victim:
            assert f"because rank {victim} is gone" in end.words, end.words
            assert f"[rank {rank}] " in end.words
    assert any("waits for" in end.words or "never sent the loss" in end.words for end in ends)


def train_slowly(rank: int, layers: Any, options: RuntimeOptions) -> None:
    """As `train`, but what it asks of the loss's rank comes a second late."""
    start = LossBroadcast.start

    def late(self: LossBroadcast, share: Tensor | None) -> PendingLoss:
        time.sleep(1.0 if share is None else 0.0)
        return start(self, share)

    LossBroadcast.start = late  # type: ignore[method-assign]
    pipeline = Pipeline(layers, LOOPED, loss=mse, options=options)
    for step in range(4):
        pipeline.step(*batch(14, seed=step))


@pytest.mark.core
def test_a_rank_that_died_before_its_loss_was_asked_for_is_named(tmp_path: Path) -> None:
    options = RuntimeOptions(transport="individual", fault=parse_fault("kill:2:1"))
    ends = run_until_dead(train_slowly, 3, tmp_path, blocks(6), options)
    assert [end.code for end in ends] == [6, 6, -9], [end.words for end in ends]
    assert all("because rank 2 is gone" in end.words for end in ends[:2])


@pytest.mark.core
def test_the_death_of_the_stores_host_ends_all(tmp_path: Path) -> None:
    ends = run(tmp_path, "kill:0:1", "auto")
    assert [end.code for end in ends] == [-9, 6, 6]
    assert all("rank 0" in end.words and "gone" in end.words for end in ends[1:])


def test_a_rank_that_leaves_its_schedule_is_named(tmp_path: Path) -> None:
    """A rank that leaves its schedule without a word: its peers stall, and every rank ends."""

    def work(rank: int) -> None:
        options = RuntimeOptions(timeout=LIMIT)
        pipeline = Pipeline(blocks(6), LOOPED, loss=mse, options=options)
        pipeline.step(*batch(14))
        if rank == 1:
            time.sleep(600)
        pipeline.step(*batch(14))

    ends = run_until_dead(work, 3, tmp_path)
    assert [end.code for end in ends] == [6, 6, 6]
    assert "the step stalls" in ends[0].words
    assert "[rank 1] between actions, step 0" in ends[1].words
    assert all("rank 1 (process " in end.words and "is busy: between actions" in end.words for end in ends)


def refusal(make: Callable[[], Pipeline]) -> str:
    """The words of the error that `make` ends with."""
    try:
        make().close()
    except (DistributedError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def handshakes(rank: int) -> dict[str, str]:
    plain = RuntimeOptions(monitor=False)

    def pipeline(schedule: pl.Schedule = LOOPED, options: RuntimeOptions = plain, own: float = 0.0, **more: Any) -> str:
        layers = [*blocks(5), Layer("term", lambda: Block(5), losses={"own": LossTerm(mse, own)} if own else {})]
        return refusal(lambda: Pipeline(layers, schedule, loss=mse, options=options, **more))

    def cut_by(costs: list[float]) -> str:
        layers = [Layer(f"layer{at}", partial(Block, 5), cost=cost) for at, cost in enumerate(costs)]
        return refusal(lambda: Pipeline(layers, S.gpipe(3, 4), loss=mse, options=plain))

    odd = rank == 2
    found = {
        "costs": cut_by([4.0, 1.0, 1.0, 1.0, 1.0] if odd else [1.0, 1.0, 1.0, 1.0, 4.0]),
        "nothing": pipeline(),
        "m": pipeline(S.interleaved(3, 8 if odd else 7, 2)),
        "schedule": pipeline(S.looped_bfs(3, 7, 2) if odd else LOOPED),
        "rounds": pipeline(S.interleaved(3, 8, 2, rounds="head" if odd else "tail")),
        "order of stages": pipeline(S.gpipe(3, 4) if not odd else reversed_gpipe()),
        "stages": pipeline(stages=[2, 1, 1, 1, 1, 0] if odd else [1] * 6),
        "transport": pipeline(options=replace(plain, transport="individual" if odd else "shared")),
        "overlap": pipeline(options=replace(plain, transport="individual", overlap_p2p=not odd)),
        "shapes": pipeline(options=replace(plain, shapes="each" if odd else "once")),
        "sizes": pipeline(options=replace(plain, microbatch_sizes=(1, 1, 1, 1, 1, 1, 3) if odd else None)),
        "tied": pipeline(tied=[("block0.linear.weight", "block1.linear.weight")] if odd else ()),
        "losses of layers": pipeline(own=0.5 if odd else 0.3),
        "too few processes": pipeline(S.interleaved(4, 7, 1)),
        "main gradients": pipeline(options=replace(plain, main_gradients=odd)),
        "recompute": pipeline(options=replace(plain, recompute="full" if odd else frozenset(["block1"]))),
        "what may differ": pipeline(options=replace(plain, timeout=100.0 + rank, trace=odd)),
        "still well": pipeline(),
    }
    with pytest.MonkeyPatch.context() as patch:
        if odd:
            patch.setattr("platform.python_version", lambda: "4.0")
        found["versions"] = pipeline()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pipeloom.runtime.health.handshake.source_digests", lambda _: {"source of pipeloom/runtime": str(rank & 2)}
        )
        found["source"] = pipeline()
    dist.barrier()
    return found


def reversed_gpipe() -> pl.Schedule:
    programs = [[f"{2 - r}F{mb}" for mb in range(4)] + [f"{2 - r}B{mb}" for mb in range(4)] for r in range(3)]
    return pl.Schedule.of(programs, placement=[2, 1, 0], microbatches=4, name="gpipe")


@pytest.mark.core
def test_the_handshake_names_every_difference_on_every_rank() -> None:
    for rank, found in enumerate(run_ranks(handshakes, 3)):
        wanted = {
            "nothing": "",
            "m": "micro-batches: 7 on rank 0, 8 on rank 2",
            "schedule": "schedule: Schedule(interleaved",
            "rounds": "rounds='tail'",
            "order of stages": "placement: [0, 1, 2] on rank 0, [2, 1, 0] on rank 2",
            "stages": "layers of each stage: [1, 1, 1, 1, 1, 1] on rank 0, [2, 1, 1, 1, 1, 0] on rank 2",
            "costs": "layers of each stage: [2, 2, 1] on rank 0, [1, 2, 2] on rank 2",
            "transport": "options.transport: shared on rank 0, individual on rank 2",
            "overlap": "options.overlap_p2p: True on rank 0, False on rank 2",
            "main gradients": "options.main_gradients: False on rank 0, True on rank 2",
            "recompute": "options.recompute: ['block1'] on rank 0, full on rank 2",
            "what may differ": "",
            "versions": f"torch {torch.__version__}, Python 4.0 on rank 2",
            "source": "source of pipeloom/runtime: 0 on rank 0, 2 on rank 2",
            "shapes": "options.shapes: once on rank 0, each on rank 2",
            "sizes": "sizes of the micro-batches: None on rank 0, [1, 1, 1, 1, 1, 1, 3] on rank 2",
            "tied": "tied weights: [] on rank 0, [['block0.linear.weight', 'block1.linear.weight']] on rank 2",
            "losses of layers": "losses of layers: {'own': 0.3} on rank 0, {'own': 0.5} on rank 2",
            "too few processes": "ConfigError: the schedule has 4 ranks, and the pipeline 3 processes",
            "still well": "",
        }
        for case, words in wanted.items():
            assert (words in found[case]) if words else not found[case], (rank, case, found[case])
            if words and case != "too few processes":
                assert found[case].startswith("DistributedError: the ranks disagree"), found[case]


def absent(rank: int) -> str:
    if rank == 1:
        time.sleep(LIMIT + 2)
        return ""
    options = RuntimeOptions(monitor=False, timeout=LIMIT)
    return refusal(lambda: Pipeline(blocks(2), S.gpipe(2, 2), loss=mse, options=options))


def test_the_handshake_names_a_rank_that_does_not_come() -> None:
    assert "rank 1 did not join the handshake within 6 s" in run_ranks(absent, 2)[0]
