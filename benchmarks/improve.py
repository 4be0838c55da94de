"""`pipeloom improve` on traces of torch's own pipeline runtime: the gain that it predicts, and that of the CSV that it writes.

    python benchmarks/improve.py              all parts
    python benchmarks/improve.py decoder real emulated

decoder:  2 processes of one thread, a small transformer from its tokens to its loss, in uneven stages.

real:     2 processes of one thread, stages of linear layers, the first and fourth twice as long; backwards stay whole
          since the trace does not say what I and W take.
emulated: 4 processes whose stages sleep, in a line, a loop and a V; I and W of a stage take as long as its F, and every third
          stage half as long again. Backwards may be split (--split).

Each row: torch runs a schedule of its own and its profiler records a few steps of every rank; `pipeloom improve` reads the folder
and writes a CSV; torch's runtime runs that. Then both run in turns, without the profiler; the gain is that of the medians.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.profiler import ProfilerActivity, profile

from commands import answer
from parts import run_parts
from pipeloom.measure.rehearse import Clock
from processes import run_ranks

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints two lines at each start and stop

LIMIT = 0.03
RECORDED, TIMED = 5, 7
WIDTH, ROWS = 1024, 128
HIDDEN, TOKENS, SEQUENCES, VOCABULARY = 256, 64, 2, 1024
UNIT = 0.020
_CLOCK = Clock()  # of this process


class _Slow(torch.autograd.Function):
    """F and I: torch runs this node twice where it splits the backward, the second time on the way to the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.done, ctx.seconds = False, seconds
        _CLOCK.compute("", "F", seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if not ctx.done:
            _CLOCK.compute("", "I", ctx.seconds)
        ctx.done = True
        return gradients[0], gradients[0].new_zeros(()), None


class _SlowWeight(torch.autograd.Function):
    """W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _CLOCK.compute("", "W", ctx.seconds)
        return gradients[0], None


class Slow(nn.Module):
    """A stage that sleeps."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds = UNIT * (1.5 if place % 3 == 2 else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x, _SlowWeight.apply(self.weight, self.seconds), self.seconds)  # type: ignore[no-any-return,no-untyped-call]


def products(place: int) -> nn.Module:
    """Return a stage that computes; the first and the fourth are twice as long."""
    count = 4 if place in (0, 3) else 2
    return nn.Sequential(*(each for _ in range(count) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


class Blocks(nn.Module):
    """Blocks of a causal transformer: with the embedding on the first stage, with the output layer on the last."""

    def __init__(self, count: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(VOCABULARY, HIDDEN) if first else nn.Identity()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(count)
        )
        self.last = nn.Linear(HIDDEN, VOCABULARY) if last else nn.Identity()
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.last(x)  # type: ignore[no-any-return]


def two_blocks(place: int) -> nn.Module:
    """Return a stage of a decoder in two stages: five blocks, then two."""
    return Blocks((5, 2)[place], first=place == 0, last=place == 1)


def four_blocks(place: int) -> nn.Module:
    """Return a stage of a decoder in four stages, of which the first and the fourth have more blocks."""
    return Blocks((3, 1, 1, 3)[place], first=place == 0, last=place == 3)


def of_tokens(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def stepping(
    rank: int, ranks: int, name: str, chunks: int, m: int, layer: Callable[[int], nn.Module], csv: str
) -> Callable[[], float]:
    """Return a function that makes a step of a schedule of torch, or of the CSV file where one is given, and times it."""
    torch.manual_seed(rank)
    vee = name == "ScheduleZBVZeroBubble"
    places = [rank, 2 * ranks - 1 - rank] if vee else [rank + at * ranks for at in range(chunks)]
    modules = [layer(place) for place in places]
    stages = [
        pipelining.PipelineStage(module, place, ranks * chunks, torch.device("cpu"))
        for module, place in zip(modules, places, strict=True)
    ]
    last = 0 if vee else ranks - 1
    loss = of_tokens if layer in DECODERS else nn.functional.mse_loss
    untyped: Any = _PipelineScheduleRuntime
    if csv:
        torch_runtime = untyped(stages, m, loss_fn=loss)
        torch_runtime._load_csv(csv, format="compute_only")
    else:
        torch_runtime = getattr(pipelining, name)(stages if chunks > 1 else stages[0], m, loss_fn=loss)
    if layer in DECODERS:
        x, y = torch.randint(VOCABULARY, (2, SEQUENCES * m, TOKENS))
    else:
        x, y = torch.randn(2, ROWS * m, WIDTH if layer is products else 1)

    def step() -> float:
        for module in modules:
            module.zero_grad()
        dist.barrier()
        begun = time.perf_counter()
        arguments = {"target": y, "losses": []} if rank == last else {}
        torch_runtime.step(*([x] if rank == 0 else []), **arguments)
        dist.barrier()
        return time.perf_counter() - begun

    return step


def record(
    rank: int, ranks: int, name: str, chunks: int, m: int, layer: Callable[[int], nn.Module], folder: Path
) -> None:
    step = stepping(rank, ranks, name, chunks, m, layer, "")
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(RECORDED):
            step()
            profiled.step()
    profiled.export_chrome_trace(str(folder / f"rank{rank}.json"))


def race(
    rank: int, ranks: int, name: str, chunks: int, m: int, layer: Callable[[int], nn.Module], csv: str
) -> tuple[float, float]:
    """Return the medians of torch's schedule and of the CSV, in turns; both without their first step."""
    steps = [stepping(rank, ranks, name, chunks, m, layer, each) for each in ("", csv)]
    seconds = [[step() for step in steps] for _ in range(TIMED + 1)][1:]
    before, after = zip(*seconds, strict=True)
    return median(before), median(after)


def improved(folder: Path, csv: Path, split: bool) -> dict[str, Any]:
    """Return what `pipeloom improve` says of a folder of traces."""
    return answer("improve", str(folder), "--csv", str(csv), *["--split"] * split)


def compare(ranks: int, rows: tuple[tuple[str, int, int], ...], layer: Callable[[int], nn.Module]) -> None:
    heads = {"measured": 10, "simulated": 11, "predicted": 11, "gain": 8, "torch": 9, "CSV": 9, "gain ": 8, "error": 8}
    print(f"{'torch runs':<28}" + "".join(f"{head:>{width}}" for head, width in heads.items()))
    for name, chunks, m in rows:
        with tempfile.TemporaryDirectory() as root:
            folder, csv = Path(root) / "trace", Path(root) / "better.csv"
            folder.mkdir()
            run_ranks(record, ranks, ranks, name, chunks, m, layer, folder)
            answer = improved(folder, csv, layer is Slow)
            if answer["best"] is None:
                print(f"{f'{name}, m {m}':<28} nothing worth changing", flush=True)
                continue
            before, after = run_ranks(race, ranks, ranks, name, chunks, m, layer, str(csv))[0]
        now, best = answer["now"]["makespan"], answer["best"]["makespan"]
        promised, gained = 1 - best / now, 1 - after / before
        error = abs(promised - gained)
        print(
            f"{f'{name}, m {m}':<28}{answer['measured'] * 1e3:8.1f}ms{now * 1e3:9.1f}ms{best * 1e3:9.1f}ms{promised:8.1%}"
            f"{before * 1e3:7.1f}ms{after * 1e3:7.1f}ms{gained:8.1%}{error:8.1%} {'reached' if error <= LIMIT else 'MISSED'}",
            flush=True,
        )


DECODERS = (two_blocks, four_blocks)


def decoder() -> None:
    print(
        f"2 processes of one thread, a decoder of width {HIDDEN}, {SEQUENCES} sequences of {TOKENS} tokens a micro-batch"
    )
    compare(2, (("ScheduleGPipe", 1, 4),), two_blocks)
    compare(2, (("ScheduleLoopedBFS", 2, 4),), four_blocks)


def real() -> None:
    print(f"2 processes of one thread, stages of 2 or 4 products of {ROWS} x {WIDTH} x {WIDTH}")
    compare(2, (("ScheduleGPipe", 1, 4), ("ScheduleLoopedBFS", 2, 4)), products)


def emulated() -> None:
    print(f"4 processes whose stages sleep {UNIT * 1e3:.0f} ms or half as long again for each of F, I and W")
    names = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleZBVZeroBubble")
    compare(4, (("ScheduleGPipe", 1, 8), *((name, 2, 8) for name in names)), Slow)


PARTS = {"decoder": decoder, "real": real, "emulated": emulated}

if __name__ == "__main__":
    run_parts(PARTS)
