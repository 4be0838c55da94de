"""The planner: memory of every rank and time of a step under a layout, and the search over layouts. Needs no torch."""

from __future__ import annotations

from pipeloom.plan.layout import PlannedLayout
from pipeloom.plan.layout import parse as parse_layout
from pipeloom.plan.memory import RankMemory
from pipeloom.plan.predict import LayoutCosts, Planner
from pipeloom.plan.search import OFFERED, LayoutPlan, PlanRequest, search
from pipeloom.plan.time import Device, StepTime
from pipeloom.plan.time import device as load_device
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import load as load_model
from pipeloom.shapes.ops import RUNTIMES, Runtime

__all__ = [
    "OFFERED",
    "RUNTIMES",
    "DecoderShape",
    "Device",
    "LayoutCosts",
    "LayoutPlan",
    "PlanRequest",
    "PlannedLayout",
    "Planner",
    "RankMemory",
    "Runtime",
    "StepTime",
    "load_device",
    "load_model",
    "parse_layout",
    "search",
]
