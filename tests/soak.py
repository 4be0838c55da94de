"""Checkpoints under attack: a worker or the launcher is killed with SIGKILL again and again, and the run resumed.

    python -m tests.soak --rounds 30

`--seed N` repeats a sequence. tests/e2e/train/checkpoint/test_soak.py runs two rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "support")]

from checkpoint_runs import command, runs, steps_of, words  # noqa: E402
from checkpoint_states import contents  # noqa: E402
from commands import Command  # noqa: E402
from faults import workers_of  # noqa: E402
from pipeloom.train.checkpoint.folder import complete  # noqa: E402
from pipeloom.train.checkpoint.reader import verified  # noqa: E402

SHARED_MEMORY = Path("/dev/shm")
STEPS_PER_ROUND = 30


def soak(folder: Path, rounds: int, seed: int, say: Callable[[str], None] = print) -> None:
    """A run that is killed `rounds` times, and resumed each time, ends with the bits of one that is left alone.

    Raises AssertionError for other bits, a newest checkpoint that is damaged, a process or shared memory left behind.
    """
    chance = random.Random(seed)
    steps = rounds * STEPS_PER_ROUND
    base = ("--model.dropout", "0.1", "--train.steps", str(steps), "--log.every", "1000000", "--checkpoint.every", "3")
    alone = command(folder, "alone", *base, timeout=120.0 + 60.0 * rounds)
    assert alone.returncode == 0, alone.stderr
    (undisturbed,) = runs(folder / "alone")
    shared = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()
    flags = (*base, "--checkpoint.resume", "auto")
    for number in range(rounds):
        asynchronous = ("--checkpoint.asynchronous", "true") if number % 2 else ()
        before = newest(folder / "killed")
        run = Command(words(folder, "killed", *flags, *asynchronous))
        workers = workers_of(run.pid, 2)
        victim = chance.choice([run.pid, *workers.values()])
        moment = chance.choice(("start-up", "step", "save"))
        wait_until(moment, folder / "killed", run, chance)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        run.communicate(timeout=600)
        until = time.monotonic() + 600
        while any(Path(f"/proc/{pid}").exists() for pid in workers.values()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values()), "a worker outlives its launcher"
        left = (set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()) - shared
        assert not [path for path in left if "pipeloom" in path.name], left
        after = newest(folder / "killed")
        assert after >= before, "a checkpoint is lost"
        who = "the launcher" if victim == run.pid else "a worker"
        say(f"round {number + 1}: killed {who} in {moment}; the newest checkpoint is step {after}, and whole")
    last = command(folder, "killed", *flags, timeout=120.0 + 60.0 * rounds)
    assert last.returncode == 0, last.stderr
    ended = [run for run in runs(folder / "killed") if (run / f"step-{steps:06d}").is_dir()]
    wanted = contents(undisturbed / f"step-{steps:06d}")
    found = contents(ended[-1] / f"step-{steps:06d}")
    assert wanted.keys() == found.keys()
    different = [key for key, value in wanted.items() if not torch.equal(value, found[key])]
    assert not different, different[:3]
    say(f"after {rounds} kills step {steps} has the bits of the undisturbed run: {len(wanted)} tensors")


def newest(log: Path) -> int:
    """The step of the newest checkpoint below `log`, which must be whole; 0 where there is none."""
    found = [(step, path) for folder in runs(log) for step, path in complete(folder)]
    if not found:
        return 0
    step, path = max(found)
    assert verified(path, None)[1] == ""
    return step


def wait_until(moment: str, log: Path, run: Command, chance: random.Random) -> None:
    """Returns at a random moment of a kind, or when the run has ended."""
    if moment == "start-up":
        time.sleep(chance.uniform(0, 3))
        return
    made = sum(len(steps_of(folder)) for folder in runs(log))
    goal, until = made + chance.randint(1, STEPS_PER_ROUND), time.monotonic() + 600
    while run.poll() is None and time.monotonic() < until:
        if sum(len(steps_of(folder)) for folder in runs(log)) >= goal and (
            moment == "step" or any(list(folder.glob(".step-*.partial")) for folder in runs(log))
        ):
            return
        time.sleep(0.001)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory(prefix="pipeloom-soak-") as name:
        soak(Path(name), given.rounds, given.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
