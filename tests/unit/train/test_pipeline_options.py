"""Keys of the configuration that become options of the pipeline."""

from __future__ import annotations

import pytest
import torch

from pipeloom.config import load_layout
from pipeloom.errors import ConfigError
from pipeloom.train.build import build_pipeline

ONE = {"parallel.pp": 1, "schedule.name": "gpipe"}


def test_shapes_and_receive_depth_reach_the_pipeline() -> None:
    default = build_pipeline(load_layout("tiny", ONE), torch.device("cpu")).options
    assert (default.shapes, default.receive_depth) == ("once", 2)
    keys = {**ONE, "schedule.shapes": "each", "schedule.receive_depth": 5}
    options = build_pipeline(load_layout("tiny", keys), torch.device("cpu")).options
    assert (options.shapes, options.receive_depth) == ("each", 5)


@pytest.mark.parametrize("transport", ["batched", "shared"])
def test_a_depth_for_a_transport_without_one_is_refused(transport: str) -> None:
    words = rf'schedule.receive_depth = 3: the {transport} transport .* set schedule.transport = "individual"'
    with pytest.raises(ConfigError, match=words):
        load_layout("tiny", {**ONE, "schedule.receive_depth": 3, "schedule.transport": transport})
