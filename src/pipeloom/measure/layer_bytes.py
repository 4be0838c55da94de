"""Bytes of each layer of a layout, by value, measured from one micro-batch in one layer of each kind, on any device.

On the meta device, which computes shapes only, the size of a layer does not matter.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import chain, combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from pipeloom.config import Layout
from pipeloom.errors import ConfigError, PipeloomError, UsageError
from pipeloom.measure.build import PARAMETER_DTYPES, model_layers, moe_classes, recomputed, training_loss
from pipeloom.models import ahead
from pipeloom.ops.checksum import storage_key
from pipeloom.ops.deferred import WeightGradContext, WeightGradQueue, defer_weight_gradients, run_backward
from pipeloom.ops.layer import KEYWORD, Layer, MicrobatchContext, SlicePlace
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.ops.main_gradient import MainGradients
from pipeloom.ops.nested import tensors_in
from pipeloom.ops.parts import observing
from pipeloom.ops.saved_tensors import SavedTensor, saving
from pipeloom.ops.segments import carries
from pipeloom.ops.slices import STATE, SequenceHistory, SliceState
from pipeloom.runtime.stage_modules import LayerNames
from pipeloom.shapes.layers import layer_sizes
from pipeloom.shapes.stage_bytes import LayerBytes

# A layer whose forward needs values, such as one with experts, runs on the CPU: the most operations of its forward and backward
# (a second or two on one core; longer sequences are shortened to stay below), and its most parameters (1.2 GB in fp32).
MOST_FLOPS = 2e10
MOST_PARAMETERS = 3e8


def layer_bytes(layout: Layout) -> tuple[LayerBytes, ...]:
    """Return the activations of the embedding, the blocks, and the output layer with the loss, each unsharded, for the largest
    micro-batch.

    One layer of each kind (layers of equal sizes) runs on the meta device, which computes shapes only.

    Raises:
        UsageError: a layer needs values and is too large to be built, or returns more than one tensor.
        ConfigError: a layer's forward fails.
    """
    config, rows = layout.config, max(layout.microbatch_sizes)
    sizes = layer_sizes(config.model.shape(), config.train.seq_len)
    dtype, classes = PARAMETER_DTYPES[config.train.dtype], moe_classes(layout)
    meta, cpu = (model_layers(config, dtype, torch.device(name), classes=classes) for name in ("meta", "cpu"))
    names = recomputed(config)

    def measure(x: Tensor, at: int, last: bool) -> tuple[LayerBytes, Tensor]:
        try:
            return measured_in(layout, meta[at], x, last)
        except Exception:  # an operation that needs values, or has no implementation on the meta device; or an error
            return _measured_on_cpu(layout, cpu[at], x, at, last)

    kinds: dict[Any, LayerBytes] = {}
    layers = []
    x = torch.zeros(rows, config.train.seq_len, dtype=torch.int64, device="meta")
    for at, size in enumerate(sizes):
        if size not in kinds:
            last = size is sizes[-1]
            kinds[size], output = measure(x, at, last)
            if layout.cuts is not None:  # a weight's gradient is as large beside a slice's tensors
                share = max(layout.cuts.sizes)
                tokens = round(share * x.shape[1])
                piece, _ = measure(x[:, :tokens].detach().requires_grad_(x.requires_grad), at, last)
                temporaries = {
                    name: getattr(piece, name) / share for name in ("forward", "unsaved", "backward", "split")
                }
                kinds[size] = replace(kinds[size], **temporaries)
            x = output
        layers.append(replace(kinds[size], again=names == "none" or meta[at].name in names))
    return tuple(layers)


def _measured_on_cpu(layout: Layout, layer: Layer, x: Tensor, at: int, last: bool) -> tuple[LayerBytes, Tensor]:
    """Return the result of `measured_in` from a run on the CPU, where a long sequence is shortened and the bytes are scaled."""
    shape, (rows, seq_len) = layout.config.model.shape(), x.shape[:2]
    parameters, tokens = layer_sizes(shape, seq_len)[at].parameters, seq_len
    if parameters > MOST_PARAMETERS:
        raise UsageError(
            f"a layer has {parameters:,} parameters, more than the {MOST_PARAMETERS:,.0f} that a dry run builds"
        )
    while tokens > 16 and layer_sizes(shape, tokens)[at].flops * rows > MOST_FLOPS:
        tokens //= 2
    generator = torch.Generator().manual_seed(layout.config.train.seed)
    if x.is_floating_point():
        short = torch.randn(rows, tokens, *x.shape[2:], generator=generator).to(x.dtype).requires_grad_()
    else:
        short = torch.randint(0, shape.vocab_size, (rows, tokens), generator=generator)
    try:
        measured, output = measured_in(layout, layer, short, last)
    except PipeloomError:
        raise
    except Exception as error:  # of a foreign model whose configuration contradicts itself, or of a class of the user's
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"layer {layer.name!r} cannot run: {type(error).__name__}: {reason}") from error
    return measured.scaled(seq_len / tokens), output.new_empty(
        rows, seq_len, *output.shape[2:], device="meta"
    ).requires_grad_()


def measured_in(layout: Layout, layer: Layer, x: Tensor, last: bool) -> tuple[LayerBytes, Tensor]:
    """Build a layer on the device of `x`, and run it (the last one with the loss); return its bytes, and its output.

    The output is empty, and carries a gradient.
    """
    module: nn.Module = layer().to(x.device)
    module.train()
    rows, model = x.shape[0], layout.config.model
    targets = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
    keywords: dict[str, Any] = {KEYWORD: MicrobatchContext(samples=rows)}
    if model.num_nextn_predict_layers:
        keywords |= ahead(targets, targets, model.num_nextn_predict_layers)
    if layout.config.data.documents == "pack":
        keywords["position_ids"] = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    accepted, names = signature(module.forward).parameters, LayerNames.of(layer, layer.name)
    keywords = {name: value for name, value in keywords.items() if name in accepted}
    keywords |= {name: torch.zeros_like(x, requires_grad=True) for name in names.reads}
    history = SequenceHistory()
    if layout.schedule.slices > 1 and STATE in accepted:
        keywords[STATE] = SliceState(history, SlicePlace(0, 1, 0, x.shape[1], x.shape[1]))
    loss = partial(_loss, layout, targets, names) if last else None
    train = layout.config.train
    sums = train.dtype != "float32" and train.device == "cpu"  # a GPU adds products of bf16 to fp32 sums without copies
    with _Shapes():
        measured, output = measured_layer(module, (x,), keywords, loss, layout.schedule.splits_backward, sums)
    state = sum(each.nbytes for piece in history.pieces.values() for each in piece.on_device)
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    measured = replace(measured, state=float(state), trained=trained)
    if last:
        return measured, x
    return measured, torch.empty_like(_single(names.taken_from(output, {})[0])).requires_grad_()


def _loss(layout: Layout, targets: Tensor, names: LayerNames, output: Any) -> Tensor:
    output, values = names.taken_from(output, {})
    terms = [term.loss(values[key], targets) * term.weight for key, term in names.losses.items()]
    return sum(terms, start=training_loss(layout.config)(_single(output), targets))


def _single(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise UsageError("a layer returns more than one tensor")
    return output


class _Shapes(TorchFunctionMode):
    """Attention on the meta device that saves what the fused implementations save, not the matrix of probabilities."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if arguments and isinstance(arguments[0], Tensor) and arguments[0].is_meta:
            if function is torch.Tensor.__bool__:  # transformers asks whether all of a sequence is one document
                return True
            fused = function is F.scaled_dot_product_attention and not (keywords or {}).get("dropout_p")
            if fused and arguments[0].shape[-1] == arguments[2].shape[-1]:
                # The operation behind it on a CPU; on the meta device it chooses the one without fusion.
                return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*arguments[:3], is_causal=True)[0]
        return function(*arguments, **(keywords or {}))


# -- one layer ---------------------------------------------------------------------------------------------------------


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
