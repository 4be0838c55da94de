"""Every family in the one runtime: serial gradients, serial evaluation, and the peaks that the simulator says."""

from __future__ import annotations

import pytest

import pipeloom as pl
from models import batch, blocks, gradients, mse, serial, worst
from pipeloom.errors import UsageError
from pipeloom.runtime import LocalPipeline
from pipeloom.schedule.families import FAMILIES
from pipeloom.shapes.cut import even_sizes

LAYERS = 9


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (2, 8), (3, 13), (4, 8)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_evaluation_and_peaks(family: str, ranks: int, microbatches: int) -> None:
    try:
        schedule = pl.schedules.build(family, ranks, microbatches)
    except UsageError as refused:
        assert any(character.isdigit() for character in str(refused))  # it names the nearest valid values  # noqa: PT017
        pytest.skip(str(refused))
    x, y = batch(2 * microbatches + 1)
    pipeline = LocalPipeline(blocks(LAYERS), schedule, loss=mse)
    loss = pipeline.step(x, y)
    want_loss, want = serial(blocks(LAYERS), x, y, even_sizes(len(x), microbatches))
    assert abs(loss - want_loss) <= 1e-6
    assert worst(gradients(pipeline), want) <= 1e-6
    assert pipeline.peak_activations == pl.simulate(schedule).peak_activations
    assert abs(pipeline.evaluate(x, y) - want_loss) <= 1e-6
