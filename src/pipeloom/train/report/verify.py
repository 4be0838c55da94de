"""`verify`: compare the loss and every gradient of a layout with those of one process without pipelines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.config import Layout
from pipeloom.measure.build import build_pipeline, model_layers, moe_classes, ties
from pipeloom.models import cross_entropy
from pipeloom.ops.deferred import WeightGradContext, defer_weight_gradients
from pipeloom.ops.layer import KEYWORD, MicrobatchContext
from pipeloom.ops.random_state import stable_seed
from pipeloom.parallel.exchange import gather_tree
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.sharding import WHOLE, ParameterSharding, from_plain, shard_of, to_plain
from pipeloom.runtime.batch import IGNORE_INDEX, count_targets
from pipeloom.runtime.health.watchdog import Watchdog
from pipeloom.runtime.stage_modules import LayerNames
from pipeloom.runtime.tied_weights import Tie, share
from pipeloom.runtime.verify import relative_error
from pipeloom.shapes.mesh import MeshShape, Place
from pipeloom.train.data.batches import Batch
from pipeloom.train.schedule_search import estimated
from pipeloom.train.workers.context import WorkerContext, require_agreement

NamedGradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class LayoutVerdict:
    """Differences between a step of a layout and the same step in one process.

    Attributes:
        loss_error: |a - b| / |b|, b that of one process; infinite for a loss that is not a number.
        errors: global parameter name -> max |a - b| / max |b|; infinite for a gradient that only one of the two has.
        passed: whether all of these are within the tolerance.
    """

    loss_error: float
    errors: Mapping[str, float]
    passed: bool


class ComparedStep(NamedTuple):
    """A step of one process.

    Attributes:
        loss: the mean loss.
        gradients: that of each parameter, or of the part that the process holds; None: it received none.
        place: the process's place on the mesh.
        layouts: global name -> how a parameter is sharded; those without an entry are whole.
    """

    loss: float
    gradients: NamedGradients
    place: Place = Place(0, 0, 0, 0, 0)
    layouts: Mapping[str, ParameterSharding] = {}


def run(layouts: Sequence[Layout], context: WorkerContext, tolerance: float) -> Iterator[LayoutVerdict | None]:
    """Verify the layouts one by one; every worker of the pool iterates to the end.

    A layout of n ranks runs on workers 0..n-1, in fp32 (fp64 where configured), for one step over random tokens, so that
    all micro-batches differ. The other workers wait. `schedule.name = "search"` searches with the costs in the configuration,
    or with costs estimated from the layers' operations.

    Yields:
        for each layout, its verdict on rank 0, None on the others.
    """
    require_agreement(layouts, context)
    meshes: dict[MeshShape, Mesh | None] = {}
    references: dict[tuple[object, ...], ComparedStep] = {}
    for asked in layouts:
        layout = estimated(asked, context)
        result = None
        if layout.mesh not in meshes:
            meshes[layout.mesh] = Mesh.of(layout.mesh, range(layout.mesh.world))
        mesh = meshes[layout.mesh]
        if mesh is not None:
            context.close_to_strangers()
            steps = pipeline_step(layout, context.device, mesh, context.watchdog)
            if context.rank == 0:
                key = _what_one_process_sees(layout)
                if key not in references:
                    references[key] = serial_step(layout, context.device)
                result = compare(steps, references[key], ties(layout.config), tolerance)
        if context.world_size > 1:
            with context.waiting("the other workers to finish with a layout", "evaluation"):
                dist.barrier()
        yield result


def make_batch(layout: Layout) -> Batch:
    """Return random tokens and targets for all replicas, the same in every process; about one target in eight is ignored."""
    config = layout.config
    rows, vocabulary = sum(layout.microbatch_sizes) * layout.mesh.dp, config.model.vocab_size
    generator = torch.Generator().manual_seed(stable_seed("verify", config.train.seed))
    tokens, targets = torch.randint(0, vocabulary, (2, rows, config.train.seq_len), generator=generator)
    ignored = torch.randint(0, 8, targets.shape, generator=generator) == 0
    ignored[0, 0] = False  # at least one counts
    return Batch(tokens, targets.masked_fill(ignored, IGNORE_INDEX))


def pipeline_step(
    layout: Layout, device: torch.device, mesh: Mesh, watchdog: Watchdog | None = None
) -> list[ComparedStep]:
    """Run one step through the pipelines; every rank of `mesh` calls it.

    Returns:
        every rank's step on rank 0, [] on the others.
    """
    batch = (
        make_batch(layout).with_ahead(layout.config.model.num_nextn_predict_layers).part(mesh.place.dp, layout.mesh.dp)
    )
    pipeline = build_pipeline(layout, device, mesh, _dtype(layout), watchdog)
    if layout.config.model.source:
        pipeline.eval()  # dropout of transformers draws from torch's generator, so its masks differ from layout to layout
    batch = batch.to(device)
    sharded = pipeline.sync if layout.config.optimizer.zero1 else None
    if sharded is not None:
        sharded.fills_grad = False  # the slices are read below, and no optimizer looks for .grad
    loss = pipeline.step(batch.tokens, batch.targets, **batch.keywords).item()
    gradients_by_name = {name: p.grad for name, p in pipeline.named_parameters()}
    if sharded is not None:
        with pipeline.waiting("the other replicas' slices of the gradients"):
            gradients_by_name |= sharded.whole_gradients()
    gradients = {name: None if gradient is None else gradient.cpu() for name, gradient in gradients_by_name.items()}
    layouts = {name: to_plain(pipeline.layouts[name]) for name in gradients}
    mine = (loss, list(mesh.place), gradients, layouts)
    group = mesh.everyone.group
    with pipeline.waiting("the other ranks' gradients"):
        everyone = [mine] if group is None else gather_tree(mine, group, mesh.everyone.ranks[0])
    pipeline.close()
    return [
        ComparedStep(loss, held, Place(*place), {name: from_plain(plain) for name, plain in layouts.items()})
        for loss, place, held, layouts in everyone or ()
    ]


def serial_step(layout: Layout, device: torch.device) -> ComparedStep:
    """Run the same step in one process: the whole model, micro-batch by micro-batch, replica by replica."""
    config = layout.config
    model = model_layers(config, _dtype(layout), device, classes=moe_classes(layout))
    built = [(layer.name, layer()) for layer in model]
    modules = [module for _, module in built]
    grad_context = WeightGradContext()
    for module in modules:
        defer_weight_gradients(module, grad_context)  # the same matrix products as in a pipeline's layers
        module.train(not config.model.source)
    for names in ties(config):
        share(Tie(tuple(names), ()), dict(built))
    batch = make_batch(layout).with_ahead(config.model.num_nextn_predict_layers)
    sizes = list(layout.microbatch_sizes) * layout.mesh.dp
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    parts = [batch.rows(slice(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    loss, total = 0.0, count_targets(batch.targets)
    for number, (start, rows) in enumerate(zip(starts, parts, strict=True)):
        weight, rows = count_targets(rows.targets) / total, rows.to(device)
        given = {KEYWORD: MicrobatchContext(0, number, weight, start, len(rows.tokens)), **rows.keywords}
        x, terms = rows.tokens, []
        tensors: dict[str, Tensor | None] = {}
        for layer, module in zip(model, modules, strict=True):
            accepted = signature(module.forward).parameters
            declared = LayerNames.of(layer, layer.name)
            named = {keyword: tensors[name] for keyword, name in declared.reads.items()}
            x = module(x, **{name: value for name, value in given.items() if name in accepted}, **named)
            x, values = declared.taken_from(x, tensors)
            terms += [term.loss(values[key], rows.targets) * term.weight for key, term in declared.losses.items()]
        if weight == 0:  # a mean over no target is NaN
            continue
        main_loss = cross_entropy(x, rows.targets, config.train.label_smoothing)
        part = sum(terms, start=main_loss) * weight
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.item()
    gradients: NamedGradients = {}
    for name, module in built:
        gradients |= {f"{name}.{inner}": p.grad for inner, p in module.named_parameters()}
    return ComparedStep(loss, {name: None if g is None else g.cpu() for name, g in gradients.items()})


def compare(
    steps: Sequence[ComparedStep], reference: ComparedStep, ties: Sequence[Sequence[str]], tolerance: float
) -> LayoutVerdict:
    """Return the largest differences between the ranks' outcomes and that of a single process.

    A parameter that several ranks hold (a tied weight, a replica) counts with the error of its worst copy.
    """
    errors: dict[str, float] = {name: float("inf") for name in reference.gradients}
    seen: set[str] = set()
    for step in steps:
        for name, gradient in step.gradients.items():
            error = _error(gradient, reference.gradients.get(name), step.layouts.get(name, WHOLE), step.place)
            errors[name] = max(errors[name], error) if name in seen else error
            seen.add(name)
    for names in ties:  # a rank that holds several names of a group lists only the first
        if any(name in seen for name in names):
            errors = {name: error for name, error in errors.items() if name not in names or name in seen}
    differences = [abs(step.loss - reference.loss) / abs(reference.loss) for step in steps]
    loss_error = math.inf if any(map(math.isnan, differences)) else max(differences)  # max would ignore a NaN
    passed = all(error <= tolerance for error in (loss_error, *errors.values()))
    return LayoutVerdict(loss_error, errors, passed)


def _error(gradient: Tensor | None, whole: Tensor | None, sharding: ParameterSharding, place: Place) -> float:
    """Return the error of a gradient, or of a part of it, relative to the largest element of the whole."""
    if whole is None:
        return relative_error(gradient, None)
    largest = float(whole.abs().max()) if whole.numel() else 0.0
    return relative_error(gradient, shard_of(whole, sharding, place._asdict()), largest)


def _dtype(layout: Layout) -> torch.dtype:
    return torch.float64 if layout.config.train.dtype == "float64" else torch.float32


def _what_one_process_sees(layout: Layout) -> tuple[object, ...]:
    """Return the settings on which the serial step depends; layouts that differ only in others share it."""
    train = layout.config.train
    sizes = layout.microbatch_sizes * layout.mesh.dp
    return (
        layout.config.model,
        layout.config.lora,
        train.seed,
        train.seq_len,
        _dtype(layout),
        train.label_smoothing,
        sizes,
    )
