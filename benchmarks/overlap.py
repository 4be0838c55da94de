"""The overlapped pair: all-to-all hidden behind the computation of another micro-batch.

    python benchmarks/overlap.py            all parts
    python benchmarks/overlap.py band hidden levels steps real

band:   one block's pair with emulated times (computations that sleep, an all-to-all that is there some time after it starts,
        one after the other on its link; the real engine), unit computation 10 ms, all-to-all from half of it to two and a half:
        measured pair against the model, with and without the weight gradients split from the backward.
hidden: a step of 16 micro-batches without a pipeline: exposed all-to-all with pairs over that of one action after the other.
levels: the same for two levels of all-to-all in chunks, against a flat exchange and the model; before that it asserts that
        experts over 4 processes have bitwise equal gradients either way.
steps:  pipelines of 4 processes: step over the makespan simulated with segment times and hop of the same run, and the exposed
        all-to-all with pairs over that without.
real:   blocks with experts over gloo, real computation, 2 processes: step with pairs over step without, and exposed
        times; the weight gradients split from the backward, and not.

In `steps` and `real`, with and without alternate, step by step, in the same processes. Figures are medians.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import pipeloom as pl
from layers import mse, total
from parts import run_parts
from pipeloom.config import load
from pipeloom.measure.rehearse import Clock, EmulatedLayer
from pipeloom.models import layers, token_loss
from pipeloom.ops.deferred import WeightGradContext, defer_weight_gradients
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import LocalPipeline, Pipeline
from pipeloom.schedule.actions import Action, Pair
from pipeloom.schedule.model import parts
from pipeloom.schedule.segments import LayerSegments, PhaseTimes, exposed, length, run_block, segment_costs
from pipeloom.schedule.transforms import unpair
from pipeloom.shapes.mesh import MeshShape
from pipeloom.traces.measured import hops
from processes import run_ranks

STEPS = 5
UNIT = 0.010


def segments(talk: float) -> LayerSegments:
    """A block whose computations take a unit each, and whose all-to-alls take `talk` seconds."""
    part = PhaseTimes(UNIT, UNIT, UNIT)
    return LayerSegments(part, part, talk, talk)


def times_of(clock: Clock, name: str) -> PhaseTimes:
    """The mean times of a part's computations."""
    return PhaseTimes(*(fmean(clock.seconds[name, kind]) for kind in "FIW"))


class Fused(EmulatedLayer):
    """Computes its weight gradients with its input gradients."""

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None:
        pass


class Alone(NamedTuple):
    """Steps without a pipeline: exposed seconds of each, lengths of the pairs, and the mean of the sleeps."""

    exposed: list[float]
    pairs: list[float]
    unit: float


def run_alone(microbatches: int, talk: float, split: bool, pairs: bool, blocks: int = 1, **levels: Any) -> Alone:
    """Three steps of 1f1b-overlap on one rank, after one more; `levels`: `inside` and `chunks` of the blocks."""
    clock = Clock()
    schedule = pl.schedules.build("1f1b-overlap", 1, microbatches)
    run = schedule if pairs else unpair(schedule)
    block = partial(EmulatedLayer if split else Fused, clock, replace(segments(talk), **levels))
    pipeline = LocalPipeline([block] * blocks, run, loss=total)
    stood, took = [], []
    x = torch.ones(microbatches, 1)
    for at in range(4):
        clock.exposed = 0.0
        pipeline.step(x, x)
        (result,) = pipeline.stats
        if at:
            stood.append(clock.exposed)
            spans = zip(run.programs[0], result.starts, result.ends, strict=True)
            took += [end - start for cell, start, end in spans if isinstance(cell, Pair)]
    return Alone(stood, took, fmean([*times_of(clock, "attention"), *times_of(clock, "experts")]))


def band() -> None:
    print(f"one block, unit computation {UNIT * 1e3:.0f} ms; units of it; a pair's length, medians of 9 pairs")
    print(
        f"{'all-to-all':>10}{'serial':>8}{'overlapped':>12}{'model':>7}{'split':>8}{'model':>7}{'split gains':>13}{'model':>7}"
    )
    for tenths in (5, 10, 12, 15, 18, 20, 25):
        share = tenths / 10
        fused, split = (run_alone(4, share * UNIT, s, pairs=True) for s in (False, True))
        unit = (fused.unit + split.unit) / 2
        ideal = LayerSegments(dispatch=share, combine=share)
        serial = length(run_block([ideal], [])) + length(run_block([], [ideal], "fused"))
        whole, cut = (length(run_block([ideal], [ideal], how)) for how in ("fused", "split"))
        a, b = median(fused.pairs) / unit, median(split.pairs) / unit
        print(f"{share:10.1f}{serial:8.1f}{a:12.2f}{whole:7.1f}{b:8.2f}{cut:7.1f}{a - b:13.2f}{whole - cut:7.1f}")


def hidden() -> None:
    m = 16
    print(
        f"no pipeline, {m} micro-batches, two blocks, computation {UNIT * 1e3:.0f} ms a part: exposed all-to-all of a step, ms"
    )
    print(
        f"{'all-to-all':>10}{'without':>9}{'pairs':>8}{'ratio':>8}{'model':>8}{'split too':>11}{'ratio':>8}{'model':>8}"
    )
    for share in (0.5, 1.0, 1.5, 2.0):
        talk = share * UNIT
        plain = median(run_alone(m, talk, False, pairs=False, blocks=2).exposed)
        block = [LayerSegments(dispatch=share, combine=share)] * 2
        without = m * (exposed(run_block(block, [])) + exposed(run_block([], block, "fused")))
        text = f"{share:10.1f}{plain * 1e3:9.1f}"
        for how, split in (("fused", False), ("split", True)):
            found = median(run_alone(m, talk, split, pairs=True, blocks=2).exposed)
            ends = exposed(run_block(block, [])) + exposed(run_block([], block, how))  # type: ignore[arg-type]
            model = ends + (m - 1) * exposed(run_block(block, block, how))  # type: ignore[arg-type]
            text += f"{found * 1e3:{11 if split else 8}.1f}{found / plain:8.3f}{model / without:8.3f}"
        print(text)


def require_equal_gradients(rank: int) -> None:
    """Assert that two levels in 4 chunks have the gradients of a flat exchange in 4 chunks that sums in the same order."""
    mesh = Mesh.of(MeshShape(dp=4, ep=4, ep_nodes=2))
    assert mesh is not None
    sizes = {"num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 64}
    shape = load("tiny", {f"model.{key}": value for key, value in sizes.items()}).model.shape()
    flat = ExpertParallel(mesh.ep, 2, chunks=4)
    both = []
    for expert in (flat, replace(flat, inside=mesh.inside, across=mesh.across)):
        schedule = pl.schedules.build("1f1b-overlap", 1, 4)
        pipeline = LocalPipeline(layers(shape, 1, expert=expert), schedule, loss=token_loss(shape))
        tokens = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(rank))
        pipeline.step(tokens[:, :-1], tokens[:, 1:])
        both.append([parameter.grad for parameter in pipeline.parameters()])
    assert all(map(torch.equal, *both))


def levels() -> None:
    run_ranks(require_equal_gradients, 4)
    print("4 processes, ep 4: the gradients with two levels are bitwise those of the flat exchange, both in 4 chunks")
    print(
        "ep 4 as 2 x 2, links between nodes 1/8 as fast as inside, top 2, flat all-to-all 1.5: no pipeline, two blocks, units of "
        f"computation ({UNIT * 1e3:.0f} ms): exposed all-to-all of a step, and over the flat one's"
    )
    print(f"{'micro-batches':>13}{'flat':>8}" + "".join(f"{f'{n} chunks':>16} model" for n in (1, 2, 4, 8)))
    for m in (1, 4, 16):
        flat = median(run_alone(m, 1.5 * UNIT, True, pairs=True, blocks=2).exposed) / UNIT
        text = f"{m:13}{flat:8.1f}"
        for chunks in (1, 2, 4, 8):
            # three in four tokens have an expert in the other node; each token has one of its two on the other rank of a node
            found = run_alone(m, 0.75 * 1.5 * UNIT, True, True, 2, inside=1.5 / 8 * UNIT, chunks=chunks).exposed
            talk = 0.75 * 1.5
            block = [LayerSegments(dispatch=talk, combine=talk, inside=1.5 / 8, chunks=chunks)] * 2
            ends = exposed(run_block(block, ())) + exposed(run_block((), block))
            model = ends + (m - 1) * exposed(run_block(block, block))
            text += f"{median(found) / UNIT:9.1f}{median(found) / UNIT / flat:7.3f}{model:6.1f}"
        print(text)


class Measured(NamedTuple):
    """One process's part of one step of a pipeline.

    Attributes:
        exposed: seconds for which its computation stood still for all-to-alls.
        timeline: the step, of all processes.
        layer: its stages' segments in this step.
    """

    exposed: float
    timeline: pl.Timeline
    layer: LayerSegments


def measure(
    rank: int, name: str, ranks: int, m: int, chunks: int, talk: float
) -> tuple[list[Measured], list[Measured]]:
    """One process's steps with pairs and without, in turn."""
    schedule = pl.schedules.build(name, ranks, m, chunks if chunks > 1 else None)
    sides = []
    for one in (schedule, unpair(schedule)):
        clock = Clock()
        blocks = [partial(EmulatedLayer, clock, segments(talk))] * one.positions
        sides.append((Pipeline(blocks, one, loss=total), clock))
    found: tuple[list[Measured], list[Measured]] = [], []
    x = torch.ones(m, 1)
    for at in range(STEPS + 1):
        for (pipeline, clock), steps_of in zip(sides, found, strict=True):
            clock.seconds.clear()
            dist.barrier()
            pipeline.step(x, x)
            timeline = pipeline.timeline()
            if at:
                layer = own_segments(clock, timeline, rank, talk)
                steps_of.append(Measured(pipeline.exposed or 0.0, timeline, layer))
    for pipeline, _ in sides:
        pipeline.close()
    return found


def own_segments(clock: Clock, timeline: pl.Timeline, rank: int, talk: float) -> LayerSegments:
    """A layer's segments in one step: the sleeps, longer by what forwards alone took beside them.

    What the engine itself takes for a forward is spread over its two parts, and as much is added to each I.
    """
    attention, experts = times_of(clock, "attention"), times_of(clock, "experts")
    spans = zip(timeline.schedule.programs[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    alone = fmean(end - start for cell, start, end in spans if isinstance(cell, Action) and cell.kind == "F")
    extra = (alone - 2 * talk - attention.forward - experts.forward) / 2
    first, second = (
        t._replace(forward=t.forward + extra, input_grad=t.input_grad + extra) for t in (attention, experts)
    )
    return LayerSegments(first, second, talk, talk)


class Figures(NamedTuple):
    """Of one step, in seconds: measured and simulated makespan, exposed all-to-all of all ranks measured and in the model."""

    makespan: float
    simulated: float
    exposed: float
    model: float


def figures(places: Sequence[Measured]) -> Figures:
    timeline = places[0].timeline
    schedule = timeline.schedule
    hop = median(hops(schedule, timeline.starts, timeline.ends))
    stages = [[places[rank].layer] for rank in schedule.placement]
    simulated = pl.simulate(schedule, segment_costs(stages, p2p=hop)).makespan
    model = 0.0
    for cell in (cell for program in schedule.programs for cell in program):
        actions = {action.kind: stages[action.stage] for action in parts(cell)}
        backward = actions.get("B", actions.get("I", ()))
        model += exposed(run_block(actions.get("F", ()), backward, "later" if "I" in actions else "split"))
    return Figures(timeline.makespan, simulated, sum(each.exposed for each in places), model)


def steps() -> None:
    ranks, m = 4, 8
    print(f"{ranks} processes, {m} micro-batches, one block a stage, computation {UNIT * 1e3:.0f} ms a part, split")
    print(
        f"{'schedule':22}{'all-to-all':>11}{'step ms':>9}{'÷simulated':>12}{'÷without':>10}{'simulated':>11}{'exposed ms':>12}"
        f"{'÷without':>10}{'model':>8}"
    )
    for name, chunks in (("1f1b-overlap", 1), ("interleaved-overlap", 2), ("dualpipev", 2)):
        for share in (0.5, 1.0, 1.5):
            results = run_ranks(measure, ranks, name, ranks, m, chunks, share * UNIT)
            pairs, plain = (
                [figures(step) for step in zip(*(r[side] for r in results), strict=True)] for side in (0, 1)
            )
            both = list(zip(pairs, plain, strict=True))
            print(
                f"{name:22}{share:11.1f}{median(f.makespan for f in pairs) * 1e3:9.1f}"
                f"{median(f.makespan / f.simulated for f in pairs):12.3f}{median(a.makespan / b.makespan for a, b in both):10.3f}"
                f"{median(a.simulated / b.simulated for a, b in both):11.3f}{median(f.exposed for f in pairs) * 1e3:12.1f}"
                f"{median(a.exposed / b.exposed for a, b in both):10.3f}{median(a.model / b.model for a, b in both):8.3f}"
            )


def train_experts(rank: int) -> list[list[tuple[float, float]]]:
    """(seconds, exposed seconds) of steps of a decoder with experts over two processes: one list for each of SIDES."""
    mesh = Mesh.of(MeshShape(dp=2, ep=2))
    assert mesh is not None
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_experts": 8, "moe_intermediate_size": 256}
    shape = load("tiny", {f"model.{key}": value for key, value in sizes.items()}).model.shape()
    blocks = layers(shape, 1, expert=ExpertParallel(mesh.ep))[1:-1]
    schedule = pl.schedules.build("1f1b-overlap", 1, 8)
    pipelines = []
    for split, pairs in SIDES:
        pipelines.append(LocalPipeline(blocks, schedule if pairs else unpair(schedule), loss=mse))
        for module in () if split else pipelines[-1].modules.values():
            defer_weight_gradients(
                module, WeightGradContext()
            )  # not the one that the stages set: the layers find no queue there
    torch.manual_seed(rank)
    x, y = torch.randn(2, 8 * 2, 128, 256)
    found: list[list[tuple[float, float]]] = [[] for _ in SIDES]
    for at in range(2 * STEPS + 1):
        for pipeline, times in zip(pipelines, found, strict=True):
            dist.barrier()
            begun = time.perf_counter()
            pipeline.step(x, y)
            dist.barrier()
            if at:
                times.append((time.perf_counter() - begun, pipeline.exposed or 0.0))
    return found


SIDES = ((True, True), (True, False), (False, True), (False, False))  # weight gradients split from the backward; pairs


def real() -> None:
    print(
        "4 blocks of width 256 with 8 experts, top 2, 2 x 128 tokens a micro-batch, 8 micro-batches; 2 processes, gloo"
    )
    print(
        f"{'weight gradients':>17}{'pairs ms':>10}{'apart ms':>10}{'ratio':>8}{'exposed ms':>12}{'apart':>8}{'ratio':>8}"
    )
    first, second = run_ranks(train_experts, 2)
    each = [
        [(max(a[0], b[0]), (a[1] + b[1]) / 2) for a, b in zip(one, other, strict=True)]
        for one, other in zip(first, second, strict=True)
    ]
    for label, pairs, plain in (("split", each[0], each[1]), ("fused", each[2], each[3])):
        both = list(zip(pairs, plain, strict=True))
        print(
            f"{label:>17}{median(a[0] for a in pairs) * 1e3:10.0f}{median(a[0] for a in plain) * 1e3:10.0f}"
            f"{median(a[0] / b[0] for a, b in both):8.3f}{median(a[1] for a in pairs) * 1e3:12.1f}"
            f"{median(a[1] for a in plain) * 1e3:8.1f}{median(a[1] / b[1] for a, b in both):8.3f}"
        )


PARTS = {"band": band, "hidden": hidden, "levels": levels, "steps": steps, "real": real}

if __name__ == "__main__":
    torch.set_num_threads(1)
    run_parts(PARTS)
