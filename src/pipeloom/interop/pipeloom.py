"""Our own trainer: its TOML as a `Job`, a `Job` as its TOML, and what it does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pipeloom.config import Config, Layout, load
from pipeloom.config.rates import suitable_rate
from pipeloom.config.sections import PARTS_OF_BLOCKS, SECTIONS
from pipeloom.config.settings import BUILT_IN, load_layout, toml_value
from pipeloom.errors import UsageError
from pipeloom.plan.export import layout_string, recomputed_blocks
from pipeloom.plan.job import Job, normal
from pipeloom.plan.layout import even_stages
from pipeloom.plan.run import layout_of
from pipeloom.schedule.transforms import of_zero
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import model_keys
from pipeloom.shapes.layers import parameter_count
from pipeloom.shapes.ops import Adapters

_SECONDS_AT_RISK = 1800  # between two checkpoints: what a failure costs at most, beside minutes to write one

KeyValues = dict[str, Any]
"""Key ("section.key") -> its value."""

_WRITTEN: KeyValues = {"train.dtype": "bfloat16", "train.device": "cuda"}  # of every job of another system


def read(path: Path) -> Job:
    """Return the run of a configuration. Raises ConfigError with every problem of every key."""
    return _job(load_layout(path, world_size=0))


def _job(ours: Layout) -> Job:
    planned, config = layout_of(ours), ours.config
    recompute = config.train.recompute
    if isinstance(recompute, tuple) and recompute and not planned.recompute_layers:
        ahead = config.model.num_nextn_predict_layers
        near = recomputed_blocks(planned.stages, max(1, round(len(recompute) / len(planned.stages))), ahead)
        raise UsageError(
            f"train.recompute = {list(recompute)}: a plan recomputes the first blocks of every stage, as many of each; "
            f"nearest: {near}"
        )
    rows = sorted({*ours.microbatch_sizes}, reverse=True)
    uneven = f"micro-batches of {' and '.join(map(str, rows))} sequences: all are read with {rows[0]}"
    return Job(
        config.model.shape(), planned, sequence=config.parallel.sp, rate=config.optimizer.lr,
        unknown=(uneven,) * (len(rows) > 1), ours=ours,
    )  # fmt: skip


def unheld(job: Job, held: Layout | None = None) -> KeyValues:
    """Return the keys of a job's own configuration whose values another one does not have.

    Args:
        held: the other; None: a job's fields alone, which say nothing of other keys than those that `write` sets by them.
    """
    if job.ours is None:
        return {}
    if held is not None:
        values, other = _flat(job.ours.config), _flat(held.config)
        changed = _changed(job)
        return {
            key: value
            for key, value in values.items()
            if value != other[key] and key not in changed and value is not None
        }
    plain = _flat(load()) | _WRITTEN
    carried = {*_carried(normal(job)), *(f"model.{spec.name}" for spec in fields(DecoderShape))}
    return {key: value for key, value in _own(job.ours).items() if value != plain[key] and key not in carried}


def _flat(config: Config) -> KeyValues:
    return {f"{section}.{key}": value for section, table in config.model_dump().items() for key, value in table.items()}


def _own(ours: Layout) -> KeyValues:
    """Return the keys that the files of a configuration set, and not what these describe or the package's default."""
    values, parallel = _flat(ours.config), ours.config.parallel
    of_level = of_zero(parallel.zero, parallel.unshard_slots, parallel.vocabulary == "pp")
    transforms = [each for each in ours.config.schedule.transforms if each not in of_level]
    files = {origin for origin in ours.origins.values() if origin.endswith(".toml") or origin in BUILT_IN[1:]}
    values = {key: value for key, value in values.items() if ours.origins.get(key) in files}
    return values | ({"schedule.transforms": transforms} if transforms else {})


def _carried(job: Job) -> KeyValues:
    """Return the keys that a normal job's fields say; those with None are left out."""
    layout, shape = job.layout, job.shape
    assert shape is not None
    ahead = shape.num_nextn_predict_layers
    stages = layout.stages or even_stages(shape.num_hidden_layers, 1, ahead)
    count = layout.recompute_layers
    return {
        **{f"parallel.{axis}": getattr(layout, axis) for axis in ("pp", "dp", "tp", "cp", "zero", "ep")},
        "parallel.sp": job.sequence and layout.tp > 1,
        "parallel.stages": layout_string(stages, ahead),
        "parallel.ep_chunks": layout.ep_chunks if layout.ep_chunks > 1 else None,
        "parallel.vocabulary": layout.vocabulary if layout.vocabulary == "pp" else None,
        "schedule.name": layout.schedule,
        "schedule.microbatches": layout.m,
        "schedule.chunks": layout.v if layout.v > 1 else None,
        "schedule.slices": layout.slices if layout.slices > 1 else None,
        "train.seq_len": layout.seq,
        "train.global_batch_size": layout.sequences,
        "train.recompute": recomputed_blocks(stages, count, ahead) if count else layout.recompute,
        "model.capacity_factor": layout.capacity or None,
    }


def _changed(job: Job) -> KeyValues:
    """Return the keys by which a job differs from the configuration that it was read from."""
    assert job.ours is not None
    before = _carried(normal(_job(job.ours)))
    return {key: value for key, value in _carried(normal(job)).items() if value != before[key]}


def refusals(job: Job, source: Mapping[str, str] | None = None) -> list[str]:
    """Return a sentence for each thing that our trainer does not have; `source` as for `write`."""
    recompute = job.layout.recompute
    parts = () if job.shape is None or source or job.ours else job.shape.foreign
    return [
        *["the model is not known: name it with its sizes"] * (job.shape is None),
        *[f"recompute={recompute} is not there; nearest: recompute=full"]
        * (recompute not in ("none", "full", *PARTS_OF_BLOCKS)),
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
    assert job.shape is not None
    if job.ours is not None:
        changed = _changed(job)
        values = _own(job.ours) | changed
        if "schedule.name" in changed:  # whose transforms and options are another schedule's
            values |= {"schedule.transforms": None, "schedule.options": None}
    else:
        values = _model_keys(job.shape, source) | _carried(job) | _WRITTEN
        values |= {"parallel.ep_nodes": ep_nodes, "data.source": data}
        rate = suitable_rate(parameter_count(job.shape), source is not None, adapters is not None)
        values |= {"optimizer.lr": job.rate or rate}
        values |= {"checkpoint.every": max(1, round(_SECONDS_AT_RISK / seconds))} if seconds else {}
        values |= {f"lora.{key}": value for key, value in asdict(adapters).items()} if adapters is not None else {}
    values |= {"schedule.name": str(table), "schedule.chunks": None, "schedule.slices": None} if table else {}
    lines = list[str]()
    for section in SECTIONS:
        if keys := [key for key, value in values.items() if key.startswith(f"{section}.") and value is not None]:
            lines += [f"[{section}]", *(f"{key.partition('.')[2]} = {toml_value(values[key])}" for key in keys), ""]
    return "\n".join(lines)


def _model_keys(shape: DecoderShape, source: Mapping[str, str] | None) -> KeyValues:
    """Return the keys of a model of which no configuration is there; `source` as for `write`."""
    if source:
        return {f"model.{key}": value for key, value in source.items()}
    plain, keys = load().model.model_dump(), model_keys(shape, ours=True)
    more = {spec.name: getattr(shape, spec.name) for spec in fields(shape) if spec.name in plain}
    keys |= {key: value for key, value in more.items() if value != plain[key] and key not in keys}
    return {f"model.{key}": value for key, value in keys.items()}
