"""First weights and buffers of a part of a model that was built on the meta device, by the family's own rules."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeloom.errors import ConfigError


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
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in copies:
                    value = torch.empty_like(parameter, device="cpu")
                    copied = nn.Parameter(_unset(value) if draw else value, requires_grad=parameter.requires_grad)
                    if not draw:
                        copied._is_hf_initialized = True  # type: ignore[attr-defined]
                    copies[id(parameter)] = copied
                part._parameters[name] = parameters[f"{dot}{name}"] = copies[id(parameter)]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = buffers[f"{dot}{name}"] = _unset(torch.empty_like(buffer, device="cpu"))
    return parameters, buffers


def _rules(module: nn.Module, prefix: str, model: Any) -> Iterator[tuple[Callable[[nn.Module], None], nn.Module]]:
    """For each part of `module`, inner ones first: what initializes it, a method of the innermost model that it is in."""
    package: Any = importlib.import_module("transformers")
    owners = {name: part for name, part in model.named_modules() if isinstance(part, package.PreTrainedModel)}
    for path, part in _inner_first(module):
        full = f"{prefix}{path}".rstrip(".")
        owner = max((name for name in owners if not name or full == name or full.startswith(f"{name}.")), key=len)
        yield owners[owner]._init_weights, part


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
