"""Tensors that layers read and write by name, and losses on several stages: as one process has them, in every family."""

from __future__ import annotations

import pytest

import pipeloom as pl
from models import gradients, worst
from named_models import CASES, data, plain
from pipeloom.errors import UsageError
from pipeloom.runtime import LocalPipeline, RuntimeOptions
from pipeloom.schedule.families import FAMILIES
from pipeloom.shapes.cut import even_sizes


def built(family: str, ranks: int, microbatches: int) -> pl.Schedule:
    try:
        return pl.schedules.build(family, ranks, microbatches)
    except UsageError as refused:
        pytest.skip(str(refused))


def compare(name: str, schedule: pl.Schedule) -> LocalPipeline:
    case = CASES[name]
    x, y, keywords = data(case, 2 * schedule.microbatches + 1)
    pipeline = LocalPipeline(case.layers(), schedule, loss=case.loss, options=RuntimeOptions(seed=3))
    state = {key: value.clone() for key, value in pipeline.state_dict().items()}
    sizes = even_sizes(len(x), schedule.microbatches)
    want_loss, want, terms = plain(case, state, x, y, keywords, sizes)
    assert abs(pipeline.step(x, y, **keywords).item() - want_loss) <= 5e-6
    assert worst(gradients(pipeline), want) <= 5e-6
    assert {key: value.item() for key, value in pipeline.loss_terms.items()} == pytest.approx(terms, abs=5e-6)
    assert abs(pipeline.evaluate(x, y, **keywords).item() - want_loss) <= 5e-6
    assert {key: value.item() for key, value in pipeline.loss_terms.items()} == pytest.approx(terms, abs=5e-6)
    return pipeline


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_family(name: str, family: str) -> None:
    schedule = built(family, 4, 8)
    pipeline = compare(name, schedule)
    assert bool(pipeline.schedule.tensors) == (name != "heads")
    assert pipeline.peak_activations == pl.simulate(schedule).peak_activations
