"""Weights that a run begins with: checkpoints, the source of frozen ones, and adapters in the file format of `peft`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeloom.config import Config
from pipeloom.config.checks import CLASS_KEYS
from pipeloom.errors import CheckpointError, ConfigError, did_you_mean
from pipeloom.limits import expanded
from pipeloom.measure.build import PARAMETER_DTYPES, foreign, lora_options
from pipeloom.models import hub_name, layers
from pipeloom.models.hf.library import causal_model, read_config
from pipeloom.models.hf.weights import PretrainedWeights, stored_tensors
from pipeloom.models.lora import LoraOptions, is_adapter, is_linear
from pipeloom.models.stored_tensors import StoredTensors
from pipeloom.runtime import Pipeline
from pipeloom.shapes.hub import ADAPTER_CONFIG, is_directory
from pipeloom.shapes.ops import ALL_LINEAR
from pipeloom.train.checkpoint.folder import make_directory, newest_checkpoint
from pipeloom.train.checkpoint.load import on_every_rank, opened_together
from pipeloom.train.checkpoint.manifest import BaseWeights, read_manifest
from pipeloom.train.checkpoint.reader import Reader, verified
from pipeloom.train.checkpoint.run import digests, find_start
from pipeloom.train.checkpoint.state import Holder, holders, require_shapes
from pipeloom.train.collect import agreed, from_every_rank

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # prefix of every name in peft's files
_SAMPLE = 64  # bytes at each of the start, middle and end of a tensor that a directory's digest reads


def base_weights(config: Config) -> BaseWeights | None:
    """Return the source of the weights that adapters leave frozen; None: the configuration has no adapters.

    Raises CheckpointError or ConfigError if they cannot be read.
    """
    if not config.lora.r:
        return None
    source = config.model.source
    path = expanded(source) if source else expanded(config.model.weights).absolute()
    if source or is_directory(str(path)):
        return BaseWeights("hugging face", str(path), directory_digest(path))
    path = newest_checkpoint(path)
    return BaseWeights("checkpoint", str(path), checkpoint_digest(path))


def directory_digest(path: Path) -> str:
    """Return the SHA-256 of a Hugging Face directory's configuration, its tensors' names, dtypes and shapes, and samples of each.

    Only samples of the values are read, so that the time does not grow with the size of the tensors.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for name, entry in sorted(stored_tensors(path).entries.items()):
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
        with entry.file.open("rb", buffering=0) as file:
            for at in (0, max(0, entry.size // 2 - _SAMPLE), max(0, entry.size - _SAMPLE)):
                file.seek(entry.start + at)
                digest.update(file.read(min(_SAMPLE, entry.size)))
    return digest.hexdigest()


def checkpoint_digest(path: Path) -> str:
    """Return the SHA-256 of the checksums of a checkpoint's files."""
    files = read_manifest(path).files
    return hashlib.sha256(" ".join(f"{name} {files[name].sha256}" for name in sorted(files)).encode()).hexdigest()


def begin_weights(config: Config, pipeline: Pipeline, resumed: bool = False) -> None:
    """Load the initial weights of a run, apart from those of `model.source`; collective.

    `model.weights` holds those of Pipeloom's own decoder, `lora.adapter` those of adapters.

    Args:
        resumed: whether a checkpoint, which has all trained weights, is loaded afterwards.

    Raises:
        CheckpointError, ConfigError: weights that are absent or belong to another model; adapters without a layer to adapt.
    """
    if config.model.weights and (config.lora.r or not resumed):
        weights = expanded(config.model.weights).absolute()
        (read_directory if is_directory(str(weights)) else _read_checkpoint)(weights, pipeline)
    if config.lora.r and not config.lora.adapter:  # whose own layers are compared when it is read
        _require_adapters(config, pipeline)
    if config.lora.adapter and not resumed:
        read_adapter(expanded(config.lora.adapter), pipeline)


@torch.no_grad()
def read_directory(path: Path, pipeline: Pipeline) -> int:
    """Load this rank's part of the weights of a Hugging Face directory into Pipeloom's own decoder.

    The gate and up matrices of experts, which `transformers` joins in memory, are read in the form in which the files have them.

    Returns:
        the number of bytes of tensors that this rank has read.

    Raises:
        ConfigError: a weight that the directory lacks, or that has another shape.
    """
    weights = PretrainedWeights(path, causal_model(read_config(path), None))
    for held in holders(pipeline):
        if is_adapter(held.name) or not held.parameter:
            continue
        for box, values in held.parts(held.tensor):
            name, offset, shape = hub_name(held.name), list(box.offset), list(held.shape)
            stem, _, matrix = name.removesuffix(".weight").rpartition("experts.")
            if matrix in ("gate_proj", "up_proj") and len(shape) == 3:
                offset[1] += shape[1] * (matrix == "up_proj")
                name, shape[1] = f"{stem}experts.gate_up_proj", 2 * shape[1]
            elif matrix == "down_proj" and len(shape) == 3:
                name = f"{stem}experts.down_proj"
            weights.load_part(name, values, offset, shape)
    return weights.files.bytes_read


@torch.no_grad()
def _read_checkpoint(path: Path, pipeline: Pipeline) -> None:
    """Load the weights of a checkpoint, except those of adapters; collective."""
    reader = opened_together(path, pipeline)
    if reader.manifest.base is not None:
        raise CheckpointError(
            f"{reader.directory}: it holds adapters only, of the model in {reader.manifest.base.path}"
        )
    here = [held for held in holders(pipeline) if not is_adapter(held.name)]
    on_every_rank(pipeline, lambda: require_shapes(reader, {held.name: held.shape for held in here}))
    for held in here:
        held.tensor.copy_(held.read(partial(reader.region, f"model.{held.name}")))


def require_checkpoints(config: Config) -> None:
    """Raise the errors of a run's start about the checkpoints that it names, as far as manifests and sizes of files show them.

    A run of `log.dir` that only its data would choose is left out, and so are the shapes of models that are not our own decoder.
    """
    weights, section = config.model.weights, config.checkpoint
    named = isinstance(section.resume, str) and section.resume not in ("none", "auto")
    paths = [newest_checkpoint(expanded(weights).absolute())] if weights and not is_directory(weights) else []
    start = find_start(config, digests(config, ""), None).path if section.dir or named else None
    if start is not None:
        paths.append(start)
    ours = not config.model.source and not any(getattr(config.model, key) for key in CLASS_KEYS)
    parts = layers(config.model.shape(), 0, device="meta") if paths and ours else ()
    states = {each.name: each.build().state_dict() for each in parts}
    shapes = {f"{layer}.{name}": tuple(value.shape) for layer, state in states.items() for name, value in state.items()}
    # Of adapters and tied weights some names stand for others, or are not stored.
    stores_all = not (config.lora.r or config.model.tie_word_embeddings)
    for path in paths:
        manifest, problem = verified(path, None, whole=False)
        if manifest is None:
            raise CheckpointError(problem)
        known = shapes if stores_all else manifest.names("model")
        require_shapes(Reader(path, manifest), {name: shapes[name] for name in shapes if name in known})


def require_targets(config: Config) -> None:
    """Raise ConfigError for adapters of layers that the model, which is built without its values, does not have.

    Those of a class of your own are known once the model is built.
    """
    targets, own_classes = config.lora.target_modules, any(getattr(config.model, key) for key in CLASS_KEYS)
    if not config.lora.r or config.lora.adapter or targets == ALL_LINEAR or own_classes:
        return
    if config.model.source:
        parts = {"": foreign(config.model.source, PARAMETER_DTYPES[config.train.dtype]).cut.model}
    else:
        parts = {each.name: each.build() for each in layers(config.model.shape(), 0, device="meta")}
    modules = [(layer, *each) for layer, part in parts.items() for each in part.named_modules()]
    linear = {hub_name(f"{layer}.{path}".strip(".")) for layer, path, module in modules if is_linear(module)}
    _refuse_targets(config, linear, linear)


def _require_adapters(config: Config, pipeline: Pipeline) -> None:
    """As `require_targets`, of a model that is built; on every rank."""
    names = [(hub_name(name), p) for name, p in pipeline.named_parameters()]
    adapted = [name.rpartition(".lora_")[0] for name, _ in names if is_adapter(name)]
    weights = {name.split(".")[-2] for name, p in names if p.ndim == 2 and name.endswith(".weight")}
    everyone = from_every_rank(pipeline, [adapted, sorted(weights)], "the other ranks to count their adapters")
    adapted_anywhere, known = ({each for facts in everyone for each in facts[at]} for at in (0, 1))
    _refuse_targets(config, adapted_anywhere, known)


def _refuse_targets(config: Config, names: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError for an entry of `lora.target_modules` that none of the linear layers `names` fits."""
    options = lora_options(config.lora)
    assert options is not None
    targets = options.target_modules
    for target in [targets] if isinstance(targets, str) else targets:
        rule = replace(options, target_modules=target if isinstance(targets, str) else (target,))
        if not any(map(rule.chooses, names)):
            nearest = did_you_mean(target, {name.rpartition(".")[2] for name in known})
            raise ConfigError(f"lora.target_modules: no linear layer is called {target!r:.200}{nearest}")


# -- peft's files --------------------------------------------------------------------------------------------------------


def write_adapter(out: Path, tensors: Mapping[str, Tensor], options: LoraOptions, base: str, transposed: bool) -> None:
    """Write adapters as `peft` does: `adapter_config.json` and `adapter_model.safetensors` in a new directory.

    Args:
        tensors: name in `transformers` -> tensor.
        base: directory of the model that they belong to, for `peft`.
        transposed: whether the layers store their weights as [inputs, outputs].
    """
    make_directory(out)
    named = {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, out / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    modules = sorted({name.rpartition(".lora_")[0] for name in tensors})
    targets = options.target_modules
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.r,
        "lora_alpha": options.lora_alpha,
        "lora_dropout": options.lora_dropout,
        "target_modules": modules if targets == "all-linear" else targets,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }
    (out / ADAPTER_CONFIG).write_text(json.dumps(content, indent=1), encoding="utf-8")


@torch.no_grad()
def read_adapter(folder: Path, pipeline: Pipeline) -> None:
    """Load this rank's part of adapters in peft's format into a pipeline; collective.

    Raises ConfigError, on every rank, for adapters that only the model or only the file has, or that have another shape.
    """
    here = [held for held in holders(pipeline) if is_adapter(held.name)]
    names = [hub_name(held.name) for held in here]
    exchange = partial(from_every_rank, pipeline, what="the other ranks to read an adapter", phase="load")
    answers = agreed(exchange, lambda: [_read_parts(folder / ADAPTER_WEIGHTS, here), names])
    keys, known = ({name for given in answers for name in given[at]} for at in (0, 1))
    if others := sorted(keys - known):
        raise ConfigError(
            f"{folder / ADAPTER_WEIGHTS}: it has {others[0]}{f' and {len(others) - 1} more' * (len(others) > 1)}, which the "
            "model has no linear layer for"
        )


def _read_parts(path: Path, here: Iterable[Holder]) -> list[str]:
    """Fill the tensors in `here` from a file. Return the names of all tensors in the file."""
    try:
        file = StoredTensors([path])
        keys = [key.removeprefix(_PREFIX) for key in file.entries]
        for held in here:
            name = hub_name(held.name)
            if name not in keys:
                raise ConfigError(f"{path}: it has no {name}, and the model has an adapter there")
            shape = file.entries[f"{_PREFIX}{name}"].shape
            if shape != held.shape:
                raise ConfigError(f"{path}: {name} is {list(shape)}, and the model's is {list(held.shape)}")
            for box, values in held.parts(held.tensor):
                file.read_into(f"{_PREFIX}{name}", values, box.offset)
        return keys
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {str(error)[:200]}") from error
