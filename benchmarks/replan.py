"""`schedule.replan` with one rank slowed 1.5 times in mid-run: the share of the avoidable loss that is back within 20 steps.

    python benchmarks/replan.py              both parts
    python benchmarks/replan.py rehearsed real

rehearsed: 4 processes with emulated computation, 1F1B on 8 micro-batches, and interleaved 1F1B; each of two ranks slowed.
real:      `pipeloom train` on 2 processes of one thread, 1F1B on 4 micro-batches; worker 1 is stopped a third of the time by
           signals, every 6 ms.

Three runs each, slowed from the same step on: with the old schedule, with `replan`, and with the best schedule that a long search
finds for the costs under the slowdown, within the same memory; real ones three times in turn, and the medians
count. Avoidable is the step of the first run less that of the third,
regained that of the first less that of the second; medians of steps 16 to 20 behind the slowdown. In the rehearsal the costs
are known; in the real run they are those that the drift was recorded with.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from parts import run_parts
from pipeloom.config import Layout, load_layout
from pipeloom.measure.rehearse import Clock, EmulatedLayer, Rehearsal
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.json_form import to_dict
from pipeloom.schedule.segments import PhaseTimes
from pipeloom.schedule.transforms import half_split
from pipeloom.solver.replan import better
from pipeloom.train.replan import Replanner
from processes import run_ranks
from small_run import small_run

SLOWDOWN, LEAST = 1.5, 0.60
HEALTHY, WITHIN = 8, 20
TURNS = 3  # of real runs
STEPS = HEALTHY + WITHIN
UNIT = 0.010
SEARCH_SECONDS = 10.0


def slowed(schedule: Schedule, rank: int) -> Costs:
    times = tuple(SLOWDOWN if place == rank else 1.0 for place in schedule.placement)
    return Costs(times, times, times)


class Said:
    """The part of a run's report that is printed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def record(self, event: str, **figures: Any) -> None:
        pass


def rehearse(rank: int, layout: Layout, schedule: Schedule, slow: int, replans: bool) -> tuple[list[float], list[str]]:
    """Return the steps' seconds, and the lines of the log."""
    first = half_split(schedule)  # so that any order can be adopted
    rehearsal, report = Rehearsal(first, Costs(), UNIT / schedule.chunks), Said()
    pipeline = Pipeline(
        rehearsal.layers(rank, Clock()),
        first,
        loss=lambda output, targets: output.mean(),
        options=RuntimeOptions(),
    )
    pipeline.adopt(schedule)
    place: Any = SimpleNamespace(
        rank=rank, world_size=schedule.ranks, waiting=lambda what, phase: contextlib.nullcontext()
    )
    replanner = Replanner(layout, pipeline, place, report if rank == 0 else None)  # type: ignore[arg-type]
    batch, seconds = torch.ones(schedule.microbatches, 16), []
    for step in range(1, STEPS + 1):
        if step == HEALTHY + 1 and rank == slow:
            for layer in pipeline.modules.values():
                assert isinstance(layer, EmulatedLayer)
                longer = PhaseTimes(*(SLOWDOWN * each for each in layer.times.attention))
                layer.times = replace(layer.times, attention=longer)
        pipeline.step(batch, batch)
        seconds.append(pipeline.timeline().makespan)
        if replans and step % layout.config.schedule.replan == 0:
            replanner.after_step(step)
    replanner.close()
    pipeline.close()
    return seconds, report.lines


def verdict(old: float, replanned: float, best: float) -> None:
    regained = (old - replanned) / (old - best)
    print(
        f"  slowed: old schedule {old * 1e3:.1f} ms, replanned {replanned * 1e3:.1f} ms, best {best * 1e3:.1f} ms; avoidable "
        f"{(old - best) * 1e3:.1f} ms ({(old - best) / old:.1%}), back {regained:.0%}, at least {LEAST:.0%} "
        f"{'reached' if regained >= LEAST else 'MISSED'}",
        flush=True,
    )


def rehearsed() -> None:
    times = f"F, I and W of a rank take {UNIT * 1e3:.0f} ms each"
    print(f"4 processes, emulated, {times}; slowed from step {HEALTHY + 1} on, replan = 2")
    for name, chunks, slow in (("1f1b", 1, 1), ("1f1b", 1, 3), ("interleaved", 2, 3)):
        keys = {"parallel.pp": 4, "schedule.name": name, "schedule.microbatches": 8, "schedule.chunks": chunks}
        more = {"model.num_hidden_layers": 4 * chunks, "schedule.replan": 2, "train.steps": STEPS + 1}
        layout = load_layout("tiny", {**keys, **more})
        schedule = layout.schedule
        costs = slowed(schedule, slow)
        best = better(schedule, costs, simulate(schedule, costs).peak_memory, "makespan", SEARCH_SECONDS)
        print(
            f"{name}, rank {slow}: simulated {simulate(schedule, costs).makespan:g}, best {simulate(best, costs).makespan:g}"
        )
        (old, _), (now, said), (least, _) = (
            run_ranks(rehearse, 4, layout, each, slow, replans)[0]
            for each, replans in ((schedule, False), (schedule, True), (best, False))
        )
        print("\n".join(f"  {line}" for line in said))
        verdict(*(median(seconds[-5:]) for seconds in (old, now, least)))


# -- real ------------------------------------------------------------------------------------------------------------------

ON, OFF = 0.004, 0.002  # seconds in which the slowed worker runs, and is stopped


def worker(parent: int, rank: int) -> int:
    """Return the process of a worker, a child of the command that was started here."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                mother = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if mother == parent and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    return int(entry.name)
    sys.exit(f"there is no worker {rank}")


def slow_down(process: int, ended: threading.Event) -> None:
    with contextlib.suppress(ProcessLookupError):
        while not ended.is_set():
            os.kill(process, signal.SIGSTOP)
            time.sleep(OFF)
            os.kill(process, signal.SIGCONT)
            time.sleep(ON)


def events(folder: Path) -> list[dict[str, Any]]:
    logs = list(folder.glob("*/log.jsonl"))
    lines = logs[0].read_text().splitlines() if logs else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@contextlib.contextmanager
def training(folder: Path, name: str, words: list[str]) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    log = folder / name
    command = [sys.executable, "-m", "pipeloom", "train", str(folder / "run.toml"), "--log.dir", str(log)]
    command += ["--data.source", str(folder / "text.txt"), *words]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        yield process, log


def train(folder: Path, name: str, words: list[str]) -> list[dict[str, Any]]:
    """Train with worker 1 slowed from the step on; return the log's events."""
    ended = threading.Event()
    with training(folder, name, words) as (process, log):
        slows: threading.Thread | None = None
        while process.poll() is None:
            steps = [each for each in events(log) if each["event"] == "step"]
            if len(steps) >= HEALTHY and slows is None:
                slows = threading.Thread(target=slow_down, args=(worker(process.pid, 1), ended))
                slows.start()
            if len(steps) >= STEPS:
                ended.set()
            time.sleep(0.05)
        ended.set()
        text = process.communicate()[0]
    if process.returncode:
        sys.exit(text[-2000:])
    return events(log)


def step_of(log: list[dict[str, Any]]) -> float:
    steps = {each["step"]: each["step_time"] for each in log if each["event"] == "figures"}
    return float(median(steps[STEPS - at] for at in range(5)))


def real() -> None:
    print(
        f"2 processes of one thread, 1f1b, 4 micro-batches; worker 1 is slowed from step {HEALTHY + 1} on, replan = 2"
    )
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "run.toml").write_text(small_run(microbatches=4, batch=8, steps=STEPS + 1))
        (folder / "text.txt").write_text("".join(f"line {number} of a text to learn\n" for number in range(20_000)))
        old = train(folder, "old", [])
        now = train(folder, "now", ["--schedule.replan", "2"])
        for each in now:
            if each["event"] in ("drift", "replan", "replanned"):
                print(f"  { ({key: value for key, value in each.items() if key not in ('costs', 'time')}) }")
        drifts = [each for each in now if each["event"] == "drift" and each["step"] > HEALTHY]
        if not drifts:
            sys.exit("no drift was recorded behind the slowdown: MISSED")
        schedule, costs = load_layout(str(folder / "run.toml"), {}).schedule, Costs(**drifts[-1]["costs"])
        best = better(schedule, costs, simulate(schedule, costs).peak_memory, "makespan", SEARCH_SECONDS)
        print(
            f"  simulated {simulate(schedule, costs).makespan * 1e3:.1f} ms, best {simulate(best, costs).makespan * 1e3:.1f} ms"
        )
        (folder / "best.json").write_text(json.dumps(to_dict(best)))
        ways = {"old": [], "now": ["--schedule.replan", "2"], "best": ["--schedule.name", str(folder / "best.json")]}
        times: dict[str, list[float]] = {"old": [step_of(old)], "now": [step_of(now)], "best": []}
        for turn in range(TURNS):
            for name, words in ways.items():
                if len(times[name]) <= turn:
                    times[name].append(step_of(train(folder, f"{name}-{turn}", words)))
        for name, row in times.items():
            print(f"  {name}: {', '.join(f'{1e3 * step:.0f}' for step in row)} ms")
        verdict(*map(median, times.values()))
        losses = [[each["loss"] for each in log if each["event"] == "step"] for log in (old, now)]
        print(f"  largest difference of a loss: {max(abs(a - b) for a, b in zip(*losses, strict=True)):.1e}")


PARTS = {"rehearsed": rehearsed, "real": real}

if __name__ == "__main__":
    run_parts(PARTS)
