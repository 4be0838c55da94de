"""`pipeloom compare --paper NAME`: a table of a paper, recomputed from what it publishes (`NAME.toml`, or steps)."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from functools import cache
from importlib import resources
from math import isclose
from pathlib import Path
from statistics import median
from typing import Any

from pipeloom.draw.figures import in_columns, number
from pipeloom.draw.tables import shared_costs
from pipeloom.errors import UsageError, did_you_mean
from pipeloom.limits import SCHEDULE_BYTES, read_text
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.costs import Sends
from pipeloom.schedule.families import build
from pipeloom.solver import search

PAPERS = {"zero-bubble": "zero_bubble.toml", "moe": "moe.toml", "pipemorph": ""}

_MEASURED_STEPS = Path(__file__).parents[3] / "benchmarks/planbench/pipemorph.json"
_METHODS: dict[str, tuple[str, Sends]] = {
    "1F1B": ("1f1b", "coupled"),
    "ZB": ("zb-h1", "coupled"),
    "ZB-CPU": ("zb-h2", "free"),
}
"""Method of PipeMorph -> the family that stands for its order, which is not published, and how its senders wait."""
_SHARES = 1.0, 1.1, 0.9
"""Shares of F, I and W in an action's time, which are not published either: products of attention have no weights."""


def recompute(name: str) -> list[dict[str, Any]]:
    """Return one entry per row of the paper's table: model, sizes, and for each column the recomputed and published figures.

    Raises UsageError for an unknown paper.
    """
    rows_of = {"moe": _moe_rows, "zero-bubble": _zero_bubble_rows, "pipemorph": steps_with_slow_links}
    content = paper(name)
    return rows_of[name](content)


def _zero_bubble_rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "model": row["model"],
            "ranks": row["ranks"],
            "microbatches": row["microbatches"],
            "here": _zero_bubble_rates(row, content["models"][row["model"]]),
            "published": row["published"],
        }
        for row in content["rows"]
    ]


def _moe_rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per model and schedule: idle of the worst rank, peak activations and parameters, and the formulas' values.

    "share" is the idle time as a multiple of DualPipe's, or None where DualPipe does not run. "crossover" is the number of chunks
    from which `interleaved-overlap` idles less than DualPipe.
    """
    costs = Costs(**content["costs"])
    forward, backward, weight, pair = 1.0, 2.0, 1.0, content["costs"]["pair"]
    rows = []
    for model, (p, v) in content["rows"].items():
        both = pair + backward - 3 * weight
        expected = {  # idle, peak activations
            "dualpipe": ((p / 2 - 1) * both, p + 1),
            "dualpipev": ((p - 1) * both / 2, p + 1 / 2),
            "interleaved-overlap": ((p - 1) * (forward + backward) / v, p + (p - 1) / v),
        }
        for name, (idle, activations) in expected.items():
            if name == "dualpipe" and p % 2:
                continue
            schedule = build(name, p, 4 * p, v if name == "interleaved-overlap" else None)
            timeline = simulate(schedule, shared_costs(costs, schedule))
            here = {"idle": max(timeline.idle), "activations": max(timeline.peak_memory)}
            rows.append(
                {
                    "model": model,
                    "ranks": p,
                    "chunks": v,
                    "schedule": name,
                    "here": here,
                    "formula": {"idle": idle, "activations": activations},
                    "parameters": schedule.stages // schedule.positions,
                    "share": None if p % 2 else here["idle"] / expected["dualpipe"][0],
                    "crossover": (p - 1) * (forward + backward) / ((p / 2 - 1) * both),
                }
            )
    return rows


def paper(name: str) -> dict[str, Any]:
    """Return the data of a paper: title, models, and rows with their profile and published figures. Raises as `recompute`."""
    if name not in PAPERS:
        raise UsageError(f"--paper is {name!r:.200}{did_you_mean(name, PAPERS)}")
    if name == "pipemorph":
        content: dict[str, Any] = json.loads(read_text(_MEASURED_STEPS, SCHEDULE_BYTES, "measured steps"))
        return content
    return tomllib.loads((resources.files("pipeloom.cli") / PAPERS[name]).read_text(encoding="utf-8"))


def steps_with_slow_links(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per measured step with slow links: run, method, milliseconds measured and here, and the relative error.

    Here: the step measured without a delay, and by how much the simulated step is longer with it. A step that the authors planned
    anew stands beside the best order that our search finds for the same links, without waits.
    """
    words = content["source"]
    sizes = {model: int(ranks) for model, ranks in re.findall(r"(\w+): p (\d+)", words)}
    steps = {
        method: float(time) for method, time in re.findall(r"(\S+) (\d+\.?\d*)(?=[ ,]\D)", words) if method in _METHODS
    }
    rows = []
    for row in content["rows"]:
        _, model, method, links, delay = row["run"].split("/")
        planned, m, p = method.endswith("-ReSchedule"), int(row["gbs"][0]), sizes[model]
        base = steps[method.removesuffix("-ReSchedule")]
        action = steps["1F1B"] / (m + p - 1) / sum(_SHARES)
        plain = Costs(action * _SHARES[0], action * _SHARES[1], action * _SHARES[2])
        slow = replace(plain, p2p=_delays(p, links, 1e3 * float(delay)))
        if planned:
            added = _searched(m, slow) - _searched(m, replace(slow, p2p=_delays(p, links, 0.0)))
        else:
            name, sends = _METHODS[method]
            schedule = build(name, p, m, None)
            times = [simulate(schedule, replace(each, sends=sends)).makespan for each in (slow, plain)]
            added = times[0] - times[1]
        error = (base + added) / row["ms"] - 1
        rows.append({"run": row["run"], "method": method, "published": row["ms"], "here": base + added, "error": error})
    return rows


@cache
def _searched(microbatches: int, costs: Costs) -> float:
    """Return the makespan of the best order found within the memory of ZB-2p."""
    ranks = len(costs.p2p)  # type: ignore[arg-type]
    return search(ranks, microbatches, costs, 2.0 * ranks, placement="linear", iterations=200).value


def _delays(ranks: int, links: str, delay: float) -> tuple[tuple[float, ...], ...]:
    """Return the latency of each hop, with links such as `0_1,6_7` that the authors delay, each before the sends over it.

    A rank takes peer 0 for the one before it and peer 1 for the one behind it: link 1_2 leaves rank 2's sends to rank 1 as they
    are, and link 2_3 delays them.
    """
    slow = {tuple(map(int, link.split("_"))) for link in links.split(",")}
    late = slow | {(b, a) for a, b in slow if a != 1} | ({(2, 1)} if (2, 3) in slow else set())
    return tuple(tuple(delay * ((here, there) in late) for there in range(ranks)) for here in range(ranks))


def costs_of(row: dict[str, Any], model: dict[str, int]) -> Costs:
    """Return the costs of a rank, in milliseconds.

    Of the memory of a layer's micro-batch, M_B = 34 h + 5 a s, M_W = 32 h is kept until W (arXiv 2401.10241, section 2.3).
    """
    held = 32 * model["hidden"] / (34 * model["hidden"] + 5 * model["heads"] * model["sequence"])
    return Costs(**row["costs"], held=held)


def _zero_bubble_rates(row: dict[str, Any], model: dict[str, int]) -> dict[str, float]:
    """Return column -> bubble rate, 1 - m (f + b + w) / largest span.

    The interleaved column is 1 - m (f + b + w) / (makespan - p p2p), which is how the paper's figures are reproduced.
    """
    costs, p, m = costs_of(row, model), row["ranks"], row["microbatches"]
    work: float = m * sum(row["costs"][part] for part in ("forward", "input_grad", "weight_grad"))

    def rate(name: str, **options: object) -> float:
        return 1 - work / max(simulate(build(name, p, m, None, options, costs), costs).spans)

    chunks = model["chunks"]
    looped = simulate(build("interleaved", p, m, chunks), costs.resized(1 / chunks))
    return {
        "1f1b": rate("1f1b"),
        "interleaved": 1 - work / (looped.makespan - p * row["costs"]["p2p"]),
        "zb-h1": rate("zb-h1"),
        "zb-h2": rate("zb-h2"),
        "zb-auto 1p": rate("zb-auto", memory=p, objective="span"),
        "zb-auto 2p": rate("zb-auto", memory=2 * p, objective="span"),
    }


def table(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return lines of at most 80 columns."""
    content = paper(name)
    if name == "pipemorph":
        return _pipemorph_lines(rows)
    cells, notes = _moe_cells(content, rows) if name == "moe" else _zero_bubble_cells(rows)
    return [*content["title"], "", *in_columns(cells), "", *notes]


def _pipemorph_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return a title, a line per step, and the errors by method."""
    cells = [["run", "published", "here", "error"]]
    cells += [
        [row["run"], f"{row['published']:.0f} ms", f"{row['here']:.0f} ms", f"{100 * row['error']:+.1f} %"]
        for row in rows
    ]
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["method"], []).append(100 * abs(row["error"]))
    notes = [
        f"{name}: error in the median {median(each):.1f} %, at most {max(each):.1f} %" for name, each in errors.items()
    ]
    return [
        "PipeMorph (NSDI 2026): steps with a slow link, measured, and predicted from the step without it",
        "",
        *in_columns(cells),
        "",
        *notes,
        "",
        *(f"{method}: {family} with {sends} sends" for method, (family, sends) in _METHODS.items()),
        "ReSchedule: planned anew by the authors; here: by our search, for sends that do not wait",
    ]


def _zero_bubble_cells(rows: list[dict[str, Any]]) -> tuple[list[list[str]], list[str]]:
    """Return the cells, two lines per row, and a line below them."""
    columns = list(rows[0]["here"])
    heads = [column.removeprefix("zb-").replace("auto ", "auto") for column in columns]
    cells = [["model", "p", "m", "", *heads]]
    for row in rows:
        for source, sizes in (
            ("here", [row["model"], str(row["ranks"]), str(row["microbatches"])]),
            ("published", [""] * 3),
        ):
            cells.append([*sizes, source, *(f"{rate:.4f}" for rate in row[source].values())])
    differences = [round(row["here"][column], 4) - row["published"][column] for row in rows for column in columns]
    better, worse = sum(each < 0 for each in differences), sum(each > 0 for each in differences)
    equal = len(differences) - better - worse
    return cells, [f"{equal} figures equal to four decimals, {better} better, {worse} worse"]


def _moe_cells(content: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[list[list[str]], list[str]]:
    """Return the cells, one line per schedule, and the formulas below them."""
    cells = [["model", "p", "v", "schedule", "idle", "ratio", "activations", "params"]]
    for at, row in enumerate(rows):
        first = at == 0 or rows[at - 1]["model"] != row["model"]
        head = [row["model"], str(row["ranks"]), str(row["chunks"])] if first else [""] * 3
        idle, activations = map(number, row["here"].values())
        share_of = "n/a" if row["share"] is None else number(row["share"])
        cells.append([*head, row["schedule"], idle, share_of, activations, f"{row['parameters']} x"])
    equal = sum(isclose(row["here"][key], row["formula"][key]) for row in rows for key in row["here"])
    crossover = ", ".join(f"v = {number(6 * (p - 1) / (p - 2))} for p = {p}" for p in (4, 8, 16))
    return cells, [
        *(
            f"{name}: idle {each['idle']}; activations {each['activations']}"
            for name, each in content["formulas"].items()
        ),
        f"{equal} of {2 * len(rows)} simulated figures are those of the formulas",
        "ratio: the idle time as a multiple of dualpipe's",
        "dualpipe runs from both ends of the pipeline, so p is even: none for p = 9",
        "dualpipe and interleaved-overlap idle equally long at v = 6(p - 1)/(p - 2):",
        f"  {crossover}",
    ]
