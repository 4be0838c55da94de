"""Our own trainer: its TOML as a `Job`, a `Job` as its TOML, and what it does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pipeloom.config.rates import suitable_rate
from pipeloom.config.settings import load_layout
from pipeloom.errors import UsageError
from pipeloom.plan.export import layout_string, recomputed_blocks
from pipeloom.plan.job import Job, normal
from pipeloom.plan.layout import even_stages
from pipeloom.plan.run import layout_of
from pipeloom.shapes.hub import model_keys
from pipeloom.shapes.layers import parameter_count
from pipeloom.shapes.ops import Adapters

_SECONDS_AT_RISK = 1800  # between two checkpoints: what a failure costs at most, beside minutes to write one


def read(path: Path) -> Job:
    """Return the run of a configuration. Raises ConfigError with every problem of every key."""
    layout = load_layout(path, world_size=0)
    planned, recompute = layout_of(layout), layout.config.train.recompute
    if isinstance(recompute, tuple) and recompute and not planned.recompute_layers:
        ahead = layout.config.model.num_nextn_predict_layers
        near = recomputed_blocks(planned.stages, max(1, round(len(recompute) / len(planned.stages))), ahead)
        raise UsageError(
            f"train.recompute = {list(recompute)}: a plan recomputes the first blocks of every stage, as many of each; "
            f"nearest: {near}"
        )
    return Job(layout.config.model.shape(), planned)


def refusals(job: Job, source: Mapping[str, str] | None = None) -> list[str]:
    """Return a sentence for each thing that our trainer does not have; `source` as for `write`."""
    recompute = job.layout.recompute
    parts = () if job.shape is None or source else job.shape.foreign
    return [
        *["the model is not known: name it with its sizes"] * (job.shape is None),
        *[f"recompute={recompute} is not there; nearest: recompute=full"] * (recompute not in ("none", "full")),
        *(f"`[model]` cannot describe {part} without a Hugging Face directory" for part in parts),
    ]


def write(
    job: Job,
    source: Mapping[str, str] | None = None,
    table: Path | None = None,
    data: str = "",
    ep_nodes: int = 1,
    seconds: float = 0.0,
    adapters: Adapters | None = None,
) -> str:
    """Return a configuration for `pipeloom train`, of a run that it has (`refusals`).

    Args:
        source: the key of the Hugging Face directory that holds the model -> the directory; None: the model's sizes are written.
        table: the file that holds a searched schedule; None: the schedule is the family's.
        data: the source of the training data; "": it is to be named, and `train` refuses to start before.
        ep_nodes: nodes that the ranks of an ep group are on.
        seconds: of a step, for the interval of checkpoints; 0: not known.
        adapters: what is trained; None: the model's weights.
    """
    job = normal(job)
    layout, shape = job.layout, job.shape
    assert shape is not None
    ahead = shape.num_nextn_predict_layers
    model: dict[str, object] = {**source} if source else dict(model_keys(shape, ours=True))
    model |= {"num_nextn_predict_layers": ahead} if ahead and not source else {}
    model |= {"capacity_factor": layout.capacity} if layout.capacity else {}
    model |= {"pad_to_capacity": True} if shape.pad_to_capacity else {}
    stages = layout.stages or even_stages(shape.num_hidden_layers, 1, ahead)
    sections: dict[str, dict[str, object]] = {
        "model": model,
        "parallel": {axis: getattr(layout, axis) for axis in ("pp", "dp", "tp", "cp", "zero", "ep")}
        | {"sp": layout.tp > 1, "ep_nodes": ep_nodes}
        | {"stages": layout_string(stages, ahead)}
        | ({"ep_chunks": layout.ep_chunks} if layout.ep_chunks > 1 else {})
        | ({"vocabulary": "pp"} if layout.vocabulary == "pp" else {}),
        "schedule": {"name": str(table) if table else layout.schedule, "microbatches": layout.m}
        | ({"chunks": layout.v} if layout.v > 1 and not table else {})
        | ({"slices": layout.slices} if layout.slices > 1 and not table else {}),
        "train": {
            "seq_len": layout.seq,
            "global_batch_size": layout.sequences,
            "dtype": "bfloat16",
            "device": "cuda",
            "recompute": recomputed_blocks(stages, layout.recompute_layers, ahead)
            if layout.recompute_layers
            else layout.recompute,
        },
        "optimizer": {"lr": suitable_rate(parameter_count(shape), source is not None, adapters is not None)},
        "data": {"source": data},
        "checkpoint": {"every": max(1, round(_SECONDS_AT_RISK / seconds))} if seconds else {},
        "lora": asdict(adapters) if adapters is not None else {},
    }
    return "\n".join(
        line
        for name, keys in sections.items()
        if keys
        for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()), "")
    )
