"""The same bits on every pipeline: schedules with one route, numbers of ranks and chunks, and transports."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from pipeloom.config import load_layout
from pipeloom.errors import ConfigError
from pipeloom.measure.build import build_pipeline
from pipeloom.train.loop import Trainer
from processes import run_ranks
from run_notes import Notes, context

TEXT = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
COMMON: dict[str, Any] = {
    "train.reproducible": True,
    "train.steps": 10,
    "train.seq_len": 8,
    "model.num_hidden_layers": 8,
    "train.global_batch_size": 8,
    "schedule.microbatches": 4,
    "model.dropout": 0.1,
    "optimizer.clip_norm": 1.0,
    "log.every": 100,
}
# (ranks, schedule, chunks, transport, recompute)
CELLS: list[tuple[int, str, int, str, str]] = [
    (1, "gpipe", 1, "auto", "none"),
    (1, "zbv", 2, "auto", "none"),
    (2, "1f1b", 1, "shared", "none"),
    (2, "zb-h1", 1, "individual", "none"),
    (2, "interleaved", 2, "batched", "full"),
    (2, "looped-bfs", 4, "shared", "none"),
    (2, "dualpipev", 2, "shared", "none"),
    (4, "zbv", 2, "shared", "full"),
    (4, "v-min", 2, "individual", "none"),
    (4, "hanayo", 2, "batched", "none"),
    (4, "interleaved-zb", 2, "shared", "none"),
    (4, "zb-auto", 1, "shared", "none"),
]


def trained(rank: int, cells: list[tuple[int, str, int, str, str]], changes: dict[str, Any]) -> list[dict[str, str]]:
    """Name -> digest of each weight of this rank after 10 steps in each cell, and of losses and norms."""
    found = []
    for ranks, schedule, chunks, transport, recompute in cells:
        own = {"parallel.pp": ranks, "schedule.name": schedule, "schedule.transport": transport}
        own |= {"schedule.chunks": chunks, "train.recompute": recompute}
        layout = load_layout("tiny", {**COMMON, **own, **changes})
        pipeline, notes = build_pipeline(layout, torch.device("cpu")), Notes()
        report: Any = notes
        Trainer(layout.config, pipeline, context(rank, ranks), report).train(TEXT)
        values = {name: p.detach().float().numpy().tobytes() for name, p in pipeline.named_parameters()}
        values["steps"] = repr([(step["loss"], step["grad_norm"]) for step in notes.of("step")]).encode()
        pipeline.close()
        found.append({name: hashlib.sha256(value).hexdigest() for name, value in values.items()})
    return found


def hashes(cells: list[tuple[int, str, int, str, str]], changes: dict[str, Any]) -> list[str]:
    """A hash of each cell: losses and norms of all steps, and the weights after them, whatever rank they are on."""
    whole = []
    for ranks in sorted({cell[0] for cell in cells}):
        chosen = [cell for cell in cells if cell[0] == ranks]
        for parts in zip(*run_ranks(trained, ranks, chosen, changes), strict=True):
            joined: dict[str, str] = {}
            for part in parts:
                assert all(joined.get(name, digest) == digest for name, digest in part.items())
                joined |= part
            whole.append(hashlib.sha256(repr(sorted(joined.items())).encode()).hexdigest())
    return whole


def test_twelve_pipelines_have_one_hash() -> None:
    assert len(set(hashes(CELLS, {}))) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule.name": "dualpipe"}, '"dualpipe" does not sum the gradients of each layer in the order'),
        ({"schedule.name": "chimera"}, '"chimera" does not sum'),
        ({"schedule.name": "zbv", "model.tie_word_embeddings": True}, "rank 0 has both the first stage and the last"),
        (
            {"schedule.name": "search", "train.global_batch_size": 12},
            "a search may reorder micro-batches of several sizes",
        ),
    ],
)
def test_what_sums_in_another_order_is_refused(changes: dict[str, Any], words: str) -> None:
    keys = {**COMMON, "parallel.pp": 4, "schedule.microbatches": 8, **changes}
    with pytest.raises(ConfigError, match=f"train.reproducible = true: .*{words}"):
        load_layout("tiny", keys)
    load_layout("tiny", {**keys, "train.reproducible": False})
