"""`pipeloom compare --paper NAME`: a table of a paper, recomputed from what it publishes (`NAME.toml`)."""

from __future__ import annotations

import tomllib
from importlib import resources
from math import isclose
from typing import Any

from pipeloom.draw.figures import in_columns, number
from pipeloom.draw.tables import shared_costs
from pipeloom.errors import UsageError, did_you_mean
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.families import build

PAPERS = {"zero-bubble": "zero_bubble.toml", "moe": "moe.toml"}


def recompute(name: str) -> list[dict[str, Any]]:
    """Return one entry per row of the paper's table: model, sizes, and for each column the recomputed and published figures.

    Raises UsageError for an unknown paper.
    """
    content = paper(name)
    return _moe_rows(content) if name == "moe" else _zero_bubble_rows(content)


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
    return tomllib.loads((resources.files("pipeloom.cli") / PAPERS[name]).read_text(encoding="utf-8"))


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
    cells, notes = _moe_cells(content, rows) if name == "moe" else _zero_bubble_cells(rows)
    return [*content["title"], "", *in_columns(cells), "", *notes]


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
