"""`verify` over data, tensor and sequence parallel layouts; and what it says when a sum is forgotten."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from commands import pipeloom
from paths import ROOT
from pipeloom.parallel.sharding import ParameterSharding, Shard, shard_of
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.report.verify import ComparedStep, compare


def test_a_sample_of_all_layouts_passes() -> None:
    """13 layouts on up to 8 processes; `pipeloom verify --matrix tests/data/verify_parallel.toml` runs them all."""
    done = pipeloom("verify", "--matrix", "tests/data/verify_parallel_quick.toml", "--json", folder=ROOT)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert len(report["layouts"]) == 13
    assert not report["skipped"]
    assert all(layout["worst_error"] <= 1e-5 for layout in report["layouts"])


@pytest.mark.parametrize("wrong", ["", "value", "missing", "other rank's"])
def test_a_part_is_compared_with_its_place_in_the_whole(wrong: str) -> None:
    shape, sharding = MeshShape(1, 1, 2), ParameterSharding((Shard("tp", 0, (2, 3)),))
    whole = torch.arange(20.0).reshape(5, 4)
    steps = []
    for number in range(2):
        place = shape.place(number)
        part: Any = shard_of(whole, sharding, place._asdict()).clone()
        if number == 0 and wrong == "value":
            part[0, 0] += 1  # relative to the largest element of the other part
        if number == 1 and wrong == "missing":
            part = None
        if wrong == "other rank's":
            place = shape.place(0)
        steps.append(ComparedStep(1.0, {"cut": part}, place, {"cut": sharding}))
    result = compare(steps, ComparedStep(1.0, {"cut": whole}), (), 1e-5)
    assert result.errors["cut"] == {"": 0.0, "value": 1 / 19}.get(wrong, math.inf)
    assert result.passed == (not wrong)
