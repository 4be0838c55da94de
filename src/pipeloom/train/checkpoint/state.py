"""One process's part of a run's state as boxes of whole tensors, and the loading of that state from a checkpoint of any layout.

Keys: `model.NAME` for parameters and persistent buffers, `optimizer.NAME.STATE` for an optimizer's state of a parameter (`step`,
`exp_avg`, …, and `master` where an fp32 copy is stepped). NAME is the global name; of a tied weight's names, the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeloom.errors import CheckpointError, UsageError
from pipeloom.limits import MOST_STEPS
from pipeloom.mesh_shape import Place
from pipeloom.parallel.sharding import ParameterSharding
from pipeloom.runtime import Pipeline
from pipeloom.runtime.tensor_spec import layout_name, memory_of
from pipeloom.train.checkpoint.boxes import Box, boxes_of_run
from pipeloom.train.checkpoint.folder import DTYPE_NAMES

Number = float | int | bool


@runtime_checkable
class SlicedOptimizer(Protocol):
    """An optimizer that steps one run of consecutive elements of each parameter, like the trainer's optimizer.

    `state_dict`: name -> `start`, `stop` (row-major positions in this process's part of the parameter), `step` (0.0: no state
    yet), `master` and the `moments` of that parameter: flat tensors of those elements.
    """

    def moments(self, name: str) -> tuple[str, ...]:
        """Return the names of the state tensors of a parameter besides `master`."""

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of each parameter of this process, as above."""

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the state of each parameter; `states` as from `state_dict`."""

    def read_parameters(self) -> None:
        """Set the masters from the parameters, after weights were loaded without the optimizer's state."""


AnyOptimizer = SlicedOptimizer | torch.optim.Optimizer


@dataclass(frozen=True)
class Part:
    """One box that this process holds.

    Attributes:
        key: key of the tensor.
        shape: shape of the whole tensor.
        box: the part of the whole tensor.
        tensor: the box's values, in its shape; a view, not a copy.
        first: the first process that holds this box must write it, because copies may differ (running statistics).
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    first: bool = False

    def __post_init__(self) -> None:
        if self.tensor.dtype not in DTYPE_NAMES:
            raise UsageError(f"{self.key}: a checkpoint cannot hold dtype {self.tensor.dtype}")


class HeldBox(NamedTuple):
    """A box that this process holds: `local` in its own tensor, `box` in the whole one."""

    local: Box
    box: Box


@dataclass(frozen=True)
class Holder:
    """A parameter or buffer of this process.

    Attributes:
        name: its name in checkpoints.
        tensor: this process's part.
        shape: shape of the whole tensor.
        pieces: the boxes that make up `tensor`: one, or one per projection where projections share a weight.
        parameter: True for a parameter, False for a buffer.
        frozen: True for a parameter that is not trained.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    pieces: tuple[HeldBox, ...]
    parameter: bool
    frozen: bool = False

    def parts(self, values: Tensor) -> list[tuple[Box, Tensor]]:
        """Split `values`, of this tensor's shape, into (box in the whole tensor, view of its values).

        Raises UsageError for a sparse or nested tensor, and for a subclass that wraps other tensors.
        """
        if not self.tensor.is_meta and memory_of(self.tensor) is None:
            raise UsageError(
                f"{self.name}: a checkpoint cannot hold a {layout_name(self.tensor)} tensor; register it as a buffer with "
                "persistent=False, or keep its parts in buffers"
            )
        return [(piece.box, values[piece.local.slices_in(_all_of(values))]) for piece in self.pieces]

    def read(self, region: Callable[[Box], Tensor]) -> Tensor:
        """Assemble the values of this process's tensor from boxes of the whole one."""
        regions = [region(piece.box) for piece in self.pieces]
        if len(regions) == 1:
            return regions[0]
        values = torch.empty(self.tensor.shape, dtype=regions[0].dtype)
        for (_, part), values_of_part in zip(self.parts(values), regions, strict=True):
            part.copy_(values_of_part)
        return values

    def parts_of_run(self, start: int, stop: int) -> list[tuple[Box, tuple[int, int], HeldBox]]:
        """Split the run of elements `start` to `stop` (exclusive) of the tensor, in row-major order, into boxes.

        Returns (box in the tensor, first and last position of its elements in the run, common part) for each piece that a box
        intersects. `local` of the common part is relative to the box.
        """
        parts, position = [], 0
        for run in boxes_of_run(self.tensor.shape, start, stop):
            for piece in self.pieces:
                common = run.intersection(piece.local)
                if common is not None:
                    inside = common.moved([-n for n in run.offset])
                    shift = [b - a for a, b in zip(piece.local.offset, piece.box.offset, strict=True)]
                    parts.append((run, (position, position + run.elements), HeldBox(inside, common.moved(shift))))
            position += run.elements
        return parts


def holders(pipeline: Pipeline) -> list[Holder]:
    """Return the parameters of this process's stages, each once, and their persistent buffers."""
    held_tensors = []
    place = pipeline.mesh.place
    parameters = dict(pipeline.named_parameters())
    for name, parameter in parameters.items():
        sharding = pipeline.layouts[name]
        pieces = pieces_of(sharding, place, tuple(parameter.shape))
        shape = tuple(sharding.full_shape(parameter.shape))
        frozen = not parameter.requires_grad
        held_tensors.append(Holder(pipeline.stored_name(name), parameter.detach(), shape, pieces, True, frozen))
    for layer, module in pipeline.modules.items():
        persistent = module.state_dict()
        for inner, buffer in module.named_buffers():
            if inner in persistent:
                shape, box = tuple(buffer.shape), _all_of(buffer)
                held_tensors.append(Holder(f"{layer}.{inner}", buffer.detach(), shape, (HeldBox(box, box),), False))
    return held_tensors


def _all_of(tensor: Tensor) -> Box:
    return Box((0,) * tensor.ndim, tuple(tensor.shape))


def pieces_of(sharding: ParameterSharding, place: Place, shape: tuple[int, ...]) -> tuple[HeldBox, ...]:
    """Return the boxes of this process's part of a parameter, which has `shape`.

    Each dimension is divided into stretches; the boxes are all combinations of one stretch per dimension.
    """
    stretches: list[tuple[tuple[int, int], ...]] = [((0, size),) for size in shape]
    for shard in sharding.shards:
        stretches[shard.dim] = shard.stretches(getattr(place, shard.axis))
    starts = [list(accumulate((length for _, length in each), initial=0)) for each in stretches]
    pieces = []
    for indices in product(*(range(len(each)) for each in stretches)):
        spans = [each[at] for each, at in zip(stretches, indices, strict=True)]
        size = tuple(length for _, length in spans)
        local = tuple(start[at] for start, at in zip(starts, indices, strict=True))
        pieces.append(HeldBox(Box(local, size), Box(tuple(first for first, _ in spans), size)))
    return tuple(pieces)


def model_parts(pipeline: Pipeline, trained_only: bool = False) -> list[Part]:
    """Return the boxes of this process's weights and buffers; with `trained_only`, without frozen weights."""
    return [
        Part(f"model.{held.name}", held.shape, box, values, first=not held.parameter)
        for held in holders(pipeline)
        if not (trained_only and held.frozen)
        for box, values in held.parts(held.tensor)
    ]


def optimizer_parts(pipeline: Pipeline, optimizer: AnyOptimizer) -> tuple[list[Part], dict[str, Number]]:
    """Return (boxes of this process's optimizer state, key -> state that is a number and not a tensor)."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return _torch_parts(pipeline, optimizer)
    parts: list[Part] = []
    by_name = {pipeline.stored_name(name): name for name, _ in pipeline.named_parameters()}
    states = optimizer.state_dict()
    for held in holders(pipeline):
        state = states.get(by_name.get(held.name, ""))
        if not held.parameter or state is None:
            continue
        runs = held.parts_of_run(state["start"], state["stop"])
        if state["step"]:
            step = torch.tensor(float(state["step"]), dtype=torch.float64)
            parts.append(Part(f"optimizer.{held.name}.step", (), Box((), ()), step))
        for kind, values in state.items():
            if not isinstance(values, Tensor) or (kind == "master" and _same_memory(values, held.tensor)):
                continue
            for run, (first, last), piece in runs:
                view = values[first:last].view(run.shape)
                view = view[piece.local.slices_in(_all_of(view))]
                parts.append(Part(f"optimizer.{held.name}.{kind}", held.shape, piece.box, view))
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
                parts += [Part(key, held.shape, box, values) for box, values in held.parts(value.detach())]
            elif isinstance(value, Tensor) and (value.ndim == 0 or held.shape == tuple(parameter.shape)):
                parts.append(Part(key, tuple(value.shape), _all_of(value), value.detach()))
            elif isinstance(value, bool | int | float):
                numbers[key] = value
            elif value is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} keeps a {_words(value)} as {kind!r} of {name!r}, which is {list(held.shape)} "
                    f"and spread over ranks: a checkpoint holds numbers, and tensors of the parameter's shape"
                )
    return parts, numbers


def _optimized(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Holder, nn.Parameter]]:
    """Yield (stored name, holder, parameter) for each parameter that a torch optimizer steps."""
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
        """Return key -> whole shape."""

    @property
    def numbers(self) -> Mapping[str, Number]: ...

    def region(self, key: str, box: Box) -> Tensor:
        """Return the values of `box` of a tensor, on the CPU in the stored dtype."""


def required_names(pipeline: Pipeline, trained_only: bool = False) -> dict[str, tuple[int, ...]]:
    """Return stored name -> whole shape of each parameter and buffer here that a checkpoint must have."""
    return {held.name: held.shape for held in holders(pipeline) if not (trained_only and held.frozen)}


def require_shapes(stored: Stored, needed: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for a weight that is absent or has another shape."""
    for name, shape in needed.items():
        if f"model.{name}" not in stored.tensors:
            raise CheckpointError(
                f"the checkpoint holds no {name!r}, which the model has {_near(name, stored.tensors)}"
            )
        _require_shape(stored, f"model.{name}", shape)


def _require_shape(stored: Stored, key: str, shape: tuple[int, ...]) -> None:
    present = stored.tensors.get(key)
    if present != tuple(shape):
        name, words = key.partition(".")[2], "a number" if present is None else list(present)
        raise CheckpointError(f"{name!r}: expected shape {list(shape)}, found {words} in the checkpoint")


def _near(name: str, tensors: Iterable[str]) -> str:
    weights = sorted(key.removeprefix("model.") for key in tensors if key.startswith("model."))
    return f"(it holds {len(weights)} weights, such as {weights[0]!r})" if weights else "(it holds no weights)"


@torch.no_grad()
def load_model(stored: Stored, pipeline: Pipeline, trained_only: bool = False) -> None:
    """Load weights and buffers. Where the checkpoint has an fp32 master of a weight, the weight is loaded from it."""
    for held in holders(pipeline):
        if trained_only and held.frozen:
            continue
        key = f"optimizer.{held.name}.master"
        if not held.parameter or key not in stored.tensors:
            key = f"model.{held.name}"
        _require_shape(stored, key, held.shape)
        values = held.read(partial(stored.region, key))
        if _kind(values) != _kind(held.tensor):
            raise CheckpointError(
                f"{held.name!r}: expected {held.tensor.dtype}, found {values.dtype} in the checkpoint"
            )
        held.tensor.copy_(values)


def _kind(tensor: Tensor) -> str:
    """Return the class of dtypes between which values may be converted: floating point of any precision, or a single dtype."""
    return "real" if tensor.is_floating_point() else str(tensor.dtype)


def load_optimizer(stored: Stored, pipeline: Pipeline, optimizer: AnyOptimizer) -> None:
    """Load the optimizer's state; to be called after `load_model`.

    A parameter without any state in the checkpoint gets none: it had no gradient yet. Raises CheckpointError if part of a
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
        moments_here = current.get(by_name.get(held.name, ""))
        if not held.parameter or moments_here is None:
            continue
        present = kinds.get(held.name, set())
        moments = optimizer.moments(by_name[held.name])
        if present - {"master"} and present - {"master"} != {"step", *moments}:
            expected = " and ".join([", ".join(("step", *moments[:-1])), *moments[-1:]])
            kinds_there = ", ".join(sorted(present - {"master"}))
            raise CheckpointError(
                f"the optimizer's state of {held.name!r}: expected {expected}, or none of them; found {kinds_there}"
            )
        runs = held.parts_of_run(moments_here["start"], moments_here["stop"])
        state: dict[str, Any] = {"start": moments_here["start"], "stop": moments_here["stop"], "step": 0.0}
        if "step" in present:
            key = f"optimizer.{held.name}.step"
            _require_shape(stored, key, ())
            state["step"] = stored.region(key, Box((), ())).double().item()
            if not 0 <= state["step"] <= MOST_STEPS:
                raise CheckpointError(
                    f"{held.name!r}: expected a number of steps, found {state['step']} in the checkpoint"
                )
        for kind in ("master", *(moments if state["step"] else ())):
            key = f"optimizer.{held.name}.{kind}"
            key = key if key in stored.tensors else f"model.{held.name}"
            _require_shape(stored, key, held.shape)
            state[kind] = _read_run(stored, key, runs, moments_here["stop"] - moments_here["start"])
        states[by_name[held.name]] = state
    optimizer.load_state_dict(states)


def _read_run(stored: Stored, key: str, runs: Sequence[tuple[Box, tuple[int, int], HeldBox]], elements: int) -> Tensor:
    """Read the elements of a run, as a flat tensor, from the boxes of a stored tensor that it consists of."""
    values: Tensor | None = None
    for run, (first, last), piece in runs:
        region = stored.region(key, piece.box)
        values = torch.empty(elements, dtype=region.dtype) if values is None else values
        view = values[first:last].view(run.shape)
        view[piece.local.slices_in(_all_of(view))] = region
    return torch.empty(0) if values is None else values


def _kinds(stored: Stored) -> dict[str, set[str]]:
    """Return stored name -> kinds of optimizer state that a checkpoint has for it."""
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
                value = held.read(partial(stored.region, key)).to(parameter.device)
            else:
                value = stored.region(key, Box((0,) * len(shape), shape))
                value = value if value.ndim == 0 else value.to(parameter.device)
            optimizer.state[parameter][kind] = value
