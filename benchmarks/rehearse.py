"""Rehearsals: how well costs fitted on half of the steps predict the other half, and whether a slow stage is found.

    python benchmarks/rehearse.py            both parts
    python benchmarks/rehearse.py predict slow

predict: 12 schedules on 4 processes, 8 micro-batches: rehearsed makespan over the one that the costs promise without
        messages, and the error of the prediction from costs fitted on the first half of the steps; medians of the steps.
slow:   1F1B on 4 processes, 20 runs with one stage 10 % slower than its costs (each stage in turn) and 20 without: in how
        many runs that stage and no other is named, and in how many any stage is.

Each rehearsal is `pipeloom rehearse --json`, with UNIT seconds for a cost of 1. The load of the machine is printed, too: what
others compute on its cores lengthens sleeps.
"""

from __future__ import annotations

import os
from typing import Any

from commands import answer
from parts import run_parts

UNIT = 0.040
RANKS, MICROBATCHES, RUNS = 4, 8, 20
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "hanayo",
    "zb-h1",
    "zb-h2",
    "zb-auto",
    "zbv",
    "v-half",
    "v-min",
    "dualpipe",
)
LIMIT = 0.03


def rehearse(*words: str) -> dict[str, Any]:
    """The JSON of one rehearsal."""
    sizes = ("--ranks", str(RANKS), "--microbatches", str(MICROBATCHES), "--unit", str(UNIT))
    return answer("rehearse", *words, *sizes)


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def predict() -> None:
    print(
        f"{RANKS} processes, {MICROBATCHES} micro-batches, a cost of 1 takes {UNIT * 1e3:.0f} ms, 64 KiB a message; {load()}"
    )
    print(
        f"{'schedule':<16}{'simulated ms':>13}{'rehearsed ms':>13}{'differ':>8}{'predicted ms':>13}{'took ms':>9}{'error':>8}"
    )
    worst = 0.0
    for name in SCHEDULES:
        found = rehearse(name)
        about, fitted = found["rehearsal"], found["prediction"]
        worst = max(worst, abs(fitted["error"]))
        print(
            f"{name:<16}{about['simulated'] * 1e3:13.1f}{about['rehearsed'] * 1e3:13.1f}{about['error']:8.1%}"
            f"{fitted['simulated'] * 1e3:13.1f}{fitted['measured'] * 1e3:9.1f}{fitted['error']:8.1%}",
            flush=True,
        )
    print(
        f"largest error {worst:.1%}, at most {LIMIT:.0%} {'reached' if worst <= LIMIT else 'MISSED'}; {load()} at the end"
    )


def slow() -> None:
    print(
        f"1f1b, {RANKS} processes, {MICROBATCHES} micro-batches, a cost of 1 takes {UNIT * 1e3:.0f} ms, "
        f"{RUNS} runs of each; {load()}"
    )
    named = falsely = 0
    for run in range(RUNS):
        stage = run % RANKS
        with_one, without = (
            [each["stage"] for each in rehearse("1f1b", "--steps", "5", *words)["slow_stages"]]
            for words in (("--slow", f"{stage}=1.1"), ())
        )
        named += with_one == [stage]
        falsely += bool(without)
        print(f"  run {run}: stage {stage} slower, named {with_one}; none slower, named {without}", flush=True)
    print(f"named: {named} of {RUNS}; named without one: {falsely} of {RUNS}; {load()} at the end")


PARTS = {"predict": predict, "slow": slow}

if __name__ == "__main__":
    run_parts(PARTS)
