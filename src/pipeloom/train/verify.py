"""`verify`: the loss and every gradient of a layout, against one process that knows nothing of pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.config import Layout
from pipeloom.config.mesh import MeshShape
from pipeloom.models import cross_entropy, layers, tied
from pipeloom.models.weights import stable_seed
from pipeloom.ops.deferred import Desk, defer_weight_gradients
from pipeloom.ops.microbatch import KEYWORD, MicrobatchContext
from pipeloom.parallel.mesh import Mesh
from pipeloom.train.batches import Batch
from pipeloom.train.build import build_pipeline
from pipeloom.train.joined import Holding, whole
from pipeloom.train.searched import estimated

if TYPE_CHECKING:
    from pipeloom.train.worker import WorkerContext

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Result:
    """How far a layout is from one process.

    Attributes:
        loss_error: |a - b| / |b|, b that of one process.
        errors: global parameter name -> max |a - b| / max |b|; infinite for a gradient that one of the two has not.
        passed: whether all of these are within the tolerance.
    """

    loss_error: float
    errors: Mapping[str, float]
    passed: bool


class Step(NamedTuple):
    """A step's mean loss, and the gradient of each parameter that is held (None: it got none)."""

    loss: float
    gradients: Gradients


def run(layouts: Sequence[Layout], context: WorkerContext, tolerance: float) -> Iterator[Result | None]:
    """Verifies the layouts one by one; every worker of the pool iterates to the end.

    A layout of n ranks runs on the workers 0..n-1, in fp32 (fp64 where configured), one step over random tokens, so
    that no two micro-batches are alike. Workers that it does not use wait. `schedule.name = "search"` is searched for the costs
    given, or else for the layers' operations.

    Yields:
        for each layout its result on rank 0, None on the others.
    """
    meshes: dict[MeshShape, Mesh | None] = {}
    references: dict[tuple[object, ...], Step] = {}
    for asked in layouts:
        layout = estimated(asked, context)
        result = None
        if layout.mesh not in meshes:
            meshes[layout.mesh] = Mesh.of(layout.mesh, range(layout.mesh.world))
        mesh = meshes[layout.mesh]
        if mesh is not None:
            found = pipeline_step(layout, context.device, mesh)
            if context.rank == 0:
                key = _what_one_process_sees(layout)
                if key not in references:
                    references[key] = serial_step(layout, context.device)
                result = compare(found, references[key], tied(layout.config.model), tolerance)
        if context.world_size > 1:
            dist.barrier()
        yield result


def make_batch(layout: Layout) -> Batch:
    """Random tokens and random targets for all replicas, the same in every process."""
    config = layout.config
    rows, vocabulary = sum(layout.microbatch_sizes) * layout.mesh.dp, config.model.vocab_size
    generator = torch.Generator().manual_seed(stable_seed("verify", config.train.seed))
    both = torch.randint(0, vocabulary, (2, rows, config.train.seq_len), generator=generator)
    return Batch(both[0], both[1])


def pipeline_step(layout: Layout, device: torch.device, mesh: Mesh) -> list[Step]:
    """One step through the pipelines; every rank of `mesh` calls it.

    Returns:
        each rank's outcome on rank 0, [] on the others; of a parameter in parts, the rank with the first part has it all.
    """
    batch = make_batch(layout).part(mesh.place.dp, layout.mesh.dp)
    pipeline = build_pipeline(_unsharded(layout), device, mesh, _dtype(layout))
    loss = pipeline.step(batch.tokens.to(device), batch.targets.to(device)).item()
    gradients = {name: None if p.grad is None else p.grad.cpu() for name, p in pipeline.named_parameters()}
    mine = loss, Holding(mesh.place, gradients, pipeline.layouts)
    everyone: list[Any] | None = [None] * mesh.everyone.size if mesh.everyone.index == 0 else None
    if mesh.everyone.group is None:
        everyone = [mine]
    else:
        dist.gather_object(mine, everyone, dst=mesh.everyone.ranks[0], group=mesh.everyone.group)
    pipeline.close()
    if everyone is None:
        return []
    joined = whole([holding for _, holding in everyone])
    return [Step(loss, gradients) for (loss, _), gradients in zip(everyone, joined, strict=True)]


def serial_step(layout: Layout, device: torch.device) -> Step:
    """The same step in one process: the whole model, one micro-batch after the other, replica after replica."""
    config = layout.config
    built = [(layer.name, layer()) for layer in layers(config.model, config.train.seed, _dtype(layout), device)]
    modules = [module for _, module in built]
    desk = Desk()
    for module in modules:
        defer_weight_gradients(module, desk)  # it multiplies as a pipeline's layers do
    for names in tied(config.model):
        _share(dict(built), names)
    batch = make_batch(layout)
    sizes = list(layout.microbatch_sizes) * layout.mesh.dp
    parts = zip(torch.split(batch.tokens, sizes), torch.split(batch.targets, sizes), strict=True)
    loss = 0.0
    for number, (tokens, targets) in enumerate(parts):
        share = targets.numel() / batch.targets.numel()
        context = MicrobatchContext(0, number, share)
        x = tokens.to(device)
        for module in modules:
            x = module(x, **({KEYWORD: context} if KEYWORD in signature(module.forward).parameters else {}))
        part = cross_entropy(x, targets.to(device), config.train.label_smoothing) * share
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.item()
    gradients: Gradients = {}
    for name, module in built:
        gradients |= {f"{name}.{inner}": p.grad for inner, p in module.named_parameters()}
    return Step(loss, {name: None if g is None else g.cpu() for name, g in gradients.items()})


def compare(found: Sequence[Step], reference: Step, ties: Sequence[Sequence[str]], tolerance: float) -> Result:
    """The largest differences between the ranks' outcomes and the one of a single process.

    A parameter that several ranks hold (a tied weight, a replica) counts with its worst copy.
    """
    errors: dict[str, float] = {name: float("inf") for name in reference.gradients}
    seen: set[str] = set()
    for step in found:
        for name, gradient in step.gradients.items():
            error = relative_error(gradient, reference.gradients.get(name))
            errors[name] = max(errors[name], error) if name in seen else error
            seen.add(name)
    for names in ties:  # a rank that holds several of a group's names lists the first one only
        if any(name in seen for name in names):
            errors = {name: error for name, error in errors.items() if name not in names or name in seen}
    loss_error = max(abs(step.loss - reference.loss) / abs(reference.loss) for step in found)
    passed = all(error <= tolerance for error in (loss_error, *errors.values()))
    return Result(loss_error, errors, passed)


def relative_error(a: Tensor | None, b: Tensor | None) -> float:
    """max |a - b| / max |b|; 0 where both are None or zero; infinite where one is missing, misshapen or not finite."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape or not bool(a.isfinite().all()) or not bool(b.isfinite().all()):
        return float("inf")
    difference, size = float((a - b).abs().max()), float(b.abs().max())
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def _unsharded(layout: Layout) -> Layout:
    """The layout with whole gradients on every replica: how the optimizer shares its state changes none of them."""
    optimizer = layout.config.optimizer.model_copy(update={"zero1": False})
    return replace(layout, config=layout.config.model_copy(update={"optimizer": optimizer}))


def _dtype(layout: Layout) -> torch.dtype:
    return torch.float64 if layout.config.train.dtype == "float64" else torch.float32


def _what_one_process_sees(layout: Layout) -> tuple[object, ...]:
    """What the serial step depends on: layouts that differ in other things share it."""
    train = layout.config.train
    sizes = layout.microbatch_sizes * layout.mesh.dp
    return layout.config.model, train.seed, train.seq_len, _dtype(layout), train.label_smoothing, sizes


def _share(modules: Mapping[str, nn.Module], names: Sequence[str]) -> None:
    """Puts the parameter called `names[0]` in the place of the others."""
    homes = []
    for name in names:
        layer = next(layer for layer in modules if name.startswith(f"{layer}."))
        path, _, leaf = name[len(layer) + 1 :].rpartition(".")
        homes.append((modules[layer].get_submodule(path), leaf))
    owner, first = homes[0]
    for home, leaf in homes[1:]:
        setattr(home, leaf, owner.get_parameter(first))
