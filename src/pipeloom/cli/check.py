"""`pipeloom check`: the proof that a schedule in a file can run, or the reason why it cannot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipeloom.cli.options import CostFlags, bytes_with
from pipeloom.cli.output import JSON_HELP
from pipeloom.errors import ScheduleError, UsageError

if TYPE_CHECKING:
    from pipeloom.schedule import Schedule


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A schedule in CSV or JSON format.")],
    receive_depth: Annotated[
        int | None, typer.Option(metavar="N", help="Check that N open receives per channel suffice.")
    ] = None,
    transport: Annotated[
        Literal["individual", "batched"], typer.Option(help="Also check the message order of this transport.")
    ] = "individual",
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Costs with bytes, for the limits of memory.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="GIB", help="Check that 20 or 20GiB per device suffice.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="GIB", help="Check that 64 or 64GiB of host memory per rank suffice for its copies."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Check that a schedule is complete and free of deadlock, and with --costs that it fits the memory.

    The exit code is 0 if every rank can run FILE to its end, 3 (with the reason) if not, and 2 if FILE cannot be read.
    """
    if receive_depth is not None and receive_depth < 1:
        raise UsageError(f"--receive-depth is {receive_depth}; it must be a whole number of at least 1")
    from pipeloom.schedule import check
    from pipeloom.schedule.files import load
    from pipeloom.schedule.simulate import worst_peaks

    schedule = load(file)
    check(schedule, receive_depth=receive_depth, transport=transport)
    _require_memory(schedule, costs, {"--memory": memory, "--host-memory": host_memory})
    peaks = worst_peaks(schedule)
    if as_json:
        summary = {"ok": True, "name": schedule.name, "ranks": schedule.ranks, "stages": schedule.stages}
        counts = {"microbatches": schedule.microbatches, "actions": schedule.actions, "worst_peaks": peaks}
        print(json.dumps(summary | counts))
    else:
        print(
            f"{file}: ok; ranks {schedule.ranks}, stages {schedule.stages}, micro-batches {schedule.microbatches}, "
            f"actions {schedule.actions}; stage-micro-batches alive per rank, whatever the times: at most "
            f"{' '.join(map(str, peaks))}"
        )


def _require_memory(schedule: Schedule, costs: Path | None, limits: Mapping[str, str | None]) -> None:
    """Raise ScheduleError where a rank holds more than the limit of a flag, on its device or in host memory."""
    from pipeloom.schedule import Costs, simulate
    from pipeloom.schedule.channels import size_words
    from pipeloom.schedule.costs import DEVICE, HOST_MEMORY

    values = Costs() if costs is None else CostFlags(costs=costs).values()
    for pool, (flag, text) in zip((DEVICE, HOST_MEMORY), limits.items(), strict=True):
        if text is None:
            continue
        limit = bytes_with(values, text, flag)
        peaks = simulate(schedule, values).peak_bytes.get(pool, (0.0,))
        if max(peaks) > limit:
            raise ScheduleError(
                f"rank {peaks.index(max(peaks))} holds {size_words(max(peaks))} in pool {pool} at once, and {flag} is "
                f"{text:.60}; nearest: {math.ceil(max(peaks))}B"
            )
