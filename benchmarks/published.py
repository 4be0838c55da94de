"""Our families against published generators: `python benchmarks/published.py [--sample N] [--seed S]`.

tests/data/published holds the makespan, the largest span and the peak of the schedules that others' generators make, with their
origin. Each of its cells is planned here with the same costs and memory. The table (benchmarks/RESULTS.md) has, for each family,
how many cells there are, in how many ours is longer, equal and shorter, and by how much; exit status 1 if one is longer.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import NamedTuple

from pipeloom.schedule import Costs, check, simulate
from pipeloom.schedule.families import build

DATA = Path(__file__).parents[1] / "tests" / "data" / "published"


class Published(NamedTuple):
    """One cell: a family at p, m, times and memory, and what the published generator's schedule takes there."""

    source: str
    family: str
    ranks: int
    microbatches: int
    costs: Costs
    memory: int
    makespan: float
    span: float


class Ours(NamedTuple):
    """What our family takes in a cell; `span` is the largest span of the schedule that is planned for the least span."""

    makespan: float
    span: float
    peak: int


def cells(data: Path = DATA) -> list[Published]:
    """All cells of the files in `data`."""
    found = []
    for path in sorted(data.glob("*.csv")):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        for row in csv.DictReader(lines):
            times = [float(row[key]) for key in ("forward", "input_grad", "weight_grad", "p2p")]
            sizes = int(row["ranks"]), int(row["microbatches"])
            lengths = float(row["makespan"]), float(row["span"])
            costs = Costs(forward=times[0], input_grad=times[1], weight_grad=times[2], p2p=times[3])
            found.append(Published(path.stem, row["family"], *sizes, costs, int(row["memory"]), *lengths))
    return found


def ours(cell: Published) -> Ours:
    """Our family in the cell, checked."""
    options: dict[str, object] = {"memory": cell.memory} if cell.family in ("zb-auto", "interleaved-zb") else {}
    schedule = build(cell.family, cell.ranks, cell.microbatches, None, options, cell.costs)
    check(schedule)
    timeline = simulate(schedule, cell.costs)
    span = max(timeline.spans)
    if cell.family in ("zbv", "zb-auto"):
        options |= {"objective": "span"}
        by_span = build(cell.family, cell.ranks, cell.microbatches, None, options, cell.costs)
        span = max(simulate(by_span, cell.costs).spans)
    peak = max(timeline.peak_activations)
    assert peak <= cell.memory, cell
    return Ours(timeline.makespan, span, peak)


def table(rows: Iterable[tuple[Published, Ours]]) -> tuple[list[str], int]:
    """The table's lines and how many cells are longer."""
    groups: dict[tuple[str, str], list[float]] = {}
    for cell, own in rows:
        groups.setdefault((cell.family, cell.source), []).append(own.makespan / cell.makespan - 1)
    lines = ["| family | generator | cells | longer | equal | shorter | mean | largest gain |", "| --- " * 8 + "|"]
    longer = 0
    for (family, source), gains in groups.items():
        above, below = sum(gain > 1e-9 for gain in gains), sum(gain < -1e-9 for gain in gains)
        longer += above
        mean = f"{100 * sum(gains) / len(gains):.2f} %"
        counts = f"{len(gains)} | {above} | {len(gains) - above - below} | {below}"
        lines.append(f"| `{family}` | {source} | {counts} | {mean} | {100 * min(gains):.1f} % |")
    return lines, longer


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="this many cells, drawn at random; default: all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chosen = cells()
    if arguments.sample is not None:
        chosen = Random(arguments.seed).sample(chosen, arguments.sample)
    lines, longer = table((cell, ours(cell)) for cell in chosen)
    print("\n".join(lines))
    return 1 if longer else 0


if __name__ == "__main__":
    raise SystemExit(main())
