"""Small segmented layers for the tests of the overlapped pair: one with experts over a process group, one that keeps a log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue
from pipeloom.ops.segments import Compute, Done, Pending, Segment, Values, in_order
from pipeloom.runtime import Layer, in_part

WIDTH = 6


class Sent:
    """An all-to-all under way."""

    def __init__(self, work: Any, given: Tensor, got: Tensor, others: Values) -> None:
        self.work, self.given, self.got, self.others = work, given, got, others

    def wait(self) -> Values:
        self.work.wait()
        return self.got, *self.others


class AllToAll:
    """Rows of the first value to the ranks of a group, by the splits (out, back) that travel as the last value."""

    quick = False

    def __init__(self, name: str, group: Any, home: bool) -> None:
        self.name = name
        self.group = group
        self.home = home

    def start(self, values: Values) -> Pending:
        return self._exchange(values, values[-1], self.home)

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        return self._exchange(gradients, saved[-1], not self.home)

    def _exchange(self, values: Values, splits: Any, home: bool) -> Pending:
        if self.group is None:
            return Done(values)
        sends, receives = splits[::-1] if home else splits
        rows = values[0].contiguous()
        got = rows.new_empty(sum(receives), rows.shape[1])
        work = dist.all_to_all_single(got, rows, receives, sends, group=self.group, async_op=True)
        return Sent(work, rows, got, values[1:])


class Experts(nn.Module):
    """A block with one expert a rank of `group` (all of them here where it is None), chosen by a gate a token."""

    def __init__(self, seed: int, experts: int, group: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.experts, self.group = experts, group
        self.norm = nn.LayerNorm(WIDTH)
        self.mix, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, experts, bias=False)
        mine = range(experts) if group is None else [dist.get_rank(group)]
        self.up = nn.ModuleDict({str(expert): nn.Linear(WIDTH, WIDTH) for expert in range(experts)})
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        for expert in set(range(experts)) - set(mine):
            del self.up[str(expert)]

    def segments(self) -> Sequence[Segment]:
        return (
            Compute("attention", self.attend),
            AllToAll("dispatch", self.group, home=False),
            Compute("experts", self.compute),
            AllToAll("combine", self.group, home=True),
            Compute("sum", self.sum),
        )

    def forward(self, x: Tensor) -> Tensor:
        (out,) = in_order(self.segments(), (x,))
        return out  # type: ignore[no-any-return]

    def attend(self, values: Values) -> Values:
        (x,) = values
        mixed = x + torch.tanh(self.mix(in_part("norms", self.norm, x)))
        tokens = mixed.reshape(-1, WIDTH)
        chances = self.gate(tokens).softmax(-1)
        weight, chosen = chances.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.experts)
        splits: Any = counts
        if self.group is not None:
            receives = torch.empty_like(counts)
            dist.all_to_all_single(receives, counts, group=self.group)
            splits = counts.tolist(), receives.tolist()
        return tokens[order], mixed, weight, order, splits

    def compute(self, values: Values) -> Values:
        rows, *others, splits = values
        if self.group is None:
            parts = rows.split(splits.tolist())
            done = torch.cat([in_part("mlp", self.up[str(e)], part).tanh() for e, part in enumerate(parts)])
        else:
            done = in_part("mlp", self.up[str(dist.get_rank(self.group))], rows).tanh()
        return done, *others, splits

    def sum(self, values: Values) -> Values:
        rows, mixed, weight, order, _ = values
        back = torch.empty_like(rows).index_copy(0, order, rows)
        return (mixed + (weight[:, None] * back).view_as(mixed),)


class Dense(nn.Module):
    """A layer that declares nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def expert_layers(count: int, experts: int, group: Any) -> list[Layer]:
    """Blocks with experts, every third layer dense."""

    def build(at: int) -> nn.Module:
        return Dense(at) if at % 3 == 2 else Experts(at, experts, group)

    return [Layer(f"layer{at}", lambda at=at: build(at)) for at in range(count)]


class _Noted(torch.autograd.Function):
    """x times a weight; notes its forward, its backward, and its weight gradient where that waits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, name: str, log: list[str], queue: WeightGradQueue | None
    ) -> Tensor:
        log.append(f"F.{name}")
        ctx.save_for_backward(x, weight)
        ctx.note = name, log, queue, weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        name, log, queue, parameter = ctx.note
        log.append(f"B.{name}")
        gradient = gradients[0]
        if queue is None:
            return gradient * weight, (gradient * x).sum_to_size(weight.shape), None, None, None

        def pay() -> None:
            log.append(f"W.{name}")
            own = (gradient * x).sum_to_size(parameter.shape)
            parameter.grad = own if parameter.grad is None else parameter.grad + own

        queue.put(pay)
        return gradient * weight, None, None, None, None


class _NotedPending:
    def __init__(self, name: str, log: list[str], values: Values) -> None:
        self.name, self.log, self.values = name, log, values

    def wait(self) -> Values:
        self.log.append(f"wait {self.name}")
        return self.values


class NotedMove:
    """Reverses the first value, and notes when it starts and when it is waited for."""

    def __init__(self, name: str, log: list[str], quick: bool = False) -> None:
        self.name, self.log, self.quick = name, log, quick

    def start(self, values: Values) -> Pending:
        self.log.append(f"start F.{self.name}")
        return _NotedPending(f"F.{self.name}", self.log, (values[0].flip(0), *values[1:]))

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        self.log.append(f"start B.{self.name}")
        return _NotedPending(f"B.{self.name}", self.log, (gradients[0].flip(0), *gradients[1:]))


class Noted(nn.Module):
    """A block that writes what it does into a log."""

    def __init__(self, label: str, log: list[str]) -> None:
        super().__init__()
        self.label, self.log = label, log
        self.attention = nn.Parameter(torch.linspace(0.5, 1.0, WIDTH))
        self.experts = nn.Parameter(torch.linspace(1.0, 1.5, WIDTH))
        self.grad_context = WeightGradContext()

    def set_weight_grad_context(self, grad_context: WeightGradContext) -> None:
        self.grad_context = grad_context

    def segments(self) -> Sequence[Segment]:
        return (
            Compute("attention", lambda values: (self._noted("attention", values[0]), values[0])),
            NotedMove(f"dispatch{self.label}", self.log),
            Compute("experts", lambda values: (self._noted("experts", values[0]), values[1])),
            NotedMove(f"combine{self.label}", self.log),
            Compute("sum", lambda values: (values[0] + values[1],)),
        )

    def forward(self, x: Tensor) -> Tensor:
        (out,) = in_order(self.segments(), (x,))
        return out  # type: ignore[no-any-return]

    def _noted(self, name: str, x: Tensor) -> Tensor:
        weight = getattr(self, name)
        return _Noted.apply(x, weight, f"{name}{self.label}", self.log, self.grad_context.queue)  # type: ignore[no-any-return]
