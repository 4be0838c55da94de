"""Gradients on the device against a plain loop there: every family, and what changes how a stage runs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import torch
from gpu_setup import Row, Setup, at_most, gradients, worst
from gpu_travel import blocks, mse
from torch import Tensor

import pipeloom as pl
from pipeloom.models import layers, token_loss
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from pipeloom.schedule.families import FAMILIES
from pipeloom.schedule.model import parts
from pipeloom.shapes.decoder import DecoderShape

RANKS, MICROBATCHES, LENGTH = 4, 8, 16


def families(setup: Setup) -> list[Row]:
    """`verify` for every family, in fp32 without TF32 and in bf16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    # bf16 keeps 8 bits; gradients of 8 micro-batches are added in another order than in the loop
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        x, y = setup.tokens(MICROBATCHES, LENGTH, setup.shape.vocab_size)
        loss, want = setup.plain(setup.shape, x, y, [1] * MICROBATCHES, dtype)
        for family in FAMILIES:
            pipeline = setup.pipeline(pl.schedules.build(family, RANKS, MICROBATCHES), setup.shape, dtype)
            got = float(pipeline.step(x, y))
            error = max(worst(gradients(pipeline), want), abs(got - loss) / abs(loss))
            rows.append(at_most(f"{family}, {str(dtype).removeprefix('torch.')}", error, limit))
    return rows


def split(setup: Setup) -> list[Row]:
    """I and W against B."""
    x, y = setup.tokens(MICROBATCHES, LENGTH, setup.shape.vocab_size)
    found = []
    for family in ("1f1b", "zb-h1"):
        pipeline = setup.pipeline(pl.schedules.build(family, RANKS, MICROBATCHES), setup.shape)
        pipeline.step(x, y)
        found.append(gradients(pipeline))
    return [at_most("split backward against fused", worst(found[1], found[0]), 1e-5)]


def overlapped(setup: Setup) -> list[Row]:
    """Overlapped pairs on real streams against the same layers in a loop."""
    width = 256 if setup.cuda else 16
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(MICROBATCHES, 64, width, generator=generator).to(setup.device) for _ in range(2))
    modules = [layer() for layer in blocks(8, width, torch.float32, setup.device)]
    for one, target in zip(torch.split(x, 1), torch.split(y, 1), strict=True):
        out = one
        for module in modules:
            out = module(out)
        (mse(out, target) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]
    want = {
        f"block{at}.{n}": p.grad for at, m in enumerate(modules) for n, p in m.named_parameters() if p.grad is not None
    }
    rows = []
    for family in ("1f1b-overlap", "interleaved-overlap", "dualpipe", "dualpipev"):
        schedule = pl.schedules.build(family, RANKS, MICROBATCHES)
        built = blocks(8, width, torch.float32, setup.device)
        pipeline = LocalPipeline(built, schedule, loss=mse, options=RuntimeOptions(device=setup.device))
        pipeline.step(x, y)
        rows.append(at_most(f"{family}, real pairs", worst(gradients(pipeline), want), 1e-5))
    return rows


def recompute(setup: Setup) -> list[Row]:
    """Recomputed forwards replay dropout bit for bit, with both kinds of backward."""
    shape = replace(setup.shape, dropout=0.2)
    x, y = setup.tokens(MICROBATCHES, LENGTH, shape.vocab_size)
    rows = []
    for family in ("1f1b", "zb-h1"):
        found = []
        for how in ("none", "full"):
            pipeline = setup.pipeline(pl.schedules.build(family, RANKS, MICROBATCHES), shape, recompute=how)
            pipeline.step(x, y)
            found.append(gradients(pipeline))
        other = setup.pipeline(pl.schedules.build(family, RANKS, MICROBATCHES), shape)
        other.next_step = 1
        other.step(x, y)
        same = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
        rows.append(Row(f"recompute with dropout, {family}", f"equal: {same}", "bitwise equal", same))
        moved = worst(gradients(other), found[0]) > 1e-3
        rows.append(Row(f"another step draws other numbers, {family}", f"differs: {moved}", "differs", moved))
    return rows


def main_gradients(setup: Setup) -> list[Row]:
    """bf16 factors added into an fp32 buffer in one product, the first one and the second."""
    n, out, inner = (512, 256, 384) if setup.cuda else (16, 8, 12)
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(n, w, generator=generator).to(setup.device, torch.bfloat16) for w in (out, inner))
    weight = torch.nn.Parameter(torch.zeros(out, inner, dtype=torch.bfloat16, device=setup.device))
    main = MainGradients()
    buffer = torch.full((out, inner), math.nan, device=setup.device)
    main.attach(weight, buffer)
    main.reset([weight])
    want = rows.double().t() @ columns.double()
    found = []
    with torch.no_grad():
        for times in (1, 2):
            main.add_product(weight, rows, columns)
            error = (buffer.double() - times * want).abs().max() / want.abs().max()
            found.append(
                at_most(f"fused accumulation in fp32, {times} micro-batch{'es' * (times > 1)}", error.item(), 1e-5)
            )
    return found


def ignored_and_nan(setup: Setup) -> list[Row]:
    """Targets that do not count, unevenly over the micro-batches; a NaN shows in the loss and in the norm."""
    x, y = setup.tokens(MICROBATCHES, LENGTH, setup.shape.vocab_size)
    for at in range(MICROBATCHES):
        y[at, : at + 1] = -100
    loss, want = setup.plain(setup.shape, x, y, [1] * MICROBATCHES)
    pipeline = setup.pipeline(pl.schedules.build("zb-h1", RANKS, MICROBATCHES), setup.shape)
    error = max(abs(float(pipeline.step(x, y)) - loss) / loss, worst(gradients(pipeline), want))
    rows = [at_most("ignored targets", error, 1e-5)]
    with torch.no_grad():
        next(iter(pipeline.parameters())).fill_(math.nan)
    seen = bool(torch.isnan(pipeline.step(x, y))) and bool(torch.isnan(pipeline.grad_norm()))
    rows.append(Row("a NaN in a weight", f"in loss and norm: {seen}", "in both", seen))
    return rows


def memory(setup: Setup) -> list[Row]:
    """Allocated bytes at every loss of a step are those of the stages' micro-batches alive then, each as measured alone."""
    shape = replace(setup.shape, num_hidden_layers=14)  # with embedding and head 16 layers: 2 a stage under 8 stages
    rows = []
    for family in ("gpipe", "1f1b", "interleaved", "looped-bfs", "hanayo"):
        schedule = pl.schedules.build(family, RANKS, MICROBATCHES)
        alone = bytes_alone(setup, schedule, shape)
        base, allocated, timeline = bytes_at_losses(setup, schedule, shape)
        alive = alive_at_losses(schedule, timeline)
        errors = [
            abs((now - base) / sum(alone[stage] * count for stage, count in counts.items()) - 1)
            for now, counts in zip(allocated, alive, strict=True)
        ]
        name = f"{family}: bytes at {len(errors)} losses against the alive set's, each measured alone"
        rows.append(at_most(name, max(errors), 0.02, "{:.2%}"))
    return rows


def bytes_at_losses(setup: Setup, schedule: pl.Schedule, shape: DecoderShape) -> tuple[int, list[int], pl.Timeline]:
    """Bytes before a step and at each of its losses, in order, and its timeline; gradients are allocated before."""
    inner = token_loss(shape)
    seen: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value: Tensor = inner(output, target)
        seen.append(torch.cuda.memory_allocated(setup.device))
        return value

    x, y = setup.tokens(4 * schedule.microbatches, 64, shape.vocab_size)
    options = RuntimeOptions(device=setup.device, seed=1)
    pipeline = LocalPipeline(layers(shape, 1, torch.float32, setup.device), schedule, loss=loss, options=options)
    pipeline.step(x, y)
    seen.clear()
    base = torch.cuda.memory_allocated(setup.device)
    pipeline.step(x, y)
    return base, seen, pipeline.timeline()


def bytes_alone(setup: Setup, schedule: pl.Schedule, shape: DecoderShape) -> list[int]:
    """stage -> bytes that one micro-batch leaves on it, from a step of a single micro-batch.

    Read where each stage's layers end: a stage's output counts with it, since it is the next one's input.
    """
    first = pl.schedules.build("gpipe", schedule.stages, 1)
    x, y = setup.tokens(4, 64, shape.vocab_size)
    inner, marks = token_loss(shape), [0] * (first.stages + 1)

    def mark(at: int) -> None:
        marks[at] = torch.cuda.memory_allocated(setup.device)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value: Tensor = inner(output, target)
        mark(first.stages)
        return value

    options = RuntimeOptions(device=setup.device, seed=1)
    pipeline = LocalPipeline(layers(shape, 1, torch.float32, setup.device), first, loss=loss, options=options)
    for stage, names in enumerate(pipeline.layer_names[:-1]):
        pipeline.modules[names[-1]].register_forward_hook(lambda *_, at=stage + 1: mark(at))
    for _ in range(2):
        marks[0] = torch.cuda.memory_allocated(setup.device)
        pipeline.step(x, y)
    return [after - before for before, after in itertools.pairwise(marks)]


def alive_at_losses(schedule: pl.Schedule, timeline: pl.Timeline) -> list[dict[int, int]]:
    """For each loss, in order of time: stage -> its micro-batches alive then."""
    actions = sorted(
        (start, action)
        for program, starts in zip(schedule.programs, timeline.starts, strict=True)
        for cell, start in zip(program, starts, strict=True)
        for action in parts(cell)
    )
    alive: Counter[int] = Counter()
    found = []
    for _, action in actions:
        alive[action.stage] += {"F": 1, "B": -1}[action.kind]
        if action.kind == "F" and action.stage == schedule.stages - 1:
            found.append(dict(alive))
    return found
