"""One process's part of a run's state as boxes of whole tensors, and the loading of that state from a checkpoint of any layout.

Keys: `model.NAME` for parameters and persistent buffers, `optimizer.NAME.STATE` for an optimizer's state of a parameter (`step`,
`exp_avg`, …, and `master` where an fp32 copy is stepped). NAME is the global name; of a tied weight's names, the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import CheckpointError, UsageError
from pipeloom.limits import MOST_STEPS
from pipeloom.parallel.masters import Master
from pipeloom.parallel.sharding import ParameterSharding
from pipeloom.runtime import Pipeline
from pipeloom.runtime.tensor_spec import layout_name, memory_of
from pipeloom.shapes.mesh import Place
from pipeloom.train.checkpoint.boxes import Box, boxes_of_run
from pipeloom.train.checkpoint.folder import DTYPE_NAMES
from pipeloom.train.checkpoint.reader import Reader
from pipeloom.train.optimizer import Optimizer

Number = float | int | bool


AnyOptimizer = Optimizer | torch.optim.Optimizer


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
        saves_state: False where the replicas of another pipeline rank share out the optimizer's state of the same weight, maybe
            otherwise, and save it.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    pieces: tuple[HeldBox, ...]
    parameter: bool
    frozen: bool = False
    saves_state: bool = True

    def parts(self, values: Tensor, start: int = 0) -> list[tuple[Box, Tensor]]:
        """Split `values` into (box in the whole tensor, view of its values).

        Args:
            values: a tensor of this one's shape, or a flat one: of its elements from `start` on, in row-major order.

        Raises:
            UsageError: the tensor is sparse or nested, or of a subclass that wraps other tensors.
        """
        if not self.tensor.is_meta and memory_of(self.tensor) is None:
            raise UsageError(
                f"{self.name}: a checkpoint cannot hold a {layout_name(self.tensor)} tensor; register it as a buffer with "
                "persistent=False, or keep its parts in buffers"
            )
        if values.shape == self.tensor.shape:
            return [(piece.box, values[piece.local.slices_in(Box.whole(values.shape))]) for piece in self.pieces]
        parts, position = [], 0
        for run in boxes_of_run(self.tensor.shape, start, start + values.numel()):
            view = values[position : position + run.elements].view(run.shape)
            position += run.elements
            for piece in self.pieces:
                common = run.intersection(piece.local)
                if common is not None:
                    shift = [b - a for a, b in zip(piece.local.offset, piece.box.offset, strict=True)]
                    parts.append((common.moved(shift), view[common.slices_in(run)]))
        return parts

    def read(self, region: Callable[[Box], Tensor], start: int = 0, stop: int | None = None) -> Tensor:
        """Assemble this process's tensor from boxes of the whole one, or its elements `start` to `stop` as a flat tensor."""
        shape = self.tensor.shape if stop is None else (stop - start,)
        regions = [region(box) for box, _ in self.parts(torch.empty(shape, device="meta"), start)]
        if len(regions) == 1:
            return regions[0].reshape(shape)
        values = torch.empty(shape, dtype=regions[0].dtype if regions else None)
        for (_, part), values_of_part in zip(self.parts(values, start), regions, strict=True):
            part.copy_(values_of_part)
        return values


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
        saves = pipeline.counts_in_norm(name) or not pipeline.options.shard_gradients
        held_tensors.append(Holder(pipeline._stored_name(name), parameter.detach(), shape, pieces, True, frozen, saves))
    for layer, module in pipeline.modules.items():
        persistent = module.state_dict()
        for inner, buffer in module.named_buffers():
            if inner in persistent:
                shape, box = tuple(buffer.shape), Box.whole(buffer.shape)
                held_tensors.append(Holder(f"{layer}.{inner}", buffer.detach(), shape, (HeldBox(box, box),), False))
    return held_tensors


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


class SteppedState(NamedTuple):
    """Elements of a parameter that an optimizer of torch steps here, and what it keeps of them: kind -> value."""

    held: Holder
    stepped: Master
    optimizer: torch.optim.Optimizer

    def values(self) -> dict[str, Any]:
        """Return the state; under "master" the elements themselves where they have another dtype than the parameter."""
        values = dict(self.optimizer.state.get(self.stepped.tensor, {}))
        differs = self.stepped.tensor.dtype != self.held.tensor.dtype
        return {**values, "master": self.stepped.tensor} if differs else values


def optimizer_parts(pipeline: Pipeline, optimizer: AnyOptimizer) -> tuple[list[Part], dict[str, Number]]:
    """Return (boxes of this process's optimizer state, key -> state that is a number and not a tensor)."""
    parts: list[Part] = []
    numbers: dict[str, Number] = {}
    for state in stepped_states(pipeline, optimizer):
        held, stepped = state.held, state.stepped
        for kind, value in state.values().items() if held.saves_state else ():
            key = f"optimizer.{held.name}.{kind}"
            if isinstance(value, Tensor) and value.shape == stepped.tensor.shape:
                parts += [Part(key, held.shape, box, part) for box, part in held.parts(value.detach(), stepped.start)]
            elif isinstance(value, Tensor) and (value.ndim == 0 or held.shape == stepped.tensor.shape):
                parts.append(Part(key, tuple(value.shape), Box.whole(value.shape), value.detach()))
            elif isinstance(value, bool | int | float):
                numbers[key] = value
            elif value is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} keeps a {_words(value)} as {kind!r} of {held.name!r}, which is "
                    f"{list(held.shape)} and spread over ranks: a checkpoint holds numbers, and tensors of the parameter's shape"
                )
    return parts, numbers


def stepped_states(pipeline: Pipeline, optimizer: AnyOptimizer) -> list[SteppedState]:
    """Return the state of each parameter that the optimizer steps here."""
    by_name = {held.name: held for held in holders(pipeline) if held.parameter}
    if isinstance(optimizer, Optimizer):
        stepped = [(master, optimizer.torch_optimizer(master.name)) for master in optimizer.masters.all]
    else:
        shards, stepped = {shard.tensor: shard for shard in pipeline.shards()}, []
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter in shards:
                stepped.append((shards[parameter], optimizer))
            elif parameter.numel():  # unlike the one that `Pipeline.parameters` yields where there are none
                raise UsageError(
                    f"the optimizer steps a parameter of {list(parameter.shape)} that is not among pipeline.parameters()"
                )
    return [SteppedState(by_name[pipeline._stored_name(each.name)], each, inner) for each, inner in stepped]


def _words(value: object) -> str:
    return f"tensor of {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def required_names(pipeline: Pipeline, trained_only: bool = False) -> dict[str, tuple[int, ...]]:
    """Return stored name -> whole shape of each parameter and buffer here that a checkpoint must have."""
    return {held.name: held.shape for held in holders(pipeline) if not (trained_only and held.frozen)}


def require_shapes(stored: Reader, needed: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for a weight that is absent or has another shape."""
    for name, shape in needed.items():
        if f"model.{name}" not in stored.tensors:
            raise CheckpointError(
                f"the checkpoint holds no {name!r}, which the model has {_near(name, stored.tensors)}"
            )
        _require_shape(stored, f"model.{name}", shape)


def _require_shape(stored: Reader, key: str, shape: tuple[int, ...]) -> None:
    present = stored.tensors.get(key)
    if present != tuple(shape):
        name, words = key.partition(".")[2], "a number" if present is None else list(present)
        raise CheckpointError(f"{name!r}: expected shape {list(shape)}, found {words} in the checkpoint")


def _near(name: str, tensors: Iterable[str]) -> str:
    weights = sorted(key.removeprefix("model.") for key in tensors if key.startswith("model."))
    return f"(it holds {len(weights)} weights, such as {weights[0]!r})" if weights else "(it holds no weights)"


@torch.no_grad()
def load_model(stored: Reader, pipeline: Pipeline, trained_only: bool = False) -> None:
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
    pipeline.weights_changed()


def _kind(tensor: Tensor) -> str:
    """Return the class of dtypes between which values may be converted: floating point of any precision, or a single dtype."""
    return "real" if tensor.is_floating_point() else str(tensor.dtype)


@torch.no_grad()
def load_optimizer(stored: Reader, pipeline: Pipeline, optimizer: AnyOptimizer) -> None:
    """Load the optimizer's state; to be called after `load_model`.

    A parameter without any state in the checkpoint gets none: it had no gradient yet. Raises CheckpointError if part of a
    parameter's state is absent.
    """
    kinds: dict[str, set[str]] = {}
    for key in (*stored.tensors, *stored.numbers):
        first, _, rest = key.partition(".")
        if first == "optimizer":
            name, _, kind = rest.rpartition(".")
            kinds.setdefault(name, set()).add(kind)
    ours = optimizer if isinstance(optimizer, Optimizer) else None
    states = stepped_states(pipeline, optimizer)
    saved_kinds = [kinds.get(state.held.name, set()) - {"master"} for state in states]
    if ours is not None:
        saved_kinds = [
            _complete(stored, state.held, saved, ours.moments(state.stepped.name))
            for state, saved in zip(states, saved_kinds, strict=True)
        ]
        ours.masters.wait()
    for inner in optimizer.optimizers if isinstance(optimizer, Optimizer) else [optimizer]:
        inner.state.clear()
    for state, saved in zip(states, saved_kinds, strict=True):
        name, tensor = state.held.name, state.stepped.tensor
        for kind in sorted(saved):
            value = _loaded(stored, state, f"optimizer.{name}.{kind}")
            if ours is not None and kind == "step":  # torch's fused AdamW counts steps in fp32 on the device
                value = value.to(tensor.device, torch.float32)
            elif ours is not None:
                value = value.to(tensor.device, tensor.dtype).view(tensor.shape)
            state.optimizer.state[tensor][kind] = value
        if tensor.dtype != state.held.tensor.dtype:
            key = f"optimizer.{name}.master"
            tensor.copy_(_loaded(stored, state, key if key in stored.tensors else f"model.{name}"))
    if ours is not None:
        ours.masters.publish()


def _complete(stored: Reader, held: Holder, present: set[str], moments: tuple[str, ...]) -> set[str]:
    """Return the kinds of state to load of those `present`.

    Raises CheckpointError for a part of a state, and for values that it cannot have.
    """
    kinds = ("step", *moments) if "exp_avg" in moments else moments
    if present and not {*kinds} <= present <= {"step", *kinds}:
        expected = " and ".join(filter(None, (", ".join(kinds[:-1]), *kinds[-1:])))
        wanted = f"{expected}, or none of them" if kinds else "none"
        raise CheckpointError(
            f"the optimizer's state of {held.name!r}: expected {wanted}; found {', '.join(sorted(present))}"
        )
    for kind in present:
        _require_shape(stored, f"optimizer.{held.name}.{kind}", () if kind == "step" else held.shape)
    steps = float(stored.whole(f"optimizer.{held.name}.step")) if "step" in present else 0.0
    if not 0 <= steps <= MOST_STEPS:
        raise CheckpointError(f"{held.name!r}: expected a number of steps, found {steps} in the checkpoint")
    return present.intersection(kinds)


def _loaded(stored: Reader, state: SteppedState, key: str) -> Any:
    """Return a value of a parameter's state; of tensors in its whole shape the elements that are stepped here."""
    if key in stored.numbers:
        return stored.numbers[key]
    shape, (held, stepped, _) = stored.tensors[key], state
    if shape == held.shape and shape:
        values = held.read(partial(stored.region, key), stepped.start, stepped.stop)
        return values.view(stepped.tensor.shape).to(stepped.tensor.device)
    value = stored.whole(key)
    return value.to(stepped.tensor.device) if value.ndim else value  # torch keeps the number of steps on the CPU
