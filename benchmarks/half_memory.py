"""Searched schedules at half of the bytes of 1F1B's micro-batches, beside the named ones that fit: real, and in rehearsal.

    python benchmarks/half_memory.py real                      copies to host memory are allowed
    python benchmarks/half_memory.py real --no-copies
    python benchmarks/half_memory.py rehearsed --seconds 60

real:      blocks of a decoder on 2 processes of one thread, one and two chunks. Their layers are measured as `pipeloom profile`
           does; for these times and bytes the schedule is searched, and the named ones that fit are simulated. Then the searched
           one and the three best named ones take turns, and every third turn the layers are measured again: predictions are for
           the shortest of the medians, and beside them is the shortest step, since other work on the machine only lengthens both.
           Then every second step predicts the others' median, as `train` does it. Bytes: of the fullest rank, weights, gradients
           and the optimizer's state included, without what was copied to the host.
rehearsed: `pipeloom rehearse` on 4 processes, 8 micro-batches, F:I:W of 1:1.2:0.8, without copies: emulated computation, real
           messages.

Both print the bound of the search over the best named schedule's simulated step: no schedule can be better than that.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from commands import answer
from pipeloom.config import Layout, load_layout
from pipeloom.errors import PipeloomError
from pipeloom.measure.build import build_pipeline
from pipeloom.measure.device_profile import DeviceProfile, measured_costs, predicted_timeline, profiled
from pipeloom.plan.memory import ranks_of
from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.costs import DEVICE
from pipeloom.schedule.families import build
from pipeloom.schedule.json_form import to_json
from pipeloom.schedule.offload import offload
from pipeloom.schedule.timeline import Timeline
from pipeloom.schedule.transforms import recompute
from pipeloom.solver.in_bytes import search_in_bytes
from pipeloom.traces.measured import predict
from pipeloom.traces.timelines import costs_dict
from pipeloom.train.report.verify import make_batch
from pipeloom.train.tuning import tune_process
from processes import run_ranks, step_bytes
from recompute import costs_of

RANKS, SHARE, NAMED = 2, 0.5, 3
PARTS = ("norms", "attention", "mlp", "activation")
FAMILIES = {"1f1b": 1, "zb-h1": 1, "interleaved": 2, "zbv": 2, "v-half": 2, "v-min": 2, "gis": 2}  # and their chunks


@dataclass(frozen=True)
class Candidate:
    """A schedule that fits, its simulated step, and the bound of the search that it is from."""

    name: str
    schedule: Schedule
    chunks: int
    simulated: float
    bound: float = 0.0


def layout_of(chunks: int, width: int, microbatches: int) -> Layout:
    keys = {
        "model.num_hidden_layers": 4,
        "model.hidden_size": width,
        "model.intermediate_size": 3 * width,
        "model.num_attention_heads": width // 64,
        "model.num_key_value_heads": width // 64,
        "train.seq_len": 128,
        "train.global_batch_size": 4 * microbatches,
        "train.device": "cpu",
        "parallel.pp": RANKS,
        "schedule.name": "1f1b" if chunks == 1 else "interleaved",
        "schedule.microbatches": microbatches,
        "schedule.chunks": chunks if chunks > 1 else None,
    }
    return load_layout(None, {key: value for key, value in keys.items() if value is not None}, world_size=RANKS)


def ways(schedule: Schedule, costs: Costs) -> Iterator[tuple[str, Schedule]]:
    """Yield a named schedule as it is, with everything recomputed, or a part of it, and with everything copied."""
    yield "", schedule
    yield ", R", recompute(schedule, True)
    yield ", R in blocks", recompute(schedule)
    yield from ((f", R of {part}", recompute(schedule, part=part)) for part in PARTS)
    if costs.host_bandwidth < math.inf and not schedule.has_queues:
        yield from ((f", offload in {count}", offload(schedule, costs, count, count)) for count in (1, 4))


def named(costs: dict[int, Costs], ranks: int, microbatches: int) -> Iterator[tuple[str, Schedule, int]]:
    for family, chunks in FAMILIES.items():
        if family == "gis" and costs[chunks].host_bandwidth == math.inf:
            continue  # its order has copies
        for name, schedule in ways(build(family, ranks, microbatches, chunks, costs=costs[chunks]), costs[chunks]):
            yield family + name, schedule, chunks


def searched(costs: dict[int, Costs], limit: float, ranks: int, microbatches: int, seconds: float) -> Candidate:
    """Return the shorter of the searches of one chunk and of two."""
    results = []
    for chunks in (1, 2):
        try:
            found = search_in_bytes(
                ranks, microbatches, costs[chunks], limit, chunks=chunks, time_limit=seconds * chunks / 3
            )
            results.append(Candidate("searched", found.schedule, chunks, found.value, found.lower_bound))
        except PipeloomError as error:
            print(f"searched with {chunks} chunks: {error}")
    best = min(results, key=lambda each: each.simulated)
    return replace(best, bound=min(each.bound for each in results))


def shortest(profiles: Sequence[DeviceProfile]) -> DeviceProfile:
    """Return a profile with the least median of each layer's time."""
    layers = []
    for same in zip(*(profile.layers for profile in profiles), strict=True):
        seconds = {kind: min(each.seconds[kind] for each in same) for kind in same[0].seconds}
        layers.append(replace(same[0], seconds=seconds))
    return replace(profiles[0], layers=layers)


def peaks(layout: Layout, profile: DeviceProfile, schedule: Schedule) -> list[float]:
    """rank -> the predicted bytes of a step."""
    changed = replace(layout, schedule=schedule)
    return [*predicted_timeline(changed, profile.bytes).peak_bytes["device"]]


def work(rank: int, options: argparse.Namespace) -> list[tuple[Any, ...]]:
    """Measure, search, and run in turns; return a row for each schedule."""
    tune_process()
    device = torch.device("cpu")
    m = options.microbatches
    layouts = {chunks: layout_of(chunks, options.width, m) for chunks in (1, 2)}

    def costs_from(profile: DeviceProfile) -> dict[int, Costs]:
        measured = {chunks: measured_costs(layout, profile) for chunks, layout in layouts.items()}
        copies = math.inf if options.no_copies else measured[1].host_bandwidth
        return {chunks: replace(each, host_bandwidth=copies) for chunks, each in measured.items()}

    profile = profiled(layouts[1], device, 9, lambda what, phase: nullcontext())
    costs, profiles = costs_from(profile), [profile]
    box: list[Any] = [None]
    if rank == 0:
        held = ranks_of(predicted_timeline(layouts[1], profile.bytes))
        standing = [row.standing - row.buffers for row in held]
        full = peaks(layouts[1], profile, layouts[1].schedule)
        limit = max(standing) + SHARE * max(peak - held for peak, held in zip(full, standing, strict=True))
        fitting = [
            Candidate(name, schedule, chunks, simulate(schedule, costs[chunks]).makespan)
            for name, schedule, chunks in named(costs, RANKS, m)
            if max(peaks(layouts[chunks], profile, schedule)) <= limit
        ]
        fitting.sort(key=lambda each: each.simulated)
        best = searched(costs, limit, RANKS, m, options.seconds)
        print(f"limit {limit / 1e6:.1f} MB of {max(full) / 1e6:.1f}; {len(fitting)} named schedules fit", flush=True)
        print(f"bound ÷ best named, simulated: {best.bound / fitting[0].simulated:.3f}", flush=True)
        box = [[best, *fitting[:NAMED]]]
    dist.broadcast_object_list(box, src=0)
    candidates: list[Candidate] = box[0]
    pipelines = [build_pipeline(replace(layouts[each.chunks], schedule=each.schedule), device) for each in candidates]
    batch = make_batch(layouts[1])
    seconds: list[list[float]] = [[] for _ in candidates]
    timelines: list[list[Timeline]] = [[] for _ in candidates]
    for turn in range(options.turns + 1):
        for at, pipeline in enumerate(pipelines):
            dist.barrier()
            began = time.perf_counter()
            pipeline.step(batch.tokens, batch.targets)
            dist.barrier()
            if turn:  # the first one allocates buffers
                seconds[at].append(time.perf_counter() - began)
                timelines[at].append(pipeline.timeline())
        if turn % 3 == 2:
            profiles.append(profiled(layouts[1], device, 3, lambda what, phase: nullcontext()))
    costs = costs_from(shortest(profiles))
    rows = []
    for at, (each, pipeline) in enumerate(zip(candidates, pipelines, strict=True)):
        layout = replace(layouts[each.chunks], schedule=each.schedule)
        row = ranks_of(predicted_timeline(layout, profile.bytes))[rank]
        pipeline.zero_grad()  # as `train` does before each step
        weights = sum(parameter.nbytes for _, parameter in pipeline.named_parameters())
        allocated = step_bytes(pipeline, batch.tokens, batch.targets) + pipeline.stats.receive_bytes
        allocated += 3 * weights  # and AdamW's two moments
        # Messages go through memory that the processes share, from which the receiver copies them before it computes.
        predicted = simulate(each.schedule, costs[each.chunks], overlap_p2p=False).makespan
        fitted = predict([timelines[at][0], *timelines[at][::2], *timelines[at][1::2]])
        rows.append((replace(each, simulated=predicted), seconds[at], row.total, allocated, fitted))
        pipeline.close()
    return rows


def real(options: argparse.Namespace) -> None:
    by_rank = run_ranks(work, RANKS, options)
    print(
        "schedule                     predicted, ms   least, ms   differ   median (quartiles)   from half   differ   bytes, MB   "
        "predicted"
    )
    for each, seconds, _, _, fitted in by_rank[0]:
        number = [row[0].name for row in by_rank[0]].index(each.name)
        sizes = [(rows[number][3], rows[number][2]) for rows in by_rank]
        measured, expected = max(sizes)
        low, middle, high = (1e3 * sorted(seconds)[len(seconds) * at // 4] for at in (1, 2, 3))
        step, error, sizes_differ = min(seconds), each.simulated / min(seconds) - 1, expected / measured - 1
        print(
            f"{each.name:28} {1e3 * each.simulated:13.1f}   {1e3 * step:9.1f} {error:+8.1%}   "
            f"{middle:6.1f} ({low:.0f} to {high:.0f})   {1e3 * fitted.simulated:9.1f} {fitted.error:+8.1%}   "
            f"{measured / 1e6:9.1f} {sizes_differ:+10.1%}"
        )
    for word, choice in (("medians", median), ("least", min)):
        ours, *others = (choice(seconds) for _, seconds, *_ in by_rank[0])
        print(f"searched ÷ best named, {word}: {ours / min(others):.3f}")


def rehearsed(options: argparse.Namespace) -> None:
    ranks, m = 4, 8
    whole = replace(costs_of(1.0, 1.2, 0.8), activation=1.0)
    costs = {1: whole, 2: whole.resized(0.5)}
    limit = SHARE * max(simulate(build("1f1b", ranks, m), whole).peak_bytes[DEVICE])
    candidates = [
        Candidate(name, schedule, chunks, timeline.makespan)
        for name, schedule, chunks in named(costs, ranks, m)
        if max((timeline := simulate(schedule, costs[chunks])).peak_bytes[DEVICE]) <= limit
    ]
    best = min(candidates, key=lambda each: each.simulated)
    ours = searched(costs, limit, ranks, m, options.seconds)
    steps = {}
    print("schedule                     simulated    step   differ   from half of the steps")
    for each in (ours, best):
        with tempfile.TemporaryDirectory() as folder:
            schedule, table = Path(folder, "schedule.json"), Path(folder, "costs.json")
            schedule.write_text(to_json(each.schedule))
            table.write_text(json.dumps(costs_dict(costs[each.chunks])))
            words = ["rehearse", str(schedule), "--costs", str(table), "--unit", str(options.unit)]
            report = answer(*words)
        found, fitted = report["rehearsal"], report["prediction"]["error"]
        steps[each.name] = found["rehearsed"]
        step = found["rehearsed"] / options.unit
        print(f"{each.name:28} {each.simulated:9.2f} {step:7.2f} {found['error']:+8.1%} {fitted:+13.1%}", flush=True)
    print(
        f"searched ÷ best named: {steps[ours.name] / steps[best.name]:.3f}; bound, simulated: {ours.bound / best.simulated:.3f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("real", "rehearsed"))
    parser.add_argument("--no-copies", action="store_true")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the search")
    parser.add_argument("--turns", type=int, default=30, help="of steps of each schedule")
    parser.add_argument("--unit", type=float, default=0.1, help="seconds of a cost of 1 in a rehearsal")
    given = parser.parse_args()
    (real if given.part == "real" else rehearsed)(given)
