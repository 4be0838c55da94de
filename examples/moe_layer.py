"""A mixture of experts in a training loop of your own; the experts are modules of any kind, and may be spread over processes.

python examples/moe_layer.py                                one process
torchrun --nproc-per-node 2 examples/moe_layer.py           half of the experts, and half of each batch, in each process
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from pipeloom.models import GateShape, MoELayer, TopKGate
from pipeloom.models.gate import take_loads
from pipeloom.parallel.data import allreduce_gradients

HIDDEN, EXPERTS, ROWS, STEPS = 16, 8, 256, 60


def expert() -> nn.Module:
    """One expert: any module that takes rows [rows, hidden] and returns as many."""
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))


def main() -> None:
    group, rank, world = None, 0, 1
    if "RANK" in os.environ:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same on every rank, so that all have the same gate
    layer = MoELayer(TopKGate(GateShape(HIDDEN, EXPERTS, num_experts_per_tok=2)), expert, group)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(ROWS, HIDDEN, generator=data).tensor_split(world)[rank]  # every rank has tokens of its own
        loss = (layer(x) - x.abs()).square().mean() / world  # of the mean over all ranks
        (loss + layer.aux_loss).backward()  # sends each expert the gradients of all ranks' tokens
        if group is not None:
            allreduce_gradients(layer.gate.parameters(), group)  # the gate is the same on every rank
            dist.all_reduce(loss)
        optimizer.step()
        optimizer.zero_grad()
        loads = take_loads(layer.gate)[:-1]  # of this rank's tokens, expert by expert
        if rank == 0 and step % 10 == 9:
            print(f"step {step} loss {loss.item():.4f}, loads {loads.min()} to {loads.max()}")
    if rank == 0:
        print(f"{len(layer.experts)} of {EXPERTS} experts in this process")


if __name__ == "__main__":
    main()
