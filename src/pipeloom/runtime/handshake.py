"""The start-up handshake: all ranks of a pipeline compare what they are about to run, and name the difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from pipeloom.errors import DistributedError
from pipeloom.schedule.model import Schedule


def digest(value: Any) -> str:
    """A short fingerprint of anything with a stable repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def schedule_facts(schedule: Schedule) -> dict[str, Any]:
    """What ranks must agree on about a schedule."""
    return {
        "ranks of the schedule": schedule.ranks,
        "micro-batches": schedule.microbatches,
        "placement": list(schedule.placement),
        "schedule": f"{schedule!r} {digest((schedule.codes, schedule.routes, schedule.route_of))}",
    }


def compare(store: Any, prefix: str, rank: int, ranks: int, facts: Mapping[str, Any], timeout: float) -> None:
    """Raises DistributedError, on every rank, that names what differs between rank 0 and the first rank to disagree.

    A rank that does not come within `timeout` seconds is named too.
    """
    store.set(f"{prefix}/facts/{rank}", json.dumps(facts))
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
    first = everyone[0]
    lines = []
    for key in {**first, **everyone[-1]}:
        for rank, facts in enumerate(everyone):
            if facts.get(key) != first.get(key):
                lines.append(f"{key}: {first.get(key)} on rank 0, {facts.get(key)} on rank {rank}")
                break
    return lines
