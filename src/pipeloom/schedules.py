"""The schedule families and the transforms, by names that read well in code.

`pl.schedules.interleaved(ranks=4, microbatches=9)` is a schedule, `pl.schedules.unpair(schedule)` another.
"""

from pipeloom.schedule.families import FAMILIES as FAMILIES
from pipeloom.schedule.families import build as build
from pipeloom.schedule.families.chimera import chimera as chimera
from pipeloom.schedule.families.dualpipe import dualpipe as dualpipe
from pipeloom.schedule.families.dualpipev import dualpipev as dualpipev
from pipeloom.schedule.families.gpipe import gpipe as gpipe
from pipeloom.schedule.families.hanayo import hanayo as hanayo
from pipeloom.schedule.families.interleaved import interleaved as interleaved
from pipeloom.schedule.families.interleaved_overlap import interleaved_overlap as interleaved_overlap
from pipeloom.schedule.families.interleaved_zb import interleaved_zb as interleaved_zb
from pipeloom.schedule.families.looped_bfs import looped_bfs as looped_bfs
from pipeloom.schedule.families.one_f_one_b import one_f_one_b as one_f_one_b
from pipeloom.schedule.families.one_f_one_b_overlap import one_f_one_b_overlap as one_f_one_b_overlap
from pipeloom.schedule.families.v_half import v_half as v_half
from pipeloom.schedule.families.v_min import v_min as v_min
from pipeloom.schedule.families.zb_auto import zb_auto as zb_auto
from pipeloom.schedule.families.zb_h1 import zb_h1 as zb_h1
from pipeloom.schedule.families.zb_h2 import zb_h2 as zb_h2
from pipeloom.schedule.families.zbv import zbv as zbv
from pipeloom.schedule.transforms import TRANSFORMS as TRANSFORMS
from pipeloom.schedule.transforms import cut_stages as cut_stages
from pipeloom.schedule.transforms import defer_last_stage_weights as defer_last_stage_weights
from pipeloom.schedule.transforms import forward_only as forward_only
from pipeloom.schedule.transforms import half_split as half_split
from pipeloom.schedule.transforms import merge_backward as merge_backward
from pipeloom.schedule.transforms import split_cooldown as split_cooldown
from pipeloom.schedule.transforms import transformed as transformed
from pipeloom.schedule.transforms import unpair as unpair
