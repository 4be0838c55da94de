"""Weights of a part of a model: first values by the family's own rules, or those of a Hugging Face directory."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeloom.errors import ConfigError, UsageError, echo
from pipeloom.limits import read_json
from pipeloom.models.layers import shared_names
from pipeloom.models.stored_tensors import StoredTensors


@torch.no_grad()
def initialize(module: nn.Module, prefix: str, model: Any, draw: bool = True) -> None:
    """Materialize what is on the meta device in `module`, on the CPU.

    Weights are drawn, and buffers that no file holds (rotary frequencies) computed again, by the rules with which
    `transformers` does so for what a checkpoint lacks. Weights without a rule start as usual: matrices normal with the
    configuration's `initializer_range`, biases 0, other vectors 1. Buffers without one are those of a newly constructed model.

    Args:
        prefix: what the names in `module` begin with in `model`: empty, or ending in a dot.
        model: the whole model, whose classes have the rules.
        draw: the parameters too; False: their values are undefined, since they will be read from a file.
    """
    init: Any = importlib.import_module("transformers.initialization")
    parameters, buffers = _materialize(module, draw)
    with init.guard_torch_init_functions():
        for rule, part in _rules(module, prefix, model):
            rule(part)
    for name, parameter in parameters.items():
        if draw and bool(parameter.isnan().any()):
            _draw_as_usual(name, parameter, model.config.get_text_config())
        elif not draw:
            vars(parameter).pop("_is_hf_initialized", None)  # one with two names is seen twice
    missing = [name for name, buffer in buffers.items() if bool(_is_unset(buffer).any())]
    if missing:
        constructed = _constructed_buffers(model)
        for name in missing:
            value = constructed.get(f"{prefix}{name}")
            if value is None or value.is_meta:
                raise ConfigError(
                    f"nothing computes its buffer {prefix}{name} again after it was built on the meta device"
                )
            buffers[name].copy_(value)


def _materialize(module: nn.Module, draw: bool) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Memory for all on the meta device: names and tensors, full of values that say that nothing has been computed."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    copies: dict[int, nn.Parameter] = {}  # one that stands in several places stays one
    for path, part in module.named_modules():
        dot = f"{path}." if path else ""
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                if id(parameter) not in copies:
                    value = torch.empty_like(parameter, device="cpu")
                    copied = nn.Parameter(_unset(value) if draw else value, requires_grad=parameter.requires_grad)
                    if not draw:
                        copied._is_hf_initialized = True  # type: ignore[attr-defined]  # `transformers` draws nothing into it
                    copies[id(parameter)] = copied
                parameters[f"{dot}{name}"] = copies[id(parameter)]
                setattr(part, name, copies[id(parameter)])
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                buffers[f"{dot}{name}"] = _unset(torch.empty_like(buffer, device="cpu"))
                setattr(part, name, buffers[f"{dot}{name}"])
    return parameters, buffers


def _rules(module: nn.Module, prefix: str, model: Any) -> Iterator[tuple[Callable[[nn.Module], None], nn.Module]]:
    """For each part of `module`, inner ones first: what initializes it, a method of the innermost model that it is in."""
    package: Any = importlib.import_module("transformers")
    owners = {name: part for name, part in model.named_modules() if isinstance(part, package.PreTrainedModel)}
    for path, part in _inner_first(module):
        full = f"{prefix}{path}".rstrip(".")
        owner = max((name for name in owners if not name or full == name or full.startswith(f"{name}.")), key=len)
        yield owners[owner]._init_weights, part  # by which `transformers` itself initializes; it has no public name


def _inner_first(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _inner_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _draw_as_usual(name: str, parameter: Tensor, config: Any) -> None:
    if parameter.ndim > 1:
        parameter.normal_(0.0, getattr(config, "initializer_range", None) or 0.02)
    else:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _unset(value: Tensor) -> Tensor:
    """`value`, full of what no model computes: NaN, or the smallest integer."""
    if value.is_floating_point() or value.is_complex():
        return value.fill_(torch.nan)
    return value.zero_() if value.dtype == torch.bool else value.fill_(torch.iinfo(value.dtype).min)


def _is_unset(value: Tensor) -> Tensor:
    if value.is_floating_point() or value.is_complex():
        return value.isnan()
    if value.dtype == torch.bool:  # has no value to spare, so that it is always that of a newly constructed model
        return torch.ones(1, dtype=torch.bool)
    return value == torch.iinfo(value.dtype).min


def _constructed_buffers(model: Any) -> Mapping[str, Tensor]:
    """The buffers of a model constructed anew, whose weights stay on the meta device."""
    config = copy.deepcopy(model.config)
    with _WeightsOnMeta():
        # The model's own class in the configuration's dtype; the public `from_config` belongs to the Auto classes alone.
        whole = type(model)._from_config(config, dtype=config.dtype)
    return dict(whole.named_buffers())


class _WeightsOnMeta(TorchFunctionMode):
    """Put what layers create with `torch.empty`, as they create weights, on the meta device."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is torch.empty:
            keywords["device"] = "meta"
        return func(*args, **keywords)


SINGLE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_INDEX_BYTES = 2**26  # twice what an index of the largest published models takes


def stored_tensors(path: Path) -> StoredTensors:
    """Return the tensors of a directory by their names there. Raises ConfigError if it has none in safetensors."""
    return StoredTensors(_files(path))


@dataclass(frozen=True)
class _Group:
    """Tensors of a directory that make one weight together, or several.

    Attributes:
        conversion: how, without tensors.
        sources: (name in the directory, the pattern of the conversion that it matches).
    """

    conversion: Any
    sources: list[tuple[str, str]]

    def tiles(self, files: StoredTensors, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]] | None:
        """Return the tensors that a weight of `shape` is put together from, where the conversion does nothing else.

        Each with its place: zeros for a whole weight, and (expert, first row) for a matrix of experts in three dimensions.
        """
        kinds = [type(each).__name__ for each in self.conversion.operations] if self._converts else []
        patterns = list(self.conversion.source_patterns)
        if not self._converts and len(self.sources) == 1:
            key = self.sources[0][0]
            if type(self.conversion).__name__ == "WeightRenaming" and files.entries[key].shape == shape:
                return [(key, (0,) * len(shape))]
            return None
        if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            return None
        dims = [each.dim for each in self.conversion.operations]
        if dims not in ([0], [0, 1]) or (len(dims) == 1 and len(patterns) > 1):
            return None
        keys = [[key for key, pattern in self.sources if pattern == each] for each in patterns]
        shapes = [{files.entries[key].shape for key in group} for group in keys]
        if any(len(each) != 1 for each in shapes) or len({len(group) for group in keys}) != 1:
            return None
        heights = [next(iter(each))[0] for each in shapes]
        rest = next(iter(shapes[0]))[1:]
        if (len(keys[0]), sum(heights), *rest) != shape:
            return None
        rows = [sum(heights[:at]) for at in range(len(heights))]
        return [(key, (expert, row)) for group, row in zip(keys, rows, strict=True) for expert, key in enumerate(group)]

    @property
    def _converts(self) -> bool:
        return type(self.conversion).__name__ == "WeightConverter"

    def convert(self, name: str, files: StoredTensors, model: Any) -> Mapping[str, Any]:
        """Name in the model -> tensor, read now; `name` is the one under which the conversion is known."""
        conversion = deepcopy(self.conversion)
        for key, pattern in self.sources:
            conversion.add_tensor(name, key, pattern, partial(files.read, key))
        converted: Mapping[str, Any] = conversion.convert(name, model=model, config=model.config)
        return converted


class PretrainedWeights:
    """The weights of a directory as the parameters of a model, converted where its files have other names or cuts.

    `transformers` keeps experts, for one, as one tensor and writes them one by one; its own conversions are applied.
    """

    def __init__(self, path: Path, model: Any) -> None:
        self.path, self.files = path, stored_tensors(path)
        self._model = model
        self._groups = _groups(self.files, model)
        self._twins = {name: group for group in shared_names(model) for name in group}  # a directory may hold one only

    def _stored_name(self, name: str) -> str | None:
        """Return the name under which the directory has the weight `name`, which may be that of a twin; None: it has none."""
        return next((each for each in [name, *self._twins.get(name, ())] if each in self._groups), None)

    def require(self, module: nn.Module, prefix: str) -> None:
        """Raise ConfigError for a parameter that the directory lacks, or has fewer elements of; call it before it has memory.

        Args: as of `load`.
        """
        for name, parameter in module.named_parameters():
            stored = self._stored_name(prefix + name)
            if stored is None:
                raise ConfigError(f"{self.path} has no weights for {prefix}{name}")
            shapes = [self.files.entries[key].shape for key, _ in self._groups[stored][1].sources]
            if sum(map(prod, shapes)) < parameter.numel():
                words = " and ".join(str(list(shape)) for shape in shapes[:3])
                raise ConfigError(
                    f"{self.path}: {prefix}{name} is {words}, and the configuration says {list(parameter.shape)}"
                )

    def load(self, module: nn.Module, prefix: str) -> None:
        """Fill the parameters of `module`, whose names begin with `prefix` in the model, and the buffers that the directory has.

        Raises ConfigError for a weight that the directory lacks, or that has another shape.
        """
        buffers = {name: value for name, value in module.named_buffers() if self._stored_name(prefix + name)}
        for name, target in {**dict(module.named_parameters()), **buffers}.items():
            self.load_part(prefix + name, target, [0] * target.ndim, target.shape)

    @torch.no_grad()
    def load_part(self, name: str, target: Tensor, offset: Sequence[int], shape: Sequence[int]) -> None:
        """Fill `target` with the part, beginning at `offset`, of the model's weight `name` of `shape`.

        Nothing else is read, and nothing is in memory twice, where the directory's tensors are only put together, as those of
        experts; else the weight is made whole. Raises ConfigError for a weight that the directory lacks, that has another
        shape, or whose twins have other values there.
        """
        stored = self._stored_name(name)
        if stored is None:
            raise ConfigError(f"{self.path} has no weights for {name}")
        self._fill(stored, target, offset, shape)
        for twin in self._groups.keys() & {*self._twins.get(name, ())} - {stored}:
            self._fill(twin, other := torch.empty_like(target), offset, shape)
            if not torch.equal(other, target):
                raise ConfigError(
                    f"{self.path}: its config.json ties {stored} and {twin}, which have other values in its files; if "
                    "they are weights of their own, set tie_word_embeddings = false there"
                )

    def _fill(self, stored: str, target: Tensor, offset: Sequence[int], shape: Sequence[int]) -> None:
        known, group = self._groups[stored]
        tiles = group.tiles(self.files, tuple(shape))
        if tiles is None:
            value = group.convert(known, self.files, self._model)[stored]
            value = value[0] if isinstance(value, list) else value
            if tuple(value.shape) != tuple(shape):
                raise ConfigError(
                    f"{self.path}: {stored} is {list(value.shape)}, and the configuration says {list(shape)}"
                )
            target.copy_(value[tuple(slice(a, a + n) for a, n in zip(offset, target.shape, strict=True))])
            return
        for key, place in tiles:
            if len(place) == target.ndim:
                self.files.read_into(key, target, offset)
                continue
            (expert, row), height = place, self.files.entries[key].shape[0]
            first, stop = max(row, offset[1]), min(row + height, offset[1] + target.shape[1])
            if offset[0] <= expert < offset[0] + target.shape[0] and first < stop:
                part = target[expert - offset[0], first - offset[1] : stop - offset[1]]
                self.files.read_into(key, part, (first - row, *offset[2:]))


def _groups(files: StoredTensors, model: Any) -> dict[str, tuple[str, _Group]]:
    """Name in the model -> what makes it of tensors of the directory, and the name under which that is known."""
    loading: Any = importlib.import_module("transformers.core_model_loading")
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    conversions = mapping.get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = model.state_dict()
    groups: dict[str, _Group] = {}
    for key in sorted(files.entries, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        if name not in known:
            continue  # what the model has no place for, such as buffers of older versions
        if name not in groups:
            conversion = loading.WeightRenaming(key, name) if pattern is None else by_pattern[pattern]
            groups[name] = _Group(conversion, [])
        groups[name].sources.append((key, pattern or key))
    targets = {name: (name, group) for name, group in groups.items()}
    for name, group in groups.items():  # a conversion may make several weights; it is found under the name of each
        for other in _made_with(name, group.conversion, known):
            targets.setdefault(other, (name, group))
    return targets


def _made_with(name: str, conversion: Any, known: Mapping[str, Any]) -> list[str]:
    """The names of the other weights that a conversion makes together with `name`."""
    patterns = list(conversion.target_patterns)
    first = next((pattern for pattern in patterns if pattern in name), None)
    if len(patterns) < 2 or first is None:
        return []
    return [
        other for other in (name.replace(first, pattern) for pattern in patterns) if other in known and other != name
    ]


def _files(path: Path) -> list[Path]:
    if (path / WEIGHTS_INDEX).is_file():
        try:
            index = read_json(path / WEIGHTS_INDEX, _INDEX_BYTES, "a safetensors index")
            names = set(index["weight_map"].values())
        except (KeyError, TypeError, AttributeError, OSError, UsageError) as error:
            raise ConfigError(f"{path / WEIGHTS_INDEX} is not a safetensors index: {error}") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise ConfigError(f"{path / WEIGHTS_INDEX} names a file outside of the directory: {echo(name)}")
        return [path / name for name in sorted(names)]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    raise ConfigError(f"{path} has no weights in safetensors: neither {SINGLE} nor {WEIGHTS_INDEX}")
