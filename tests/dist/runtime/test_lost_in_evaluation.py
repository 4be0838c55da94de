"""A message that is lost in an evaluation: the ranks say what stalls, and call nobody gone who is there."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import pipeloom as pl
from dying import run_until_dead
from models import batch, blocks, mse
from pipeloom.config.fault import parse_fault
from pipeloom.errors import DistributedError
from pipeloom.parallel.mesh import PipelineMesh
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.runtime.health.report import FailureReporter, PeerGone, plain_words, timed_out
from pipeloom.runtime.health.status import Status

pytestmark = pytest.mark.core


def evaluate(rank: int, transport: Any, group_seconds: float, timeout: float, monitor: bool) -> None:
    """The group gives up a message after `group_seconds`, and the watchdog a stall after `timeout`."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=group_seconds))
    options = RuntimeOptions(transport=transport, fault=parse_fault("drop-send:0:1"), timeout=timeout, monitor=monitor)
    mesh = PipelineMesh((0, 1), rank, group)
    Pipeline(blocks(4), pl.schedules.one_f_one_b(2, 4), loss=mse, mesh=mesh, options=options).evaluate(*batch(8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "group_seconds", "timeout", "monitor"),
    [
        ("individual", 6.0, 300.0, True),
        pytest.param("individual", 6.0, 300.0, False, marks=pytest.mark.full),
        pytest.param("individual", 300.0, 6.0, True, marks=pytest.mark.full),
        ("shared", 300.0, 6.0, True),
    ],
)
def test_nobody_is_called_gone(
    transport: Any, group_seconds: float, timeout: float, monitor: bool, tmp_path: Path
) -> None:
    ends = run_until_dead(evaluate, 2, tmp_path, transport, group_seconds, timeout, monitor)
    assert [end.code for end in ends] == [6, 6]
    every = "".join(end.words for end in ends)
    assert "is gone" not in every, every
    assert "unbound_buffer" not in every
    assert "the evaluation stalls: " in every
    assert "evaluation, F of stage 1 micro-batch" in ends[1].words
    assert "from rank 0" in ends[1].words
    assert "start-up" not in every


def test_words_of_torch_and_gloo() -> None:
    error = RuntimeError(
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv "
        "operation to complete"
    )
    assert timed_out(error)
    assert plain_words(error) == "Timed out waiting 2000ms for recv operation to complete"
    closed = RuntimeError(
        "[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29500. This is typically caused by a "
        "remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
    )
    assert not timed_out(closed)
    assert plain_words(closed) == "Connection closed by peer [127.0.0.1]:29500"


class Quiet:
    """A watchdog that hears of no cause."""

    def __init__(self) -> None:
        self.output = ""
        self.asked: list[float] = []

    def cause(self, seconds: float) -> None:
        self.asked.append(seconds)

    def failed(self, text: str, blames: Any) -> Any:
        return SimpleNamespace(shown_on=lambda output: text)


def test_a_closed_connection_waits_longer_for_a_cause_than_the_rank_that_gives_up() -> None:
    """The other rank has given up, say, and says so once it has waited for a cause itself."""
    words, watchdog = [], Quiet()
    reporter = FailureReporter(Status(0))
    reporter.watchdog = watchdog  # type: ignore[assignment]
    for text in ("Timed out waiting 2000ms for recv operation to complete", "Connection closed by peer"):
        with pytest.raises(DistributedError) as told:
            reporter.tell(PeerGone(1, text))
        words.append(str(told.value))
    assert watchdog.asked[1] >= 2 * watchdog.asked[0]
    assert "the step stalls: rank 0" in words[0]
    assert "the connection to rank 1 is closed" in words[1]
