"""Adapters for a model's linear layers, chosen by name: all other weights are frozen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from pipeloom.errors import ArgumentError
from pipeloom.models import names
from pipeloom.models.hf.conv1d import TransposedLinear, is_conv1d
from pipeloom.ops.layer import Layer
from pipeloom.ops.random_state import stable_seed
from pipeloom.parallel.adapters import AdaptedLinear
from pipeloom.parallel.expert import PartialSumLinear
from pipeloom.parallel.sharding import shardings_of
from pipeloom.parallel.tensor import ColumnLinear, RowLinear

ALL_LINEAR = "all-linear"
_ENDS = ("first.", "last.")  # prefixes here of the names at the ends of a Hugging Face model


@dataclass(frozen=True)
class LoraOptions:
    """The layers that get adapters, and the adapters' size; the names are those of `peft`.

    Attributes:
        r: the adapters' rank.
        lora_alpha: the adapters' output is multiplied by lora_alpha / r.
        lora_dropout: share of their input that training drops.
        target_modules: "all-linear": every linear layer but the output layer; a list: layers whose names are, or end in a dot
            and, one of these; any other text: a regular expression that whole names match. Names are those of
            `transformers`, such as model.layers.0.self_attn.q_proj.

    Raises ArgumentError for an invalid value.
    """

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ALL_LINEAR

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ArgumentError("r", f"={self.r} is below 1; nearest: 1")
        if not 0 <= self.lora_dropout < 1:
            raise ArgumentError("lora_dropout", f"={self.lora_dropout:g} is not at least 0 and below 1")
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise ArgumentError(
                    "target_modules", f"={self.target_modules!r} is not a regular expression: {error}"
                ) from error

    @property
    def scale(self) -> float:
        """Return what the product of the two matrices is multiplied by."""
        return self.lora_alpha / self.r

    def chooses(self, name: str) -> bool:
        """Return whether the linear layer called `name` in `transformers` gets an adapter."""
        if self.target_modules == ALL_LINEAR:
            return name.rpartition(".")[2] not in ("lm_head", "embed_out")
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, name) is not None
        return any(name == target or name.endswith(f".{target}") for target in self.target_modules)


def with_adapters(layers: Sequence[Layer], options: LoraOptions, seed: int) -> list[Layer]:
    """Return the layers with adapters in place of the linear layers selected by `options`, and all other weights frozen.

    B starts at 0, so that the model's outputs are unchanged; the first values of A are uniform within 1 / sqrt(inputs), and
    depend only on `seed` and the layer's name. Parameters keep their names, and those of adapters are LINEAR.lora_A.weight
    and LINEAR.lora_B.weight.
    """
    return [replace(layer, build=partial(_adapted, layer.name, layer.build, options, seed)) for layer in layers]


def adapter_name(name: str) -> str:
    """Return the name in `transformers` of a module or parameter with this name in a pipeline."""
    for end in _ENDS:
        name = name.removeprefix(end)
    for decoder_name, hub in ((f"{names.HEAD}.lm_head", "lm_head"), (f"{names.HEAD}.norm", "model.norm")):
        if name == decoder_name or name.startswith(f"{decoder_name}."):
            return hub + name.removeprefix(decoder_name)
    return name


def is_adapter(name: str) -> bool:
    """Return whether the name is that of an adapter's parameter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def linear_layers(module: nn.Module, layer: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name in `transformers`, module) of the linear layers inside `module`, the layer called `layer`."""
    for path, part in module.named_modules():
        if _is_linear(part):
            yield adapter_name(f"{layer}.{path}" if path else layer), part


def _adapted(layer: str, build: Callable[[], nn.Module], options: LoraOptions, seed: int) -> nn.Module:
    module = build()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    homes = {id(child): (part, name) for part in module.modules() for name, child in part.named_children()}
    for name, linear in list(linear_layers(module, layer)):
        if not options.chooses(name):
            continue
        if linear is module:
            module = _adapt(linear, name, options, seed)
        elif id(linear) in homes:
            home, leaf = homes[id(linear)]
            setattr(home, leaf, _adapt(linear, name, options, seed))
    return module


@torch.no_grad()
def _adapt(base: nn.Module, name: str, options: LoraOptions, seed: int) -> AdaptedLinear:
    weight = base.get_parameter("weight")
    outputs, inputs = shardings_of(base)["weight"].full_shape(weight.shape)
    if is_transposed(base):
        outputs, inputs = inputs, outputs
    generator = torch.Generator().manual_seed(stable_seed("lora", seed, name))
    bound = 1 / math.sqrt(inputs)
    down = torch.empty(options.r, inputs).uniform_(-bound, bound, generator=generator)
    up = torch.zeros(outputs, options.r)
    adapted = AdaptedLinear(base, down, up, options.scale, options.lora_dropout)
    return adapted.to(device=weight.device, dtype=weight.dtype)


def merged(
    weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float, transposed: bool = False
) -> dict[str, Tensor]:
    """Return weights with their adapters' products added, computed in fp32; both by parameters' names in `transformers`.

    Args:
        transposed: names of layers with weights of shape [inputs, outputs].
    """
    result = dict(weights)
    for name, down in adapters.items():
        stem = name.removesuffix(".lora_A.weight")
        if stem == name or f"{stem}.weight" not in weights:
            continue
        weight = weights[f"{stem}.weight"]
        wide = torch.promote_types(weight.dtype, torch.float32)
        added = adapters[f"{stem}.lora_B.weight"].to(wide) @ down.to(wide) * scale
        result[f"{stem}.weight"] = (weight.to(wide) + (added.t() if transposed else added)).to(weight.dtype)
    return result


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer's weight is [inputs, outputs], as of GPT-2's `Conv1D`."""
    return isinstance(module, TransposedLinear) or is_conv1d(module)


def _is_linear(module: nn.Module) -> bool:
    known = isinstance(module, (nn.Linear, ColumnLinear, RowLinear, PartialSumLinear)) or is_transposed(module)
    return known and isinstance(module._parameters.get("weight"), nn.Parameter)
