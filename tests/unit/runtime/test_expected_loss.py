"""The receive of a loss that is opened before the step: once, from the rank that knows it, and taken by the next step."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import pipeloom
from pipeloom import schedules as S
from pipeloom.parallel.collectives import Tag
from pipeloom.runtime.health.report import FailureReporter
from pipeloom.runtime.health.status import Status
from pipeloom.runtime.loss import LossBroadcast, LossSum
from pipeloom.schedule.model import Schedule

ONE, OTHER = S.one_f_one_b(2, 2), S.zbv(2, 2)  # rank 1 knows the loss, and rank 0


class Group:
    """A process group whose receives are filled when they are waited for, with 1, 2, ... in the order of their opening."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        self.opened.append((source, tag))
        number = len(self.opened)
        return SimpleNamespace(wait=lambda: tensors[0].fill_(number))


def broadcast(group: Group, rank: int = 0, schedule: Schedule = ONE) -> LossBroadcast:
    line = SimpleNamespace(group=group, ranks=(0, 1), rank=rank)
    mesh: Any = SimpleNamespace(
        pipeline=line, everyone=SimpleNamespace(size=2, group=group), tp=SimpleNamespace(index=0)
    )
    return LossBroadcast(mesh, schedule, torch.device("cpu"), FailureReporter(Status(rank)))


def test_a_step_takes_the_receive_that_was_opened_before_it() -> None:
    group = Group()
    losses = broadcast(group)
    for step in (1, 2):
        losses.expect()
        assert group.opened == [(1, Tag.LOSS)] * step
        assert float(losses.start(LossSum()).wait()) == step
        assert len(group.opened) == step


def test_a_receive_that_a_failed_step_leaves_open_is_taken_by_the_next() -> None:
    group = Group()
    broadcast(group).expect()
    losses = broadcast(group)  # of another pipeline, too
    losses.expect()
    assert len(group.opened) == 1
    assert float(losses.start(LossSum()).wait()) == 1


def test_a_receive_from_another_rank_is_not_taken() -> None:
    group = Group()
    broadcast(group, rank=1).expect()
    assert group.opened == []  # rank 1 knows the loss itself
    broadcast(group, rank=1, schedule=OTHER).expect()
    broadcast(group).expect()
    assert [source for source, _ in group.opened] == [0, 1]


def test_no_module_makes_up_a_tag() -> None:
    """Two modules chose 16: a receive of a loss, opened early, took the header of a gradient."""
    source = Path(pipeloom.__file__).parent
    literal = []
    for path in source.rglob("*.py"):
        text = path.read_text()
        if not re.search(r"\btag=|_TAG\b|\b(i?send|i?recv)\(", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                tags = [word.value for word in node.keywords if word.arg == "tag"]
                tags += node.args[2:3] if node.func.attr in {"send", "recv", "isend", "irecv"} else []
                literal += [path.name for tag in tags if isinstance(tag, (ast.Constant, ast.BinOp))]
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                literal += [
                    path.name for name in node.targets if isinstance(name, ast.Name) and name.id.endswith("_TAG")
                ]
    assert literal == []
