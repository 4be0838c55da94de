"""Bytes of layers by value, measured from one micro-batch on any device.

On the meta device, which computes shapes only, the size of a layer does not matter.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain, combinations
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
from pipeloom.shapes.stage_bytes import LayerBytes


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
