"""`auto_layers`: a model with a sequential trunk, cut into layers for a pipeline."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from pipeloom.errors import ConfigError, first_line
from pipeloom.limits import of_annotated_types
from pipeloom.models.layers import shared_names
from pipeloom.ops.layer import Layer
from pipeloom.runtime.stage_modules import layer_cost

_TRUNK_SHARE = 0.5  # share of the parameters; with a smaller trunk, the rest would burden one or two stages


@dataclass(frozen=True)
class AutoLayers:
    """A model cut into layers.

    Attributes:
        layers: for `Pipeline`, with copies of the model's modules: `part3.blocks.2.weight` is the model's `blocks.2.weight`.
        tied: for `Pipeline`'s `tied`: the weights that several parts use.
        report: how the model was cut, one line per part.
    """

    layers: list[Layer]
    tied: list[list[str]]
    report: str

    def __str__(self) -> str:
        return self.report


@of_annotated_types
def auto_layers(model: nn.Module, example_batch: Tensor | Sequence[Tensor]) -> AutoLayers:
    """Cut `model` before each entry of its trunk and after the last one.

    The trunk is the `nn.Sequential` or `nn.ModuleList`, or several of them, with at least half of the parameters. The model's
    own forward is traced by `torch.fx`, in which entries of the trunk, and modules that contain none, are kept whole. Tensors
    that later parts use are passed on by name. The parts are then run one after the other on the example, in eval mode, and
    must give the model's output.

    Args:
        example_batch: a tensor, or a tuple of the model's positional arguments; arguments left out keep their defaults.

    Raises:
        UsageError: an example that is no tensors. ConfigError: a model that cannot be cut, with the reason. What the model
            itself raises for the example.
    """
    inputs = tuple(example_batch) if isinstance(example_batch, Sequence) else (example_batch,)
    name = type(model).__name__
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            want = model(*inputs)
            trunk = _trunk(model)
            graph = _traced(model, trunk, len(inputs))
            parts = _parts(model, graph, _cuts(name, graph, trunk), inputs)
            got = _run(parts, inputs)
    finally:
        for module, training in modes.items():
            module.training = training
    try:
        torch.testing.assert_close(got, want)
    except AssertionError as error:
        raise ConfigError(f"{name} cannot be cut: on the example its parts differ from it: {error}") from None
    for part in parts:
        for inner in part.module.modules():
            inner.training = modes.get(inner, model.training)
    tied = shared_names(nn.ModuleDict({part.name: part.module for part in parts}))
    layers = [
        Layer(
            part.name,
            partial(copy.deepcopy, part.module),
            reads=tuple(part.reads),
            writes=tuple(part.writes),
            cost=layer_cost(part.module),
        )
        for part in parts
    ]
    lines = [f"{name}: {len(parts)} parts, which give its output on the example"]
    for part in parts:
        reads = f"; reads {', '.join(part.reads)}" if part.reads else ""
        writes = f"; writes {', '.join(part.writes)}" if part.writes else ""
        lines.append(f"{part.name}: {', '.join(part.modules) or 'no modules'}{reads}{writes}")
    lines += [f"tied: {' = '.join(group)}" for group in tied]
    return AutoLayers(layers, tied, "\n".join(lines))


@dataclass(frozen=True)
class _CutPart:
    """One part: its module, the paths of the model's modules in it, and the named tensors that it reads and writes."""

    name: str
    module: nn.Module
    modules: list[str]
    reads: list[str]
    writes: list[str]


def _trunk(model: nn.Module) -> list[str]:
    """Return the paths of the entries of the trunk. Raises ConfigError if no containers hold enough of the model."""
    total = sum(p.numel() for p in model.parameters())
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and len(module) > 1
    }
    share = {path: sum(p.numel() for p in module.parameters()) / max(total, 1) for path, module in lists.items()}
    large = [path for path in lists if share[path] >= _TRUNK_SHARE]
    outer = [path for path in lists if not any(path != other and _inside(path, other) for other in lists)]
    if large:
        trunk_lists = [max(large, key=lambda path: (len(lists[path]), -path.count(".")))]
    elif sum(share[path] for path in outer) >= _TRUNK_SHARE:
        trunk_lists = outer
    else:
        words = ", ".join(f"{path!r} {share[path]:.0%}" for path in sorted(outer, key=lambda path: -share[path])[:3])
        raise ConfigError(
            f"{type(model).__name__} has no sequential trunk: no nn.Sequential or nn.ModuleList holds half of its parameters"
            f"{f' ({words})' if words else ''}; give a list of layers yourself (docs/own_model.md)"
        )
    return [f"{path}.{at}".lstrip(".") for path in trunk_lists for at in range(len(lists[path]))]


def _inside(path: str, container: str) -> bool:
    return container == "" or path.startswith(f"{container}.")


class _Tracer(fx.Tracer):
    """Tracer that keeps modules without an entry of the trunk, and the entries themselves, as single calls."""

    def __init__(self, trunk: Sequence[str]) -> None:
        super().__init__()
        self._trunk = trunk

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(entry.startswith(f"{module_qualified_name}.") for entry in self._trunk)


def _traced(model: nn.Module, trunk: Sequence[str], given: int) -> fx.Graph:
    """Return the model's forward as a graph. Raises ConfigError with the reason if it cannot be traced."""
    name = type(model).__name__
    parameters = list(inspect.signature(model.forward).parameters.values())
    left_out = {p.name: p.default for p in parameters[given:] if p.default is not p.empty}
    try:
        graph = _Tracer(trunk).trace(model, concrete_args=left_out)
    except Exception as error:  # any error that the forward raises for a placeholder of a tensor
        raise ConfigError(
            f"{name} cannot be cut: its forward decides by the values of tensors, or does with them what torch.fx cannot follow "
            f"({type(error).__name__}: {first_line(error)[:200]}); move that into a module, or give a list of layers yourself"
        ) from error
    for node in list(graph.nodes):  # fx inserts a check of an omitted argument whose default is None
        if not node.users and getattr(node.target, "__name__", "") == "_assert_is_none":
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.target in left_out:
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (F.dropout, torch.dropout):
            raise ConfigError(
                f"{name} cannot be cut: its forward calls dropout as a function; use an nn.Dropout module"
            )
    return graph


def _cuts(name: str, graph: fx.Graph, trunk: Sequence[str]) -> list[fx.Node]:
    """Return the nodes that begin a part, in order: each entry of the trunk, and the node after the last."""
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target in trunk]
    names = [str(node.target) for node in calls]
    twice = next((target for target in names if names.count(target) > 1), None)
    if twice is not None:
        raise ConfigError(f"{name} cannot be cut: its forward calls {twice!r} of the trunk more than once")
    if len(calls) < 2:
        raise ConfigError(
            f"{name} cannot be cut: its forward calls {len(calls)} entries of the trunk ({', '.join(trunk[:3])}, …)"
        )
    behind = calls[-1].next
    return [*calls, behind] if behind.op != "output" else calls


def _parts(model: nn.Module, graph: fx.Graph, cuts: Sequence[fx.Node], inputs: Sequence[Tensor]) -> list[_CutPart]:
    """Return the parts between the cuts. Raises ConfigError for values other than tensors that pass from one to another."""
    segments: list[list[fx.Node]] = [[]]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in graph.nodes:
        if node in cuts and any(each.op not in ("placeholder", "get_attr") for each in segments[-1]):
            segments.append([])
        segments[-1].append(node)
    part_of = {node: at for at, segment in enumerate(segments) for node in segment}
    ShapeProp(fx.GraphModule(model, graph)).propagate(*inputs)  # notes the type of each node's value
    # Each part has its own node for a parameter or buffer of the model itself, so none is handed over.
    used_in = {
        node: sorted({part_of[user] for user in node.users} - {at})
        for node, at in part_of.items()
        if node.op != "get_attr"
    }
    handed: list[list[fx.Node]] = [[] for _ in segments]  # positional outputs to the next part
    for node, at in part_of.items():
        if not used_in.get(node):
            continue
        kind = node.meta["type"]
        if not issubclass(kind, (Tensor, type(None))):
            raise ConfigError(
                f"{type(model).__name__} cannot be cut: {node.name!r}, of type {kind.__name__} in part {at}, is used by "
                f"part {used_in[node][0]}, and only tensors go from one to another"
            )
        if used_in[node] == [at + 1]:
            handed[at].append(node)
    parts = []
    for at, segment in enumerate(segments):
        arrive = placeholders if not at else handed[at - 1]
        reads = [node for node in part_of if at in used_in.get(node, ()) and node not in arrive]
        writes = [node for node in segment if used_in.get(node) and node not in handed[at]]
        parts.append(_part(model, f"part{at}", segment, arrive, reads, writes, handed[at], at + 1 == len(segments)))
    return parts


def _part(
    model: nn.Module,
    name: str,
    segment: Sequence[fx.Node],
    arrive: Sequence[fx.Node],
    reads: Sequence[fx.Node],
    writes: Sequence[fx.Node],
    handed: Sequence[fx.Node],
    last: bool,
) -> _CutPart:
    """Return a part as a module, from its positional and named inputs to its positional and named outputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # of the model itself
            copies[node] = graph.node_copy(node)
        return copies[node]

    by_name = {node: f"{node.name}_" if node.name == "output" else node.name for node in [*reads, *writes]}
    if not arrive:
        graph.placeholder("nothing")
    for node in arrive:
        copies[node] = graph.node_copy(node) if node.op == "placeholder" else graph.placeholder(f"{node.name}_in")
    for node in reads:
        copies[node] = graph.placeholder(by_name[node])
    for node in segment:
        if node.op not in ("placeholder", "get_attr", "output"):
            copies[node] = graph.node_copy(node, copied)
    if last:
        graph.output(fx.map_arg(next(n for n in segment if n.op == "output").args[0], copied))
    else:
        by_position = tuple(copies[node] for node in handed)
        written = {by_name[node]: copies[node] for node in writes}
        graph.output((*(by_position or (None,)), written) if written else by_position or None)
    module = fx.GraphModule(model, graph, class_name=name.capitalize())
    modules = [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]
    return _CutPart(name, module, modules, [by_name[node] for node in reads], [by_name[node] for node in writes])


def _run(parts: Sequence[_CutPart], inputs: Sequence[Tensor]) -> Any:
    """Run the parts one after the other."""
    x: Any = tuple(inputs)
    tensors: dict[str, Any] = {}
    for part in parts:
        values = x if isinstance(x, tuple) else (x,)
        x = part.module(*values, **{name: tensors[name] for name in part.reads})
        if part.writes:
            *rest, written = x
            tensors |= written
            x = tuple(rest)
    return x
