"""Steps of a plan: micro-batches of other shapes and another number in each, with a schedule for each replica."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pipeloom as pl
from models import WIDTH, Block, gradients, worst
from pipeloom.config import load_layout
from pipeloom.errors import UsageError
from pipeloom.measure.build import build_pipeline, model_layers, training_loss
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.runtime.p2p import shared_memory
from pipeloom.runtime.tensor_spec import to_numbers
from pipeloom.schedule.families import build
from pipeloom.schedule.transforms import transformed
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

TOKENS = 24  # the most of a micro-batch
INTRODUCED: list[Any] = []  # shapes that this process has told its peer, where that is noted
Sequences = list[tuple[Tensor, Tensor, Tensor, Tensor]]


class Shifted(Block):
    """A block that takes a value for each token by name."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x + shift[..., None])


def layers(count: int) -> list[Layer]:
    return [Layer(f"block{i}", lambda seed=i: Shifted(seed)) for i in range(count)]


def weighed_error(output: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the tokens with a weight: an advantage, say."""
    target, weights = targets
    return (weights * (output - target).square().mean(-1)).sum() / (weights != 0).sum()


def counted(targets: tuple[Tensor, Tensor]) -> Tensor:
    return (targets[1] != 0).sum()


def sequences_of(step: int) -> Sequences:
    """(inputs, targets, weights, shift) of each sequence; those of the first step are as long and as many as any."""
    numbers = random.Random(step)
    lengths = [numbers.randint(1, TOKENS) for _ in range(numbers.randint(3, 12))] if step else [TOKENS] * 16
    generator = torch.Generator().manual_seed(step)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return [
        (draw(n, WIDTH), draw(n, WIDTH), draw(n).abs() * (torch.arange(n) % 3 != 1), draw(n))  # the first token counts
        for n in lengths
    ]


def packed(sequences: Sequences, batch: tuple[int, ...]) -> tuple[Any, ...]:
    inputs, targets, weights, shift = (
        torch.cat(parts)[None] for parts in zip(*(sequences[at] for at in batch), strict=True)
    )
    return inputs, (targets, weights), {"shift": shift}


def of_one_process(modules: list[Shifted], sequences: Sequences) -> tuple[float, dict[str, Tensor]]:
    """The loss over all sequences of the step and its gradients, sequence after sequence."""
    count = sum(int((weights != 0).sum()) for _, _, weights, _ in sequences)
    total = torch.zeros(())
    for x, target, weights, shift in sequences:
        for module in modules:
            x = module(x, shift)
        total = total + (weights * (x - target).square().mean(-1)).sum() / count
    total.backward()
    found = {f"block{at}.{name}": p.grad for at, module in enumerate(modules) for name, p in module.named_parameters()}
    for module in modules:
        module.zero_grad()
    return total.item(), {name: gradient for name, gradient in found.items() if gradient is not None}


def steps(rank: int, family: tuple[str, int], dp: int, transport: Any, count: int) -> dict[str, Any]:
    chunks, ranks = family[1], 2
    mesh = Mesh.of(MeshShape(pp=ranks, dp=dp))
    assert mesh is not None
    plan = pl.plan_step([TOKENS] * 16, ranks, dp, tokens=TOKENS, families=[family])
    options = RuntimeOptions(monitor=False, transport=transport)
    pipeline = Pipeline(
        layers(2 * chunks), plan.replicas[0].schedule, loss=weighed_error, weight=counted, mesh=mesh, options=options
    )
    modules = [Shifted(seed) for seed in range(2 * chunks)]
    report: dict[str, Any] = {each: [] for each in ("count", "loss", "worst", "made", "bytes", "alive", "groups")}
    for step in range(count):
        sequences = sequences_of(step)
        plan = pl.plan_step([len(each[0]) for each in sequences], ranks, dp, tokens=TOKENS, last=plan)
        mine = plan.replicas[mesh.dp.index]
        chosen, schedule = mine.microbatches, mine.schedule
        if mesh.dp.index:  # this replica packs less
            chosen = tuple((at,) for batch in chosen for at in batch)
            schedule = build(family[0], ranks, len(chosen), None if family[0] == "zbv" else chunks)
        batches = [packed(sequences, batch) for batch in chosen]
        loss = pipeline.step(microbatches=batches, schedule=schedule)
        want_loss, want = of_one_process(modules, sequences)
        got = gradients(pipeline)
        report["count"].append(len(batches))
        report["loss"].append(abs(loss.item() - want_loss) / abs(want_loss))
        report["worst"].append(worst(got, {name: want[name] for name in got}))
        pipeline.zero_grad()
        del batches, got, want, sequences, loss
        gc.collect()
        report["made"].append(pipeline.stats.receive_buffers)
        report["bytes"].append(pipeline.stats.receive_bytes)
        report["alive"].append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
        report["groups"].append(dist.distributed_c10d._world.group_count)
    report["segments"] = pipeline.stats.send_segments
    report["introduced"] = list(INTRODUCED)
    pipeline.close()
    return report


def require_as_one_process(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert max(*report["loss"], *report["worst"]) <= 1e-5, report
        assert len(set(report["count"])) > 2, report  # the steps differ
        assert len(set(report["groups"])) == 1, report
        assert len(set(report["made"])) == len(set(report["bytes"])) == 1, (
            report
        )  # all in the first, which is the largest


@pytest.mark.core
@pytest.mark.parametrize(
    ("family", "transport"), [(("zb-h1", 1), "individual"), (("zbv", 2), "individual"), (("1f1b", 1), "shared")]
)
def test_two_ranks_compute_what_one_process_does_in_every_step(family: tuple[str, int], transport: str) -> None:
    require_as_one_process(run_ranks(steps, 2, family, 1, transport, 6))


def test_a_peer_remembers_a_limited_number_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes beyond it replace all earlier ones, which are sent again where they return."""

    def noted(boundary: Any) -> list[int]:
        INTRODUCED.append(boundary)
        return to_numbers(boundary)

    monkeypatch.setattr(shared_memory, "to_numbers", noted)
    for most, again in ((3, True), (4096, False)):
        monkeypatch.setattr(shared_memory, "_MOST_BOUNDARIES", most)
        reports = run_ranks(steps, 2, ("1f1b", 1), 1, "shared", 8)
        require_as_one_process(reports)
        for sent in (report["introduced"] for report in reports):
            assert (len(sent) > len(set(sent)) > 3) == again


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["individual", "shared"])
def test_fifty_steps_of_two_replicas_need_no_more_memory_than_the_first(transport: str) -> None:
    reports = run_ranks(steps, 4, ("zbv", 2), 2, transport, 50)
    require_as_one_process(reports)
    assert len({tuple(report["count"]) for report in reports}) == 2, reports  # the replicas differ
    for report in reports:
        assert max(report["alive"][2:]) <= report["alive"][1] + 8, report["alive"]


def other_order(rank: int) -> float:
    """The largest difference of a gradient where the replicas complete their two stages in different orders."""
    schedules = [
        pl.Schedule.of([["0F0", "1F0", "1B0", "0B0"]], placement=[0, 0], microbatches=1),
        pl.Schedule.of(
            [["0F0", "1F0", "1I0", "0B0", "0F1", "1F1", "1I1", "0B1", "1W0", "1W1"]],
            placement=[0, 0],
            microbatches=2,
        ),
    ]
    mesh = Mesh.of(MeshShape(dp=2))
    assert mesh is not None
    options = RuntimeOptions(monitor=False, transport="individual")
    pipeline = Pipeline(layers(2), schedules[1], loss=weighed_error, weight=counted, mesh=mesh, options=options)
    modules = [Shifted(seed) for seed in range(2)]
    furthest = 0.0
    for step in range(1, 4):
        sequences = sequences_of(step)[:3]
        batches = [packed(sequences, (at,)) for at in ((0,), (1, 2))[rank]]
        pipeline.step(microbatches=batches, schedule=schedules[rank])
        got = gradients(pipeline)
        furthest = max(furthest, worst(got, of_one_process(modules, sequences)[1]))
        pipeline.zero_grad()
    pipeline.close()
    return furthest


@pytest.mark.core
def test_replicas_sum_gradients_in_one_order_whatever_their_schedules() -> None:
    assert max(run_ranks(other_order, 2)) <= 1e-5


def sharded_steps(rank: int, words: tuple[str, ...]) -> list[float | str]:
    """The furthest gradient of steps of unequal counts on two replicas of two ranks that shard in the step; or the refusal."""
    mesh = Mesh.of(MeshShape(pp=2, dp=2))
    assert mesh is not None
    options = RuntimeOptions(shard_gradients=True, timeout=60)
    schedules = {count: transformed(build("1f1b", 2, count), words) for count in range(1, 6)}
    pipeline = Pipeline(layers(2), schedules[2], loss=weighed_error, weight=counted, mesh=mesh, options=options)
    assert pipeline.sync is not None
    pipeline.sync.fills_grad = False
    modules, found = [Shifted(seed) for seed in range(2)], list[float | str]()
    for counts in ((2, 2), (3, 2), (1, 4), (4, 4)):
        sequences = sequences_of(0)[: sum(counts)]
        mine = sequences[counts[0] :] if mesh.dp.index else sequences[: counts[0]]
        batches = [packed(mine, (at,)) for at in range(len(mine))]
        try:
            pipeline.step(microbatches=batches, schedule=schedules[len(mine)])
        except UsageError as error:
            found.append(str(error))
            break
        got = {name: each for name, each in pipeline.sync.whole_gradients().items() if each is not None}
        want = of_one_process(modules, sequences)[1]
        found.append(worst(got, {name: want[name] for name in got}))
        pipeline.zero_grad()
    pipeline.close()
    return found


def test_replicas_of_unequal_counts_gather_and_reduce_once_a_step_as_one_process() -> None:
    for found in run_ranks(sharded_steps, 4, ("shard=2",)):
        assert len(found) == 4
        assert max(each for each in found if isinstance(each, float)) <= 1e-5


def test_replicas_that_reduce_in_each_micro_batch_need_the_same_number() -> None:
    for first, refusal in run_ranks(sharded_steps, 4, ("reduce-gradients=1",)):
        assert first <= 1e-5
        assert "theirs differ in number or order: give all of them as many micro-batches and one schedule" in refusal


def steps_of_experts(rank: int) -> tuple[list[float], list[str]]:
    """Differences of the loss from one process where counts are equal, and the refusals of unequal ones."""
    keys = {"parallel.pp": 1, "parallel.dp": 2, "parallel.ep": 2, "model.num_experts": 4, "model.aux_loss_coef": 0.0}
    layout = load_layout("tiny", {**keys, "schedule.name": "1f1b", "schedule.microbatches": 2})
    pipeline = build_pipeline(layout, torch.device("cpu"))
    one = LocalPipeline(
        model_layers(layout.config, torch.float32, torch.device("cpu")),
        build("1f1b", 1, 1),
        loss=training_loss(layout.config),
    )
    errors, refusals = [], []
    for counts in ((2, 2), (3, 2), (1, 1), (2, 1)):
        generator = torch.Generator().manual_seed(sum(counts))
        every = [torch.randint(0, 256, (1, 5 + 3 * at), generator=generator) for at in range(sum(counts))]
        mine = every[counts[0] :] if rank else every[: counts[0]]
        batches = [(tokens, tokens) for tokens in mine]
        try:
            loss = pipeline.step(microbatches=batches, schedule=build("1f1b", 1, len(batches))).item()
        except UsageError as error:
            refusals.append(str(error))
            with pytest.raises(UsageError, match="theirs differ in number"):
                pipeline.evaluate(microbatches=batches)
            continue
        want = one.step(microbatches=[(each, each) for each in every], schedule=build("1f1b", 1, len(every))).item()
        errors.append(abs(loss - want) / want)
        pipeline.zero_grad()
    pipeline.close()
    return errors, refusals


def test_replicas_that_exchange_tokens_of_experts_need_the_same_number() -> None:
    for errors, refusals in run_ranks(steps_of_experts, 2):
        assert len(errors) == len(refusals) == 2
        assert max(errors) <= 1e-5
