"""The schedule families and the transforms, by names that read well in code.

`pl.schedules.interleaved(ranks=4, microbatches=9)` is a schedule, `pl.schedules.unpair(schedule)` another.
"""

from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.families.chimera import chimera
from pipeloom.schedule.families.dualpipe import dualpipe
from pipeloom.schedule.families.dualpipev import dualpipev
from pipeloom.schedule.families.gpipe import gpipe
from pipeloom.schedule.families.hanayo import hanayo
from pipeloom.schedule.families.interleaved import interleaved
from pipeloom.schedule.families.interleaved_overlap import interleaved_overlap
from pipeloom.schedule.families.interleaved_zb import interleaved_zb
from pipeloom.schedule.families.looped_bfs import looped_bfs
from pipeloom.schedule.families.one_f_one_b import one_f_one_b
from pipeloom.schedule.families.one_f_one_b_overlap import one_f_one_b_overlap
from pipeloom.schedule.families.v_half import v_half
from pipeloom.schedule.families.v_min import v_min
from pipeloom.schedule.families.zb_auto import zb_auto
from pipeloom.schedule.families.zb_h1 import zb_h1
from pipeloom.schedule.families.zb_h2 import zb_h2
from pipeloom.schedule.families.zbv import zbv
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

__all__ = [
    "FAMILIES",
    "TRANSFORMS",
    "build",
    "chimera",
    "cut_stages",
    "defer_last_stage_weights",
    "dualpipe",
    "dualpipev",
    "forward_only",
    "gpipe",
    "half_split",
    "hanayo",
    "interleaved",
    "interleaved_overlap",
    "interleaved_zb",
    "looped_bfs",
    "merge_backward",
    "one_f_one_b",
    "one_f_one_b_overlap",
    "split_cooldown",
    "transformed",
    "unpair",
    "v_half",
    "v_min",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zbv",
]
