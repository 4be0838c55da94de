"""The times that the specification and the documentation promise, on this machine: promised, measured, and the ratio.

`python tests/budget.py [WORD …]` prints a line for each promise whose title has one of these words, all without one. It fails
nothing: a slow or busy machine is no defect. Seconds of the processor ("CPU") where the work is this process's alone.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent / "support"))

import pipeloom as pl
from pipeloom.cli import app
from pipeloom.cli.failures import exit_code_of
from pipeloom.errors import PipeloomError
from pipeloom.schedule import Costs, Schedule
from pipeloom.schedule.json_form import to_json
from pipeloom.shapes.cut import balance, expand

PROMISES: list[Promise] = []


class Promise(NamedTuple):
    """A promise: its title, the seconds, whether they are the processor's, and what is measured (it may return the seconds)."""

    title: str
    seconds: float
    cpu: bool
    work: Callable[[], float | None]


def promise(title: str, seconds: float, *, cpu: bool = True) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(work: Callable[[], Any]) -> Callable[[], Any]:
        PROMISES.append(Promise(title, seconds, cpu, work))
        return work

    return add


def seconds_of(work: Callable[[], Any], cpu: bool) -> float:
    clock = time.process_time if cpu else time.perf_counter
    begun = clock()
    with suppress(PipeloomError):
        work()
    return clock() - begun


def command(*words: str) -> None:
    """Run a command line in this process, without its output."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        exit_code_of(lambda: app(words, prog_name="pipeloom", standalone_mode=False), as_json=False, given=words)


def in_a_process(*words: str) -> float:
    """Return the processor's seconds of the command in a new process, the best of three."""
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "pipeloom", *words], capture_output=True)
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))
    return min(times)


# -- schedules ---------------------------------------------------------------------------------------------------------------


@promise("check 51,200 actions", 1.0)
def check_large() -> float:
    schedule = pl.schedules.interleaved(8, 400, 8)
    return seconds_of(lambda: pl.check(schedule), cpu=True)


@promise("refuse 51,200 actions, two of which are exchanged", 3.0)
def check_exchanged() -> float:
    schedule = pl.schedules.interleaved(8, 400, 8)
    programs = [list(program) for program in schedule.codes]
    programs[3][1000], programs[3][2500] = programs[3][2500], programs[3][1000]
    bad = Schedule.of(programs, placement=schedule.placement, microbatches=400, name="exchanged")
    return seconds_of(lambda: pl.check(bad), cpu=True)


@promise("simulate 500,000 actions", 1.0)
def simulate_large() -> float:
    schedule = pl.schedules.interleaved(64, 3906, 1)
    return seconds_of(lambda: pl.simulate(schedule), cpu=True)


@promise("balance 100,000 equal blocks over 64 stages", 2.0)
def balance_blocks() -> None:
    balance([3, *[10] * 100_000, 400], 64)


@promise("refuse a stages string of a thousand million blocks", 2.0)
def refuse_stages() -> None:
    expand("((t*1000)*1000)*1000")


@promise("search with a time limit of 1.5 s", 1.5, cpu=False)
def limited_search() -> None:
    pl.search(8, 32, Costs(10, 12, 8, 1), 12, chunks=2, time_limit=1.5)


with suppress(ImportError):  # without the extra `opt`, no proofs
    import ortools.sat.python.cp_model  # noqa: F401

    @promise("prove the optimum of 4 ranks, 8 micro-batches", 1.0, cpu=False)
    def prove_small() -> None:
        pl.search(4, 8, memory=3, iterations=0, prove=True)

    @promise("prove the optimum of 8 ranks, 32 micro-batches", 60.0, cpu=False)
    def prove_large() -> None:
        pl.search(8, 32, memory=6, iterations=0, prove=True, time_limit=300)


# -- the command -------------------------------------------------------------------------------------------------------------


@promise("pipeloom --help", 0.5)
def show_help() -> float:
    return in_a_process("--help")


@promise("pipeloom check: refuse a small file that deadlocks", 1.0)
def check_file() -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "paper.json"
        path.write_text(to_json(pl.schedules.interleaved(ranks=4, microbatches=5, chunks=3, rounds="paper")))
        return in_a_process("check", str(path))


@promise("pipeloom compare all: 4 ranks, 8 micro-batches", 5.0)
def compare_all() -> None:
    command("compare", "all", "--ranks", "4", "--microbatches", "8")


@promise("pipeloom compare: refuse 100,000 ranks", 2.0)
def refuse_ranks() -> None:
    command("compare", "all", "--ranks", "100000", "--microbatches", "100000")


@promise("pipeloom train: refuse 1,000,000 pipeline ranks", 2.0)
def refuse_workers() -> None:
    command("train", "tiny", "--train.device", "cpu", "--parallel.pp", "1000000")


# -- failures, in real runs --------------------------------------------------------------------------------------------------


@promise("an exception on one of 3 ranks stops all", 2.0, cpu=False)
def stop_all() -> float:
    from dying import run_until_dead
    from models import Block, batch, blocks, mse
    from pipeloom.runtime import Layer, Pipeline

    with tempfile.TemporaryDirectory() as folder:
        raised = Path(folder) / "raised"

        class Bad(Block):
            def forward(self, x: Any) -> Any:
                raised.touch()
                raise ValueError("the user's own words")

        def train(rank: int) -> None:
            layers = [*blocks(4), Layer("bad", lambda: Bad(4)), *blocks(6)[5:]]
            Pipeline(layers, pl.schedules.interleaved(3, 7, 2), loss=mse).step(*batch(14))

        run_until_dead(train, 3, Path(folder))
        return time.time() - raised.stat().st_mtime


@promise("a frozen rank: all end, within the timeout of 30 s and 5 s", 35.0, cpu=False)
def freeze() -> float:
    import faults

    with tempfile.TemporaryDirectory() as folder:
        return faults.signal_rank(Path(folder), 0, faults.LAYOUTS["shared memory"], signal.SIGSTOP).seconds


@promise("a killed rank: all end", 2.0, cpu=False)
def kill() -> float:
    import faults

    with tempfile.TemporaryDirectory() as folder:
        return faults.signal_rank(Path(folder), 1, faults.LAYOUTS["gloo"], signal.SIGKILL).seconds


def main(words: list[str]) -> None:
    print(f"{'promised':>10}{'measured':>12}{'ratio':>8}")
    for each in PROMISES:
        if not words or any(word in each.title for word in words):
            returned: list[float | None] = []
            seconds = seconds_of(lambda work=each.work, to=returned: to.append(work()), each.cpu)  # type: ignore[misc]
            measured = next((value for value in returned if value is not None), seconds)
            unit = "s CPU" if each.cpu else "s    "
            print(
                f"{each.seconds:8.1f} s{measured:8.2f} {unit}{measured / each.seconds:7.2f}  {each.title}", flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:])
