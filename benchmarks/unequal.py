"""Steps of sequences of different lengths: the plan beside packing in the order given and balancing by tokens.

    python benchmarks/unequal.py               40 settings (some minutes of a core)
    python benchmarks/unequal.py 3 8           settings 3 to 7

For each setting it prints the makespan of the plan over the shorter of 1F1B and `interleaved` with (a) sequences dealt out in
turn and packed as they come, (b) replicas and micro-batches balanced by tokens, the gap to the bound, and the CPU seconds of the
first plan and of one that takes over its family and packing.
"""

from __future__ import annotations

import math
import random
import sys
import time
from itertools import product

from pipeloom.plan.step import SequenceTime, plan_step
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.families import build

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


def baseline(lengths: list[int], ranks: int, replicas: int, limit: int, *, by_tokens: bool) -> float:
    """The shorter step of 1F1B and `interleaved` with two chunks."""
    members: list[list[int]] = [list(range(at, len(lengths), replicas)) for at in range(replicas)]
    if by_tokens:
        members, sums = [[] for _ in range(replicas)], [0] * replicas
        for at in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
            least = sums.index(min(sums))
            members[least].append(at)
            sums[least] += lengths[at]
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


def main() -> int:
    """Print a row for each setting; 1 where a plan is longer than a baseline."""
    settings = list(product(SHAPES, KINDS))
    first, last = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (0, len(settings))
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
        print(
            f"{number:2}  p {ranks}  dp {replicas}  {count:4} sequences  {kind:10}  "
            f"{ratios[0]:.3f} of (a)  {ratios[1]:.3f} of (b)  "
            f"gap {100 * plan.gap:4.1f} %  {spent:5.2f} s, then {1000 * again:4.0f} ms  {plan.family[0]}",
            flush=True,
        )
    return int(longer)


if __name__ == "__main__":
    sys.exit(main())
