"""Writes the golden CSVs beside this file: the tables that torch's own schedules make, without starting a process.

Run by hand with the torch that the names say: `python tests/data/torch/make.py`. torch's schedule classes ask their
stages only for a few numbers before they make their table, so a stand-in with those numbers is enough.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RANKS = 4
MICROBATCHES = 8
STAGES = {
    "interleaved": ("ScheduleInterleaved1F1B", (0, 4)),
    "looped-bfs": ("ScheduleLoopedBFS", (0, 4)),
    "zbv": ("ScheduleZBVZeroBubble", (0, 7)),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", (0, 4)),
    "dualpipev": ("ScheduleDualPipeV", (0, 7)),
    "gpipe": ("ScheduleGPipe", (0,)),
    "1f1b": ("Schedule1F1B", (0,)),
}
PREPARED = ("interleaved", "zbv", "dualpipev")


def pipeline_order(name: str) -> dict[int, list[Any]]:
    """rank -> the actions (None: idle) of torch's schedule that is called `name` here."""
    from torch.distributed.pipelining import schedules

    class_name, held = STAGES[name]
    stages = [
        SimpleNamespace(
            group_size=RANKS,
            group_rank=0,
            stage_index=stage,
            num_stages=RANKS * len(held),
            has_backward=True,
            is_first=stage == 0,
            is_last=stage == RANKS * len(held) - 1,
            device="cpu",
            submod=None,
        )
        for stage in held
    ]
    kind = getattr(schedules, class_name)
    if len(held) == 1:
        torch_schedule = kind(stages[0], MICROBATCHES, loss_fn=lambda output, target: 0)
        return torch_schedule._get_pipeline_order()
    return kind(stages, MICROBATCHES, loss_fn=lambda output, target: 0).pipeline_order


def prepared(name: str) -> dict[int, list[Any]]:
    """The same as torch's runtime executes it (`compute_comms`): with gathers, reductions, sends and receives."""
    from torch.distributed.pipelining import schedules as torch_schedules

    order = pipeline_order(name)
    place = {a.stage_index: rank for rank in order for a in order[rank] if a is not None and not a.sub_actions}
    gathered = {rank: torch_schedules._add_unshard_reshard(order[rank]) for rank in order}
    reduced = {rank: torch_schedules._add_reduce_grad(gathered[rank], MICROBATCHES) for rank in order}
    return torch_schedules._add_send_recv(reduced, place.__getitem__, len(place))


def text(name: str, comms: bool = False) -> str:
    """The table as torch's `_dump_csv` writes it; `comms`: with sends and receives."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    order = prepared(name) if comms else pipeline_order(name)
    for rank in order:
        writer.writerow(order[rank])
    return out.getvalue()


if __name__ == "__main__":
    for name in STAGES:
        (Path(__file__).parent / f"{name}.csv").write_text(text(name))
    for name in PREPARED:
        (Path(__file__).parent / f"{name}-comms.csv").write_text(text(name, comms=True))
