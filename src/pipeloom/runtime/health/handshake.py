"""The start-up handshake: all ranks of a run compare what they are about to run, and name the difference."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pipeloom.errors import DistributedError
from pipeloom.parallel.mesh import Axis, Mesh
from pipeloom.runtime.assembly import PipelineSpec
from pipeloom.runtime.health.links import RunStore
from pipeloom.runtime.stage_modules import LayerNames

# Options that concern a single rank, and the sizes of micro-batches, which are compared per replica.
_MAY_DIFFER = frozenset({"device", "timeout", "watchdog", "fault", "trace", "microbatch_sizes"})


def digest(value: Any) -> str:
    """A short fingerprint of anything with a stable repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def facts(spec: PipelineSpec, mesh: Mesh) -> dict[str, Any]:
    """Return what the ranks of a mesh must agree on."""
    schedule, options = spec.schedule, spec.options
    terms = {key: t.weight for layer in spec.layers for key, t in LayerNames.of(layer, "").losses.items()}
    replica = f" of replica {mesh.dp.index}" if mesh.dp.size > 1 else ""
    return {
        **source_facts(),
        "mesh": ", ".join(f"{axis} {getattr(mesh.shape, axis)}" for axis in ("pp", "dp", "cp", "tp", "ep", "order")),
        "ranks of the schedule": schedule.ranks,
        "micro-batches": schedule.microbatches,
        "slices of each micro-batch": schedule.slices,
        "placement": list(schedule.placement),
        "schedule": f"{schedule!r} {digest((schedule.codes, schedule.routes, schedule.route_of, schedule.tensors))}",
        "layers": f"{len(spec.names)} {digest(spec.names)}",
        "layers of each stage": [len(layers) for layers in spec.ranges],
        "tied weights": [list(names) for names in spec.tied],
        "losses of layers": terms,
        "ignore_index": spec.ignore_index,
        **{
            f"options.{field.name}": sorted(value) if isinstance(value, frozenset) else value
            for field in fields(options)
            if field.name not in _MAY_DIFFER
            for value in [getattr(options, field.name)]
        },
        f"sizes of the micro-batches{replica}": options.microbatch_sizes and list(options.microbatch_sizes),
    }


def source_facts() -> dict[str, str]:
    """The versions that a run depends on, and a digest of the source of each of Pipeloom's packages."""
    version = sys.modules["pipeloom"].__version__  # importing it by name would be a circle, through `pipeloom.verify`
    versions = f"pipeloom {version}, torch {torch.__version__}, Python {platform.python_version()}"
    return {"versions": versions} | source_digests(Path(__file__).parents[2])


@cache
def source_digests(root: Path) -> dict[str, str]:
    """Return `"source of pipeloom/PACKAGE"` -> digest of the package's files, for the copy of pipeloom at `root`."""
    packages: dict[str, Any] = {}
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.toml"))):
        inner = path.relative_to(root)
        hasher = packages.setdefault("/".join(["pipeloom", *inner.parts[:-1][:1]]), hashlib.sha256())
        hasher.update(f"{inner.as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return {f"source of {name}": hasher.hexdigest()[:12] for name, hasher in packages.items()}


def shake_hands(store: RunStore, everyone: Axis, mine: Mapping[str, Any], seed: int, timeout: float) -> tuple[str, int]:
    """Compare `mine` with that of all ranks of the mesh; return the prefix of this run's keys in the store, and rank 0's seed.

    Raises DistributedError, on every rank, that names what differs between rank 0 and the first rank to disagree, or a rank
    that has not joined within `timeout` seconds.
    """
    run = f"pipeloom/{digest(everyone.ranks)}"
    prefix = f"{run}/{store.add(f'{run}/{everyone.index}', 1)}"
    answers = store.exchange(f"{prefix}/facts", everyone.index, everyone.size, {"facts": mine, "seed": seed}, timeout)
    lines = differences([answer["facts"] for answer in answers])
    if lines:
        raise DistributedError("the ranks disagree:\n" + "\n".join(f"  {line}" for line in lines))
    return prefix, int(answers[0]["seed"])


def differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each fact that two ranks see differently; a fact of one replica is compared among its ranks."""
    lines = []
    for key in dict.fromkeys(key for facts in everyone for key in facts):
        (first, value), *others = [(rank, facts[key]) for rank, facts in enumerate(everyone) if key in facts]
        identity = _digest_of if key == "schedule" else lambda fact: fact
        rank, other = next((each for each in others if identity(each[1]) != identity(value)), (first, value))
        if rank != first:
            lines.append(f"{key}: {value} on rank {first}, {other} on rank {rank}")
    return lines


def _digest_of(schedule: str) -> str:
    """Return the digest behind a schedule's name, which is that of the file that a rank has it from."""
    return schedule.split()[-1]
