"""What an asynchronous checkpoint every 20 steps costs a training loop, in one process.

    python -m benchmarks.checkpoints --pairs 30

Prints for how long `save` keeps its caller, as a share of 20 steps; the writer's CPU time per byte; the memory of the copy
beside the state; and, over pairs of 20 steps with and without a checkpoint in turn, the wall time of one over the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from pipeloom import checkpoint
from pipeloom.config import load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.train.data.batches import Batches
from pipeloom.train.optimizer import Optimizer

STEPS = 20
LAYOUT = {
    "parallel.pp": 1,
    "schedule.name": "1f1b",
    "schedule.microbatches": 2,
    "model.num_hidden_layers": 6,
    "model.hidden_size": 192,
    "model.intermediate_size": 512,
    "train.seq_len": 32,
    "train.global_batch_size": 4,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="of the training step; the writer has one of its own")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    layout = load_layout("tiny", LAYOUT)
    pipeline = build_pipeline(layout, torch.device("cpu"))
    config = layout.config
    optimizer = Optimizer(list(pipeline.named_parameters()), config.optimizer, pipeline.sync, pipeline.counts_in_norm)
    text = torch.randint(0, 256, (100_000,), dtype=torch.uint8)
    batches = Batches(text, config, 1)

    def steps() -> float:
        begun = time.perf_counter()
        for _ in range(STEPS):
            batch = batches.of_step(pipeline.next_step)
            pipeline.step(batch.tokens, batch.targets)
            optimizer.step(None, 1e-4)
        return time.perf_counter() - begun

    steps()
    with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
        saver = checkpoint.Saver(Path(folder), pipeline, optimizer, keep=1, asynchronous=True)
        saver.save(0)
        saver.wait()
        stalls, cpu, ratios = [], [], []
        for pair in range(given.pairs):
            times = {}
            for saves in (True, False) if pair % 2 else (False, True):
                begun = time.perf_counter()
                if saves:
                    saver.save(pair + 1)
                    stalls.append(saver.stalled)
                steps()
                times[saves] = time.perf_counter() - begun
                saver.wait()  # outside of the time: what is left of the writing has the next 20 steps
            cpu.append(saver.writer_cpu / saver.written * 1e9)
            ratios.append(times[True] / times[False])
            stalls[-1] /= times[False]
        size = saver.written
    print(f"state {size / 1e6:.0f} MB, one copy of it beside; {STEPS} steps take {times[False]:.2f} s")
    print(f"save keeps its caller for {statistics.median(stalls):.2%} of {STEPS} steps (largest {max(stalls):.2%})")
    print(f"the writer takes {statistics.median(cpu):.2f} ns of CPU per byte (largest {max(cpu):.2f})")
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"wall time with over without, {len(ratios)} pairs: median {statistics.median(ratios):.3f}, {spread}")


if __name__ == "__main__":
    main()
