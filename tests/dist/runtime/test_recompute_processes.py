"""R of a stage, of its parts and in blocks (R;B), in processes: bitwise the gradients of the schedule without it, dropout on."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from pipeloom.models import layers, token_loss
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.runtime import Pipeline
from pipeloom.schedule import Schedule, simulate
from pipeloom.schedule.transforms import recompute
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

S = pl.schedules
SCHEDULES = [S.one_f_one_b(2, 4), S.interleaved(2, 4), S.zb_h1(2, 4), S.zbv(2, 4), S.build("dualpipe", 2, 4)]
WAYS: list[dict[str, Any]] = [
    {},  # in blocks
    {"whole": True},
    *({"part": part} for part in ("norms", "activation", "attention", "mlp", "1/2")),
]
SIZES = {"vocab_size": 16, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "dropout": 0.2}
DENSE = DecoderShape(num_hidden_layers=4, num_key_value_heads=1, qk_norm=True, **SIZES)
SPARSE = DecoderShape(num_hidden_layers=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, **SIZES)


def step(schedule: Schedule, shape: DecoderShape, mesh: Mesh) -> tuple[list[Tensor], int]:
    tensor = TensorParallel(mesh.tp, False) if mesh.tp.size > 1 else None
    loss = token_loss(shape, tensor=tensor)
    pipeline = Pipeline(layers(shape, 0, tensor=tensor), schedule, loss=loss, mesh=mesh)
    generator = torch.Generator().manual_seed(mesh.dp.index)
    total = pipeline.step(*torch.randint(0, 16, (2, 2 * schedule.microbatches + 1, 6), generator=generator))
    gradients = [parameter.grad for parameter in pipeline.parameters()]
    peak = pipeline.stats.peak_activations
    pipeline.close()
    return [total, *gradients], peak


def work(rank: int, shape: DecoderShape, sizes: dict[str, int], first: int) -> list[str]:
    """The schedules whose results differ, or whose peak is not the simulated one; with two ways each, in turn."""
    mesh = Mesh.of(MeshShape(**sizes))
    assert mesh is not None
    wrong = []
    ways = cycle(WAYS[first:] + WAYS[:first])
    for plain in SCHEDULES:
        want, _ = step(plain, shape, mesh)
        for way in islice(ways, 2):
            schedule = recompute(plain, **way)
            got, peak = step(schedule, shape, mesh)
            same = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            if not same or ("part" not in way and peak != simulate(schedule).peak_activations[mesh.place.pp]):
                wrong.append(f"{schedule} rank {rank}, {way}: same {same}, peak {peak}")
    return wrong


@pytest.mark.parametrize(
    ("shape", "sizes", "first"),
    [(DENSE, {"pp": 2, "dp": 2}, 0), (SPARSE, {"pp": 2, "tp": 2}, 3)],
    ids=["dense, dp 2", "experts, tp 2"],
)
def test_every_bit(shape: DecoderShape, sizes: dict[str, int], first: int) -> None:
    assert run_ranks(work, 4, shape, sizes, first) == [[]] * 4
