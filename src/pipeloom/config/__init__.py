"""Typed configuration: TOML files, overrides, model sizes, and the layout that they resolve to. Needs no torch."""

from pipeloom.config.fault import Fault, parse_fault
from pipeloom.config.layout import Layout, resolve, stage_costs
from pipeloom.config.sections import SECTIONS, Config, ModelSection
from pipeloom.config.settings import descriptions, load, load_layout, split_arguments, to_toml
from pipeloom.shapes.cut import even_sizes, parse_stages
from pipeloom.shapes.mesh import MeshShape

__all__ = [
    "SECTIONS",
    "Config",
    "Fault",
    "Layout",
    "MeshShape",
    "ModelSection",
    "descriptions",
    "even_sizes",
    "load",
    "load_layout",
    "parse_fault",
    "parse_stages",
    "resolve",
    "split_arguments",
    "stage_costs",
    "to_toml",
]
