"""The table of what layers of one's own take."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import UsageError
from pipeloom.measure import own_layers
from pipeloom.runtime import Layer
from pipeloom.schedule import Action

LAYERS = [Layer("first", partial(nn.Linear, 4, 4)), nn.ReLU(), nn.Linear(4, 2)]
COLUMNS = {"F": "forward", "I": "input_grad", "W": "weight_grad", "B": "backward"}


class Clocked(own_layers.LocalPipeline):
    """A pipeline whose action of a kind on stage s takes (1 + s) times the kind's place, and (in the first step) much longer."""

    steps = count()

    @property
    def stats(self) -> Any:
        warm = 1.0 if next(self.steps) % 3 else 100.0
        (real,) = super().stats
        cells = [cell for cell in self.schedule.programs[0] if isinstance(cell, Action)]
        spent = [warm * (1 + cell.stage) * (1 + "FIWB".index(cell.kind)) for cell in cells]
        assert len(real.starts) == len(spent)
        return (type("Stats", (), {"starts": [0.0] * len(spent), "ends": spent}),)


def test_rows_hold_the_medians_of_each_layer_without_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_layers, "LocalPipeline", Clocked)
    table = pl.profile(LAYERS, torch.ones(3, 4), torch.ones(3, 2), loss=nn.functional.mse_loss, repeats=2)
    assert [row["layer"] for row in table] == ["first", "1", "2"]
    for at, row in enumerate(table):
        assert [row[name] for name in COLUMNS.values()] == [(1 + at) * (1 + place) for place in range(4)]
    assert str(table).splitlines()[0].split() == ["layer", *(word for kind in COLUMNS for word in (kind, "ms"))]
    assert str(table).splitlines()[3].split() == ["2", "3000.000", "6000.000", "9000.000", "12000.000"]


def test_layers_are_left_without_gradients() -> None:
    pl.profile(LAYERS, torch.ones(3, 4), torch.ones(3, 2), loss=nn.functional.mse_loss, repeats=1)
    assert all(parameter.grad is None for parameter in LAYERS[2].parameters())


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(UsageError, match=r"repeats is 0; it must be a whole number of at least 1"):
        pl.profile(LAYERS, torch.ones(3, 4), torch.ones(3, 2), loss=nn.functional.mse_loss, repeats=0)
