"""All-to-all hidden inside one micro-batch: chunks of its tokens, or blocks of its sequences, against none of it.

    python benchmarks/experts.py

Two processes over gloo, one block with experts. Attention and experts sleep: 20 ms each of a whole micro-batch forward, twice
that backward. One all-to-all takes x times the 20 ms, of a part of the tokens its share; the link carries one after the other.
The layer, autograd and the collectives are the real ones. Medians of runs that take turns in the same processes.

Before that, over gloo as it is: how long a rank stands still for the counts of rows, with nothing beside their exchange, and
with the rows gathered meanwhile; and a layer with a capacity (width 256, 8 experts) whose rows are padded to it, against one that
exchanges counts, forward and backward, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.config import load
from pipeloom.models import GateShape, MoELayer, TopKGate, layers, moe_overlap
from pipeloom.models.decoder import Attention
from pipeloom.ops.segments import report_standstills_to
from pipeloom.parallel.dispatch import ExpertParallel, begin_dispatch, permute_for_dispatch
from pipeloom.parallel.expert import Experts
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.router import Gate, Routing, route
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

SECONDS = 0.020
BATCH, LENGTH = 4, 16
WAYS = [("whole", 1, 1), ("2 chunks", 2, 1), ("4 chunks", 4, 1), ("2 blocks", 1, 2), ("4 blocks", 1, 4)]
RATIOS = (0.5, 1.0, 1.5, 2.0)
RUNS = 9
TOKENS, WIDTH, COUNT_RUNS = (128, 1024, 4096), 512, 100


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
    attention, run, experts = Attention.forward, moe_overlap.attend_block, Experts.forward

    def attend(self: Attention, x: Tensor, *others: Any) -> Tensor:
        return Busy.apply(attention(self, x, *others), SECONDS)  # type: ignore[no-any-return, no-untyped-call]

    def attend_block(attention: Any, heads: Any, positions: Any, start: int, end: int) -> Tensor:
        mixed = run(attention, heads, positions, start, end)
        return Busy.apply(mixed, SECONDS * (end - start) / LENGTH)  # type: ignore[no-any-return, no-untyped-call]

    def compute(self: Experts, rows: Tensor, counts: Any) -> Tensor:
        share = rows.shape[0] / (2 * tokens)  # each token goes to two experts
        return Busy.apply(experts(self, rows, counts), SECONDS * share)  # type: ignore[no-any-return, no-untyped-call]

    all_to_all = dist.all_to_all_single

    def send(received: Tensor, rows: Tensor, *sizes: Any, **keywords: Any) -> SlowWork:
        work = all_to_all(received, rows, *sizes, **keywords)
        return SlowWork(link, link.send(rows.shape[0]), work)

    Attention.forward = attend  # type: ignore[method-assign, assignment]
    moe_overlap.attend_block = attend_block  # type: ignore[assignment]
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


def wait_for_counts(rank: int) -> dict[int, dict[str, tuple[float, float]]]:
    """Tokens -> way -> median seconds of planning and gathering, and of standing still for the counts, over real gloo.

    "first": nothing runs beside the exchange of counts. "beside": the rows are gathered meanwhile, as the layers do it.
    """
    mesh = Mesh.of(MeshShape(dp=2, ep=2))
    assert mesh is not None
    spread, gate = ExpertParallel(mesh.ep), Gate("softmax", 16, 2)
    stood = 0.0

    @contextmanager
    def watch(name: str, kind: str) -> Iterator[None]:
        nonlocal stood
        start = time.perf_counter()
        yield
        stood += time.perf_counter() - start

    def first(tokens: Tensor, routing: Routing) -> None:
        (plan,) = begin_dispatch([routing], spread).plans()
        permute_for_dispatch(tokens, routing.weights, plan.leaving, spread)

    def beside(tokens: Tensor, routing: Routing) -> None:
        dispatch = begin_dispatch([routing], spread)
        permute_for_dispatch(tokens, routing.weights, dispatch.leaving[0], spread)
        dispatch.plans()

    report_standstills_to(watch)
    found: dict[int, dict[str, tuple[float, float]]] = {}
    for count in TOKENS:
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randn(count, WIDTH, generator=generator)
        routing = route(gate, torch.randn(count, 16, generator=generator))
        runs: dict[str, list[tuple[float, float]]] = {"first": [], "beside": []}
        for turn in range(COUNT_RUNS + 5):
            for name, way in (("first", first), ("beside", beside)):
                dist.barrier()
                stood, start = 0.0, time.perf_counter()
                way(tokens, routing)
                if turn >= 5:
                    runs[name].append((time.perf_counter() - start, stood))
        found[count] = {name: (median(t for t, _ in each), median(s for _, s in each)) for name, each in runs.items()}
    report_standstills_to(None)
    return found


def pad_to_capacity(rank: int) -> dict[float, float]:
    """Capacity factor -> median seconds of a layer with padded rows over those of one that counts them, over real gloo."""
    mesh = Mesh.of(MeshShape(dp=2, ep=2))
    assert mesh is not None
    spread, found = ExpertParallel(mesh.ep), {}
    for capacity in (0.8, 1.0, 1.25, 2.0):
        pair = []
        for pads in (False, True):
            torch.manual_seed(1)
            gate = TopKGate(GateShape(256, 8, capacity_factor=capacity, pad_to_capacity=pads))
            pair.append(MoELayer(gate, Experts(8, 256, 512, spread), spread))
        x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn in range(4 * RUNS + 1):
            for layer, each in zip(pair, seconds, strict=True):
                dist.barrier()
                start = time.perf_counter()
                layer(x).sum().backward()
                if turn:
                    each.append(time.perf_counter() - start)
        found[capacity] = median(seconds[1]) / median(seconds[0])
    return found


def main() -> None:
    padded = run_ranks(pad_to_capacity, 2)[0]
    print("padded to a capacity, over counted: " + ", ".join(f"{c:g}: {ratio:.2f}" for c, ratio in padded.items()))
    print()
    counts = run_ranks(wait_for_counts, 2)[0]
    print("| tokens | counts first ms | of it waiting | rows gathered beside ms | of it waiting |")
    print("| --- | --- | --- | --- | --- |")
    for tokens, ways in counts.items():
        cells = [f"{1e3 * seconds:.2f}" for name in ("first", "beside") for seconds in ways[name]]
        print(f"| {tokens} | {' | '.join(cells)} |")
    print()
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
