"""The costs of a training system's job and its possible gain, in the words of the system: `plan --job` and `improve --job`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeloom.cli.output import emit, write, write_csv
from pipeloom.config.sections import PARTS_OF_BLOCKS
from pipeloom.config.settings import toml_value
from pipeloom.errors import CapacityError, UsageError
from pipeloom.interop.gain import RUNTIME_OF, Neighbourhood, Run, changed_flags, diff_lines, least_gain
from pipeloom.interop.pipeloom import unheld
from pipeloom.interop.systems import SYSTEMS, translated
from pipeloom.plan import RUNTIMES, Device, LayoutCosts, Planner
from pipeloom.plan.export import layout_string
from pipeloom.plan.job import Job
from pipeloom.plan.refine import refine
from pipeloom.plan.report import as_dict, gib, reason
from pipeloom.plan.run import runtime_of

Measured = Sequence[tuple[Sequence[int], float, float]]
LEAST_MEASURED = 0.01, "stage times are measured"
_FASTER, _SLOWER = 8, 6  # rows of neighbours
READS_ORDERS = ("torchtitan", "automodel")
"""Systems that run the order of a CSV file."""
_SAME = 1e-3  # share of a step: a change of less is no row


@dataclass(frozen=True)
class JobGain:
    """A job, predicted, and the best run near it.

    Attributes:
        now: the job.
        least: the least share of the step that is worth a change, and how large the errors of predictions are.
        ordered: the best run with an order that was searched for it.
        note: what the search for an order says where it found none.
    """

    space: Neighbourhood
    now: Run
    least: tuple[float, str]
    ordered: Run | None = None
    note: str = ""

    def in_order(self, table: Path, seconds: float, split: bool) -> JobGain:
        """Return the gain with an order searched for the best run, which its system reads from the file `table`.

        Args:
            seconds: of the search.
            split: whether backwards may be split into I and W.

        Raises UsageError for a system that reads no order.
        """
        job = self._found.job
        if job.system not in READS_ORDERS:
            system = f"{job.system} runs its own orders alone" if job.system != "pipeloom" else "train searches itself"
            raise UsageError(f"--csv: {system}; nearest: --output FILE, the best job")
        planner = self.space.planner_of(job)
        before = self._found.prediction
        whole = not (split or before.schedule.splits_backward)
        (best,) = refine(planner, [before], self.space.memory, seconds, whole)
        if best.searched is None:
            note = f"no order is faster than that of {before.layout.schedule}: {table} is not written"
            return replace(self, note=note)
        job = replace(job, layout=replace(job.layout, schedule=str(table)))
        return replace(self, ordered=Run(job, best))

    def report(
        self, output: Path | None, as_json: bool, details: Callable[[LayoutCosts, Planner, bool], list[str]]
    ) -> None:
        """Write the best run, and print the costs of the job (`details`), its neighbours, and the best run.

        Raises CapacityError where neither the job nor a run near it fits.
        """
        best = self.best
        if best is not None and best.prediction.searched is not None:
            write_csv(best.prediction.searched, Path(best.job.layout.schedule))
        if output is not None and best is not None:
            text, losses = translated(best.job, best.job.system)
            write(output, lambda: text)
            print("".join(f"{loss}\n" for loss in losses), end="", file=sys.stderr)
        planner, prediction = self.space.planner, self.now.prediction
        head = [*details(prediction, planner, bool(planner.factors))]
        emit(as_json, self.values, lambda: [*head, *self.lines()])
        smallest = (self.best or self.now).prediction.peak
        if smallest > self.space.memory:
            raise CapacityError(
                f"the job needs {gib(prediction.peak)} GiB, and a device has {gib(self.space.memory)}; the smallest run near it "
                f"needs {gib(smallest)}"
            )

    @cached_property
    def neighbours(self) -> list[Run]:
        """The runs one change away that the system takes, the fastest of those that fit first."""
        return self.space.around(self.now)

    @cached_property
    def _found(self) -> Run:
        return self.ordered or self.space.best(self.now)

    @cached_property
    def best(self) -> Run | None:
        """The best run that changes lead to; None where it gains too little, and the job fits as it is."""
        needed = self.now.prediction.peak > self.space.memory and self._found is not self.now
        return self._found if needed or self.gain(self._found) >= self.least[0] else None

    def gain(self, run: Run) -> float:
        """Return the share of the step that a run saves."""
        return 1 - run.seconds / self.now.seconds

    def values(self) -> dict[str, Any]:
        """Return the JSON form."""
        best = self.best
        return {
            "system": self.now.job.system,
            "job": as_dict(self.now.prediction) | {"fits": self.now.prediction.peak <= self.space.memory},
            "notes": notes(self.now.job),
            "least_gain": self.least[0],
            "neighbours": [*map(self._row, self.neighbours)],
            "best": best and self._row(best) | {"diff": diff_lines(self.now.job, best.job)},
        }

    def _row(self, run: Run) -> dict[str, Any]:
        changes = changed_flags(self.now.job, run.job)
        sizes = {"layout": run.prediction.text, "step_seconds": run.seconds, "peak_bytes": run.prediction.peak}
        return sizes | {"gain": self.gain(run), "changes": changes, "reason": self._reason(run)}

    def _reason(self, run: Run) -> str:
        return reason(run.prediction, self.now.prediction, self.space.memory)

    def lines(self) -> list[str]:
        """Return what is printed below the costs of the job: its neighbours, and the best run."""
        job, (least, source) = self.now.job, self.least
        lines = [*notes(job), *([self.note] if self.note else [])]
        fitting = [each for each in self.neighbours if each.prediction.peak <= self.space.memory]
        rows: dict[frozenset[str], Run] = {}  # of those that change the same flags the best
        for each in self.neighbours:
            if abs(self.gain(each)) > _SAME:
                rows.setdefault(frozenset(word for word, *_ in _changes(job, each.job)), each)
        faster = [each for each in rows.values() if each in fitting and each.seconds < self.now.seconds]
        others = [each for each in rows.values() if each not in faster]
        lines += ["", f"one change away, as {job.system} takes it:"]
        for each in (*faster[:_FASTER], *others[:_SLOWER]):
            lines.append(f"  {_words(job, each.job)}: {self._reason(each)}")
        lines.append("")
        if self.best is None:
            most = 100 * self.gain(self._found)
            words = (
                f"the best run that changes lead to saves {most:.1f} % of the step" if most else "no change is faster"
            )
            return [*lines, f"nothing worth changing: {words}, and {100 * least:.1f} % would be ({source})"]
        saves = 100 * self.gain(self.best)
        if saves > 0:
            words = f"change, which saves {saves:.1f} % of the step and"
        elif self.best.prediction.peak <= self.space.memory:
            words = "change, so that the job fits: it"
        else:
            words = "no change makes it fit; the nearest"
        room = f"{gib(self.best.prediction.peak)} of {gib(self.space.memory)} GiB"
        lines.append(f"{words} needs {room} ({self._reason(self.best)}):")
        return [*lines, *(f"  {line}" for line in diff_lines(job, self.best.job))]


def gain_of(job: Job, device: Device, *, axes: bool = True, times: Callable[[Job], Measured] | None = None) -> JobGain:
    """Return the possible gain of a job on a kind of device. Raises UsageError without its model.

    Args:
        axes: as for `Neighbourhood`.
        times: measured times of a job, for `Planner.calibrated`; None: those of the device's data sheet.
    """
    if job.shape is None:
        raise UsageError("the job does not describe its model; give it with --model")
    runtime = RUNTIMES[RUNTIME_OF[job.system]]
    if job.ours is not None:
        config = job.ours.config
        runtime = runtime_of(config, None if config.train.device == "cpu" else device)
    space = Neighbourhood(Planner(job.shape, device, runtime), device.memory, axes)
    try:
        if times is not None:
            space = replace(space, planner=space.planner_of(job).calibrated(job.layout, times(job)))
        return JobGain(space, space.run(job), LEAST_MEASURED if times is not None else least_gain(job.system))
    except UsageError as error:
        raise UsageError("; ".join([*_refused(job), str(error)])) from None


def notes(job: Job) -> list[str]:
    """Return sentences on what the system refuses of a job, what was not understood, and what a prediction leaves out."""
    left_out = {
        "fp8": job.fp8 and f"{job.fp8} products of 8 bits are predicted as those of 16",
        "part": job.ours is not None
        and job.layout.recompute in PARTS_OF_BLOCKS
        and f"recompute={job.layout.recompute} is predicted block by block: a dry run has the bytes of a whole stage's",
        "span": job.recompute_span > 1
        and f"recomputing {job.recompute_span} blocks together is predicted as one by one",
        "share": job.offload_share < 1 and f"{job.offload_share:g} of the offloaded tensors: all are predicted",
        "p2p": "blocking_p2p" in job.options and "messages that are waited for are predicted as if they were not",
    }
    return [
        *_refused(job),
        *(f"not understood: {each}" for each in job.unknown),
        *(str(sentence) for sentence in left_out.values() if sentence),
        *(
            f"{key} = {toml_value(value)} is not in the prediction"
            for key, value in unheld(job).items()
            # the runtime has what matters of the others, the shape what a directory or a preset says
            if key.startswith(("model.", "parallel.", "schedule."))
            and key not in ("model.source", "model.weights", "model.preset")
        ),
    ]


def _refused(job: Job) -> list[str]:
    return [f"{job.system} refuses this job: {sentence}" for sentence in SYSTEMS[job.system].refusals(job)]


def _changes(job: Job, other: Job) -> list[tuple[str, str | None, str | None]]:
    """Return (flag, its value before, its value after); names of modules, which may be hundreds, as layers of the stages."""
    changes = [
        (key.rstrip(":"), *pair)
        for key, pair in changed_flags(job, other).items()
        if not re.search("module.fqns|^- ", key)
    ]
    if len(changes) < len(changed_flags(job, other)) and job.layout.stages != other.layout.stages:
        before, after = (layout_string(each.layout.stages) if each.layout.stages else None for each in (job, other))
        changes.append(("layers", before, after))
    return changes


def _words(job: Job, other: Job) -> str:
    """Return the flags that change on one line: "--micro-batch-size 1 → 2, without --overlap-grad-reduce"."""
    return ", ".join(
        f"without {key} {before}".rstrip()
        if after is None
        else f"with {key} {after}".rstrip()
        if before is None
        else f"{key} {before} → {after}"
        for key, before, after in _changes(job, other)
    )
