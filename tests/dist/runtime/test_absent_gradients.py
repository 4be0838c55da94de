"""Gradients that are None: between steps, and in messages; that they are None where one process has None is the fuzzer's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block, batch, gradients, mse
from pipeloom.errors import UsageError
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.runtime.tensor_spec import ShapeCache
from pipeloom.schedule.channels import Channel, Edge, Message

S = pl.schedules


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


def pipeline_of(options: RuntimeOptions) -> Pipeline:
    """Two steps of the layer alone, in the second of which, under no_sync, the second weight is not used."""
    pipeline = Pipeline([Layer("middle", lambda: Sometimes(7))], S.gpipe(1, 4), loss=mse, options=options)
    pipeline.step(*data(True))
    with pipeline.no_sync():
        pipeline.step(*data(False))
    return pipeline


def data(used: bool) -> tuple[Tensor, Tensor]:
    """8 rows, by whose first elements the second weight is used or not."""
    inputs, targets = batch(8, seed=int(used))
    inputs[:, 0, 0] = inputs[:, 0, 0].abs() * (1 if used else -1)
    return inputs, targets


@pytest.mark.core
def test_gradients_that_the_caller_drops_or_writes_between_steps() -> None:
    """After a step under no_sync, whose gradients wait for the next sum: what is dropped does not come back, and what is written
    counts.
    """
    last = pipeline_of(RuntimeOptions())
    last.zero_grad()
    last.step(*data(True))
    alone = gradients(last)
    pipeline = pipeline_of(RuntimeOptions(main_gradients=True))
    parameters = dict(pipeline.named_parameters())
    parameters["middle.linear.weight"].grad = None
    pipeline.step(*data(True))
    found = gradients(pipeline)
    torch.testing.assert_close(found["middle.linear.weight"], alone["middle.linear.weight"], rtol=1e-4, atol=1e-6)
    assert not torch.equal(found["middle.second.weight"], alone["middle.second.weight"])

    pipeline.zero_grad()
    with pipeline.no_sync():
        pipeline.step(*data(False))
    unused = parameters["middle.second.weight"]
    assert unused.grad is None
    unused.grad = torch.ones_like(unused)
    pipeline.step(*data(False))
    assert unused.grad is not None
    assert torch.equal(unused.grad, torch.ones_like(unused))


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
