"""What is measured on a GPU: the engine against a plain loop, I + W against B, overlap, offload, fusion, torch.compile."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from gpu_setup import Row, Setup, at_least, at_most, gradients, worst
from gpu_travel import Copies, blocks, mse
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.models import layers, token_loss
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions
from pipeloom.schedule.transforms import unpair
from pipeloom.shapes.decoder import DecoderShape

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # bf16, dense
MICROBATCHES = 8
BLOCKS = 4


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


def host_seconds(setup: Setup, run: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock seconds of a run, and the CPU seconds of this thread in it.

    Autograd works through a graph on a device in a thread of its own, and how long it takes to wake that depends on the
    machine more than on the program.
    """
    setup.wait()
    begun, own = time.perf_counter(), time.thread_time()
    run()
    own = time.thread_time() - own
    setup.wait()
    return time.perf_counter() - begun, own


def large(setup: Setup) -> tuple[DecoderShape, int]:
    """A decoder of 1.2 billion parameters and the tokens of a micro-batch; on a CPU a tiny one."""
    if setup.cuda:
        return DecoderShape(20, 2048, 16, 16, 5632, 32000), 2048
    return DecoderShape(4, 32, 4, 4, 64, 101), 16


PIPELINE, PLAIN, CUT = "pipeline of 4 chunks", "plain loop", "loop cut behind each chunk"


def engine(setup: Setup) -> list[Row]:
    """Tokens per second of 4 chunks on one device against the same blocks in loops that accumulate gradients.

    With micro-batches of 4 sequences; those of a single one keep an H100 waiting for the host's launches, in all three.
    """
    rows = []
    shape, length = large(setup)
    for sequences in (4, 1):
        speeds, peaks, parameters = engine_speeds(setup, sequences)
        of = f"micro-batches of {sequences * length:,} tokens"
        for name, speed in speeds.items():
            rows.append(Row(f"{name}, {of}", f"{speed:,.0f} tokens/s, peak {peaks[name]:.1f} GiB"))
        for other in (PLAIN, CUT):
            ratio, name = speeds[PIPELINE] / speeds[other], f"pipeline ÷ {other}, tokens/s, {of}"
            has_bar = setup.cuda and sequences == 4 and other == PLAIN
            rows.append(at_least(name, ratio, 0.98) if has_bar else Row(name, f"{ratio:.3f}"))
        device = torch.cuda.get_device_name(setup.device) if setup.cuda else ""
        flops = next((flops for key, flops in PEAK_FLOPS.items() if key in device), None)
        if flops:
            # 6 operations per parameter and token, and the attention's 12 * layers * hidden * length / 2 (causal)
            work = 6 * parameters + 6 * shape.num_hidden_layers * shape.hidden_size * length
            rate = speeds[PIPELINE] * work
            rows.append(Row(f"MFU of the pipeline, {of}", f"{rate / flops:.1%} of {flops / 1e12:.0f} TFLOP/s"))
    return rows


def engine_speeds(setup: Setup, sequences: int) -> tuple[dict[str, float], dict[str, float], int]:
    """Tokens per second of the pipeline and of two loops, their peaks in GiB, and the number of parameters.

    The three take their steps in turn, since a machine's speed changes from second to second. A peak leaves out what the other
    two hold between steps: their weights and gradients.
    """
    shape, length = large(setup)
    x, y = setup.tokens(MICROBATCHES * sequences, length, shape.vocab_size)
    loss_of = token_loss(shape)
    built = layers(shape, 1, torch.bfloat16 if setup.cuda else torch.float32, setup.device)
    schedule = pl.schedules.interleaved(1, MICROBATCHES, 4, group_size=1)
    parameters = 0

    def build(name: str) -> Callable[[], object]:
        nonlocal parameters
        if name == PIPELINE:
            pipeline = LocalPipeline(built, schedule, loss=loss_of, options=RuntimeOptions(device=setup.device, seed=1))
            parameters = sum(p.numel() for p in pipeline.parameters())
            return partial(pipeline.step, x, y)
        modules = nn.ModuleList([layer() for layer in built])
        if name == PLAIN:
            return partial(plain_step, modules, loss_of, x, y, sequences)
        bounds = [len(modules) * chunk // 4 for chunk in range(5)]
        chunks = nn.ModuleList([nn.Sequential(*modules[first:last]) for first, last in pairwise(bounds)])
        return partial(cut_step, chunks, loss_of, x, y, sequences)

    gc.collect()  # what an earlier call has left in cycles
    steps, resident = {}, {}
    for name in (PIPELINE, PLAIN, CUT):
        before = allocated(setup)
        steps[name] = build(name)
        steps[name]()
        resident[name] = allocated(setup) - before
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0.0)
    for _ in range(1 + (7 if setup.cuda else 2)):
        for name, step in steps.items():
            if setup.cuda:
                torch.cuda.reset_peak_memory_stats(setup.device)
            times[name].append(seconds(setup, step, repeats=1, warmup=0))
            if setup.cuda:
                others = sum(resident.values()) - resident[name]
                peaks[name] = (torch.cuda.max_memory_allocated(setup.device) - others) / 2**30
    speeds = {name: x.numel() / statistics.median(taken[1:]) for name, taken in times.items()}
    return speeds, peaks, parameters


def allocated(setup: Setup) -> int:
    """Bytes of tensors on the device."""
    setup.wait()
    return torch.cuda.memory_allocated(setup.device) if setup.cuda else 0


def plain_step(
    modules: nn.ModuleList, loss_of: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, sequences: int = 1
) -> None:
    for one, target in zip(torch.split(x, sequences), torch.split(y, sequences), strict=True):
        out = one
        for module in modules:
            out = module(out)
        (loss_of(out, target) * sequences / len(x)).backward()  # type: ignore[no-untyped-call]


def cut_step(
    modules: nn.ModuleList, loss_of: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, sequences: int = 1
) -> None:
    """As `plain_step`, cut behind every module: the calls of layers and of autograd that a pipeline must make."""
    for one, target in zip(torch.split(x, sequences), torch.split(y, sequences), strict=True):
        inputs, outputs, out = [], [], one
        for module in modules:
            inputs.append(out.detach().requires_grad_(out.is_floating_point()))
            out = module(inputs[-1])
            outputs.append(out)
        root, gradient = loss_of(out, target) * sequences / len(x), None
        for each, output in zip(reversed(inputs), [root, *reversed(outputs[:-1])], strict=True):
            torch.autograd.backward([output], [gradient])
            gradient = each.grad


class Scale(nn.Module):
    """A layer of next to no work, so that what is left is the engine's own time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def per_action(setup: Setup) -> list[Row]:
    """The engine's time per action beyond that of the layers' and autograd's own calls, and beyond a loop that is not cut."""
    schedule = pl.schedules.interleaved(1, 64, 4, group_size=1)
    built = [Layer(f"scale{at}", lambda: Scale(setup.device)) for at in range(4)]
    x, y = (torch.ones(64, 8, device=setup.device) for _ in range(2))
    pipeline = LocalPipeline(built, schedule, loss=mse, options=RuntimeOptions(device=setup.device))
    modules = nn.ModuleList([layer() for layer in built])
    runs: dict[str, Callable[[], object]] = {
        "pipeline": partial(pipeline.step, x, y),
        "plain": partial(plain_step, modules, mse, x, y),
        "cut": partial(cut_step, modules, mse, x, y),
    }
    turns = [[host_seconds(setup, run) for run in runs.values()] for _ in range(120 if setup.cuda else 3)]
    cpu, wall, wall_plain = [], [], []
    for whole, plain, cut in turns[1:]:  # in turns: the speed of a host changes from second to second
        cpu.append(whole[1] - cut[1])
        wall.append(whole[0] - cut[0])
        wall_plain.append(whole[0] - plain[0])
    # The bars are on the fastest step of each loop: it is the same on every host of a kind, while medians grow with what
    # other processes do to the caches and the clock of the processor, in CPU time too.
    fastest_wall, fastest_cpu = (
        min(turn[0][at] for turn in turns[1:]) - min(turn[2][at] for turn in turns[1:]) for at in (0, 1)
    )
    actions = sum(map(len, schedule.programs))

    def each(total: float) -> float:
        return total / actions * 1e6

    bars = [
        (
            "engine, µs of its thread's CPU time per action, beyond the calls of layers and autograd, fastest steps",
            fastest_cpu,
        ),
        ("the same in wall-clock time, fastest steps", fastest_wall),
    ]
    rows = [
        ("the same in CPU time, step by step in turn", cpu),
        ("the same in wall-clock time, step by step in turn", wall),
    ]
    spreads = [(name, statistics.quantiles(map(each, totals), n=4)) for name, totals in rows]
    return [
        *(at_most(name, each(total), 40) if setup.cuda else Row(name, f"{each(total):.0f}") for name, total in bars),
        *(Row(name, f"{middle:.0f} µs (middle half {low:.0f} to {high:.0f})") for name, (low, middle, high) in spreads),
        Row(
            "beyond a loop with one backward per micro-batch",
            f"{each(statistics.median(wall_plain)):.0f} µs per action",
        ),
    ]


def split_cost(setup: Setup) -> list[Row]:
    """I + W against B, the same layers and micro-batches of 4 sequences."""
    shape, length = large(setup)
    x, y = setup.tokens(MICROBATCHES * 4, length, shape.vocab_size)
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
    data = [torch.randn(2 * MICROBATCHES, tokens, width, dtype=dtype, device=setup.device) for _ in range(2)]

    def pair_time(moved: float, together: bool) -> float:
        """Seconds of a pair: what `MICROBATCHES` more micro-batches add to a step, divided by their number."""
        Copies.share = moved
        steps = []
        for count in (MICROBATCHES, 2 * MICROBATCHES):
            schedule = pl.schedules.build("1f1b-overlap", 1, count)
            pipeline = LocalPipeline(
                blocks(BLOCKS, width, dtype, setup.device),
                schedule if together else unpair(schedule),
                loss=mse,
                options=RuntimeOptions(device=setup.device),
            )
            batch = [each[:count] for each in data]
            steps.append(seconds(setup, partial(pipeline.step, *batch), repeats=3))
        return (steps[1] - steps[0]) / MICROBATCHES

    def communication_time(moved: float) -> float:
        """Seconds of a pair's communications on their stream, while nothing else communicates."""
        Copies.share = moved
        schedule = unpair(pl.schedules.build("1f1b-overlap", 1, MICROBATCHES))
        built = blocks(BLOCKS, width, dtype, setup.device)
        pipeline = LocalPipeline(built, schedule, loss=mse, options=RuntimeOptions(device=setup.device))
        batch = [each[:MICROBATCHES] for each in data]
        for _ in range(2):
            Copies.events = []
            pipeline.step(*batch)
            setup.wait()
        events, Copies.events = Copies.events or [], None
        milliseconds: float = sum(begun.elapsed_time(ended) for begun, ended in events)
        return milliseconds / 1e3 / MICROBATCHES

    try:
        compute = pair_time(0, False)
        moved = 0.5
        if setup.cuda:  # a time of its own, and one for each row
            half, all_rows = communication_time(0.5), communication_time(0.999)
            moved = min(1.0, max(0.05, 0.5 + (0.45 * compute - half) / (all_rows - half) * 0.5))
        alone = communication_time(moved) if setup.cuda else compute
        serial, overlapped = pair_time(moved, False), pair_time(moved, True)
    finally:
        Copies.share, Copies.events = 1.0, None
    share, hidden = alone / compute, (compute + alone - overlapped) / alone
    words = (
        f"compute {compute * 1e3:.1f} ms, all-to-all {alone * 1e3:.1f} ms ({moved:.0%} of the rows), "
        f"not paired {serial * 1e3:.1f} ms, paired {overlapped * 1e3:.1f} ms"
    )
    rows = [Row(f"a pair with an all-to-all of {share:.0%} of its compute", words)]
    if not setup.cuda:
        return rows
    rows.append(Row("emulated all-to-all, share of the compute", f"{share:.0%}", "30 % to 60 %", 0.3 <= share <= 0.6))
    return [*rows, at_least("share of the all-to-all that is hidden", hidden, 0.85)]


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
    main.attach(weight, buffer)
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
