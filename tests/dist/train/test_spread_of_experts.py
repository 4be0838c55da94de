"""The trainer spreads experts as [parallel] says: counted by the all-to-alls of a step, whose results do not tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeloom.config import load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.parallel.mesh import Mesh
from processes import run_ranks

pytestmark = pytest.mark.core


BASE = {
    "model.num_experts": 4,
    "model.num_experts_per_tok": 2,
    "model.num_hidden_layers": 2,
    "parallel.pp": 1,
    "parallel.dp": 2,
    "parallel.ep": 2,
    "schedule.name": "gpipe",
    "schedule.microbatches": 1,
    "train.global_batch_size": 4,
}
# per block: tokens to the experts and back, each with a backward; across nodes and inside them; counts apart
SPREADS: dict[str, dict[str, Any]] = {
    "ep": {},
    "ep_chunks": {"parallel.ep_chunks": 2},
    "ep_blocks": {"parallel.ep_blocks": 2},
    "ep_nodes": {"parallel.ep_nodes": 2},
}


def exchanges(rank: int) -> dict[str, dict[str, int]]:
    """For each spread, how many all-to-alls of rows a step has, and how many columns travel beside them in all."""
    real, rows, widths = dist.all_to_all_single, [0], [0]

    def counting(output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if output.is_floating_point():
            rows[0] += 1
            widths[0] += output.ndim > 1 and output.shape[1] == 2  # weights of a token's choices
        return real(output, *arguments, **options)

    dist.all_to_all_single = counting
    found = {}
    for name, keys in SPREADS.items():
        layout = load_layout("tiny", {**BASE, **keys})
        pipeline = build_pipeline(layout, torch.device("cpu"), Mesh.of(layout.mesh))
        rows[0] = widths[0] = 0
        tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(rank))
        pipeline.step(tokens, tokens)
        found[name] = {"rows": rows[0], "weights": widths[0]}
        pipeline.close()
    return found


def test_every_way_of_spreading_reaches_the_model() -> None:
    found = run_ranks(exchanges, 2)[0]
    blocks, there_and_back_twice = 2, 4
    assert found["ep"] == {"rows": blocks * there_and_back_twice, "weights": 0}
    assert found["ep_chunks"]["rows"] == 2 * found["ep"]["rows"]
    assert found["ep_blocks"]["rows"] == 2 * found["ep"]["rows"]
    assert found["ep_nodes"]["weights"] > 0  # across nodes a row travels once, with the weights of its choices
