"""A model's layers and the links between processes, measured on this device, and the costs of a layout's stages from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.config import Layout
from pipeloom.measure.layer_bytes import layer_bytes
from pipeloom.measure.layer_times import LayerTimes, SegmentTimes, layer_times, segment_times
from pipeloom.measure.link_times import LinkTimes, copy_times, link_times
from pipeloom.parallel.mesh import Mesh
from pipeloom.plan.memory import bytes_with
from pipeloom.plan.run import boundary_bytes, layout_messages, layout_of, runtime_of, with_messages
from pipeloom.schedule import Costs, Timeline, simulate
from pipeloom.schedule.timeline import MESSAGES
from pipeloom.schedule.transforms import half_split, recompute
from pipeloom.shapes.cut import spans
from pipeloom.shapes.layers import whole_layers
from pipeloom.shapes.stage_bytes import LayerBytes

KINDS = {"forward": "F", "input_grad": "I", "weight_grad": "W", "backward": "B", "recompute": "R"}
"""Time in `Costs` -> the action that takes it."""


@dataclass(frozen=True)
class DeviceProfile:
    """Everything measured: each kind's times, each layer's bytes, a block's segments (None: no experts), links and copies."""

    device: str
    layers: Sequence[LayerTimes]
    bytes: Sequence[LayerBytes]
    segments: SegmentTimes | None
    links: Sequence[LinkTimes]


def profiled(
    layout: Layout, device: torch.device, repeats: int, waiting: Callable[[str, str], AbstractContextManager[None]]
) -> DeviceProfile:
    """Measure in this process; collective, since all processes measure at once, as they would train.

    Args:
        waiting: (what the process waits for, phase) -> context in which it does, as that of a watchdog.
    """
    links = copy_times(device, repeats)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes > 1:
        with waiting("links to be measured", "measurement"):
            mesh = Mesh.of(layout.mesh) if layout.world_size == processes else None
            links += link_times(mesh, device, repeats)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, threads: {torch.get_num_threads()}"
    with waiting("layers to be measured", "measurement"):
        sizes = split_layer_bytes(layout)
        parts = (part for each in sizes for part in each.parts if "+" not in part)
        names = list(dict.fromkeys(parts))  # in the order of their first calls
        times = layer_times(layout, device, repeats, names if layout.config.train.compile == "none" else ())
        return DeviceProfile(name, times, sizes, segment_times(layout, device, repeats), links)


def predicted_costs(layout: Layout, layers: Sequence[LayerBytes], device: str = "") -> Costs:
    """Return costs with the bytes of each stage, for the largest micro-batch; the times are equal.

    "messages" are the most of the rank, at the first of its stages. Those in memory that CPU ranks share are not torch's.

    Args:
        device: type of the stages' device; default: as configured.
    """
    messages = [0.0] * layout.schedule.stages
    for stages, sizes in zip(layout.schedule.stages_of, layout_messages(layout, device), strict=True):
        messages[stages[0]] = sizes.most
    costs = _costs(layout, layers)
    return replace(costs, bytes=dict(costs.bytes) | {MESSAGES: tuple(messages)})


def _costs(layout: Layout, layers: Sequence[LayerBytes]) -> Costs:
    """Return costs with the bytes of each stage, without messages."""
    of_stage, largest = spans(layout.schedule, layout.stage_layers), max(layout.microbatch_sizes)
    whole = whole_layers(layout.config.model.shape(), 1)
    groups = [whole[start:end] for start, end in of_stage]
    measured = [layers[start:end] for start, end in of_stage]
    trained = [sum(layer.trained for layer in stage) for stage in measured if layout.config.lora.r]
    sizes = bytes_with(measured, layout.schedule, layout_of(layout), groups, runtime_of(layout.config, None), trained)
    factors = tuple(size / largest for size in layout.microbatch_sizes)
    costs = Costs(microbatch=factors, bytes=sizes)
    return costs if layout.cuts is None else layout.cuts.costs(costs)


def predicted_timeline(layout: Layout, layers: Sequence[LayerBytes]) -> Timeline:
    """Return the step with the bytes of whole layers, one of each kind given."""
    return with_messages(layout, simulate(layout.schedule, _costs(layout, layers)))


def split_layer_bytes(layout: Layout) -> Sequence[LayerBytes]:
    """Return `layer_bytes` with what W reads, whether or not the layout's schedule splits backwards."""
    return layer_bytes(replace(layout, schedule=half_split(layout.schedule)))


def searched_bytes(layout: Layout, layers: Sequence[LayerBytes], device: str) -> Costs:
    """Return `predicted_costs` for schedules on the layout's stages that may recompute: whole stages, their parts, or in blocks.

    A micro-batch in blocks holds the input of each layer, so that counts as what is held in any case.

    Args:
        device: type of the stages' device.
    """
    schedule = half_split(layout.schedule)
    some = recompute(schedule, actions=[(stage, 0) for stage in range(schedule.stages)])
    return predicted_costs(replace(layout, schedule=some), layers, device)


def measured_costs(layout: Layout, profile: DeviceProfile) -> Costs:
    """Return `Costs` of the layout's stages, in seconds and bytes: sums over their layers; a hop is the slowest message, and a
    copy to host memory or back takes as long as the slower of both.
    """
    by_number = {number: each.seconds for each in profile.layers for number in each.layers}
    of_layer = [by_number[number] for number in sorted(by_number)]

    def of_stages(kind: str) -> tuple[float, ...]:
        of_stage = spans(layout.schedule, layout.stage_layers)
        return tuple(sum(each[kind].median for each in of_layer[slice(*span)]) for span in of_stage)

    times: dict[str, Any] = {name: of_stages(kind) for name, kind in KINDS.items()}
    letters = sorted({kind for seconds in of_layer for kind in seconds if kind.startswith("R:")})
    times["parts"] = {letter.removeprefix("R:"): of_stages(letter) for letter in letters}
    if sends := [link for link in profile.links if link.operation == "send"]:
        times |= {"p2p": max(link.latency for link in sends), "bandwidth": min(link.bandwidth for link in sends)}
    if copies := [link.bandwidth for link in profile.links if link.axis == "host"]:
        times["host_bandwidth"] = min(copies)
    sizes = searched_bytes(layout, profile.bytes, "cpu" if profile.device.startswith("cpu") else "cuda")
    return replace(sizes, **times, message=float(max(boundary_bytes(layout))))
