"""Families x layouts x models x options, every pair of values in some cell: each cell is run once, and many tests read it.

A cell is two steps without `zero_grad`, the second of which knows the shapes, with an evaluation and a prediction between
them, on two or four processes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import named_models
import pipeloom as pl
from awkward import MODELS
from models import batch, blocks, mse, serial
from pipeloom.errors import UsageError
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.schedule.families import FAMILIES
from pipeloom.schedule.transforms import recompute
from pipeloom.shapes.cut import even_sizes
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

BOUND = 5e-6
TIED = (("block0.linear.weight", "block7.linear.weight"), ("block1.norm.weight", "block6.norm.weight"))
OUT_OF_ORDER = pl.Schedule.of(  # messages are used in another order than they come, and backwards are split
    [
        ["0F0", "0F1", "0F2", "2F1", "2F0", "2F2", "2I0", "2B1", "2I2", "0I1", "0B0", "2W0", "0B2", "0W1", "2W2"],
        ["1F2", "1F1", "1F0", "3F0", "3F1", "3F2", "3B1", "3I2", "3B0", "1I0", "1I1", "1B2", "1W1", "3W2", "1W0"],
    ],
    placement=[0, 1, 0, 1],
    microbatches=3,
    name="out of order",
)
LAYOUTS = {
    "pp 2": MeshShape(pp=2),
    "pp 4": MeshShape(pp=4),
    "pp 2, dp 2": MeshShape(pp=2, dp=2),
    "pp 2, tp 2": MeshShape(pp=2, tp=2),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "individual": {"transport": "individual"},
    "no receives ahead": {"transport": "individual", "receive_depth": 1, "overlap_p2p": False},
    "deeper": {"transport": "individual", "receive_depth": 5, "deallocate": False},
    "shapes each": {"transport": "individual", "shapes": "each"},
    "batched": {"transport": "batched"},
    "batched, shapes each": {"transport": "batched", "shapes": "each", "checksum": True},
    "shared": {"transport": "shared", "checksum": True},
    "main gradients": {"transport": "shared", "shapes": "each", "deallocate": False, "main_gradients": True},
}
RECOMPUTED: dict[str, Callable[[pl.Schedule], pl.Schedule]] = {
    "nothing": lambda schedule: schedule,
    "layer by layer": recompute,
    "stages": lambda schedule: recompute(schedule, whole=True),
}


class Cell(NamedTuple):
    family: str
    layout: str
    model: str
    option: str
    recomputed: str = "nothing"

    @property
    def shape(self) -> MeshShape:
        return LAYOUTS[self.layout]

    @property
    def schedule(self) -> pl.Schedule:
        return recomputed(self.family, self.shape.pp, self.recomputed)

    @property
    def sizes(self) -> list[list[int]]:
        """Rows of each replica's micro-batches: uneven, and no two replicas have as many."""
        return [[1 + (mb + 2 * at) % 3 for mb in range(self.schedule.microbatches)] for at in range(self.shape.dp)]


AWKWARD = ("several tensors, None, int and bool", "views of one storage", "integers only", "frozen leading layers")
OFFLOADED = ("zbv, offloaded",)
AXES: list[Sequence[str]] = [
    [*FAMILIES, "out of order", *OFFLOADED],
    list(LAYOUTS),
    ["blocks", "tied", *AWKWARD, *named_models.CASES],
    list(OPTIONS),
    list(RECOMPUTED),
]


@cache
def schedule_of(family: str, pp: int) -> pl.Schedule:
    if family == "out of order":
        return OUT_OF_ORDER
    if family in OFFLOADED:
        plain = schedule_of(family.partition(",")[0], pp)
        return pl.schedules.offload(plain, pl.Costs(host_bandwidth=4))
    return pl.schedules.build(family, pp, 2 * pp + (family not in ("dualpipe", "chimera")))


@cache
def recomputed(family: str, pp: int, what: str) -> pl.Schedule:
    return RECOMPUTED[what](schedule_of(family, pp))


@cache
def layer_count(model: str) -> int:
    return len(layers_of(model))


def layers_of(model: str) -> list[Any]:
    if model in named_models.CASES:
        return named_models.CASES[model].layers()
    return MODELS[model]() if model in MODELS else blocks(8)


def possible(cell: Cell) -> bool:
    """Return whether the family has a schedule of this size, with at least one layer for each stage."""
    try:
        schedule = cell.schedule
    except UsageError:
        return False
    if cell.family in OFFLOADED and cell.recomputed != "nothing":
        return False
    return schedule.ranks == cell.shape.pp and schedule.positions <= layer_count(cell.model)


def generated() -> list[Cell]:
    """Cells in which every pair of values occurs that can: for each that is missing, the best of a few random cells with it."""
    draw = random.Random(1)
    pairs = {
        cell: set(itertools.combinations(enumerate(cell), 2))
        for cell in itertools.starmap(Cell, itertools.product(*AXES))
        if possible(cell)
    }
    missing = dict.fromkeys(pair for each in pairs.values() for pair in sorted(each))
    cells = []
    while missing:
        pair = next(iter(missing))
        having = [cell for cell in pairs if pair in pairs[cell]]
        best = max(draw.choices(having, k=30), key=lambda cell: len(pairs[cell] & missing.keys()))
        cells.append(best)
        for each in pairs[best]:
            missing.pop(each, None)
    return cells


def data(cell: Cell, replica: int | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The batch of a replica, or (None) of all of them."""
    rows = [sum(sizes) for sizes in cell.sizes]
    mine = slice(None) if replica is None else slice(sum(rows[:replica]), sum(rows[: replica + 1]))
    if cell.model in named_models.CASES:
        x, y, keywords = named_models.data(named_models.CASES[cell.model], sum(rows))
    else:
        (x, y), keywords = batch(sum(rows)), {}
    return x[mine], y[mine], {name: value[mine] for name, value in keywords.items()}


@cache
def expected(model: str, shape: str, family: str) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Loss, gradients and layers' losses of one process that knows nothing of pipelines, over all replicas' micro-batches."""
    cell = Cell(family, shape, model, "")
    x, y, keywords = data(cell)
    sizes = [size for each in cell.sizes for size in each]
    if model in named_models.CASES:
        case = named_models.CASES[model]
        one = LocalPipeline(case.layers(), pl.schedules.gpipe(1, 1), loss=case.loss, options=RuntimeOptions(seed=3))
        return named_models.plain(case, one.state_dict(), x, y, keywords, sizes)
    modules = [layer() for layer in layers_of(model)]
    for names in TIED if model == "tied" else ():
        (first, path), (other, _) = ((int(name[5]), name.split(".", 1)[1]) for name in names)
        part, leaf = path.split(".")
        setattr(modules[other].get_submodule(part), leaf, modules[first].get_parameter(path))
    loss, _ = serial([lambda module=module: module for module in modules], x, y, sizes)
    prefixes = [layer.name for layer in layers_of(model)]
    named = [(f"{p}.{name}", q) for p, m in zip(prefixes, modules, strict=True) for name, q in m.named_parameters()]
    return loss.item(), {name: q.grad for name, q in named if q.grad is not None}, {}


def run_cell(cell: Cell) -> dict[str, Any]:
    mesh, schedule = Mesh.of(cell.shape), cell.schedule
    assert mesh is not None
    sizes = tuple(cell.sizes[mesh.place.dp])
    options = RuntimeOptions(monitor=False, seed=3, microbatch_sizes=sizes, **OPTIONS[cell.option])
    loss = named_models.CASES[cell.model].loss if cell.model in named_models.CASES else mse
    tied = TIED if cell.model == "tied" else ()
    layers = layers_of(cell.model)
    stages = even_sizes(len(layers), schedule.positions)[::-1]
    pipeline = Pipeline(layers, schedule, loss=loss, mesh=mesh, tied=tied, stages=stages, options=options)
    x, y, keywords = data(cell, mesh.place.dp)
    losses = [pipeline.step(x, y, **keywords).item()]
    evaluated = pipeline.evaluate(x, y, **keywords).item()
    few = {name: value[:1] for name, value in keywords.items()}
    predicted = pipeline.predict(x[:1], **few) is not None  # of fewer rows than micro-batches
    losses.append(pipeline.step(x, y, **keywords).item())
    terms = {name: value.item() for name, value in pipeline.loss_terms.items()}
    report = {
        "losses": losses,
        "terms": terms,
        "evaluated": evaluated,
        "predicted": predicted,
        "gradients": {n: None if p.grad is None else p.grad.float().numpy() for n, p in pipeline.named_parameters()},
        "owned": [name for name, _ in pipeline.named_parameters() if pipeline.owns(name)],
        "peak": pipeline.peak_activations,
        "executed": pipeline.timeline().schedule.codes == pl.schedules.unpair(schedule).codes,
    }
    pipeline.close()
    return report


def run_cells(rank: int, cells: list[Cell]) -> list[dict[str, Any]]:
    return [run_cell(cell) for cell in cells]


CELLS = generated()
Reports = dict[Cell, tuple[dict[str, Any], ...]]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def reports(request: pytest.FixtureRequest) -> Reports:
    """Cell -> the report of each of its processes."""
    cells = [cell for cell in CELLS if cell.shape.world == request.param]
    return dict(zip(cells, zip(*run_ranks(run_cells, request.param, cells), strict=True), strict=True))


def wanted(cell: Cell) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    return expected(cell.model, cell.layout, cell.family)


def test_every_pair_of_values_has_a_cell() -> None:
    assert {cell.family for cell in CELLS} == {*AXES[0]}
    assert len(CELLS) < 230
    for first, second in itertools.combinations(range(5), 2):
        found = {(cell[first], cell[second]) for cell in CELLS}
        assert len(found) > 0.7 * len(AXES[first]) * len(AXES[second])


def test_losses_and_evaluations_are_those_of_one_process_and_the_same_on_all_ranks(reports: Reports) -> None:
    for cell, ranks in reports.items():
        assert len({tuple(report["losses"]) for report in ranks}) == 1, cell
        for value in (*ranks[0]["losses"], *(report["evaluated"] for report in ranks)):
            assert value == pytest.approx(wanted(cell)[0], rel=BOUND), cell


def test_losses_of_layers_are_their_means(reports: Reports) -> None:
    for cell, ranks in reports.items():
        for report in ranks:
            assert report["terms"] == pytest.approx(wanted(cell)[2], rel=BOUND), cell


def test_gradients_of_two_steps_are_twice_those_of_one_process_and_absent_where_its_are(reports: Reports) -> None:
    for cell, ranks in reports.items():
        want = wanted(cell)[1]
        for report in ranks:
            for name, values in report["gradients"].items():
                assert (values is None) == (name not in want), (cell, name)
                if values is not None:
                    error = (torch.from_numpy(values) / 2 - want[name]).abs().max() / want[name].abs().max()
                    assert error <= BOUND, (cell, name)


def test_a_rank_holds_its_own_stages_only_and_every_weight_is_counted_once(reports: Reports) -> None:
    for cell, ranks in reports.items():
        schedule, layers = cell.schedule, layers_of(cell.model)
        ends = list(itertools.accumulate(even_sizes(len(layers), schedule.positions)[::-1], initial=0))
        for number, report in enumerate(ranks):
            positions = [schedule.position_of[stage] for stage in schedule.stages_of[cell.shape.place(number).pp]]
            held = {layer.name for position in positions for layer in layers[ends[position] : ends[position + 1]]}
            assert {name.partition(".")[0] for name in report["gradients"]} <= held, cell
            last = schedule.placement[schedule.routes[0][-1]]
            assert report["predicted"] == (cell.shape.place(number).pp == last), cell
        owned = sorted(name for report in ranks for name in report["owned"])
        assert len(owned) == len({*owned}), cell
        every = {name for report in ranks for name in report["gradients"]}
        assert len(owned) == len(every) - (len({*itertools.chain(*TIED)} & every) - 2 if cell.model == "tied" else 0)


def test_copies_of_a_tied_weight_have_one_gradient(reports: Reports) -> None:
    for cell, ranks in reports.items():
        for names in TIED if cell.model == "tied" else ():
            copies = [report["gradients"][name] for name in names for report in ranks if name in report["gradients"]]
            assert all((copy == copies[0]).all() for copy in copies), cell


def test_activations_alive_equal_the_simulated_peaks(reports: Reports) -> None:
    for cell, ranks in reports.items():
        peaks = pl.simulate(cell.schedule, pl.Costs(1, 1, 1, 0)).peak_activations
        found = [report["peak"] for report in ranks]
        if cell.family in OFFLOADED:  # copies take other times than these
            plain = pl.simulate(schedule_of(cell.family.partition(",")[0], cell.shape.pp)).peak_activations
            assert all(count <= plain[cell.shape.place(number).pp] for number, count in enumerate(found)), cell
        else:
            assert found == [peaks[cell.shape.place(number).pp] for number in range(len(ranks))], cell


def test_the_measured_timeline_is_of_the_schedule(reports: Reports) -> None:
    assert all(report["executed"] for ranks in reports.values() for report in ranks)
