"""The public names: what lists them, and one sentence for an argument of another kind or a package that is missing."""

from __future__ import annotations

import importlib
import pydoc
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import pipeloom as pl
import pipeloom.checkpoint  # with the modules that need torch, not in a test's call
import pipeloom.models.hf
import pipeloom.runtime
import pipeloom.runtime.verify
from pipeloom.errors import UsageError

GPIPE = pl.schedules.gpipe(2, 2)


@pytest.mark.parametrize("module", [pl, pipeloom.runtime, pl.draw, pl.schedules])
def test_a_module_lists_its_public_names(module: Any) -> None:
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in dir(module))


@pytest.mark.parametrize(
    "function",
    [
        *(pl.check, pl.simulate, pl.lower_bound, pl.schedules.cut_stages, pl.schedules.defer_last_stage_weights),
        *(pl.schedules.forward_only, pl.schedules.half_split, pl.schedules.merge_backward),
        *(pl.schedules.split_cooldown, pl.schedules.transformed, pl.schedules.unpair),
        lambda schedule: pipeloom.runtime.LocalPipeline([], schedule, loss=print),
        lambda schedule: pl.verify([], schedule, (), (), loss=print),
    ],
)
def test_a_name_is_no_schedule(function: Callable[..., Any]) -> None:
    with pytest.raises(
        UsageError, match=r"^schedule is 'zbv', a name; make the schedule of it, such as .*build\('zbv'"
    ):
        function("zbv")
    with pytest.raises(UsageError, match="schedule is of type Timeline; give a "):
        function(pl.simulate(GPIPE))


def test_a_number_is_no_costs() -> None:
    with pytest.raises(UsageError, match=r"^costs is 3; it must be a Costs or None$"):
        pl.simulate(GPIPE, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("draw", [pl.draw.figures, pl.draw.html, pl.draw.svg, pl.draw.terminal, pl.draw.trace])
def test_a_schedule_is_no_timeline(draw: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match="timeline is of type Schedule; give a "):
        draw(GPIPE)


@pytest.mark.parametrize(
    ("module", "importer", "name"),
    [
        *((pl, "importlib.import_module", name) for name in ("verify", "checkpoint")),
        (pipeloom.runtime, "pipeloom.runtime.import_module", "Pipeline"),
    ],
)
def test_a_missing_package_names_its_extra(
    module: Any, importer: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence is that of the commands."""

    def fails(_: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(importer, fails)
    sentence = (
        rf'{module.__name__}\.{name} needs torch, which the core install leaves out: pip install -e "\.\[train\]"'
    )
    with pytest.raises(UsageError, match=sentence):
        module.__getattr__(name)  # a submodule that has been imported is an attribute already


def test_the_layers_of_transformers_are_imported_by_their_public_name() -> None:
    assert importlib.import_module("pipeloom.hf") is pipeloom.models.hf
    assert pipeloom.hf is pipeloom.models.hf


@pytest.mark.parametrize("subject", [pl, pipeloom.runtime.Pipeline, pipeloom.runtime.LocalPipeline])
def test_help_fits_two_screens_before_the_methods(subject: Any) -> None:
    lines = pydoc.render_doc(subject, renderer=pydoc.plaintext).splitlines()
    before = lines[: next(at for at, line in enumerate(lines) if "Methods defined here" in line)]
    assert sum(-(-len(line) // 80) or 1 for line in before) <= 100  # of a terminal of 50 lines and 80 columns


def test_help_names_all_that_is_public() -> None:
    assert set(pl.__all__) <= set(re.findall(r"\w+", pl.__doc__ or ""))


def test_a_name_that_became_internal_works_and_warns() -> None:
    pipeline = pipeloom.runtime.LocalPipeline([nn.Linear(2, 2)] * 4, GPIPE, loss=nn.functional.mse_loss)
    name = "distributed"
    with pytest.warns(DeprecationWarning, match=r"\.distributed is internal and goes in 0\.4"):
        assert getattr(pipeline, name) == getattr(pipeline, f"_{name}")
    with pytest.raises(AttributeError, match="'LocalPipeline' object has no attribute 'distribute'"):
        getattr(pipeline, name[:-1])


def test_transport_of_check_warns_its_caller() -> None:
    with pytest.warns(DeprecationWarning, match=r"transport= of check has no effect and goes in 0\.4") as warned:
        pl.check(GPIPE, transport="batched")
    assert warned[0].filename == __file__
