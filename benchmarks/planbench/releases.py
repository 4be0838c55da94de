"""Rows that other projects published, of one to 16 nodes, against the planner.

    python benchmarks/planbench/releases.py [GROUP…]

Steps and bytes as published and as predicted, and of each group the errors of what the source lets compare: seconds and model
FLOP/s one by one, ratios within one table or release, the order of schedules, and whether recipes that run are found to fit.
Rows marked `"set": "fit"` may be used to choose constants, those marked `"check"` may not.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from pipeloom.cli.workers import count_foreign
from pipeloom.errors import UsageError
from pipeloom.plan import RUNTIMES, LayoutCosts, PlannedLayout, Planner, load_device, load_model, parse_layout
from pipeloom.shapes.cut import parse_stages
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import count_with, shape_of

HERE = Path(__file__).parent


def predicted(row: dict[str, Any], models: dict[str, Any]) -> tuple[Planner, LayoutCosts]:
    """The planner's answer for a row's layout."""
    shape = shape_of(models[row["model"]], row["model"]) if row["model"] in models else load_model(row["model"])
    planner = Planner(shape, load_device(row["device"]), RUNTIMES[row["runtime"]])
    cut = "balanced" if row["runtime"] == "pipeloom" else "even"
    grads = "bf16" if row["group"] in ("V6oss", "V13") else "fp32"
    layout = parse_layout(row["layout"], PlannedLayout(seq=row["seq"], cut=cut, grads=grads))
    if row["stages"]:
        positions = layout.built().positions
        counts = parse_stages(row["stages"], shape.num_hidden_layers, positions, shape.num_nextn_predict_layers)
        layout = replace(layout, stages=tuple(counts))
    return planner, planner.predict(layout)


def model_flops(shape: DecoderShape, tokens: float, seq: int) -> float:
    """72 B s l h^2 (1 + s / 6 h + V / 12 l h) (arXiv 2104.04473, without recomputation), for a feed-forward of 4 h."""
    layers, width = shape.num_hidden_layers, shape.hidden_size
    extra = seq / (6 * width) + shape.vocab_size / (12 * layers * width)
    return 72 * tokens * layers * width**2 * (1 + extra)


def compared(row: dict[str, Any], planner: Planner, prediction: LayoutCosts) -> tuple[float, float] | None:
    """(published, predicted) speed of a row, in any one unit; None: the source has none."""
    published, layout = row["published"], prediction.layout
    if published.get("seconds"):
        return 1 / published["seconds"], 1 / prediction.step.total
    if published.get("tps"):
        return published["tps"], prediction.tokens
    if published.get("tflops"):
        flops = model_flops(planner.shape, layout.sequences * layout.seq, layout.seq)
        return published["tflops"], flops / prediction.step.total / layout.world / 1e12
    return None


def main() -> None:
    count_with(count_foreign)  # transformers counts `gpt_oss`
    data = json.loads((HERE / "published.json").read_text())
    groups: dict[str, list[tuple[dict[str, Any], tuple[float, float] | None, LayoutCosts]]] = defaultdict(list)
    for row in data["rows"]:
        if sys.argv[1:] and row["group"] not in sys.argv[1:]:
            continue
        try:
            planner, prediction = predicted(row, data["models"])
        except UsageError as error:
            print(f"{row['id']:32} refused: {error}")
            continue
        speeds = compared(row, planner, prediction)
        groups[row["group"]].append((row, speeds, prediction))
        words = f"{speeds[0]:9.4g} {speeds[1]:9.4g} {100 * (speeds[1] / speeds[0] - 1):+6.1f} %" if speeds else " " * 28
        parts = " ".join(
            f"{name} {seconds / prediction.step.total:.2f}" for name, seconds in prediction.step.parts().items()
        )
        large = "TOO LARGE " * (prediction.peak > planner.device.memory)
        gib = row["published"].get("gib") or row["published"].get("gb") or 0.0
        print(f"{row['id']:32} {words}  {gib:6.1f} {prediction.peak / 2**30:6.1f} GiB {large} {parts}")
    print()
    for name, rows in groups.items():
        known = [(row, speeds) for row, speeds, _ in rows if speeds]
        errors = [theirs and ours / theirs - 1 for _, (theirs, ours) in known]
        line = f"{name:6} {len(rows):2} rows"
        if errors:
            sizes = sorted(map(abs, errors))
            figures = {"median": median(sizes), "mean": mean(sizes), "worst": sizes[-1], "signed": mean(errors)}
            line += "  speed: " + ", ".join(f"{word} {100 * value:.1f} %" for word, value in figures.items())
        ratios = [
            abs((b[1][1] / a[1][1]) / (b[1][0] / a[1][0]) - 1)
            for a, b in combinations(known, 2)
            if a[0]["published"].get("release") == b[0]["published"].get("release")
            and a[0]["published"].get("ratio_group") == b[0]["published"].get("ratio_group")
        ]
        if ratios:
            line += f"; ratios: median {100 * median(ratios):.1f} %, worst {100 * max(ratios):.1f} %"
        must = [each for each in rows if each[0]["published"].get("must_fit")]
        if must:
            fitting = sum(prediction.peak <= load_device(row["device"]).memory for row, _, prediction in must)
            line += f"; {fitting} of {len(must)} fit"
        print(line)
    for name in RUNTIMES:  # what `plan --job` can promise: ratios between runs of one model, device and release
        pairs = [
            (a[1], b[1])
            for rows in groups.values()
            for a, b in combinations([each for each in rows if each[1]], 2)
            if a[0]["runtime"] == name and all(a[0][key] == b[0][key] for key in ("runtime", "model", "device", "seq"))
            if a[0]["published"].get("release") == b[0]["published"].get("release")
        ]
        errors = [abs((b[1] / a[1]) / (b[0] / a[0]) - 1) for a, b in pairs if a and b]
        if errors:
            print(f"{name}: {len(errors)} ratios of one model, median error {100 * median(errors):.1f} %")


if __name__ == "__main__":
    main()
