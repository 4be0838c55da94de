"""A message that is not what its sender made is found, and named, on every transport."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipeloom as pl
from models import batch, blocks, mse
from pipeloom.errors import DistributedError
from pipeloom.ops.checksum import checksums, joint_checksum, message_checksum
from pipeloom.runtime import LocalPipeline, Pipeline, RuntimeOptions
from processes import run_ranks

S = pl.schedules
TRANSPORTS = ("shared", "individual", "batched")


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 3, 1023, 8 * 1024 + 5, 40_000])
def test_every_flipped_bit_changes_the_sum(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    tensor = torch.randn(size).to(dtype)
    before = int(joint_checksum([tensor]))
    assert before == int(joint_checksum([tensor.clone()]))
    data = tensor.view(torch.uint8)
    for at in {0, data.numel() // 2, data.numel() - 1} if size else set():
        for bit in (0, 7) if dtype != torch.bool else (0,):
            data[at] ^= 1 << bit
            assert int(joint_checksum([tensor])) != before
            data[at] ^= 1 << bit
    assert int(joint_checksum([tensor])) == before


@pytest.mark.core
def test_order_and_place_count_and_strides_do_not() -> None:
    tensor = torch.arange(30_000.0)
    rolled = tensor.roll(1024 * 2)
    assert len(set(checksums([tensor, rolled, tensor.flip(0)]))) == 3
    rows = torch.arange(16 * 1024)  # whole rows of words, nothing behind them
    assert int(joint_checksum([rows])) != int(joint_checksum([rows.roll(1024)]))
    flat = torch.arange(5001.0)
    assert int(joint_checksum([flat[1:]])) == int(joint_checksum([flat[1:].clone()]))  # not on a word's boundary
    square = torch.arange(64.0).view(8, 8)
    for strided in (square.T, square[:, 0]):
        assert int(joint_checksum([strided])) == int(joint_checksum([strided.contiguous()]))
    a, b = torch.ones(3), torch.arange(3.0)
    assert message_checksum((a, None, b)) == message_checksum((None, a, b)) != message_checksum((b, a))


@pytest.mark.core
def test_a_joint_checksum_is_of_every_tensor_in_order() -> None:
    tensors = [torch.arange(float(size)) for size in (3, 0, 100_000, 5, 80_000)]
    before = int(joint_checksum(tensors))
    for tensor in tensors:
        if tensor.numel():
            tensor[-1] += 1
            assert int(joint_checksum(tensors)) != before
            tensor[-1] -= 1
    assert int(joint_checksum(tensors)) == before
    assert int(joint_checksum(tensors[::-1])) != before
    assert int(joint_checksum([*tensors[:2], tensors[4], tensors[3], tensors[2]])) != before  # the two large ones


def flip(rank: int, number: int) -> Any:
    return SimpleNamespace(kind="flip-bit", rank=rank, number=number)


def train(rank: int, transport: Any, fault: Any) -> None:
    pipeline = Pipeline(
        blocks(4),
        S.build("1f1b", 2, 3),
        loss=mse,
        options=RuntimeOptions(monitor=False, transport=transport, checksum=True, fault=fault),
    )
    x, y = batch(9)
    for _ in range(2):
        pipeline.step(x, y)
        pipeline.evaluate(x, y)
    pipeline.step(x[:, :2], y[:, :2])  # another shape
    pipeline.close()


# rank 0 sends 3 messages in a step and 3 in an evaluation, rank 1 sends 3 in a step
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("source", "number"), [(0, 1), (0, 5), (0, 8), (1, 0), (1, 5)])
def test_a_flipped_bit_is_named_by_channel_micro_batch_and_rank(transport: Any, source: int, number: int) -> None:
    kind = "activation" if source == 0 else "gradient"
    words = (
        rf"DistributedError: .* micro-batch {number % 3} arrived damaged on the {kind} channel from rank {source} to "
        rf"rank {1 - source}: its checksum is -?[0-9a-f]+ here and was -?[0-9a-f]+ there"
    )
    with pytest.raises(AssertionError, match=words):
        run_ranks(train, 2, transport, flip(source, number))


def after_a_frozen_stage(rank: int) -> None:
    options = RuntimeOptions(monitor=False, transport="individual", checksum=True)
    pipeline = Pipeline(blocks(2), S.build("1f1b", 2, 3), loss=mse, options=options)
    for parameter in pipeline.parameters():
        parameter.requires_grad_(rank == 1)
    pipeline.step(*batch(9))
    pipeline.close()


def test_a_message_without_tensors_has_no_checksum() -> None:
    run_ranks(after_a_frozen_stage, 2)


@pytest.mark.core
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_in_one_process_too(rank: int) -> None:
    def step(options: RuntimeOptions) -> None:
        LocalPipeline(blocks(3), S.build("zb-h1", 3, 4), loss=mse, options=options).step(*batch(9))

    step(RuntimeOptions(checksum=True))
    step(RuntimeOptions(fault=flip(rank, 1)))  # nobody looks
    with pytest.raises(
        DistributedError, match=rf"micro-batch \d arrived damaged on the \w+ channel from rank {rank} to"
    ):
        step(RuntimeOptions(checksum=True, fault=flip(rank, 1)))
