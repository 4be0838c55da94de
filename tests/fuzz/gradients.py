"""Random models under random schedules and layouts, against one process: gradients (None too), buffers, hooks, weights.

A case (_cases.py) is a model from a grammar (_layers.py), a schedule, a layout and options. It runs three ways (_runs.py): its
layers one after the other in one process, and either in a LocalPipeline or on forked processes (_crew.py). Whatever differs is
a failure, as is an exception or a hang; a refusal is one unless REFUSALS lists it with its reason. Failures are shrunk
(_shrink.py), and one of each sort is printed with the line that runs it again.
"""

from __future__ import annotations

import contextlib
import random
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuzz._cases import LARGEST_WORLD, Case, draw_case, schedule_of
from fuzz._crew import Crew, Hang
from fuzz._layers import CUTTING
from fuzz._loop import smallest
from fuzz._runs import Observation, differences, distributed, local, observed, reference
from fuzz._shrink import simpler

CASES = 1_000
TIMEOUT, COMPILING = 60.0, 120.0  # seconds for one case, and for one with a compiled layer, on a busy machine
SHRINK_SECONDS = 60.0


@dataclass(frozen=True)
class Refusal:
    """A sentence with which Pipeloom, or torch, may refuse a case.

    Attributes:
        pattern: of the message.
        reason: why that is right.
        where: the cases that may be refused so.
    """

    pattern: str
    reason: str
    where: Callable[[Case], bool] = lambda case: True


def _has(*kinds: str) -> Callable[[Case], bool]:
    return lambda case: any(layout.kind in kinds for layout in case.layouts)


def _out_of_order(case: Case) -> bool:
    return bool(case.shuffle) or len(schedule_of(case).routes) > 1


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "has running statistics .*, and under schedule .* does not get every micro-batch in order",
        "running statistics depend on the order of the micro-batches, and replicas of a stage see some of them only",
        _out_of_order,
    ),
    Refusal(
        "is recomputed, and its forward changes its input in place: work on a copy there",
        "the second run would see the changed input",
        lambda case: case.recompute != "none" and _has("changed input")(case),
    ),
    Refusal(
        "the loss carries no gradient for any micro-batch, but the outputs that it is computed from do",
        "the loss reads an output that carries none, beside one that does",
        _has(*CUTTING),
    ),
    Refusal(
        "torch.func.* don't yet support saved tensor hooks",
        "recomputation is torch's checkpoint, in which torch.func takes no gradient",
        lambda case: case.recompute != "none" and _has("functional gradient")(case),
    ),
)


FINE = ("equal", "refused", "both fail", "one process fails")


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        sort: one of FINE, or the class of the failure.
        lines: what is wrong.
    """

    sort: str
    lines: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.sort not in FINE


# -- a case on its processes -------------------------------------------------------------------------------------------


def _reference_of(case: Case) -> Observation:
    return observed(reference, case)


def _reference_and_local(case: Case) -> tuple[Observation, Observation]:
    return observed(reference, case), observed(local, case)


def _distributed_of(case: Case) -> Observation:
    return observed(distributed, case)


def _has_error(seen: Any) -> bool:
    return isinstance(seen, Observation) and seen.error is not None


class Runner:
    """Runs cases, on processes that are started once."""

    def __init__(self) -> None:
        self._one = Crew(1)
        self._crews = {world: Crew(world) for world in range(1, LARGEST_WORLD + 1)}

    def outcome(self, case: Case) -> Outcome:
        """Runs a case and compares it with one process; one that hangs runs again, on new processes: the machine may be busy."""
        with contextlib.suppress(Hang):
            return self._outcome(case)
        try:
            return self._outcome(case)
        except Hang as hang:
            return Outcome("hang", (f"hang: {hang}",))

    def _outcome(self, case: Case) -> Outcome:
        timeout = COMPILING if _has("compiled")(case) else TIMEOUT
        if case.dp:
            (want,) = self._one.run(_reference_of, case, timeout, lambda result: False)
            seen = self._crews[case.world].run(_distributed_of, case, timeout, _has_error)
        else:
            ((want, got),) = self._one.run(_reference_and_local, case, timeout, lambda result: False)
            seen = [got]
        return judge(case, want, seen)

    def close(self) -> None:
        for crew in (self._one, *self._crews.values()):
            crew.stop()


def judge(case: Case, want: Observation, seen: list[Observation]) -> Outcome:
    """What the observations of one process and of the pipeline say."""
    errors = [process for process in seen if process.error is not None]
    if want.error is not None:
        return Outcome("both fail" if errors else "one process fails")
    # a rank that another one's failure stops says so with a DistributedError: the cause is elsewhere
    for process in sorted(
        errors, key=lambda process: process.error is not None and process.error[0] == "DistributedError"
    ):
        assert process.error is not None
        kind, message, trace = process.error
        if any(re.search(r.pattern, message) and r.where(case) for r in REFUSALS):
            return Outcome("refused")
        sort = f"{'refusal' if process.refused else 'error'} {kind}"
        return Outcome(sort, (f"{kind}: {message}", *([] if process.refused else trace.splitlines()[-12:])))
    lines = differences(case, want, seen)
    if not lines:
        return Outcome("equal")
    return Outcome(re.split(r"[: ]", lines[0])[0], tuple(lines))


# -- many cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A failure, shrunk; `number`: of the case it came from, `seconds`: after which it was found."""

    case: Case
    outcome: Outcome
    number: int
    seconds: float

    @property
    def needs(self) -> frozenset[str]:
        """What the failure needs: the layers beside linear ones, and the features."""
        return features(self.case)

    def explains(self, case: Case, outcome: Outcome) -> bool:
        """Whether another failure looks like this one: it fails alike, and has all that this one needs."""
        return self.outcome.sort == outcome.sort and self.needs <= features(case)

    def text(self) -> str:
        lines = "\n".join(f"    {line}" for line in self.outcome.lines[:16])
        return (
            f"case {self.number}, after {self.seconds:.0f} s: {self.outcome.sort}\n{lines}\n  {reproduces(self.case)}"
        )


def features(case: Case) -> frozenset[str]:
    """The layers of a case beside linear ones, their hooks, and whatever else may break it."""
    layers = {part for layout in case.layouts for part in (layout.kind, layout.frozen, *layout.hooks)}
    schedule = schedule_of(case)
    flags = {
        "several ranks": case.ranks > 1,
        "several stages": schedule.stages > 1,
        "split backward": schedule.splits_backward,
        "two routes": len(schedule.routes) > 1,
        "shuffled": bool(case.shuffle),
        "processes": case.dp > 0,
        "replicas": case.dp > 1,
        "tied": bool(case.ties),
        "one object": case.one_object,
        "recompute": case.recompute != "none",
        "main gradients": case.main_gradients,
        "sharded": case.shard_gradients,
        "evaluation": case.evaluate,
        "accumulation": case.accumulate > 1,
        "zeros": case.zero == "zeros",
    }
    return frozenset(layers - {"linear", ""}) | {name for name, there in flags.items() if there}


def reproduces(case: Case) -> str:
    """The command that runs the case again."""
    return f"python -m tests.fuzz gradients --case {shlex.quote(case.to_json())}"


def fuzz(seed: int, cases: int | None, deadline: float | None, say: Callable[[str], None] = print) -> list[Finding]:
    """Draws and runs cases; the findings, one of each sort, as they are found."""
    begun = time.monotonic()
    runner = Runner()
    findings: list[Finding] = []
    counts: Counter[str] = Counter()
    number = 0
    limit = CASES if cases is None and deadline is None else cases
    try:
        while (limit is None or number < limit) and (deadline is None or time.monotonic() < deadline):
            case = draw_case(random.Random(f"{seed} {number}"))
            outcome = runner.outcome(case)
            counts["failed" if outcome.failed else outcome.sort] += 1
            if outcome.failed and not any(finding.explains(case, outcome) for finding in findings):
                found = time.monotonic() - begun
                finding = shrunk(runner, case, outcome, deadline, number, found)
                if not any(other.explains(finding.case, finding.outcome) for other in findings):
                    findings.append(finding)
                    say(finding.text())
            number += 1
    finally:
        runner.close()
    seconds = time.monotonic() - begun
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    rate = number / max(seconds, 1e-9)
    say(f"gradients: seed {seed}, {number} cases in {seconds:.0f} s ({rate:.1f} per second): {told}")
    return findings


def shrunk(runner: Runner, case: Case, outcome: Outcome, deadline: float | None, number: int, found: float) -> Finding:
    """The failure as small as it gets within the time that there is."""

    def fails(candidate: Case) -> bool:
        return runner.outcome(candidate).sort == outcome.sort

    seconds = SHRINK_SECONDS if deadline is None else min(SHRINK_SECONDS, deadline - time.monotonic())
    small = smallest(case, fails, simpler, seconds)
    return Finding(small, runner.outcome(small) if small != case else outcome, number, found)


def main(seed: int, cases: int | None, deadline: float | None) -> int:
    """The part `gradients` of the fuzzer; the number of sorts of failures."""
    return len(fuzz(seed, cases, deadline, lambda text: print(text, flush=True)))


def replay(text: str) -> int:
    """Runs the case that `text` (JSON) describes; 1 where it fails."""
    runner = Runner()
    try:
        outcome = runner.outcome(Case.from_json(text))
    finally:
        runner.close()
    print("\n".join((outcome.sort, *(f"    {line}" for line in outcome.lines))))
    return int(outcome.failed)
