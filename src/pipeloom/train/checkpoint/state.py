"""One process's part of a run's state, as boxes of whole tensors, and the same state put back from any checkpoint.

Keys: `model.NAME` for parameters and persistent buffers, `optimizer.NAME.STATE` for an optimizer's state of a parameter (`step`,
`exp_avg`, …, and `master` where an fp32 copy is stepped). NAME is the global name; a tied weight has its first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeloom.errors import CheckpointError, UsageError
from pipeloom.parallel.sharding import ParameterSharding
from pipeloom.runtime import Pipeline
from pipeloom.train.checkpoint.boxes import Box, boxes_of_run
from pipeloom.train.checkpoint.files import DTYPE_NAMES

Number = float | int | bool


@runtime_checkable
class SlicedOptimizer(Protocol):
    """An optimizer whose state is that of runs of each parameter's elements, as the trainer's is.

    `state_dict`: name -> `start`, `stop` (elements of what this process holds of the parameter, counted row by row), `step`
    (0.0: no state yet), `master` and the `moments` of that parameter: flat tensors of those elements.
    """

    def moments(self, name: str) -> tuple[str, ...]: ...

    def state_dict(self) -> dict[str, dict[str, Any]]: ...

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None: ...

    def read_parameters(self) -> None: ...


AnyOptimizer = SlicedOptimizer | torch.optim.Optimizer


@dataclass(frozen=True)
class Part:
    """One box that this process holds.

    Attributes:
        key: of the tensor.
        shape: of the whole tensor.
        box: which part of it.
        tensor: its values, of the box's shape; a view, not a copy.
        first: whether the first process that holds this box must write it: copies may differ (running statistics).
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    first: bool = False

    def __post_init__(self) -> None:
        if self.tensor.dtype not in DTYPE_NAMES:
            raise UsageError(f"{self.key}: a checkpoint cannot hold dtype {self.tensor.dtype}")


@dataclass(frozen=True)
class Holder:
    """A parameter or buffer here: its tensor, and where that is in the whole one.

    `frozen`: it is a parameter that does not train.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    parameter: bool
    frozen: bool = False

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.tensor.shape))


def holders(pipeline: Pipeline) -> list[Holder]:
    """The parameters of this process's stages, each once, and the buffers that a state dict has."""
    found = []
    place = pipeline.mesh.place
    parameters = dict(pipeline.named_parameters())
    for name, parameter in parameters.items():
        sharding = pipeline.layouts[name]
        offset = _offset(
            sharding, {shard.axis: getattr(place, shard.axis) for shard in sharding.shards}, parameter.ndim
        )
        shape = tuple(sharding.full_shape(parameter.shape))
        frozen = not parameter.requires_grad
        found.append(Holder(pipeline.stored_name(name), parameter.detach(), shape, offset, True, frozen))
    for layer, module in pipeline.modules.items():
        persistent = module.state_dict()
        for inner, buffer in module.named_buffers():
            if inner in persistent:
                shape = tuple(buffer.shape)
                found.append(Holder(f"{layer}.{inner}", buffer.detach(), shape, (0,) * buffer.ndim, False))
    return found


def _offset(sharding: ParameterSharding, index: Mapping[str, int], ndim: int) -> tuple[int, ...]:
    offset = [0] * ndim
    for shard in sharding.shards:
        offset[shard.dim] = sum(shard.sizes[: index[shard.axis]])
    return tuple(offset)


def model_parts(pipeline: Pipeline, trained_only: bool = False) -> list[Part]:
    """Weights and buffers here; `trained_only`: no frozen weights."""
    return [
        Part(f"model.{held.name}", held.shape, held.box, held.tensor, first=not held.parameter)
        for held in holders(pipeline)
        if not (trained_only and held.frozen)
    ]


def optimizer_parts(pipeline: Pipeline, optimizer: AnyOptimizer) -> tuple[list[Part], dict[str, Number]]:
    """(boxes of the optimizer's state here, key -> state that is a number and no tensor)."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return _torch_parts(pipeline, optimizer)
    parts: list[Part] = []
    by_name = {pipeline.stored_name(name): name for name, _ in pipeline.named_parameters()}
    states = optimizer.state_dict()
    for held in holders(pipeline):
        state = states.get(by_name.get(held.name, ""))
        if not held.parameter or state is None:
            continue
        boxes = [
            (b.moved(held.offset), b.elements) for b in boxes_of_run(held.tensor.shape, state["start"], state["stop"])
        ]
        if state["step"]:
            step = torch.tensor(float(state["step"]), dtype=torch.float64)
            parts.append(Part(f"optimizer.{held.name}.step", (), Box((), ()), step))
        for kind, values in state.items():
            if not isinstance(values, Tensor) or (kind == "master" and _same_memory(values, held.tensor)):
                continue
            position = 0
            for box, count in boxes:
                view = values[position : position + count].view(box.shape)
                parts.append(Part(f"optimizer.{held.name}.{kind}", held.shape, box, view))
                position += count
    return parts, {}


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _torch_parts(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> tuple[list[Part], dict[str, Number]]:
    parts: list[Part] = []
    numbers: dict[str, Number] = {}
    for name, held, parameter in _optimized(pipeline, optimizer):
        for kind, value in optimizer.state.get(parameter, {}).items():
            key = f"optimizer.{name}.{kind}"
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                parts.append(Part(key, held.shape, held.box, value.detach()))
            elif isinstance(value, Tensor) and (value.ndim == 0 or held.shape == tuple(parameter.shape)):
                parts.append(Part(key, tuple(value.shape), Box((0,) * value.ndim, tuple(value.shape)), value.detach()))
            elif isinstance(value, bool | int | float):
                numbers[key] = value
            elif value is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} keeps a {_words(value)} as {kind!r} of {name!r}, which is {list(held.shape)} "
                    f"and spread over ranks: a checkpoint holds numbers, and tensors of the parameter's shape"
                )
    return parts, numbers


def _optimized(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Holder, nn.Parameter]]:
    """The parameters that a torch optimizer steps: (stored name, where it is in the whole, itself)."""
    by_name = {held.name: held for held in holders(pipeline) if held.parameter}
    names = {parameter: pipeline.stored_name(name) for name, parameter in pipeline.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError(
                    f"the optimizer steps a parameter of {list(parameter.shape)} that is not among pipeline.parameters()"
                )
            yield names[parameter], by_name[names[parameter]], parameter


def _words(value: object) -> str:
    return f"tensor of {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


Region = Callable[[str, Box], Tensor]  # key, box -> the values, in the stored dtype


class Stored(Protocol):
    """Content of a checkpoint: the keys of tensors, numbers, and any region of a tensor."""

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Key -> whole shape."""

    @property
    def numbers(self) -> Mapping[str, Number]: ...

    def region(self, key: str, box: Box) -> Tensor: ...


def required_names(pipeline: Pipeline, trained_only: bool = False) -> dict[str, tuple[int, ...]]:
    """Stored name -> whole shape, of everything here that a checkpoint's model must have."""
    return {held.name: held.shape for held in holders(pipeline) if not (trained_only and held.frozen)}


def require_shapes(stored: Stored, needed: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for a weight that is absent or of another shape."""
    for name, shape in needed.items():
        found = stored.tensors.get(f"model.{name}")
        if found is None:
            raise CheckpointError(
                f"the checkpoint holds no {name!r}, which the model has {_near(name, stored.tensors)}"
            )
        if found != tuple(shape):
            raise CheckpointError(f"{name!r}: expected shape {list(shape)}, found {list(found)} in the checkpoint")


def _near(name: str, tensors: Iterable[str]) -> str:
    weights = sorted(key.removeprefix("model.") for key in tensors if key.startswith("model."))
    return f"(it holds {len(weights)} weights, such as {weights[0]!r})" if weights else "(it holds no weights)"


@torch.no_grad()
def load_model(stored: Stored, pipeline: Pipeline, trained_only: bool = False) -> None:
    """Puts weights and buffers back. Where the checkpoint has an fp32 master of a weight, that is the weight's value."""
    for held in holders(pipeline):
        if trained_only and held.frozen:
            continue
        key = f"optimizer.{held.name}.master"
        if not held.parameter or key not in stored.tensors:
            key = f"model.{held.name}"
        values = stored.region(key, held.box)
        if _kind(values) != _kind(held.tensor):
            raise CheckpointError(
                f"{held.name!r}: expected {held.tensor.dtype}, found {values.dtype} in the checkpoint"
            )
        held.tensor.copy_(values)


def _kind(tensor: Tensor) -> str:
    """Return between which dtypes values may be converted: real numbers of any precision, and no others."""
    return "real" if tensor.is_floating_point() else str(tensor.dtype)


def load_optimizer(stored: Stored, pipeline: Pipeline, optimizer: AnyOptimizer) -> None:
    """Puts the optimizer's state back, after `load_model`.

    A parameter without any state in the checkpoint gets none: it had no gradient yet. Raises CheckpointError where a part of a
    parameter's state is absent.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        _load_torch(stored, pipeline, optimizer)
        return
    kinds = _kinds(stored)
    by_name = {pipeline.stored_name(name): name for name, _ in pipeline.named_parameters()}
    current = optimizer.state_dict()
    states: dict[str, dict[str, Any]] = {}
    for held in holders(pipeline):
        own = current.get(by_name.get(held.name, ""))
        if not held.parameter or own is None:
            continue
        present = kinds.get(held.name, set())
        moments = optimizer.moments(by_name[held.name])
        if present - {"master"} and present - {"master"} != {"step", *moments}:
            expected = " and ".join([", ".join(("step", *moments[:-1])), *moments[-1:]])
            found = ", ".join(sorted(present - {"master"}))
            raise CheckpointError(
                f"the optimizer's state of {held.name!r}: expected {expected}, or none of them; found {found}"
            )
        boxes = [b.moved(held.offset) for b in boxes_of_run(held.tensor.shape, own["start"], own["stop"])]
        state: dict[str, Any] = {"start": own["start"], "stop": own["stop"], "step": 0.0}
        if "step" in present:
            state["step"] = float(stored.region(f"optimizer.{held.name}.step", Box((), ())))
        for kind in ("master", *(moments if state["step"] else ())):
            key = f"optimizer.{held.name}.{kind}"
            key = key if key in stored.tensors else f"model.{held.name}"
            state[kind] = torch.cat([stored.region(key, box).reshape(-1) for box in boxes])
        states[by_name[held.name]] = state
    optimizer.load_state_dict(states)


def _kinds(stored: Stored) -> dict[str, set[str]]:
    """Stored name -> the states that a checkpoint has of it."""
    kinds: dict[str, set[str]] = {}
    for key in (*stored.tensors, *stored.numbers):
        first, _, rest = key.partition(".")
        if first == "optimizer":
            name, _, kind = rest.rpartition(".")
            kinds.setdefault(name, set()).add(kind)
    return kinds


@torch.no_grad()
def _load_torch(stored: Stored, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    kinds = _kinds(stored)
    optimizer.state.clear()
    for name, held, parameter in _optimized(pipeline, optimizer):
        for kind in sorted(kinds.get(name, ())):
            key = f"optimizer.{name}.{kind}"
            if key in stored.numbers:
                optimizer.state[parameter][kind] = stored.numbers[key]
                continue
            shape = stored.tensors[key]
            if shape == held.shape and shape:
                value = stored.region(key, held.box).to(parameter.device)
            else:
                value = stored.region(key, Box((0,) * len(shape), shape))
                value = value if value.ndim == 0 else value.to(parameter.device)
            optimizer.state[parameter][kind] = value
