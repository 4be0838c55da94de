"""Jobs that are written for other systems, judged by those systems' own code. `make interop` installs it and runs these."""

from __future__ import annotations

import re

import pytest

import other_systems
from jobs import broken_job, layers_of_ranks, random_job
from other_systems import FOLDER, Made
from pipeloom.errors import PipeloomError
from pipeloom.interop.systems import SYSTEMS, translated
from pipeloom.plan.job import Job, normal

JUDGES = {name: getattr(other_systems, name) for name in ("megatron", "torchtitan", "automodel")}
OURS = {
    "megatron": {
        "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
        "expert_model_parallel_size": "ep", "seq-length": "seq", "micro-batch-size": "micro_batch", "dp": "dp", "m": "m",
    },
    "torchtitan": {
        "tensor_parallel_degree": "tp", "pipeline_parallel_degree": "pp", "context_parallel_degree": "cp",
        "expert_parallel_degree": "ep", "seq_len": "seq", "global_batch_size": "sequences",
    },
    "automodel": {
        "tp_size": "tp", "pp_size": "pp", "cp_size": "cp", "ep_size": "ep", "dp_size": "dp",
        "global_batch_size": "sequences",
    },
}  # fmt: skip
"""Their name -> our field of the layout."""


@pytest.mark.parametrize("system", JUDGES)
def test_random_runs_are_what_the_system_makes_of_their_words(system: str) -> None:
    count = 0
    for seed in range(200):
        job = random_job(seed, system)
        try:
            text, _ = translated(job, system)
        except PipeloomError:
            continue
        blocks = job.shape.num_hidden_layers if job.shape else 0
        made = JUDGES[system](text, blocks)
        assert made.layers == layers_of_ranks(job), job.layout.text()
        for theirs, ours in OURS[system].items():
            assert made.values[theirs] == getattr(job.layout, ours), (theirs, job.layout.text())
        CHECKS[system](job, made)
        count += 1
    assert count >= 140


def of_megatron(job: Job, made: Made) -> None:
    layout, values = job.layout, made.values
    assert values["num_moe_experts"] is None or values["expert_tensor_parallel_size"] == layout.etp
    assert bool(values.get("grad-reduce-in-bf16")) == (layout.grads == "bf16")
    assert values["recompute_granularity"] == {"none": None, "full": "full"}.get(layout.recompute, "selective")
    assert values["overlap_p2p_comm"] == (layout.v > 1 and "blocking_p2p" not in job.options)
    assert values["overlap_moe_expert_parallel_comm"] == ("overlap_experts" in job.options)
    assert values["sequence_parallel"] == (layout.tp > 1 and job.sequence)
    if job.dispatcher:
        theirs = {"deepep": "flex"}.get(job.dispatcher, job.dispatcher)
        assert values["moe_token_dispatcher_type"] == theirs
        assert values["moe_enable_deepep"] == (job.dispatcher == "deepep")
    if made.order and layout.schedule == "interleaved":
        schedule = layout.built()
        for rank, program in enumerate(schedule.programs):
            cells = [re.fullmatch(r"(\d+)F(\d+)", str(action)) for action in program]
            chunks = {stage: chunk for chunk, stage in enumerate(schedule.stages_of[rank])}
            assert [(int(cell[2]), chunks[int(cell[1])]) for cell in cells if cell] == made.order


def of_torchtitan(job: Job, made: Made) -> None:
    layout, values = job.layout, made.values
    assert values["checkpointing"] == ("FullAC.Config" if layout.recompute == "full" else "NoneType")
    assert values["data_parallel_replicate_degree"] * values["dp_shard"] == layout.dp
    assert values["enable_sequence_parallel"] == job.sequence
    assert values["local_batch_size"] == layout.micro_batch * (layout.m if layout.pp > 1 else 1)
    if layout.pp > 1:
        assert values["pipeline_parallel_microbatch_size"] == layout.micro_batch
    assert (values["fsdp_reshard_after_forward"] == "always") == (layout.zero == 3)


def of_automodel(job: Job, made: Made) -> None:
    layout, values = job.layout, made.values
    assert values["activation_checkpointing"] == (layout.recompute == "full")
    assert values.get("sequence_parallel", False) == (layout.tp > 1 and job.sequence)
    if layout.pp > 1:
        assert values["pp_microbatch_size"] == layout.micro_batch


CHECKS = {"megatron": of_megatron, "torchtitan": of_torchtitan, "automodel": of_automodel}
_SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
_SINGLE, _SEVERAL = "Single stage schedule requires exactly 1 stage", "Multi-stage schedule requires at least 2 stages"
_TITAN = "torchtitan/distributed/pipeline_parallel.py"
_AUTOMODEL = "nemo_automodel/components/distributed/pipelining/functional.py"
# Words of a refusal -> the file with the check that needs a running job, and a line of it. Both systems on torch's runtime check
# the stages of a rank where they divide the layers themselves, and take any number of listed modules.
CHECKS_IN_SOURCE = {
    r"there is no schedule '\w": ("", ""),  # the system's words have none to write
    "m=.* leaves .* micro-batches over groups": (
        _SCHEDULES,
        "if 0 < final_microbatch_group_size < pipeline_parallel_size:",
    ),
    "a group of .* is outside": (_SCHEDULES, "config.microbatch_group_size_per_vp_stage < pipeline_parallel_size"),
    "m=.* is less than the .* ranks": (_SCHEDULES, "config.microbatch_group_size_per_vp_stage > num_microbatches"),
    "1f1b has one chunk": (_SCHEDULES, "def forward_backward_pipelining_without_interleaving"),
    "interleaved needs chunks": (_SCHEDULES, "interleaved pipeline parallelism expected model chunking"),
    "has one stage a rank.*torchtitan": (_TITAN, _SINGLE),
    "has one stage a rank.*automodel": (_AUTOMODEL, _SINGLE),
    "needs two stages a rank.*torchtitan": (_TITAN, _SEVERAL),
    "needs two stages a rank.*automodel": (_AUTOMODEL, _SEVERAL),
}


@pytest.mark.parametrize("system", JUDGES)
def test_what_is_refused_is_refused_by_the_system_or_names_its_check(system: str) -> None:
    judged = 0
    for seed in range(60):
        job = normal(broken_job(seed, system))
        reasons = SYSTEMS[system].refusals(job)
        assert reasons
        if cited := [
            place for reason in reasons for words, place in CHECKS_IN_SOURCE.items() if re.search(words, reason)
        ]:
            assert all(line in (FOLDER / file).read_text() for file, line in cited if file)
            continue
        with pytest.raises((AssertionError, ValueError, RuntimeError)):
            JUDGES[system](SYSTEMS[system].write(job), job.shape.num_hidden_layers if job.shape else 0)
        judged += 1
    assert judged >= 8
