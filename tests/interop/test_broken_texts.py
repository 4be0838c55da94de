"""Texts with one mistake: the system that they are for refuses them, and so does Pipeloom."""

from __future__ import annotations

import pytest

import other_systems
from pipeloom.errors import PipeloomError
from pipeloom.interop.systems import SYSTEMS, translated
from pipeloom.plan import load_model
from pipeloom.plan.job import Job
from pipeloom.plan.layout import parse

LAYOUT = "Et*4|(t*4|)*6t*4L"
BROKEN = {
    "megatron": [
        (LAYOUT, "Et*4|(t*4|)*6t*3L"),
        (LAYOUT, "Et*4|(t*4|)*6t*4LL"),
        (LAYOUT, "t*4|(t*4|)*6t*4L"),
        (LAYOUT, "Et*4|(t*4|)*5t*8L"),
        (LAYOUT, "Et*4|(t*4|)*6t*4x"),
        ("--num-attention-heads 32", "--num-attention-heads 31"),
        ("--num-query-groups 8", "--num-query-groups 3"),
        ("--bf16", "--pipeline-model-parallel-sise 4"),
        ("--bf16", "--recompute-granularity selective --recompute-modules everything"),
        ("--bf16", "--fine-grained-activation-offloading --offload-modules everything"),
        ("--bf16", "--fine-grained-activation-offloading --offload-modules attn_proj"),
        ("--bf16", "--expert-model-parallel-size 2"),
    ],
    "torchtitan": [
        ("schedule Interleaved1F1B", "schedule Interleaved2F1B"),
        ("tensor-parallel-degree 2", "tensor-parallel-degree many"),
        ("tensor-parallel-degree 2", "tensor-parallel-degre 2"),
        ("microbatch-size 1", "microbatch-size 3"),
        ("activation-checkpoint:none", "activation-checkpoint:everything"),
        ("expert-parallel-degree 1", "expert-parallel-degree 3"),
        (" norm,lm_head", " layers.31 norm,lm_head"),
    ],
    "automodel": [
        ("Interleaved1F1B", "Interleaved2F1B"),
        ("strategy: ", "strategie: "),
        ('"fsdp2"', '"fsdp3"'),
        ("pp_microbatch_size: 1", "pp_microbatch_size: 3"),
        ("ep_size: 1", "ep_size: 3"),
        ("pp_schedule: ", "pp_scheduler: "),
    ],
}
CASES = [(system, *change) for system, changes in BROKEN.items() for change in changes]


def text_for(system: str) -> str:
    stages = (5, 4, 4, 4, 4, 4, 4, 5) if system == "megatron" else (*(5,) * 6, 3, 1)
    layout = parse("tp=2,pp=4,v=2,m=8,schedule=interleaved")
    layout = type(layout)(**vars(layout) | {"stages": stages})
    text = translated(Job(load_model("llama3-8b"), layout), system)[0]
    return text.replace("--num-virtual-stages-per-pipeline-rank 2", f"--pipeline-model-parallel-layout '{LAYOUT}'")


@pytest.mark.parametrize(("system", "old", "new"), CASES)
def test_a_mistake_is_refused_by_both(system: str, old: str, new: str) -> None:
    text = text_for(system)
    assert old in text
    judge = getattr(other_systems, system)
    judge(text, 32)
    broken = text.replace(old, new)
    with pytest.raises((Exception, SystemExit)):
        judge(broken, 32)
    try:
        job = SYSTEMS[system].read(broken)
        translated(job, system)
    except PipeloomError:
        return
    assert job.unknown
