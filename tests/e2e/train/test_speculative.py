"""Optimizer steps without a barrier against the same steps with one: bit by bit, also after a step was taken back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeloom.config import Layout, load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.models import cross_entropy
from pipeloom.runtime import Layer, Pipeline
from pipeloom.runtime.executor import Executor
from pipeloom.train.data.batches import Batch
from pipeloom.train.loop import Trainer
from pipeloom.train.optimizer import Optimizer
from pipeloom.train.speculative import OptimizerCopy, Outcome, SpeculativeOptimizer
from processes import run_ranks
from run_notes import Notes, context

CPU = torch.device("cpu")
STEPS = 8
Spoil = Callable[[int, int, Pipeline], None]


@dataclass
class Run:
    """One rank's training: a value a step, and what it has at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rolled_back: list[int] = field(default_factory=list)
    rollbacks: int = 0
    speculations: int = 0
    weights: list[torch.Tensor] = field(default_factory=list)
    state: list[torch.Tensor] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    def final(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        if outcome.rolled_back:
            self.rolled_back.append(len(self.losses))
        self.losses.append(outcome.loss)
        self.norms.append(outcome.norm)


def batch_of(layout: Layout, step: int) -> Batch:
    shape = (layout.config.train.global_batch_size, layout.config.train.seq_len)
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(0, layout.config.model.vocab_size, (2, *shape), generator=generator)
    return Batch(tokens, targets)


def spoiling(pipeline: Pipeline, rank: int, spoil: Spoil, step: SimpleNamespace) -> None:
    """From now on the gradients of a step are spoilt when it has run, each time that it runs."""
    plain = pipeline.forward_backward

    def forward_backward(inputs: Any, targets: Any) -> Any:
        loss = plain(inputs, targets)
        spoil(rank, step.now, pipeline)
        return loss

    pipeline.forward_backward = forward_backward  # type: ignore[method-assign]
    pipeline.step = lambda inputs, targets: forward_backward(inputs, targets).wait()  # type: ignore[method-assign]


def train(rank: int, layout: Layout, barrier: bool, spoil: Spoil, steps: int = STEPS, build: Any = None) -> Run:
    torch.manual_seed(rank)
    pipeline = build(layout) if build is not None else build_pipeline(layout, CPU)
    step, run = SimpleNamespace(now=0), Run()
    spoiling(pipeline, rank, spoil, step)
    trainer = Trainer(layout.config, pipeline, context(rank), None)
    optimizer = trainer.optimizer
    speculative = SpeculativeOptimizer(pipeline, optimizer)
    for now in range(steps):
        batch = batch_of(layout, now).part(pipeline.mesh.place.dp, layout.mesh.dp)
        rate, step.now = 1e-3 * (now + 1), now
        run.final(trainer.step(batch, rate) if barrier else speculative.step(batch.arguments, rate))
    if not barrier:
        run.final(speculative.settle())
        assert speculative.settle() is None
    run.rollbacks, run.speculations = speculative.rollbacks, speculative.speculations
    run.weights = [value.detach().clone() for value in pipeline.state_dict().values()]
    run.state = [value for state in optimizer.optimizers[0].state.values() for value in state.values()]
    pipeline.close()
    return run


def scale(factor: float, at: int, only: int | None = None) -> Spoil:
    """Multiplies the gradients of step `at` on all ranks, or on one."""

    def spoil(rank: int, step: int, pipeline: Pipeline) -> None:
        sync = pipeline.sync
        slices = (
            [bucket.part for bucket in sync.buckets] if sync is not None else [p.grad for p in pipeline.parameters()]
        )
        for gradient in slices:
            if step == at and only in (None, rank) and gradient is not None:
                gradient.mul_(factor)

    return spoil


def nothing(rank: int, step: int, pipeline: Pipeline) -> None:
    pass


def compare(rank: int, layout: Layout, spoil: Spoil, steps: int = STEPS, build: Any = None) -> Run:
    """The run without a barrier; `differs` says in what it is another than the one with one."""
    wanted, found = (train(rank, layout, barrier, spoil, steps, build) for barrier in (True, False))
    assert len(wanted.losses) == steps
    found.differs = [
        name
        for name, equal in (
            ("losses", same(found.losses, wanted.losses)),
            ("norms", same(found.norms, wanted.norms)),
            ("weights", all(map(torch.equal, found.weights, wanted.weights))),
            ("state", len(found.state) == len(wanted.state) and all(map(torch.equal, found.state, wanted.state))),
        )
        if not equal
    ]
    found.weights, found.state = [], []  # they need not go to the test's process
    return found


def same(found: list[float], wanted: list[float]) -> bool:
    """Bit by bit; NaN equals NaN."""
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(found, wanted, strict=True))


def layout_of(ranks: int, clip_norm: float, **others: Any) -> Layout:
    overrides = {"parallel.pp": ranks, "optimizer.clip_norm": clip_norm, "schedule.name": "1f1b"}
    return load_layout("tiny", {**overrides, **others})


class Noisy(nn.Module):
    """Random numbers and a running mean: what a forward pass changes beside gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.dropout(x))
        self.mean.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)  # type: ignore[operator, union-attr]
        return x + y - self.mean


def noisy_pipeline(layout: Layout) -> Pipeline:
    first, last = Layer("in", lambda: nn.Embedding(256, 8)), Layer("out", lambda: nn.Linear(8, 256))
    middle = [Layer(f"noisy{number}", Noisy) for number in range(4)]
    return Pipeline([first, *middle, last], layout.schedule, loss=cross_entropy)


def scenarios(rank: int, ranks: int) -> Mapping[str, Run]:
    """All cases of one number of ranks, in one spawn."""
    options: dict[str, Any] = {"schedule.name": "zb-h2" if ranks == 4 else "1f1b"}
    calm = compare(rank, layout_of(ranks, 0.0, **options), nothing)
    limit, at, last = 1.05 * max(calm.norms), 5, ranks - 1
    each = 1.1 * limit / calm.norms[at]
    routes = {"schedule.name": "chimera", "schedule.microbatches": 8}
    sharded: dict[str, Any] = {"parallel.pp": 1, "parallel.dp": 2, "schedule.microbatches": 2, "optimizer.zero1": True}
    if ranks == 4:
        sharded |= {"parallel.pp": 2, "train.dtype": "bfloat16"}
    tied = {**options, "model.tie_word_embeddings": True}
    found = {
        name: compare(rank, layout_of(ranks, most, **chosen), spoil)
        for name, (most, chosen, spoil) in {
            "clipped together": (limit, options, scale(each, at)),
            "clipped for one rank": (limit, options, scale(1000.0, at, only=last)),
            "nan": (limit, options, scale(math.nan, at, only=0)),
            "nan without clipping": (0.0, options, scale(math.inf, at, only=last)),
            "nan at the end": (limit, options, scale(math.nan, STEPS - 1, only=0)),
            "two routes": (0.0, routes, scale(math.nan, at, only=0)),
            "sharded": (limit, sharded, scale(1000.0, at, only=0)),
            "sharded nan": (0.0, sharded, scale(math.nan, at, only=1)),
            "sharded nan at the end": (0.0, sharded, scale(math.nan, STEPS - 1, only=1)),
            "tied": (limit, tied, scale(1000.0, at, only=0)),
        }.items()
    }
    noisy = compare(rank, layout_of(ranks, 0.0), scale(math.nan, at, only=last), build=noisy_pipeline)
    always = compare(rank, layout_of(ranks, limit / 1000, **options), nothing, steps=4)
    return found | {"calm": calm, "always clipped": always, "dropout and buffers": noisy}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=[pytest.mark.full])])
def test_losses_and_weights_are_those_of_a_barrier(ranks: int) -> None:
    results: list[Mapping[str, Run]] = run_ranks(scenarios, ranks, ranks)
    for name in results[0]:
        at = [] if name in ("calm", "always clipped") else [STEPS - 1] if name.endswith("at the end") else [5]
        for case in (result[name] for result in results):
            assert (case.differs, case.rolled_back, case.rollbacks) == ([], at, len(at)), name
            infinite = "nan" in name or name in ("dropout and buffers", "two routes")
            assert all(math.isfinite(case.norms[step]) != infinite for step in at), name
    speculations = {name: [result[name].speculations for result in results] for name in results[0]}
    assert speculations["calm"] == [STEPS - 1] * ranks  # the first waits
    assert speculations["clipped together"] == [STEPS - 2] * ranks  # the one after a clipped one waits
    assert speculations["clipped for one rank"] == [STEPS - 2] * (ranks - 1) + [STEPS - 3]
    assert speculations["always clipped"] == [0] * ranks


def overlap(rank: int) -> dict[bool, tuple[list[float], list[float]]]:
    """With and without a barrier: when each step began and ended on this rank; the last rank ends late."""
    layout = layout_of(2, 0.0)
    found = {}
    plain: Any = Executor.run
    for barrier in (True, False):
        pipeline = build_pipeline(layout, CPU)
        begins: list[float] = []
        ends: list[float] = []

        def late(executor: Any, batch: Any, begins: Any = begins, ends: Any = ends) -> Any:
            begins.append(time.perf_counter())
            result = plain(executor, batch)
            if rank == 1:
                time.sleep(1.0)
            ends.append(time.perf_counter())
            return result

        Executor.run = late  # type: ignore[method-assign, assignment]
        trainer = Trainer(layout.config, pipeline, context(rank), None)
        speculative = SpeculativeOptimizer(pipeline, trainer.optimizer)
        for step in range(5):
            if barrier:
                trainer.step(batch_of(layout, step), 1e-3)
            else:
                speculative.step(batch_of(layout, step).arguments, 1e-3)
        speculative.settle()
        pipeline.close()
        found[barrier] = begins, ends
    return found


def test_a_rank_that_is_done_starts_the_next_step() -> None:
    first, last = run_ranks(overlap, 2)
    for barrier, early in (
        (True, 0),
        (False, 3),
    ):  # the first step waits for the norm, three follow one that has a next
        begins, ends = first[barrier][0], last[barrier][1]
        assert len(begins) == len(ends) == 5
        assert sum(begin < end for begin, end in zip(begins[1:], ends[:-1], strict=True)) == early


def test_one_process_needs_nobody() -> None:
    layout = load_layout("tiny", {"parallel.pp": 1, "schedule.name": "1f1b", "optimizer.clip_norm": 0.0})
    for spoil in (nothing, scale(math.nan, 5)):  # its own norm is the global one: it never speculates wrongly
        run = compare(0, layout, spoil)
        assert (run.differs, run.rollbacks) == ([], 0)


def test_state_that_a_step_made_is_gone_after_it_is_taken_back() -> None:
    weights = [("a", nn.Parameter(torch.ones(2, 2))), ("b", nn.Parameter(torch.ones(2, 2)))]
    optimizer = Optimizer(weights, load_layout("tiny", {"optimizer.clip_norm": 0.0}).config.optimizer)
    a, b = (weight for _, weight in weights)
    a.grad = torch.ones(2, 2)
    optimizer.step(None, 0.1)
    kept = a.detach().clone()
    copy = OptimizerCopy()
    copy.take(optimizer)
    b.grad = torch.ones(2, 2)
    optimizer.step(None, 0.1)
    a.grad = torch.ones(2, 2)
    optimizer.step(None, 0.1)
    assert not torch.equal(a, kept)
    assert optimizer.optimizers[0].state[b]["step"] == 1
    copy.restore(optimizer)
    assert torch.equal(a, kept)
    assert torch.equal(b, torch.ones(2, 2))
    assert set(optimizer.optimizers[0].state) == {a}
    assert optimizer.optimizers[0].state[a]["step"] == 1


def command_losses(rank: int, barrier: bool) -> tuple[list[dict[str, Any]], int]:
    """What the trainer's own loop reports, and the number of its lines."""
    options = {"optimizer.barrier": barrier, "train.steps": 7, "log.every": 3, "optimizer.clip_norm": 100.0}
    layout = load_layout("tiny", options)
    pipeline = build_pipeline(layout, CPU)
    report: Any = Notes()
    trainer = Trainer(layout.config, pipeline, context(rank), report)
    trainer.train(torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(0)))
    pipeline.close()
    return report.of("step"), len(trainer.log.traces)


def test_the_loop_reports_the_same_steps_without_a_barrier() -> None:
    wanted, lines = run_ranks(command_losses, 2, True)[0]
    found, lines_found = run_ranks(command_losses, 2, False)[0]
    assert [step["step"] for step in found] == [1, 2, 3, 4, 5, 6, 7]
    assert found == wanted
    assert lines == lines_found == 3
