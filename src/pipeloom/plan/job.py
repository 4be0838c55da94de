"""A training run, whichever system runs it: what the words of each of them are read into and written from."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeloom.config import Layout
from pipeloom.plan.layout import RECOMPUTE, PlannedLayout, even_stages
from pipeloom.schedule import Schedule
from pipeloom.schedule.families import canonical_name
from pipeloom.schedule.files import load, names_a_file
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.ops import OFFLOADED

OPTIONS = (
    "blocking_p2p", "overlap_warmup", "overlap_grads", "overlap_params", "overlap_experts", "delay_wgrad", "overlap_tensor",
)  # fmt: skip
"""What a run does beside computation: nothing while chunks send messages ("blocking"); messages of the warm-up too, the sums of
gradients, the gathering of parameters, the experts' all-to-all, the products of weights' gradients, put off for that, and the
exchanges of tensor parallelism."""


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        shape: the model; None: the words do not describe it.
        layout: axes, batch, schedule, recomputation; a schedule may be the path of a file.
        recompute_span: blocks whose input alone is kept, so that they are recomputed together.
        offload_share: the share of the tensors that `layout.offload` names.
        fp8: name of the recipe of 8-bit products; "": none.
        options: of `OPTIONS`, in alphabetical order.
        context: how context parallelism exchanges keys and values, in Megatron's words joined by "+"; "": the system's choice.
        dispatcher: how tokens travel to their experts: "allgather", "alltoall" or "deepep"; "": the system's choice.
        sequence: tp divides the activations outside of products too, by tokens (sequence parallelism).
        attention_dropout: the share of attention's probabilities that are dropped.
        rate: of learning; 0: the words do not say it. Only our own trainer's configuration is written with one.
        unknown: words that were not understood, and values that only a run would tell.
        system: whose words they are; "": nobody's.
        ours: what our own trainer reads from the configuration whose run it is; None: it is another system's.
    """

    shape: DecoderShape | None
    layout: PlannedLayout
    recompute_span: int = 1
    offload_share: float = 1.0
    fp8: str = ""
    options: tuple[str, ...] = ()
    context: str = ""
    dispatcher: str = ""
    sequence: bool = True
    attention_dropout: float = 0.0
    rate: float = field(default=0.0, compare=False)
    unknown: tuple[str, ...] = field(default=(), compare=False)
    system: str = field(default="", compare=False)
    ours: Layout | None = field(default=None, compare=False, repr=False)

    @property
    def order(self) -> Schedule | None:
        """The schedule of the file that the layout names; None: it names a family. Raises as `load`."""
        path = Path(self.layout.schedule)
        modified = path.stat().st_mtime_ns if path.is_file() else 0
        return _loaded(self.layout.schedule, modified) if names_a_file(self.layout.schedule) else None


@lru_cache(maxsize=8)
def _loaded(path: str, modified: int) -> Schedule:
    """The schedule of a file that was written then: every change of a job asks for it."""
    return load(path)


def normal(job: Job) -> Job:
    """Return the same run with nothing left to a default: layers of every stage, ranks that divide an expert, one word each."""
    layout, shape = job.layout, job.shape
    looped = layout.pp > 1 and layout.v > 1
    schedule = canonical_name(layout.schedule)
    stages = layout.stages if layout.pp > 1 else ()
    if layout.pp > 1 and not stages and shape is not None:
        stages = even_stages(shape.num_hidden_layers, layout.pp * layout.v, shape.num_nextn_predict_layers)
    experts = layout.ep > 1 or (shape is not None and shape.num_experts > 0)
    layout = replace(
        layout,
        v=layout.v if layout.pp > 1 else 1,
        schedule=schedule if layout.pp > 1 or schedule == "1f1b-overlap" else "1f1b",
        stages=stages,
        cut="even",
        etp=(layout.etp or layout.tp) if experts else 0,
        recompute="+".join(sorted(layout.recompute.split("+"), key=RECOMPUTE.index)),
        offload="+".join(sorted(layout.offload.split("+"), key=["none", *OFFLOADED].index)),
        group=layout.group if looped and layout.group != layout.pp else 0,
        capacity=layout.capacity or (0.0 if shape is None else shape.capacity_factor),
    )
    shape = shape and replace(shape, capacity_factor=0.0)
    return replace(job, layout=layout, shape=shape, sequence=job.sequence or layout.tp == 1)


def differences(job: Job, other: Job) -> dict[str, tuple[Any, Any]]:
    """Return field -> its two values, for the fields in which two runs differ; those of a model are `model.NAME`."""
    before, after = _flat(job), _flat(other)
    if job.shape is not None and other.shape is None:
        before = {key: value for key, value in before.items() if not key.startswith("model.")} | {
            "model": job.shape.name
        }
    return {key: (value, after.get(key)) for key, value in before.items() if value != after.get(key)}


def _flat(job: Job) -> dict[str, Any]:
    values = {
        spec.name: getattr(job, spec.name)
        for spec in fields(job)
        if spec.compare and spec.name not in ("layout", "shape")
    }
    values |= {spec.name: getattr(job.layout, spec.name) for spec in fields(job.layout)}
    if job.shape is None:
        return values
    return values | {f"model.{spec.name}": getattr(job.shape, spec.name) for spec in fields(job.shape) if spec.compare}
