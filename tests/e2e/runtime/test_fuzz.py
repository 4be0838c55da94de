"""Random mutations of valid schedules: each is refused, or runs to serial gradients; none hangs."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.errors import ScheduleError
from pipeloom.runtime import LocalPipeline
from pipeloom.schedule.actions import Action, kinds
from samples import FAMILIES

MUTATIONS = 2_000
Programs = list[list[Action]]


def base(draw: random.Random) -> pl.Schedule:
    """A valid schedule of at most 3 ranks and 4 micro-batches; half of them have some backwards split into I and W."""
    family = draw.choice(["gpipe", "1f1b", "balanced", "bfs"])
    p, m = draw.randint(1, 3), draw.randint(1, 4)
    schedule = FAMILIES[family](p, m, draw.randint(1, 2))
    if draw.random() < 0.5:
        programs = []
        for program in schedule.programs:
            cells: list[Action] = []
            for action in program:
                assert isinstance(action, Action)
                if action.kind == "B" and draw.random() < 0.5:
                    cells += [action._replace(kind="I"), action._replace(kind="W")]
                else:
                    cells.append(action)
            programs.append(cells)
        return remade(schedule, programs)
    return schedule


def remade(schedule: pl.Schedule, programs: Programs) -> pl.Schedule:
    return pl.Schedule.of(programs, placement=schedule.placement, microbatches=schedule.microbatches, name="mutant")


def swap(draw: random.Random, programs: Programs, schedule: pl.Schedule) -> None:
    row = draw.choice([p for p in programs if p])
    i, j = draw.randrange(len(row)), draw.randrange(len(row))
    row[i], row[j] = row[j], row[i]


def swap_neighbours(draw: random.Random, programs: Programs, schedule: pl.Schedule) -> None:
    row = draw.choice([p for p in programs if p])
    i = draw.randrange(len(row))
    j = min(i + 1, len(row) - 1)
    row[i], row[j] = row[j], row[i]


def move(draw: random.Random, programs: Programs, schedule: pl.Schedule) -> None:
    row = draw.choice([p for p in programs if p])
    row.insert(draw.randrange(len(row)), row.pop(draw.randrange(len(row))))


def drop(draw: random.Random, programs: Programs, schedule: pl.Schedule) -> None:
    row = draw.choice([p for p in programs if p])
    row.pop(draw.randrange(len(row)))


def double(draw: random.Random, programs: Programs, schedule: pl.Schedule) -> None:
    row = draw.choice([p for p in programs if p])
    row.insert(draw.randrange(len(row) + 1), draw.choice(row))


def change(draw: random.Random, programs: Programs, schedule: pl.Schedule) -> None:
    row = draw.choice([p for p in programs if p])
    at = draw.randrange(len(row))
    field = draw.choice(["kind", "stage", "microbatch"])
    value = {
        "kind": draw.choice([kind.letter for kind in kinds()]),
        "stage": draw.randrange(schedule.stages + 1),
        "microbatch": draw.randrange(schedule.microbatches + 1),
    }[field]
    row[at] = row[at]._replace(**{field: value})


def other_rank(draw: random.Random, programs: Programs, schedule: pl.Schedule) -> None:
    row = draw.choice([p for p in programs if p])
    action = row.pop(draw.randrange(len(row)))
    home = draw.choice(programs)
    home.insert(draw.randrange(len(home) + 1), action)


def split_backward(draw: random.Random, programs: Programs, schedule: pl.Schedule) -> None:
    row = draw.choice([p for p in programs if p])
    backwards = [at for at, action in enumerate(row) if action.kind == "B"]
    if backwards:
        at = draw.choice(backwards)
        row.insert(draw.randrange(at, len(row) + 1), row[at]._replace(kind="W"))
        at = row.index(row[at]) if row[at].kind == "B" else at + 1
        row[at] = row[at]._replace(kind="I")


KINDS_OF_MUTATION = [swap, swap_neighbours, swap_neighbours, move, drop, double, change, other_rank, split_backward]


@cache
def reference(stages: int, microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    x, y = batch(microbatches + 1)
    return serial(blocks(stages), x, y, [2] + [1] * (microbatches - 1))


def run(schedule: pl.Schedule, check_first: bool) -> None:
    """A step, compared with one process; raises ScheduleError where the schedule cannot run."""
    x, y = batch(schedule.microbatches + 1)
    pipeline = LocalPipeline(blocks(schedule.stages), schedule, loss=mse, check_first=check_first)
    loss = pipeline.step(x, y)
    want_loss, want = reference(schedule.stages, schedule.microbatches)
    assert loss.item() == pytest.approx(want_loss.item(), rel=1e-5), schedule
    assert worst(gradients(pipeline), want) <= 1e-5, schedule
    assert pipeline.peak_activations == pl.simulate(schedule, pl.Costs(1, 1, 1, 0)).peak_activations, schedule


def outcome(draw: random.Random) -> str:
    schedule = base(draw)
    programs: Programs = [list(program) for program in schedule.programs]  # type: ignore[arg-type]
    for _ in range(draw.choice([1, 1, 2, 3])):
        draw.choice(KINDS_OF_MUTATION)(draw, programs, schedule)
        if not any(programs):
            break
    try:
        mutant = remade(schedule, programs)
        pl.check(mutant)
    except ScheduleError as error:
        refusal = str(error)
    else:
        run(mutant, check_first=True)
        return "the same order" if mutant.codes == schedule.codes else "runs in another order"
    if "deadlocks" not in refusal:
        return "refused: not complete, in its place, or in range"
    if refusal.count("\n") == 1:
        return "refused: a rank waits for what it does later"
    with pytest.raises(ScheduleError, match="deadlocks"):  # unproved, the engine finds the same, and does not hang
        run(mutant, check_first=False)
    return "refused: a cycle of ranks"


@pytest.mark.timeout(200)
def test_mutations_are_refused_or_run_to_serial_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    draw = random.Random(20261120)
    counts = Counter(outcome(draw) for _ in range(MUTATIONS))
    with capsys.disabled():
        print(f"\n{MUTATIONS} mutations: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    assert counts["runs in another order"] > 200
    assert counts["refused: a rank waits for what it does later"] > 100
    assert counts["refused: a cycle of ranks"] > 50
    assert counts["refused: not complete, in its place, or in range"] > 200
