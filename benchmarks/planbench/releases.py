"""Rows that other projects published, of one to 128 nodes, against the planner (README.md has their sources).

    python benchmarks/planbench/releases.py [GROUP…]

Prints steps, speeds and bytes as published and as predicted, and a table with the errors of each group: one by one, of the
ratios of two rows of a release, the order of schedules, and whether recipes that run are found to fit. Rows marked `"set": "fit"`
may be used to choose constants, those marked `"check"` may not, and have columns of their own.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

import score  # the file beside this one

from pipeloom.cli.workers import count_foreign
from pipeloom.errors import UsageError
from pipeloom.plan import RUNTIMES, LayoutCosts, PlannedLayout, Planner, load_device, load_model, parse_layout
from pipeloom.shapes.cut import parse_stages
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import count_with, shape_of

HERE = Path(__file__).parent
GROUPS = {
    "B200": "Megatron-LM, one node of B200",
    "V2": "Megatron-LM on A100, 2022 (arXiv 2205.05198)",
    "V4": "Megatron-Core's table on H100, 48 replicas",
    "V5m": "torchtitan, Llama-3 8B and 70B",
    "V5pp": "torchtitan, Llama-3 405B, fp8",
    "V6oss": "Megatron-Bridge, gpt-oss 120B",
    "V7": "Megatron-Bridge, Llama-3 70B, fp8",
    "V9": "AMD Primus, schedules of Llama-2 7B",
}


@dataclass(frozen=True)
class Result:
    """A row, its published and its predicted speed in any one unit (None: not published), and the prediction."""

    row: dict[str, Any]
    speeds: tuple[float, float] | None
    prediction: LayoutCosts
    memory: float

    @property
    def error(self) -> float:
        """Of the predicted speed."""
        assert self.speeds is not None
        return self.speeds[1] / self.speeds[0] - 1

    @property
    def line(self) -> str:
        """What was published and predicted, in words."""
        parts, speeds, step = "", " " * 28, self.prediction.step
        if self.speeds:
            speeds = f"{self.speeds[0]:9.4g} {self.speeds[1]:9.4g} {100 * self.error:+6.1f} %"
        parts = " ".join(f"{name} {seconds / step.total:.2f}" for name, seconds in step.parts().items())
        large = "TOO LARGE " * (self.prediction.peak > self.memory)
        gib = self.row["published"].get("gib") or self.row["published"].get("gb") or 0.0
        used = f"{gib:6.1f} {self.prediction.peak / 2**30:6.1f} GiB {large}"
        return f"{self.row['id']:34} {self.row['set']:5} {speeds}  {used} {parts}"


def predicted(row: dict[str, Any], models: dict[str, Any]) -> tuple[Planner, LayoutCosts]:
    """The planner's answer for a row's layout; where the sequences of a micro-batch are not published, the fastest of one, two
    and four that fit, as whoever tunes a run for a table would take."""
    shape = shape_of(models[row["model"]], row["model"]) if row["model"] in models else load_model(row["model"])
    device = load_device(row["device"])
    if row["published"].get("fp8"):  # products at twice the rate, attention as fast as before; bytes as of bf16
        device = replace(device, flops=2 * device.flops, attention_share=device.attention_share / 2)
    runtime = replace(RUNTIMES[row["runtime"]], overlaps_exchange=row.get("tp_comm_overlap", False))
    planner = Planner(shape, device, runtime)
    cut = "balanced" if row["runtime"] == "pipeloom" else "even"
    layout = parse_layout(row["layout"], PlannedLayout(seq=row["seq"], cut=cut, grads=row.get("grads", "fp32")))
    if row["stages"]:
        positions = layout.built().positions
        counts = parse_stages(row["stages"], shape.num_hidden_layers, positions, shape.num_nextn_predict_layers)
        layout = replace(layout, stages=tuple(counts))
    layouts = [layout]
    if row.get("sequences_unpublished"):
        layouts = [replace(layout, m=layout.m // n, micro_batch=n) for n in (1, 2, 4) if layout.m % n == 0]
    predictions = [planner.predict(each) for each in layouts]
    inside = [each for each in predictions if each.peak <= device.memory]
    return planner, max(inside or predictions[:1], key=lambda each: each.tokens)


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


def results(groups: list[str]) -> dict[str, list[Result]]:
    """Group -> its rows; all groups where none is named. Prints the rows that are refused."""
    count_with(count_foreign)  # transformers counts `gpt_oss`
    data, found = json.loads((HERE / "published.json").read_text()), defaultdict[str, list[Result]](list)
    for row in score.rows() if not groups or "B200" in groups else ():
        planner = Planner(row["shape"], load_device("b200"), RUNTIMES["megatron"])
        prediction = planner.predict(score.layout_of(row))
        words = f"B200-{row['model']}-tp{row['tp']}-pp{row['pp']}-m{row['microbatches']}"
        own = {"id": words.replace("-cut", ""), "set": row["set"], "published": {}}
        speeds = 1e3 / row["step_ms"], 1 / prediction.step.total
        found["B200"].append(Result(own, speeds, prediction, planner.device.memory))
    for row in data["rows"]:
        if groups and row["group"] not in groups:
            continue
        try:
            planner, prediction = predicted(row, data["models"])
        except UsageError as error:
            print(f"{row['id']:34} refused: {error}")
            continue
        speeds_of_row = compared(row, planner, prediction)
        found[row["group"]].append(Result(row, speeds_of_row, prediction, planner.device.memory))
    return found


def table(found: dict[str, list[Result]]) -> list[str]:
    """Lines of a table in Markdown: errors of the rows to check and, beside them, of those that may be fitted."""
    lines = [
        "| rows | one by one: median, worst, signed mean | ratios of two rows: median, worst | order | fitted rows, one by one |"
    ]
    lines += ["|---|---|---|---|---|"]
    for name, words in GROUPS.items():
        if known := [each for each in found.get(name, ()) if each.speeds]:
            check, fit = ([each for each in known if each.row["set"] == kind] for kind in ("check", "fit"))
            cells = [_alone(check), _ratios(check), _order(check), _alone(fit)]
            lines.append(f"| {words} ({len(check)}, {len(fit)} fitted) | {' | '.join(cells)} |")
    return lines


def fitting(found: dict[str, list[Result]]) -> tuple[list[str], int]:
    """(the recipes that run and are not found to fit, how many run)."""
    run = [each for rows in found.values() for each in rows if each.row["published"].get("must_fit")]
    return [each.row["id"] for each in run if each.prediction.peak > each.memory], len(run)


def of_one_model(found: dict[str, list[Result]]) -> dict[str, list[float]]:
    """Runtime -> errors of the ratios of runs of one model, device and release: what `plan --job` can promise."""
    rows = [each for rows in found.values() for each in rows if each.speeds and "runtime" in each.row]
    keys, errors = ("runtime", "model", "device", "seq"), defaultdict[str, list[float]](list)
    for a, b in combinations(rows, 2):
        releases = [each.row["published"].get("release") for each in (a, b)]
        if (
            all(a.row[key] == b.row[key] for key in keys)
            and releases[0] == releases[1]
            and a.row["group"] == b.row["group"]
        ):
            errors[a.row["runtime"]].append(abs((1 + b.error) / (1 + a.error) - 1))
    return errors


def _alone(rows: list[Result]) -> str:
    errors = [each.error for each in rows if not each.row["published"].get("fp8")]
    sizes = sorted(map(abs, errors))
    return f"{_percent(median(sizes))}, {_percent(sizes[-1])}, {100 * mean(errors):+.0f} %" if errors else ""


def _pairs(rows: list[Result]) -> list[tuple[Result, Result]]:
    keys = ("release", "ratio_group")
    pairs = combinations(rows, 2)
    return [(a, b) for a, b in pairs if all(a.row["published"].get(k) == b.row["published"].get(k) for k in keys)]


def _ratios(rows: list[Result]) -> str:
    errors = sorted(abs((1 + b.error) / (1 + a.error) - 1) for a, b in _pairs(rows))
    return f"{_percent(median(errors))}, {_percent(errors[-1])}" if errors else ""


def _order(rows: list[Result]) -> str:
    """Pairs of one release in the published order."""
    pairs = [(a.speeds, b.speeds) for a, b in _pairs(rows)]
    right = [(a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs if a is not None and b is not None]
    return f"{sum(right)} of {len(right)}" if right else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def main() -> None:
    found = results(sys.argv[1:])
    for rows in found.values():
        print("\n".join(each.line for each in rows))
    print("\n" + "\n".join(table(found)))
    for name, errors in of_one_model(found).items():
        print(f"{name}: {len(errors)} ratios of one model, median error {100 * median(errors):.1f} %")
    missing, count = fitting(found)
    if count:
        print(
            f"\n{count - len(missing)} of {count} recipes that run are found to fit; not: {', '.join(missing) or 'none'}"
        )


if __name__ == "__main__":
    main()
