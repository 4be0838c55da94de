"""The schedule families and the transforms, by names that read well in code.

`pl.schedules.interleaved(ranks=4, microbatches=9)` is a schedule, `pl.schedules.unpair(schedule)` another.
"""

from typing import TYPE_CHECKING

from pipeloom.schedule.families import FAMILIES as FAMILIES
from pipeloom.schedule.families import SLICED as SLICED
from pipeloom.schedule.families import Family
from pipeloom.schedule.families import build as build
from pipeloom.schedule.offload import offload as offload
from pipeloom.schedule.slices import balanced_cuts as balanced_cuts
from pipeloom.schedule.slices import by_slices as by_slices
from pipeloom.schedule.slices import cut_sequences as cut_sequences
from pipeloom.schedule.slices import even_cuts as even_cuts
from pipeloom.schedule.transforms import TRANSFORMS as TRANSFORMS
from pipeloom.schedule.transforms import cut_stages as cut_stages
from pipeloom.schedule.transforms import defer_last_stage_weights as defer_last_stage_weights
from pipeloom.schedule.transforms import forward_only as forward_only
from pipeloom.schedule.transforms import half_split as half_split
from pipeloom.schedule.transforms import merge_backward as merge_backward
from pipeloom.schedule.transforms import recompute as recompute
from pipeloom.schedule.transforms import split_cooldown as split_cooldown
from pipeloom.schedule.transforms import transformed as transformed
from pipeloom.schedule.transforms import unpair as unpair

globals().update({family.__name__: family for family in (*FAMILIES.values(), *SLICED.values())})
__all__ = [name for name in globals() if not name.startswith("_") and name not in ("Family", "TYPE_CHECKING")]


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:

    def __getattr__(name: str) -> Family:
        """Type every other name as a family's function."""
