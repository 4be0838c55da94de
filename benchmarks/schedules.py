"""How fast schedules are checked and simulated: `python benchmarks/schedules.py [--repeats N]`.

Prints actions a second for ready schedules of about 50 thousand, 500 thousand and 2 million actions, and the
growth exponent: the slope of log time over log actions (1 is linear). `simulate` includes makespan, busy, idle, ratios and
peaks. Each figure is the best of the repeats, in processor time of this process.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial

from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.families import build

RANKS, CHUNKS = 8, 8
SIZES = (400, 4_000, 16_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--families", nargs="*", default=["interleaved", "interleaved-zb"])
    args = parser.parse_args()
    for name in args.families:
        table(name, args.repeats)


def table(name: str, repeats: int) -> None:
    """One line a size, and the growth exponents."""
    points: dict[str, list[tuple[int, float]]] = {"check": [], "simulate": [], "simulate, p2p": []}
    for microbatches in SIZES:
        schedule = build(name, RANKS, microbatches, CHUNKS)
        actions = sum(map(len, schedule.codes))
        works: dict[str, Callable[[Schedule], object]] = {
            "check": check,
            "simulate": figures,
            "simulate, p2p": lambda s: figures(s, Costs(p2p=0.1)),
        }
        for work, function in works.items():
            points[work].append((actions, best_of(partial(function, schedule), repeats)))
    for work, measured in points.items():
        rates = ", ".join(f"{n:,} actions: {n / seconds / 1e6:.2f} M/s" for n, seconds in measured)
        print(f"{name} {work}: {rates}; growth exponent {exponent(measured):.2f}")


def figures(schedule: Schedule, costs: Costs | None = None) -> None:
    """Simulates and reads every figure that a table prints."""
    timeline = simulate(schedule, costs)
    _ = timeline.makespan, timeline.busy, timeline.idle, timeline.spans, timeline.peak_activations
    _ = timeline.bubble_ratio, timeline.bubble_rate, timeline.span_bubble_rate


def best_of(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def exponent(points: list[tuple[int, float]]) -> float:
    """Slope of log time over log actions, by least squares."""
    xs, ys = [math.log(n) for n, _ in points], [math.log(t) for _, t in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


if __name__ == "__main__":
    main()
