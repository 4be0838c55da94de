"""The planner on this machine: bytes of 12 layouts and steps of 8 on 2 processes of one thread, predicted and measured.

    python benchmarks/plan_cpu.py            all parts
    python benchmarks/plan_cpu.py bytes steps rehearsed

bytes: the peak of each rank, predicted by `plan/run.py`, against that which the run counts in its second step.
steps: the pipeline's part of a step from the layers' times of `pipeloom profile`, against the median of the runs' logged steps;
       and Kendall's tau over the pairs whose predictions differ by at least 5 %. Profile and runs take turns for two rounds and a
       last profile; the shortest median of each time counts, because other work only lengthens them.
rehearsed: the pipeline's part of a step of Llama-3 8B on 4 H100, from the data sheet, against `pipeloom rehearse` with the plan's
       costs: 4 processes whose computation is emulated, with real messages.

Run it on a quiet machine: whatever else computes on the two cores lengthens some steps and not others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from commands import answer
from parts import run_parts
from pipeloom.config import load_layout
from pipeloom.plan import parse_layout
from pipeloom.plan.measured import read
from pipeloom.plan.run import predicted
from pipeloom.schedule.channels import size_words
from small_run import small_run

BYTES, SECONDS, TAU = 0.05, 0.10, 0.8
ROUNDS = 2
FLAT = {"parallel.pp": 1, "schedule.name": "gpipe"}
STEPS: dict[str, dict[str, Any]] = {
    "1f1b, m 4": {"schedule.microbatches": 4},
    "1f1b, m 8": {},
    "1f1b, m 16": {"schedule.microbatches": 16},
    "1f1b, m 8, recomputed": {"train.recompute": "full"},
    "gpipe, m 8": {"schedule.name": "gpipe"},
    "interleaved, m 8": {"schedule.name": "interleaved"},
    "zb-h1, m 8": {"schedule.name": "zb-h1"},
    "zbv, m 4": {"schedule.name": "zbv", "schedule.microbatches": 4},
}
MORE: dict[str, dict[str, Any]] = {
    "1f1b, bf16": {"train.dtype": "bfloat16"},
    "1f1b, experts": {"model.num_experts": 4, "model.num_experts_per_tok": 2},
    "dp 2, ZeRO-1": FLAT | {"parallel.dp": 2, "parallel.zero": 1},
    "tp 2, sp": FLAT | {"parallel.tp": 2, "parallel.sp": True},
}


REHEARSED = (
    "m=8",
    "m=16",
    "m=8,recompute=full",
    "m=8,schedule=gpipe",
    "m=8,v=2,schedule=interleaved",
    "m=8,schedule=zb-h1",
    "m=8,v=2,schedule=zbv",
    "m=8,slices=2",
)


def words_of(keys: dict[str, Any]) -> list[str]:
    return [
        word
        for key, value in keys.items()
        for word in (f"--{key}", str(value).lower() if value is True else str(value))
    ]


def command(folder: Path, *words: str) -> None:
    """Run `pipeloom` on one thread for each process; end with its error."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pipeloom", *words], capture_output=True, text=True, cwd=folder, env=environment
    )
    if done.returncode:
        sys.exit(done.stderr[-2000:])


def events(folder: Path, keys: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Train a layout; event -> its last record."""
    with tempfile.TemporaryDirectory(dir=folder) as log:
        data = ["--data.source", str(folder / "text.txt"), "--log.dir", log]
        command(folder, "train", str(folder / "run.toml"), *data, *words_of(keys))
        (file,) = Path(log).glob("*/log.jsonl")
        records = [json.loads(line) for line in file.read_text().splitlines()]
    return {record["event"]: record for record in records}


def prepared(folder: str) -> Path:
    path = Path(folder)
    (path / "run.toml").write_text(small_run(microbatches=8, batch=16, steps=9))
    (path / "text.txt").write_text("the loom weaves thread over thread and back again\n" * 4000)
    return path


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def memory() -> None:
    print(f"bytes of each rank at the peak; {load()}\n")
    print("| layout | rank | predicted | measured | error |\n| --- | --- | --- | --- | --- |")
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = prepared(name)
        for title, keys in (STEPS | MORE).items():
            layout = load_layout(folder / "run.toml", keys)
            ranks = predicted(layout).ranks
            sizes = events(folder, keys | {"train.steps": 3})["bytes"]["measured"]
            for rank, measured in enumerate(sizes):
                planned = ranks[layout.mesh.place(rank).pp].total
                worst = max(worst, abs(planned / measured - 1))
                print(
                    f"| {title} | {rank} | {size_words(planned)} | {size_words(measured)} | {planned / measured - 1:+.1%} |",
                    flush=True,
                )
    print(f"\nlargest error {worst:.1%}, at most {BYTES:.0%} {'reached' if worst <= BYTES else 'MISSED'}")


def profile(folder: Path) -> dict[str, Any]:
    """A profile of two processes at once, of one sequence and of the largest micro-batch of all layouts."""
    largest = ["--schedule.microbatches", str(min(each.get("schedule.microbatches", 8) for each in STEPS.values()))]
    file = folder / "profile.json"
    command(folder, "profile", "run.toml", *largest, "--processes", "2", "--repeats", "15", "--output", str(file))
    form: dict[str, Any] = json.loads(file.read_text())
    return form


def fastest(profiles: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first profile with the shortest of the medians of all of them."""
    form: dict[str, Any] = json.loads(json.dumps(profiles[0]))
    for at, layer in enumerate(form["layers"]):
        for name in ("seconds", "seconds_of_one_sequence"):
            for kind, sample in layer[name].items():
                sample["median"] = min(each["layers"][at][name][kind]["median"] for each in profiles)
    form["costs"]["p2p"] = min(each["costs"]["p2p"] for each in profiles)
    form["costs"]["bandwidth"] = max(each["costs"]["bandwidth"] for each in profiles)
    return form


def steps() -> None:
    print(f"the pipeline's part of a step; {load()}\n")
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, profiles = prepared(name), []
        for _ in range(ROUNDS):
            profiles.append(profile(folder))
            for title, keys in STEPS.items():
                seconds = events(folder, keys)["bubble"]["makespan_measured"]
                measured[title] = min(seconds, measured.get(title, seconds))
        profiles.append(profile(folder))
        (folder / "profile.json").write_text(json.dumps(fastest(profiles)))
        layers = read(folder / "profile.json", load_layout(folder / "run.toml").config.model.shape())
        planned = {
            title: predicted(load_layout(folder / "run.toml", keys), measured_layers=layers).timeline.makespan
            for title, keys in STEPS.items()
        }
    compare(planned, measured)


def compare(planned: dict[str, float], measured: dict[str, float]) -> None:
    """Print both, the largest error, and Kendall's tau over the pairs whose predictions differ by at least 5 %."""
    print("| layout | predicted ms | measured ms | error |\n| --- | --- | --- | --- |")
    for title, seconds in planned.items():
        print(f"| {title} | {seconds * 1e3:.1f} | {measured[title] * 1e3:.1f} | {seconds / measured[title] - 1:+.1%} |")
    worst = max(abs(seconds / measured[title] - 1) for title, seconds in planned.items())
    pairs = [
        (planned[a] - planned[b]) * (measured[a] - measured[b])
        for a, b in combinations(planned, 2)
        if max(planned[a], planned[b]) / min(planned[a], planned[b]) >= 1.05
    ]
    tau = sum(1 if each > 0 else -1 for each in pairs) / len(pairs)
    print(f"\nlargest error {worst:.1%}, at most {SECONDS:.0%} {'reached' if worst <= SECONDS else 'MISSED'}")
    print(
        f"Kendall's tau over {len(pairs)} pairs {tau:.2f}, at least {TAU} {'reached' if tau >= TAU else 'MISSED'}; {load()}"
    )


def rehearsed() -> None:
    print(f"the pipeline's part of a step on 4 processes with emulated computation; {load()}\n")
    planned, measured = {}, {}
    with tempfile.TemporaryDirectory() as name:
        costs = Path(name, "costs.json")
        for text in REHEARSED:
            layout = parse_layout(f"pp=4,{text}")
            words = ["--model", "llama3-8b", "--device", "h100", "--memory", "400", "--layout", layout.text()]
            parts = answer("plan", *words, "--costs-to", str(costs))["step_parts"]
            planned[text] = sum(parts[part] for part in ("compute", "exchange", "idle"))
            sizes = ["--ranks", "4", "--microbatches", str(layout.m), *(["--chunks", str(layout.v)] * (layout.v > 1))]
            slices = ["--option", f"slices={layout.slices}"] if layout.slices > 1 else []
            of_device = ["--costs", str(costs), "--unit", "1", "--message", "64KiB"]
            measured[text] = answer("rehearse", layout.schedule, *sizes, *slices, *of_device)["rehearsal"]["rehearsed"]
    compare(planned, measured)


if __name__ == "__main__":
    run_parts({"bytes": memory, "steps": steps, "rehearsed": rehearsed})
