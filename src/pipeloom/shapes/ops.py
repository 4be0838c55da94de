"""The layers of a model as operations: what each keeps for the backward, what it computes, and what it sends.

One table per kind of layer. Memory, time, recomputation and sizes of messages are all read from it, so that they cannot disagree.
Bytes and operations are those of one rank and one micro-batch. Runtimes keep different tensors; `Runtime` holds the differences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

from pipeloom.shapes.decoder import DecoderShape

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters (LoRA), which are trained in place of a model's weights.

    Attributes:
        r: their rank.
        target_modules: "all-linear": every linear layer but the output layer has one; a list: layers whose names are, or end in
            a dot and, one of these; any other text: a regular expression that whole names match. Names are those of
            `transformers`, such as model.layers.0.self_attn.q_proj.
    """

    r: int
    target_modules: str | tuple[str, ...] = ALL_LINEAR

    def chooses(self, name: str) -> bool:
        """Return whether the linear layer called `name` in `transformers` gets an adapter."""
        if self.target_modules == ALL_LINEAR:
            return name.rpartition(".")[2] not in ("lm_head", "embed_out")
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, name) is not None
        return any(name == target or name.endswith(f".{target}") for target in self.target_modules)


@dataclass(frozen=True)
class Runtime:
    """The tensors that a training system keeps where others do not.

    Attributes:
        gradient_placeholders: weight gradients are added into fp32 buffers inside the product, and autograd receives a bf16
            placeholder instead: one buffer per shape of a weight, kept for the whole run (Transformer Engine).
        loss_bytes: per logit: what the loss keeps, and what computing its gradient takes besides.
        fused_norm, fused_gate: the norm (the gated activation) keeps only its inputs.
        repeats_keys: keys and values are expanded to the query heads before attention.
        keeps_outputs: experts' outputs are kept, because an operation of their own multiplies them by the router's weights.
        workspace: bytes that libraries hold in the allocator.
        overhead: bytes outside the allocator: the CUDA context and NCCL's buffers.
        margin: the allocator's reserve over the peak, as a share of activations.
        whole_experts: an expert is usually whole on one rank of tp, and ep extends over tp; where `sharded`, if ep is above 1.
        element: bytes of an element of activations and weights; 2: bf16.
        optimizer: bytes of the optimizer's state per parameter.
        copies_mixed: attention's output is copied into the order of its heads for the next product, and a norm's backward takes
            one operation after the other (on a CPU).
        sequence: tp divides activations by tokens where it does not divide the products (sequence parallelism).
        sums_inside: a product adds a weight's gradient to its sum; otherwise the gradient is there beside the sum.
        segments: a layer whose experts are on several ranks runs in segments: the rows that arrive stay beside those in the
            experts' order, and weights' gradients are computed once the next exchange has started.
        packed: rows hold several documents, so that each block has the cosines and sines of its tokens' positions, and on a GPU
            a mask of which tokens see which.
        sharded: parameters, gradients and optimizer state are fp32 and sharded over dp by layer (fully_shard).
        adapters: what is trained; None: the model's weights.
        hides_state: sums of gradients and gathers of weights run beside the computation.
        overlaps_exchange: tp's exchanges and their products run in as many parts as ranks, beside each other.
    """

    name: str
    gradient_placeholders: bool
    loss_bytes: tuple[float, float]
    fused_norm: bool
    fused_gate: bool
    repeats_keys: bool
    keeps_outputs: bool
    workspace: float = 40 * 2**20
    overhead: float = 2.5 * 2**30
    margin: float = 0.15
    sharded: bool = False
    whole_experts: bool = False
    element: int = 2
    optimizer: float = 12.0
    copies_mixed: bool = False
    sequence: bool = True
    sums_inside: bool = True
    segments: bool = False
    packed: bool = False
    adapters: Adapters | None = None
    hides_state: bool = True
    overlaps_exchange: bool = False

    def on_cpu(self) -> Runtime:
        """This runtime without what an accelerator's allocator and libraries hold."""
        return replace(self, workspace=0.0, overhead=0.0, margin=0.0, copies_mixed=True)


RUNTIMES = {
    each.name: each
    for each in (
        # The loss works in place on bf16 logits.
        Runtime("megatron", True, (2, 0), True, True, False, False, whole_experts=True),
        # The logarithmic softmax in fp32; its gradient, in fp32 and in bf16 (ours, which is not compiled: two gradients in fp32).
        Runtime("torchtitan", False, (4, 6), True, False, True, True, sharded=True, whole_experts=True),
        Runtime("pipeloom", False, (4, 8), False, False, repeats_keys=False, keeps_outputs=True, segments=True),
    )
}


@dataclass(frozen=True)
class Split:
    """One rank's share of a layer.

    Attributes:
        tokens: of one micro-batch on one rank of cp: micro-batch times sequence divided by cp.
        context: length of the whole sequence, which attention sees.
    """

    runtime: Runtime
    tokens: int
    context: int
    tp: int = 1
    ep: int = 1
    cp: int = 1
    capacity: float = 0.0
    etp: int = 1

    @property
    def element(self) -> int:
        """Bytes of an element of an activation."""
        return self.runtime.element

    @property
    def parts(self) -> int:
        """The ranks of tp that divide the tokens outside of products."""
        return self.tp if self.runtime.sequence else 1

    def part(self, elements: float) -> float:
        """Bytes of an activation of so many elements, of which a rank has its tokens."""
        return elements * self.element / self.parts


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        saves: (name, bytes) of the tensors that it keeps; a name that several operations keep is one tensor.
        gradients: bytes of the gradients of its output and its inputs, alive together while its backward runs.
        scratch: bytes more while its backward runs.
        out: bytes of the gradient of a product's output, which a deferred weight gradient keeps with its input.
        weights: (rows x columns of a matrix, or length of a vector; how many of them) on this rank.
        expert: whether expert parallelism spreads the weights.
        flops: of the products of the forward; the backward takes twice as many.
        traffic: bytes that the forward reads and writes outside of products.
        tp_bytes: bytes that the forward exchanges with the tp group; ep_bytes: with the ep group; cp_bytes: keys and values,
            which it gathers from each other rank of the cp group.
        attends: fused attention.
        makes: the tensor that it has to compute again where that is recomputed.
        joins: a product whose output is added to the residual stream, so that both have one gradient.
        additions: of the backward, which no product makes.
        modules: (name in `transformers`, outputs on this rank) of the linear layers that a product stands for.
        carries: whether the backward computes the gradient of its input.
        trained: whether it computes that of the weights, or of the other operand.
    """

    name: str
    saves: tuple[tuple[str, float], ...] = ()
    gradients: float = 0.0
    scratch: float = 0.0
    out: float = 0.0
    weights: tuple[tuple[float, int], ...] = ()
    expert: bool = False
    flops: float = 0.0
    traffic: float = 0.0
    tp_bytes: float = 0.0
    ep_bytes: float = 0.0
    cp_bytes: float = 0.0
    attends: bool = False
    makes: str = ""
    joins: bool = False
    additions: float = 0.0
    modules: tuple[tuple[str, float], ...] = ()
    carries: bool = True
    trained: bool = True

    @property
    def deferred(self) -> bool:
        """Return whether it has a weight gradient that may wait."""
        return bool(self.flops and self.weights and self.trained)


# Part -> the tensors that it recomputes, as Megatron-Core's `recompute_modules` does. Attention frees only its statistics: its
# output is the next product's input.
PARTS = {
    "norms": ("norm_1", "norm_2", "query_norm", "latent_norm"),
    "attention": ("statistics",),
    "activation": ("gated", "silu", "expert_gated", "expert_silu", "shared_gated"),
    "mlp": ("inner", "gated", "silu"),
    "experts": ("dispatched", "expert_inner", "expert_gated", "expert_silu", "expert_outputs", "routing"),
    "shared": ("shared_inner", "shared_gated"),
    "latent_up": ("query_norm", "latent_norm", "query", "key", "value"),
}

# Module -> the tensors that Megatron-Core's offloading of modules copies to the host: its inputs.
OFFLOADED = {
    "attn_norm": ("input",), "qkv_linear": ("norm_1",), "core_attn": ("query", "key", "value"), "attn_proj": ("mixed",),
    "mlp_norm": ("middle",), "expert_fc1": ("dispatched",), "moe_act": ("expert_inner",),
}  # fmt: skip


LOGITS = "logits"  # what the loss keeps, which no layer's recomputation makes


@dataclass(frozen=True)
class LayerOps:
    """The operations of one layer in the order of the forward.

    Attributes:
        kind: E embedding, t block, m block that predicts a token further ahead, L output layer; where that is spread, N its norm
            and S a share.
        residual: bytes of gradient that are alive beside each operation of the backward.
        input: bytes of the input, which a wholly recomputed layer keeps.
        dropped: names of tensors that are not kept: the backward computes them again, or copies them back.
        copied: names of those that are copied to the host and back.
        waits: weights' gradients wait until the end of the backward.
        tied: parameters that are the embedding's too, of which a rank that has both layers holds one copy.
    """

    kind: str
    ops: tuple[Op, ...]
    residual: float
    input: float = 0.0
    dropped: frozenset[str] = field(default=frozenset())
    copied: frozenset[str] = field(default=frozenset())
    waits: bool = False
    tied: float = 0.0

    def recomputed(self, part: str) -> LayerOps:
        """This layer with a part recomputed: "none", "full", or parts of PARTS joined by "+"."""
        if part == "none" or self.kind not in "tm":
            return self
        if part == "full":
            names = set(self.tensors)
        else:
            names = {name for each in part.split("+") for name in PARTS[each]}
        return replace(self, dropped=frozenset(names))

    def offloaded(self, modules: str) -> LayerOps:
        """This layer with the inputs of modules of OFFLOADED, joined by "+", on the host; "none": as it is."""
        if modules == "none" or self.kind not in "tm":
            return self
        names = {name for each in modules.split("+") for name in OFFLOADED[each]} & self.tensors.keys() - self.dropped
        return replace(self, dropped=self.dropped | names, copied=frozenset(names))

    @cached_property
    def tensors(self) -> dict[str, float]:
        """Name -> bytes of every tensor that the backward reads."""
        return {name: size for op in self.ops for name, size in op.saves}

    @cached_property
    def saved(self) -> float:
        """Bytes that one micro-batch holds from the forward to the backward."""
        names = self.tensors.keys() - self.dropped
        held = self.held if self.dropped and not names else 0.0
        return sum(self.tensors[name] for name in names) + held + self.input * (names <= {LOGITS})

    @cached_property
    def held(self) -> float:
        """Bytes that one micro-batch holds besides the input where the layer is wholly recomputed: the loss's, and those between
        communications, which are not repeated."""
        names = (LOGITS, *("received", "expert_outputs") * self.waits)
        return sum(self.tensors.get(name, 0.0) for name in names) + self.input * self.waits

    @cached_property
    def pending(self) -> float:
        """Bytes that a deferred weight gradient holds: the products' inputs and the gradients of their outputs."""
        products = [op for op in self.ops if op.deferred]
        return sum(size for op in products for _, size in op.saves[:1]) + sum(op.out for op in products)

    @cached_property
    def rebuilt(self) -> float:
        """Bytes that the backward rebuilds first; the input is there."""
        held = self.held if self.dropped == self.tensors.keys() else 0.0
        return sum(size for name, size in self.tensors.items() if name in self.dropped and name != "input") - held

    @cached_property
    def backward_peak(self) -> float:
        """The most bytes during this layer's backward over those that the micro-batch held before; what is used up is freed."""
        return self._peak(split=self.waits)

    @cached_property
    def input_peak(self) -> float:
        """As `backward_peak`, of an I: the operands of weight gradients stay."""
        return self._peak(split=True)

    def _peak(self, *, split: bool) -> float:
        first: dict[str, int] = {}
        for at, op in enumerate(self.ops):
            for name, _ in op.saves:
                first.setdefault(name, at)
        waiting = {op.saves[0][0] for op in self.ops if split and op.deferred}
        tensors, held, peak, residual = self.tensors, self.rebuilt, 0.0, self.residual
        for at in range(len(self.ops) - 1, -1, -1):
            op = self.ops[at]
            peak = max(peak, held + op.gradients + op.scratch + residual)
            held -= sum((tensors[name] for name, _ in op.saves if first[name] == at and name not in waiting), 0.0)
            held += op.out * (split and op.deferred)
            if split and op.joins:
                residual = 0.0  # it is what this product's weight gradient waits with
        return peak

    @cached_property
    def parameters(self) -> tuple[float, float]:
        """(parameters that all ranks of an ep group hold, parameters of experts), on this rank."""
        shared = sum(op_parameters(op) for op in self.ops if not op.expert)
        experts = sum(op_parameters(op) for op in self.ops if op.expert)
        return shared, experts

    @cached_property
    def trained(self) -> LayerOps:
        """The operations whose weights are trained."""
        ops = tuple(op for op in self.ops if op.trained)
        return self if len(ops) == len(self.ops) else replace(self, ops=ops, tied=0.0)

    @cached_property
    def flops(self) -> float:
        """Operations of the forward and the backward: a product for each of its gradients."""
        return sum((1 + op.carries + op.trained) * op.flops + op.additions for op in self.ops)


def op_parameters(op: Op) -> float:
    """Return the parameters of an operation."""
    return sum(size * count for size, count in op.weights)


def parameters_of(
    layers: Sequence[LayerOps], *, has_embedding: bool = False, trained: bool = False
) -> tuple[float, float]:
    """(parameters that every rank of an ep group has, those of experts) of layers on one rank.

    Args:
        has_embedding: the rank has the embedding in another stage.
        trained: count those that are trained.
    """
    layers = [layer.trained for layer in layers] if trained else layers
    shared, experts = (sum(layer.parameters[at] for layer in layers) for at in (0, 1))
    if has_embedding or any(layer.kind == "E" for layer in layers):
        shared -= sum(layer.tied for layer in layers)
    return shared, experts


def placeholders(layers: list[LayerOps], element: int) -> float:
    """Bytes of one buffer for each shape of a block's weights (see `Runtime.gradient_placeholders`), of `element` bytes."""
    shapes = {size for layer in layers if layer.kind in "tm" for op in layer.ops for size, _ in op.weights}
    return element * sum(shapes)


def layers_of(shape: DecoderShape, split: Split, shares: int = 0) -> list[LayerOps]:
    """[embedding, block, …, block, output layer]; between the last two, those that predict tokens further ahead.

    With `shares` of the vocabulary on so many ranks, the first layer gets rows, the last one is a norm, and a share is behind it.
    """
    kinds = list(zip(shape.expert_blocks, shape.reaches, shape.counted_blocks, strict=True))
    block_of = {kind: _block(shape, split, *kind) for kind in dict.fromkeys(kinds)}
    blocks = [block_of[kind] for kind in kinds]
    ahead = [_prediction(shape, split, blocks[-1])] * shape.num_nextn_predict_layers
    layers = [_embedding(shape, split), *blocks, *ahead, _output(shape, split)]
    if shares:
        layers = [*_without_vocabulary(layers, shape), vocabulary_share(shape, split, shares)]
    return layers if split.runtime.adapters is None else _with_adapters(layers, split.runtime.adapters, split)


def _with_adapters(layers: Sequence[LayerOps], adapters: Adapters, split: Split) -> list[LayerOps]:
    """Return the layers with frozen weights, and with adapters."""
    results, copies, begun = list[LayerOps](), dict[Any, LayerOps](), False
    for at, layer in enumerate(layers):
        prefix = f"model.layers.{at - 1}." if layer.kind in "tm" else ""
        targets = frozenset(name for op in layer.ops for name, _ in op.modules if adapters.chooses(prefix + name))
        key = id(layer), targets, begun
        if key not in copies:
            copies[key] = _adapted(layer, targets, adapters.r, split, begun)
        results.append(copies[key])
        begun = begun or bool(targets)
    return results


def _adapted(layer: LayerOps, targets: frozenset[str], rank: int, split: Split, begun: bool) -> LayerOps:
    """Freeze a layer's weights, and put the two products of an adapter behind each of the `targets`.

    A frozen weight has no gradient, for which its operand would be saved, but by grouped products. Before the first adapter,
    which is in an earlier layer where it has `begun`, nothing has: there the most bytes are those of the forward.
    """
    ops, residual = [], layer.residual if begun or targets else 5 * layer.residual  # input, norms, and what is added
    for op in layer.ops:
        frozen = replace(op, carries=begun, trained=begun and not op.weights, additions=0.0)
        if op.weights and not op.flops:
            units = sum(size for name, size in op.saves if name.endswith("_unit"))
            saves = tuple(each for each in op.saves if not each[0].endswith("_unit"))
            frozen = replace(frozen, saves=saves, scratch=(op.scratch + units) * (op.scratch > 0))
        elif op.weights:
            saves = op.saves if op.expert or layer.kind == "S" else op.saves[1:]  # a share keeps its copy until T
            frozen = replace(frozen, saves=saves, scratch=0.0, out=0.0, joins=False)
        if not begun:
            extra = 0.0 if targets else sum(size for _, size in op.saves[1:])
            frozen = replace(frozen, saves=(), gradients=op.gradients * (not targets), scratch=extra)
        widths = [width for name, width in op.modules if name in targets]
        if not widths:
            ops.append(frozen)
            continue
        operand, outputs, (size, _) = op.saves[0], sum(width for _, width in op.modules), op.weights[0]
        rows, count = op.flops / (2 * size), len(widths) * rank
        low, out = rows * count * split.element, rows * sum(widths) * split.element
        # The gradient of the input by the adapter is there while that by the frozen weight is computed.
        ops.append(replace(frozen, scratch=operand[1] * begun))
        weights = (size / outputs * count, rank * sum(widths))
        down = Op(f"{op.name}_lora_A", (operand,), low + operand[1] * begun, out, low, carries=begun)
        down = replace(down, tp_bytes=_exchanged(split, rows * count))
        up = Op(f"{op.name}_lora_B", ((f"{op.name}_low", low),), out + low, 0.0, out, traffic=3 * out, joins=op.joins)
        for product, weight in zip((down, up), weights, strict=True):
            ops.append(replace(product, weights=((weight, 1),), flops=2 * rows * weight))
        begun = True
    return replace(layer, ops=tuple(ops), residual=residual, input=layer.input * begun)


def _embedding(shape: DecoderShape, split: Split) -> LayerOps:
    table = shape.vocab_size * shape.hidden_size / split.tp + shape.n_positions * shape.hidden_size
    if shape.counted is not None:
        table = shape.counted.first / split.tp
    hidden = split.part(split.tokens * shape.hidden_size)
    op = Op(
        "embedding",
        saves=(("ids", 8.0 * split.tokens),),
        gradients=hidden,
        scratch=table * split.element,
        weights=((table, 1),),
        traffic=2 * hidden,
        additions=(1 + shape.num_nextn_predict_layers) * split.tokens * shape.hidden_size / split.tp,
    )
    return LayerOps("E", (op,), 0.0, 8.0 * split.tokens)


def _prediction(shape: DecoderShape, split: Split, block: LayerOps) -> LayerOps:
    """A norm of the embedding of the token ahead and one of the hidden states, a product of both, and a block like the last."""
    hidden = split.part(split.tokens * shape.hidden_size)
    norms = (_norm(shape, split, "embedding", "embedding_norm"), _norm(shape, split, "states", "states_norm"))
    joined, inner = {"eh_proj": float(shape.hidden_size)}, 2 * shape.hidden_size
    joint = _linear(split, "joint", ("joined", 2 * hidden), joined, inner, split.tokens / split.parts)
    return replace(block, kind="m", ops=(*norms, joint, *block.ops))


def _output(shape: DecoderShape, split: Split) -> LayerOps:
    """The last norm, the product with the vocabulary, and the loss; also of the states of blocks that predict further ahead."""
    split = replace(split, tokens=split.tokens * (1 + shape.num_nextn_predict_layers))
    elements, hidden = split.tokens * shape.hidden_size, split.part(split.tokens * shape.hidden_size)
    logits, weight = (each * shape.vocab_size / split.tp for each in (split.tokens * split.element, shape.hidden_size))
    others, tied = float(shape.hidden_size), weight * shape.tie_word_embeddings
    if (counted := shape.counted) is not None:
        weight = min(weight, counted.last / split.tp)
        others, tied = counted.last - weight * split.tp, counted.tied / split.tp
    saved, scratch = (logits / split.element * each for each in split.runtime.loss_bytes)
    scratch /= 1 + shape.num_nextn_predict_layers  # one loss after the other
    placeholder = weight * split.element if split.runtime.gradient_placeholders else 0.0
    product = Op(
        "logits",
        (("last_norm", hidden),),
        logits + max(elements * split.element, hidden),
        placeholder + _beside(split, weight) + elements * split.element * (split.parts > 1) + hidden,
        out=logits,
        weights=((weight, 1),),
        flops=2 * split.tokens * weight,
        tp_bytes=_exchanged(split, elements),
        modules=(("lm_head", weight / shape.hidden_size),),
    )
    loss = Op("loss", ((LOGITS, saved),), scratch=scratch, traffic=3 * logits)
    norm = _norm(shape, split, "input", "last_norm")
    norm = replace(norm, weights=((others, 1 + shape.num_nextn_predict_layers),))
    return LayerOps("L", (norm, product, loss), 0.0, hidden, tied=tied)


def _without_vocabulary(layers: Sequence[LayerOps], shape: DecoderShape) -> list[LayerOps]:
    others = float(shape.n_positions * shape.hidden_size)
    if shape.counted is not None:
        others = float(shape.counted.first - shape.vocab_size * shape.hidden_size)
    op = replace(layers[0].ops[0], saves=(), scratch=0.0, weights=((others, 1),))
    first, last = replace(layers[0], ops=(op,), input=layers[1].input), layers[-1]
    return [first, *layers[1:-1], replace(last, kind="N", ops=last.ops[:1], tied=0.0)]


def vocabulary_share(shape: DecoderShape, split: Split, ranks: int) -> LayerOps:
    """One of `ranks` shares of the product with the vocabulary and of the loss, where pipeline (and tensor) ranks have one each.

    From the broadcast of the last stage's output until T it keeps that copy, the logits, and their exponentials in fp32.
    """
    _, product, loss = _output(shape, replace(split, tp=ranks)).ops
    logits, wide = product.out, max(4, split.element) / split.element
    copy = (("hidden", float(split.element * split.tokens * shape.hidden_size)),)
    # T computes the weight's gradient beside its sum.
    gradient = sum(size * count for size, count in product.weights) * split.element
    gradient *= split.runtime.adapters is None
    # Twice: the embedding's, in which it looks tokens up.
    weights = product.weights if shape.tie_word_embeddings else product.weights * 2
    product = replace(product, saves=copy, gradients=0.0, scratch=0.0, tp_bytes=0.0, weights=weights, modules=())
    loss = replace(loss, saves=(("scores", logits * (1 + wide)),), scratch=gradient)
    return LayerOps("S", (product, loss), 0.0, 0.0)


def _norm(shape: DecoderShape, split: Split, operand: str, makes: str, count: int = 1) -> Op:
    """It keeps its input; where it is not fused the normed values before their weight too, and instead of an input in bf16 an
    fp32 copy of it; and a scale per token."""
    wide = max(split.element, 4) // split.element
    norm = _small_norm(makes, operand, shape.hidden_size, split, shape.hidden_size, parts=split.parts)
    scratch = (5 * wide - 2) * split.part(split.tokens * shape.hidden_size) * split.runtime.copies_mixed
    return replace(norm, scratch=scratch, weights=((shape.hidden_size, count),))


def _exchanged(split: Split, elements: float) -> float:
    return elements * split.element * (split.tp - 1) / split.tp


def _block(
    shape: DecoderShape, split: Split, sparse: bool, reach: int = 0, counted: tuple[int, int] | None = None
) -> LayerOps:
    """Attention, which sees as many tokens as `reach` says, and a feed-forward part.

    `counted`: parameters of the block without its experts, and of these. Attention's are those of its sizes; the widths of the
    feed-forward part are those with which it has the rest, whatever that consists of.
    """
    attend = _latent_attention if shape.kv_lora_rank else _attention
    attention = attend(shape, split, reach)
    tokens, hidden = split.tokens, split.part(split.tokens * shape.hidden_size)
    inner, shared = float(shape.intermediate_size), 0.0
    if sparse:
        inner, shared = shape.expert_width, shape.shared_width
    if counted is not None:
        matrices = (2 + shape.gated) * shape.hidden_size
        rest = counted[0] - (2 + shape.num_experts * sparse) * shape.hidden_size
        sizes = sum(op_parameters(op) for op in attend(shape, replace(split, tp=1), reach))
        if sizes > rest:  # another kind of mixer
            attention, sizes = (), 0.0
        inner = shared = (rest - sizes) / matrices
        if sparse:
            inner = counted[1] / matrices / shape.num_experts
    if sparse:
        feed_forward = _experts(shape, split, inner, shared)
    else:
        width = inner / split.tp
        feed_forward = _mlp(shape, split, ("norm_2", hidden), tokens, width, exchanged=tokens * shape.hidden_size)
    ops = (_norm(shape, split, "input", "norm_1"), *attention, _norm(shape, split, "middle", "norm_2"), *feed_forward)
    waits = sparse and split.ep > 1 and split.runtime.segments
    return LayerOps("t", ops, hidden, hidden, waits=waits)


def _linear(
    split: Split,
    name: str,
    operand: tuple[str, float],
    modules: Mapping[str, float],
    inner: float,
    rows: float,
    exchanged: float = 0.0,
    *,
    count: int = 1,
    expert: bool = False,
    makes: str = "",
    joins: bool = False,
    bias: bool = False,
) -> Op:
    """A product of `rows` rows of width `inner` with this rank's parts of the weights of layers, or of `count` experts.

    `modules`: name of each layer in `transformers` -> its outputs.
    `exchanged`: elements that tp gathers for it, or reduces behind it; a gathered input is gathered again for the backward.
    """
    out, largest = sum(modules.values()), max(modules.values())
    gathers = exchanged if split.parts > 1 and exchanged == rows * inner else 0.0
    return Op(
        name,
        (operand,),
        (out + inner) * rows * split.element,
        gathers * split.element + _beside(split, largest * inner * count) + _widened(split, rows * (largest + inner)),
        out * rows * split.element,
        ((out * inner, count), *(((out, count),) if bias else ())),
        expert,
        flops=2 * rows * out * inner,
        tp_bytes=_exchanged(split, exchanged),
        makes=makes,
        joins=joins and split.parts == 1,
        modules=() if expert else tuple(modules.items()),
    )


def _beside(split: Split, elements: float) -> float:
    """Bytes of the gradient of a weight of so many elements that is there beside its sum."""
    return 0.0 if split.runtime.sums_inside else elements * split.element


def _widened(split: Split, elements: float) -> float:
    """Bytes of fp32 copies of a product's operands: a CPU cannot add products of other types to an fp32 sum."""
    return 4.0 * elements * (split.runtime.copies_mixed and split.element < 4)


def _core(
    shape: DecoderShape, split: Split, reach: int, query: float, key: float, value: float, out: float, width: float
) -> Op:
    """Fused, causal attention; `width`: this rank's query and value widths, of all heads, added.

    Of n tokens a token sees n / 2 on average; with a window w, w (1 - w / 2n); half of its chunk.
    """
    seen = float(split.context)
    if 0 < abs(reach) < split.context:
        seen = reach * (2 - reach / split.context) if reach > 0 else -reach
    statistics = 4.0 * split.tokens * shape.num_attention_heads / split.tp
    result = "heads" if split.runtime.copies_mixed else "mixed"
    return Op(
        "attention",
        (("query", query), ("key", key), ("value", value), (result, out), ("statistics", statistics)),
        query + key + value + out,
        2 * query,  # the fp32 sum of the queries' gradient
        flops=split.tokens * seen * width,
        traffic=query + key + value + out,
        cp_bytes=key + value,
        attends=True,
        makes="statistics",
    )


def _attention(shape: DecoderShape, split: Split, reach: int = 0) -> tuple[Op, ...]:
    tokens, hidden = split.tokens, split.part(split.tokens * shape.hidden_size)
    queries = shape.num_attention_heads * shape.head_width / split.tp
    keys = shape.num_key_value_heads * shape.head_width / split.tp
    expanded = queries if split.runtime.repeats_keys else keys
    query, key = (tokens * width * split.element for width in (queries, expanded))
    exchanged = tokens * shape.hidden_size
    core = _core(shape, split, reach, query, key, key, query, 2 * queries)
    if split.runtime.packed:
        positions = ("positions", float(tokens * shape.head_width * split.element))
        masks = () if split.runtime.copies_mixed else (("mask", float(tokens * split.context * split.element)),)
        core = replace(core, saves=(*core.saves, positions, *masks))
    norms: list[Op] = []
    if shape.qk_norm:
        for name, width in (("queries", queries), ("keys", keys)):
            norm = _small_norm(f"{name}_norm", name, width, split, width, width / shape.head_width)
            norms.append(replace(norm, weights=((shape.head_width, 1),)))
    widths = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    bias, back = shape.qkv_bias or shape.attention_bias, {"self_attn.o_proj": float(shape.hidden_size)}
    project = _linear(split, "qkv", ("norm_1", hidden), widths, shape.hidden_size, tokens, exchanged, bias=bias)
    bias = shape.attention_bias
    output = _linear(split, "o", ("mixed", query), back, queries, tokens, exchanged, joins=True, bias=bias)
    return (project, *norms, core, output)


def _small_norm(
    name: str, operand: str, kept_width: float, split: Split, width: float, heads: float = 1, parts: int = 1
) -> Op:
    """As `_norm`, of the first `width` of `kept_width` columns, in `heads` parts with a scale each; tp divides the tokens into
    `parts`."""
    tokens = split.tokens * split.element / parts
    size = 2.0 * tokens * width
    saves: tuple[tuple[str, float], ...] = ((operand, tokens * kept_width),)
    if not split.runtime.fused_norm:
        scales = 4.0 * split.tokens / parts
        wide = ((f"{operand}_wide", scales * width),) if split.element < 4 else saves
        saves = (*wide, (f"{operand}_unit", tokens * width), (f"{operand}_scale", scales * heads))
    return Op(name, saves, size, weights=((width, 1),), traffic=size, makes=name)


def _latent_attention(shape: DecoderShape, split: Split, reach: int = 0) -> tuple[Op, ...]:
    tokens, shard = split.tokens, replace(split, tokens=split.tokens // split.parts)
    heads, query_width = shape.num_attention_heads / split.tp, shape.qk_nope_head_dim + shape.qk_rope_head_dim
    wide = heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    rank, shared = shape.kv_lora_rank, shape.kv_lora_rank + shape.qk_rope_head_dim
    query, value = (tokens * heads * width * split.element for width in (query_width, shape.v_head_dim))

    def linear(name: str, module: str, operand: str, out: float, inner: float, makes: str = "") -> Op:
        """A product of which every rank of tp has the whole weight, of its own tokens; or (`makes`) a part, of all tokens."""
        source, modules = (operand, split.part(tokens * inner)), {f"self_attn.{module}": out}
        rows, gathered = (tokens, tokens * inner) if makes else (shard.tokens, 0)
        return _linear(split, name, source, modules, inner, rows, gathered, makes=makes)

    core = _core(shape, split, reach, query, query, value, value, heads * (query_width + shape.v_head_dim))
    core = replace(core, tp_bytes=_exchanged(split, tokens * shape.qk_rope_head_dim))  # all heads share these of a key
    if split.runtime.copies_mixed and query_width != shape.v_head_dim:  # which no fused attention on a CPU takes
        matrix = tokens * split.context * heads * split.element
        saves = (("query", query), ("key", query), ("value", value), ("probabilities", matrix))
        core = replace(core, saves=saves, scratch=2 * matrix)
    ops, back, joint = list[Op](), {"self_attn.o_proj": float(shape.hidden_size)}, tokens * shape.hidden_size
    if narrow := shape.q_lora_rank:
        ops += [
            linear("query_down", "q_a_proj", "norm_1", narrow, shape.hidden_size),
            _small_norm("query_norm", "query_down", narrow, shard, narrow),
            linear("query_up", "q_b_proj", "query_norm", heads * query_width, narrow, "query"),
        ]
    else:
        ops.append(linear("query_up", "q_proj", "norm_1", heads * query_width, shape.hidden_size, "query"))
    return (
        *ops,
        linear("latent_down", "kv_a_proj_with_mqa", "norm_1", shared, shape.hidden_size),
        _small_norm("latent_norm", "latent", shared, shard, rank),
        linear("latent_up", "kv_b_proj", "latent_norm", wide, rank, "key"),
        core,
        _linear(split, "o", ("mixed", value), back, heads * shape.v_head_dim, tokens, joint, joins=True),
    )


def _mlp(
    shape: DecoderShape,
    split: Split,
    operand: tuple[str, float],
    rows: float,
    width: float,
    prefix: str = "",
    exchanged: float = 0.0,
    count: int = 1,
) -> tuple[Op, ...]:
    """Product, activation, product; `rows` go through `count` experts, or one dense part, of inner width `width`."""
    inner, gated, silu = (prefix + name for name in ("inner", "gated", "silu"))
    wide, expert = width * (2 if shape.gated else 1), prefix == "expert_"
    tall, out = rows * wide * split.element, rows * width * split.element
    unfused = ((silu, out),) if shape.gated and not split.runtime.fused_gate else ()
    part = "mlp.shared_expert" if prefix == "shared_" else "mlp"
    up = {f"{part}.gate_proj": width} if shape.gated else {}
    up, down = {**up, f"{part}.up_proj": width}, {f"{part}.down_proj": float(shape.hidden_size)}
    both: dict[str, Any] = {"count": count, "expert": expert, "bias": shape.mlp_bias}
    return (
        _linear(split, f"{prefix}up", operand, up, shape.hidden_size, rows, exchanged, makes=inner, **both),
        Op(f"{prefix}activation", ((inner, tall), *unfused), tall + out, traffic=tall + out, makes=gated),
        _linear(split, f"{prefix}down", (gated, out), down, width, rows, exchanged, joins=not expert, **both),
    )


def _experts(shape: DecoderShape, split: Split, inner: float, common: float) -> tuple[Op, ...]:
    """Router, shared experts, dispatch, experts of width `inner`, combine; `common`: width of what every token passes.

    Each rank of a tp group routes its own part of the tokens, and a rank's experts receive as many rows as it sends on average.
    Where the ranks of tp divide each expert's inner width (etp = tp), they gather what their experts receive.
    """
    hidden = split.part(split.tokens * shape.hidden_size)
    rows = split.tokens * shape.num_experts_per_tok * split.etp / split.tp
    if split.capacity:
        rows = shape.num_experts * ceil(split.capacity * rows / shape.num_experts)
    local, moved = shape.num_experts // split.ep, rows * shape.hidden_size * split.element
    routing = split.tokens / split.parts * shape.num_experts
    operand = ("norm_2", hidden)
    shared: tuple[Op, ...] = ()
    if width := common / split.tp:
        shared = _mlp(shape, split, operand, split.tokens, width, "shared_", split.tokens * shape.hidden_size)
        if shape.shared_expert_gate:
            name = {"mlp.shared_expert_gate": 1.0}
            gate = _linear(split, "shared_score", operand, name, shape.hidden_size, split.tokens / split.parts)
            shared += (gate, Op("shared_gate", (("shared_outputs", hidden),), 2 * hidden, traffic=3 * hidden))
    matrices = 2 if shape.router == "noisy" else 1
    # logits, probabilities and their gradient's factor in fp32, and a mask
    router = Op(
        "router",
        (operand, ("routing", 13.0 * routing)),
        2 * hidden,
        weights=((shape.num_experts * shape.hidden_size, matrices),),
        flops=2 * routing * shape.hidden_size * matrices,
        traffic=26 * routing,
    )
    exchange = Op(
        "combine",
        gradients=2 * moved,
        traffic=4 * moved,
        tp_bytes=moved * (split.etp - 1) / split.etp,
        ep_bytes=moved / split.etp * (split.ep - 1) / split.ep,
    )
    outputs = (("expert_outputs", moved),) if split.runtime.keeps_outputs else ()
    arrived = (("received", moved),) if split.runtime.segments and split.ep > 1 and local > 1 else ()
    return (
        router,
        *shared,
        replace(exchange, name="dispatch", saves=arrived),
        *_mlp(shape, split, ("dispatched", moved), rows, inner / split.etp, "expert_", count=local),
        replace(exchange, saves=outputs),
    )
