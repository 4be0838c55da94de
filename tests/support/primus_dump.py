"""Files like those of a Primus dump of one step."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path
from typing import Any

import pipeloom as pl
from pipeloom.schedule.model import parts

CONVERTER = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "timer_dumps.py"))
NAMES = {"F": "fwd", "B": "bwd", "I": "bwd", "W": "wgrad"}


def dump(folder: Path, timeline: pl.Timeline, *, labels: bool, seed: int = 0, old_keys: bool = False) -> Path:
    """The files that a dump of this step is: lists of ms for each rank, from its own start of the iteration."""
    rng = random.Random(seed)
    schedule = timeline.schedule
    folder.mkdir()
    keys = ("vpp_size", "micro_batches") if old_keys else ("vp_size", "num_mbs")
    sizes = {"pp_size": schedule.ranks, keys[0]: schedule.chunks, keys[1]: schedule.microbatches, "world_size": 8}
    (folder / "config.json").write_text(json.dumps(sizes))
    for rank, program in enumerate(schedule.programs):
        skew = rng.uniform(-0.5, 0) * timeline.starts[rank][0] if rank else 0.0
        lists: dict[str, Any] = {
            f"{name}_{what}": [] for name in ("fwd", "bwd", "wgrad") for what in ("start", "end", "minibatch", "chunk")
        }
        for cell, start, end in zip(program, timeline.starts[rank], timeline.ends[rank], strict=True):
            for action in parts(cell):
                name = NAMES[action.kind]
                lists[f"{name}_start"].append(1e3 * (start + skew))
                lists[f"{name}_end"].append(1e3 * (end + skew))
                if labels:
                    lists[f"{name}_minibatch"].append(action.microbatch)
                    lists[f"{name}_chunk"].append(schedule.stages_of[rank].index(action.stage))
        whole = {"total": 1e3 * timeline.makespan, "memory": 10 + 2.5 * timeline.peak_activations[rank], **lists}
        (folder / f"pp_rank_{rank}.json").write_text(json.dumps({"1": whole, "2": whole}))
    return folder


def converted(folder: Path) -> Path:
    """The Chrome trace into which the example converts a dump."""
    trace = folder.parent / f"{folder.name}.json"
    CONVERTER["main"](folder, trace)
    return trace
