"""A planned layout as the options of a training system."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby, islice
from pathlib import Path

from pipeloom.config.rates import suitable_rate
from pipeloom.errors import UsageError
from pipeloom.plan.layout import PlannedLayout
from pipeloom.plan.predict import LayoutCosts
from pipeloom.schedule import Schedule
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import model_keys
from pipeloom.shapes.layers import parameter_count
from pipeloom.shapes.ops import Adapters

_TORCHTITAN = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}


def layout_string(stages: Sequence[int], ahead: int = 0) -> str:
    """The layers of each stage in Megatron's notation, such as `Et*3|(tt|)*29,m|L`'s: equal neighbours are one group.

    Args:
        stages: layers of each stage; the first counts the embedding, the last the output layer.
        ahead: how many of the layers before the output layer predict tokens further ahead (`m`).
    """
    words = stage_words(stages, ahead)
    pieces = []
    for word, group in groupby(words[:-1]):
        count = len(list(group))
        pieces.append(f"{word}|" if count == 1 else f"({word}|)*{count}")
    return "".join(pieces) + words[-1]


def stage_words(stages: Sequence[int], ahead: int = 0) -> list[str]:
    """The layers of each stage, such as "Ettt" or "t*5"; stages and `ahead` as for `layout_string`."""
    letters = iter("E" + "t" * (sum(stages) - 2 - ahead) + "m" * ahead + "L")
    words = ["".join(islice(letters, count)) for count in stages]

    def short(word: str) -> str:
        runs = ((letter, len(list(group))) for letter, group in groupby(word))
        return "".join(letter * count if count < 4 else f"{letter}*{count}" for letter, count in runs)

    return list(map(short, words))


def layers_by_rank(schedule: Schedule, stages: Sequence[int], ahead: int = 0) -> list[list[str]]:
    """Rows of a table: the ranks, and the layers of each of their chunks; neighbours with the same layers are one row.

    Args:
        stages, ahead: layers of each stage by position, as for `layout_string`.
    """
    words = [*stage_words(stages, ahead), *[f"E/{schedule.ranks} L/{schedule.ranks}"] * len(schedule.vocabulary)]
    if schedule.spreads_embedding:
        words[0] = words[0].removeprefix("E")
    by_rank = [[words[schedule.position_of[stage]] or "-" for stage in held] for held in schedule.stages_of]
    rows = [["rank", *(f"chunk {chunk}" for chunk in range(schedule.chunks)), *["share"] * bool(schedule.vocabulary)]]
    for held, group in groupby(enumerate(by_rank), key=lambda each: each[1]):
        ranks = [rank for rank, _ in group]
        rows.append([str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}", *held])
    return rows


def megatron(prediction: LayoutCosts) -> str:
    """The flags of Megatron-LM that lay out the run. Raises UsageError for what it does not have."""
    layout = prediction.layout
    _require_whole(layout, "megatron")
    if layout.schedule not in ("1f1b", "interleaved", "interleaved-overlap"):
        raise UsageError(f"--as megatron: it has no schedule {layout.schedule!r}; nearest: interleaved")
    flags: dict[str, object] = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep,
        "micro-batch-size": layout.micro_batch,
        "global-batch-size": layout.sequences,
        "seq-length": layout.seq,
    }
    words = [f"--{flag} {value}" for flag, value in flags.items() if value != 1 or flag.endswith("batch-size")]
    if layout.tp > 1:
        words.append("--sequence-parallel")
    if layout.zero:
        words.append("--use-distributed-optimizer")
    if prediction.ep_nodes > 1:  # a token is sent once to each node
        words.append("--moe-token-dispatcher-type flex --moe-enable-deepep")
    if layout.schedule == "interleaved-overlap":
        if layout.recompute == "full":
            raise UsageError(
                "--as megatron: its overlap of the exchange does not recompute whole blocks; nearest: interleaved"
            )
        words.append("--overlap-moe-expert-parallel-comm --delay-wgrad-compute")
    if layout.recompute == "full":
        words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif layout.recompute != "none":
        names = {
            "norms": "layernorm",
            "attention": "core_attn",
            "activation": "moe_act",
            "mlp": "mlp",
            "experts": "moe",
        }
        names |= {"shared": "shared_experts", "latent_up": "mla_up_proj"}
        modules = " ".join(names[part] for part in layout.recompute.split("+"))
        words.append(f"--recompute-granularity selective --recompute-modules {modules}")
    if layout.pp > 1:
        words.append(f'--pipeline-model-parallel-layout "{layout_string(prediction.stages, prediction.ahead)}"')
    return " \\\n".join(words) + "\n"


def _require_whole(layout: PlannedLayout, form: str) -> None:
    if layout.slices > 1:
        raise UsageError(f"--as {form}: it has no slices={layout.slices} of a sequence; nearest: --fixed slices=1")
    if layout.vocabulary == "pp":
        raise UsageError(f"--as {form}: it does not spread the output layer; nearest: --fixed vocabulary=last")


def torchtitan(prediction: LayoutCosts) -> str:
    """The sections of a torchtitan configuration that lay out the run. Raises UsageError for what it does not have."""
    layout = prediction.layout
    _require_whole(layout, "torchtitan")
    if prediction.searched is not None:
        raise UsageError("--as torchtitan: it reads a searched schedule from a CSV file; nearest: --as torch-csv")
    if layout.schedule not in _TORCHTITAN:
        raise UsageError(f"--as torchtitan: it has no schedule {layout.schedule!r}; nearest: 1f1b")
    if layout.recompute not in ("none", "full"):  # its selective mode keeps the outputs of chosen operations
        raise UsageError(f"--as torchtitan: it recomputes other parts than {layout.recompute!r:.60}; nearest: full")
    lines = [
        "[training]",
        f"local_batch_size = {layout.m * layout.micro_batch}",
        f"seq_len = {layout.seq}",
        "[parallelism]",
        f"data_parallel_shard_degree = {layout.dp}",
        f"tensor_parallel_degree = {layout.tp}",
        f"context_parallel_degree = {layout.cp}",
        f"expert_parallel_degree = {layout.ep}",
        f"pipeline_parallel_degree = {layout.pp}",
        f'pipeline_parallel_schedule = "{_TORCHTITAN[layout.schedule]}"',
        f"pipeline_parallel_microbatch_size = {layout.micro_batch}",
        "[activation_checkpoint]",
        f'mode = "{layout.recompute}"',
    ]
    return "\n".join(lines) + "\n"


def torch_csv(prediction: LayoutCosts) -> str:
    """The schedule in torch's CSV format."""
    from pipeloom.schedule.csv_form import to_csv

    _require_whole(prediction.layout, "torch-csv")
    return to_csv(prediction.schedule)


_SECONDS_AT_RISK = 1800  # between two checkpoints: what a failure costs at most, beside minutes to write one


def run_toml(
    prediction: LayoutCosts,
    shape: DecoderShape,
    source: Mapping[str, str] | None,
    table: Path | None = None,
    data: str = "",
    adapters: Adapters | None = None,
) -> str:
    """A configuration for `pipeloom train`. Raises UsageError that names what the trainer does not have.

    Args:
        source: the key of the Hugging Face directory that holds the model -> the directory; None: the model's sizes are written.
        table: the file that holds a searched schedule; None: the schedule is the family's.
        data: the source of the training data; "": it is to be named, and `train` refuses to start before.
        adapters: what is trained; None: the model's weights.
    """
    layout = prediction.layout
    wrong = [f"recompute={layout.recompute}"] * (layout.recompute not in ("none", "full"))
    foreign = [*shape.foreign, *["adapters"] * (adapters is not None)]
    if wrong := [*wrong, *(() if source else (f"{part} without a Hugging Face directory" for part in foreign))]:
        raise UsageError(
            f"--output: `pipeloom train` does not have {', '.join(wrong)}; choose another layout with --layout"
        )
    model: dict[str, object] = {**source} if source else model_section(shape)
    sections: dict[str, dict[str, object]] = {
        "model": model,
        "parallel": {
            "pp": layout.pp,
            "dp": layout.dp,
            "tp": layout.tp,
            "cp": layout.cp,
            "zero": layout.zero,
            "sp": layout.tp > 1,
            "ep": layout.ep,
            "ep_nodes": prediction.ep_nodes,
            "stages": layout_string(prediction.stages, prediction.ahead),
        }
        | ({"vocabulary": "pp"} if layout.vocabulary == "pp" else {}),
        "schedule": {"name": str(table) if table else layout.schedule, "microbatches": layout.m}
        | ({"chunks": layout.v} if layout.v > 1 and not table else {})
        | ({"slices": layout.slices} if layout.slices > 1 and not table else {}),
        "train": {
            "seq_len": layout.seq,
            "global_batch_size": layout.sequences,
            "dtype": "bfloat16",
            "device": "cuda",
            "recompute": layout.recompute,
        },
        "optimizer": {"lr": suitable_rate(parameter_count(shape), bool(source), adapters is not None)},
        "data": {"source": data},
        "checkpoint": {"every": max(1, round(_SECONDS_AT_RISK / prediction.step.total))},
        **({"lora": asdict(adapters)} if adapters is not None else {}),
    }
    return "\n".join(
        line
        for name, keys in sections.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()), "")
    )


_FLAGS = {
    "dp": "parallel.dp",
    "tp": "parallel.tp",
    "cp": "parallel.cp",
    "pp": "parallel.pp",
    "ep": "parallel.ep",
    "zero": "parallel.zero",
    "v": "schedule.chunks",
    "m": "schedule.microbatches",
    "slices": "schedule.slices",
    "schedule": "schedule.name",
    "vocabulary": "parallel.vocabulary",
    "recompute": "train.recompute",
}


def train_flags(layout: PlannedLayout, now: PlannedLayout) -> list[str]:
    """The flags with which `pipeloom train` runs `layout` instead of `now`."""
    changed = [key for key in _FLAGS if getattr(layout, key) != getattr(now, key)]
    return [f"--{_FLAGS[key]} {getattr(layout, key)}" for key in changed]


def model_section(shape: DecoderShape) -> dict[str, object]:
    """The keys of `[model]`. Raises UsageError for a model that they cannot describe."""
    if shape.foreign:
        raise UsageError(f"{shape.name} has {', '.join(shape.foreign)}, which `[model]` cannot describe")
    keys = model_keys(shape, ours=True)
    return keys | ({"num_nextn_predict_layers": ahead} if (ahead := shape.num_nextn_predict_layers) else {})


EXPORTS = {"megatron": megatron, "torchtitan": torchtitan, "torch-csv": torch_csv}
