"""The table of what each rank holds."""

from __future__ import annotations

import torch

from pipeloom.config import MeshShape, load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.report.tables import RankSummary, layer_words, table, what_ranks_hold


def rank(shape: MeshShape, number: int) -> RankSummary:
    stages = (
        ("model.embed_tokens", "model.layers.0"),
        ("model.layers.10", "model.layers.11", "model.layers.12", "head"),
    )
    return RankSummary(shape.place(number), stages, 1_234_567, 5 * 2**20, 7)


def test_one_row_a_rank() -> None:
    shape = MeshShape(2, 2, 2)
    lines = table([rank(shape, number) for number in range(8)])
    assert lines[0].split() == ["rank", "pp", "dp", "tp", "parameters", "optimizer", "in", "flight", "layers"]
    assert lines[6].split(maxsplit=9) == ["5", "1", "0", "1", "1.23", "M", "5", "MiB", "7", "E 0 | 10-12 L"]
    assert all(len(line) <= 80 for line in lines)


def test_axes_of_one_are_left_out() -> None:
    assert table([rank(MeshShape(), 0)])[0].split() == ["rank", "parameters", "optimizer", "in", "flight", "layers"]


def test_of_many_ranks_one_pipeline_is_shown() -> None:
    shape = MeshShape(4, 4, 4)
    lines = table([rank(shape, number) for number in range(64)])
    assert [line.split()[0] for line in lines[1:5]] == ["0", "16", "32", "48"]
    assert lines[5] == "and 60 more ranks, which differ in dp and tp"


def test_layers_in_words() -> None:
    assert layer_words([("model.embed_tokens",), ("model.layers.3",), ("head",), ()]) == "E | 3 | L | -"
    assert layer_words([("model.embed_tokens", "model.layers.0", "model.layers.1", "head")]) == "E 0-1 L"


def test_a_real_rank() -> None:
    layout = load_layout("tiny", {"parallel.pp": 1, "schedule.name": "gpipe"})
    pipeline = build_pipeline(layout, torch.device("cpu"))
    optimizer = Optimizer(list(pipeline.named_parameters()), layout.config.optimizer)
    (held,) = what_ranks_hold(pipeline, optimizer) or []
    assert held.parameters == sum(parameter.numel() for parameter in pipeline.parameters())
    assert held.optimizer_bytes == 8 * held.parameters
    assert held.in_flight == 5
    assert layer_words(held.layers) == "E 0-3 L"
