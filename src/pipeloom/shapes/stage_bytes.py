"""Bytes of layers by value, of operations or measured, and those of stages, for `Costs.bytes`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, combinations

from pipeloom.schedule.actions import HIDDEN, KEPT, PENDING, SAVED, SCORES, equal_part
from pipeloom.schedule.model import Schedule, actions_of
from pipeloom.shapes.ops import LOGITS, LayerOps

# Part of our blocks and output layer -> the tensors that its R makes.
_OF_PARTS = {
    "norms": (
        *("input_unit", "input_scale", "norm_1", "middle_unit", "middle_scale", "norm_2", "query_norm", "last_norm"),
        *("queries_unit", "queries_scale", "keys_unit", "keys_scale"),
    ),
    "attention": (
        *("query", "key", "value", "heads", "statistics", "probabilities", "mixed", "query_norm", "positions", "mask"),
        *(f"{name}{of}" for name in ("queries", "keys") for of in ("", "_wide", "_unit", "_scale")),
    ),
    "activation": ("silu", "gated", "expert_silu", "expert_gated", "shared_gated"),
    "mlp": (
        *("inner", "silu", "gated", "expert_inner", "expert_silu", "expert_gated", "expert_outputs"),
        *("shared_inner", "shared_gated"),
    ),
}
# Part -> the tensor of another part that is its argument, and held where both are recomputed.
_ARGUMENTS = {"attention": "norm_1", "mlp": "norm_2"}
_OF_SHARES = HIDDEN, SCORES


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
        loss: those of `saved` that are held where the layer is recomputed too: by the loss, and between communications, which
            are not repeated.
        parts: name of a part of the layer, or of several together (`mlp+norms`) -> those of `saved` that are not held from F on
            where R of them make them.
        trained: parameters that are trained, a number; with adapters, these alone.
        hidden, scores: of a share of the vocabulary, from the broadcast and from S to T.
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
    hidden: float = 0.0
    scores: float = 0.0

    @classmethod
    def of_ops(cls, layer: LayerOps, *, again: bool = False, parts: bool = False, slices: int = 1) -> LayerBytes:
        """Return the bytes of a layer that is known by its operations, on one rank, with those of its parts if `parts`."""
        tensors = layer.tensors
        if layer.kind == "S":
            return cls(0.0, backward=layer.backward_peak, hidden=tensors[HIDDEN], scores=tensors[SCORES])
        left = tensors.keys() - layer.dropped
        saves_input = "input" in left or left <= {LOGITS}
        return cls(
            layer.saved - layer.input * saves_input,
            layer.input,
            saves_input=saves_input,
            pending=layer.pending,
            backward=layer.backward_peak,
            split=layer.input_peak,
            state=sum(tensors.get(name, 0.0) for name in ("key", "value")) * (slices > 1),
            again=again,
            loss=layer.held,
            parts=_parts_of(layer) if parts else {},
        )

    def scaled(self, factor: float) -> LayerBytes:
        """Return these bytes times `factor`."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        scaled = {name: value * factor for name, value in values.items() if not isinstance(value, (bool, Mapping))}
        return replace(
            self, **scaled | {"trained": self.trained}, parts={name: size * factor for name, size in self.parts.items()}
        )


def _parts_of(layer: LayerOps) -> dict[str, float]:
    """Return each part of a layer, and parts together (`mlp+norms`) -> the bytes that are not held where they are recomputed."""
    sizes = {}
    for names in chain.from_iterable(combinations(sorted(_OF_PARTS), count + 1) for count in range(len(_OF_PARTS))):
        outputs = {tensor for name in names for tensor in _OF_PARTS[name]} - {_ARGUMENTS.get(name) for name in names}
        sizes["+".join(names)] = sum(layer.tensors.get(tensor, 0.0) for tensor in outputs)
    return sizes


def stage_bytes(
    schedule: Schedule, spans: Sequence[Sequence[LayerBytes]], widening: float = 1.0
) -> dict[str, tuple[float, ...]]:
    """Return what `Costs.bytes` takes of each stage and micro-batch.

    Args:
        spans: stage -> its layers, in order.
        widening: bytes of an element of summed gradients over those of an element of a layer's tensors.
    """
    actions = list(actions_of(schedule))
    blocks = {action.stage for action in actions if action.kind in ("RB", "RI")}
    plain = {action.stage for action in actions if action.kind in ("B", "I")} | ({*range(schedule.stages)} - blocks)
    first = {route[0] for route in schedule.routes}  # their inputs are views of the batch
    on_host = {action.stage for action in actions if action.kind == "OKEPT"}
    whole = {action.stage for action in actions if action.kind == "R"}
    if schedule._spreads_embedding:
        first -= whole
    values = []
    for stage, layers in enumerate(spans):
        saved = _values(layers, stage in first, False, stage in whole)
        again = _values(layers, stage in first, True, stage in whole) if stage in blocks else saved
        rest = saved[KEPT] + saved[SAVED] - again[KEPT]
        ways = [way for way, stages in ((saved, plain), (again, blocks)) if stage in stages]
        beside = {name: max(way[name] for way in ways) for name in ("backward", "input_grad")}
        state = sum(each.state for each in layers) if schedule.slices > 1 and stage not in on_host else 0.0
        shares = {name: sum(getattr(each, name) for each in layers) for name in _OF_SHARES if schedule.vocabulary}
        values.append(again | {SAVED: max(0.0, rest), "slice_grads": widening * state} | beside | shares)
    sizes = {name: tuple(value[name] for value in values) for name in values[0]}
    divided = schedule._remade_parts.union(part for layers in spans for each in layers for part in each.parts)
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
        first: its inputs are there for the whole step.
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
        "backward": most - layer,
        "input_grad": max(0.0, most_split - behind),
    }


def copies_in_sums(schedule: Schedule, counts: Sequence[float], tied: float) -> list[float]:
    """Return stage -> gradients beside its rank's own while those of weights that other pipeline ranks hold too are summed, a
    number, at the first stage of each rank.

    The step's last action has ended then. Each holder has a copy of its own, and those of the others (`tied_weights.sum_over`).
    Weights with the same holders in the same order are summed together, and one such sum follows the other.

    Args:
        counts: position in a route -> the parameters of its layers.
        tied: parameters of the embedding that the output layer has, too.
    """
    places = list(zip(schedule.position_of, schedule.placement, strict=True))
    holders = [
        tuple(dict.fromkeys(rank for at, rank in places if at == position)) for position in range(schedule.positions)
    ]
    both = tuple(dict.fromkeys(holders[0] + holders[-1]))
    summed = defaultdict[tuple[int, ...], float](float, {both: tied})  # holders -> parameters
    for position, count in enumerate(counts):
        summed[holders[position]] += count - tied * [0, schedule.positions - 1].count(position)
    copies = {ranks: len(ranks) * count for ranks, count in summed.items() if len(ranks) > 1}
    sums = [0.0] * schedule.stages
    for rank, stages in enumerate(schedule.stages_of):
        sums[stages[0]] = max((each for ranks, each in copies.items() if rank in ranks), default=0.0)
    return sums
