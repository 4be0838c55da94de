"""Bytes of layers by value, measured from one micro-batch on any device, and those of stages, for `Costs.bytes`.

On the meta device, which computes shapes only, the size of a layer does not matter.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipeloom.ops.checksum import storage_key
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue, defer_weight_gradients, run_backward
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.ops.parts import observing
from pipeloom.ops.saved_tensors import SavedTensor, saving
from pipeloom.ops.segments import carries
from pipeloom.runtime.tensor_spec import tensors_in
from pipeloom.schedule.actions import KEPT, PENDING, SAVED, equal_part
from pipeloom.schedule.model import Schedule, parts

_TEMPORARIES = "temporary", "temporary of I", "temporary of B"


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and micro-batch.

    Attributes:
        saved: tensors that autograd saves, without parameters, buffers, and the layer's input and output.
        input, output: of the layer; 0 for the output of a loss.
        saves_input, saves_output: whether autograd saves these too.
        pending: what W reads after I.
        forward: the most that the forward holds at once besides its input and what it saves.
        unsaved: the most that a forward that saves nothing holds at once besides its input, its output included.
        backward: the most that a B adds at once to what it starts with.
        split: as `backward`, of an I or of its W.
        state: what the layer keeps of slices for later ones, such as keys and values; part of what is saved, too.
        again: whether the layer is recomputed in its backward.
        loss: those of `saved` that the loss saves, which then is not recomputed.
        parts: name of a part of the layer, or of several together (`mlp+norms`) -> those of `saved` that are not held from F on
            where R of them make them.
        trained: parameters that are trained, a number; with adapters, these alone.
    """

    saved: float
    input: float = 0.0
    output: float = 0.0
    saves_input: bool = False
    saves_output: bool = False
    pending: float = 0.0
    forward: float = 0.0
    unsaved: float = 0.0
    backward: float = 0.0
    split: float = 0.0
    state: float = 0.0
    again: bool = False
    loss: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    trained: int = 0

    def scaled(self, factor: float) -> LayerBytes:
        """Return these bytes times `factor`."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        scaled = {name: value * factor for name, value in values.items() if not isinstance(value, (bool, Mapping))}
        return replace(
            self, **scaled | {"trained": self.trained}, parts={name: size * factor for name, size in self.parts.items()}
        )


def measured_layer(
    module: nn.Module,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None = None,
    split: bool = False,
    sums: bool = False,
) -> tuple[LayerBytes, Any]:
    """Run forward and backward of one micro-batch; return the bytes, and the output (None with a loss).

    Args:
        module: the layer, on the device of `inputs`; its linear layers are changed as a stage changes them.
        loss: of its output, for the last layer.
        split: the backward is I and W.
        sums: gradients are added to fp32 sums of their own, which are there before.
    """
    main = MainGradients() if sums else None
    context = WeightGradContext(in_place=split, main=main)
    defer_weight_gradients(module, context)
    live = LiveBytes(meta=any(value.is_meta for value in tensors_in(inputs)))
    with torch.no_grad(), live:
        module(*inputs, **keywords)
    # What a layer computes once, such as a table of positions, is no micro-batch's.
    unsaved = float(live.peak - live.now)
    for parameter in module.parameters():
        if main is not None:
            main.attach(parameter, torch.zeros_like(parameter, dtype=torch.float32))
        else:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    whole, result = _pass(module, inputs, keywords, loss, context)
    if not split:
        return replace(whole, unsaved=unsaved), result
    context.queue = WeightGradQueue()
    parted, result = _pass(module, inputs, keywords, loss, context)
    return replace(parted, unsaved=unsaved, backward=whole.backward, split=parted.backward), result


def _pass(
    module: nn.Module,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None,
    context: WeightGradContext,
) -> tuple[LayerBytes, Any]:
    """Return what `measured_layer` does, of a B, or of an I and its W for the queue of the context."""
    queue = context.queue
    live = LiveBytes(meta=any(value.is_meta for value in tensors_in(inputs)))
    given, saved, parts = _storages(tensors_in(inputs)), dict[int, float](), _Parts()

    def pack(tensor: Tensor) -> SavedTensor:
        if storage_key(tensor) in given or live.counts(tensor):
            saved.update(_storages((tensor,)))
            parts.note_saved(storage_key(tensor))
        return SavedTensor(tensor)

    with live:
        with saving(pack), observing(parts.run):
            output = module(*inputs, **keywords)
            layers = set(saved)
            values = tuple(tensors_in(output)) if loss is None else (loss(output),)
        leaving = {} if loss is not None else _storages(tensors_in(values))
        inside = {key: size for key, size in saved.items() if key not in given and key not in leaving}
        held, freed = sum(inside.values()), parts.freed(inside)
        forward = live.peak - held
        carrying = [value for value in tensors_in(values) if carries(value)]
        roots, seeds = [get_gradient_edge(value) for value in carrying], [torch.empty_like(value) for value in carrying]
        result = None if loss is not None else output
        del values, output, carrying
        start = live.now - sum(_storages(seeds).values())
        live.peak = live.now
        if roots:
            run_backward(roots, seeds)
        seeds.clear()
        pending = 0.0 if queue is None else sum(_storages(queue.reads).values())
        if queue is not None:
            queue.flush()
        backward = live.peak - start
    return (
        LayerBytes(
            held,
            sum(given.values()),
            sum(leaving.values()),
            not given.keys().isdisjoint(saved),
            not leaving.keys().isdisjoint(saved),
            pending,
            forward,
            backward=backward,
            split=backward,
            loss=sum(size for key, size in inside.items() if key not in layers),
            parts=freed,
        ),
        result,
    )


_Storages = Mapping[int, tuple[weakref.ref[Any], float]]
"""Key of a storage -> itself, since the key may be another one's once it is freed, and its bytes."""


class _Parts:
    """The storages that each part of a layer takes, saves and returns in one forward, whose `run` is a `PartObserver`."""

    def __init__(self) -> None:
        self._open: list[str] = []  # the calls that have not ended, the outer ones first
        self._ended: list[
            tuple[tuple[str, ...], _Storages, _Storages]
        ] = []  # name behind those around it, takes, returns
        self._saved_in: dict[int, list[tuple[str, ...]]] = defaultdict(
            list
        )  # key of a storage -> the calls that save it

    def run(
        self,
        name: str,
        run: Callable[..., Any],
        module: nn.Module | None,
        values: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> Any:
        """Return `run(*values, **keywords)`."""
        self._open.append(name)
        call, takes = tuple(self._open), _references((values, keywords))
        try:
            result = run(*values, **keywords)
        finally:
            self._open.pop()
        self._ended.append((call, takes, _references(result)))
        return result

    def note_saved(self, key: int) -> None:
        """Note that autograd saves a tensor of this storage now."""
        self._saved_in[key].append(tuple(self._open))

    def freed(self, sizes: Mapping[int, float]) -> dict[str, float]:
        """Return each part, and all that can be recomputed together (`mlp+norms`) -> the bytes of what is saved, of these
        storages, that are not held then."""
        names = list(dict.fromkeys(call[-1] for call, _, _ in self._ended))
        together = chain.from_iterable(combinations(sorted(names), count) for count in range(2, len(names) + 1))
        return {"+".join(each): self._freed(sizes, set(each)) for each in (*((name,) for name in names), *together)}

    def _freed(self, sizes: Mapping[int, float], names: set[str]) -> float:
        # A part inside a part belongs to the outer one.
        outer = [each for each in self._ended if each[0][-1] in names and names.isdisjoint(each[0][:-1])]
        takes, returns = zip(*(each[1:] for each in outer), strict=True)
        arguments, returned = (
            {key for storages in calls for key, (ref, _) in storages.items() if ref() is not None}
            for calls in (takes, returns)
        )
        dropped = {key for key in sizes if key in returned or all(names.intersection(c) for c in self._saved_in[key])}
        # What nothing saves is held as an argument.
        held = {id(ref): size for storages in takes for ref, size in storages.values() if ref() is None}
        freed: float = sum(sizes[key] for key in dropped - arguments) - sum(held.values())
        return max(0.0, freed)


def _references(values: Any) -> _Storages:
    """Return the storages of the tensors in `values`."""
    return {
        storage_key(t): (weakref.ref(t.untyped_storage()), float(t.untyped_storage().nbytes()))
        for t in tensors_in(values)
    }


def _storages(tensors: Iterable[Tensor]) -> dict[int, float]:
    """Return the bytes of each storage of `tensors` once."""
    return {storage_key(tensor): float(tensor.untyped_storage().nbytes()) for tensor in tensors}


def stage_bytes(schedule: Schedule, spans: Sequence[Sequence[LayerBytes]]) -> dict[str, tuple[float, ...]]:
    """Return what `Costs.bytes` takes of each stage and micro-batch, and temporaries: "temporary of I" and "temporary of B" are
    the most that these need above what is there while they run, "temporary" above what is there then or at their end; "forward":
    the most that a forward that saves nothing holds besides its input.

    Args:
        spans: stage -> its layers, in order.
    """
    actions = [action for program in schedule.programs for cell in program for action in parts(cell)]
    blocks = {action.stage for action in actions if action.kind in ("RB", "RI")}
    plain = {action.stage for action in actions if action.kind in ("B", "I")} | ({*range(schedule.stages)} - blocks)
    first = {route[0] for route in schedule.routes}
    whole = {action.stage for action in actions if action.kind == "R"}
    values = []
    for stage, layers in enumerate(spans):
        saved = _values(layers, stage in first, False, stage in whole)
        again = _values(layers, stage in first, True, stage in whole) if stage in blocks else saved
        rest = saved[KEPT] + saved[SAVED] - again[KEPT]
        ways = [way for way, stages in ((saved, plain), (again, blocks)) if stage in stages]
        temporaries = {name: max(way[name] for way in ways) for name in _TEMPORARIES}
        values.append(again | {SAVED: max(0.0, rest)} | temporaries)
    names = (KEPT, SAVED, PENDING, "layer", "forward", *_TEMPORARIES)
    sizes = {name: tuple(value[name] for value in values) for name in names}
    divided = schedule.remade_parts.union(part for layers in spans for each in layers for part in each.parts)
    return sizes | {f"{SAVED}:{n}": tuple(_freed(layers, n.split("+")) for layers in spans) for n in sorted(divided)}


def _freed(layers: Sequence[LayerBytes], names: Sequence[str]) -> float:
    """Return the bytes that a stage saves and does not hold where these parts of its layers, named or equal, are recomputed."""
    again = [any(at in equal_part(name, len(layers)) for name in names) for at in range(len(layers))]
    inside = ("+".join(sorted(name for name in names if name in each.parts)) for each in layers)
    named = sum(each.parts.get(part, 0.0) for each, part, whole in zip(layers, inside, again, strict=True) if not whole)
    levels = (_levels(layers, each, drops_outputs=True)[-1] for each in ([False] * len(layers), again))
    return max(0.0, next(levels) - next(levels) + named)


def _levels(layers: Sequence[LayerBytes], again: Sequence[bool], *, drops_outputs: bool = False) -> list[float]:
    """Return what the layers up to each one hold from F on, 0 first.

    Args:
        again: whether each layer is recomputed, and so holds its input alone.
        drops_outputs: what one that is recomputed returns is not held for the next one.
    """
    levels, behind = [0.0], False  # a layer that is recomputed
    for at, (each, mark) in enumerate(zip(layers, again, strict=True)):
        reads = each.saves_input and not (behind and drops_outputs)
        joint = at > 0 and (mark or reads or (layers[at - 1].saves_output and not behind))
        levels.append(levels[-1] + joint * each.input + (each.loss if mark else each.saved))
        behind = mark
    return levels


def _values(layers: Sequence[LayerBytes], first: bool, blocks: bool, whole: bool = False) -> dict[str, float]:
    """Return name -> bytes of one stage.

    Args:
        first: its inputs are views of the batch, which is there for the whole step.
        blocks: its backwards recompute layer by layer, so that F keeps the input of each layer that is recomputed, and all that
            the others save.
        whole: all its layers are recomputed together.
    """
    levels = _levels(layers, [each.again and blocks for each in layers])
    rebuilt = [(each.saved - each.loss) * (each.again and blocks) for each in layers]
    # While a layer is recomputed, what those behind it held is gone; what W reads of them is there.
    gone = [levels[-1] - level for level in levels[1:]]
    pending = list(accumulate((each.pending for each in reversed(layers)), initial=0.0))[-2::-1]
    layer = max((0.0, *(again - left for again, left in zip(rebuilt, gone, strict=True))))
    rises, split_rises = (
        [
            again + max(0.0 if again else each.forward, each.split + waiting if split else each.backward) - left
            for each, again, waiting, left in zip(layers, rebuilt, pending, gone, strict=True)
        ]
        for split in (False, True)
    )
    entering = 0.0 if first or not layers else layers[0].input
    state = sum(each.state for each in layers if whole or (blocks and each.again))
    inputs = (0.0, *(before.output for before in layers))
    most, most_split = max(rises, default=layer), max(split_rises, default=layer)
    # An I leaves what waits for W, and frees all else.
    late = sum(each.pending for each in layers)
    behind = max(layer, late - entering - levels[-1] - state)
    return {
        KEPT: entering + levels[-1] * blocks + state,
        SAVED: levels[-1] * (not blocks),
        PENDING: late,
        "layer": layer,
        "forward": max((each.unsaved + held for each, held in zip(layers, inputs, strict=False)), default=0.0),
        "temporary": max(most - layer, most_split - behind),
        "temporary of I": most_split - layer,
        "temporary of B": most - layer,
    }
