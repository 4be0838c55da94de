"""All-to-all hidden inside one micro-batch: chunks of its tokens, or blocks of its sequences, against none of it.

    python benchmarks/experts.py

Two processes over gloo, one block with experts. Attention and experts sleep: 20 ms each of a whole micro-batch forward, twice
that backward. One all-to-all takes x times the 20 ms, of a part of the tokens its share; the link carries one after the other.
The layer, autograd and the collectives are the real ones. Medians of runs that take turns in the same processes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.config import MeshShape, load
from pipeloom.models import layers, moe_overlap
from pipeloom.models.decoder import Attention
from pipeloom.parallel.dispatch_plan import ExpertParallel
from pipeloom.parallel.expert import Experts
from pipeloom.parallel.mesh import Mesh
from processes import run_ranks

SECONDS = 0.020
BATCH, LENGTH = 4, 16
WAYS = [("whole", 1, 1), ("2 chunks", 2, 1), ("4 chunks", 4, 1), ("2 blocks", 1, 2), ("4 blocks", 1, 4)]
RATIOS = (0.5, 1.0, 1.5, 2.0)
RUNS = 9


class Busy(torch.autograd.Function):
    """Sleeps in the forward, and twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Link:
    """Carries one all-to-all after the other; `exposed` counts the seconds for which somebody waited."""

    def __init__(self) -> None:
        self.seconds_a_row = 0.0
        self.exposed = 0.0
        self._free = 0.0

    def send(self, rows: int) -> float:
        """When what starts now has arrived."""
        self._free = max(self._free, time.perf_counter()) + rows * self.seconds_a_row
        return self._free

    def wait(self, due: float) -> None:
        left = due - time.perf_counter()
        if left > 0:
            time.sleep(left)
            self.exposed += left


class SlowWork:
    """An all-to-all that has arrived when the emulated link has carried it."""

    def __init__(self, link: Link, due: float, work: Any) -> None:
        self.link, self.due, self.work = link, due, work

    def wait(self) -> None:
        self.link.wait(self.due)
        self.work.wait()


def emulate(link: Link) -> None:
    """Puts sleeps into the attention and the experts, and the link under the all-to-all."""
    tokens = BATCH * LENGTH
    attention, run, experts = Attention.forward, moe_overlap.BlockAttention.run, Experts.forward

    def attend(self: Attention, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return Busy.apply(attention(self, x, position_ids), SECONDS)  # type: ignore[no-any-return, no-untyped-call]

    def attend_block(self: Any, start: int, end: int) -> Tensor:
        return Busy.apply(run(self, start, end), SECONDS * (end - start) / LENGTH)  # type: ignore[no-any-return, no-untyped-call]

    def compute(self: Experts, rows: Tensor, counts: Any) -> Tensor:
        share = rows.shape[0] / (2 * tokens)  # each token goes to two experts
        return Busy.apply(experts(self, rows, counts), SECONDS * share)  # type: ignore[no-any-return, no-untyped-call]

    all_to_all = dist.all_to_all_single

    def send(received: Tensor, rows: Tensor, *sizes: Any, **keywords: Any) -> SlowWork:
        work = all_to_all(received, rows, *sizes, **keywords)
        return SlowWork(link, link.send(rows.shape[0]), work)

    Attention.forward = attend  # type: ignore[method-assign]
    moe_overlap.BlockAttention.run = attend_block  # type: ignore[method-assign]
    Experts.forward = compute  # type: ignore[method-assign]
    dist.all_to_all_single = send  # type: ignore[assignment]


def measure(rank: int) -> dict[tuple[str, float], tuple[float, float]]:
    """Way, ratio -> median seconds of forward and backward, and of waiting for the link."""
    mesh = Mesh.of(MeshShape(dp=2, ep=2))
    assert mesh is not None
    link = Link()
    emulate(link)
    shape = load("tiny", {"model.num_experts": 8, "model.num_hidden_layers": 2}).model.shape()
    spread = ExpertParallel(mesh.ep)
    blocks = {
        name: layers(shape, 5, expert=replace(spread, chunks=chunks, blocks=parts))[1]() for name, chunks, parts in WAYS
    }
    x = torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for ratio in RATIOS:
        link.seconds_a_row = ratio * SECONDS / (2 * BATCH * LENGTH)
        for turn in range(RUNS + 1):
            for name, block in blocks.items():
                torch.distributed.barrier()
                link.exposed = 0.0
                start = time.perf_counter()
                out = block(x)
                out.backward(torch.ones_like(out))
                if turn:
                    found.setdefault((name, ratio), []).append((time.perf_counter() - start, link.exposed))
    return {key: (median(t for t, _ in runs), median(e for _, e in runs)) for key, runs in found.items()}


def main() -> None:
    found = run_ranks(measure, 2)[0]
    print("| all-to-all | way | ms | ÷ whole | waiting ms | ÷ whole |")
    print("| --- | --- | --- | --- | --- | --- |")
    for ratio in RATIOS:
        whole = found["whole", ratio]
        for name, *_ in WAYS:
            seconds, exposed = found[name, ratio]
            print(
                f"| {ratio} | {name} | {1e3 * seconds:.1f} | {seconds / whole[0]:.3f} | {1e3 * exposed:.1f} "
                f"| {exposed / whole[1]:.3f} |"
            )


if __name__ == "__main__":
    main()
