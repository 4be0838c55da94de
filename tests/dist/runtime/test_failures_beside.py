"""What happens when an action beside the computation raises, stops or never ends: it is named, and every rank ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from dying import End, run_until_dead
from models import batch, blocks, mse
from pipeloom.config.fault import parse_fault
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.zero import StageShards
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.runtime.spread_vocabulary import SpreadVocabulary, vocabulary_share
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families import build
from pipeloom.schedule.transforms import transformed
from pipeloom.shapes.mesh import MeshShape

pytestmark = pytest.mark.core

VOCABULARY, WIDTH = 11, 8
Halt = Literal["stop", "loop"]
LIMIT = 6.0  # seconds; no healthy rank of these stands still for a tenth of it


def sharded(rank: int, pp: int, options: dict[str, Any]) -> None:
    """A step of two replicas that gather their parameters."""
    schedule = transformed(build("1f1b", pp, 4), ["shard=2"], Costs())
    chosen = RuntimeOptions(shard_gradients=True, **options)
    pipeline = Pipeline(blocks(pp), schedule, loss=mse, mesh=Mesh.of(MeshShape(pp, 2)), options=chosen)
    pipeline.step(*batch(8, seed=rank % 2))


def spread(rank: int, options: dict[str, Any]) -> None:
    """A step of two ranks that share the vocabulary."""
    schedule = transformed(build("1f1b", 2, 6), ["vocabulary=fused", "embedding"], Costs(scores=0.5, scores_grad=0.5))
    layers = [Layer("rows", nn.Identity), Layer("linear", lambda: nn.Linear(WIDTH, WIDTH))]
    share = vocabulary_share("head", torch.ones(VOCABULARY, WIDTH), rank, 2, embeds=True)
    loss = nn.functional.cross_entropy
    pipeline = Pipeline([*layers, share], schedule, loss=loss, options=RuntimeOptions(**options))
    tokens = torch.arange(36).view(12, 3) % VOCABULARY
    pipeline.step(tokens, tokens)


def halt(how: Halt) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        pass


def halted(rank: int, kind: str, pp: int, how: Halt, victim: int) -> None:
    """A step in which `victim` does not get beyond its first action of `kind`."""
    owner, name = {
        "UNSHARD": (StageShards, "gather"),
        "EMBED": (SpreadVocabulary, "look_up"),
        "BROADCAST": (SpreadVocabulary, "broadcast"),
    }[kind]
    if rank == victim:
        setattr(owner, name, lambda *_: halt(how))
    if kind == "UNSHARD":
        sharded(rank, pp, {"timeout": LIMIT})
    else:
        spread(rank, {"timeout": LIMIT})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "loop"])
@pytest.mark.parametrize(
    ("kind", "pp", "victim"),
    [
        ("UNSHARD", 1, 1),
        pytest.param("UNSHARD", 2, 3, marks=pytest.mark.full),
        ("EMBED", 2, 0),
        pytest.param("BROADCAST", 2, 1, marks=pytest.mark.full),
    ],
)
def test_an_action_that_does_not_end_is_named(kind: str, pp: int, victim: int, how: Halt, tmp_path: Path) -> None:
    world = 2 * pp if kind == "UNSHARD" else 2
    stopped = victim if how == "stop" else None
    ends = run_until_dead(halted, world, tmp_path, kind, pp, how, victim, stopped=stopped)
    assert [end.code for end in ends] == [-9 if rank == stopped else 6 for rank in range(world)]
    words = [end.words for rank, end in enumerate(ends) if rank != stopped]
    assert any(f"in {kind} of stage " in each for each in words)
    for each in words:
        culprit = each.partition("the step stalls: ")[2].partition(";")[0]
        assert culprit.startswith(f"rank {victim} "), each
        assert ("is stopped (SIGSTOP)" if how == "stop" else f"is busy: step 0, in {kind} of stage ") in culprit


def named_once(end: End, rank: str, words: str) -> None:
    """The error is in the action of these words, which is in no other."""
    notes = [line for line in end.words.splitlines() if line.startswith("(rank ")]
    assert set(notes) == {f"({rank}, {words})"}, end.words
    assert f"{rank} failed: step 0, in {words} (" in end.words or end.code == 1
    assert "InjectedFault" in end.words


@pytest.mark.parametrize("action", ["0UNSHARD", "1REDUCE_GRAD"])
def test_a_fault_raises_at_a_gather_or_reduction(action: str, tmp_path: Path) -> None:
    stage, kind = int(action[0]), action[1:]
    ends = run_until_dead(sharded, 4, tmp_path, 2, {"fault": parse_fault(f"raise:{stage}:{action}")})
    assert [end.code for end in ends] == [1 if rank == 2 * stage else 6 for rank in range(4)]
    for end in ends:
        named_once(end, f"rank {2 * stage} (pp {stage}, dp 0)", f"{kind} of stage {stage}")


@pytest.mark.parametrize("action", ["2EMBED1", "3BROADCAST2", "3REDUCE4", "3EMBED0"])
def test_a_fault_raises_at_a_group_entry(action: str, tmp_path: Path) -> None:
    """Also at one whose rank waits for a message that another rank, which waits for the entry, cannot send: 3EMBED0."""
    rank, kind, unit = int(action[0]) - 2, action[1:-1], action[-1]
    ends = run_until_dead(spread, 2, tmp_path, {"fault": parse_fault(f"raise:{rank}:{action}")})
    assert [end.code for end in ends] == [1 if at == rank and unit != "0" else 6 for at in range(2)]
    for end in ends:
        named_once(end, f"rank {rank}", f"{kind} of stage {action[0]} micro-batch {unit}")
