"""A model with a mixture of experts whose router draws, ported: trained in a loop of one's own and in a Pipeline, and compared.

python examples/moe_port.py                                 one process
torchrun --nproc-per-node 2 examples/moe_port.py            the loop spreads the experts, and the Pipeline the layers
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pipeloom as pl
from pipeloom.models import GateShape, MoELayer, TopKGate
from pipeloom.parallel.data import allreduce_gradients
from pipeloom.runtime import Pipeline

HIDDEN, EXPERTS, ROWS, MICROBATCHES, STEPS, RATE = 16, 8, 128, 4, 60, 0.1


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.ReLU(), nn.Linear(2 * HIDDEN, HIDDEN))


def model(group: Any = None) -> nn.Sequential:
    torch.manual_seed(0)  # the same first weights on every rank, and in the loop and the Pipeline
    gate = TopKGate(GateShape(HIDDEN, EXPERTS, num_experts_per_tok=2, router="gshard"))
    mixture = MoELayer(gate, expert, group)
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), mixture, nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(step))
    return x, x.abs()


def in_a_loop(group: Any, rank: int, world: int) -> float:
    """Train over `world` ranks, each with its share of the experts and of each step's micro-batches."""
    net = model(group)
    moe, shared = net[1], [p for name, p in net.named_parameters() if ".experts." not in name]
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    torch.manual_seed(1 + rank)  # other random numbers on each rank: dropout, and the choice of second experts
    accumulated = MICROBATCHES // world
    for step in range(STEPS):
        microbatches = list(zip(*(each.chunk(MICROBATCHES) for each in batch(step)), strict=True))
        for x, target in microbatches[rank::world]:
            task = mse_loss(net(x), target)
            ((task / world + moe.aux_loss) / accumulated).backward()
        if group is not None:
            allreduce_gradients(shared, group)  # each expert has received the gradients of all ranks' tokens
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        x, target = (each.chunk(world)[rank] for each in batch(STEPS))
        loss = mse_loss(net(x), target) / world
    if group is not None:
        dist.all_reduce(loss)
    return loss.item()


def in_a_pipeline(world: int) -> float:
    """Train with the layers over `world` ranks; the Pipeline weighs each micro-batch's losses itself."""
    pipeline = Pipeline(list(model()), pl.schedules.one_f_one_b(world, MICROBATCHES), loss=mse_loss)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        pipeline.step(*batch(step))
        optimizer.step()
        optimizer.zero_grad()
    pipeline.eval()
    loss = pipeline.evaluate(*batch(STEPS)).item()
    pipeline.close()
    return loss


def main() -> None:
    group, rank, world = None, 0, 1
    if "RANK" in os.environ:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    loop, pipeline = in_a_loop(group, rank, world), in_a_pipeline(world)
    if rank == 0:
        print(f"held-out loss: loop {loop:.4f}, Pipeline {pipeline:.4f}")


if __name__ == "__main__":
    main()
