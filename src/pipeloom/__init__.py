"""Pipeloom: pipeline-parallel training in which every schedule is data. Importing it does not import torch."""

from pipeloom import schedules
from pipeloom.errors import PipeloomError, ScheduleError
from pipeloom.schedule import Action, Costs, Pair, Schedule, Timeline, check, lower_bound, simulate

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
    "lower_bound",
    "schedules",
    "simulate",
]
