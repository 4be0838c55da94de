"""The runtime: one rank's engine, its transports, and the pipeline that a trainer steps."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeloom.errors import naming_extra

if TYPE_CHECKING:
    from pipeloom.runtime.options import RuntimeOptions
    from pipeloom.runtime.pipeline import LocalPipeline, Pipeline
    from pipeloom.runtime.stage_modules import Layer, LossTerm, in_part

__all__ = ["Layer", "LocalPipeline", "LossTerm", "Pipeline", "RuntimeOptions", "in_part"]
_HOMES = {
    "Layer": "stage_modules",
    "LocalPipeline": "pipeline",
    "LossTerm": "stage_modules",
    "RuntimeOptions": "options",
    "Pipeline": "pipeline",
    "in_part": "stage_modules",
}


def __getattr__(name: str) -> Any:
    """Imports torch with the first of these names: `runtime.health` watches a worker that has not imported it yet."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_extra(f"{__name__}.{name}"):
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
