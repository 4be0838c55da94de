"""Export of checkpoints to directories that `transformers` loads, and import of such directories."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeloom.config import ModelSection, load
from pipeloom.config.checks import CLASS_KEYS
from pipeloom.config.sections import DataSection, LoraSection
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.limits import expanded
from pipeloom.measure.build import lora_options
from pipeloom.models import hf, hub_name, tied
from pipeloom.models.hf.library import causal_model, read_config, transformers
from pipeloom.models.hf.weights import SINGLE, WEIGHTS_INDEX
from pipeloom.models.layers import PREDICTION_NORMS, block_name, own_name
from pipeloom.models.lora import is_adapter, is_transposed, merged
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.hub import ADAPTER_CONFIG, is_directory, own_shape, own_values
from pipeloom.train.checkpoint.folder import make_directory, newest_checkpoint, require_new
from pipeloom.train.checkpoint.manifest import BaseWeights
from pipeloom.train.checkpoint.reader import Reader, opened
from pipeloom.train.checkpoint.run import RunFacts, validated
from pipeloom.train.checkpoint.save import write_whole
from pipeloom.train.data.sources import BYTES, FILES, tokenizer_name
from pipeloom.train.data.store import template_of
from pipeloom.train.data.tokenizers import CHAT_TEMPLATE, SimpleTemplate, load_tokenizer
from pipeloom.train.hub.lora_files import checkpoint_digest, directory_digest, write_adapter

_SHARD_BYTES = 2 * 10**9  # bytes of weights in memory at a time and per file; readers can read parts of a file
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
# What a family may lack, of any decoder and of those with experts: an exported configuration is compared with its decoder's.
_FEATURES = (
    *("attention_bias", "qkv_bias", "qk_norm"),
    *("num_shared_experts", "norm_topk_prob", "expert_blocks", "router", "capacity_factor"),
)
_OF_MODEL = ("config.json", "generation_config.json")


def export(path: Path, out: Path, merge: bool = False) -> Path:
    """Write the weights of a checkpoint as a Hugging Face directory: safetensors, an index, and the configuration.

    A checkpoint of adapters becomes a directory of `peft`, with nothing but the adapters.

    Args:
        path: a checkpoint, or a folder of checkpoints, of which the newest complete one is exported.
        out: a directory that does not exist, or is empty.
        merge: add adapters to the weights that they were trained with, and write the whole model.

    Returns:
        the directory of the exported checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, is not a trainer's, or holds adapters of weights that have changed.
        ConfigError: the model has no counterpart in `transformers`, `out` is not empty, or there is nothing to merge.
    """
    directory = newest_checkpoint(path)
    require_new(out)
    reader = opened(directory)
    if reader.manifest.base is not None:
        _export_adapters(reader, reader.manifest.base, out, merge)
    elif merge:
        raise ConfigError(f"{directory} holds no adapters to merge; leave --merge out")
    else:
        section = _section(reader)
        _write(out, section, _dtype_of(reader), _layers_of(reader, section), _origin(reader, section))
    _write_tokenizer(directory, out)
    return directory


def _section(reader: Reader) -> ModelSection:
    """Return the configuration of a checkpoint's model. Raises CheckpointError if the checkpoint does not hold it."""
    described = RunFacts.read(reader.directory).model(reader.directory)
    return validated(ModelSection, {**load().model.model_dump(), **described}, reader.directory)


def _origin(reader: Reader, section: ModelSection) -> Path | None:
    """Return the directory that the weights of Pipeloom's decoder were imported from, if it exists and has these sizes."""
    source = RunFacts.read(reader.directory).source
    if not source and is_directory(section.weights):
        source = section.weights
    elif not source and section.weights:
        with suppress(CheckpointError):  # there is none, or it names no directory that it was imported from
            source = RunFacts.read(newest_checkpoint(Path(section.weights))).source
    if not source or not is_directory(source):
        return None
    values = own_values(read_config(source).to_dict())
    sizes = section.model_dump(mode="json")
    same = values is not None and all(sizes.get(key) == value for key, value in values.items())
    return Path(source) if same else None


def _write_tokenizer(directory: Path, out: Path) -> None:
    """Copy the tokenizer of a run beside its weights, if it still exists, and make the template of its chats the tokenizer's."""
    facts = RunFacts.read(directory)
    data = validated(DataSection, {**load().data.model_dump(), **facts.config.get("data", {})}, directory)
    model = facts.config.get("model", {})
    name = tokenizer_name(data.tokenizer, str(model.get("source") or model.get("weights") or ""))
    path = expanded(name)
    if path.is_file():
        shutil.copyfile(path, out / "tokenizer.json")
    elif any((path / file).is_file() for file in FILES):
        _copy_texts(path, out, (*_OF_MODEL, ADAPTER_CONFIG))
    elif name != BYTES:
        return
    if not facts.chat:
        return
    tokenizer = load_tokenizer(name, data.bos, data.eos)
    template = template_of(tokenizer, data)
    if isinstance(template, SimpleTemplate):
        (out / CHAT_TEMPLATE).write_text(template.for_transformers(), encoding="utf-8")
        if name != BYTES:
            config = out / "tokenizer_config.json"
            described = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
            described.pop("chat_template", None)
            described = {"tokenizer_class": "PreTrainedTokenizerFast", **described, **template.specials}
            config.write_text(json.dumps(described), encoding="utf-8")


def _copy_texts(source: Path, out: Path, without: tuple[str, ...]) -> None:
    """Copy the text files of a model's directory, such as those of its tokenizer, except for the names in `without`."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _COPIED and not file.name.endswith(_WEIGHTS) and file.name not in without:
            shutil.copyfile(file, out / file.name)


def _dtype_of(reader: Reader) -> torch.dtype:
    kinds = {entry.dtype for key, entry in reader.manifest.tensors.items() if key.startswith("model.")}
    return torch.bfloat16 if kinds == {"BF16"} else torch.float32


def _layers_of(reader: Reader, section: ModelSection) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of a checkpoint, layer by layer, under their names in `transformers`, which has no prediction blocks."""
    names = [key.partition(".")[2] for key in reader.tensors if key.startswith("model.")]
    blocks = [block_name(section.num_hidden_layers + at) for at in range(section.num_nextn_predict_layers)]
    left_out = tuple(f"{name}." for name in (*blocks, PREDICTION_NORMS))
    for group in _by_layer([name for name in names if section.source or not name.startswith(left_out)]):
        tensors = {name: reader.whole(f"model.{name}") for name in group}
        yield {hub_name(name): t for name, t in tensors.items()} if section.source else to_hub(tensors)


def _write(
    out: Path,
    section: ModelSection,
    dtype: torch.dtype,
    layers_of: Iterator[dict[str, Tensor]],
    origin: Path | None = None,
) -> None:
    """Write a model's weights, its configuration, and the tokenizer's files of the directory that it comes from.

    Args:
        origin: directory that the weights of Pipeloom's decoder were imported from; they are exported with its configuration.
    """
    for key in CLASS_KEYS:
        if getattr(section, key):
            raise ConfigError(
                f'model.{key} = "{getattr(section, key)}": no model of transformers computes what your class does'
            )
    source = Path(section.source) if section.source else origin
    config = read_config(source) if source is not None else hub_config(section.shape())
    config.dtype = dtype
    model = causal_model(config, dtype)
    make_directory(out)
    _write_files(out, (item for tensors in layers_of for item in _as_written(model, tensors).items()))
    if source is not None:
        _copy_texts(source, out, ("config.json",))
    config.architectures = [type(model).__name__]
    config.save_pretrained(out)  # last: without it the directory is not a model


def _export_adapters(reader: Reader, base: BaseWeights, out: Path, merge: bool) -> None:
    """Write a checkpoint's adapters alone, or with `merge` the whole model with the adapters added to its weights."""
    section = _section(reader)
    lora = validated(LoraSection, RunFacts.read(reader.directory).config.get("lora"), reader.directory)
    options = lora_options(lora)
    assert options is not None
    names = [key.partition(".")[2] for key in reader.tensors if key.startswith("model.") and is_adapter(key)]
    adapters = {hub_name(name): reader.whole(f"model.{name}") for name in names}
    if not merge:
        source, transposed = base.path, False
        if base.kind == "checkpoint":  # which may be imported from a directory
            source = RunFacts.read(Path(base.path)).source or base.path
        else:
            adapted = {name.rpartition(".lora_")[0] for name in adapters}
            parts = causal_model(read_config(base.path), None).named_modules()
            transposed = any(name in adapted and is_transposed(part) for name, part in parts)
        write_adapter(out, adapters, options, source, transposed)
        return
    path = Path(base.path)
    now = directory_digest(path) if base.kind == "hugging face" else checkpoint_digest(path)
    if now != base.digest:
        raise CheckpointError(
            f"{reader.directory}: its adapters were trained with the weights in {path}, which have changed since"
        )
    if base.kind == "hugging face":
        foreign = hf.layers(path)
        # Also for Pipeloom's decoder: its tensors get the directory's names.
        section = section.model_copy(update={"source": base.path})
        _refuse_tied(foreign.tied, adapters)
        dtype = next(foreign.cut.model.parameters()).dtype
        _write(out, section, dtype, _merged_layers(foreign, adapters, options.scale))
        return
    weights = opened(path)
    _refuse_tied(tied(section.shape()), adapters)
    added = (merged(tensors, adapters, options.scale) for tensors in _layers_of(weights, section))
    _write(out, section, _dtype_of(weights), added, _origin(weights, section))


def _states(foreign: hf.ModelLayers) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """Yield each layer of a directory's model, built, with its weights and buffers by their names here; a tied weight once."""
    copies = {name for group in foreign.tied for name in group[1:]}
    for layer in foreign:
        built: nn.Module = layer()
        named = {f"{layer.name}.{name}": value.detach() for name, value in built.state_dict().items()}
        yield built, {name: value for name, value in named.items() if name not in copies}


def _merged_layers(
    foreign: hf.ModelLayers, adapters: Mapping[str, Tensor], scale: float
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of a directory with adapters added, layer by layer."""
    for built, named in _states(foreign):
        transposed = any(is_transposed(part) for part in built.modules())
        weights = {hub_name(name): value for name, value in named.items()}
        yield merged(weights, adapters, scale, transposed)


def _refuse_tied(ties: Sequence[Sequence[str]], adapters: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for an adapter of a layer whose weight is tied to another."""
    shared = {hub_name(name) for group in ties for name in group}
    for name in adapters:
        weight = f"{name.rpartition('.lora_')[0]}.weight"
        if weight in shared:
            raise ConfigError(f"{weight} is tied to another weight, so its adapter cannot be merged into it")


def import_directory(source: Path, out: Path) -> tuple[Path, bool]:
    """Make a checkpoint of step 0 from a Hugging Face directory.

    If Pipeloom's own decoder can compute the model (Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE, Qwen3-MoE), the checkpoint
    is one of that decoder, for any layout with tensor and expert parallelism; otherwise of the model as `transformers` has it.
    `model.toml` in `out` is the configuration to train it with. One layer is in memory at a time.

    Returns:
        (the checkpoint's directory, whether it is of Pipeloom's decoder).

    Raises:
        ConfigError: `source` is not a model that can be read, or `out` is not empty.
        CheckpointError: the checkpoint cannot be written.
    """
    require_new(out)
    config = read_config(source)
    values = own_values(config.to_dict())
    foreign = hf.layers(source, dtype=None)
    here = str(source.absolute())
    section = load(None, {f"model.{key}": value for key, value in (values or {"source": here}).items()}).model
    extra = {"batch": 0, "config": {"model": section.model_dump(mode="json")}, "source": here}
    path = write_whole(out, 0, _imported(foreign, values is not None), extra)
    keys = {"source": section.source} if values is None else {**values, "weights": str(out.absolute())}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    # A model that transformers computes brings its tokenizer with `model.source`.
    if values is not None and any((source / name).is_file() for name in FILES):
        lines += f"\n[data]\ntokenizer = {json.dumps(here)}\n"
    (out / "model.toml").write_text(f"[model]\n{lines}", encoding="utf-8")
    return path, values is not None


def _imported(foreign: hf.ModelLayers, ours: bool) -> Iterator[dict[str, Tensor]]:
    """Yield the weights and buffers of a directory, layer by layer, with the names that they have in a checkpoint.

    Args:
        ours: whether the checkpoint is of Pipeloom's decoder.
    """
    for _, tensors in _states(foreign):
        if ours:
            tensors = from_hub({hub_name(name): value for name, value in tensors.items()})
            tensors = {own_name(name): value for name, value in tensors.items()}
        yield tensors


def hub_config(shape: DecoderShape) -> Any:
    """Return the `transformers` configuration of a decoder of `shape`. Raises ConfigError if no model there computes the same."""
    experts, qkv_bias_alone = bool(shape.num_experts), shape.qkv_bias and not shape.attention_bias
    if not experts:
        name = "Qwen3Config" if shape.qk_norm else "Qwen2Config" if qkv_bias_alone else "LlamaConfig"
    elif shape.qk_norm:
        name = "Qwen3MoeConfig"
    else:
        name = "Qwen2MoeConfig" if shape.num_shared_experts else "MixtralConfig"
    kind = getattr(transformers(), name)
    of_family = {
        **asdict(shape),  # whose names are those of transformers, but for these:
        "head_dim": shape.head_width,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "intermediate_size": shape.expert_width if name == "MixtralConfig" else shape.intermediate_size,
        "num_local_experts": shape.num_experts,
        "moe_intermediate_size": shape.expert_width,
        "shared_expert_intermediate_size": shape.num_shared_experts * shape.expert_width,
        "mlp_only_layers": [block for block, sparse in enumerate(shape.expert_blocks) if not sparse],
        "decoder_sparse_step": 1,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    known = kind().to_dict().keys() - {"model_type"} | {"head_dim"}
    config = kind(**{key: value for key, value in of_family.items() if key in known})
    computed = own_shape(config.to_dict())
    for key in _FEATURES if experts else _FEATURES[:3]:
        wanted, value = getattr(shape, key), getattr(computed, key)
        if wanted != value and not (key == "qkv_bias" and shape.attention_bias):
            raise ConfigError(
                f"no model of transformers computes this decoder: the nearest, {name}, has {key} = {json.dumps(value)}, "
                f"not {json.dumps(wanted)}"
            )
    return config


def to_hub(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights of Pipeloom's decoder to their form in `transformers`, where experts' gate and up matrices are one."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_proj.weight"):
            stem = name.removesuffix("gate_proj.weight")
            renamed[f"{stem}gate_up_proj"] = torch.cat((tensor, tensors[f"{stem}up_proj.weight"]), dim=1)
        elif name.endswith("experts.down_proj.weight"):
            renamed[name.removesuffix(".weight")] = tensor
        elif not name.endswith("experts.up_proj.weight"):
            renamed[hub_name(name)] = tensor
    return renamed


def from_hub(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Invert `to_hub`, but for the names: those that `own_name` converts stay as in `transformers`."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            renamed[f"{stem}gate_proj.weight"], renamed[f"{stem}up_proj.weight"] = tensor.chunk(2, dim=1)
        elif name.endswith("experts.down_proj"):
            renamed[f"{name}.weight"] = tensor
        else:
            renamed[name] = tensor
    return renamed


def _as_written(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights from their form in memory to that in the family's files, in which experts, for instance, are separate."""
    loading: Any = importlib.import_module("transformers.core_model_loading")
    converted: dict[str, Tensor] = loading.revert_weight_conversion(model, tensors)
    return converted


def _by_layer(names: list[str]) -> Iterator[list[str]]:
    """Group the names of a checkpoint: those of one decoder layer together, every other name alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        number = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
        groups.setdefault(name if number is None else ".".join(parts[: number + 1]), []).append(name)
    yield from groups.values()


def _write_files(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors, in their order, into files of at most `_SHARD_BYTES`, and the index of the files if there are several.

    The tensors arrive layer by layer, so that the number of files, which is part of their names, is known at the end only.
    """
    waiting: dict[str, Tensor] = {}
    files: list[list[str]] = []
    total = 0

    def part(number: int) -> Path:
        return folder / f"part-{number:05d}.safetensors"

    def write() -> None:
        save_file(waiting, part(len(files)), metadata={"format": "pt"})
        files.append(list(waiting))
        waiting.clear()

    for name, tensor in tensors:
        if waiting and sum(each.nbytes for each in waiting.values()) + tensor.nbytes > _SHARD_BYTES:
            write()
        waiting[name] = tensor.clone(memory_format=torch.contiguous_format)
        total += tensor.nbytes
    write()
    if len(files) == 1:
        part(0).rename(folder / SINGLE)
        return
    index: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        part(number).rename(folder / file)
        index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / WEIGHTS_INDEX).write_text(text, encoding="utf-8")
