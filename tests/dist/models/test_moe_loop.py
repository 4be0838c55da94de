"""`MoELayer` in a training loop of one's own against one process with the same micro-batches and plain formulas of the losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from layouts import worst
from pipeloom.models import GateShape, MoELayer, TopKGate
from pipeloom.parallel.context import ContextParallel
from pipeloom.parallel.data import allreduce_gradients
from pipeloom.parallel.mesh import Axis
from processes import run_ranks

HIDDEN, EXPERTS, BALANCE, Z = 6, 8, 0.7, 0.3
CASES = [(accumulated, scale) for accumulated in (1, 4) for scale in (1.0, 1024.0)]


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 8), nn.GELU(), nn.Linear(8, HIDDEN))


class Net(nn.Module):
    def __init__(self, group: Any = None, balance: float = BALANCE, z: float = Z) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        shape = GateShape(HIDDEN, EXPERTS, 2, aux_loss_coef=balance, z_loss_coef=z)
        self.moe = MoELayer(TopKGate(shape), expert, group)
        self.last = nn.Linear(HIDDEN, HIDDEN)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.moe(torch.tanh(self.first(x))))  # type: ignore[no-any-return]


def microbatch(number: int) -> Tensor:
    """[2, 8, HIDDEN], whose tokens prefer other experts in every micro-batch."""
    drawn = torch.randn(3, 8, HIDDEN, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return drawn[:2] + 2 * drawn[2, 0]


def task(net: Net, x: Tensor) -> Tensor:
    return (net(x) - x.abs()).square().mean()


def in_one_process(count: int) -> tuple[dict[str, Tensor], float]:
    """The gradients of the mean over micro-batches 0 to `count` - 1, and the mean of their auxiliary losses."""
    net, total = Net(balance=0.0, z=0.0), torch.zeros((), dtype=torch.float64)
    for number in range(count):
        x = microbatch(number)
        logits = torch.tanh(net.first(x)).flatten(0, 1) @ net.moe.gate.weight.t()
        chosen = logits.topk(2).indices
        shares = F.one_hot(chosen, EXPERTS).sum((0, 1)) / chosen.numel()
        balance = EXPERTS * (shares * logits.softmax(-1).mean(0)).sum()
        total = total + BALANCE * balance + Z * logits.logsumexp(-1).square().mean()
        (task(net, x) / count).backward()
    (total / count).backward()
    return {name: p.grad for name, p in net.named_parameters()}, total.item() / count


def gradients(net: Net, world: int, rank: int) -> dict[str, Tensor]:
    """The gradients of this rank, under the names of one process."""
    held, found = EXPERTS // world, {}
    for name, parameter in net.named_parameters():
        head, experts, tail = name.partition("moe.experts.")
        at, _, leaf = tail.partition(".")
        found[f"{head}{experts}{int(at) + rank * held}.{leaf}" if experts else name] = parameter.grad
    return found


def errors(rank: int, world: int, cp: int) -> list[float]:
    """The largest error of each case, relative to the parameter's gradient; and that of the auxiliary losses' value."""
    group = dist.group.WORLD if world > 1 else None
    axes = [list(range(first, first + cp)) for first in range(0, world, cp)] if cp > 1 else []
    groups = [dist.new_group(ranks) for ranks in axes]
    found = []
    for accumulated, scale in CASES:
        net = Net(group)
        if cp > 1:
            at = rank // cp
            net.moe.gate.context = ContextParallel(Axis(tuple(axes[at]), rank % cp, groups[at]))
        optimizer, scaler = torch.optim.SGD(net.parameters()), torch.amp.GradScaler("cpu", init_scale=scale)
        count, added = accumulated * world // cp, torch.zeros((), dtype=torch.float64)
        for number in range(rank // cp, count, world // cp):
            x = microbatch(number).tensor_split(cp, 1)[rank % cp]
            loss = task(net, x) / world
            added += net.moe.aux_loss.detach() / accumulated
            scaler.scale((loss + net.moe.aux_loss) / accumulated).backward()
        if group is not None:
            allreduce_gradients([p for name, p in net.named_parameters() if "experts" not in name], group)
            dist.all_reduce(added)
        scaler.unscale_(optimizer)
        want, value = in_one_process(count)
        ours = gradients(net, world, rank)
        found.append(worst(ours, {name: want[name] for name in ours}))
        found.append(abs(added.item() - value) / value)
    return found


@pytest.mark.core
def test_one_process() -> None:
    """Each gradient of accumulation 1 and 4 with a scaler of 1 and 1024."""
    assert max(errors(0, 1, 1)) < 1e-12


@pytest.mark.parametrize(("world", "cp"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_experts_over_ranks(world: int, cp: int) -> None:
    """The same over 2 and 4 ranks; and where two ranks share each micro-batch's tokens, whose counts the losses need."""
    assert max(map(max, run_ranks(errors, world, world, cp))) < 1e-12
