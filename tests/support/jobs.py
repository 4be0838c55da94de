"""Runs of models that other systems have: random ones, by seed, and such that were made worse by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from pipeloom.interop.gain import RUNTIME_OF, Neighbourhood
from pipeloom.plan import RUNTIMES, Planner, load_device, load_model, parse_layout
from pipeloom.plan.job import Job, normal
from pipeloom.plan.layout import PlannedLayout
from pipeloom.shapes.cut import parse_stages
from pipeloom.shapes.ops import OFFLOADED, PARTS

MODELS = (
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "deepseek-v2",
    "deepseek-v3",
    "gpt3-175b",
)
FAMILIES = {
    "megatron": ("1f1b", "interleaved", "interleaved-overlap"),
    "torchtitan": ("1f1b", "gpipe", "interleaved", "interleaved-zb", "zbv", "dualpipev", "looped-bfs"),
}
FAMILIES |= {"automodel": FAMILIES["torchtitan"], "pipeloom": ("1f1b", "zb-h1", "interleaved", "zbv", "dualpipev")}
_BACK_AND_FORTH = ("zbv", "dualpipev")


def random_cut(draw: random.Random, layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each of `stages` stages, each at least one, at random."""
    ends = sorted(draw.sample(range(1, layers), stages - 1))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, layers], strict=True))


def random_job(seed: int, system: str) -> Job:
    """A run with random values in all fields; most of them are ones that the system takes."""
    draw = random.Random(f"{system}-{seed}")
    shape = load_model(draw.choice(MODELS if system != "pipeloom" else MODELS[:5]))
    experts = shape.num_experts > 0
    family = draw.choice([name for name in FAMILIES[system] if experts or name != "interleaved-overlap"])
    pp = draw.choice([2, 4, 4, 8]) if family != "1f1b" else draw.choice([1, 2, 4, 8])
    v = 1 if family in ("1f1b", "gpipe", "zb-h1") else 2 if family in _BACK_AND_FORTH else draw.choice([2, 2, 3, 4, 8])
    m = pp * draw.choice([2, 3, 4]) if draw.random() < 0.85 else draw.randint(1, 40)
    tp, cp, dp = draw.choice([1, 2, 4, 8]), draw.choice([1, 1, 2]), draw.choice([1, 2, 4, 8])
    ep = draw.choice([2, 4] if family == "interleaved-overlap" else [1, 2, 4, 8]) if experts else 1
    if ours := system == "pipeloom":
        ep, tp = min(ep, dp), min(tp, 4)
    stages = random_cut(draw, shape.blocks + 2, pp * v) if draw.random() < 0.7 and pp * v <= shape.blocks else ()
    overlap = family == "interleaved-overlap" and experts
    options = {"overlap_experts"} if overlap else set()
    options |= {"overlap_grads"} if draw.random() < 0.5 else set()
    if v > 1 and pp > 2 and system != "pipeloom":
        options |= set(draw.choice([(), ("blocking_p2p",), ("overlap_warmup",)]))
    options |= {"overlap_params"} if "overlap_grads" in options and draw.random() < 0.5 else set()
    options |= {"delay_wgrad"} if overlap and draw.random() < 0.5 else set()
    options |= {"overlap_tensor"} if tp > 1 and system == "megatron" and draw.random() < 0.5 else set()
    parts = [part for part in PARTS if draw.random() < 0.3 and (shape.kv_lora_rank or part != "latent_up")]
    layout = PlannedLayout(
        dp, tp, cp, pp, ep, v, m,
        micro_batch=draw.choice([1, 2]),
        seq=draw.choice([4096, 8192]),
        zero=draw.choice([0, 1, 1, 2, 3] if "overlap_params" not in options else [1, 2]),
        recompute=draw.choice(["none", "none", "none" if overlap else "full", "+".join(parts) or "none"][: 3 if ours else 4]),
        schedule=family,
        capacity=draw.choice([0.0, 0.0, 1.5]) if experts else 0.0,
        etp=draw.choice([0, 1]) if experts else 0,
        grads=draw.choice(["fp32", "fp32", "bf16"]),
        offload="+".join(sorted(draw.sample(list(OFFLOADED), 2))) if draw.random() < 0.2 else "none",
        group=draw.choice([0, 0, pp, m]) if v > 1 and family in ("interleaved", "interleaved-overlap") else 0,
        stages=stages,
    )  # fmt: skip
    job = Job(
        shape, layout,
        fp8=draw.choice(["", "", "blockwise", "delayed"]),
        options=tuple(sorted(options)),
        context=draw.choice(["", "p2p", "a2a"]) if cp > 1 else "",
        dispatcher=draw.choice(["alltoall", "deepep"] if overlap else ["", "allgather", "alltoall"]) if experts else "",
    )  # fmt: skip
    if layout.recompute == "full":
        layers = draw.choice([0, 0, 2])
        job = replace(job, layout=replace(layout, recompute_layers=layers))
        job = replace(job, recompute_span=1 if layers else draw.choice([1, 1, 3]))
    if layout.offload != "none":
        job = replace(job, offload_share=draw.choice([1.0, 0.5]))
    if not (experts and system == "megatron") and "overlap_tensor" not in options:
        job = replace(job, sequence=draw.random() < 0.7)
    return normal(job)


UNHELD = {
    "megatron": {"model.vocab_size"},  # padded to a multiple of tp
    "torchtitan": {
        "model", "options", "fp8", "grads", "dispatcher", "context", "etp", "capacity", "recompute", "recompute_layers",
        "recompute_span", "offload", "offload_share", "group", "zero", "model.num_nextn_predict_layers", "stages",
    },
}  # fmt: skip
"""System -> fields that its words do not hold; `stages` of models that predict further ahead, which it does not train."""
UNHELD["automodel"] = UNHELD["torchtitan"]
UNHELD["pipeloom"] = {
    "options", "fp8", "grads", "dispatcher", "context", "etp", "recompute_span", "offload", "offload_share", "group",
}  # fmt: skip
_BREAKS: list[dict[str, Any]] = [
    {"schedule": "v-half", "v": 2, "pp": 4},
    {"schedule": "interleaved", "v": 1, "pp": 4},
    {"schedule": "1f1b", "v": 2, "pp": 4},
    {"schedule": "interleaved", "v": 2, "pp": 4, "m": 13},
    {"ep": 64, "dp": 1, "tp": 1, "cp": 1, "etp": 1},
]
_BREAKS_OF = {
    "megatron": [{"schedule": "interleaved", "v": 2, "pp": 8, "m": 6}, {"schedule": "zbv", "v": 2, "pp": 4}],
    "torch": [{"schedule": "1f1b", "v": 1, "pp": 8, "m": 4}, {"schedule": "zbv", "v": 4, "pp": 4}],
}


def broken_job(seed: int, system: str) -> Job:
    """A run that the system refuses: a random one with values that it does not take together."""
    breaks = _BREAKS + _BREAKS_OF["megatron" if system == "megatron" else "torch"]
    job = random_job(seed, system)
    return replace(job, layout=replace(job.layout, stages=(), group=0, **breaks[seed % len(breaks)]))


def layers_of_ranks(job: Job) -> list[list[list[int]]]:
    """[pipeline rank][chunk] -> the numbers of the blocks there, without those that predict further ahead."""
    layout, blocks = job.layout, 0 if job.shape is None else job.shape.num_hidden_layers
    if layout.pp == 1:
        return [[list(range(blocks))]]
    ends, last = [], 0
    for at, count in enumerate(layout.stages):
        last += count - (at == 0) - (at == len(layout.stages) - 1)
        ends.append(min(last, blocks))
    held = [list(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]
    p, vee = layout.pp, layout.schedule in _BACK_AND_FORTH
    return [
        [held[2 * p - 1 - rank if vee and chunk else chunk * p + rank] for chunk in range(layout.v)]
        for rank in range(p)
    ]


OVERLAPS = ("overlap_grads", "overlap_params")
WORSE = [
    ("megatron", "llama3-8b", "dp=2,pp=4,m=16,recompute=full", ""),
    ("megatron", "llama3-8b", "tp=2,pp=4,m=32,v=2,seq=8192", "Et*6|t*2|t*4|t*4|t*4|t*4|t*6|ttL"),
    ("megatron", "llama3-8b", "dp=2,tp=2,pp=2,m=16,recompute=full,recompute_layers=8,seq=8192", ""),
    ("megatron", "llama3-70b", "dp=2,tp=8,pp=4,m=32,seq=8192", "Et*20|t*20|t*24|t*16L"),
    ("megatron", "llama3-70b", "dp=4,tp=4,pp=4,m=16,recompute=full,v=5,seq=4096", ""),
    ("megatron", "llama3-70b", "dp=2,tp=8,pp=16,m=32,seq=8192,recompute=attention+mlp+norms", ""),
    ("megatron", "llama3-405b", "dp=8,tp=8,pp=16,m=32,seq=8192,recompute=full", "Et*7|(t*8|)*14t*7L"),
    ("megatron", "mixtral-8x7b", "dp=4,tp=2,pp=4,ep=4,etp=1,m=16,recompute=full", ""),
    ("megatron", "mixtral-8x7b", "dp=8,pp=4,ep=8,etp=1,m=32,v=2", "Et*6|t*2|t*4|t*4|t*4|t*4|t*6|ttL"),
    ("megatron", "qwen3-30b-a3b", "dp=4,tp=2,pp=4,ep=8,etp=1,m=64", "Et*16|t*8|t*8|t*16L"),
    ("megatron", "qwen3-30b-a3b", "dp=8,pp=2,ep=8,etp=1,m=16,v=2,recompute=full,seq=4096", ""),
    ("megatron", "deepseek-v3", "dp=16,tp=2,pp=8,ep=32,etp=1,m=32,v=4,recompute=full,seq=4096", ""),
    ("megatron", "deepseek-v3", "dp=64,pp=16,ep=64,etp=1,m=128,v=2,recompute=full,seq=4096", ""),
    ("torchtitan", "llama3-8b", "dp=2,pp=4,m=16,zero=2,recompute=full", ""),
    ("torchtitan", "llama3-8b", "dp=2,pp=4,m=16,zero=2,v=2", "Et*6|t*2|t*4|t*4|t*4|t*4|t*6|ttL"),
    ("torchtitan", "llama3-70b", "dp=2,tp=8,pp=4,m=16,zero=2,recompute=full,seq=8192", "Et*16|t*24|t*24|t*16L"),
    ("torchtitan", "llama3-405b", "dp=8,tp=8,pp=16,m=32,zero=2,recompute=full,seq=8192", ""),
    ("torchtitan", "qwen3-30b-a3b", "dp=8,pp=2,ep=8,etp=1,m=16,zero=2,recompute=full", ""),
    ("torchtitan", "qwen3-30b-a3b", "dp=4,tp=2,pp=4,ep=8,etp=1,m=16,zero=2", "Et*16|t*8|t*8|t*16L"),
    ("torchtitan", "deepseek-v3", "dp=32,pp=16,ep=32,etp=1,m=64,zero=2,recompute=full", ""),
]
"""Jobs whose cut, chunks or recomputation were made worse by hand: system, model, layout, stages ("": even)."""
H100 = load_device("h100")


def gain_job(system: str, model: str, text: str, stages: str = "") -> Job:
    """The job of a row of `WORSE`."""
    layout = replace(parse_layout(text), cut="even")
    shape = load_model(model)
    if RUNTIME_OF[system] == "torchtitan":
        shape = replace(shape, num_nextn_predict_layers=0)
    if stages:
        ahead = shape.num_nextn_predict_layers
        counts = parse_stages(stages, shape.num_hidden_layers, layout.pp * layout.v, ahead)
        layout = replace(layout, stages=tuple(counts))
    options = OVERLAPS[: 1 + (layout.zero > 0)] if system == "megatron" else ()
    return normal(Job(shape, layout, options=options, dispatcher="alltoall", system=system))


def gain_space(job: Job, *, axes: bool = False, memory: float = H100.memory) -> Neighbourhood:
    """The runs near a job on its axes, or on any."""
    assert job.shape is not None
    return Neighbourhood(Planner(job.shape, H100, RUNTIMES[RUNTIME_OF[job.system]]), memory, axes)
