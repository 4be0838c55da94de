"""Metrics of a step: a line for the terminal and a record for the log."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeloom.config import Config
from pipeloom.draw.figures import in_columns
from pipeloom.limits import usable_cores
from pipeloom.plan import Device, load_device
from pipeloom.plan.time import devices as sheets
from pipeloom.schedule import Timeline, simulate

_MOST_ALLOCATIONS = 100_000  # the latest ones, each with a stack trace, which the file holds


@dataclass(frozen=True)
class StepMetrics:
    """One step's figures.

    Attributes:
        step: counted from 1.
        loss: mean over all targets of the step, nats.
        grad_norm: global, before clipping.
        lr: learning rate.
        step_time: seconds, mean since the last line.
        tps: tokens per second, over all ranks, since the last line.
        memory: bytes, the largest over the ranks: what torch allocated on a GPU, the process's peak on a CPU.
        mfu: model FLOP/s as a share of the devices' peak; None where the peak is not known.
        bubble_rate, bubble_rate_simulated: Σ idle / (p · makespan) of this step and of its simulation with the stage costs
            measured in it.
        expert_load: tokens of the busiest expert over the mean, the largest of all blocks; None without experts.
        expert_drops: share of the choices of experts that were dropped; None without experts.
        all_to_all: seconds of this step in which a rank was idle while it waited for an all-to-all of experts, the largest
            over the ranks; None where there is none.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    step_time: float
    tps: float
    memory: float
    mfu: float | None
    bubble_rate: float
    bubble_rate_simulated: float
    expert_load: float | None = None
    expert_drops: float | None = None
    all_to_all: float | None = None

    def lines(self, steps: int) -> list[str]:
        """Return the head of a table and this step's row, as wide as those of other steps; with experts also a line on them."""
        figures = {
            "step": f"{self.step}/{steps}",
            "loss": f"{self.loss:.4f}",
            "norm": f"{self.grad_norm:.4g}",
            "lr": f"{self.lr:.2e}",
            "memory": f"{self.memory / 2**30:.2f} GiB",
            "tokens/s": f"{self.tps:,.0f}",
            "bubble rate": f"{self.bubble_rate:.0%}",
        }
        if self.mfu is not None:
            figures["mfu"] = f"{self.mfu:.1%}"
        widest = f"{steps}/{steps}", "12.3456", "0.1234", "1.00e-03", "12.34 GiB", "123,456", "100%", "12.3%"
        rows = in_columns([list(figures), list(figures.values()), list(widest[: len(figures)])], left=0)[:2]
        if self.expert_load is not None and self.expert_drops is not None:
            rows.append(
                f"  experts: the busiest has {self.expert_load:.2f}x the mean, {self.expert_drops:.1%} are dropped"
            )
            if self.all_to_all is not None:
                rows[-1] += f"; all-to-all: {self.all_to_all:.3f} s exposed"
        return rows


def simulated(measured: Timeline) -> Timeline:
    """Simulate the schedule of `measured` with its measured stage costs; messages take no time."""
    return simulate(measured.schedule, measured.costs)


def memory_in_use(device: torch.device) -> float:
    """Return bytes: the peak allocated by torch on a GPU, the process's peak resident size on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


@contextlib.contextmanager
def memory_history(path: Path | None) -> Iterator[None]:
    """Record the CUDA allocator's work in a block, and write its snapshot at the end, also if memory runs out.

    Args:
        path: the file, for pytorch.org/memory_viz; None: record nothing.
    """
    if path is None:
        yield
        return
    # The functions that torch's documentation of memory snapshots names; there are no public ones.
    torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
    try:
        yield
    finally:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # as above
        torch.cuda.memory._record_memory_history(enabled=None)


def model_flops_utilization(config: Config, flops: float, device: torch.device, devices: int) -> float | None:
    """Return the model's FLOP/s over all devices (`flops`) divided by the devices' bf16 peak; None where that is not known."""
    if device.type != "cuda" or config.train.dtype != "bfloat16":
        return None
    sheet = known_device(torch.cuda.get_device_name(device))
    return None if sheet is None else flops / sheet.flops / devices


def known_device(name: str) -> Device | None:
    """Return the data sheet of a device that torch calls `name`; None where there is none. Longer names come first."""
    words = name.lower().replace(" ", "")
    known = next((each for each in sorted(sheets(), key=len, reverse=True) if each in words), None)
    return None if known is None else load_device(known)


def shared_cores(ranks: int, device: torch.device) -> str:
    """Return `"4 ranks on 2 cores"` where ranks share CPU cores, which lengthens measured times; else `""`."""
    cores = usable_cores()
    if device.type != "cpu" or ranks <= cores:
        return ""
    return f"{ranks} ranks on {cores} core{'s' * (cores > 1)}"
