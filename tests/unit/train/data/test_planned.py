"""Planned batches: every document once, within the limit, counted as the planner counts it; what is opened for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from corpora import config, data, documents, json_lines
from pipeloom.plan.step import plan_step
from pipeloom.shapes.layers import training_flops
from pipeloom.train.data.batches import Batch, Batches, PackedRows
from pipeloom.train.data.planned import StepPlanner, documents_of, lengths_of, most_tokens
from pipeloom.train.workers.preflight import require_files
from resolved import resolve


def keys_of(folder: Path, **more: Any) -> dict[str, Any]:
    source = json_lines(folder / "a.jsonl", ({"text": text} for text in documents(200)))
    sizes = {"train__seq_len": 128, "train__global_batch_size": 20, "schedule__microbatches": 10, "parallel__dp": 2}
    return {"source": str(source), "batching": "planned", "schedule__name": "1f1b", **sizes, **more}


def contents(batch: Batch) -> list[tuple[list[int], list[int]]]:
    return sorted(
        (batch.tokens[row, places].tolist(), batch.targets[row, places].tolist()) for row, places in documents_of(batch)
    )


def test_each_document_of_a_batch_is_in_one_micro_batch_of_one_replica(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    chosen, found = config(tmp_path, **keys), data(tmp_path, **keys)
    assert most_tokens(config(tmp_path, **keys | {"schedule__microbatches": 4})) == 3 * 128
    batches = Batches(found.train, chosen, 2)
    planner, again = (StepPlanner(chosen, 1, batches.of_step(0)) for _ in range(2))
    assert "micro-batches, " in planner.words
    for step in (1, 7):
        whole = batches.of_step(step)
        parts = [planner.part(whole, replica) for replica in (0, 1)]
        packed = [each for part in parts for each in part.microbatches]
        assert sorted(document for each in packed for document in contents(each)) == contents(whole)
        assert len(contents(whole)) == 20
        sizes = [each.tokens.shape for each in packed]
        assert max(sizes) <= (1, 128)
        assert [part.schedule.microbatches for part in parts] == [len(part.microbatches) for part in parts]
        lengths = lengths_of(documents_of(whole))
        assert parts[0].tokens == parts[1].tokens == sum(lengths) == sum(tokens for _, tokens in sizes)
        flops = sum(training_flops(chosen.model.shape(), length, 1) for length in lengths)
        assert parts[0].flops == pytest.approx(flops, rel=1e-3)
        other = again.part(whole, 1)  # in a run that begins here
        assert [each.tokens.tolist() for each in other.microbatches] == [
            each.tokens.tolist() for each in parts[1].microbatches
        ]


def test_small_micro_batches_cost_time(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, parallel__pp=2, schedule__microbatches=2)
    chosen = config(tmp_path, **keys)
    whole = Batches(data(tmp_path, **keys).train, chosen, 2).of_step(0)
    lengths = lengths_of(documents_of(whole))
    free = plan_step(lengths, 2, 2, tokens=most_tokens(chosen), families=[("1f1b", 1)])
    part = StepPlanner(chosen, 1, whole).part(whole, 0)
    assert 1 < len(part.microbatches) < len(free.replicas[0].microbatches)


def test_blocks_that_predict_further_ahead_stay_inside_documents(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, model__num_nextn_predict_layers=1)
    chosen, found = config(tmp_path, **keys), data(tmp_path, **keys)
    whole = Batches(found.train, chosen, 2).of_step(0)
    packed = next(each for each in StepPlanner(chosen, 1, whole).part(whole, 0).microbatches if len(contents(each)) > 1)
    assert packed.targets_ahead is not None
    for _, places in documents_of(packed):
        assert packed.targets_ahead[0, places, 0].tolist() == [*packed.targets[0, places][1:].tolist(), -100]


def test_documents_begin_where_positions_do_and_what_fills_a_row_up_is_none() -> None:
    pieces, starts = torch.tensor([[0, 3], [10, 2], [20, 4]]).numpy(), torch.tensor([0, 2, 3]).numpy()
    rows = PackedRows(torch.arange(40).numpy(), None, pieces, starts, 6)
    found = documents_of(rows.rows_at(torch.arange(2)))
    assert found == [(0, slice(0, 3)), (0, slice(3, 5)), (1, slice(0, 4))]


def test_rows_to_train_on_hold_one_document_and_those_held_out_are_packed(tmp_path: Path) -> None:
    found = data(tmp_path, **keys_of(tmp_path))
    assert isinstance(found.train, PackedRows)
    assert f"planned, one document a row: {found.train.count} rows of 128" in found.words
    batch = found.train.rows_at(torch.arange(found.train.count))
    assert len(documents_of(batch)) == found.train.count
    (held, *_) = found.held_out
    assert len(documents_of(held)) > len(held.tokens)


def test_a_plain_text_counts_as_packed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(documents(2000)))
    keys = keys_of(tmp_path) | {"source": str(tmp_path / "a.txt"), "log__dir": str(tmp_path)}
    assert require_files(resolve(config(tmp_path, **keys))).config.data.documents == "pack"
