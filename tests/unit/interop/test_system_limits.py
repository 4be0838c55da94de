"""What Megatron-LM refuses, row by row: the sentence, the file with the check, and a neighbour that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from pipeloom.errors import UsageError
from pipeloom.interop.megatron import refusals
from pipeloom.interop.systems import translated
from pipeloom.plan import load_model
from pipeloom.plan.job import Job, normal
from pipeloom.plan.layout import parse

EXPERTS = "pp=4,dp=4,ep=4,v=2,m=8,schedule=interleaved-overlap"
PAIRS = {"options": ("overlap_experts",), "dispatcher": "alltoall"}
ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    ("pp=4,m=8,schedule=zbv,v=2", {}, "there is no schedule 'zbv' (pipeline_parallel/schedules.py)", "interleaved"),
    ("pp=4,m=8,v=2,schedule=interleaved,group=3", {}, "a group of 3 is outside 4 to 8", "group=4"),
    ("pp=4,m=8,v=2,schedule=interleaved,group=9", {}, "a group of 9 is outside 4 to 8", "group=4"),
    ("pp=4,m=11,v=2,schedule=interleaved,group=8", {}, "m=11 leaves 3 micro-batches over groups of 8", "m=8"),
    ("pp=4,m=3,v=2,schedule=interleaved", {}, "m=3 is less than the 4 ranks", "m=4"),
    ("pp=2,m=4,v=2,schedule=interleaved", {"options": ("blocking_p2p",)}, "chunks on two ranks need", "pp=4"),
    (
        "pp=4,m=8",
        {"options": ("overlap_warmup",)},
        "messages of the warm-up overlap (model_parallel",
        "no overlap_warmup",
    ),
    (
        "pp=4,m=8,v=2,schedule=interleaved",
        {"options": ("blocking_p2p", "overlap_warmup")},
        "the warm-up",
        "no overlap_",
    ),
    (EXPERTS, {"options": ("overlap_experts",)}, "needs another dispatcher (transformer_config.py)", "alltoall"),
    (EXPERTS, {"options": ("overlap_experts",), "dispatcher": "allgather"}, "needs another dispatcher", "alltoall"),
    (f"{EXPERTS},recompute=full", PAIRS, "does not recompute whole blocks (transformer_config.py)", "recompute=none"),
    (EXPERTS.replace("-overlap", ""), PAIRS, "pairs its chunks", "interleaved-overlap"),
    (EXPERTS, {}, "a schedule of pairs is the overlap of experts' exchange", "interleaved"),
    ("dp=2,m=4", {"options": ("delay_wgrad",)}, "delay_wgrad needs", "overlap_experts"),
    ("dp=2,m=4", {"options": ("overlap_tensor",)}, "the overlap of tp's exchanges needs some (arguments.py)", "tp=2"),
    ("dp=2,m=4", {"options": ("overlap_params",)}, "needs that of sums (arguments.py)", "overlap_grads"),
    ("dp=2,m=4,zero=0", {"options": ("overlap_grads", "overlap_params")}, "needs the distributed optimizer", "zero=1"),
    ("m=4,offload=attn_proj", {}, "attn_proj goes to the host with core_attn alone", "offload=attn_proj+core_attn"),
    ("m=4,recompute=norms", {"fp8": "delayed"}, "delayed scaling does not recompute norms", "recompute=attention"),
    ("tp=2,dp=2,ep=4,etp=2,m=4", {}, "etp x ep x pp = 8 does not divide 4 devices (parallel_state.py)", "etp=1"),
    ("tp=2,dp=2,ep=8,etp=2,m=4", {}, "etp x ep x pp = 16 does not divide 4 devices", "ep=2"),
    (
        "tp=2,m=4",
        {"sequence": False},
        "experts over tp=2 need sequence parallelism (moe_layer.py)",
        "--sequence-parallel",
    ),
    (
        "tp=2,m=4",
        {"options": ("overlap_tensor",), "sequence": False},
        "exchanges needs sequence parallelism (arguments.py)",
        "--sequence-parallel",
    ),
    ("pp=4,dp=2,ep=8,m=4", {}, "etp x ep x pp = 32 does not divide 8 devices", "ep=2"),
    ("tp=2,dp=3,ep=4,etp=2,m=4", {}, "etp x ep x pp = 8 does not divide 6 devices", "ep=1"),
    ("tp=3,m=4", {}, "tp=3 does not divide the 32 heads", "tp=1"),
    ("dp=3,ep=3,m=4", {}, "ep=3 does not divide the 128 experts", "ep=1"),
    ("m=4,recompute=latent_up", {}, "latent_up needs latent attention", "recompute=attention"),
]


@pytest.mark.parametrize(("words", "more", "sentence", "near"), ROWS)
def test_what_megatron_refuses(words: str, more: dict[str, Any], sentence: str, near: str) -> None:
    job = normal(Job(load_model("qwen3-30b-a3b"), parse(words), **more))
    words_of_file, _, file = sentence.partition(" (")
    (reason,) = [each for each in refusals(job) if words_of_file in each and file in each]
    assert reason.partition("; nearest: ")[2].startswith(near)
    with pytest.raises(UsageError, match="megatron does not take this run"):
        translated(job, "megatron")


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (EXPERTS, PAIRS),
        ("pp=4,m=12,v=2,schedule=interleaved,group=8", {}),
        ("pp=4,m=8,v=2,schedule=interleaved", {"options": ("overlap_warmup",)}),
    ],
)
def test_what_megatron_takes(words: str, more: dict[str, Any]) -> None:
    assert refusals(normal(Job(load_model("qwen3-30b-a3b"), parse(words), **more))) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("m=4,recompute=activation", "moe_act is a part of experts"), ("dp=2,ep=2,m=4", "ep=2 needs experts")],
)
def test_what_megatron_refuses_of_a_dense_model(words: str, sentence: str) -> None:
    assert any(sentence in each for each in refusals(normal(Job(load_model("llama3-8b"), parse(words)))))
