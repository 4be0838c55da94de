"""The overlapped pair: the segments' order, and the same numbers as one action after the other."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dying import run_until_dead
from segmented import WIDTH, AllToAll, Noted, NotedMove, expert_layers
from torch import Tensor

import pipeloom as pl
from models import gradients, mse
from pipeloom.ops.deferred import Ledger
from pipeloom.ops.segments import Compute
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.runtime.batch import split_sizes
from pipeloom.schedule.actions import Action, Pair
from pipeloom.schedule.model import Schedule, parts
from processes import run_ranks

EXPERTS = 2
LAYERS = 5
NETWORKED = ("1f1b-overlap", "dualpipev", "dualpipe")


def rebuilt(schedule: Schedule, programs: list[list[Any]]) -> Schedule:
    return Schedule.of(
        programs,
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        routes=schedule.routes,
        route_of=schedule.route_of,
    )


def apart(schedule: Schedule) -> Schedule:
    """The schedule with every pair as one action after the other."""
    return rebuilt(schedule, [[a for cell in program for a in parts(cell)] for program in schedule.programs])


def split(schedule: Schedule) -> Schedule:
    """The schedule with every B as I and, right behind it or behind its pair, W."""

    def cells(cell: Any) -> list[Any]:
        last = parts(cell)[-1]
        if last.kind != "B":
            return [cell]
        gradient = last._replace(kind="I")
        return [Pair(cell.forward, gradient) if isinstance(cell, Pair) else gradient, last._replace(kind="W")]

    return rebuilt(schedule, [[new for cell in program for new in cells(cell)] for program in schedule.programs])


def searched() -> Schedule:
    """Two chunks a rank, pairs of F and I, weight gradients wherever they fit."""
    costs = pl.Costs(all_to_all=0.4)
    return pl.search(ranks=2, microbatches=5, costs=costs, chunks=2, pairs=True, iterations=60, seed=1).schedule


def schedules() -> dict[str, Schedule]:
    build = pl.schedules.build
    return {
        "1f1b-overlap without a pipeline": build("1f1b-overlap", 1, 4),
        "interleaved-overlap without a pipeline": build("interleaved-overlap", 1, 3, 2),
        "1f1b-overlap": build("1f1b-overlap", 2, 5),
        "interleaved-overlap": build("interleaved-overlap", 2, 5, 2),
        "dualpipev": build("dualpipev", 2, 5),
        "dualpipe": build("dualpipe", 2, 6),
        "searched": searched(),
        "pairs of F and I": split(build("1f1b-overlap", 2, 5)),
    }


def data(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, WIDTH, generator=generator), torch.randn(rows, 3, WIDTH, generator=generator)


# -- order ---------------------------------------------------------------------------------------------------------------


def noted_run(schedule: Schedule, layers: int) -> list[str]:
    log: list[str] = []
    pipeline = LocalPipeline([Layer(str(at), partial(Noted, str(at), log)) for at in range(layers)], schedule, loss=mse)
    pipeline.step(*data(0, schedule.microbatches))
    return log


PAIR = """start B.combine0  F.attention0  start F.dispatch0  wait B.combine0  B.experts0  start B.dispatch0  W.experts0
          wait F.dispatch0  F.experts0  start F.combine0  wait B.dispatch0  B.attention0  W.attention0  wait F.combine0"""


def words(text: str) -> list[str]:
    return [" ".join(word.split()) for word in text.split("  ") if word.strip()]


def test_a_pair_runs_its_segments_in_the_order_of_the_specification() -> None:
    log = noted_run(pl.schedules.build("1f1b-overlap", 1, 3), 1)
    first = log.index("start B.combine0")
    length = len(words(PAIR))
    assert log[first : first + length] == words(PAIR)
    assert log[first + length : first + 2 * length] == words(PAIR)


def test_layers_of_a_pair_follow_one_another_and_hide_each_others_communication() -> None:
    """Two layers: the all-to-all between two layer pairs starts before the weight gradient and the forward beside it."""
    log = noted_run(pl.schedules.build("1f1b-overlap", 1, 2), 2)
    pair = log[log.index("start B.combine1") :][:28]
    wanted = """start B.combine1  F.attention0  start F.dispatch0  wait B.combine1  B.experts1  start B.dispatch1  W.experts1
        wait F.dispatch0  F.experts0  start F.combine0  wait B.dispatch1  B.attention1  start B.combine0  W.attention1
        wait F.combine0  F.attention1  start F.dispatch1  wait B.combine0  B.experts0  start B.dispatch0  W.experts0
        wait F.dispatch1  F.experts1  start F.combine1  wait B.dispatch0  B.attention0  W.attention0  wait F.combine1"""
    assert pair == words(wanted)


def test_a_backward_alone_hides_its_communication_behind_its_weight_gradients() -> None:
    log = noted_run(pl.schedules.build("1f1b", 1, 1), 1)
    assert log[log.index("start B.combine0") :] == words(
        """start B.combine0  wait B.combine0  B.experts0  start B.dispatch0  W.experts0
           wait B.dispatch0  B.attention0  W.attention0"""
    )


def test_an_input_gradient_leaves_all_weight_gradients_to_w() -> None:
    log = noted_run(split(pl.schedules.build("1f1b-overlap", 1, 2)), 1)
    pair = [word for word in words(PAIR) if word[0] != "W"]
    first = log.index("start B.combine0")
    assert log[first : first + len(pair) + 2] == [*pair, "W.experts0", "W.attention0"]


def test_a_quick_communication_is_waited_for_on_the_spot() -> None:
    """Inside a machine: the turn is kept, and passes at the communication that is worth hiding."""
    log: list[str] = []

    class TwoLevels(Noted):
        def segments(self) -> Any:
            attention, dispatch, experts, *rest = super().segments()
            inside = NotedMove("inside", log, quick=True)
            fan_out = Compute("fan out", lambda values: tuple(v * 1.0 for v in values))
            return (attention, dispatch, fan_out, inside, experts, *rest)

    LocalPipeline([Layer("0", partial(TwoLevels, "0", log))], pl.schedules.build("1f1b-overlap", 1, 2), loss=mse).step(
        *data(0, 2)
    )
    pair = log[log.index("start B.combine0") :]
    assert pair[: pair.index("wait F.combine0") + 1] == words(
        """start B.combine0  F.attention0  start F.dispatch0  wait B.combine0  B.experts0  start B.inside  W.experts0
           wait B.inside  start B.dispatch0
           wait F.dispatch0  start F.inside  wait F.inside  F.experts0  start F.combine0
           wait B.dispatch0  B.attention0  W.attention0  wait F.combine0"""
    )


# -- numbers -------------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What a process found in a step; arrays, which cross to the test's own process whole."""

    loss: float
    gradients: dict[str, np.ndarray]
    peaks: Any
    exposed: list[float]


def one_step(schedule: Schedule, group: Any, seed: int, rows: int) -> Found:
    pipeline = LocalPipeline(expert_layers(LAYERS, EXPERTS, group), schedule, loss=mse)
    loss = pipeline.step(*data(seed, rows))
    exposed = [result.exposed for result in pipeline._results if result.exposed is not None]
    return Found(loss.item(), arrays(pipeline), pipeline.peak_activations, exposed)


def arrays(pipeline: Any) -> dict[str, np.ndarray]:
    return {name: gradient.numpy() for name, gradient in gradients(pipeline).items()}


def same(found: Found, other: Found) -> bool:
    """Loss and every gradient bitwise equal."""
    return (
        found.loss == other.loss
        and found.gradients.keys() == other.gradients.keys()
        and all(np.array_equal(g, other.gradients[name]) for name, g in found.gradients.items())
    )


def _all_schedules(rank: int, rows: int) -> dict[str, tuple[Found, Found]]:
    group = dist.group.WORLD
    return {
        name: (one_step(schedule, group, rank, rows), one_step(apart(schedule), group, rank, rows))
        for name, schedule in schedules().items()
    }


def serial(rows: int, count: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """One process that holds every expert, over both ranks' data: the ranks' losses, and the sum of the gradients."""
    layers = expert_layers(LAYERS, EXPERTS, None)
    modules = [layer() for layer in layers]
    losses = []
    for seed in range(EXPERTS):
        total = torch.zeros(())
        x, y = data(seed, rows)
        sizes = split_sizes(rows, count)
        for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
            for module in modules:
                part = module(part)
            loss = mse(part, target) * (target.numel() / y.numel())
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
    found = {
        f"{layer.name}.{name}": parameter.grad.numpy()
        for layer, module in zip(layers, modules, strict=True)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return losses, found


def worst(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    assert found.keys() == want.keys()
    return max(float(abs(found[k] - want[k]).max() / abs(want[k]).max()) for k in want)


def joined(results: list[Found]) -> dict[str, np.ndarray]:
    """Sums of the ranks' gradients; an expert's is its own rank's, over both ranks' tokens."""
    names = {name for result in results for name in result.gradients}
    return {name: sum(r.gradients[name] for r in results if name in r.gradients) for name in names}  # type: ignore[misc]


@pytest.mark.dist
@pytest.mark.parametrize("rows", [13])
def test_an_overlapped_pair_is_the_two_one_after_the_other_bitwise(rows: int) -> None:
    """Loss and every gradient of each schedule, over two processes with an expert each; and those of one process."""
    results = run_ranks(_all_schedules, EXPERTS, rows)
    for name, schedule in schedules().items():
        assert any(isinstance(cell, Pair) for program in schedule.programs for cell in program), name
        losses, want = serial(rows, schedule.microbatches)
        for rank, result in enumerate(results):
            found, one_by_one = result[name]
            assert same(found, one_by_one), name
            assert abs(found.loss - losses[rank]) <= 1e-6, name
            assert found.peaks == pl.simulate(schedule).peak_activations, name
            assert len(found.exposed) == schedule.ranks, name
            assert min(found.exposed) >= 0 < max(found.exposed), name
        assert worst(joined([result[name][0] for result in results]), want) <= 1e-5, name


def _broken(rank: int, how: str, rows: int) -> Found | None:
    """Mutations of the layer and of the engine."""
    if how == "a backward that does not send home":
        AllToAll.start_backward = lambda self, g, saved: self._exchange(g, saved[-1], self.home)  # type: ignore[assignment, method-assign]
    elif how == "weight gradients that nobody pays":
        Ledger.pay = lambda self: None  # type: ignore[method-assign]
    else:
        assert how == "gradients of what was carried past are lost"
        back = AllToAll.start_backward
        AllToAll.start_backward = lambda self, g, saved: back(self, (g[0], torch.zeros_like(g[1]), *g[2:]), saved)  # type: ignore[assignment, method-assign]
    try:
        return one_step(pl.schedules.build("1f1b-overlap", 1, 3), dist.group.WORLD, rank, rows)
    except RuntimeError:  # sizes that do not fit are refused by torch
        return None


@pytest.mark.dist
@pytest.mark.parametrize(
    "how",
    [
        "a backward that does not send home",
        "weight gradients that nobody pays",
        "gradients of what was carried past are lost",
    ],
)
def test_mutations_give_other_gradients(how: str) -> None:
    want = serial(7, 3)[1]
    results = run_ranks(_broken, EXPERTS, how, 7)
    if None not in results:
        found = joined(results)
        assert found.keys() != want.keys() or worst(found, want) > 1e-2


def _two_by_two(rank: int, rows: int) -> dict[str, Found]:
    """Ranks 0 and 1 are the first place of two pipelines, 2 and 3 the second; experts are spread over each two."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = PipelineMesh.of([rank % 2, rank % 2 + 2])
    found = {}
    for name in NETWORKED:
        schedule = schedules()[name]
        for label, one in ((name, schedule), (f"{name} apart", apart(schedule))):
            pipeline = Pipeline(expert_layers(LAYERS, EXPERTS, groups[rank // 2]), one, loss=mse, mesh=mesh)
            loss = pipeline.step(*data(rank % 2, rows))
            with torch.no_grad():
                evaluated = pipeline.evaluate(*data(rank % 2, rows))
            assert torch.allclose(loss, evaluated)
            assert pipeline.exposed is not None
            assert pipeline.exposed > 0
            found[label] = Found(loss.item(), arrays(pipeline), pipeline.peak_activations, [pipeline.exposed])
            timeline = pipeline.timeline()
            assert all(cost > 0 for cost in timeline.costs.per_stage("forward", one.stages))
            pipeline.close()
    return found


@pytest.mark.dist
def test_two_pipelines_share_their_experts() -> None:
    """Four processes, pp 2 and ep 2, on the network."""
    rows = 11
    results = run_ranks(_two_by_two, 4, rows)
    for name in NETWORKED:
        schedule = schedules()[name]
        losses, want = serial(rows, schedule.microbatches)
        for rank, result in enumerate(results):
            assert same(result[name], result[f"{name} apart"]), name
            assert abs(result[name].loss - losses[rank % 2]) <= 1e-6
            assert result[name].peaks == pl.simulate(schedule).peak_activations[rank // 2]
        places = (
            results[:2] if name == "dualpipe" else results
        )  # every place holds all layers, and the sum over the replicas
        assert worst(joined([result[name] for result in places]), want) <= 1e-5


def _one_sends_late(rank: int) -> None:
    """Rank 1 comes to its third dispatch long after rank 0 waits for it."""
    calls = 0
    start = AllToAll.start

    def late(self: AllToAll, values: Any) -> Any:
        nonlocal calls
        calls += self.name == "dispatch"
        if rank and calls == 3:
            time.sleep(20)
        return start(self, values)

    AllToAll.start = late  # type: ignore[method-assign]
    layers = expert_layers(2, EXPERTS, dist.group.WORLD)
    mesh = PipelineMesh.of([rank])
    options = RuntimeOptions(timeout=1.0)
    pipeline = Pipeline(layers, pl.schedules.build("1f1b-overlap", 1, 3), loss=mse, mesh=mesh, options=options)
    pipeline.step(*data(0, 6))


@pytest.mark.dist
def test_a_dispatch_that_never_comes_is_reported(tmp_path: Path) -> None:
    ends = run_until_dead(_one_sends_late, 2, tmp_path)
    assert ends[0].code == 6
    assert "waits for the " in ends[0].words, ends[0].words
    assert "of its expert group" in ends[0].words


def test_storage_of_what_was_sent_is_let_go() -> None:
    """While a communication is under way only it, and what autograd saved, hold tensors: not the engine."""
    seen: list[weakref.ref[Tensor]] = []

    class Watched(Noted):
        def segments(self) -> Any:
            first, move, *rest = super().segments()

            def keep(values: Any) -> Any:
                result = first.run(values)
                extra = values[0] + 1.0  # used by nobody: no graph holds it
                seen.append(weakref.ref(extra))
                return (*result, extra)

            drop = Compute("drop", lambda values: values[:2])
            return (Compute("attention", keep), move, drop, *rest)

    pipeline = LocalPipeline([Layer("0", partial(Watched, "0", []))], pl.schedules.build("gpipe", 1, 2), loss=mse)
    pipeline.step(*data(0, 2))
    gc.collect()
    assert len(seen) == 2
    assert all(ref() is None for ref in seen)


def test_actions_of_unsegmented_pairs_keep_their_order() -> None:
    """A pair of stages without communications runs F, then B: what F made is sent before B computes."""
    log: list[str] = []

    class Plain(Noted):
        segments = None  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return self._noted("attention", x)

    schedule = pl.schedules.build("1f1b-overlap", 1, 2)
    LocalPipeline([Layer("0", partial(Plain, "0", log))], schedule, loss=mse).step(*data(0, 2))
    assert log == ["F.attention0", "F.attention0", "B.attention0", "B.attention0"]
    assert Action("F", 0, 1) in parts(schedule.programs[0][1])
