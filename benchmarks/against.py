"""The runtime of this working tree against that of another one, step by step in turn.

    git worktree add /tmp/before HEAD~1
    python benchmarks/against.py /tmp/before                    all parts
    python benchmarks/against.py /tmp/before tiny --turns 200

tiny:     layers that do next to nothing, 2 processes.
blocks:   8 transformer blocks of width 256, 128 tokens, micro-batch 4, m = 8, 2 processes of one thread.
emulated: layers that sleep (F 5 ms, B 10 ms), 2 processes.

Both trees run at once, each in processes of its own, and only one of them steps at a time: a machine whose speed changes from
second to second changes it for both. The ratio is the median over the turns of the step here over the step there, beside its
quartiles. `--tuned`: after `tune_process()`; a tree without that function tunes by itself. This tree against itself shows what
the method resolves.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

HERE = Path(__file__).resolve().parents[1]
WORLD = 2
# part -> schedules as (name, micro-batches, chunks)
PARTS: dict[str, tuple[tuple[str, int, int], ...]] = {
    "tiny": (("1f1b", 16, 1), ("interleaved", 16, 2)),
    "blocks": (("1f1b", 8, 1), ("interleaved", 8, 2), ("zbv", 8, 2)),
    "emulated": (("1f1b", 8, 1), ("zbv", 8, 2)),
}


def worker(part: str, name: str, microbatches: int, chunks: int, tuned: bool) -> None:
    """Take a step for each line that comes in, and answer with its seconds."""
    import torch
    import torch.distributed as dist

    import layers as parts
    import pipeloom as pl
    from pipeloom.runtime import Pipeline

    if tuned:
        tune()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stages = WORLD * chunks
    make: Any
    shape: tuple[int, ...]
    if part == "tiny":
        make, count, shape, loss = parts.TinyLayer, stages, (microbatches, 8), parts.total
    elif part == "blocks":
        make, count, shape, loss = parts.Block, 8, (microbatches * 4, 128, 256), parts.mse
    else:
        make, count, shape, loss = partial(parts.SleepLayer, 0.005, 0.010), stages, (microbatches * 2, 64), parts.mse
    torch.manual_seed(0)
    pipeline = Pipeline(
        [make for _ in range(count)],
        pl.schedules.build(name, WORLD, microbatches, chunks if chunks > 1 else None),
        loss=loss,
    )
    x, y = torch.randn(*shape), torch.randn(*shape)
    for _ in sys.stdin:
        dist.barrier()
        start = time.perf_counter()
        pipeline.step(x, y)
        dist.barrier()
        print(time.perf_counter() - start, flush=True)


def tune() -> None:
    """Tune the process where the tree leaves that to its trainer."""
    try:
        from pipeloom.train.tuning import tune_process
    except ImportError:
        return
    tune_process()


class Side:
    """The processes of one tree."""

    def __init__(self, tree: Path, words: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = []
        for rank in range(WORLD):
            environment = {
                **os.environ,
                "PYTHONPATH": f"{tree / 'src'}:{tree / 'benchmarks'}",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", str(Path(__file__).resolve()), "--worker", *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )

    def step(self) -> float:
        """Return the seconds of one step of all ranks."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return max(self._answer(process) for process in self.processes)

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> float:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit("a worker has ended")
        return float(line)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def compare(before: Path, part: str, name: str, microbatches: int, chunks: int, turns: int, tuned: bool) -> None:
    """Print the steps of both trees, and their ratio with its quartiles."""
    words = [part, name, str(microbatches), str(chunks), *(["--tuned"] if tuned else [])]
    here, there = Side(HERE, words), Side(before, words)
    try:
        for side in (here, there):
            for _ in range(5):
                side.step()
        pairs = []
        for turn in range(turns):
            if turn % 2:
                ours = here.step()
                pairs.append((ours, there.step()))
            else:
                theirs = there.step()
                pairs.append((here.step(), theirs))
    finally:
        here.close()
        there.close()
    ratios = [ours / theirs for ours, theirs in pairs]
    low, _, high = quantiles(ratios, n=4)
    ours, theirs = (1e3 * median(column) for column in zip(*pairs, strict=True))
    label = f"{part}: {name} p={WORLD} m={microbatches} v={chunks}"
    print(f"{label:38}{ours:9.2f}{theirs:9.2f}{median(ratios):8.3f}  {low:.3f} to {high:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="the other working tree")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--tuned", action="store_true")
    given = parser.parse_args()
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        sys.exit(f"there is no part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    if not (given.tree / "src/pipeloom").is_dir():
        sys.exit(f"{given.tree} holds no src/pipeloom")
    print(f"{'ms a step, medians':38}{'here':>9}{'there':>9}{'ratio':>8}  quartiles")
    for part in given.parts or PARTS:
        for row in PARTS[part]:
            compare(given.tree.resolve(), part, *row, given.turns, given.tuned)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        part, name, microbatches, chunks, *more = sys.argv[2:]
        worker(part, name, int(microbatches), int(chunks), "--tuned" in more)
    else:
        main()
