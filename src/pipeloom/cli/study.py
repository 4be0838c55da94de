"""Analysis of measured steps, as text and as JSON, for `show` and `rehearse`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeloom.cli.schedule import as_dict

if TYPE_CHECKING:
    from pipeloom.schedule import Timeline
    from pipeloom.solver import SearchResult
    from pipeloom.traces.measured import Prediction


@dataclass(frozen=True)
class Study:
    """The measured steps of a run and their analysis.

    Attributes:
        steps: the measured steps.
        prediction: costs fitted to some of the steps, and their error on the others.
        others: runs to predict from this run's costs, with their steps.
        layers: stage -> its number of blocks, or any other measure of its work, where known.
        memory: rank -> GB, where the trace contains it.
        notes: lines on how another program's trace was read.
        better: result of a search within the same memory, or None.
    """

    steps: Sequence[Timeline]
    prediction: Prediction
    others: Sequence[tuple[Path, Sequence[Timeline]]] = ()
    layers: Sequence[float] | None = None
    memory: Sequence[float] = ()
    notes: Sequence[str] = ()
    better: SearchResult | None = None

    @property
    def typical(self) -> Timeline:
        """The settled step with the median makespan."""
        from pipeloom.traces.measured import settled

        ordered = sorted(settled(self.steps), key=lambda step: step.makespan)
        return ordered[len(ordered) // 2]

    def search(self, seconds: float) -> SearchResult:
        """Return the best schedule found for the fitted costs, on this placement and within this schedule's peak memory."""
        from pipeloom.schedule import simulate
        from pipeloom.solver import search

        schedule, costs = self.typical.schedule, self.prediction.costs
        memory = max(simulate(schedule, costs).peak_memory)
        return search(
            schedule.ranks, schedule.microbatches, costs, memory, placement=list(schedule.placement), time_limit=seconds
        )

    def memory_law(self) -> tuple[float, float] | None:
        """Return (GB without activations, GB per stage-micro-batch) of a least-squares fit of the ranks' memory to their peak
        activations; None where memory is unknown or all peaks are equal."""
        peaks = self.typical.peak_activations
        if len(self.memory) != len(peaks) or len(set(peaks)) < 2:
            return None
        mean, level = fmean(peaks), fmean(self.memory)
        slope = sum((p - mean) * (g - level) for p, g in zip(peaks, self.memory, strict=True))
        slope /= sum((p - mean) ** 2 for p in peaks)
        return level - slope * mean, slope

    def predicted(self) -> list[tuple[Path, float, float]]:
        """Return (run, simulated makespan, measured makespan) of each run in `others`."""
        from pipeloom.traces.measured import predict_another

        fitted = self.typical.schedule
        return [(path, *predict_another(self.prediction.costs, fitted, steps)) for path, steps in self.others]

    @property
    def halved(self) -> list[int]:
        """Return the stages whose backward never ran split: the fitted costs count half of B as I and half as W."""
        from pipeloom.schedule.model import parts

        schedule = self.typical.schedule
        cells = chain.from_iterable(schedule.programs)
        split = {action.stage for action in chain.from_iterable(map(parts, cells)) if action.kind == "I"}
        return [stage for stage in range(schedule.stages) if stage not in split]

    def assumptions(self) -> str:
        """Return in words what the search takes for granted."""
        from pipeloom.schedule.placement import name_of

        schedule, halved = self.typical.schedule, self.halved
        where = name_of(schedule.placement, schedule.ranks) or ",".join(map(str, schedule.placement))
        some = (
            ""
            if len(halved) == schedule.stages
            else f" of stage{'s' * (len(halved) > 1)} {', '.join(map(str, halved))}"
        )
        split = f"I and W{some} as half of B each (never split in these steps)" if halved else "I and W as measured"
        return f"the same placement ({where}), {split}, and activations held until W"

    def as_dict(self) -> dict[str, Any]:
        from pipeloom.traces.measured import drift, settled, slow_stages, step_time, time_spent
        from pipeloom.traces.timelines import costs_dict

        prediction = self.prediction
        return as_dict(self.typical) | {
            "unit": "s",
            "steps": len(self.steps),
            "prediction": {
                "costs": costs_dict(prediction.costs),
                "fitted_steps": prediction.fitted,
                "tested_steps": prediction.tested,
                "simulated": prediction.simulated,
                "measured": prediction.measured,
                "error": prediction.error,
                "speed": prediction.speed,
                "error_at_speed": prediction.error_at_speed,
                "by_kind": dict(prediction.by_kind),
            },
            "time_spent": list(time_spent(settled(self.steps))),
            "step_time": fmean(map(step_time, settled(self.steps))),
            "slow_stages": [
                {"stage": slow.stage, "rank": slow.rank, "excess": slow.excess}
                for slow in slow_stages(self.steps, self.layers)
            ],
            "others": [
                {"run": str(path), "simulated": simulated, "measured": measured, "error": simulated / measured - 1}
                for path, simulated, measured in self.predicted()
            ],
            "drift": drift(self.steps),
            "memory": list(self.memory),
            "memory_law": self.memory_law(),
            "notes": list(self.notes),
            "search": None
            if self.better is None
            else {
                "makespan": self.better.value,
                "lower_bound": self.better.lower_bound,
                "placement": list(self.typical.schedule.placement),
                "halved_stages": self.halved,
            },
        }

    def lines(self) -> list[str]:
        """Return the lines below the drawing in the terminal."""
        from pipeloom.draw.figures import number, time_unit
        from pipeloom.traces.measured import drift, settled, slow_stages, time_spent

        factor, unit = time_unit([self.typical])
        prediction = self.prediction
        lines = [*self.notes]
        lines += [
            f"prediction: costs of {prediction.fitted} step{'s' * (prediction.fitted > 1)} predict "
            f"{number(prediction.simulated * factor)} {unit};",
            f"  the other {prediction.tested} took {number(prediction.measured * factor)} {unit}: error "
            f"{100 * prediction.error:+.1f} %",
        ]
        if abs(prediction.speed - 1) >= 0.02:
            lines.append(
                f"  actions ran {100 * abs(1 - 1 / prediction.speed):.0f} % {'faster' if prediction.speed < 1 else 'slower'} in "
                f"them; with costs at that speed: error {100 * prediction.error_at_speed:+.1f} %"
            )
        for (path, simulated, measured), (_, steps) in zip(self.predicted(), self.others, strict=True):
            here, there = self.typical.schedule.positions, steps[-1].schedule.positions
            cut = f", with the {here} stages cut evenly into {there}," if here != there else ""
            lines.append(
                f"the same costs{cut} predict {number(simulated * factor)} {unit} for {path}, which took "
                f"{number(measured * factor)} {unit}: "
                f"error {100 * (simulated / measured - 1):+.1f} %"
            )
        if prediction.by_kind:
            kinds = ", ".join(f"{kind} {100 * error:+.1f} %" for kind, error in prediction.by_kind.items())
            lines.append(f"time of an action against its fitted time: {kinds}")
        spent = time_spent(settled(self.steps))
        columns = [name for name in spent[0] if any(row[name] > 0 for row in spent)]
        table = [["rank", *columns]]
        table[0].append("step")
        table += [
            [str(rank), *(number(row[name] * factor) for name in columns), number(sum(row.values()) * factor)]
            for rank, row in enumerate(spent)
        ]
        wide = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
        lines += ["", f"where the time went, {unit} per step, mean over the steps"]
        lines += ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, wide, strict=True)) for row in table]
        law = self.memory_law()
        if law is not None:
            lines.append(
                f"memory per rank: {number(law[0], 3)} GB, plus {number(law[1], 3)} GB for each stage-micro-batch alive"
            )
        if self.better is not None:
            gain = 1 - self.better.value / prediction.simulated
            lines += [
                f"search within the same memory: {number(self.better.value * factor)} {unit}, {100 * gain:.1f} % less than this "
                f"schedule takes with these costs; no schedule takes less than {number(self.better.lower_bound * factor)} {unit}",
                f"  assumed: {self.assumptions()}",
            ]
        for slow in slow_stages(self.steps, self.layers):
            lines.append(
                f"stage {slow.stage} on rank {slow.rank} takes {100 * slow.excess:.0f} % longer than comparable stages"
            )
        change = drift(self.steps)
        if abs(change) >= 0.02:
            lines.append(
                f"steps became {100 * abs(change):.0f} % {'longer' if change > 0 else 'shorter'} from the first to the last"
            )
        return lines
