"""Bytes of each layer of a layout, measured in one layer of each kind, and those of each rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeloom.config import Layout
from pipeloom.errors import ConfigError, PipeloomError, UsageError
from pipeloom.models import ahead
from pipeloom.ops.layer import KEYWORD, Layer, MicrobatchContext, SlicePlace
from pipeloom.ops.slices import STATE, SequenceHistory, SliceState
from pipeloom.runtime.layer_bytes import measured_layer
from pipeloom.runtime.stage_modules import LayerNames
from pipeloom.shapes.layers import layer_sizes
from pipeloom.shapes.stage_bytes import LayerBytes
from pipeloom.train.build import PARAMETER_DTYPES, model_layers, moe_classes, recomputed, training_loss

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
