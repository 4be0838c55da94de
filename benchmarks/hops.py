"""The time of a hop, read off a measured step."""

from __future__ import annotations

from collections.abc import Sequence

import pipeloom as pl
from pipeloom.schedule.model import parts


def hops(schedule: pl.Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> list[float]:
    """From the end of an action to the start of the one on another rank that was waiting for its message."""
    route = schedule.routes[0]
    places = {
        ("F" if action.kind == "F" else "I", action.stage, action.microbatch): (rank, at)
        for rank, program in enumerate(schedule.programs)
        for at, cell in enumerate(program)
        for action in parts(cell)
        if action.kind != "W"
    }
    needed: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for (kind, stage, microbatch), (rank, at) in places.items():
        position = route.index(stage) + (-1 if kind == "F" else 1)
        if 0 <= position < len(route):
            source, entry = places[kind, route[position], microbatch]
            needed.setdefault((rank, at), []).append((ends[source][entry], source))
    found = []
    for (rank, at), messages in needed.items():
        end, source = max(messages)  # a pair waits for the later of its two
        if at and source != rank and end > ends[rank][at - 1]:
            found.append(starts[rank][at] - end)
    return found
