"""Growth of a long run: memory, descriptors, threads and mappings of every worker, early and at the end.

`python tests/growth.py` trains a tiny model for 10,000 steps in each layout and prints what each worker held after 1,000
steps and at the end; it exits with 1 where something grew. tests/e2e/train/test_growth.py runs a short one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import faults

LAYOUTS = {
    "shared memory": ["--parallel.pp", "2", "--schedule.transport", "shared"],
    "gloo, dp, ZeRO": [
        *("--parallel.pp", "2", "--parallel.dp", "2", "--train.global_batch_size", "16"),
        *("--schedule.transport", "individual", "--optimizer.zero1", "true"),
    ],
}
SMALL = [
    *("--model.num_hidden_layers", "2", "--model.hidden_size", "32", "--model.intermediate_size", "64"),
    *("--train.seq_len", "16", "--schedule.name", "zb-h1", "--schedule.microbatches", "4"),
    *("--train.global_batch_size", "8", "--log.every", "5"),
]
MOST_KIB = 1024  # growth that counts as none: the allocator's own
LAST_LINES = 4096  # bytes at the end of a log, which hold its last line
MOST_BUFFERS = 8  # growth of descriptors and mappings that is none: buffers of messages, made when a rank runs ahead
WINDOW = 40  # readings that a median is taken of: a single one catches a step at its widest


class Held(NamedTuple):
    """What a process holds: resident memory in KiB, and numbers of descriptors, threads and mappings."""

    kib: int
    descriptors: int
    threads: int
    mappings: int


def held(process: int) -> Held:
    """Return what the process holds now, as the kernel counts it."""
    folder = Path("/proc") / str(process)
    status = (folder / "status").read_text()
    found = {name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)}
    mappings = (folder / "maps").read_text().count("\n")
    return Held(found["VmRSS"], len(list((folder / "fd").iterdir())), found["Threads"], mappings)


def median(readings: list[Held]) -> Held:
    """Return the median of each figure."""
    return Held(*(sorted(figures)[len(figures) // 2] for figures in zip(*readings, strict=True)))


def steps_of(folder: Path) -> int:
    """Return the last step in the run's log, 0 before there is one."""
    for path in folder.rglob("log.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_LINES))
            steps = re.findall(rb'"step": (\d+)', file.read())
        return int(steps[-1]) if steps else 0
    return 0


def watched(folder: Path, layout: str, steps: int, early: int) -> dict[int, tuple[Held, Held]]:
    """Train for `steps` steps; return rank -> (held from step `early` on, held at the end).

    Raises AssertionError when the run fails.
    """
    flags = [*LAYOUTS[layout], *SMALL] if layout == "shared memory" else [*SMALL, *LAYOUTS[layout]]
    run = faults.start([*faults.command(folder, *flags, timeout=None), "--train.steps", str(steps)])
    workers = faults.workers_of(run.pid, 4 if "dp" in layout else 2)
    first: dict[int, list[Held]] = {rank: [] for rank in workers}
    last: dict[int, list[Held]] = {rank: [] for rank in workers}
    while run.poll() is None:
        time.sleep(0.1 if early >= 1_000 else 0.02)  # readings take the workers' cores
        done = steps_of(folder)
        if done >= steps - 10:  # what a run that ends gives back does not count
            break
        if len(first[0]) < WINDOW and done < early:
            continue
        now = {rank: held(process) for rank, process in workers.items()}
        for rank, reading in now.items():
            if len(first[rank]) < WINDOW:
                first[rank].append(reading)
            last[rank] = [*last[rank], reading][-WINDOW:]
    _, words = run.communicate()
    assert run.returncode == 0, words
    assert len(first[0]) == WINDOW, f"step {early} of {steps} came too late to be read {WINDOW} times"
    return {rank: (median(first[rank]), median(last[rank])) for rank in workers}


def growth(rows: dict[int, tuple[Held, Held]], most_kib: int = MOST_KIB) -> list[str]:
    """Return a sentence for each figure that grew; memory by more than `most_kib`."""
    allowed = (most_kib, MOST_BUFFERS, 0, MOST_BUFFERS)
    found = []
    for rank, (first, last) in rows.items():
        for name, before, after, most in zip(Held._fields, first, last, allowed, strict=True):
            if after - before > most:
                found.append(f"rank {rank}: {name} grew from {before} to {after}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--early", type=int, default=1_000)
    parser.add_argument("--layout", choices=LAYOUTS)
    options = parser.parse_args()
    wrong = []
    for layout in LAYOUTS if options.layout is None else [options.layout]:
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            try:
                rows = watched(Path(folder), layout, options.steps, options.early)
            except (AssertionError, subprocess.SubprocessError) as error:
                wrong.append(f"{layout}: {error}")
                continue
        print(f"{layout}: {options.steps} steps in {time.monotonic() - begun:.0f} s", flush=True)
        for rank, (first, last) in sorted(rows.items()):
            figures = ", ".join(f"{name} {a} -> {b}" for name, a, b in zip(Held._fields, first, last, strict=True))
            print(f"  rank {rank}: {figures}", flush=True)
        wrong += [f"{layout}: {words}" for words in growth(rows)]
    print("\n".join(wrong) or "nothing grew")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
