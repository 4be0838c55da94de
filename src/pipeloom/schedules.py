"""The schedule families and the transforms, by names that read well in code.

`pl.schedules.interleaved(ranks=4, microbatches=9)` is a schedule, `pl.schedules.unpair(schedule)` another.
"""

from pipeloom.schedule.families import FAMILIES, Family, build
from pipeloom.schedule.transforms import (
    TRANSFORMS,
    cut_stages,
    defer_last_stage_weights,
    forward_only,
    half_split,
    merge_backward,
    split_cooldown,
    transformed,
    unpair,
)

_FUNCTIONS: dict[str, Family] = {family.__name__: family for family in FAMILIES.values()}

__all__ = [
    "FAMILIES",
    "TRANSFORMS",
    "build",
    "cut_stages",
    "defer_last_stage_weights",
    "forward_only",
    "half_split",
    "merge_backward",
    "split_cooldown",
    "transformed",
    "unpair",
]
__all__ += sorted(_FUNCTIONS)


def __getattr__(name: str) -> Family:
    """The family's function of this name, such as `one_f_one_b`."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
