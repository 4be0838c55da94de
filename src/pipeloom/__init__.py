"""Pipeloom: pipeline-parallel training in which every schedule is data. Importing it does not import torch."""

import importlib
from typing import TYPE_CHECKING, Any

from pipeloom import schedules
from pipeloom.errors import PipeloomError, ScheduleError
from pipeloom.schedule import Action, Costs, Pair, Schedule, Timeline, check, lower_bound, simulate

if TYPE_CHECKING:
    from pipeloom import draw as draw
    from pipeloom.solver import search as search

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Costs",
    "Pair",
    "PipeloomError",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "check",
    "draw",
    "lower_bound",
    "schedules",
    "search",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """`pl.draw` and `pl.search`, imported when they are first asked for."""
    if name == "draw":
        return importlib.import_module("pipeloom.draw")
    if name == "search":
        return importlib.import_module("pipeloom.solver").search
    raise AttributeError(f"module 'pipeloom' has no attribute {name!r}")
