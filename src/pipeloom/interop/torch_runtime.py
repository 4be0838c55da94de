"""torch's pipeline runtime: its CSV files, and what the systems that are built on it have in common."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeloom.errors import UsageError, did_you_mean
from pipeloom.plan.job import Job
from pipeloom.plan.layout import PlannedLayout
from pipeloom.schedule import Schedule
from pipeloom.schedule.comms_form import to_torch_csv
from pipeloom.schedule.csv_form import to_csv
from pipeloom.schedule.families import canonical_name
from pipeloom.schedule.files import names_a_file
from pipeloom.schedule.placement import name_of
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import load, presets

SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "looped-bfs": "LoopedBFS", "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip
"""Family -> torch's class without "Schedule"."""
PLACED = {"linear": "1f1b", "loop": "interleaved", "vee": "zbv"}
"""Placement -> the family that stands for it."""
_SINGLE, _VEE = ("1f1b", "gpipe"), ("zbv", "dualpipev")
_BLOCK = re.compile(r"(?:model\.)?layers\.(\d{1,6})")
_ZERO_OF_RESHARD = {"never": 2, "always": 3}


def not_known(key: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence on a word that is not known, with those that are nearly spelled like it."""
    return f"{key} is not known{did_you_mean(name, known)}".partition("; known: ")[0]


def rate(value: object) -> float:
    """Return a rate of learning; 0 where it is none."""
    try:
        return max(0.0, float(str(value)))
    except ValueError:
        return 0.0


def csv_of(schedule: Schedule, *, messages: bool = False) -> tuple[str, list[str]]:
    """Return (the schedule in torch's CSV, sentences on what it leaves out and on the words that it needs beside it).

    Args:
        messages: with sends and receives, as torch's runtime executes it.

    Raises UsageError, or ScheduleError with messages, for what torch's runtime does not have.
    """
    text, omitted = to_torch_csv(schedule) if messages else (to_csv(schedule), ())
    left_out = f"left out: {', '.join(omitted)}, which torch does not know; activations stay on the device"
    notes = [left_out] * bool(omitted)
    placement = name_of(schedule.placement, schedule.ranks)
    if placement in PLACED and placement != "linear":  # which torchtitan's default is
        word = placement_word(schedule)
        notes.append(f"torchtitan places its stages with --parallelism.pipeline-parallel-schedule {word}")
    elif placement not in PLACED:
        notes.append("torchtitan and Automodel place stages as a line, a loop or a V: this placement is none of them")
    return text, notes


def placement_word(schedule: Schedule) -> str:
    """Return the schedule's name beside a CSV file for which torchtitan places stages as it does."""
    return SCHEDULES[PLACED[name_of(schedule.placement, schedule.ranks) or "linear"]]


def job_of(where: str, words: Mapping[str, Any], shape: DecoderShape | None, unknown: Sequence[str]) -> Job:
    """Return the run of a system's words, under our names.

    Args:
        where: what errors begin with.
        words: tp, cp, pp, ep, etp; replicas; shards (0: the rest of `devices`, 0 where that is not said); seq, local, total and
            micro batch; name and csv of the schedule; parts, the modules of each stage; first and last: blocks as which the
            embedding and the output layer count where blocks are divided, per_stage: layers of a stage (0: one stage a rank, or
            two), rounds: "up" or "down" to a multiple of the ranks; reshard; recompute; sequence, as of
            `Job`; rate, as it is written.

    Raises UsageError.
    """
    notes, pp, dp = list(unknown), words["pp"], words["replicas"]
    each = words["tp"] * words["cp"] * dp
    devices = words["devices"]
    if not words["shards"] and not devices:
        devices = math.lcm(each, words["ep"]) * pp
        notes.append(f"the number of devices is not in the text: as few as the axes need are assumed, {devices}")
    shards = words["shards"] or max(1, devices // (each * pp))
    if shards > 1 and dp > 1:
        notes.append(f"{dp} replicas of {shards} shards are read as {dp * shards} shards")
    dp, local = dp * shards, words["local"]
    family = canonical_name(str(words["name"])) if pp > 1 else "1f1b"
    if family not in SCHEDULES:
        near = did_you_mean(str(words["name"]), SCHEDULES.values())
        raise UsageError(f"{where}: there is no schedule {words['name']!r:.60}{near}")
    micro = words["micro"] if pp > 1 else local
    if local % micro:
        raise UsageError(
            f"{where}: a batch of {local} is no multiple of {micro}; nearest: {micro * max(1, local // micro)}"
        )
    if (total := words["total"]) > 0 and total % (local * dp):
        raise UsageError(
            f"{where}: a global batch of {total} is no multiple of local batch x replicas = {local * dp}; "
            f"nearest: {max(1, total // (local * dp)) * local * dp}"
        )
    steps = max(1, total // (local * dp))
    if pp > 1 and steps > 1:
        notes.append(f"gradients of {steps} passes of the pipeline are accumulated: one pass is read")
    stages, v = _stages(where, words, shape, 1 if family in _SINGLE else 2) if pp > 1 else ((), 1)
    if pp > 1 and not stages:
        notes.append("the number of blocks is not in the text: layers are divided evenly")
    layout = PlannedLayout(
        dp, words["tp"], words["cp"], pp, words["ep"], v,
        m=local // micro if pp > 1 else steps,
        micro_batch=micro,
        seq=words["seq"],
        zero=_ZERO_OF_RESHARD.get(words["reshard"], 2 if pp > 1 else 3) if shards * words["cp"] > 1 else 0,
        recompute=words["recompute"],
        schedule=words["csv"] or family,
        etp=int(words["ep"] > 1) and words["etp"],
        stages=stages,
    )  # fmt: skip
    return Job(shape, layout, sequence=words["sequence"], rate=rate(words["rate"]), unknown=tuple(notes))


def _stages(
    where: str, words: Mapping[str, Any], shape: DecoderShape | None, chunks: int
) -> tuple[tuple[int, ...], int]:
    """Return the layers of each stage (none: not known), and the chunks of a rank."""
    pp, parts, per_stage = words["pp"], words["parts"], words["per_stage"]
    ends, blocks = (words["first"], words["last"]), 0 if shape is None else shape.blocks
    if not parts and not blocks:
        return (), chunks
    count = len(parts) if parts else -(-(blocks + sum(ends)) // per_stage) if per_stage else pp * chunks
    if rest := count % pp:
        if parts or words["rounds"] not in ("up", "down"):
            raise UsageError(
                f"{where}: {count} stages are no multiple of the {pp} ranks; nearest: {max(pp, count - rest)}"
            )
        count += pp - rest if words["rounds"] == "up" else -rest
    if parts:
        sizes = stages_of_names(parts, where)
        if blocks and sum(sizes) != blocks + 2:
            raise UsageError(f"{where}: the model parts hold {sum(sizes) - 2} blocks, and the model has {blocks}")
        return tuple(sizes), count // pp
    share, more = divmod(blocks + sum(ends), max(1, count))
    if count < 1 or max(*ends, 1) > share:
        raise UsageError(f"{where}: {blocks} blocks do not fill {count} stages; nearest: {pp} stages")
    sizes = [share + (at < more) for at in range(count)]
    sizes[0] += 1 - ends[0]
    sizes[-1] += 1 - ends[1]
    return tuple(sizes), count // pp


def schedule_words(job: Job) -> tuple[str, str]:
    """Return the schedule's name for a system on torch's runtime, and the path of its CSV file ("": none)."""
    layout = job.layout
    if layout.schedule in SCHEDULES:
        return SCHEDULES[layout.schedule], ""
    if Path(layout.schedule).is_file() and (order := job.order) is not None:
        return placement_word(order), layout.schedule
    return SCHEDULES[PLACED["loop" if layout.v > 1 else "linear"]], layout.schedule


_FILES = {
    "torchtitan": ("torchtitan, distributed/pipeline_parallel.py", "torchtitan, distributed/parallel_dims.py"),
    "automodel": ("nemo_automodel, pipelining/functional.py", "nemo_automodel, distributed/mesh_utils.py"),
}
"""System -> the file that builds its pipelines, and the one that builds its meshes."""


def refusals(job: Job, system: str) -> list[str]:
    """Return a sentence for each thing that a system on torch's runtime refuses, with the file that does."""
    builder, mesh = _FILES[system]
    layout, shape = without_predictions(job).layout, job.shape
    family, piped = layout.schedule, layout.pp > 1
    word = SCHEDULES.get(family, "")
    blocks = sum(layout.stages) - 2 if layout.stages else shape.blocks if shape else 10**9
    spread = layout.dp * layout.cp * layout.tp
    torch, m, rounds = "torch, schedules.py", layout.m, max(1, layout.m // layout.pp)
    rows = (
        (piped and not word and not family.endswith(".csv"), f"there is no schedule {family!r:.60} ({torch})",
         "the CSV of --to torch-csv" if names_a_file(family) else "interleaved"),
        (piped and family in _SINGLE and layout.v > 1, f"{word} has one stage a rank, not {layout.v} ({builder})", "v=1"),
        (piped and bool(word) and family not in _SINGLE and layout.v < 2, f"{word} needs two stages a rank ({builder})", "v=2"),
        (piped and family in _VEE and layout.v > 2, f"{word} has two stages a rank, not {layout.v} ({torch})", "v=2"),
        (piped and layout.pp * layout.v > blocks + 2, f"{layout.pp * layout.v} stages: too few layers ({builder})", "v=1"),
        (piped and 0 in layout.stages, f"stage {(*layout.stages, 0).index(0)} has no layers ({builder})", "v=1"),
        (piped and family == "1f1b" and m < layout.pp, f"m={m} is less than the ranks ({torch})", f"m={layout.pp}"),
        (piped and family == "dualpipev" and m < 2 * layout.pp, f"{word}: m={m} is too few ({torch})", f"m={2 * layout.pp}"),
        (piped and family in ("interleaved", "interleaved-zb") and m % rounds > 0,
         f"{word}: its {rounds} rounds do not divide m={m} ({torch})", f"m={rounds * layout.pp}"),
        (spread % layout.ep > 0, f"ep={layout.ep} does not divide dp x cp x tp = {spread} ({mesh})", "ep=1"),
    )  # fmt: skip
    return [f"{words}; nearest: {near}" for holds, words, near in rows if holds]


def without_predictions(job: Job) -> Job:
    """Return the run without blocks that predict tokens further ahead, which these systems do not train."""
    shape, layout = job.shape, job.layout
    if shape is None or not shape.num_nextn_predict_layers:
        return job
    stages, more = list(layout.stages), shape.num_nextn_predict_layers
    for at in reversed(range(len(stages))):
        share = min(more, stages[at] - (at == len(stages) - 1))
        stages[at], more = stages[at] - share, more - share
    return replace(job, shape=replace(shape, num_nextn_predict_layers=0), layout=replace(layout, stages=tuple(stages)))


def names_of_stages(stages: Sequence[int], embedding: str, last: Sequence[str], block: str) -> list[list[str]]:
    """Return the modules of each stage.

    Args:
        stages: layers of each stage; the first counts the embedding, the last the output layer.
        embedding: the embedding's name; last: those of the norm and the output layer; block: what a block's name begins with.
    """
    layers = [[embedding], *([f"{block}{at}"] for at in range(sum(stages) - 2)), list(last)]
    ends = [sum(stages[: at + 1]) for at in range(len(stages))]
    return [
        [name for layer in layers[end - count : end] for name in layer] for end, count in zip(ends, stages, strict=True)
    ]


def stages_of_names(parts: Sequence[Sequence[str]], where: str) -> list[int]:
    """Return the layers of each stage; raises UsageError, with a message that begins with `where`, for blocks out of order."""
    counts, following = list[int](), 0
    for at, part in enumerate(parts):
        blocks = [int(match[1]) for name in part if (match := _BLOCK.fullmatch(str(name)))]
        if blocks != list(range(following, following + len(blocks))):
            raise UsageError(f"{where}: part {at} has blocks {blocks[:5]}, and block {following} is next")
        following += len(blocks)
        counts.append(len(blocks) + (at == 0) + (at == len(parts) - 1))
    return counts


def known_model(*names: str) -> DecoderShape | None:
    """Return the model that one of the names means, ours or of a repository on a hub, as `without_predictions` returns it."""
    plain = {_plain(key): key for key in presets()}
    plain |= {_plain(str(values["source"]).rpartition("/")[2]): key for key, values in presets().items()}
    plain |= {"deepseekv3671b": "deepseek-v3"}
    preset = next((plain[key] for name in names if (key := _plain(name)) in plain), None)
    return None if preset is None else replace(load(preset), num_nextn_predict_layers=0)


def _plain(name: str) -> str:
    """Return a name without its publisher, how the model was tuned, and Llama 3's minor version, which change no size."""
    name = re.sub(r"-(instruct|base|chat|hf|it)\b|-\d{4}$|^meta-", "", name.rpartition("/")[2].lower())
    return re.sub(r"[\s_.-]", "", re.sub(r"(llama-?3)\.\d", r"\1", name))
