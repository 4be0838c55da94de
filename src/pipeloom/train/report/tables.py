"""Table of the layers, parameters and optimizer state on each rank, printed at the start of a run."""

from __future__ import annotations

from pipeloom.config import Layout
from pipeloom.config.layout import STAGE_WORDS, stage_words
from pipeloom.draw.figures import in_columns
from pipeloom.runtime import Pipeline
from pipeloom.schedule import simulate
from pipeloom.schedule.channels import count_words, size_words
from pipeloom.train.collect import gather
from pipeloom.train.optimizer import Optimizer

MOST_ROWS = 16


def what_ranks_hold(layout: Layout, pipeline: Pipeline, optimizer: Optimizer) -> list[str]:
    """Return one line per rank: place, parameters, bytes of optimizer state, stage-micro-batches in flight, layers; collective.

    With more than MOST_ROWS ranks, only the ranks of the first pipeline have a line.
    """
    parameters = sum(parameter.numel() for _, parameter in pipeline.named_parameters())
    everyone = gather(pipeline, [parameters, optimizer.state_bytes])
    mesh, schedule, words = layout.mesh, layout.schedule, stage_words(layout)
    peaks = simulate(schedule).peak_activations
    axes = [axis for axis in ("pp", "dp", "cp", "tp", "ep") if getattr(mesh, axis) > 1]
    rows = [["rank", *axes, "parameters", "optimizer", "in flight", "layers"]]
    for number, (count, state) in enumerate(everyone):
        place = mesh.place(number)
        if len(everyone) > MOST_ROWS and (place.dp, place.cp, place.tp) != (0, 0, 0):
            continue
        layers = " | ".join(words[stage] for stage in schedule.stages_of[place.pp])
        held = [count_words(int(count)), size_words(state), str(peaks[place.pp]), layers]
        rows.append([str(number), *(str(getattr(place, axis)) for axis in axes), *held])
    lines = in_columns(rows, left=0, ragged=True)
    if left_out := len(everyone) - len(rows) + 1:
        others = " and ".join(axis for axis in axes if axis in ("dp", "cp", "tp"))
        lines.append(f"and {left_out} more ranks, which differ in {others}")
    return [*lines, STAGE_WORDS]
