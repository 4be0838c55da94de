"""`pipeloom check`: the proof that a schedule in a file can run, or the reason why it cannot."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from pipeloom.cli.output import JSON_HELP
from pipeloom.errors import UsageError


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A schedule in CSV or JSON format.")],
    receive_depth: Annotated[
        int | None, typer.Option(metavar="N", help="Check that N open receives per channel suffice.")
    ] = None,
    transport: Annotated[
        Literal["individual", "batched"], typer.Option(help="Also check the message order of this transport.")
    ] = "individual",
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Check that a schedule is complete and free of deadlock.

    The exit code is 0 if every rank can run FILE to its end, 3 (with the reason) if not, and 2 if FILE cannot be read.
    """
    if receive_depth is not None and receive_depth < 1:
        raise UsageError(f"--receive-depth is {receive_depth}; it must be a whole number of at least 1")
    from pipeloom.schedule import check
    from pipeloom.schedule.files import load
    from pipeloom.schedule.simulate import worst_peaks

    schedule = load(file)
    check(schedule, receive_depth=receive_depth, transport=transport)
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
