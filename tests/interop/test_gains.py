"""Changes that a job could gain by, judged by the code of its system."""

from __future__ import annotations

import pytest

import other_systems
from jobs import WORSE, gain_job, gain_space, layers_of_ranks
from pipeloom.interop.gain import Run
from pipeloom.interop.systems import translated


def require_taken(system: str, run: Run) -> None:
    text, _ = translated(run.job, system)
    made = getattr(other_systems, system)(text, run.job.shape.num_hidden_layers if run.job.shape else 0)
    assert made.layers == layers_of_ranks(run.job), run.job.layout.text()


@pytest.mark.parametrize(("system", "model", "text", "stages"), WORSE)
def test_the_best_change_is_taken_by_the_system(system: str, model: str, text: str, stages: str) -> None:
    job = gain_job(system, model, text, stages)
    space = gain_space(job)
    require_taken(system, space.best(space.run(job)))


@pytest.mark.parametrize("system", ["megatron", "torchtitan"])
def test_every_change_is_taken_by_the_system(system: str) -> None:
    job = gain_job(*next(row for row in WORSE if row[0] == system and "ep=8" in row[2]))
    space = gain_space(job, axes=True)
    runs = space.around(space.run(job))
    assert len(runs) > 20
    for run in runs:
        require_taken(system, run)
