"""Communications as two nodes of autograd: values, gradients, and the order in which things happen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeloom.ops.segments import Values, begin


@dataclass
class Underway:
    log: list[str]
    what: str
    values: Values

    def wait(self) -> Values:
        self.log.append(f"end {self.what}")
        return self.values


@dataclass
class Doubling:
    """Its results are twice what it was given; its backward doubles too."""

    name: str
    log: list[str] = field(default_factory=list)

    def start(self, values: Values) -> Underway:
        self.log.append(f"start {self.name}")
        return Underway(self.log, self.name, tuple(2 * v if isinstance(v, Tensor) else v for v in values))

    def start_backward(self, gradients: Values, saved: Values) -> Underway:
        self.log.append(f"start {self.name}'")
        assert saved[1] == "a plan"
        return Underway(self.log, f"{self.name}'", tuple(None if g is None else 2 * g for g in gradients))


class _Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        log.append(name)
        return 3 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.log.append(ctx.name + "'")
        return 3 * gradients[0], None, None


def test_values_and_gradients_are_those_of_one_communication() -> None:
    x = torch.randn(3, requires_grad=True)
    values = begin(Doubling("d"), (x * 5, "a plan", torch.arange(3)))()
    assert values[1] == "a plan"
    assert values[2].tolist() == [0, 2, 4]
    torch.testing.assert_close(values[0], 10 * x)
    values[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 10.0))
    with torch.no_grad():
        assert not begin(Doubling("d"), (x, "a plan"))()[0].requires_grad


def test_the_backward_overlaps_in_mirror_image_of_the_forward() -> None:
    """Two chunks: dispatch(1) is under way while experts(0) compute, combine(0) while experts(1) do; and so backwards."""
    log: list[str] = []
    x = torch.randn(2, 3, requires_grad=True)
    first, second = (begin(Doubling(f"dispatch{at}", log), (x[at] * 1, "a plan")) for at in (0, 1))
    ends = []
    for at, arrived in enumerate((first, second)):
        rows, plan = arrived()
        ends.append(begin(Doubling(f"combine{at}", log), (_Logged.apply(rows, log, f"experts{at}"), plan)))
    out = torch.stack([end()[0] for end in ends])
    forward = [*log]
    log.clear()
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 3), 12.0))
    for line in (forward, log):
        mark = "'" if line is log else ""
        one, other = ("1", "0") if line is log else ("0", "1")
        into, back = ("combine", "dispatch") if line is log else ("dispatch", "combine")
        assert line.index(f"start {into}{other}{mark}") < line.index(f"experts{one}{mark}")
        assert line.index(f"end {into}{other}{mark}") > line.index(f"experts{one}{mark}")
        assert line.index(f"start {back}{one}{mark}") < line.index(f"experts{other}{mark}")
        assert line.index(f"end {back}{one}{mark}") > line.index(f"experts{other}{mark}")
