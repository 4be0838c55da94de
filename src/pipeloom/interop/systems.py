"""The systems whose jobs are read and written, by name."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeloom.config.settings import toml_value
from pipeloom.errors import UsageError, reason_of
from pipeloom.interop import automodel, megatron, pipeloom, torch_runtime, torchtitan
from pipeloom.limits import read_file
from pipeloom.plan.job import Job, differences, normal
from pipeloom.plan.layout import PlannedLayout
from pipeloom.plan.predict import LayoutCosts, Planner
from pipeloom.schedule import Schedule
from pipeloom.schedule.costs import Sends
from pipeloom.shapes.decoder import DecoderShape

_LARGEST = 2**20  # bytes of a script


@dataclass(frozen=True)
class System:
    """One system: a pattern of its words; what reads, refuses and writes its jobs."""

    marks: str
    read: Callable[..., Job]
    refusals: Callable[[Job], list[str]]
    write: Callable[[Job], str]


def _read_ours(text: str, _: DecoderShape | None = None) -> Job:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(text)
        return pipeloom.read(path)


SYSTEMS = {
    "pipeloom": System(r"^\s*\[(parallel|schedule)\]\s*$", _read_ours, pipeloom.refusals, pipeloom.write),
    "automodel": System("^distributed:", automodel.read, partial(torch_runtime.refusals, system="automodel"), automodel.write),
    "torchtitan": System(r"--parallelism\.|--training\.|torchtitan|^\[(parallelism|training)\]", torchtitan.read,
                         partial(torch_runtime.refusals, system="torchtitan"), torchtitan.write),
    "megatron": System("model[-_]parallel[-_]size|--num[-_]layers|pretrain_gpt|--micro[-_]batch[-_]size", megatron.read,
                       megatron.refusals, megatron.write),
}  # fmt: skip


def sends_of(system: str, schedule: Schedule) -> Sends:
    """Return how senders wait in `system` while it runs `schedule` (`Costs.sends`).

    Megatron-LM's schedules without interleaving make one call between two computations, and so does torch's `1F1B`. Interleaving,
    which overlaps its messages unless `--no-overlap-p2p-communication` says otherwise, and torch's other schedules do not wait.
    """
    coupled = {"megatron": schedule.chunks == 1, "torchtitan": schedule.name == "1f1b"}
    return "coupled" if coupled.get(system) else "free"


def read_job(source: str, shape: DecoderShape | None = None) -> Job:
    """Return the run of a file, or of standard input ("-").

    Args:
        shape: of the model, where the text does not describe it.

    Raises UsageError for a text of none of the systems.
    """
    try:
        data = sys.stdin.buffer.read(_LARGEST + 1) if source == "-" else read_file(source, _LARGEST, "a job")
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a zero byte in the name
        raise UsageError(f"cannot read {source}: {reason_of(error)}") from None
    if len(data) > _LARGEST:
        raise UsageError(f"{source} is longer than {_LARGEST:,} bytes: that is no job")
    for name, system in SYSTEMS.items():
        if re.search(system.marks, text, re.MULTILINE):
            ours = name == "pipeloom" and source != "-"
            return replace(normal(pipeloom.read(Path(source)) if ours else system.read(text, shape)), system=name)
    raise UsageError(
        f"{source} is no job of Megatron-LM, torchtitan, NeMo Automodel or Pipeloom: it has none of their words"
    )


def translated(job: Job, to: str, schedule: Schedule | None = None) -> tuple[str, list[str]]:
    """Return (a run in the words of a system, a sentence for each thing that they do not hold).

    Args:
        schedule: in place of that which the job names.

    Raises UsageError for what the system refuses, with the nearest that it takes.
    """
    job = normal(job)
    layout = job.layout
    common = [f"slices={layout.slices}: sequences are not cut into slices; nearest: slices=1"] * (layout.slices > 1)
    common += ["vocabulary=pp: the output layer is not spread; nearest: vocabulary=last"] * (layout.vocabulary == "pp")
    if to == "torch-csv":
        _require(to, common)
        schedule = schedule or job.order or layout.built()
        text, notes = torch_runtime.csv_of(schedule)
        names = ("pp", "v", "m", "schedule", "group")
        held = PlannedLayout(zero=0, cut="even", **{name: getattr(layout, name) for name in names})
        return text, [*_losses(to, job, Job(None, held)), *notes]
    system = SYSTEMS[to]
    _require(to, [*(common if to != "pipeloom" else []), *system.refusals(job)])
    text = system.write(job)
    return text, _losses(to, job, normal(system.read(text)))


def _require(to: str, reasons: list[str]) -> None:
    if reasons:
        raise UsageError(f"{to} does not take this run: {'; '.join(reasons)}")


def _plain(value: object) -> str:
    return (",".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def _losses(to: str, job: Job, held: Job) -> list[str]:
    keys = ", ".join(f"{key} = {toml_value(value)}" for key, value in pipeloom.unheld(job, held.ours).items())
    return [
        *(
            f"{key}={_plain(value)}: {to} has no word for it"
            + (f"; what is written means {key}={_plain(other)}" if other is not None else "")
            for key, (value, other) in differences(job, held).items()
        ),
        *[f"not written for {to}: {keys}"] * bool(keys),
    ]


def written(
    prediction: LayoutCosts,
    planner: Planner,
    to: str,
    source: Mapping[str, str] | None = None,
    table: Path | None = None,
    data: str = "",
) -> tuple[str, list[str]]:
    """Return a planned layout in the words of a system, as `translated` does.

    Args:
        source, table, data: of a configuration of ours, as for `interop.pipeloom.write`.
    """
    layout = replace(prediction.layout, stages=prediction.stages)
    if planner.runtime.sharded:  # a pipeline's stages stay gathered
        layout = replace(layout, zero=0 if layout.dp * layout.cp == 1 else 2 if layout.pp > 1 else 3)
    paired = layout.schedule == "interleaved-overlap"
    options = ["delay_wgrad", "overlap_experts"] * paired
    if to == "megatron" and planner.runtime.hides_state and layout.dp * layout.cp > 1:
        options += ["overlap_grads", "overlap_params"][: 1 + (layout.zero > 0)]
    dispatcher = "deepep" if prediction.ep_nodes > 1 else "alltoall" if paired else ""
    job = normal(Job(planner.shape, layout, options=tuple(sorted(options)), dispatcher=dispatcher))
    if prediction.searched is not None and to != "torch-csv" and table is None:
        raise UsageError(f"{to} reads a searched schedule from a file; nearest: torch-csv")
    adapters = planner.runtime.adapters
    if to != "pipeloom":
        text, losses = translated(job, to, prediction.schedule)
        return text, [
            *losses,
            *[f"{adapters}: they are not written; {to} would train all weights"] * (adapters is not None),
        ]
    foreign = ["adapters without a Hugging Face directory are not there"] * (adapters is not None and not source)
    ours = {"etp": layout.tp if job.layout.etp else 0, "grads": "fp32", "group": 0, "offload": "none"}
    foreign += [
        f"{key}={value} is not there; nearest: {key}={default}"
        for key, default in ours.items()
        if (value := getattr(job.layout, key)) != default
    ]
    _require(to, [*pipeloom.refusals(job, source), *foreign])
    return pipeloom.write(job, source, table, data, prediction.ep_nodes, prediction.step.total, adapters), []
