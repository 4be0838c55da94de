"""What is measured on a GPU: the engine against a plain loop, I + W against B, overlap, offload, fusion, torch.compile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from gpu_setup import Row, Setup, at_least, at_most, gradients, worst
from gpu_travel import Copies, blocks, mse
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.decoder_shape import DecoderShape
from pipeloom.models import layers, token_loss
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions
from pipeloom.schedule.transforms import unpair

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # bf16, dense
MICROBATCHES = 8


def seconds(setup: Setup, run: Callable[[], object], repeats: int = 5, warmup: int = 2) -> float:
    """The median time of a run, the device's work in it."""
    times = []
    for at in range(warmup + (repeats if setup.cuda else 2)):
        setup.wait()
        begun = time.perf_counter()
        run()
        setup.wait()
        if at >= warmup:
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def large(setup: Setup) -> tuple[DecoderShape, int]:
    """A decoder of 1.2 billion parameters and the tokens of a micro-batch; on a CPU a tiny one."""
    if setup.cuda:
        return DecoderShape(20, 2048, 16, 16, 5632, 32000), 2048
    return DecoderShape(4, 32, 4, 4, 64, 101), 16


def engine(setup: Setup) -> list[Row]:
    """Tokens a second of 4 chunks on one device against the same blocks in a loop that accumulates gradients."""
    shape, length = large(setup)
    x, y = setup.tokens(MICROBATCHES, length, shape.vocab_size)
    dtype = torch.bfloat16 if setup.cuda else torch.float32
    loss_of = token_loss(shape)
    peaks = []
    speeds = []
    names = "pipeline of 4 chunks", "plain loop"
    parameters = 0
    for name in names:
        built = layers(shape, 1, dtype, setup.device)
        if setup.cuda:
            torch.cuda.reset_peak_memory_stats(setup.device)
        if name == names[0]:
            schedule = pl.schedules.interleaved(1, MICROBATCHES, 4, group_size=1)
            pipeline = LocalPipeline(built, schedule, loss=loss_of, options=RuntimeOptions(device=setup.device, seed=1))
            parameters = sum(p.numel() for p in pipeline.parameters())
            taken = seconds(setup, partial(pipeline.step, x, y))
            del pipeline
        else:
            modules = nn.ModuleList([layer() for layer in built])
            taken = seconds(setup, partial(plain_step, modules, loss_of, x, y))
            del modules
        speeds.append(x.numel() / taken)
        peaks.append(torch.cuda.max_memory_allocated(setup.device) / 2**30 if setup.cuda else 0.0)
    rows = [
        Row(name, f"{speed:,.0f} tokens/s, peak {gib:.1f} GiB")
        for name, speed, gib in zip(names, speeds, peaks, strict=True)
    ]
    if setup.cuda:
        device = torch.cuda.get_device_name(setup.device)
        peak = next((flops for key, flops in PEAK_FLOPS.items() if key in device), None)
        # 6 operations a parameter and token, and the attention's 12 * layers * hidden * length / 2 (causal)
        work = 6 * parameters + 6 * shape.num_hidden_layers * shape.hidden_size * length
        if peak:
            rows.append(Row("MFU of the pipeline", f"{speeds[0] * work / peak:.1%} of {peak / 1e12:.0f} TFLOP/s"))
        rows.append(at_least("pipeline ÷ plain loop, tokens/s", speeds[0] / speeds[1], 0.98))
    else:
        rows.append(Row("pipeline ÷ plain loop, tokens/s", f"{speeds[0] / speeds[1]:.2f}"))
    return rows


def plain_step(modules: nn.ModuleList, loss_of: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    for one, target in zip(torch.split(x, 1), torch.split(y, 1), strict=True):
        out = one
        for module in modules:
            out = module(out)
        (loss_of(out, target) / len(x)).backward()  # type: ignore[no-untyped-call]


class Scale(nn.Module):
    """A layer of next to no work, so that what is left is the engine's own time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def per_action(setup: Setup) -> list[Row]:
    """The engine's time for an action beyond that of the layers' own calls."""
    schedule = pl.schedules.interleaved(1, 64, 4, group_size=1)
    built = [Layer(f"scale{at}", lambda: Scale(setup.device)) for at in range(4)]
    x, y = (torch.ones(64, 8, device=setup.device) for _ in range(2))
    pipeline = LocalPipeline(built, schedule, loss=mse, options=RuntimeOptions(device=setup.device))
    modules = nn.ModuleList([layer() for layer in built])
    whole, alone = (
        seconds(setup, lambda: pipeline.step(x, y)),
        seconds(setup, lambda: plain_step(modules, mse, x, y)),
    )
    actions = sum(map(len, schedule.programs))
    micro = (whole - alone) / actions * 1e6
    if setup.cuda:
        return [at_most("engine, µs an action", micro, 40)]
    return [Row("engine, µs an action", f"{micro:.0f}")]


def split_cost(setup: Setup) -> list[Row]:
    """I + W against B, the same layers and micro-batches."""
    shape, length = large(setup)
    x, y = setup.tokens(MICROBATCHES, length, shape.vocab_size)
    dtype = torch.bfloat16 if setup.cuda else torch.float32
    taken = []
    for split in (False, True):
        programs = [[f"0F{mb}", *([f"0I{mb}", f"0W{mb}"] if split else [f"0B{mb}"])] for mb in range(MICROBATCHES)]
        cells = [cell for each in programs for cell in each]
        schedule = pl.Schedule.of([cells], placement=[0], microbatches=MICROBATCHES, name="split" if split else "fused")
        pipeline = setup.pipeline(schedule, shape, dtype)
        taken.append(seconds(setup, partial(pipeline.step, x, y)))
        del pipeline
    # A step is F and B, and F takes a third of it: what I + W adds is added to two thirds.
    ratio = 1 + (taken[1] / taken[0] - 1) * 1.5
    return [at_most("I + W ÷ B", ratio, 1.03)] if setup.cuda else [Row("I + W ÷ B", f"{ratio:.2f}")]


def overlap(setup: Setup) -> list[Row]:
    """Overlapped pairs whose all-to-all is traffic through the copy engines, sized to 30 to 60 % of the compute."""
    width, tokens = (4096, 8192) if setup.cuda else (16, 32)
    dtype = torch.bfloat16 if setup.cuda else torch.float32
    x, y = (torch.randn(MICROBATCHES, tokens, width, dtype=dtype, device=setup.device) for _ in range(2))
    paired = pl.schedules.build("1f1b-overlap", 1, MICROBATCHES)

    def time_of(schedule: pl.Schedule, moved: float) -> float:
        Copies.share = moved
        built = blocks(4, width, dtype, setup.device)
        pipeline = LocalPipeline(built, schedule, loss=mse, options=RuntimeOptions(device=setup.device))
        return seconds(setup, lambda: pipeline.step(x, y), repeats=3)

    try:
        apart = unpair(paired)
        compute = time_of(apart, 0)
        whole = (time_of(apart, 1) - compute) / compute
        moved = min(1.0, 0.45 / whole) if setup.cuda else 0.5
        serial = time_of(apart, moved)
        overlapped = time_of(paired, moved)
    finally:
        Copies.share = 1.0
    share = (serial - compute) / compute
    # The first forward and the last backward have no partner: of m micro-batches, m - 1 are in pairs.
    hidden = (serial - overlapped) / (serial - compute) * MICROBATCHES / (MICROBATCHES - 1)
    words = f"compute {compute * 1e3:.1f} ms, serial {serial * 1e3:.1f} ms, overlapped {overlapped * 1e3:.1f} ms"
    rows = [Row(f"all-to-all of {share:.0%} of the compute ({moved:.0%} of the rows)", words)]
    if not setup.cuda:
        return rows
    rows.append(Row("emulated all-to-all, share of the compute", f"{share:.0%}", "30 % to 60 %", 0.3 <= share <= 0.6))
    return [*rows, at_least("share of the pairs' all-to-all that is hidden", hidden, 0.85)]


def offload(setup: Setup) -> list[Row]:
    """Copies to pinned host memory alone and beside matrix products."""
    size = 4096 if setup.cuda else 64
    dtype = torch.bfloat16 if setup.cuda else torch.float32
    matrix = torch.randn(size, size, device=setup.device, dtype=dtype)
    there = torch.randn(2**28 if setup.cuda else 2**12, device=setup.device)
    host = torch.empty(there.shape, pin_memory=setup.cuda)
    stream = torch.cuda.Stream(setup.device) if setup.cuda else None  # type: ignore[no-untyped-call]

    def copy() -> None:
        if stream is None:
            host.copy_(there)
            return
        with torch.cuda.stream(stream):
            host.copy_(there, non_blocking=True)

    def products(count: int = 200) -> None:
        for _ in range(count if setup.cuda else 2):
            matrix @ matrix

    alone, computing = seconds(setup, copy), seconds(setup, products)

    def together() -> None:
        copy()
        products()

    both = seconds(setup, together)
    gigabytes = there.nbytes / 1e9
    return [
        Row("offload alone", f"{gigabytes / alone:.1f} GB/s"),
        Row(
            "offload and products together",
            f"{both * 1e3:.1f} ms; alone {alone * 1e3:.1f} and {computing * 1e3:.1f} ms",
        ),
    ]


def fusion(setup: Setup) -> list[Row]:
    """A weight gradient added into fp32 in one product, against a product and a sum."""
    n, out, inner = (8192, 4096, 4096) if setup.cuda else (32, 16, 16)
    rows, columns = (torch.randn(n, w, device=setup.device, dtype=torch.bfloat16) for w in (out, inner))
    weight = nn.Parameter(torch.zeros(out, inner, dtype=torch.bfloat16, device=setup.device))
    main, buffer = MainGradients(), torch.zeros(out, inner, device=setup.device)
    main.hold(weight, buffer)
    with torch.no_grad():
        fused = seconds(setup, lambda: main.add_product(weight, rows, columns), repeats=20)
        apart = seconds(setup, lambda: buffer.add_(rows.t() @ columns), repeats=20)
    row = Row(
        "fused accumulation ÷ product and sum", f"{fused / apart:.2f} ({fused * 1e6:.0f} against {apart * 1e6:.0f} µs)"
    )
    return [row]


def compiled(setup: Setup) -> list[Row]:
    """torch.compile per block under split backward: the gradients, and the time."""
    if not setup.cuda:
        return [Row("torch.compile per block", "its C++ compiler is not a part of this", "needs a GPU", None)]
    shape = DecoderShape(4, 1024, 8, 8, 2816, 1000)
    x, y = setup.tokens(4, 512, shape.vocab_size)
    found, taken = [], []
    for compiles in (False, True):
        built = []
        for layer in layers(shape, 1, torch.float32, setup.device):

            def make(layer: Layer = layer, compiles: bool = compiles) -> nn.Module:
                module: nn.Module = layer()
                if compiles:
                    module.compile()
                return module

            built.append(Layer(layer.name, make))
        schedule = pl.schedules.build("zb-h1", 2, 4)
        options = RuntimeOptions(device=setup.device, seed=1)
        pipeline = LocalPipeline(built, schedule, loss=token_loss(shape), options=options)
        pipeline.step(x, y)
        found.append(gradients(pipeline))
        taken.append(seconds(setup, partial(pipeline.step, x, y)))
    return [
        at_most("compiled blocks, split backward", worst(found[1], found[0]), 1e-3),
        Row("compiled ÷ not compiled, time", f"{taken[1] / taken[0]:.2f}"),
    ]
