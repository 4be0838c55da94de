"""Blocks that our trainer recomputes, as the planner has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.errors import UsageError
from pipeloom.interop.pipeloom import read
from pipeloom.plan.export import recomputed_blocks

RUN = """extends = "tiny"
[parallel]
pp = 2
stages = "Ettt|tttL"
[schedule]
name = "1f1b"
[model]
num_hidden_layers = 6
[train]
recompute = {}
"""


def read_with(folder: Path, blocks: list[int]) -> tuple[str, int]:
    path = folder / "run.toml"
    path.write_text(RUN.format(blocks))
    layout = read(path).layout
    return layout.recompute, layout.recompute_layers


def test_the_first_blocks_of_every_stage_are_read(tmp_path: Path) -> None:
    assert read_with(tmp_path, [0, 1, 3, 4]) == ("full", 2)


def test_other_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train.recompute = \[1, 3\]: .*; nearest: \[0, 3\]"):
        read_with(tmp_path, [1, 3])


def test_the_embedding_and_the_output_layer_are_no_blocks() -> None:
    assert recomputed_blocks([4, 2, 3], 3) == [0, 1, 2, 3, 4, 5, 6]


def test_blocks_that_predict_further_ahead_are_none_of_them() -> None:
    assert recomputed_blocks([3, 4], 3, ahead=1) == [0, 1, 2, 3]


def test_all_blocks_of_stages_without_other_layers_are_read(tmp_path: Path) -> None:
    assert read_with(tmp_path, [0, 1, 2, 3, 4, 5]) == ("full", 3)
    assert read_with(tmp_path, []) == ("none", 0)
