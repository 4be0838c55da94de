"""Stages over two replicas that gather and free their parameters as the schedule says: when they are whole, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, batch, mse
from pipeloom.errors import ConfigError, UsageError
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

ORDER = (
    "0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 1B0 1REDUCE_GRAD 1B1 1RESHARD 1REDUCE_GRAD "
    "0UNSHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD"
)


class Watched(nn.Linear):
    """A layer that notes, in each forward and backward, which layers' parameters are whole."""

    def __init__(self, every: list[nn.Module], notes: list[str]) -> None:
        torch.manual_seed(len(every))
        super().__init__(WIDTH, WIDTH)
        self._every, self._notes = [every], notes
        every.append(self)

    def note(self, *_: Any) -> None:
        self._notes.append(whole(self._every[0]))

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        x = super().forward(x).tanh()
        if x.requires_grad:
            x.register_hook(self.note)
        return x


def whole(layers: list[nn.Module]) -> str:
    """The numbers of the layers whose parameters have memory."""
    sizes = [{p.untyped_storage().nbytes() > 0 for p in layer.parameters()} for layer in layers]
    assert all(len(size) == 1 for size in sizes)
    return "".join(str(at) for at, (there,) in enumerate(sizes) if there)


def steps(rank: int) -> dict[str, Any]:
    every: list[nn.Module] = []
    notes: list[str] = []
    layers = [Layer(f"l{at}", lambda: Watched(every, notes)) for at in range(2)]
    schedule = pl.Schedule.of([ORDER.split()], placement=[0, 0], microbatches=2)
    mesh = Mesh.of(MeshShape(dp=2))
    options = RuntimeOptions(monitor=False, shard_gradients=True)
    pipeline = Pipeline(layers, schedule, loss=mse, mesh=mesh, options=options)
    assert pipeline.sync is not None
    pipeline.sync.fills_grad = False
    x, y = batch(4, seed=rank)
    loss = float(pipeline.step(x, y))
    during, after = list(notes), whole(every)
    result = {"loss": loss, "during": during, "after": after, "part": sum(b.part.nbytes for b in pipeline.sync.buckets)}
    gradients = pipeline.sync.whole_gradients()
    result["gradients"] = {name: gradient.tolist() for name, gradient in gradients.items() if gradient is not None}
    result["buffers"] = sum(bucket.flat.nbytes for bucket in pipeline.sync.buckets)
    notes.clear()
    result["evaluated"] = float(pipeline.evaluate(x, y))
    result["evaluation"] = list(notes)
    pipeline.load_state_dict({name: 0 * value for name, value in pipeline.state_dict().items()})
    result["between"] = whole(every)
    result["zeros"] = float(pipeline.step(x, y))
    with pytest.raises(UsageError, match="no_sync: the schedule reduces gradients by REDUCE_GRAD"), pipeline.no_sync():
        pass
    with pytest.raises(ConfigError, match="cannot change its gathers and reductions by stage"):
        pipeline.adopt(
            pl.Schedule.of([["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]], placement=[0, 0], microbatches=2)
        )
    pipeline.close()
    return result


def test_parameters_are_whole_only_where_the_schedule_says_so() -> None:
    results = run_ranks(steps, 2)
    every: list[nn.Module] = []
    model = nn.Sequential(Watched(every, []), Watched(every, []))
    (x, y), (u, v) = batch(4, seed=0), batch(4, seed=1)
    loss = mse(model(torch.cat((x, u))), torch.cat((y, v)))
    loss.backward()  # type: ignore[no-untyped-call]
    for found in results:
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert found["during"] == ["0", "0", "1", "1", "1", "1", "0", "0"]
        assert found["after"] == ""
        assert found["buffers"] == 0
        elements = sum(p.numel() for p in model.parameters())
        assert elements * 4 / 2 <= found["part"] < elements * 4 / 2 + 4 * 4 * 64  # half of each bucket, aligned
        for name, parameter in zip(("l0.weight", "l0.bias", "l1.weight", "l1.bias"), model.parameters(), strict=True):
            assert torch.allclose(torch.tensor(found["gradients"][name]), parameter.grad, atol=1e-7)  # type: ignore[arg-type]
        assert found["evaluated"] == pytest.approx(loss.item(), rel=1e-6)
        assert found["evaluation"] == ["0", "0", "1", "1"]
        assert found["between"] == "01"
        assert found["zeros"] == pytest.approx(float(torch.cat((y, v)).square().mean()), rel=1e-6)
