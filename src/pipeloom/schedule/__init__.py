"""Schedules as data: actions, the Schedule, its text forms, check, costs, simulation and bounds. Needs no torch."""

from pipeloom.schedule.actions import Action, Kind, Need, Pair, register_kind
from pipeloom.schedule.bounds import lower_bound
from pipeloom.schedule.check import check
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.model import NamedTensor, Schedule
from pipeloom.schedule.simulate import period, simulate
from pipeloom.schedule.timeline import Timeline

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "NamedTensor",
    "Need",
    "Pair",
    "Schedule",
    "Timeline",
    "check",
    "lower_bound",
    "period",
    "register_kind",
    "simulate",
]
