"""The schedule families under the names that read well in code: `pl.schedules.interleaved(ranks=4, microbatches=9)`."""

from pipeloom.schedule.families import FAMILIES, build, gpipe, interleaved, looped_bfs, one_f_one_b

__all__ = ["FAMILIES", "build", "gpipe", "interleaved", "looped_bfs", "one_f_one_b"]
