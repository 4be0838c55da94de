"""Times of messages, collectives and host copies by size, over the axes of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.measure.layer_times import Sample, now
from pipeloom.parallel.collectives import Tag, carrier_of, start_all_gather, start_collective, start_reduce_scatter
from pipeloom.parallel.exchange import all_gather_json
from pipeloom.parallel.mesh import Axis, Mesh

MESSAGE_SIZES = tuple(2**power for power in range(10, 26, 3))  # bytes: 1 KiB to 32 MiB, each eight times the one before
_WARM_UP = 2
_SMALL, _TIMES_MORE = 2**17, 10  # sizes whose time is mostly latency, which varies: they are repeated more often


@dataclass(frozen=True)
class LinkTimes:
    """Seconds of one operation by size.

    Attributes:
        axis: of the mesh: pp, dp, ep or tp; "world": all processes; "host": copies by this process.
        operation: send, all-gather, reduce-scatter, all-to-all or copy.
        ranks: the processes that take part, of the first such group or pair.
        sizes: bytes of the message, of the gathered or scattered tensor, of what each process exchanges, or of the copy.
        seconds: of each size, of the slowest group and process.
    """

    axis: str
    operation: str
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: tuple[Sample, ...]

    @property
    def latency(self) -> float:
        """Return the seconds of the smallest size."""
        return self.seconds[0].median

    @property
    def bandwidth(self) -> float:
        """Return bytes per second, by the difference between the largest and the smallest size."""
        return (self.sizes[-1] - self.sizes[0]) / max(self.seconds[-1].median - self.latency, 1e-12)

    def time(self, size: float) -> float:
        """Return the seconds for `size` bytes, by latency and bandwidth."""
        return self.latency + size / self.bandwidth

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return asdict(self) | {"latency": self.latency, "bandwidth": self.bandwidth}


def copy_times(device: torch.device, repeats: int) -> list[LinkTimes]:
    """Measure copies within the host's memory, or on a GPU between it and pinned memory of the host, both ways."""
    places = {"copy": (torch.device("cpu"),) * 2}
    if device.type == "cuda":
        places = {"copy out": (device, torch.device("cpu")), "copy in": (torch.device("cpu"), device)}
    results = []
    for name, (source, target) in places.items():
        samples = []
        for size in MESSAGE_SIZES:
            a, b = (
                torch.empty(size, dtype=torch.uint8, device=place, pin_memory=source != target and place.type == "cpu")
                for place in (source, target)
            )
            samples.append(Sample.of(_timed(partial(b.copy_, a), device, size, repeats)))
        results.append(LinkTimes("host", name, (), MESSAGE_SIZES, tuple(samples)))
    return results


def link_times(mesh: Mesh | None, device: torch.device, repeats: int) -> list[LinkTimes]:
    """Measure messages between neighbours on the pipeline, and collectives on the other axes of more than one process.

    Collective over all processes; groups of one axis run at the same time, as in training.

    Args:
        mesh: None: all processes are one axis, "world", with both messages and collectives.
    """
    if mesh is None:
        ranks = tuple(range(dist.get_world_size()))
        world = Axis(ranks, dist.get_rank(), dist.group.WORLD)
        axes = {"world": world}
        lines = {"world": world}
    else:
        pipeline = mesh.pipeline
        lines = {"pp": Axis(tuple(pipeline.ranks), pipeline.rank, pipeline.group)}
        axes = {name: getattr(mesh, name) for name in ("dp", "cp", "ep", "tp")}
    rows = [row for name, axis in lines.items() for row in _messages(name, axis, device, repeats)]
    rows += [row for name, axis in axes.items() if axis.size > 1 for row in _collectives(name, axis, device, repeats)]
    return slowest(rows)


def _messages(name: str, axis: Axis, device: torch.device, repeats: int) -> Iterator[LinkTimes]:
    """Yield the times of half a round trip between each two neighbours, on both of them."""
    place = carrier_of(device, axis.group)
    for left in range(axis.size - 1):
        here = axis.index in (left, left + 1)
        samples = []
        for size in MESSAGE_SIZES:
            dist.barrier(axis.group)
            if here:
                buffer = torch.empty(size, dtype=torch.uint8, device=place)
                peer = axis.ranks[2 * left + 1 - axis.index]
                order = (dist.send, dist.recv) if axis.index == left else (dist.recv, dist.send)

                def round_trip(buffer: Any = buffer, peer: int = peer, order: Any = order) -> None:
                    for call in order:
                        call(buffer, peer, group=axis.group, tag=Tag.ROWS)

                samples.append(Sample.of([seconds / 2 for seconds in _timed(round_trip, place, size, repeats)]))
        if here:
            yield LinkTimes(name, "send", axis.ranks[left : left + 2], MESSAGE_SIZES, tuple(samples))


def _collectives(name: str, axis: Axis, device: torch.device, repeats: int) -> Iterator[LinkTimes]:
    """Yield the times of the collectives over one axis, of tensors of fp32."""

    def exchange(x: torch.Tensor) -> Any:
        return start_collective(dist.all_to_all_single, torch.empty_like(x), x, group=axis.group).wait()

    operations: dict[str, tuple[int, Callable[[torch.Tensor], Any]]] = {
        "all-gather": (1, lambda x: start_all_gather(x, axis).wait()),
        "reduce-scatter": (axis.size, lambda x: start_reduce_scatter(x, axis).wait()),
        "all-to-all": (axis.size, exchange),
    }
    for operation, (parts, run) in operations.items():
        samples = []
        for size in MESSAGE_SIZES:
            x = torch.zeros(parts, max(1, size // 4 // axis.size), device=device)
            dist.barrier(axis.group)
            samples.append(Sample.of(_timed(partial(run, x), device, size, repeats)))
        yield LinkTimes(name, operation, axis.ranks, MESSAGE_SIZES, tuple(samples))


def _timed(call: Callable[[], Any], device: torch.device, size: int, repeats: int) -> list[float]:
    """Return the seconds of `repeats` calls, of more for a small size, after two that warm up."""
    seconds = []
    for _ in range(_WARM_UP + repeats * (_TIMES_MORE if size < _SMALL else 1)):
        began = now(device)
        call()
        seconds.append(now(device) - began)
    return seconds[_WARM_UP:]


def slowest(rows: Sequence[LinkTimes]) -> list[LinkTimes]:
    """Return one row per axis, operation and, of messages, pair on the axis: for each size the slowest of all processes.

    Collective.
    """
    merged: dict[tuple[str, str, int], LinkTimes] = {}
    for process in all_gather_json([asdict(row) for row in rows], dist.group.WORLD):
        for form in process:
            samples = tuple(Sample(*each) for each in form["seconds"])
            row = LinkTimes(form["axis"], form["operation"], tuple(form["ranks"]), tuple(form["sizes"]), samples)
            key = row.axis, row.operation, min(row.ranks) if row.operation == "send" else 0
            other = merged.get(key, row)
            merged[key] = replace(other, seconds=tuple(map(max, other.seconds, row.seconds)))
    return list(merged.values())
