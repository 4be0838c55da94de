"""What several ranks hold alike is compared while training runs: a difference is named, and there is none without a fault."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from optimizer_states import optimizer_states
from pipeloom.config import load_layout
from pipeloom.errors import DistributedError, PipeloomError
from pipeloom.measure.build import build_pipeline
from pipeloom.models import tied
from pipeloom.runtime.replicas import differences
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.data.tokenizers import ByteTokenizer
from pipeloom.train.loop import Trainer
from pipeloom.train.observers import observers
from pipeloom.train.replica_check import CUDA_TP_TOLERANCE
from pipeloom.train.workers.worker import WorkerContext
from processes import run_ranks

CORPUS = b"the loom weaves thread over thread, and back under the other\n" * 400
SMALL = {
    "train.device": "cpu",
    "train.steps": 4,
    "train.check_every": 2,
    "train.global_batch_size": 8,
    "schedule.microbatches": 4,
    "log.every": 100,
    "schedule.name": "1f1b",
    "model.num_hidden_layers": 4,
    "parallel.pp": 1,
}
MOE = {
    "train.global_batch_size": 16,
    "model.num_experts": 4,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 32,
}
# name -> settings
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"parallel.dp": 2},
    "zero1": {"parallel.dp": 2, "optimizer.zero1": True},
    "tp": {"parallel.tp": 2},
    "sp": {"parallel.tp": 2, "parallel.sp": True},
    "two routes": {"schedule.name": "dualpipe", "parallel.pp": 2},
    "tied": {"parallel.pp": 2, "model.tie_word_embeddings": True},
    "experts": {"parallel.dp": 4, "parallel.ep": 2, **MOE},
    "zero1 with experts": {"parallel.dp": 4, "parallel.ep": 2, "optimizer.zero1": True, **MOE},
    "zero1 with tp": {"parallel.dp": 2, "parallel.tp": 2, "optimizer.zero1": True},
    "bf16": {"parallel.dp": 2, "parallel.tp": 2, "train.dtype": "bfloat16"},
    "no barrier": {"parallel.dp": 2, "optimizer.barrier": False},
}


def trainer_of(rank: int, settings: dict[str, Any]) -> Trainer:
    layout = load_layout("tiny", SMALL | settings)
    pipeline = build_pipeline(layout, torch.device("cpu"))
    context = WorkerContext(rank, layout.world_size, rank, torch.device("cpu"), None)  # type: ignore[arg-type]
    return Trainer(layout.config, pipeline, context, None)


def test_batches_are_compared_at_the_trainers_interval() -> None:
    pipeline = build_pipeline(load_layout("tiny", SMALL), torch.device("cpu"))
    assert pipeline.options.check_every == 2


def text() -> torch.Tensor:
    return ByteTokenizer().encode(CORPUS)


def undisturbed(rank: int, settings: dict[str, Any]) -> int:
    trainer = trainer_of(rank, settings)
    trainer.train(text())
    names = sum(1 for _ in trainer.replicas.tensors())
    trainer.pipeline.close()
    return names


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.full] if name in ("sp", "zero1 with tp", "two routes", "bf16", "experts") else []
        )
        for name in LAYOUTS
    ],
)
def test_there_is_no_false_alarm(name: str) -> None:
    world = load_layout("tiny", SMALL | LAYOUTS[name]).world_size
    assert all(count > 10 for count in run_ranks(undisturbed, world, LAYOUTS[name]))


def damaged(rank: int, settings: dict[str, Any], victim: int, name: str, kind: str) -> str:
    """The words on this rank when one bit of a tensor of the victim is another before the last check."""
    trainer = trainer_of(rank, settings)
    trainer.train(text())
    if rank == victim:
        if kind == "weight":
            (tensor,) = (p for n, p in trainer.pipeline.named_parameters() if n == name)
        else:
            tensor = optimizer_states(trainer.optimizer)[name][kind]
        with torch.no_grad():
            bits = tensor.detach().view(-1).view(torch.int32)
            bits[bits.numel() // 2] ^= 1
    try:
        trainer.replicas.check(100)
    except DistributedError as error:
        return str(error)
    finally:
        trainer.pipeline.close()
    return ""


((EMBEDDING, HEAD),) = tied(load_layout("tiny", SMALL | LAYOUTS["tied"]).config.model)
NORM, QKV = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.down_proj.weight"
DAMAGES = [
    ("dp", 1, QKV, "weight", f"after step 100 {QKV} is not the same on rank 1 (dp 1) as on rank 0 (dp 0)"),
    ("dp", 0, QKV, "exp_avg", f"the optimizer's exp_avg of {QKV} is not the same on rank 1 (dp 1) as on rank 0 (dp 0)"),
    ("zero1", 1, QKV, "weight", f"{QKV} is not the same on rank 1 (dp 1) as on rank 0 (dp 0)"),
    ("tp", 1, NORM, "weight", f"{NORM} is not the same on rank 1 (tp 1) as on rank 0 (tp 0)"),
    ("tp", 1, NORM, "exp_avg_sq", f"the optimizer's exp_avg_sq of {NORM} is not the same on rank 1 (tp 1)"),
    ("two routes", 1, QKV, "weight", f"{QKV} is not the same on rank 1 as on rank 0"),
    ("tied", 1, HEAD, "weight", f"{EMBEDDING} is not the same on rank 1 as on rank 0"),
]


@pytest.mark.parametrize("case", DAMAGES, ids=lambda case: f"{case[0]} {case[3]}")
def test_one_flipped_bit_is_named_on_every_rank(case: tuple[str, int, str, str, str]) -> None:
    layout, victim, name, kind, words = case
    for said in run_ranks(damaged, 2, LAYOUTS[layout], victim, name, kind):
        assert words in said, said


def expert(rank: int) -> list[str]:
    """(dp 4, ep 2) ranks 0 and 2 hold the same experts; one of rank 2's is damaged."""
    trainer = trainer_of(rank, LAYOUTS["experts"])
    sharding = trainer.pipeline.layouts
    name = next(n for n, _ in trainer.pipeline.named_parameters() if sharding[n].over("ep") is not None)
    if rank == 2:
        with torch.no_grad():
            dict(trainer.pipeline.named_parameters())[name].view(-1)[0] += 1
    try:
        trainer.replicas.check(2)
    except DistributedError as error:
        return [name, str(error)]
    finally:
        trainer.pipeline.close()
    return [name, ""]


def test_an_expert_is_compared_with_its_own_replicas() -> None:
    for name, said in run_ranks(expert, 4):
        assert f"{name} is not the same on rank 2 (dp 2) as on rank 0 (dp 0)" in said, said


def test_on_cuda_tensor_parallel_ranks_are_compared_within_a_tolerance() -> None:
    """As it would be there: without a GPU, the rule alone."""
    shape = MeshShape(dp=2, tp=2)

    def differing(a: float, b: float, other: int, tolerance: float = CUDA_TP_TOLERANCE) -> bool:
        everyone = [{"w||weight": ("", 1, a)}, *[{}] * (other - 1), {"w||weight": ("", 2, b)}]
        return bool(differences(everyone, shape, tolerance))

    within, beyond = 1 + CUDA_TP_TOLERANCE / 2, 1 + CUDA_TP_TOLERANCE * 2
    assert [differing(1.0, value, 1) for value in (1.0, within, beyond, math.nan)] == [False, False, True, True]
    assert differing(math.nan, math.nan, 1)
    assert differing(1.0, 1.0, 2)  # a replica along dp holds the same bits
    assert differing(1.0, within, 1, tolerance=0.0)


def test_it_runs_every_so_many_steps() -> None:
    def checked(every: int) -> list[int]:
        rows = observers(load_layout("tiny", {"train.check_every": every}).config)
        return [step for row in rows if row.name == "replica check" for step in range(1, 8) if row.due(step)]

    assert [checked(every) for every in (0, 1, 3)] == [[], [*range(1, 8)], [3, 6]]


def nan_in_zero1(rank: int) -> str:
    """One rank's slice of one gradient is NaN in the second step."""
    trainer = trainer_of(rank, {"parallel.dp": 2, "optimizer.zero1": True, "train.check_every": 1})
    squares, calls = trainer.optimizer.squares, [0]

    def poisoned() -> list[float]:
        calls[0] += 1
        if rank == 1 and calls[0] == 2:
            assert trainer.pipeline.sync is not None
            trainer.pipeline.sync.buckets[0].part[0] = float("nan")
        return squares()

    trainer.optimizer.squares = poisoned  # type: ignore[method-assign]
    try:
        trainer.train(text())
    except PipeloomError as error:
        finite = all(bool(p.isfinite().all()) for p in trainer.pipeline.parameters())
        return f"{finite} {error}"
    finally:
        trainer.pipeline.close()
    return ""


def test_nan_under_zero1_stops_all_ranks_with_their_weights_whole() -> None:
    for said in run_ranks(nan_in_zero1, 2):
        assert said.startswith("True step 2: the loss is ")
        assert re.search(
            "the gradient norm nan: the gradient of .*, summed over all replicas, is not finite.*; training diverged",
            said,
        )
