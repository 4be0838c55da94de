"""Time of a step: the operations of each stage on a device, their exchanges, and the schedule that orders them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from importlib import resources
from operator import add
from typing import Any

from pipeloom.errors import UsageError, did_you_mean
from pipeloom.plan.layout import GRAD_BYTES, PlannedLayout
from pipeloom.schedule import Costs, Timeline
from pipeloom.schedule.actions import TIMES, WEIGHT_GRADIENT
from pipeloom.schedule.segments import LayerSegments, PhaseTimes, length, run_block
from pipeloom.shapes.decoder import DecoderShape
from pipeloom.shapes.ops import LayerOps, Op, Runtime

# Share of a device's processors that an exchange beside computation takes: 20 of 132 (arXiv 2412.19437, section 3.2.2).
EXCHANGE_SHARE = 20 / 132
# Bytes of memory traffic a parameter of a rank, sharded or not, once a step: gradients are zeroed, scaled and read for a norm,
# gathered weights are copied. From the seven steps of `benchmarks/planbench/fit.json`: their part that m does not change.
WHOLE_TRAFFIC = 40.0


@dataclass(frozen=True)
class Device:
    """A kind of accelerator and the links of its node; rates are in bytes per second and direction, of data sheets.

    Attributes:
        source: of the figures.
        flops: bf16 operations per second.
        memory: bytes that the driver offers.
        bandwidth: of its memory.
        link: of one device to the others of its node together; pair: to one of them.
        network: of one device to other nodes, its port.
        host_link: to its host.
        per_node: devices of a node.
        efficiency: share of `flops` that large products reach.
        link_share, network_share: shares of the rates that a collective reaches within and between nodes.
        memory_share: share of `bandwidth` that an elementwise operation reaches.
        attention_share, grouped_share: shares of a product's rate that fused attention and grouped products reach.
        half_rate_side: a product of which one side is this long runs at half of the rate of a large one.
        latency: seconds of a collective, whatever its size; launch: of an operation.
        host: seconds of a step in which devices wait for their hosts: batches, norms of gradients, logs.
    """

    name: str
    source: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    pair: float
    network: float
    host_link: float
    per_node: int
    efficiency: float
    link_share: float
    network_share: float
    memory_share: float
    attention_share: float
    grouped_share: float
    half_rate_side: float
    latency: float
    launch: float
    host: float

    @property
    def elementwise(self) -> float:
        """Bytes per second that an elementwise operation reads and writes."""
        return self.memory_share * self.bandwidth

    @property
    def port(self) -> float:
        """Bytes per second that a collective, or a message, moves to other nodes."""
        return self.network_share * self.network

    def with_links(self, factor: float) -> Device:
        """This device with links and ports of so many times the rate."""
        return replace(self, link=factor * self.link, pair=factor * self.pair, network=factor * self.network)

    def within(self, size: int) -> float:
        """Bytes per second of a collective of so many devices of a node: over their links to each other."""
        return min(self.link_share * self.link, self.network_share * self.pair * max(1, size - 1))


def devices() -> dict[str, dict[str, Any]]:
    """Name -> data sheet of the devices that are known by name, with what all have in common."""
    sheets = json.loads(resources.files("pipeloom.plan").joinpath("devices.json").read_text())
    return {name: sheets["common"] | sheet for name, sheet in sheets["devices"].items()}


def device(name: str) -> Device:
    """The device called `name`. Raises UsageError with the nearest names."""
    known = devices()
    if name.lower() not in known:
        raise UsageError(f"--device {name!r:.100} is not known{did_you_mean(name.lower(), known)}")
    sheet = known[name.lower()]
    return Device(name.lower(), memory=sheet.pop("gib") * 2**30, **sheet)


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch on one stage; of F and I, `sent_forward` and `sent_backward` are communication.

    `exchanged` is the time for which rows go to experts on other ranks and back, of F, and as much of I; `beside_forward` and
    `beside_backward` are those parts of it that chunks of the tokens hide. `backward` is that of a B where it is not I and W,
    `recompute` that of the R of a block (R;B) where it is not F.
    """

    forward: float
    input_grad: float
    weight_grad: float
    sent_forward: float
    sent_backward: float
    exchanged: float = 0.0
    beside_forward: float = 0.0
    beside_backward: float = 0.0
    backward: float | None = None
    recompute: float | None = None

    def times(self, factor: float) -> StageSeconds:
        """With all seconds multiplied."""
        return StageSeconds(*(value and factor * value for value in astuple(self)))

    def scaled(self, forward: float, backward: float) -> StageSeconds:
        """With the seconds of F, and those of I and W, multiplied; without those of B and R."""
        sent, least = (self.sent_forward * forward, self.sent_backward * backward), min(forward, backward)
        talks = (least * each for each in (self.exchanged, self.beside_forward, self.beside_backward))
        gradients = self.input_grad * backward, self.weight_grad * backward
        return StageSeconds(self.forward * forward, *gradients, *sent, *talks)

    @classmethod
    def sum(cls, each: Sequence[StageSeconds]) -> StageSeconds:
        """The seconds of several layers, without those of B and R."""
        return cls(*map(sum, zip(*(astuple(layer)[:8] for layer in each), strict=True)))

    @property
    def total(self) -> float:
        """Seconds of F, I and W."""
        return self.forward + self.input_grad + self.weight_grad

    def hidden(self, other: StageSeconds, *, split: bool = False) -> float:
        """Seconds by which a pair, F of this stage and B of another (I if `split`), is shorter than both one after the other.

        Exchanges run beside the other half's computation, and take some of the device's processors from it.
        """
        exchanged = self.exchanged + other.exchanged
        stands = exchanged - self.beside_forward - other.beside_backward
        seconds = self.forward + other.input_grad + (0.0 if split else other.weight_grad)
        return hidden_by_pairs(seconds, exchanged, stands)


def hidden_by_pairs(seconds: float, exchanged: float, stands: float) -> float:
    """Return by how much pairs are shorter than `seconds`, of which exchanges that nothing else hides take `stands`."""
    return min((1 - EXCHANGE_SHARE) * stands, seconds - exchanged)


@dataclass(frozen=True)
class AxisRates:
    """Rates in bytes per second of a group's exchange, by axis: within a node, or between nodes where the axis leaves it.

    `pp` is that of a message between pipeline ranks of one node, `away` that to the next node (both, where all leave it). A rank
    has `devices`, at most those of a node, which has `per_node`. `latency` is in seconds. `inside` is the share of an
    exchange with experts that is its hop inside a node, where it has another between nodes.
    """

    tp: float
    ep: float
    cp: float
    dp: float
    pp: float
    away: float
    devices: int
    per_node: int
    latency: float
    inside: float = 0.0

    @classmethod
    def of(cls, layout: PlannedLayout, device: Device, shape: DecoderShape, ep_nodes: int = 0) -> AxisRates:
        """tp is the fastest axis, then cp and ep, dp, pp.

        A group's rings leave a node through the port of each device of it there, and are no faster than the node's links.

        Args:
            ep_nodes: nodes to each of which a token is sent once; 1: to each expert by itself; 0: as many as experts are on.
        """

        def rate(size: int, stride: int) -> float:
            inside = max(1, min(size, device.per_node // stride))
            across = math.inf if size * stride <= device.per_node else inside * device.port
            return min(device.within(inside), across)

        devices = min(device.per_node, layout.tp * layout.cp * layout.dp)
        experts, inside = _expert_rate(layout, device, shape, ep_nodes)
        return cls(
            rate(layout.tp, 1),
            experts,
            rate(layout.cp, layout.tp),
            rate(layout.dp * layout.cp, layout.tp),
            device.within(2) if 2 * devices <= device.per_node else device.port,
            device.port,
            devices,
            device.per_node,
            device.latency,
            inside,
        )


def expert_nodes(layout: PlannedLayout, device: Device) -> int:
    """The number of nodes that the ranks of an ep group are on; of one node they stand `tp` apart unless experts are whole."""
    return -(-layout.ep // max(1, device.per_node // (1 if layout.etp == 1 else layout.tp)))


def _expert_rate(layout: PlannedLayout, device: Device, shape: DecoderShape, ep_nodes: int) -> tuple[float, float]:
    """Return the bytes of rows sent to experts on other ranks per second, and the share of that time inside a node.

    Between nodes a token is sent once to each that holds one of its experts (of k experts spread over n nodes
    n (1 - (1 - 1/n)^k)), and from there to the ranks; node-limited routing lets fewer nodes hold them. In one level each of its
    rows is sent by itself, through links and port at once.
    """
    ep, on, experts = layout.ep, expert_nodes(layout, device), shape.num_experts_per_tok
    nodes, within = ep_nodes or on, device.within(-(-ep // on))
    if on == nodes == 1 or not experts:
        return within, 0.0
    port = device.port if on > 1 else within
    if nodes == 1:
        inside = ep / on
        return (ep - 1) / max((ep - inside) / port, (inside - 1) / within), 0.0
    inside, reached = ep / nodes, max(1.0, nodes * shape.topk_group / shape.n_group)
    across = reached * (1 - (1 - 1 / reached) ** experts) / experts * (nodes - 1) / nodes / port
    hop = (inside - 1) / inside / within
    return (ep - 1) / ep / (across + hop), hop / (across + hop)


def gathers_by_microbatch(layout: PlannedLayout, runtime: Runtime) -> bool:
    """Return whether sharded weights are gathered for every micro-batch (ZeRO-3; not by `fully_shard` in a pipeline)."""
    return layout.pp == 1 if runtime.sharded else layout.zero == 3


def stage_times(
    layers: Sequence[LayerOps], layout: PlannedLayout, runtime: Runtime, device: Device, links: AxisRates
) -> StageSeconds:
    """Sum the layers of a stage.

    A product takes the larger of its operations over the rate that its shortest side allows and of its bytes over the memory's
    rate; an exchange takes its bytes over the link's rate. Backward: two products for each of the forward, one of them I's and
    one W's; exchanges and elementwise work belong to I. What is recomputed adds its forward to I. Gathers of sharded weights
    run beside the layer before, and take time as far as they are longer than a layer. In chunks of the tokens, exchanges with
    experts run beside the experts of other chunks (`run_block`), and each chunk has launches and latencies of its own.
    """
    sums = [0.0] * 8
    for layer in layers:
        times = _layer_times(layer, layout, runtime, device, links)
        if gathers_by_microbatch(layout, runtime):
            replicas = layout.dp * layout.cp
            gather = _seconds(
                runtime.element * sum(layer.parameters) * (replicas - 1) / replicas, links.dp, links.latency
            )
            waits = max(0.0, gather - times[0]), max(0.0, 3 * gather - times[1] - times[2])
            times = tuple(map(add, times, (*waits, 0.0, *waits, 0.0, 0.0, 0.0)))
        sums = [total + each for total, each in zip(sums, times, strict=True)]
    return StageSeconds(*sums)


def _layer_times(
    layer: LayerOps, layout: PlannedLayout, runtime: Runtime, device: Device, links: AxisRates
) -> tuple[float, ...]:
    """The fields of `StageSeconds` for one layer whose weights are there."""
    forward = input_grad = weight_grad = sent_forward = sent_backward = exchanged = 0.0
    experts, beside = [0.0, 0.0], [0.0, 0.0]  # of F and I
    chunks = layout.ep_chunks if layout.ep > 1 else 1
    whole = bool(layer.dropped) and layer.dropped == layer.tensors.keys()  # a whole block repeats its exchanges too
    for op in layer.ops:
        parts = chunks if op.name.startswith("expert_") else 1
        product = parts * _product_seconds(op, runtime.element, device, parts)
        elementwise = op.traffic / device.elementwise + parts * device.launch
        to_experts = chunks * _seconds(op.ep_bytes / chunks, links.ep, links.latency)
        sent = _seconds(op.tp_bytes, links.tp, links.latency)
        if runtime.overlaps_exchange:  # all parts but the first, or the last
            sent -= min((1 - 1 / layout.tp) * sent, product)
        sent += to_experts
        sent += _seconds(op.cp_bytes * (layout.cp - 1), links.cp, links.latency)
        before = input_grad
        forward += product + elementwise + sent
        sent_forward += sent
        exchanged += to_experts
        # fused attention computes its scores again: 5 products for 2
        if op.carries:
            input_grad += product * (2.5 if op.attends else 1.0) + 2 * elementwise + sent
            sent_backward += sent
        if op.deferred:
            weights = sum(size * count for size, count in op.weights)
            weight_grad += max(product, 8 * weights / device.elementwise)
        if whole or op.makes in layer.dropped - layer.copied:
            input_grad += product + elementwise + sent * whole
            sent_backward += sent * whole
        if op.name.startswith("expert_"):
            again = whole * (product + elementwise)  # before the backward begins
            experts = [experts[0] + product + elementwise, experts[1] + input_grad - before - again]
    if chunks > 1 and exchanged:
        beside = [_hidden_in_chunks(exchanged / 2, each, chunks, links.inside) for each in experts]
        again = beside[0] * whole
        forward -= (1 - EXCHANGE_SHARE) * beside[0]
        input_grad -= (1 - EXCHANGE_SHARE) * (beside[1] + again)
        sent_forward, sent_backward = sent_forward - beside[0], sent_backward - beside[1] - again
    copies = sum(layer.tensors[name] for name in layer.copied) / device.host_link  # beside the computation
    return (
        max(forward, copies),
        max(input_grad, copies - weight_grad),
        weight_grad,
        sent_forward,
        sent_backward,
        exchanged,
        *beside,
    )


def _hidden_in_chunks(talk: float, experts: float, chunks: int, inside: float) -> float:
    """Return the seconds of a layer's dispatch and combine that run beside its experts, or beside each other.

    Args:
        talk: seconds of each of them, of all chunks together, as those of the experts; `inside` is the share of it inside a node.
    """
    parts, hops = (PhaseTimes(0.0, 0.0, 0.0), PhaseTimes(experts, 0.0, 0.0)), ((1 - inside) * talk,) * 2
    block = run_block([LayerSegments(*parts, *hops, inside=inside * talk, chunks=chunks)], ())
    return 2 * talk + experts - length(block)


def _seconds(size: float, rate: float, latency: float) -> float:
    return size / rate + latency if size else 0.0


def _product_seconds(op: Op, element: int, device: Device, parts: int = 1) -> float:
    """Return the seconds of a product, or of one of several parts of its rows."""
    if not op.flops:
        return 0.0
    rate = device.flops * device.efficiency
    if op.attends:
        return op.flops / (rate * device.attention_share)
    (size, count), *_ = op.weights
    flops = op.flops / parts
    rows = flops / (2 * size * count)  # of one expert, or of all tokens
    side = min(rows, math.sqrt(size))
    share = side / (side + device.half_rate_side) * (device.grouped_share if op.expert else 1.0)
    return max(flops / (rate * share), element * size * count / device.elementwise)


def costs(times: Sequence[StageSeconds], layout: PlannedLayout, row: float, links: AxisRates) -> Costs:
    """`Costs` in seconds; a message is a micro-batch's activations between two stages, divided by tp; `row`: bytes of a token.

    Where some hops leave a node, the time that their messages (of a slice of mean size) take longer is in their latency.
    """
    names = [spec.name for spec in fields(StageSeconds) if spec.name in TIMES]
    rows = {name: tuple(getattr(each, name) for each in times) for name in names}
    given: dict[str, Any] = {name: values for name, values in rows.items() if None not in values}
    message = layout.micro_batch * layout.seq / layout.cp * row / layout.tp
    p2p: Any = links.latency
    if 2 * links.devices <= links.per_node < links.devices * layout.pp:
        later = message / layout.slices * (1 / links.away - 1 / links.pp)
        size, node, ranks = links.devices, links.per_node, range(layout.pp)
        leaves = [[min(a, b) * size // node < ((max(a, b) + 1) * size - 1) // node for b in ranks] for a in ranks]
        p2p = tuple(tuple(links.latency + later * each for each in row) for row in leaves)
    return Costs(**given, p2p=p2p, message=message, bandwidth=links.pp)


def with_pairs(costs: Costs, times: Sequence[StageSeconds]) -> Costs:
    """The costs with the times of overlapped pairs."""
    whole = tuple(tuple(a.forward + (b.input_grad + b.weight_grad) - a.hidden(b) for b in times) for a in times)
    split = tuple(tuple(a.forward + b.input_grad - a.hidden(b, split=True) for b in times) for a in times)
    return replace(costs, pair=whole, pair_split=split)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the mean rank, by what they are spent on; their sum is the step.

    Attributes:
        compute: products and elementwise work, what is recomputed included.
        exchange: collectives of tp, cp and ep; of those to experts, overlapped pairs hide a part.
        idle: the pipeline's bubble.
        reduction: of gradients over the replicas, and gathering of weights, as far as they are not hidden.
        optimizer: its step.
        host: devices wait for their hosts.
    """

    compute: float
    exchange: float
    idle: float
    reduction: float
    optimizer: float
    host: float

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Name -> seconds."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}


def busy_parts(
    busy: float, stages: Sequence[StageSeconds], microbatches: float, ranks: int, paired: bool
) -> tuple[float, float]:
    """(compute, exchange that is not hidden) in seconds of the mean rank, which is busy for so long.

    Args:
        stages: of all ranks; microbatches: in sizes of the largest.
        paired: the schedule has overlapped pairs.
    """
    work = sum(each.total for each in stages)
    sent = sum(each.sent_forward + each.sent_backward for each in stages)
    compute = (work * microbatches / ranks if paired else busy) * (1 - sent / work)
    return compute, busy - compute


def state_seconds(
    shared: float, experts: float, layout: PlannedLayout, runtime: Runtime, device: Device, links: AxisRates
) -> tuple[float, float, float]:
    """Seconds of (the sum of gradients, the gather of weights, the optimizer) of so many parameters.

    A ring moves (n - 1) / n of the gradients, and as much of the bf16 weights. The optimizer reads and writes 16 bytes a
    parameter of its shard, and reads the gradient twice more for its norm and its clipping; beside that, `WHOLE_TRAFFIC`.
    """
    replicas = layout.dp * layout.cp
    moved = traffic = 0.0
    for count, ranks in ((shared, replicas), (experts, layout.expert_replicas)):
        moved += 0.0 if gathers_by_microbatch(layout, runtime) else count * (ranks - 1) / ranks
        traffic += (40 / (ranks if layout.zero or runtime.sharded else 1) + WHOLE_TRAFFIC) * count
    sums, gathers = (
        _seconds(moved * size, links.dp, links.latency) for size in (GRAD_BYTES[layout.grads], runtime.element)
    )
    return sums, gathers, traffic / device.elementwise


def exposed(timeline: Timeline, of_stage: Sequence[tuple[float, float, int]]) -> float:
    """Seconds by which sums of gradients and gathers of weights, on a stream of their own, make a step longer.

    A stage's gradients are summed layer by layer from its last backward on, its weights gathered so before its first forward.

    Args:
        of_stage: seconds of the sums and of the gathers, and the number of layers.
    """
    late = early = 0.0
    schedule = timeline.schedule
    stride, none = schedule._kind_stride, schedule._no_action
    forwards = [kind.is_forward and not kind.vocabulary for kind in schedule.kinds]
    weights = [WEIGHT_GRADIENT in kind.produces for kind in schedule.kinds]
    for rank, (starts, ends) in enumerate(zip(timeline.starts, timeline.ends, strict=True)):
        first: dict[int, tuple[float, float]] = {}
        last: dict[int, tuple[float, float]] = {}
        for code, backward, start, end in zip(*schedule._split_entries(rank), starts, ends, strict=True):
            for each in (code,) if backward == none else (code, backward):
                number, place = divmod(each, stride)
                if forwards[number]:
                    first.setdefault(place // schedule.units, (start, end))
                if weights[number]:
                    last[place // schedule.units] = start, end
        summed = gathered = 0.0
        for stage, (start, end) in sorted(last.items(), key=lambda each: each[1]):
            sums, _, layers = of_stage[stage]
            summed = max(max(summed, start + (end - start) / layers) + sums, end + sums / layers)
        for stage, (start, end) in sorted(first.items(), key=lambda each: each[1]):
            _, gathers, layers = of_stage[stage]
            early = max(early, gathered + gathers / layers - start)
            gathered += gathers
            early = max(early, gathered - end + (end - start) / layers)
        late = max(late, summed)
    return early + max(0.0, late - timeline.makespan)
