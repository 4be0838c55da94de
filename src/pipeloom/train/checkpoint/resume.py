"""Choice of the checkpoint that a run starts from: rank 0 lists the candidates, all ranks verify them and take the same one."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pipeloom.config import Config
from pipeloom.errors import CheckpointError, ConfigError, echo, sentence
from pipeloom.limits import expanded
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.train.checkpoint.facts import RunFacts
from pipeloom.train.checkpoint.folder import complete, newest_checkpoint, remove_leftovers, restore_replaced, step_path
from pipeloom.train.checkpoint.load import verified
from pipeloom.train.checkpoint.manifest import MANIFEST, Manifest
from pipeloom.train.lock import RunClaim

if TYPE_CHECKING:
    from pipeloom.train.context import WorkerContext

DIGESTS_FILE = "run.json"  # in a run's folder: the digests of its model and data
# Keys that determine the names and shapes of parameters and buffers.
_MODEL_KEYS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias"),
    *("qkv_bias", "intermediate_size", "vocab_size", "tie_word_embeddings", "num_experts", "moe_intermediate_size"),
    *("num_shared_experts", "router"),
)
# Prefixes of keys that may change from one part of a run to the next without a note. Most change results by rounding at most;
# train.steps moves the decay of the learning rate too, but changing it is the usual reason to resume.
_FREE = ("parallel.", "schedule.", "log.", "checkpoint.", "debug.", "train.steps", "train.device", "train.tune_cpu")
_FREE_TOO = (
    "train.recompute",
    "train.threads",
    "train.timeout",
    "train.check_every",
    "train.deterministic",
    "train.on_nan",
    "train.on_spike",
    "train.restarts",
    "train.profile_from",
    "train.profile_steps",
)
_ZERO = ("optimizer.zero1", "optimizer.barrier", "train.rollbacks")


@dataclass(frozen=True)
class Start:
    """Starting point of a run.

    Attributes:
        path: the checkpoint; None: the run starts at the first step.
        manifest: the checkpoint's manifest.
        folder: the folder of the run that continues; None: the run creates a new one.
        notes: messages for the log: checkpoints that were skipped, and changes since this one.
    """

    path: Path | None = None
    manifest: Manifest | None = None
    folder: Path | None = None
    notes: tuple[str, ...] = ()


def digests(config: Config, data: str) -> dict[str, str]:
    """Return the digests that two runs must have in common for one to continue the other: `model` and `data`."""
    model = config.model.model_dump(include=set(_MODEL_KEYS), mode="json")
    if config.model.qk_norm:
        model["qk_norm"] = True
    if config.lora.r:
        model["lora"] = [config.lora.r, config.lora.target_modules]
    if config.model.moe_layer_freq != 1:  # left out at its default, because the digests of older runs do not have it
        model["moe_layer_freq"] = config.model.moe_layer_freq
    return {"model": hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()[:16], "data": data}


def find_start(
    config: Config,
    mine: Mapping[str, str],
    context: WorkerContext,
    run: Path | None = None,
    claim: RunClaim | None = None,
) -> Start:
    """Find and verify the checkpoint that `checkpoint.resume` selects; collective over all workers.

    Args:
        mine: the run's `digests`.
        run: folder of the attempt that this run restarts, whose newest checkpoint is taken whatever `checkpoint.resume` says;
            None: this is the first attempt. `checkpoint.dir`, where set, replaces the folder. Without either, the newest run
            below `log.dir` is searched.
        claim: locks the folder that the run will save into, if that exists already or is configured, before it is searched.

    Raises:
        CheckpointError: the selected checkpoint is absent or damaged, or all candidates are damaged.
        ConfigError: `checkpoint.dir` holds checkpoints that new ones would be mixed with, or another run saves there.
    """
    group = dist.group.WORLD if context.world_size > 1 else None
    candidates, notes = _candidates(config, mine, context, group, run, claim), []
    for number, text in enumerate(candidates["paths"]):
        path = Path(text)
        with context.waiting("the other workers to compare a checkpoint's checksums", "load"):
            manifest, problem = verified(path, group, context.rank, context.world_size)
        if manifest is None:
            if candidates["exact"]:
                raise CheckpointError(problem)
            after = (
                ", and there is none before it"
                if number + 1 == len(candidates["paths"])
                else "; taking the one before it"
            )
            notes.append(f"{problem}{after}")
            continue
        facts = RunFacts.read(path)
        notes += _differences(config, mine, facts)
        return Start(path, manifest, _folder(config, candidates, facts), tuple(notes))
    if notes:
        raise CheckpointError("\n".join(notes))
    return Start(folder=Path(candidates["folder"]) if candidates["folder"] else None)


def _candidates(
    config: Config,
    mine: Mapping[str, str],
    context: WorkerContext,
    group: Any,
    run: Path | None,
    claim: RunClaim | None,
) -> dict[str, Any]:
    """Return the first rank's candidates: `paths` to try in order, `exact` (no other may be taken), and the run's `folder`."""
    candidates: dict[str, Any] = {}
    if context.rank == 0:
        try:
            candidates = _look(config, mine, run, claim or RunClaim())
        except (CheckpointError, ConfigError) as error:
            candidates = {"error": sentence(str(error)), "kind": type(error).__name__}
        except OSError as error:
            candidates = {"error": f"{error.filename}: cannot be read: {error.strerror}", "kind": "CheckpointError"}
    if group is not None:
        with context.waiting("rank 0 to look for a checkpoint", "load"):
            candidates = all_gather_json(candidates, group)[0]
    if "error" in candidates:
        raise (ConfigError if candidates["kind"] == "ConfigError" else CheckpointError)(candidates["error"])
    return candidates


def _look(config: Config, mine: Mapping[str, str], run: Path | None, claim: RunClaim) -> dict[str, Any]:
    section = config.checkpoint
    configured = expanded(section.dir).absolute() if section.dir else None
    folder = configured or run
    if folder is None and section.resume != "none":
        folder = newest_run(config, mine)
    target = folder if run is not None or section.resume == "auto" else configured
    if target is not None:
        claim.lock(target, f'checkpoint.dir = "{section.dir}"' if section.dir else f'log.dir = "{config.log.dir}"')
        (remove_leftovers if claim.locks else restore_replaced)(target)
    if run is not None:
        paths = [str(path) for _, path in complete(configured or run)]
        return {"paths": paths, "exact": False, "folder": str(run)}
    if section.resume == "none":
        _require_empty(configured, None)
        return {"paths": [], "exact": False, "folder": ""}
    if section.resume == "auto":
        paths = [str(path) for _, path in complete(folder)] if folder is not None else []
        return {"paths": paths, "exact": False, "folder": str(folder) if paths and configured is None else ""}
    if isinstance(section.resume, int):
        if folder is None:
            raise CheckpointError(
                f"checkpoint.resume = {section.resume}: no run in {config.log.dir} has this model and data"
            )
        source = step_path(folder, section.resume)
        if not (source / MANIFEST).is_file():
            steps = [step for step, _ in complete(folder)]
            there = f"it has {', '.join(map(str, reversed(steps)))}" if steps else "it has none"
            raise CheckpointError(
                f"checkpoint.resume = {section.resume}: {folder} has no complete checkpoint of that step; {there}"
            )
    else:
        source = expanded(section.resume).absolute()
        with contextlib.suppress(CheckpointError):  # refused with a reason where it is read
            source = newest_checkpoint(source)
    _require_empty(configured, source)
    return {"paths": [str(source)], "exact": True, "folder": ""}


def newest_run(config: Config, mine: Mapping[str, str]) -> Path | None:
    """Return the folder of the newest run below `log.dir` with the same model and data; None: there is none."""
    root = expanded(config.log.dir).absolute()
    runs = []
    for path in root.iterdir() if root.is_dir() else ():
        facts = _facts_of(path)
        if facts is not None and all(facts.get(key) == value for key, value in mine.items()):
            runs.append((float(facts.get("started", 0.0)), path))
    return max(runs)[1] if runs else None


def _require_empty(target: Path | None, source: Path | None) -> None:
    """Raise ConfigError if `checkpoint.dir` has checkpoints that new ones would be mixed with."""
    there = complete(target) if target is not None else []
    if there and (source is None or there[0][1] != source):
        raise ConfigError(
            f'checkpoint.dir = "{target}": it has checkpoints up to step {there[0][0]}, which new ones would be mixed with; use '
            'another folder, or checkpoint.resume = "auto" to continue from there'
        )


def _folder(config: Config, candidates: Mapping[str, Any], facts: RunFacts) -> Path | None:
    """Return the folder of the run that continues; None: a copy of its checkpoints, or another `log.dir`, gets a new one."""
    if candidates["exact"]:
        return None
    folder = Path(candidates["folder"] or facts.run)
    recorded = _facts_of(folder) if folder.is_absolute() else None
    if recorded is None or candidates["folder"]:
        return None if recorded is None else folder
    there = str(expanded(config.checkpoint.dir).absolute())
    same = folder.parent == expanded(config.log.dir).absolute() and recorded.get("checkpoints", there) == there
    return folder if same else None


def _facts_of(run: Path) -> Mapping[str, Any] | None:
    """Return the content of a run's `run.json`; None if there is none."""
    try:
        facts = json.loads((run / DIGESTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def _differences(config: Config, mine: Mapping[str, str], facts: RunFacts) -> list[str]:
    """Return a message for each way in which data or settings differ from those of the checkpoint."""
    notes = []
    if facts.data not in (None, mine["data"]):
        notes.append("the data differs from the checkpoint's: its order restarts at the current batch number")
    dumped, before = config.model_dump(mode="json"), facts.config
    changed = [
        f"{section}.{key} {echo(before[section][key])} -> {value!r}"
        for section, table in dumped.items()
        for key, value in table.items()
        if section in before and key in before[section] and before[section][key] != value
        if not f"{section}.{key}".startswith((*_FREE, *_FREE_TOO, *_ZERO, "data.source", "data.cache"))
    ]
    if changed:
        notes.append(f"changed since the checkpoint: {', '.join(changed)}")
    if config.model.num_experts and (config.model.aux_loss_coef or config.model.capacity_factor):
        earlier, now = _rows(before), _rows(dumped)
        if earlier and earlier != now:
            notes.append(
                f"a micro-batch has {_words(now)} instead of {_words(earlier)} sequences, and load-balance losses and "
                "capacities of experts are computed per micro-batch: losses will differ by more than rounding"
            )
    return notes


def _rows(config: Mapping[str, Any]) -> list[int]:
    """Return the sizes of a replica's micro-batches, from a dumped configuration; [] if it lacks a key."""
    try:
        rows, parts = (
            config["train"]["global_batch_size"] // config["parallel"]["dp"],
            config["schedule"]["microbatches"],
        )
        return sorted({rows // parts, -(-rows // parts)})
    except (KeyError, TypeError, ZeroDivisionError):
        return []


def _words(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))
