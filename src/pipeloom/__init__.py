"""Pipeloom: pipeline-parallel training in which every schedule is data. Importing it does not import torch.

>>> import pipeloom as pl
>>> schedule = pl.schedules.interleaved(ranks=4, chunks=2, microbatches=9)
>>> pl.check(schedule)  # raises ScheduleError with the reason
>>> timeline = pl.simulate(schedule, pl.Costs(p2p=0.1))

schedules                  the families, and transforms; `load` reads a file, `Schedule.save` writes one
Schedule, Action, Pair     a schedule of your own: `Schedule.of`; also NamedTensor; Kind, Need, register_kind
check, simulate            whether it can run, and its Timeline under Costs; lower_bound
compare, draw              tables and drawings; `Timeline.save` writes one
search                     a schedule within a memory limit, and its distance from the optimum
best_layouts, plan_step    layouts of a model on devices; one step of sequences of different lengths
verify, profile            layers of yours under a schedule; what each of them takes
auto_layers                a model cut into layers
hf, checkpoint             models of Hugging Face as layers; checkpoints of a loop of your own
PipeloomError              the base of all errors: ScheduleError, VerifyError

`pipeloom.runtime.Pipeline` trains layers under a schedule. `pipeloom --help` lists the commands.
"""

import os
import sys

# `python -m pipeloom` puts the working directory first on the path, where a file called queue.py would shadow Python's own
# module. It is removed, or moved to the end if it holds the package itself, which is then not installed.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]
    if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == os.getcwd():
        sys.path.append(os.getcwd())

import importlib
from typing import TYPE_CHECKING, Any

from pipeloom.errors import PipeloomError, ScheduleError, VerifyError, naming_extra
from pipeloom.schedule import (
    Action,
    Costs,
    Kind,
    NamedTensor,
    Need,
    Pair,
    Schedule,
    Timeline,
    check,
    lower_bound,
    register_kind,
    simulate,
)
from pipeloom.schedule.files import load

if TYPE_CHECKING:
    from pipeloom import draw as draw
    from pipeloom import schedules as schedules
    from pipeloom.draw import compare as compare
    from pipeloom.measure.own_layers import profile as profile
    from pipeloom.models import hf as hf
    from pipeloom.models.auto_layers import auto_layers as auto_layers
    from pipeloom.plan.report import best_layouts as best_layouts
    from pipeloom.plan.step import plan_step as plan_step
    from pipeloom.runtime.verify import verify as verify
    from pipeloom.solver import search as search

__version__ = "0.2.0"

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "NamedTensor",
    "Need",
    "Pair",
    "PipeloomError",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "VerifyError",
    "auto_layers",
    "best_layouts",
    "check",
    "checkpoint",
    "compare",
    "draw",
    "hf",
    "load",
    "lower_bound",
    "plan_step",
    "profile",
    "register_kind",
    "schedules",
    "search",
    "simulate",
    "verify",
]


_LAZY = {
    "auto_layers": "pipeloom.models.auto_layers",
    "best_layouts": "pipeloom.plan.report",
    "compare": "pipeloom.draw",
    "plan_step": "pipeloom.plan.step",
    "profile": "pipeloom.measure.own_layers",
    "search": "pipeloom.solver",
    "verify": "pipeloom.runtime.verify",
}
"""Function -> the module that holds it, imported on first access; it may need torch."""
_MODULES = {"checkpoint": "checkpoint", "draw": "draw", "hf": "models.hf", "schedules": "schedules"}
"""The same for modules, below `pipeloom`."""


def __getattr__(name: str) -> Any:
    """The functions of `_LAZY` and the modules of `_MODULES`."""
    if name not in _LAZY | _MODULES:
        raise AttributeError(f"module 'pipeloom' has no attribute {name!r}")
    with naming_extra(f"pipeloom.{name}"):
        if name in _MODULES:
            return importlib.import_module(f"pipeloom.{_MODULES[name]}")
        return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
