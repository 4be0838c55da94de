"""`[schedule] replan`: another schedule in mid-run, once the measured costs have drifted from those that the present one suits.

Every `replan` steps one step is measured. All ranks see the same costs, so all decide alike; rank 0 searches in a process of its
own, and its answer is broadcast behind a measured step, so that every rank runs the new schedule from the same step on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from statistics import fmean, median
from typing import Any, Literal

from pipeloom.config import Layout
from pipeloom.errors import PipeloomError
from pipeloom.runtime import Pipeline
from pipeloom.schedule import Costs, Schedule, Timeline, simulate
from pipeloom.schedule.costs import TIME_TOLERANCE
from pipeloom.schedule.json_form import from_json, to_dict
from pipeloom.schedule.transforms import half_split
from pipeloom.solver.replan import request
from pipeloom.train.collect import maxima
from pipeloom.train.report.prediction import of_stages
from pipeloom.train.report.report import Report, reported
from pipeloom.train.schedule_search import fitted_costs, set_fields, value_of, value_of_rank_0
from pipeloom.train.workers.context import WorkerContext

DRIFT_STEPS = 3
"""Measured steps of which the costs are medians: one stall among them changes nothing."""

_LEAST_GAIN = 0.01  # share of the simulated step from which schedules are swapped; a simulation is no more accurate
# Seconds of a search, which otherwise takes as long as the steps to the next measured one.
_SHORTEST, _LONGEST = 1.0, 30.0


def prepared(layout: Layout) -> Layout:
    """Return `layout` with a schedule for which the layers are built such that any other may split backwards on them."""
    return replace(layout, schedule=half_split(layout.schedule))


def drift(before: Costs, now: Costs, stages: int) -> tuple[float, str]:
    """Return (the largest change, its cause in words).

    A stage's change is that of its time beside the stage that changed least, because a machine that becomes slower as a whole
    needs no other schedule; that of a message is the change of its time over the mean forward.
    """
    rows = [of_stages(costs, stages) for costs in (before, now)]
    ratios = [after / one if one else 1.0 for one, after in zip(*rows, strict=True)]
    slowest = max(range(stages), key=ratios.__getitem__)
    of_stage = ratios[slowest] / min(ratios) - 1
    was, hop = _hop(before, stages), _hop(now, stages)
    if abs(hop - was) > of_stage:
        return abs(hop - was), f"a message takes {100 * hop:.0f} % of a mean forward, was {100 * was:.0f} %"
    return of_stage, f"stage {slowest} has become {100 * of_stage:.0f} % slower beside the others"


def _hop(costs: Costs, stages: int) -> float:
    """Return the time of a message over the mean forward."""
    assert not isinstance(costs.p2p, tuple)
    forward = fmean(costs.per_stage("forward", stages))
    return costs.p2p / forward if forward else 0.0


class Replanner:
    """The measured steps of a run, the search that they give rise to, and the swap. Every rank has one, with the same state.

    The new schedule has the same stages on the same ranks, and on no rank a higher peak of activations than the first schedule;
    where that was searched within a limit, than the limit. If the measured step becomes longer, the old schedule returns.
    """

    def __init__(self, layout: Layout, pipeline: Pipeline, context: WorkerContext, report: Report | None) -> None:
        config = layout.config
        self._section, self._last = config.schedule, config.train.steps
        self._objective: Literal["makespan", "span"] = "makespan" if config.optimizer.barrier else "span"
        self._pipeline, self._context, self._report = pipeline, context, reported(report)
        self._sizes = layout.microbatch_sizes
        self._activation, self._limits = _memory(layout)
        self._steps: deque[Timeline] = deque(maxlen=DRIFT_STEPS)
        self._suited: Costs | None = None  # the costs that the present schedule suits
        self._searched: Costs | None = None  # those of the search under way
        self._process: BackgroundSearch | None = None  # on rank 0
        self._before: tuple[Schedule, float] | None = None  # the schedule before a swap that is on trial, and its step

    def after_step(self, step: int) -> bool:
        """Record the last step, and search or swap where it is time to; collective. Return whether the schedule is another."""
        self._steps.append(self._pipeline.timeline())
        if self._searched is not None:
            return self._take_answer(step, self._searched)
        if len(self._steps) < DRIFT_STEPS:
            return False
        costs, seconds = self._measured()
        if self._suited is None:
            self._suited = costs
            return False
        change, words = drift(self._suited, costs, self._pipeline.schedule.stages)
        if change > self._section.replan_threshold and step < self._last:
            self._before, self._searched = None, costs
            self._report.record("drift", step=step, change=change, cause=words, costs=set_fields(costs))
            self._report.say(f"step {step}: {words}; searching for another schedule in the background")
            if self._context.rank == 0:
                longest = min(_LONGEST, max(_SHORTEST, self._section.replan * seconds))
                limits, schedule = self._limits, self._pipeline.schedule
                self._process = BackgroundSearch(request(schedule, set_fields(costs), limits, self._objective, longest))
            return False
        return self._judge(step, seconds)

    def _measured(self) -> tuple[Costs, float]:
        """Return costs and seconds of a step: medians of the latest ones, of several replicas the slowest; collective."""
        costs = fitted_costs(list(self._steps), self._sizes)
        names, stages = costs.stage_times(), self._pipeline.schedule.stages
        mine: list[Any] = [costs.p2p, median(step.value(self._objective) for step in self._steps)]
        mine += [value for name in names for value in costs.per_stage(name, stages)]
        p2p, seconds, *rest = maxima(self._pipeline, mine)
        times: dict[str, Any] = {name: tuple(rest[at * stages : (at + 1) * stages]) for at, name in enumerate(names)}
        return replace(costs, p2p=p2p, activation=self._activation, **times), seconds

    def _take_answer(self, step: int, costs: Costs) -> bool:
        """Adopt the schedule that rank 0 has searched, if it has an answer by now and that gains; collective."""
        answer = value_of_rank_0(self._context, lambda: self._process and self._process.answer())
        if answer is None:
            return False
        self._suited, self._searched, self._process = costs, None, None
        if "failed" in answer:
            self._report.say(
                f"step {step}: the search for another schedule failed: {answer['failed']}; the present one stays"
            )
            return False
        old, schedule = self._pipeline.schedule, from_json(json.dumps(answer))
        now, then = (value_of(each, costs, self._objective) for each in (old, schedule))
        swaps = then < (1 - _LEAST_GAIN) * now and step < self._last
        self._report.record("replan", step=step, was=now, value=then, swapped=swaps)
        if not swaps:
            self._report.say(
                f"step {step}: no schedule within the same memory gains 1 % or more; the present one stays"
            )
            return False
        self._report.say(
            f"step {step}: another schedule from the next step on, {100 * (1 - then / now):.1f} % shorter in simulation "
            f"({now * 1e3:.1f} ms, now {then * 1e3:.1f} ms)"
        )
        self._before = old, median(timeline.value(self._objective) for timeline in self._steps)
        return self._adopt(schedule)

    def _judge(self, step: int, seconds: float) -> bool:
        """Return to the schedule before a swap if its measured steps were shorter."""
        before, self._before = self._before, None
        if before is None:
            return False
        old, took = before[0], maxima(self._pipeline, [before[1]])[0]
        returns = seconds > took and step < self._last
        self._report.record("replanned", step=step, was=took, value=seconds, kept=not returns)
        words = "the schedule before it returns" if returns else "it stays"
        self._report.say(
            f"step {step}: steps of the new schedule take {seconds * 1e3:.1f} ms, were {took * 1e3:.1f} ms; {words}"
        )
        return self._adopt(old) if returns else False

    def _adopt(self, schedule: Schedule) -> bool:
        self._steps.clear()
        self._pipeline.adopt(schedule)
        return True

    def state(self) -> dict[str, Any]:
        """Return the schedule and the costs that it suits, for a checkpoint; {} before the first costs are known."""
        if self._suited is None:
            return {}
        return {"schedule": to_dict(self._pipeline.schedule), "costs": set_fields(self._suited)}

    def restore(self, state: Mapping[str, Any], configured: Mapping[str, Any]) -> None:
        """Continue with a checkpoint's schedule and costs, if it was of a run with the same `[schedule]`, `configured`."""
        section = self._section.model_dump(mode="json")
        same = [key for key in section if not key.startswith("replan")]
        if not state or any(configured.get(key) != section[key] for key in same):
            return
        try:
            schedule, costs = from_json(json.dumps(state["schedule"])), Costs(**state["costs"])
            peaks = simulate(schedule, replace(costs, activation=self._activation)).peak_memory
            if any(peak > limit + TIME_TOLERANCE for peak, limit in zip(peaks, self._limits, strict=True)):
                return
            of_stages(costs, self._pipeline.schedule.stages)
            self._pipeline.adopt(schedule)
            self._suited = costs
        except (PipeloomError, ValueError, KeyError, TypeError):
            return  # of another layout: the run begins with its own schedule

    def close(self) -> None:
        """End a search under way."""
        if self._process is not None:
            self._process.close()


def _memory(layout: Layout) -> tuple[float | tuple[float, ...], list[float]]:
    """Return (stage -> activation of a micro-batch, rank -> largest peak), in blocks, or for a search in stages."""
    sizes = layout.microbatch_sizes
    factors = tuple(size * len(sizes) / sum(sizes) for size in sizes)
    schedule = layout.schedule
    if layout.search is not None:
        return 1.0, [layout.search.memory * max(factors)] * schedule.ranks
    blocks = list(layout.stage_layers)
    blocks[0] -= 1  # the embedding keeps only tokens
    activation = tuple(float(max(blocks[at], 1)) for at in schedule.position_of)
    return activation, list(simulate(schedule, Costs(activation=activation, microbatch=factors)).peak_memory)


class BackgroundSearch:
    """A search in a process of its own, at the lowest priority."""

    def __init__(self, text: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pipeloom.solver.replan"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        # A thread of its own writes and reads, so that neither side waits for room in a pipe.
        self._output = ThreadPoolExecutor(1, "pipeloom-replan").submit(self._ask, text)

    def _ask(self, text: str) -> str:
        """Write the request, and return the output at its end; stdin stays open meanwhile, or the search ends."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        with suppress(BrokenPipeError):
            requests.write(f"{text}\n")
            requests.flush()
        output = answers.read()
        self._process.wait()
        return output

    def answer(self) -> dict[str, Any] | None:
        """Return the schedule, as JSON, or the last line of a failure under "failed"; None while it is searched."""
        if not self._output.done():
            return None
        text, code = self._output.result(), self._process.returncode
        if code:
            return {"failed": (text.strip().splitlines() or [f"exit code {code}"])[-1][:200]}
        answer: dict[str, Any] = json.loads(text)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._output.result()
