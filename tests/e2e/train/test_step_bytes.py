"""Predicted bytes of a step against those of runs: saved tensors and peaks, by weak references to storages."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeloom.config import Layout, load_layout
from pipeloom.measure.build import (
    build_pipeline,
)
from pipeloom.measure.device_profile import predicted_costs
from pipeloom.measure.layer_bytes import layer_bytes
from pipeloom.plan.run import predicted as planned_run
from pipeloom.schedule import simulate
from pipeloom.schedule.transforms import recompute
from pipeloom.train.report.step_bytes import predicted
from pipeloom.train.report.verify import make_batch
from processes import run_ranks

EXPERTS = {"model.num_experts": 4, "model.num_experts_per_tok": 2}
BLOCK, WHOLE = (
    {"schedule.transforms": ["recompute"], "schedule.transport": "individual"},
    {"schedule.transforms": ["recompute=whole"]},
)
GLOO = {"schedule.transport": "individual"}
FLAG = {"train.recompute": "full", "schedule.transport": "individual"}
UNEVEN = {"train.global_batch_size": 7, "schedule.microbatches": 4}
# name -> (schedule, micro-batches, other keys)
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpipe": ("gpipe", 4, {}),
    "1f1b": ("1f1b", 4, {}),
    "1f1b, bf16": ("1f1b", 4, {"train.dtype": "bfloat16"}),
    "zbv, uneven, gloo": ("zbv", 4, UNEVEN | {"schedule.transport": "individual"}),
    "1f1b, tied": ("1f1b", 4, {"model.tie_word_embeddings": True}),
    # The sum of the tied weight's gradients, when the step has ended, is the peak of both ranks.
    "1f1b, tied and large": (
        *("1f1b", 4),
        GLOO | {"model.tie_word_embeddings": True, "model.vocab_size": 8192, "train.seq_len": 16},
    ),
    "1f1b, gloo": ("1f1b", 4, {"schedule.transport": "individual"}),
    "1f1b, experts": ("1f1b", 4, EXPERTS),
    "1f1b, R blocks": ("1f1b", 4, BLOCK),
    "1f1b, R blocks of some": ("1f1b", 4, GLOO),
    "1f1b, R whole": ("1f1b", 4, WHOLE),
    "gpipe, R whole of the last": ("gpipe", 4, GLOO),  # whose forward is the peak
    "1f1b, R of norms": ("1f1b", 4, GLOO | {"schedule.transforms": ["recompute=norms"]}),
    "1f1b, R of attention": ("1f1b", 4, GLOO | {"schedule.transforms": ["recompute=attention"]}),
    "interleaved, R of mlp": ("interleaved", 4, GLOO | {"schedule.transforms": ["recompute=mlp"]}),
    "1f1b, experts, R of activation": (
        *("1f1b", 4),
        EXPERTS | GLOO | {"schedule.transforms": ["recompute=activation", "recompute=norms"]},
    ),
    "interleaved, gloo": ("interleaved", 4, {"schedule.transport": "individual"}),
    "interleaved, R blocks": ("interleaved", 4, BLOCK),
    "interleaved, R blocks by train.recompute": ("interleaved", 4, FLAG),
    "zb-h1": ("zb-h1", 4, {}),
    "zb-h1, uneven, R whole": ("zb-h1", 4, UNEVEN | WHOLE),
    "zb-h1, experts": ("zb-h1", 4, EXPERTS),
    "zbv": ("zbv", 4, {}),
    "zbv, R blocks": ("zbv", 4, BLOCK),
    "1f1b, experts, R blocks": ("1f1b", 4, EXPERTS | BLOCK),
    "zb-h1, experts, R blocks": ("zb-h1", 4, EXPERTS | BLOCK),
    "1f1b, slices": ("1f1b", 4, GLOO | {"schedule.slices": 4}),
    "1f1b, slices, R whole": ("1f1b", 4, GLOO | {"schedule.slices": 4, "schedule.transforms": ["recompute=whole"]}),
    "dualpipe": ("dualpipe", 4, {"train.seq_len": 256}),
    # The sums over the two routes are the peak, of one stage's weights after the other's.
    "dualpipe, few tokens": ("dualpipe", 4, {"train.seq_len": 4}),
    "dualpipe, bf16, few tokens": ("dualpipe", 4, {"train.seq_len": 4, "train.dtype": "bfloat16"}),
    "dualpipev": ("dualpipev", 4, {}),
    "dualpipev, R blocks": ("dualpipev", 4, BLOCK),
    "1f1b-overlap, experts": ("1f1b-overlap", 4, EXPERTS),
}
# Where adapters are trained, and the weights are those of another folder.
LORA = GLOO | {"model.weights": ".", "lora.r": 8}
ADAPTERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "adapters, 1f1b": ("1f1b", 4, LORA),
    "adapters, zb-h1": ("zb-h1", 4, LORA),
    "adapters of queries and values, zbv": ("zbv", 4, LORA | {"lora.target_modules": ["q_proj", "v_proj"]}),
    "adapters of the last half, 1f1b": ("1f1b", 4, LORA | {"lora.target_modules": r"model\.layers\.[23]\..*"}),
    "adapters, experts": ("1f1b", 4, LORA | EXPERTS),
}
# Sets of parts, and of whole layers, under each way to run.
SETS: dict[str, tuple[str, int, dict[str, Any]]] = {
    f"{schedule}, R of {parts}": (
        *(schedule, 4),
        GLOO | {"schedule.transforms": [f"recompute={part}" for part in parts.split("+")]},
    )
    for schedule in ("gpipe", "1f1b", "interleaved", "zbv")
    for parts in ("norms+attention", "norms+mlp", "norms+attention+mlp", "mlp+activation", "1/2")
}
LAYOUTS |= {
    name: SETS[name] for name in ("interleaved, R of norms+attention+mlp", "1f1b, R of mlp+activation", "zbv, R of 1/2")
}


# Ways to run of which the bytes allocated are compared in every run, one of each kind; `make full` compares all.
SAMPLE = (
    *("1f1b", "zbv, uneven, gloo", "1f1b, tied and large", "1f1b, R blocks", "1f1b, R blocks of some"),
    *("gpipe, R whole of the last", "1f1b, R of attention", "1f1b, slices, R whole", "dualpipe, bf16, few tokens"),
    *("zb-h1, experts", "1f1b-overlap, experts", "zbv, R of 1/2"),
)


def layout_of(name: str) -> Layout:
    schedule, count, keys = (LAYOUTS | SETS | ADAPTERS)[name]
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}
    flags = {f"model.{key}": value for key, value in shape.items()} | {
        "train.seq_len": 64,
        "train.global_batch_size": 8,
    }
    flags["train.device"] = "cpu"
    layout = load_layout("tiny", flags | {"schedule.name": schedule, "schedule.microbatches": count} | keys)
    if name.endswith("of the last"):
        return replace(layout, schedule=recompute(layout.schedule, True, [(0, 3), (1, 3)]))
    if not name.endswith("of some"):
        return layout
    return replace(layout, schedule=recompute(layout.schedule, actions=[(0, 1), (0, 2), (1, 3)]))


class Live(TorchDispatchMode):
    """The most bytes of storages that operations made and that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs or {})):
            if isinstance(tensor, torch.Tensor):
                self._known.add(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _freed(self, size: int) -> None:
        self.now -= size


def allocated_in_a_step(rank: int, names: list[str]) -> list[int]:
    """The most bytes that a step of each layout, before which no gradient is there, has allocated at once."""
    peaks = []
    for name in names:
        layout = layout_of(name)
        pipeline, batch = build_pipeline(layout, torch.device("cpu")), make_batch(layout)
        # The first forwards that are recomputed work on copies, which layers may change.
        for _ in range(16 if "R blocks" in name else 1):
            pipeline.step(batch.tokens, batch.targets)
        pipeline.zero_grad()
        with Live() as live:
            pipeline.step(batch.tokens, batch.targets)
        peaks.append(live.most + pipeline.stats.receive_bytes)  # of the steps before
        pipeline.close()
    return peaks


@pytest.mark.parametrize(
    "name", [n for n in LAYOUTS if n.startswith(("1f1b", "interleaved")) and "overlap" not in n and "slices" not in n]
)
def test_the_planner_predicts_what_measured_layers_do(name: str) -> None:
    layout = layout_of(name)
    planned, measured = planned_run(layout).ranks, predicted(layout)
    for one, other in zip(planned, measured, strict=True):
        if "R blocks" not in name:  # there a measured forward, with what it holds while it runs, is the fullest
            assert one.activations == pytest.approx(other.activations, rel=0.01)
        sums = one.activations + one.temporaries, other.activations + other.temporaries
        assert sums[0] == pytest.approx(sums[1], rel=0.02)


def test_adapters_take_the_bytes_that_a_dry_run_predicts() -> None:
    """Within 3 % of what a step makes, and 6 % where all that a rank does is a forward."""
    for at, rows in enumerate(zip(*run_ranks(allocated_in_a_step, 2, [*ADAPTERS]), strict=True)):
        name = [*ADAPTERS][at]
        planned = planned_run(layout_of(name)).ranks
        expected = [each.total - each.parameters - each.optimizer for each in planned]
        assert expected == pytest.approx(list(rows), rel=0.06 if "half" in name else 0.03), name


@pytest.mark.parametrize(
    "names",
    [[*SAMPLE], pytest.param([name for name in LAYOUTS | SETS if name not in SAMPLE], marks=pytest.mark.full)],
    ids=["sample", "others"],
)
def test_allocated_bytes(names: list[str]) -> None:
    """From measured layers, and from the planner's."""
    by_rank, wrong = run_ranks(allocated_in_a_step, 2, names), {}
    for at, name in enumerate(names):
        layout = layout_of(name)
        rows = predicted(layout)
        planned = planned_run(layout)
        if name.endswith("of the last"):  # a search counts all buffers of messages
            counts = predicted_costs(layout, layer_bytes(layout))
            more = zip(
                simulate(layout.schedule, counts).peak_bytes["device"], dict(counts.bytes)["messages"], strict=True
            )
            assert [peak - sent for peak, sent in more] == pytest.approx([row.total - row.buffers for row in rows])
        for rank, row in enumerate(rows):
            kept_sums = layout.config.train.dtype == "bfloat16"  # fp32 sums stay from step to step
            standing = row.parameters + row.optimizer + row.gradients * kept_sums
            sizes, measured = [row.total, planned.ranks[rank].total], by_rank[rank][at]
            if name.endswith(
                "of the last"
            ):  # the planner recomputes all micro-batches alike, and counts backwards alone
                sizes.pop()
            errors = [(size - standing) / measured - 1 for size in sizes]
            print(f"| {name} | {rank} | {measured:,} | {errors[0]:+.1%} | {errors[-1]:+.1%} |")
            if max(map(abs, errors)) > 0.03:
                wrong[name, rank] = errors
    assert not wrong
