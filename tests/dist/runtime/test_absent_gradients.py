"""A gradient is None where one process has None: behind a detach, before integers, in what nobody uses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block, batch, blocks, mse
from pipeloom.config import MeshShape, load
from pipeloom.errors import UsageError
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.runtime.tensor_spec import ShapeCache
from pipeloom.schedule.channels import Channel, Edge, Message
from pipeloom.train.optimizer import Optimizer
from processes import run_ranks

S = pl.schedules


class Detach(Block):
    """A block that no gradient passes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Sometimes(Block):
    """Uses its second weight only for micro-batches whose first element is positive."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.second = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.second.weight.copy_(torch.eye(WIDTH) * 0.3)
            self.second.bias.fill_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.second(x) if x.detach().flatten()[0].item() > 0 else out


class Spare(Block):
    """A block with a weight that nobody uses."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.spare = nn.Linear(WIDTH, WIDTH)


def layers(kind: str) -> list[Layer]:
    before, after = blocks(3), [Layer(f"after{i}", lambda i=i: Block(10 + i)) for i in range(2)]
    if kind == "sometimes":  # it looks at the data itself
        return [Layer("middle", lambda: Sometimes(7)), *before, *after]
    middle = {"detach": Detach, "spare": Spare}[kind]
    return [*before, Layer("middle", lambda: middle(7)), *after]


def data(step: int, replica: int, kind: str) -> tuple[Tensor, Tensor]:
    """8 rows; for `sometimes` replica 1 of an even step is the only one with positive first elements."""
    inputs, targets = batch(8, seed=10 * step + replica)
    if kind == "sometimes":
        inputs[:, 0, 0] = inputs[:, 0, 0].abs() * (1 if step % 2 == 0 and replica else -1)
    return inputs, targets


def serial(kind: str, replicas: int = 1, steps: int = 1, count: int = 4) -> dict[str, list[float] | None]:
    """The gradients of one process that sees every micro-batch of every replica."""
    built = [(layer.name, layer()) for layer in layers(kind)]
    for step in range(steps):
        for replica in range(replicas):
            inputs, targets = data(step, replica, kind)
            for x, y in zip(inputs.split(2), targets.split(2), strict=True):
                values: Any = (x,)
                for _, module in built:
                    out = module(*values)
                    values = out if isinstance(out, tuple) else (out,)
                (mse(values[0], y) / (count * replicas)).backward()
    return {f"{name}.{inner}": as_list(p.grad) for name, m in built for inner, p in m.named_parameters()}


def as_list(gradient: Tensor | None) -> list[float] | None:
    return None if gradient is None else gradient.flatten().tolist()


def check(found: dict[str, list[float] | None], want: dict[str, list[float] | None]) -> None:
    assert found.keys() <= want.keys()
    assert {n for n, g in found.items() if g is None} == {n for n in found if want[n] is None}
    for name, gradient in found.items():
        if gradient is not None:
            torch.testing.assert_close(torch.tensor(gradient), torch.tensor(want[name]), rtol=1e-4, atol=1e-6, msg=name)


def replicas(rank: int, pp: int) -> dict[str, Any]:
    mesh = Mesh.of(MeshShape(pp=pp, dp=2))
    assert mesh is not None
    found: dict[str, Any] = {}
    for kind in ("detach", "spare", "sometimes"):
        for transport in ("shared", "individual"):
            for main, shard in ((False, False), (False, True)):
                options = RuntimeOptions(
                    transport=transport,
                    monitor=False,
                    main_gradients=main,
                    shard_gradients=shard,  # type: ignore[arg-type]
                )
                schedule = S.zb_h1(pp, 4) if transport == "shared" else S.one_f_one_b(pp, 4)
                pipeline = Pipeline(layers(kind), schedule, loss=mse, mesh=mesh, options=options)
                assert pipeline.sync is not None
                for steps in (1, 2, 3, 4):  # added up, as without zero_grad; the second step is reduced with the third
                    with pipeline.no_sync() if steps == 2 else contextlib.nullcontext():
                        pipeline.step(*data(steps - 1, mesh.place.dp, kind))
                    if steps != 2:
                        gradients = {
                            name: as_list(pipeline.sync.gradient(name) if shard else p.grad)
                            for name, p in pipeline.named_parameters()
                        }
                        if shard:  # of which this rank has the sum of its slice only: None or not is what counts
                            gradients = {name: None if g is None else [] for name, g in gradients.items()}
                        found[f"{kind}/{transport}/{shard}/{steps}"] = gradients
                pipeline.close()
    return found


@pytest.mark.parametrize("pp", [1, 2])
def test_replicas(pp: int) -> None:
    """A gradient is None iff it is None on every replica: not on the one that does not use it alone."""
    for rank, found in enumerate(run_ranks(replicas, 2 * pp, pp)):
        for case, gradients in found.items():
            kind, _, shard, steps = case.split("/")
            want = serial(kind, replicas=2, steps=int(steps))
            if shard == "True":
                want = {name: None if g is None else [] for name, g in want.items()}
            try:
                check(gradients, want)
            except AssertionError as error:
                raise AssertionError(f"rank {rank}, {case}: {error}") from None


@pytest.mark.core
def test_gradients_that_the_caller_drops_or_writes_between_steps() -> None:
    """After a step under no_sync, whose gradients wait for the next sum: what is dropped does not come back, and what is written
    counts.
    """

    def accumulated(options: RuntimeOptions) -> Pipeline:
        pipeline = Pipeline(layers("sometimes"), S.gpipe(1, 4), loss=mse, options=options)
        pipeline.step(*data(0, 1, "sometimes"))
        with pipeline.no_sync():
            pipeline.step(*data(1, 1, "sometimes"))
        return pipeline

    last = accumulated(RuntimeOptions())
    last.zero_grad()
    last.step(*data(2, 1, "sometimes"))
    alone = {name: as_list(p.grad) for name, p in last.named_parameters()}

    pipeline = accumulated(RuntimeOptions(main_gradients=True))
    parameters = dict(pipeline.named_parameters())
    parameters["middle.linear.weight"].grad = None
    pipeline.step(*data(2, 1, "sometimes"))
    check({"middle.linear.weight": as_list(parameters["middle.linear.weight"].grad)}, alone)
    assert as_list(parameters["middle.second.weight"].grad) != alone["middle.second.weight"]

    pipeline.zero_grad()
    with pipeline.no_sync():
        pipeline.step(*data(1, 1, "sometimes"))
    unused = parameters["middle.second.weight"]
    assert unused.grad is None
    unused.grad = torch.ones_like(unused)
    pipeline.step(*data(3, 1, "sometimes"))
    assert unused.grad is not None
    assert torch.equal(unused.grad, torch.ones_like(unused))


OPTIONS = load("tiny").optimizer.model_copy(update={"lr": 0.05, "weight_decay": 0.3, "clip_norm": 0.0})


def trained(rank: int) -> dict[str, Any]:
    """Four steps of AdamW, `second` being used in the even ones only."""
    mesh = Mesh.of(MeshShape(dp=2))
    assert mesh is not None
    found = {}
    for shard in (False, True):
        options = RuntimeOptions(monitor=False, shard_gradients=shard)
        pipeline = Pipeline(layers("sometimes"), S.gpipe(1, 4), loss=mse, mesh=mesh, options=options)
        optimizer = Optimizer(list(pipeline.named_parameters()), OPTIONS, pipeline.sync, pipeline.counts_in_norm)
        for step in range(4):
            pipeline.step(*data(step, rank, "sometimes"))
            optimizer.square_norm()
            optimizer.step(None, OPTIONS.lr)
        found[str(shard)] = {name: as_list(p.detach()) for name, p in pipeline.named_parameters()}
        pipeline.close()
    return found


@pytest.mark.core
def test_an_optimizer_leaves_what_nobody_used_alone() -> None:
    """Neither weight decay nor momentum nor a step count, with gradients sharded or whole."""
    built = [(layer.name, layer()) for layer in layers("sometimes")]
    named = [(f"{name}.{inner}", p) for name, module in built for inner, p in module.named_parameters()]
    adam = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": OPTIONS.weight_decay},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=OPTIONS.lr,
        betas=OPTIONS.betas,
    )
    for step in range(4):
        adam.zero_grad()
        for replica in range(2):
            inputs, targets = data(step, replica, "sometimes")
            for x, y in zip(inputs.split(2), targets.split(2), strict=True):
                for _, module in built:
                    x = module(x)
                (mse(x, y) / 8).backward()
        adam.step()
    want = {name: as_list(p.detach()) for name, p in named}
    for found in run_ranks(trained, 2):
        for case, weights in found.items():
            for name, values in weights.items():
                torch.testing.assert_close(
                    torch.tensor(values), torch.tensor(want[name]), rtol=1e-4, atol=1e-5, msg=f"{case} {name}"
                )


@pytest.mark.core
def test_a_gradient_that_comes_and_goes_asks_for_shapes_each() -> None:
    """The first message said that there is none, and the other rank drops what comes in its place."""
    channel = Channel(1, 0, "gradient")
    first, second = (Message(channel, Edge(0, 1, "output"), number, number) for number in range(2))
    shapes = ShapeCache("once")
    shapes.begin(["same shape", "same shape"])
    assert (shapes.needs_header(first), shapes.needs_header(second)) == (True, False)
    shapes.set_missing_gradients(first, (0,))
    shapes.require_same_missing(second, (0,))
    with pytest.raises(UsageError, match=r'input of stage 1 has a gradient for micro-batch 1.*set shapes = "each"'):
        shapes.require_same_missing(second, ())
