"""A failure in one of several pipelines ends all of them, and every rank says who it was and where it stood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import pipeloom as pl
from dying import End, run_until_dead
from models import Block, batch, blocks, mse
from pipeloom.config.fault import parse_fault
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape

pytestmark = pytest.mark.core


S = pl.schedules
SCHEDULE = S.interleaved(2, 4, 2)


class Bad(Block):
    """Raises at its third forward on the second replica."""

    def __init__(self) -> None:
        super().__init__(3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and x.shape[0] == 2:
            raise ValueError("the user's own words")
        return super().forward(x)


def train(rank: int, layers: Any, options: RuntimeOptions) -> None:
    mesh = Mesh.of(MeshShape(2, 2))
    assert mesh is not None
    pipeline = Pipeline(layers, SCHEDULE, loss=mse, mesh=mesh, options=options)
    for step in range(4):
        pipeline.step(*batch(4 * (1 + mesh.place.dp), seed=step))  # replica 1 has 2 rows a micro-batch
    pipeline.close()


def ends_of(folder: Path, layers: Any, **options: Any) -> list[End]:
    return run_until_dead(train, 4, folder, layers, RuntimeOptions(**options))


@pytest.mark.parametrize("transport", ["shared", "individual"])
def test_an_exception_in_one_pipeline_stops_all(transport: Any, tmp_path: Path) -> None:
    """Ranks 0 and 2 are replica 0's pipeline, 1 and 3 replica 1's."""
    ends = ends_of(tmp_path, [*blocks(3), Layer("bad", Bad)], transport=transport)
    assert [end.code for end in ends] == [6, 6, 6, 1]  # the one that raised ends as its own program decides
    for number, end in enumerate(ends):
        assert "ValueError: the user's own words" in end.words
        assert "in forward" in end.words  # its traceback
        assert "(rank 3 (pp 1, dp 1), F of stage 3 micro-batch 2)" in end.words
        if number != 3:
            assert "stopped, because rank 3 (pp 1, dp 1) failed" in end.words
            assert f"[rank {number}] (pp {number // 2}, dp {number % 2}) step 0" in end.words


@pytest.mark.parametrize("transport", ["shared", "individual"])
def test_a_killed_rank_ends_the_other_pipeline_too(transport: Any, tmp_path: Path) -> None:
    """Its replica meets it only in the sum of the gradients."""
    ends = ends_of(tmp_path, blocks(4), fault=parse_fault("kill:1:1"), transport=transport)
    assert [end.code for end in ends] == [6, 6, -9, 6]
    for number in (0, 1, 3):
        assert f"[rank {number}] " in ends[number].words
    assert "rank 2 (pp 1, dp 0) is gone" in ends[0].words
