"""Published measurements against the planner: memory of each rank, steps, and layouts that a guide recommends.

    python benchmarks/planbench/score.py [--json FILE]

Prints for every published row the planner's error and that of the published formula of activations (arXiv 2205.05198,
equation 2, with 18 bytes a parameter divided as ZeRO-1 divides them), and for every recommended layout whether it fits on 80 GB
devices and how much slower it is than the planner's best. `fit.json` and `recommended.json` name their sources.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from pipeloom.plan import OFFERED, RUNTIMES, PlannedLayout, Planner, PlanRequest, load_device, load_model, search
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import shape_of

HERE = Path(__file__).parent
GIB = 2**30


def rows() -> list[dict[str, Any]]:
    """The published rows, each with its model's shape."""
    data = json.loads((HERE / "fit.json").read_text())
    return [
        row | {"shape": shape_of(data["models"][row["model"]] | {"num_hidden_layers": row["layers"]}, row["model"])}
        for row in data["rows"]
    ]


def layout_of(row: dict[str, Any]) -> PlannedLayout:
    """The row's layout; Megatron cuts blocks evenly and pads experts to their capacity."""
    axes = {axis: row[axis] for axis in ("tp", "cp", "pp", "dp", "ep", "seq")}
    return PlannedLayout(**axes, m=row["microbatches"], cut="even", capacity=1.0 if row["shape"].num_experts else 0.0)


def published_formula(shape: DecoderShape, layout: PlannedLayout, rank: int) -> float:
    """Bytes on a rank: 2 + 4 + 12 / dp a parameter, and 34 s b h / t a layer (with fused attention)."""
    head, width = shape.head_width, shape.intermediate_size
    heads = 2 * shape.num_attention_heads + 2 * shape.num_key_value_heads
    block = shape.hidden_size * (head * heads + 3 * width)
    count = block * shape.num_hidden_layers / layout.pp
    if rank in (0, layout.pp - 1):
        count += shape.vocab_size * shape.hidden_size * (2 if layout.pp == 1 else 1)
    state = count / layout.tp * (6 + 12 / layout.dp)
    alive = min(layout.m, layout.pp - rank)
    layers = shape.num_hidden_layers / layout.pp * alive
    return state + 34 * layout.seq * layout.micro_batch * shape.hidden_size / layout.tp * layers


def score_memory() -> dict[str, float]:
    """Print a line for each rank of each row; return the figures of the summary."""
    device = load_device("b200")
    errors, formula, steps = [], [], []
    print(f"{'row':34} {'rank':>4} {'GiB':>8} {'predicted':>9} {'error':>7} {'formula':>8}")
    for row in rows():
        layout, shape = layout_of(row), row["shape"]
        planner = Planner(shape, device, RUNTIMES["megatron"])
        prediction = planner.predict(layout)
        name = f"{row['model']} tp {layout.tp} pp {layout.pp} m {layout.m}"
        for rank, memory in enumerate(prediction.ranks):
            measured = row["allocated_gib"][str(rank * layout.tp * layout.cp * layout.dp)]
            error = memory.allocated / GIB / measured - 1
            errors.append(abs(error))
            other = ""
            if not shape.num_experts:
                formula.append(abs(published_formula(shape, layout, rank) / GIB / measured - 1))
                other = f"{100 * formula[-1]:7.1f}%"
            print(f"{name:34} {rank:4} {measured:8.2f} {memory.allocated / GIB:9.2f} {100 * error:+6.2f}% {other:>8}")
        steps.append((name, row, planner, prediction))
    print(f"\n{'row':34} {'ms':>8} {'predicted':>9} {'error':>7} {'from m = 4':>11}")
    scaled, plain = [], []
    for name, row, planner, prediction in steps:
        plain.append(prediction.step.total * 1e3 / row["step_ms"] - 1)
        line = f"{name:34} {row['step_ms']:8.1f} {prediction.step.total * 1e3:9.1f} {100 * plain[-1]:+6.1f}%"
        half = [
            r for r in rows() if r["microbatches"] == 4 and all(r[k] == row[k] for k in ("model", "layers", "tp", "pp"))
        ]
        if row["microbatches"] == 8 and half:
            again = planner.measured(prediction, 4, half[0]["step_ms"] / 1e3)
            scaled.append(abs(again.step.total * 1e3 / row["step_ms"] - 1))
            line += f" {100 * scaled[-1]:10.1f}%"
        print(line)
    pairs = list(combinations(steps, 2))
    agree = [(a[1]["step_ms"] < b[1]["step_ms"]) == (a[3].step.total < b[3].step.total) for a, b in pairs]
    return {
        "memory, median error": median(errors),
        "memory, largest error": max(errors),
        "memory, median error of the published formula": median(formula),
        "step at m = 8 from m = 4, mean error": mean(scaled),
        "step without calibration, mean error": mean(map(abs, plain)),
        "order of steps, Kendall's tau": 2 * mean(agree) - 1,
    }


def score_recommended() -> list[tuple[str, bool, float]]:
    """(layout in words, whether it fits, the planner's best over it) of each recommended layout."""
    device = load_device("h100")
    result = []
    for row in json.loads((HERE / "recommended.json").read_text())["rows"]:
        shape = load_model(row["model"])
        planner = Planner(shape, device, RUNTIMES["megatron"])
        seq = 2048 if row["model"].startswith("gpt3") else 8192
        axes = {axis: row[axis] for axis in ("tp", "pp", "cp", "ep") if axis in row}
        request = PlanRequest(
            row["gpus"], device.memory, 2**22 // seq * (4 if row["gpus"] > 512 else 1), seq, OFFERED["megatron"]
        )
        best = search(planner, request)
        fixed = search(planner, PlanRequest(**{**vars(request), "fixed": axes}))
        words = f"{row['model']}, {row['gpus']} devices: " + ", ".join(f"{k} {v}" for k, v in axes.items())
        fits = bool(fixed.predictions)
        result.append(
            (words, fits, best.best.tokens / fixed.best.tokens if fits and best.predictions else float("nan"))
        )
        print(f"{words:58} {'fits' if fits else 'DOES NOT FIT':12} the planner's best is {result[-1][2]:.2f} x as fast")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = score_memory()
    print()
    recommended = score_recommended()
    print()
    for name, value in figures.items():
        print(f"{name:50} {value:.2f}" if "tau" in name else f"{name:50} {100 * value:.2f} %")
    if options.json:
        options.json.write_text(json.dumps(figures | {"recommended": recommended}, indent=1))


if __name__ == "__main__":
    main()
