"""Pipelines of several layouts with an optimizer, for the tests of checkpoints; and checkpoints as whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.config import Layout, load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Pipeline
from pipeloom.train.checkpoint.boxes import Box
from pipeloom.train.checkpoint.manifest import read_manifest
from pipeloom.train.checkpoint.reader import Reader
from pipeloom.train.data.batches import Batches
from pipeloom.train.optimizer import Optimizer

BASE = {"schedule.name": "1f1b", "schedule.microbatches": 2, "model.dropout": 0.1, "parallel.pp": 1}
MOE = {"model.num_experts": 4, "model.router": "sigmoid", "model.num_experts_per_tok": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp 2": {"parallel.pp": 2},
    "pp 2, v": {"parallel.pp": 2, "schedule.name": "zbv", "schedule.microbatches": 4},
    "two routes": {"parallel.pp": 2, "schedule.name": "dualpipe", "schedule.microbatches": 4},
    "tp 2": {"parallel.tp": 2, "parallel.sp": True},
    "vocabulary": {"parallel.pp": 2, "parallel.vocabulary": "pp"},
    "vocabulary, tp 2": {"parallel.pp": 2, "parallel.tp": 2, "parallel.vocabulary": "pp"},
    "zero": {"parallel.dp": 2, "optimizer.zero1": True},
    "gathers": {"parallel.dp": 2, "optimizer.zero1": True, "schedule.transforms": ["shard=1"]},
    "dp 2": {"parallel.dp": 2},
    "ep 2": {"parallel.dp": 2, "parallel.ep": 2},
    "dp 2, tp 2, zero": {"parallel.dp": 2, "parallel.tp": 2, "optimizer.zero1": True},
    "dp 2, pp 2, zero": {"parallel.dp": 2, "parallel.pp": 2, "optimizer.zero1": True},
}
TEXT = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


def layout_of(name: str, **changes: Any) -> Layout:
    more = {key.replace("__", "."): value for key, value in changes.items()}
    return load_layout("tiny", {**BASE, **LAYOUTS[name], **more})


class Run:
    """A pipeline and its optimizer on this rank."""

    def __init__(self, layout: Layout) -> None:
        self.config = layout.config
        mesh = Mesh.of(layout.mesh)
        assert mesh is not None
        self.pipeline: Pipeline = build_pipeline(layout, torch.device("cpu"), mesh)

        self.optimizer = Optimizer.of(self.pipeline, self.config)
        self.batches = Batches(TEXT, self.config, layout.mesh.dp)

    def steps(self, count: int) -> list[float]:
        """The losses of the next steps."""
        place, shape = self.pipeline.mesh.place, self.pipeline.mesh.shape
        losses = []
        self.pipeline.train()
        for _ in range(count):
            batch = self.batches.of_step(self.pipeline.next_step).part(place.dp, shape.dp)
            losses.append(float(self.pipeline.step(batch.tokens, batch.targets)))
            self.optimizer.step(None, 1e-2)
        return losses


def contents(path: Path) -> Mapping[str, Tensor]:
    """Key -> whole tensor of a checkpoint."""
    manifest = read_manifest(path)
    reader = Reader(path, manifest)
    return {key: reader.region(key, Box((0,) * len(shape), shape)) for key, shape in reader.tensors.items()}
