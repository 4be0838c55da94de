"""Whether `plan` misses anything: every layout of a coarser space is predicted, without estimates, for 40 questions.

    python benchmarks/plan_exhaustive.py               all questions (an hour of a core)
    python benchmarks/plan_exhaustive.py 3 8           questions 3 to 7
    python benchmarks/plan_exhaustive.py seconds       CPU seconds of the command by the number of devices

Nothing of the search is used but the prediction of one layout. For each question it prints the seconds of the search, what both
found, and whether the search is monotone: in the memory, in the devices' memory and in the space. Exit code 1: a layout of the
coarser space is more than 2 % faster, or fits where the search found none, or the search is not monotone.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from pipeloom.errors import UsageError
from pipeloom.plan import RUNTIMES, LayoutCosts, PlannedLayout, Planner, PlanRequest, load_device, load_model
from pipeloom.plan.layout import problems
from pipeloom.plan.search import fastest

QUESTIONS = [  # model, devices, device, tokens of a sequence, sequences of a step
    *(("llama3-8b", devices, "h100", seq, sequences) for devices, seq, sequences in (
        (1, 4096, 8), (2, 4096, 32), (4, 8192, 32), (8, 4096, 64), (8, 4096, 1024), (8, 131072, 8), (16, 32768, 64),
        (32, 8192, 256), (64, 131072, 32), (128, 4096, 1024), (128, 1048576, 4))),
    *(("llama3-8b", devices, "a100", seq, sequences) for devices, seq, sequences in (
        (4, 4096, 16), (8, 16384, 32), (16, 65536, 16), (64, 4096, 256))),
    *(("llama3-70b", devices, "h100", seq, sequences) for devices, seq, sequences in (
        (8, 4096, 64), (16, 4096, 128), (32, 8192, 64), (64, 4096, 1024), (64, 32768, 64), (128, 131072, 16), (256, 8192, 512))),
    *(("llama3-70b", devices, "h200", seq, sequences) for devices, seq, sequences in (
        (8, 8192, 32), (16, 8192, 128), (64, 65536, 32), (128, 4096, 512))),
    *(("llama3-405b", devices, "h100", seq, sequences) for devices, seq, sequences in (
        (128, 8192, 128), (512, 8192, 512), (1024, 131072, 64))),
    *(("mixtral-8x7b", devices, "h100", seq, sequences) for devices, seq, sequences in (
        (8, 4096, 64), (16, 4096, 256), (32, 32768, 32), (64, 8192, 256))),
    *(("qwen3-30b-a3b", devices, "h100", seq, sequences) for devices, seq, sequences in (
        (8, 4096, 64), (16, 8192, 128), (32, 4096, 512), (64, 32768, 64))),
    *(("deepseek-v3", devices, "h200", seq, sequences) for devices, seq, sequences in (
        (64, 4096, 128), (128, 4096, 512), (256, 8192, 512))),
]  # fmt: skip
WITHIN = 1.02


def request_of(question: tuple[str, int, str, int, int]) -> tuple[Planner, PlanRequest]:
    """What `pipeloom plan` asks."""
    model, devices, name, seq, sequences = question
    device = load_device(name)
    request = PlanRequest.of("pipeloom", devices, device.memory, sequences, seq)
    return Planner(load_model(model), device, RUNTIMES["pipeloom"]), request


def coarse(planner: Planner, request: PlanRequest) -> Iterator[PlannedLayout]:
    """Layouts with one sequence a micro-batch, of powers of two."""
    shape, long = planner.shape, request.seq >= 32768
    powers = [1 << n for n in range(11)]
    for tp, cp, pp in product((1, 2, 4, 8), (1, 2, 4, 8, 16) if long else (1,), powers[:6]):
        dp = request.devices // (tp * cp * pp)
        if tp > planner.device.per_node or dp * tp * cp * pp != request.devices or request.sequences % dp or dp < 1:
            continue
        experts = [ep for ep in (1, 8, 64) if ep <= min(dp * cp, shape.num_experts)] if shape.num_experts else [1]
        for ep, recompute, zero in product(experts, ("none", "full"), (1, 3)):
            base = PlannedLayout(
                dp, tp, cp, pp, ep, m=request.sequences // dp, seq=request.seq, recompute=recompute, zero=zero
            )
            yield base
            if pp > 1:
                yield replace(base, schedule="zb-h1")
                yield from (replace(base, v=2, schedule=name) for name in ("interleaved", "zbv"))
                if ep > 1:
                    yield replace(base, v=2, schedule="interleaved-overlap")
            if pp > 1 and long and pp <= 8:
                yield from (replace(base, slices=16, vocabulary=place) for place in ("last", "pp"))


def predictions(planner: Planner, request: PlanRequest) -> Iterator[LayoutCosts]:
    """Those of the layouts that the model and the families take; where all blocks must be recomputed, with as few as fit."""
    for layout in coarse(planner, request):
        if layout.pp * layout.v <= planner.shape.num_hidden_layers and not problems(planner.shape, layout):
            with suppress(UsageError):
                yield (found := planner.predict(layout))
                bare = planner.predict(replace(layout, recompute="none"))
                if found.peak <= request.memory < bare.peak:
                    yield from bisected(planner, request, layout)


def bisected(planner: Planner, request: PlanRequest, layout: PlannedLayout) -> Iterator[LayoutCosts]:
    """Predictions on the way to the fewest blocks of a stage that must be recomputed."""
    fewest, enough = 1, -(-planner.shape.num_hidden_layers // (layout.pp * layout.v))
    while fewest < enough:
        middle = (fewest + enough) // 2
        yield (found := planner.predict(replace(layout, recompute_layers=middle)))
        if found.peak <= request.memory:
            enough = middle
        else:
            fewest = middle + 1


def tokens(found: LayoutCosts | None) -> float:
    return 0.0 if found is None else found.tokens


def answer(number: int, question: tuple[str, int, str, int, int]) -> bool:
    """Print a question's row; return whether the search missed nothing."""
    planner, request = request_of(question)
    begin = time.process_time()
    best = fastest(planner, request)
    spent = time.process_time() - begin
    larger = replace(planner, device=replace(planner.device, memory=1.2 * request.memory))
    narrow = replace(request, zero=(1,), slices=(1,), vocabulary=("last",))
    series = [
        tokens(fastest(planner, replace(request, memory=0.8 * request.memory))),
        tokens(fastest(planner, narrow)),
    ]
    more = tokens(fastest(larger, replace(request, memory=1.2 * request.memory)))
    monotone = all(each <= tokens(best) for each in series) and tokens(best) <= more
    every = [each for each in predictions(replace(planner), request) if each.peak <= request.memory]
    rival = max(every, key=tokens, default=None)
    missed = tokens(rival) > WITHIN * tokens(best)
    print(
        f"{number:2} {question[0]:14} {question[1]:5} {question[2]:5} {question[3]:8,} {question[4]:5} {spent:6.1f} s  "
        f"{tokens(best):8,.0f} {tokens(rival):8,.0f} {'MISSED ' * missed}{'' if monotone else 'NOT MONOTONE '}"
        f"{best.layout.text() if best else '-'}  |  {rival.layout.text() if rival else '-'}",
        flush=True,
    )
    return monotone and not missed


def print_seconds() -> int:
    """Print the CPU seconds of `pipeloom plan`, its start and the report included."""
    for model, devices in (
        *(("llama3-8b", 8), ("llama3-70b", 64), ("qwen3-30b-a3b", 64), ("llama3-70b", 1024)),
        *(("deepseek-v3", 1024), ("llama3-405b", 16384)),
    ):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "pipeloom", "plan", "--model", model, "--devices", str(devices)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{model:14} {devices:6,} devices {spent:6.1f} s", flush=True)
    return 0


def main() -> int:
    """Answer all questions, or those from one number to another."""
    if sys.argv[1:] == ["seconds"]:
        return print_seconds()
    first, last = (int(word) for word in (sys.argv[1:3] or (0, len(QUESTIONS))))
    print(" # model          devices       seq  sequences  search      plan   coarse")
    return 0 if all([answer(at, QUESTIONS[at]) for at in range(first, min(last, len(QUESTIONS)))]) else 1


if __name__ == "__main__":
    sys.exit(main())
