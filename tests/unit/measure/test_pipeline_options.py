"""Keys of the configuration that become options of the pipeline."""

from __future__ import annotations

import torch

from pipeloom.config import load_layout
from pipeloom.measure.build import build_pipeline

ONE = {"parallel.pp": 1, "schedule.name": "gpipe"}


def test_shapes_reach_the_pipeline() -> None:
    assert build_pipeline(load_layout("tiny", ONE), torch.device("cpu")).options.shapes == "once"
    keys = {**ONE, "schedule.shapes": "each"}
    assert build_pipeline(load_layout("tiny", keys), torch.device("cpu")).options.shapes == "each"
