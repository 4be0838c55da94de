"""Bytes of a stage that stand, or that its backwards hold beside what is saved."""

from __future__ import annotations

from pipeloom.config import load_layout
from pipeloom.config.standing_bytes import summed_over_slices


def test_gradients_of_keys_and_values_are_summed_for_all_slices_but_the_last() -> None:
    run = {"parallel.pp": 2, "schedule.name": "1f1b", "schedule.slices": 4}
    assert summed_over_slices(load_layout("tiny", run), 0, 100.0) == 75.0
    assert summed_over_slices(load_layout("tiny", run | {"train.dtype": "bfloat16"}), 0, 100.0) == 150.0  # in float32
    on_host = {"schedule.transforms": ["recompute=whole", "offload=kept"]}
    assert summed_over_slices(load_layout("tiny", run | on_host), 0, 100.0) == 0.0
