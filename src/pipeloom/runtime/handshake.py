"""The start-up handshake: all ranks of a run compare what they are about to run, and name the difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.errors import DistributedError
from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.runtime.options import RuntimeOptions
from pipeloom.schedule.model import Schedule


def digest(value: Any) -> str:
    """A short fingerprint of anything with a stable repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def facts(
    schedule: Schedule,
    layers: Sequence[str],
    stages: Sequence[int] | None,
    tied: Sequence[Sequence[str]],
    options: RuntimeOptions,
    mesh: Mesh,
) -> dict[str, Any]:
    """What the ranks of a mesh must agree on; `layers` are the names of the model's layers."""
    from pipeloom import __version__

    replica = f" of replica {mesh.place.dp}" if mesh.shape.dp > 1 else ""
    return {
        "versions": f"pipeloom {__version__}, torch {torch.__version__}",
        "mesh": f"pp {mesh.shape.pp}, dp {mesh.shape.dp}, tp {mesh.shape.tp}, ep {mesh.shape.ep}",
        "ranks of the schedule": schedule.ranks,
        "micro-batches": schedule.microbatches,
        "placement": list(schedule.placement),
        "schedule": f"{schedule!r} {digest((schedule.codes, schedule.routes, schedule.route_of))}",
        "layers": f"{len(layers)} {digest(list(layers))}",
        "layers of each stage": None if stages is None else list(stages),
        "tied weights": [list(names) for names in tied],
        "transport": f"{options.transport}, overlap_p2p {options.overlap_p2p}",
        "receive depth": options.receive_depth,
        "shapes": options.shapes,
        "recompute": sorted(options.recompute) if isinstance(options.recompute, frozenset) else options.recompute,
        "head deferral": options.head_deferral,
        f"sizes of the micro-batches{replica}": options.microbatch_sizes and list(options.microbatch_sizes),
    }


def shake_hands(everyone: Axis, mine: Mapping[str, Any], timeout: float) -> str:
    """Compares `mine` with that of all ranks of the mesh; returns the prefix of this run's keys in the store.

    Raises DistributedError that names a difference, or a rank that has not come within `timeout` (at most 60) seconds.
    """
    store = dist.distributed_c10d._get_default_store()
    own = f"pipeloom/{digest(everyone.ranks)}"
    prefix = f"{own}/{store.add(f'{own}/{everyone.index}', 1)}"
    compare(store, prefix, everyone.index, everyone.size, mine, min(timeout, 60.0))
    return prefix


def compare(store: Any, prefix: str, rank: int, ranks: int, mine: Mapping[str, Any], timeout: float) -> None:
    """Raises DistributedError, on every rank, that names what differs between rank 0 and the first rank to disagree.

    A rank that does not come within `timeout` seconds is named too.
    """
    store.set(f"{prefix}/facts/{rank}", json.dumps(mine))
    everyone = []
    for other in range(ranks):
        key = f"{prefix}/facts/{other}"
        try:
            store.wait([key], timedelta(seconds=timeout))
        except RuntimeError:
            raise DistributedError(
                f"rank {rank}: rank {other} has not come to the handshake within {timeout:g} s"
            ) from None
        everyone.append(json.loads(store.get(key)))
    differences = _differences(everyone)
    if differences:
        raise DistributedError("the ranks do not agree:\n" + "\n".join(f"  {line}" for line in differences))


def _differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each fact that two ranks see differently; a fact of one replica is compared among its ranks."""
    lines = []
    for key in dict.fromkeys(key for facts in everyone for key in facts):
        told = [(rank, facts[key]) for rank, facts in enumerate(everyone) if key in facts]
        first, value = told[0]
        other = next(((rank, theirs) for rank, theirs in told if theirs != value), None)
        if other is not None:
            lines.append(f"{key}: {value} on rank {first}, {other[1]} on rank {other[0]}")
    return lines
