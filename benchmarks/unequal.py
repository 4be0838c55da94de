"""Steps of sequences of different lengths: the plan beside packing in the order given and balancing by tokens.

    python benchmarks/unequal.py                       40 settings (some minutes of a core)
    python benchmarks/unequal.py 3 8                   settings 3 to 7
    python benchmarks/unequal.py search 60 3 8         beside searches, of 60 CPU seconds a setting more
    python benchmarks/unequal.py emulated              measured steps of 2 and 4 processes whose layers sleep
    python benchmarks/unequal.py single                predicted and measured CPU seconds of packed micro-batches
    python benchmarks/unequal.py real                  measured steps of 2 processes that compute

For each setting it prints the makespan of the plan over the shorter of 1F1B and `interleaved` with (a) sequences dealt out in
turn and packed as they come, (b) replicas and micro-batches balanced by tokens, over the best of the searches so far
(unequal.json), the gap to the bound, and the CPU seconds of the first plan and of one that takes over its family and packing.

search: simulated annealing, which begins with the plan of each family and the best so far, and changes batches, their order and
replicas. 0 seconds: the plan is compared alone.
real: steps of the plan and of (b) in turn, with a transformer that attends within each sequence, each with other lengths; the
first steps are planned by times of single micro-batches, later ones by those of the first steps' timelines, and predictions are
printed too.
emulated: the same runtime, processes and messages with layers that sleep for the time of their sequences, whatever others
compute on the machine.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from pipeloom.plan.step import FAMILIES_OF_STEPS, SequenceTime, plan_step
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.families import build
from pipeloom.schedule.simulate import Makespans

TIME = SequenceTime(0.0, 1 / 8192, 1 / 8192**2)
LIMIT = 16384  # tokens of a micro-batch, or the longest sequence
SHAPES = [  # ranks of the pipeline, replicas, sequences
    (2, 1, 64), (4, 1, 64), (8, 1, 128), (2, 4, 256), (4, 2, 128), (4, 4, 256), (8, 2, 256), (8, 8, 512)
]  # fmt: skip
KINDS = ("sigma 0.5", "sigma 1", "sigma 1.5", "1k and 32k", "answers")


def lengths_of(kind: str, count: int, seed: int) -> list[int]:
    """Lengths of one step. Answers have percentiles 50/90/99/100 of 220/900/2,600/8,000 tokens, between which they are linear."""
    numbers = random.Random(seed)
    if kind == "1k and 32k":
        return [32768 if numbers.random() < 0.05 else 1024 for _ in range(count)]
    if kind == "answers":
        points = [(0.0, 16), (0.5, 220), (0.9, 900), (0.99, 2600), (1.0, 8000)]
        found = []
        for _ in range(count):
            at = numbers.random()
            (low, short), (high, long) = next(
                pair for pair in zip(points, points[1:], strict=False) if at <= pair[1][0]
            )
            found.append(round(short + (long - short) * (at - low) / (high - low)))
        return found
    sigma = float(kind.split()[1])
    return [max(16, min(32768, round(math.exp(numbers.gauss(7.0, sigma))))) for _ in range(count)]


def packed(lengths: list[int], members: list[int], limit: int, *, by_tokens: bool) -> list[list[int]]:
    """Micro-batches of a replica: as they come, or the fewest of nearly equal tokens."""
    if not by_tokens:
        batches: list[list[int]] = [[]]
        for at in members:
            if sum(lengths[each] for each in batches[-1]) + lengths[at] > limit:
                batches.append([])
            batches[-1].append(at)
        return batches
    batches = [[] for _ in range(-(-sum(lengths[at] for at in members) // limit))]
    for at in sorted(members, key=lambda each: -lengths[each]):
        sums = [sum(lengths[each] for each in batch) for batch in batches]
        fitting = [number for number, total in enumerate(sums) if total + lengths[at] <= limit]
        if fitting:
            batches[min(fitting, key=lambda number: sums[number])].append(at)
        else:
            batches.append([at])
    return batches


def dealt(lengths: list[int], replicas: int, *, by_tokens: bool) -> list[list[int]]:
    """Sequences of each replica: in turn, or of nearly equal tokens."""
    if not by_tokens:
        return [list(range(at, len(lengths), replicas)) for at in range(replicas)]
    members: list[list[int]] = [[] for _ in range(replicas)]
    sums = [0] * replicas
    for at in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        least = sums.index(min(sums))
        members[least].append(at)
        sums[least] += lengths[at]
    return members


def baseline(lengths: list[int], ranks: int, replicas: int, limit: int, *, by_tokens: bool) -> float:
    """The shorter step of 1F1B and `interleaved` with two chunks."""
    members = dealt(lengths, replicas, by_tokens=by_tokens)
    steps = []
    for name, chunks in (("1f1b", None), ("interleaved", 2)):
        stage, spans = 1 / (chunks or 1), []
        for mine in members:
            batches = packed(lengths, mine, limit, by_tokens=by_tokens)
            factors = tuple(sum(TIME.of(lengths[at]) for at in batch) for batch in batches)
            schedule = build(name, ranks, len(batches), chunks)
            spans.append(simulate(schedule, Costs(stage, stage, stage, microbatch=factors)).makespan)
        steps.append(max(spans))
    return min(steps)


# -- beside a search -------------------------------------------------------------------------------------------------------

Batches = list[list[int]]
SEARCHED = Path(__file__).parent / "unequal.json"
HEAT = 0.002  # the share by which a change makes the step longer at first, in the mean


class Annealing:
    """Simulated annealing of one family over the division of sequences among replicas and ordered micro-batches."""

    def __init__(self, lengths: list[int], ranks: int, limit: int, family: tuple[str, int], seed: int) -> None:
        self.lengths, self.ranks, self.limit, (self.name, self.chunks) = lengths, ranks, limit, family
        self.numbers = random.Random(seed)
        self.times = [TIME.of(n) for n in lengths]

    def span(self, batches: Batches, limit: float = math.inf) -> float:
        """The makespan of one replica."""
        makespans = _makespans(self.name, self.ranks, len(batches), self.chunks)
        return makespans.of([sum(self.times[at] for at in batch) for batch in batches], limit)

    def changed(self, state: list[Batches], slowest: int) -> dict[int, Batches]:
        """Replica -> its micro-batches after a random change; {} for one that breaks the limit."""
        draw, mine = self.numbers, [list(batch) for batch in state[slowest]]
        kind = draw.randrange(4)
        if kind == 0 and len(mine) > 1:
            first, second = draw.sample(range(len(mine)), 2)
            mine.insert(second, mine.pop(first))
            return {slowest: mine}
        if kind == 1:
            first, second = draw.randrange(len(mine)), draw.randrange(len(mine))
            mine[first], mine[second] = mine[second], mine[first]
            return {slowest: mine}
        other = draw.randrange(len(state)) if kind == 3 else slowest
        theirs = mine if other == slowest else [list(batch) for batch in state[other]]
        source = mine[draw.randrange(len(mine))]
        sequence = source.pop(draw.randrange(len(source)))
        to = draw.randrange(len(theirs) + 1)
        if to == len(theirs):
            theirs.insert(draw.randrange(len(theirs) + 1), [sequence])
        else:
            if draw.random() < 0.5 and theirs[to]:
                source.append(theirs[to].pop(draw.randrange(len(theirs[to]))))
            theirs[to].append(sequence)
        after = {slowest: [batch for batch in mine if batch], other: [batch for batch in theirs if batch]}
        too_long = any(sum(self.lengths[at] for at in batch) > self.limit for each in after.values() for batch in each)
        return {} if too_long or not all(after.values()) else after

    def shortest(self, state: list[Batches], seconds: float) -> tuple[float, list[Batches]]:
        """The shortest step within so many seconds of this process."""
        state = list(state)
        spans = [self.span(batches) for batches in state]
        best, begin = (max(spans), list(state)), time.process_time()
        while (spent := (time.process_time() - begin) / seconds) < 1:
            slowest = max(range(len(spans)), key=spans.__getitem__)
            limit = spans[slowest] * (1 - HEAT * (1 - spent) * math.log(1 - self.numbers.random()))
            after = self.changed(state, slowest)
            found = {at: self.span(batches, limit) for at, batches in after.items()}
            if max(found.values(), default=math.inf) < math.inf:
                for at, batches in after.items():
                    state[at], spans[at] = batches, found[at]
                best = min(best, (max(spans), list(state)), key=lambda each: each[0])
        return best


@lru_cache(maxsize=512)
def _schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Any:
    return build(name, ranks, microbatches, chunks if chunks > 1 and name != "zbv" else None)


@lru_cache(maxsize=512)
def _makespans(name: str, ranks: int, microbatches: int, chunks: int) -> Makespans:
    return Makespans(_schedule(name, ranks, microbatches, chunks), Costs(1 / chunks, 1 / chunks, 1 / chunks))


def searched() -> dict[str, Any]:
    """Setting -> the best of its searches so far."""
    found: dict[str, Any] = json.loads(SEARCHED.read_text())
    return found


def beside_search(seconds: float, first: int, last: int) -> int:
    """Search each setting for so many seconds more and print the plan over the best so far; 1 where it is longer by 5 %.

    A tenth of the time goes to each family, the rest to the two shortest steps. SEARCHED keeps the best and all CPU seconds.
    """
    found = []
    for number, ((ranks, replicas, count), kind) in list(enumerate(product(SHAPES, KINDS)))[first:last]:
        lengths = lengths_of(kind, count, 2 * number)
        limit = max(LIMIT, *lengths)
        plan = plan_step(lengths, ranks, replicas, tokens=limit, time=TIME)
        known = searched()
        best = known.setdefault(str(number), {"seconds": 0.0, "makespan": math.inf})
        if seconds:
            planned = [[list(batch) for batch in each.microbatches] for each in plan.replicas]
            runs = [(plan.makespan, planned, plan.family)]
            for family in FAMILIES_OF_STEPS:
                alone = plan_step(lengths, ranks, replicas, tokens=limit, time=TIME, families=[family])
                state = [[list(batch) for batch in each.microbatches] for each in alone.replicas]
                search = Annealing(lengths, ranks, limit, family, number)
                runs.append((*search.shortest(state, seconds / 10), family))
            if "family" in best:
                runs.append((best["makespan"], best["replicas"], tuple(best["family"])))
            runs.sort(key=lambda run: run[0])
            for _, state, family in runs[:2]:
                search = Annealing(lengths, ranks, limit, family, int(best["seconds"]))
                runs.append((*search.shortest(state, seconds / 4), family))
            makespan, state, family = min(runs, key=lambda run: run[0])
            known[str(number)] = best = {
                "seconds": best["seconds"] + seconds, "makespan": makespan, "family": family, "replicas": state
            }  # fmt: skip
            lines = (f'"{key}": {json.dumps(known[key], separators=(",", ":"))}' for key in sorted(known, key=int))
            SEARCHED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        found.append(plan.makespan / best["makespan"])
        print(
            f"{number:2}  p {ranks}  dp {replicas}  {count:4} sequences  {kind:10}  {found[-1]:.3f}  "
            f"{plan.family[0]}, {best.get('family', ('',))[0]}, {best['seconds']:.0f} s",
            flush=True,
        )
    print(f"at most 1.02: {sum(each <= 1.02 for each in found)} of {len(found)}; the largest {max(found):.3f}")
    return int(max(found) > 1.05)


# -- layers that sleep -----------------------------------------------------------------------------------------------------

EMULATED_SECONDS, EMULATED_STEPS = 2.0, 3


def emulated_steps(rank: int, schedules: Sequence[tuple[Any, Costs]], unit: float) -> list[float]:
    """The median seconds of a step of each schedule."""
    import torch

    from pipeloom.measure.rehearse import Rehearsal, run

    took = []
    for schedule, costs in schedules:
        rehearsal = Rehearsal(schedule, replace(costs, message=65536), unit, EMULATED_STEPS)
        timelines = run(rehearsal, torch.device("cpu"), None, lambda: None)
        took.append(median(timeline.makespan for timeline in timelines))
    return took


def emulated() -> int:
    """Print measured steps of plans and of (b), their ratio, and the prediction over the measured step."""
    from processes import run_ranks

    for ranks, seed in product((2, 4), range(3)):
        lengths = lengths_of("answers", 32 * ranks, seed)
        plan = plan_step(lengths, ranks, tokens=8192, time=TIME)
        mine, chunks = plan.replicas[0], plan.family[1]
        runs: list[tuple[Any, Any, int]] = [(mine.schedule, mine.microbatches, chunks)]
        batches = packed(lengths, list(range(len(lengths))), 8192, by_tokens=True)
        runs += [(_schedule(name, ranks, len(batches), v), batches, v) for name, v in (("1f1b", 1), ("interleaved", 2))]
        schedules = []
        for schedule, chosen, v in runs:
            factors = tuple(sum(TIME.of(lengths[at]) for at in batch) for batch in chosen)
            schedules.append((schedule, Costs(1 / v, 1 / v, 1 / v, microbatch=factors)))
        unit = EMULATED_SECONDS / plan.makespan
        took = run_ranks(emulated_steps, ranks, schedules, unit)[0]
        said = [simulate(schedule, costs).makespan * unit for schedule, costs in schedules]
        errors = ", ".join(f"{p / t:.3f}" for p, t in zip(said, took, strict=True))
        print(
            f"p {ranks}, {len(lengths)} answers, seed {seed}: {plan.family[0]} {took[0]:.2f} s, "
            f"{took[0] / min(took[1:]):.3f} of (b), foreseen {said[0] / min(said[1:]):.3f}; "
            f"foreseen over measured of the plan, 1f1b, interleaved: {errors}",
            flush=True,
        )
    return 0


# -- measured --------------------------------------------------------------------------------------------------------------

REAL_RANKS, REAL_SEQUENCES, REAL_TOKENS, REAL_LAYERS = 2, 32, 512, 8
REAL_FIRST = 6  # steps, two of which warm up; from the timelines of the others come the times of the later ones


def real_lengths(step: int) -> list[int]:
    """Heavy-tailed lengths: those of answers over 16."""
    return [max(4, n // 16) for n in lengths_of("answers", REAL_SEQUENCES, step)]


def of_each(block: Any, x: Any, sizes: Sequence[int]) -> Any:
    """A block that attends within each of the packed sequences: it computes one after the other."""
    import torch

    return torch.cat([block(part) for part in torch.split(x, list(sizes), 1)], 1)


def measured_costs(_rank: int = 0) -> tuple[SequenceTime, Costs]:
    """Seconds of a micro-batch on 1/p of the model by the lengths of its sequences, which the layers compute one by one, and the
    shares of F, I and W. Processes that share caches and memory compute slower, so measure in as many as a step has."""
    import torch

    import layers as parts

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(parts.Block() for _ in range(REAL_LAYERS // REAL_RANKS)))
    rows, shares = [], []
    for count, length in product((1, 4), (8, 16, 32, 64, 128, 256)):
        spans = []
        for _ in range(9):
            x = torch.randn(1, count * length, 256, requires_grad=True)
            begin = time.process_time()
            out = x
            for block in model:
                out = of_each(block, out, [length] * count)
            forward = time.process_time()
            torch.autograd.grad(out.sum(), x, retain_graph=True)
            inner = time.process_time()
            out.sum().backward()  # type: ignore[no-untyped-call]
            spans.append((forward - begin, inner - forward, time.process_time() - inner))
        f, i, b = (median(each) for each in zip(*spans, strict=True))
        rows.append((count, length, f + b))
        shares.append((f / (f + b), min(i, b) / (f + b)))
    x = torch.tensor([[1.0, k, k * n, k * n * n] for k, n, _ in rows], dtype=torch.float64)
    y = torch.tensor([seconds for *_, seconds in rows], dtype=torch.float64)
    fixed, each, linear, square = torch.linalg.lstsq(x / y[:, None], torch.ones_like(y)).solution.clamp_min(0).tolist()
    forward, inner = (median(each) for each in zip(*shares, strict=True))
    return SequenceTime(fixed, linear, square, each), Costs(forward, inner, 1 - forward - inner)


Steps = Sequence[tuple[Any, Sequence[Sequence[int]]]]  # timelines with the lengths of their micro-batches


def fitted(steps_of: Mapping[str, Steps], chunks_of: Mapping[str, int]) -> tuple[SequenceTime, dict[str, Costs]]:
    """As `measured_costs`, from steps of several pipelines, of which each has a scale and shares of its own."""
    import torch

    rows: list[tuple[float, ...]] = []
    spent: dict[str, list[tuple[list[int], tuple[float, float, float]]]] = {}
    for key, steps in steps_of.items():
        seconds: dict[tuple[int, int], dict[str, list[float]]] = {}  # step, micro-batch -> kind -> those on each stage
        for number, (timeline, _) in enumerate(steps):
            programs = zip(timeline.schedule.programs, timeline.starts, timeline.ends, strict=True)
            for action, start, end in (each for program in programs for each in zip(*program, strict=True)):
                seconds.setdefault((number, action.microbatch), {}).setdefault(action.kind, []).append(end - start)
        for (number, at), kinds in seconds.items():
            lengths, of = steps[number][1][at], {kind: chunks_of[key] * median(each) for kind, each in kinds.items()}
            backward = of["I"] + of["W"] if "I" in of else of["B"]
            row = [1, len(lengths), sum(lengths), sum(n * n for n in lengths)]
            rows.append((*row, of["F"] + backward))
            spent.setdefault(key, []).append((row, (of["F"], of.get("I", backward / 2), of["F"] + backward)))
    *columns, y = torch.tensor(rows, dtype=torch.float64).unbind(1)
    used, x = list(range(4)), torch.stack(columns, 1) / y[:, None]
    found = [0.0] * 4
    while used:  # without those that would be negative
        solution = torch.linalg.lstsq(x[:, used], torch.ones_like(y)).solution.tolist()
        if min(solution) >= 0:
            for at, value in zip(used, solution, strict=True):
                found[at] = value
            break
        used.pop(solution.index(min(solution)))
    costs = {}
    for key, each in spent.items():
        units = [sum(a * b for a, b in zip(found, row, strict=True)) for row, _ in each]
        f, i, whole = (median(of[at] / unit for (_, of), unit in zip(each, units, strict=True)) for at in range(3))
        costs[key] = Costs(f, i, whole - f - i)
    return SequenceTime(found[0], found[2], found[3], found[1]), costs


def single() -> int:
    """Print CPU seconds of single packed micro-batches as predicted over as measured; times of sequences are fitted first."""
    import torch

    import layers as parts

    time_of, _ = measured_costs()
    model = torch.nn.Sequential(*(parts.Block() for _ in range(REAL_LAYERS // REAL_RANKS)))
    ratios, once = [], []
    for batch in packed(real_lengths(0), list(range(REAL_SEQUENCES)), REAL_TOKENS, by_tokens=True):
        lengths = [real_lengths(0)[at] for at in batch]
        spans = []
        for _ in range(9):
            x = torch.randn(1, sum(lengths), 256, requires_grad=True)
            begin = time.process_time()
            for block in model:
                x = of_each(block, x, lengths)
            x.sum().backward()  # type: ignore[no-untyped-call]
            spans.append(time.process_time() - begin)
        predicted = time_of.fixed + sum(map(time_of.of, lengths))
        ratios.append(predicted / median(spans))
        once.append((predicted - time_of.each * (len(lengths) - 1)) / median(spans))
    print(f"fitted: {time_of}")
    for words, found in (("sequence", ratios), ("micro-batch", once)):
        print(
            f"fixed time for each {words}: predicted over measured {median(found):.3f} ({min(found):.3f} to {max(found):.3f})"
        )
    return 0


def real_steps(rank: int, time_of: SequenceTime, costs: Costs, turns: int) -> list[tuple[float, ...]]:
    """(seconds of the plan, of (b) with 1F1B and with `interleaved`; seconds predicted of each) of the steps, in turn."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import layers as parts
    from pipeloom.runtime import Layer, Pipeline

    class Packed(nn.Module):
        """As `of_each`."""

        def __init__(self) -> None:
            super().__init__()
            self.block = parts.Block()

        def forward(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
            return of_each(self.block, x, sizes)  # type: ignore[no-any-return]

    families = {"plan": ("zbv", 2), "1f1b": ("1f1b", 1), "interleaved": ("interleaved", 2)}
    blocks = [Layer(f"block{at}", Packed) for at in range(REAL_LAYERS)]
    pipelines = {
        key: Pipeline(blocks, _schedule(name, REAL_RANKS, 4, chunks), loss=parts.mse)
        for key, (name, chunks) in families.items()
    }
    found: list[tuple[float, ...]] = []
    times = dict.fromkeys(families, (time_of, costs))
    timelines: dict[str, list[tuple[Any, Any]]] = {key: [] for key in families}
    for step in range(REAL_FIRST + turns):
        lengths = real_lengths(step)
        sequences = [torch.randn(1, n, 256) for n in lengths]
        own_time, own_costs = times["plan"]
        plan = plan_step(
            lengths, REAL_RANKS, tokens=REAL_TOKENS, time=own_time, costs=own_costs, families=[families["plan"]]
        ).replicas[0]
        by_tokens = packed(lengths, list(range(len(lengths))), REAL_TOKENS, by_tokens=True)
        spans, predicted = [], []
        for key, (name, chunks) in families.items():
            chosen: Sequence[Sequence[int]] = plan.microbatches if key == "plan" else by_tokens
            batches = []
            for batch in chosen:
                x = torch.cat([sequences[at] for at in batch], 1)
                batches.append((x, torch.zeros_like(x), {"sizes": tuple(lengths[at] for at in batch)}))
            schedule = plan.schedule if key == "plan" else _schedule(name, REAL_RANKS, len(batches), chunks)
            own_time, own_costs = times[key]
            factors = tuple(own_time.fixed + sum(own_time.of(lengths[at]) for at in batch) for batch in chosen)
            run = simulate(schedule, replace(own_costs.resized(1 / chunks), microbatch=factors))
            predicted.append(run.makespan)
            dist.barrier()
            begin = time.perf_counter()
            pipelines[key].step(microbatches=batches, schedule=schedule)
            spans.append(time.perf_counter() - begin)
            if 2 <= step < REAL_FIRST:
                timelines[key].append((pipelines[key].timeline(), [[lengths[at] for at in batch] for batch in chosen]))
            pipelines[key].zero_grad()
        if step + 1 == REAL_FIRST:
            # of one rank: another may round otherwise, and plan another step
            ours = [fitted(timelines, {key: chunks for key, (_, chunks) in families.items()})]
            dist.broadcast_object_list(ours)
            times = {key: (ours[0][0], ours[0][1][key]) for key in families}
        if step >= REAL_FIRST:
            found.append((*spans, *predicted))
    for pipeline in pipelines.values():
        pipeline.close()
    return found


def real(turns: int) -> int:
    """Print the measured steps, their ratios and the error of the prediction."""
    from processes import run_ranks

    time_of, costs = run_ranks(measured_costs, REAL_RANKS)[0]
    print(f"fitted: {time_of}, F {costs.forward} I {costs.input_grad} W {costs.weight_grad}")
    steps = run_ranks(real_steps, REAL_RANKS, time_of, costs, turns)[0]
    plan, flat, looped, *predicted = (list(each) for each in zip(*steps, strict=True))
    ratios = [a / min(b, c) for a, b, c in zip(plan, flat, looped, strict=True)]
    said = [p / min(q, r) for p, q, r in zip(*predicted, strict=True)]
    print(
        f"seconds, medians of {turns}: plan {median(plan):.3f}, (b) 1f1b {median(flat):.3f}, interleaved {median(looped):.3f}"
    )
    print(f"plan over the shorter of (b): {median(ratios):.3f}, predicted {median(said):.3f}")
    for name, took, foreseen in zip(("plan", "1f1b", "interleaved"), (plan, flat, looped), predicted, strict=True):
        print(f"{name}: predicted over measured {median(p / t for p, t in zip(foreseen, took, strict=True)):.3f}")
    return 0


def main() -> int:
    """Print a row for each setting; 1 where a plan is longer than a baseline."""
    settings = list(product(SHAPES, KINDS))
    part, *words = (
        sys.argv[1:] if sys.argv[1:2] in (["real"], ["search"], ["emulated"], ["single"]) else ["", *sys.argv[1:]]
    )
    if part == "emulated":
        return emulated()
    if part == "single":
        return single()
    if part == "real":
        return real(int(words[0]) if words else 20)
    seconds = float(words.pop(0)) if part else 0.0
    first, last = map(int, words) if words else (0, len(settings))
    if part:
        return beside_search(seconds, first, last)
    longer = False
    for number, ((ranks, replicas, count), kind) in list(enumerate(settings))[first:last]:
        lengths, following = (lengths_of(kind, count, 2 * number + seed) for seed in (0, 1))
        limit = max(LIMIT, *lengths, *following)
        begin = time.process_time()
        plan = plan_step(lengths, ranks, replicas, tokens=limit, time=TIME)
        middle = time.process_time()
        plan_step(following, ranks, replicas, tokens=limit, time=TIME, last=plan)
        spent, again = middle - begin, time.process_time() - middle
        ratios = [
            plan.makespan / baseline(lengths, ranks, replicas, limit, by_tokens=by_tokens)
            for by_tokens in (False, True)
        ]
        longer |= max(ratios) > 1
        best = searched().get(str(number))
        beside = f"{plan.makespan / best['makespan']:.3f} of searched  " if best else ""
        print(
            f"{number:2}  p {ranks}  dp {replicas}  {count:4} sequences  {kind:10}  "
            f"{ratios[0]:.3f} of (a)  {ratios[1]:.3f} of (b)  {beside}"
            f"gap {100 * plan.gap:4.1f} %  {spent:5.2f} s, then {1000 * again:4.0f} ms  {plan.family[0]}",
            flush=True,
        )
    return int(longer)


if __name__ == "__main__":
    sys.exit(main())
