"""Checkpoints under attack: runs that are killed again and again, and files that are damaged.

    python -m tests.soak kill --rounds 30      kill -9 of a worker or the launcher at a random moment, then resume
    python -m tests.soak corrupt --count 500   one damage at a time: refused, or what is loaded is the same bits
    python -m tests.soak resume                one checkpoint resumed on 4 layouts under 3 schedules each, ten steps

`--seed N` repeats a sequence. tests/e2e/train/checkpoint/test_soak.py runs a few of each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "support")]

from checkpoint_runs import command, runs, steps_of, words  # noqa: E402
from checkpoint_states import Run, contents, layout_of  # noqa: E402
from commands import Command  # noqa: E402
from faults import workers_of  # noqa: E402
from pipeloom import checkpoint  # noqa: E402
from pipeloom.errors import CheckpointError  # noqa: E402
from pipeloom.train.checkpoint.folder import complete  # noqa: E402
from pipeloom.train.checkpoint.reader import verified  # noqa: E402
from processes import run_ranks  # noqa: E402

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


def corrupt(folder: Path, count: int, seed: int, say: Callable[[str], None] = print) -> None:
    """Each damage to a checkpoint's files is refused with CheckpointError, or the same bits are loaded.

    Raises AssertionError where anything else is loaded.
    """
    chance = random.Random(seed)
    run = Run(layout_of("one"))
    run.steps(1)
    other = checkpoint.save(folder / "other", 1, run.pipeline, run.optimizer, extra={"batch": 1})
    run.steps(1)
    good = checkpoint.save(folder / "good", 2, run.pipeline, run.optimizer, extra={"batch": 2})
    wanted = contents(good)
    bad, refused, target = folder / "bad", 0, run
    for number in range(count):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        what = damage(bad, other, chance)
        if number % 50 == 0:
            target = Run(layout_of("one", train__seed=5))
        try:
            loaded = checkpoint.load(bad, target.pipeline, target.optimizer)
        except CheckpointError as error:
            message = str(error)
        else:
            message = ""
        if message:
            assert "\n" not in message, message
            refused += 1
            continue
        assert (loaded.step, loaded.extra) == (2, {"batch": 2}), what
        again = contents(checkpoint.save(folder / "again", 2, target.pipeline, target.optimizer))
        assert wanted.keys() == again.keys(), what
        assert all(torch.equal(value, again[key]) for key, value in wanted.items()), what
    say(f"{count} damages: {refused} refused, {count - refused} harmless (the loaded state is the same bits)")


def damage(bad: Path, other: Path, chance: random.Random) -> str:
    """Makes one damage; returns what it was."""
    files = sorted(path for path in bad.iterdir())
    path = chance.choice(files)
    kind = chance.choice(("flip", "truncate", "delete", "swap", "extend"))
    data = bytearray(path.read_bytes())
    if kind == "flip":
        at = chance.randrange(len(data))
        data[at] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    elif kind == "truncate":
        path.write_bytes(data[: chance.randrange(len(data))])
    elif kind == "delete":
        path.unlink()
    elif kind == "swap":
        source = chance.choice([*(file for file in files if file != path), other / path.name])
        content = source.read_bytes()
        if source.parent == bad:
            source.write_bytes(data)
        path.write_bytes(content)
    else:
        path.write_bytes(data + bytes(chance.randrange(256) for _ in range(chance.randint(1, 9))))
    return f"{kind} of {path.name}"


RESUME_LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 2": {},
    "pp 2, dp 2": {"parallel__dp": 2},
    "pp 2, dp 2, ZeRO-1": {"parallel__dp": 2, "optimizer__zero1": True},
    "pp 2, tp 2, sp": {"parallel__tp": 2, "parallel__sp": True},
}
RESUME_SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zbv": {},
    "interleaved": {"schedule__chunks": 2},
}
STEPS_BEFORE, STEPS_AFTER = 3, 10


class Resumed(NamedTuple):
    """What one layout did after it was resumed: losses, and the tokens of its replica per step."""

    losses: list[float]
    tokens: list[list[int]]


def steps_and_tokens(run: Run, count: int) -> Resumed:
    """Makes steps, and notes what they read."""
    place, shape = run.pipeline.mesh.place, run.pipeline.mesh.shape
    tokens = []
    for step in range(run.pipeline.next_step, run.pipeline.next_step + count):
        tokens.append(run.batches.of_step(step).part(place.dp, shape.dp).tokens.flatten().tolist())
    return Resumed(run.steps(count), tokens)


def resumed(rank: int, folder: str, layout: str, schedule: str) -> Resumed:
    changes = {"parallel__pp": 2, "schedule__microbatches": 4, **RESUME_LAYOUTS[layout], **RESUME_SCHEDULES[schedule]}
    run = Run(layout_of("one", schedule__name=schedule, **changes))
    checkpoint.load(folder, run.pipeline, run.optimizer)
    found = steps_and_tokens(run, STEPS_AFTER)
    run.pipeline.close()
    return found


def resume(folder: Path, say: Callable[[str], None] = print) -> None:
    """A checkpoint of one process goes on alike on every layout and schedule: the same losses, and each token read once.

    Raises AssertionError for losses that differ by more than 1e-5 of themselves, or other tokens.
    """
    straight = Run(layout_of("one"))
    straight.steps(STEPS_BEFORE)
    checkpoint.save(folder, STEPS_BEFORE, straight.pipeline, straight.optimizer)
    wanted = steps_and_tokens(straight, STEPS_AFTER)
    for layout, changes in RESUME_LAYOUTS.items():
        replicas, parts = changes.get("parallel__dp", 1), changes.get("parallel__tp", 1)
        for schedule in RESUME_SCHEDULES:
            found = run_ranks(resumed, 2 * replicas * parts, str(folder), layout, schedule)
            farthest = max(abs(a - b) / b for a, b in zip(found[0].losses, wanted.losses, strict=True))
            per_replica = [found[at * parts].tokens for at in range(replicas)]
            tokens = [list(chain.from_iterable(step)) for step in zip(*per_replica, strict=True)]
            assert tokens == wanted.tokens, f"{layout}, {schedule}: other tokens"
            assert farthest <= 1e-5, f"{layout}, {schedule}: losses differ by {farthest:.1e}"
            say(f"{layout:20} {schedule:12} largest relative difference of a loss {farthest:.1e}, the same tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("kill", "corrupt", "resume"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory(prefix="pipeloom-soak-") as name:
        if given.part == "kill":
            soak(Path(name), given.rounds, given.seed)
        elif given.part == "resume":
            resume(Path(name))
        else:
            corrupt(Path(name), given.count, given.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
