"""Real runs with real faults: a sample of what `python -m tests.faults` goes through."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import faults
from faults import LAYOUTS, misbehave, problem


def last_line(outcome: faults.Outcome) -> str:
    return outcome.words.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("rank", "layout"),
    [
        (0, "shared memory"),
        pytest.param(1, "gloo", marks=pytest.mark.full),
        pytest.param(2, "tp", marks=pytest.mark.full),
        (3, "dp"),
    ],
)
def test_a_frozen_rank_is_named_and_killed(rank: int, layout: str, tmp_path: Path) -> None:
    outcome = faults.signal_rank(tmp_path, rank, LAYOUTS[layout], signal.SIGSTOP)
    assert not problem(outcome, rank)
    assert last_line(outcome).endswith("failed first: it was stuck, and was killed; the other 3 were stopped")
    assert "is stopped (SIGSTOP)" in outcome.words
    assert outcome.words.count("no progress for 1") >= 1
    for other in {0, 1, 2, 3} - {rank}:
        assert f"[rank {other}] " in outcome.words
    found = faults.exit_file(tmp_path)
    assert (found["exit_code"], found["ranks"]) == (6, [rank])


@pytest.mark.parametrize(
    ("kind", "place", "rank"),
    [
        ("in Python", "start-up", 1),
        ("holding the GIL", "step", 0),
        pytest.param("holding the GIL", "start-up", 1, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_loops_is_named_and_killed(kind: str, place: str, rank: int, tmp_path: Path) -> None:
    outcome = misbehave(tmp_path, rank, faults.LOOPS[kind], place)
    assert not problem(outcome, rank)
    words = "is busy: " if kind == "in Python" else "does not answer: it is frozen, holds Python's global lock"
    assert words in outcome.words


@pytest.mark.parametrize(
    ("kind", "words"),
    [("os._exit(0)", "exit code 0"), pytest.param("abort", "killed by SIGABRT", marks=pytest.mark.full)],
)
def test_a_rank_that_ends_itself_is_blamed(kind: str, words: str, tmp_path: Path) -> None:
    outcome = misbehave(tmp_path, 1, faults.LOOPS[kind], "step")
    assert not problem(outcome, 1)
    assert f"failed first: {words}" in last_line(outcome)
    assert "stopped, because rank 1 is gone" in outcome.words


@pytest.mark.parametrize("delay", [pytest.param(0.1, marks=pytest.mark.full), 2.0])
def test_a_kill_at_start_up_is_named(delay: float, tmp_path: Path) -> None:
    begun = time.monotonic()
    run = faults.start(faults.command(tmp_path, *LAYOUTS["gloo"]))
    victim = faults.workers_of(run.pid, 4)[1]
    time.sleep(max(0.0, begun + delay - time.monotonic()))
    os.kill(victim, signal.SIGKILL)
    outcome = faults.ended(run, time.monotonic(), 600.0)
    assert not problem(outcome, 1)


def test_strangers_who_connect_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "flooded").mkdir()
    flags = ["--parallel.pp", "2", "--schedule.transport", "individual"]
    try:
        outcome, losses, taken = faults.trained_among_strangers(tmp_path / "flooded", flags)
    except OSError as reason:
        pytest.skip(str(reason))
    assert outcome.code == 0, outcome.words
    tried, through = map(int, taken.split())
    assert tried > 20
    assert through == 0  # the workers have a network of their own
    assert losses == faults.undisturbed(tmp_path / "alone", flags)
    assert len(losses) == faults.SHORT_RUN


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_cut_link_ends_both_hosts(host: int, tmp_path: Path) -> None:
    try:
        outcomes = faults.cut_link(tmp_path, host, LAYOUTS["gloo"])
    except OSError as reason:
        pytest.skip(f"no two network namespaces: {reason}")
    for here, outcome in enumerate(outcomes):
        assert len(outcome.ends) == 2
        for rank in (2, 3) if here == 0 else (0, 1):
            assert f"rank {rank} " in outcome.words
        assert "does not answer" in outcome.words
    assert faults.exit_file(tmp_path)["exit_code"] == 6
