"""Steps with a slow link (PipeMorph, NSDI 2026), predicted from the step without it: `python benchmarks/planbench/slow_links.py`.

Prints for every step of `pipemorph.json` its milliseconds, those predicted and the error, then the errors by method.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from pipeloom.draw.figures import in_columns
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.costs import Sends
from pipeloom.schedule.families import build
from pipeloom.solver import search

STEPS = Path(__file__).parent / "pipemorph.json"
METHODS: dict[str, tuple[str, Sends]] = {
    "1F1B": ("1f1b", "coupled"),
    "ZB": ("zb-h1", "coupled"),
    "ZB-CPU": ("zb-h2", "free"),
}
"""Method of PipeMorph -> the family that stands for its order, which is not published, and how its senders wait."""
SHARES = 1.0, 1.1, 0.9
"""Shares of F, I and W in an action's time, which are not published either: products of attention have no weights."""


def content() -> dict[str, Any]:
    """The measured steps and the words of their source."""
    form: dict[str, Any] = json.loads(STEPS.read_text(encoding="utf-8"))
    return form


def predicted(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per measured step: run, method, milliseconds measured and here, and the relative error.

    Here: the step measured without a delay, and by how much the simulated step is longer with it. A step that the authors planned
    anew stands beside the best order that our search finds for the same links, without waits.
    """
    words = given["source"]
    sizes = {model: int(ranks) for model, ranks in re.findall(r"(\w+): p (\d+)", words)}
    steps = {
        method: float(time) for method, time in re.findall(r"(\S+) (\d+\.?\d*)(?=[ ,]\D)", words) if method in METHODS
    }
    rows = []
    for row in given["rows"]:
        _, model, method, links, delay = row["run"].split("/")
        planned, m, p = method.endswith("-ReSchedule"), int(row["gbs"][0]), sizes[model]
        base = steps[method.removesuffix("-ReSchedule")]
        action = steps["1F1B"] / (m + p - 1) / sum(SHARES)
        plain = Costs(action * SHARES[0], action * SHARES[1], action * SHARES[2])
        slow = replace(plain, p2p=delays(p, links, 1e3 * float(delay)))
        if planned:
            added = searched(m, slow) - searched(m, replace(slow, p2p=delays(p, links, 0.0)))
        else:
            name, sends = METHODS[method]
            schedule = build(name, p, m, None)
            times = [simulate(schedule, replace(each, sends=sends)).makespan for each in (slow, plain)]
            added = times[0] - times[1]
        error = (base + added) / row["ms"] - 1
        rows.append({"run": row["run"], "method": method, "published": row["ms"], "here": base + added, "error": error})
    return rows


@cache
def searched(microbatches: int, costs: Costs) -> float:
    """Return the makespan of the best order found within the memory of ZB-2p."""
    ranks = len(costs.p2p)  # type: ignore[arg-type]
    return search(ranks, microbatches, costs, 2.0 * ranks, placement="linear", iterations=200).value


def delays(ranks: int, links: str, delay: float) -> tuple[tuple[float, ...], ...]:
    """Return the latency of each hop, with links such as `0_1,6_7` that the authors delay, each before the sends over it.

    A rank takes peer 0 for the one before it and peer 1 for the one behind it: link 1_2 leaves rank 2's sends to rank 1 as they
    are, and link 2_3 delays them.
    """
    slow = {tuple(map(int, link.split("_"))) for link in links.split(",")}
    late = slow | {(b, a) for a, b in slow if a != 1} | ({(2, 1)} if (2, 3) in slow else set())
    return tuple(tuple(delay * ((here, there) in late) for there in range(ranks)) for here in range(ranks))


def main() -> None:
    rows = predicted(content())
    cells = [["run", "published", "here", "error"]]
    cells += [
        [row["run"], f"{row['published']:.0f} ms", f"{row['here']:.0f} ms", f"{100 * row['error']:+.1f} %"]
        for row in rows
    ]
    print("\n".join(in_columns(cells)))
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["method"], []).append(100 * abs(row["error"]))
    for name, each in errors.items():
        print(f"{name}: error in the median {median(each):.1f} %, at most {max(each):.1f} %")
    for method, (family, sends) in METHODS.items():
        print(f"{method}: {family} with {sends} sends")
    print("ReSchedule: planned anew by the authors; here: by our search, for sends that do not wait")


if __name__ == "__main__":
    main()
