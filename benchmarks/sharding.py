"""Sharded parameters (ZeRO-3, `shard=3`) beside ZeRO-1: bytes of parameters on a rank, and seconds of a step.

    python benchmarks/sharding.py

2 x 2 processes (dp, pp), `interleaved` with 4 stages per rank, one block of width 512 (two linear layers) per stage, and
8 micro-batches of 256 tokens. Bytes: the most whole parameters while a layer computes, and the share. Both alternate, step by
step, in the same processes; medians and quartiles over 9 steps of the slowest rank.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from layers import mse
from pipeloom.config import MeshShape, load
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.train.optimizer import Optimizer
from processes import run_ranks

WIDTH, STAGES, MICROBATCHES, TOKENS, SLOTS, STEPS = 512, 8, 8, 256, 3, 9


class Block(nn.Sequential):
    """A block that notes how many bytes of the rank's parameters are whole when it runs."""

    def __init__(self, blocks: list[nn.Module], notes: list[int]) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.blocks, self.notes = [blocks], notes
        blocks.append(self)

    def forward(self, x: Tensor) -> Tensor:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for b in self.blocks[0] for p in b.parameters()}
        self.notes.append(sum(storage.nbytes() for storage in storages.values()))
        return x + super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def measure(rank: int) -> dict[str, Any]:
    """Return name -> (bytes of parameters, of shares, seconds of each step) on this rank."""
    mesh = Mesh.of(MeshShape(dp=2, pp=2))
    schedule = pl.schedules.interleaved(ranks=2, microbatches=MICROBATCHES, chunks=STAGES // 2)
    runs: dict[str, Any] = {}
    for name, words in (("ZeRO-1", []), (f"shard={SLOTS}", [f"shard={SLOTS}"])):
        blocks: list[nn.Module] = []
        notes: list[int] = []
        layers = [Layer(f"b{at}", partial(Block, blocks, notes)) for at in range(STAGES)]
        pipeline = Pipeline(
            layers,
            pl.schedules.transformed(schedule, words),
            loss=mse,
            mesh=mesh,
            options=RuntimeOptions(shard_gradients=True, seed=1, monitor=False),
        )
        parameters = list(pipeline.named_parameters())
        runs[name] = pipeline, Optimizer(parameters, load("tiny").optimizer, pipeline.sync), notes, []
    x = torch.randn(MICROBATCHES * TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank % 2))
    for step in range(STEPS + 2):
        for pipeline, optimizer, notes, seconds in runs.values():
            notes.clear()
            dist.barrier()
            begun = time.perf_counter()
            pipeline.step(x, x.flip(0))
            optimizer.step(None, 1e-3)
            dist.barrier()
            if step > 1:
                seconds.append(time.perf_counter() - begun)
    result = {}
    for name, (pipeline, _, notes, seconds) in runs.items():
        shards = pipeline.sync.shards
        shares = sum(each.share.nbytes for each in shards.parameters.values()) if shards is not None else 0
        result[name] = max(notes), shares, seconds
        pipeline.close()
    return result


def main() -> None:
    ranks = run_ranks(measure, 4)
    whole = ranks[0]["ZeRO-1"][0]
    slots = whole // (STAGES // 2) * SLOTS
    print(f"parameters of a rank {whole:,} bytes; 1/dp and {SLOTS} slots: {whole // 2 + slots:,}")
    for name in ranks[0]:
        low, middle, high = quantiles(map(max, zip(*(rank[name][2] for rank in ranks), strict=True)), n=4)
        held = max(rank[name][0] + rank[name][1] for rank in ranks)
        print(f"{name:8} {held:12,} bytes   {middle * 1e3:7.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})")


if __name__ == "__main__":
    main()
