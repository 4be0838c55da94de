"""Loads of experts and the biases that they move: the same over replicas and ranks as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.config import load
from pipeloom.measure.build import build_pipeline
from pipeloom.models.gate import gates_of
from pipeloom.parallel.mesh import Mesh
from pipeloom.train.observers import ExpertLoads, observers
from processes import run_ranks
from resolved import resolve

pytestmark = pytest.mark.core

MODEL = {
    "model.num_experts": 4,
    "model.num_hidden_layers": 3,
    "model.moe_layer_freq": 2,  # block 1 is dense
    "schedule.name": "1f1b",
    "schedule.microbatches": 2,
    "train.global_batch_size": 8,
    "train.device": "cpu",
    "log.every": 2,
}


def after_steps(
    rank: int, changes: dict[str, Any], steps: int = 2
) -> tuple[tuple[float, float] | None, tuple[float, float] | None, list[list[float]]]:
    """Loads of two steps, of which the second has a log line, and the biases of this rank's gates."""
    layout = resolve(load("tiny", MODEL | changes))
    mesh = Mesh.of(layout.mesh) if dist.is_initialized() else None
    pipeline = build_pipeline(layout, torch.device("cpu"), mesh)
    experts = ExpertLoads(layout.config, pipeline)
    replica = mesh.place.dp if mesh is not None else 0
    rows = 8 // layout.mesh.dp
    found = []
    for step in range(steps):
        both = torch.randint(0, 256, (2, 8, 16), generator=torch.Generator().manual_seed(step))
        tokens, targets = both[:, replica * rows : (replica + 1) * rows]
        pipeline.step(tokens, targets)
        if any(row.name == "expert loads" and row.due(step + 1) for row in observers(layout.config)):
            experts.collect()
        found.append(experts.take())
    biases = [
        gate.e_score_correction_bias.tolist()
        for gate in gates_of(pipeline.modules.values())
        if gate.gate.router == "sigmoid"
    ]
    pipeline.close()
    return found[0], found[1], biases


def test_replicas_and_pipeline_ranks_agree_with_one_process() -> None:
    """Four micro-batches in one process are two on each of two replicas."""
    sigmoid = {"model.router": "sigmoid", "model.capacity_factor": 0.8}
    one = after_steps(0, sigmoid | {"parallel.pp": 1, "schedule.microbatches": 4})
    assert one[0] is not None
    assert one[1] is not None
    assert one[0][0] > 1
    assert 0 < one[0][1] < 0.5
    assert all(any(bias) for bias in one[2])
    spread = sigmoid | {"parallel.pp": 2, "parallel.dp": 2, "parallel.ep": 2}
    ranks = run_ranks(after_steps, 4, spread)
    assert all(rank[:2] == one[:2] for rank in ranks)
    assert [bias for rank in (ranks[0], ranks[2]) for bias in rank[2]] == one[2]
    assert ranks[1][2] == ranks[0][2]


def test_a_model_without_experts_or_biases_needs_nothing() -> None:
    dense = after_steps(0, {"model.num_experts": 0, "model.moe_layer_freq": 1, "parallel.pp": 1})
    assert dense == (None, None, [])
    softmax = after_steps(0, {"parallel.pp": 1})
    assert softmax[0] is None
    assert softmax[1] is not None
    assert softmax[1][1] == 0


def test_loads_are_largest_over_mean_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of which one is even and the other sends everything to one of four experts."""
    layout = resolve(load("tiny", MODEL | {"parallel.pp": 1}))
    pipeline = build_pipeline(layout, torch.device("cpu"))
    tables = iter([torch.tensor([8, 8, 8, 8, 0]), torch.tensor([0, 0, 32, 0, 16])])

    def made_up(gate: Any) -> Tensor:
        return next(tables)

    monkeypatch.setattr("pipeloom.train.observers.take_loads", made_up)
    experts = ExpertLoads(layout.config, pipeline)
    assert experts.take() is None
    experts.collect()
    assert experts.take() == (4.0, 0.25)
    assert experts.take() is None
    pipeline.close()
