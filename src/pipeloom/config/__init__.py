"""Typed configuration: TOML files, overrides, model sizes, and the layout that they resolve to. Needs no torch."""

from pipeloom.config.layout import Layout, stage_costs
from pipeloom.config.sections import Config, ModelSection
from pipeloom.config.settings import descriptions, load, load_layout, split_arguments, to_toml

__all__ = [
    "Config",
    "Layout",
    "ModelSection",
    "descriptions",
    "load",
    "load_layout",
    "split_arguments",
    "stage_costs",
    "to_toml",
]
