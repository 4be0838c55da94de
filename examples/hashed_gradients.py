"""A kind of action of your own: each stage's gradients are hashed on a queue beside the computation, chained to the next stage's.

python examples/hashed_gradients.py                                 # checked, simulated, drawn, and run in this process
torchrun --nproc-per-node 2 examples/hashed_gradients.py            # the same on two processes
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.draw import terminal
from pipeloom.runtime import Pipeline

FOLDER, RANKS, LAST = Path("hashes"), 2, 3


class Block(nn.Linear):
    def __init__(self, number: int) -> None:
        super().__init__(16, 16)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


def digest(modules: tuple[Block, ...], microbatch: int) -> None:
    """Hash a stage's gradients behind the next stage's hash, which exists by then: the action needs it."""
    number = modules[0].number
    later = (FOLDER / str(number + 1)).read_bytes() if number + 1 < RANKS else b""
    content = later + b"".join(parameter.grad.numpy().tobytes() for parameter in modules[0].parameters())
    (FOLDER / str(number)).write_text(hashlib.sha256(content).hexdigest())


needs = pl.Need("weight gradient"), pl.Need("hash", 1)  # of the next stage, which another rank may hold
pl.register_kind(pl.Kind("HASH", "hash", needs, makes=("hash",), queue="hashing", time=2.0), execute=digest)
programs = pl.schedules.one_f_one_b(RANKS, LAST + 1).programs
cells = [[*map(str, program), f"{rank}HASH{LAST}"] for rank, program in enumerate(programs)]
schedule = pl.Schedule.of(cells, placement=range(RANKS), microbatches=LAST + 1, name="hashed")

if __name__ == "__main__":
    pl.check(schedule)
    FOLDER.mkdir(exist_ok=True)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    make = Pipeline if dist.is_initialized() else Pipeline.local
    pipeline = make([Block(at) for at in range(RANKS)], schedule, loss=nn.functional.mse_loss)
    for step in range(2):
        pipeline.step(*torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step)))
        pipeline.zero_grad()
        if pipeline.rank == 0:
            print(f"step {step}: {(FOLDER / '0').read_text()}", terminal(pl.simulate(schedule), color=False), sep="\n")
    pipeline.close()
