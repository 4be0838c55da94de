"""A trainer's context and report without workers and files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def context(rank: int = 0, world_size: int = 1, flags: int = 0) -> Any:
    """The place of a worker on the CPU that waits for nobody."""
    return SimpleNamespace(
        rank=rank,
        world_size=world_size,
        device=torch.device("cpu"),
        flags=flags,
        waiting=lambda what, phase: contextlib.nullcontext(),
    )


class Notes:
    """A report that keeps what it is told: lines, events of the log, and figures."""

    def __init__(self, root: Path | None = None) -> None:
        self.folder = SimpleNamespace(root=root)
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.given: list[tuple[int, dict[str, Any]]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def record(self, event: str, **figures: Any) -> None:
        self.events.append((event, figures))

    def figures(self, step: int, figures: Any) -> None:
        self.given.append((step, dict(figures)))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def of(self, event: str) -> list[dict[str, Any]]:
        return [figures for kind, figures in self.events if kind == event]
