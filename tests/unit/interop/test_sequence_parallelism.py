"""Whether tensor parallelism divides tokens too, in the words of each system."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.cli.gains import gain_of
from pipeloom.interop.gain import changed_flags
from pipeloom.interop.systems import SYSTEMS, read_job, translated
from pipeloom.plan import load_device
from pipeloom.plan.job import Job, normal
from pipeloom.schedule.costs import StageCosts

FLAGS = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu
--ffn-hidden-size 14336 --vocab-size 128256 --seq-length 4096 --global-batch-size 8 --normalization RMSNorm --bf16
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --tensor-model-parallel-size 4
"""
TITAN = "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b --training.seq_len 4096 "
TITAN += "--parallelism.tensor_parallel_degree 4 "
RECIPE = """step_scheduler: {global_batch_size: 8, local_batch_size: 1}
model: {pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B}
packed_sequence: {packed_sequence_size: 4096}
distributed:
  strategy: fsdp2
  dp_size: 2
  tp_size: 4
"""
OURS = """model.preset = "llama3-8b"
[parallel]
pp = 1
dp = 2
tp = 4
sp = %s
[train]
seq_len = 4096
"""
# System -> a job without sequence parallelism, and one with it.
BOTH = {
    "megatron": (FLAGS.replace("\n", " "), FLAGS.replace("\n", " ") + " --sequence-parallel"),
    "torchtitan": (TITAN + "--parallelism.enable_sequence_parallel False", TITAN),
    "automodel": (RECIPE, RECIPE + "  sequence_parallel: true\n"),
    "pipeloom": (OURS % "false", OURS % "true"),
}


def jobs_of(system: str, folder: Path) -> list[Job]:
    """The job without, and the job with sequence parallelism."""
    jobs = []
    for text in BOTH[system]:
        (folder / "run.toml").write_text(text)
        jobs.append(read_job(str(folder / "run.toml")))
    return jobs


@pytest.mark.parametrize("system", SYSTEMS)
def test_it_is_read_and_written(system: str, tmp_path: Path) -> None:
    jobs = jobs_of(system, tmp_path)
    assert [job.sequence for job in jobs] == [False, True]
    for job in jobs:
        text, losses = translated(job, system)
        assert losses == []
        assert SYSTEMS[system].read(text, job.shape).sequence == job.sequence


@pytest.mark.parametrize("system", SYSTEMS)
def test_without_it_a_job_needs_more_memory_and_is_offered_it(system: str, tmp_path: Path) -> None:
    without, divided = (gain_of(job, load_device("b300")) for job in jobs_of(system, tmp_path))
    assert without.now.prediction.peak > 1.05 * divided.now.prediction.peak
    (near,) = [run for run in without.neighbours if run.job.layout == without.now.job.layout and run.job.sequence]
    assert near.prediction.peak == divided.now.prediction.peak
    assert len(changed_flags(without.now.job, near.job)) == 1
    assert all(run.job.sequence for run in divided.neighbours)


@pytest.mark.parametrize("at", [0, 1])
def test_measured_times_are_compared_with_those_of_the_job_as_it_runs(at: int, tmp_path: Path) -> None:
    job = jobs_of("megatron", tmp_path)[at]
    gain = gain_of(job, load_device("b300"))
    costs = StageCosts(gain.space.planner_of(job).stage_costs(job.layout), 1)
    measured = [((0,), costs.forward[0], costs.backward[0])]
    factors = gain_of(job, load_device("b300"), times=lambda _: measured).space.planner.factors
    assert factors[1] == pytest.approx((1.0, 1.0))


def test_what_a_block_keeps_outside_of_products_is_whole_without_it(tmp_path: Path) -> None:
    # Of Megatron's block with GELU: 10 + 24 / t of 34 sbh are kept, of which dropout's masks (2 sbh, of 10) are not there.
    flags = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 4096 --num-attention-heads 32 --bf16 "
    )
    flags += (
        "--vocab-size 51200 --seq-length 4096 --global-batch-size 8 --hidden-dropout 0 --tensor-model-parallel-size 8"
    )
    kept = []
    for text in (flags, flags + " --sequence-parallel"):
        (tmp_path / "run.sh").write_text(text)
        gain = gain_of(read_job(str(tmp_path / "run.sh")), load_device("h100"))
        (block,) = {layer.saved for layer in gain.space.planner_of(gain.now.job).layers(gain.now.job.layout)[1:-1]}
        kept.append(block / (4096 * 4096))
    assert kept[0] - kept[1] == pytest.approx(8 * 7 / 8, rel=0.01)


def test_one_rank_of_tensor_parallelism_divides_nothing() -> None:
    flags = FLAGS.replace("\n", " ").replace("parallel-size 4", "parallel-size 1")
    assert normal(SYSTEMS["megatron"].read(flags)) == normal(SYSTEMS["megatron"].read(flags + "--sequence-parallel"))
