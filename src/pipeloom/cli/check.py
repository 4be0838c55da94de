"""`pipeloom check`: the proof that a schedule in a file can run, or the reason why it cannot."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from pipeloom.cli.requests import JsonOption
from pipeloom.errors import UsageError


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A schedule as CSV or JSON.")],
    receive_depth: Annotated[
        int | None, typer.Option(metavar="N", help="Prove it for N receives open on each channel.")
    ] = None,
    transport: Annotated[
        Literal["individual", "batched"], typer.Option(help="Also prove the message order of this transport.")
    ] = "individual",
    as_json: JsonOption = False,
) -> None:
    """Prove that every rank can run FILE to its end: complete, in order, on its ranks, free of deadlock.

    Exit code 0, or 3 with the reason in words, or 2 for a file that cannot be read.
    """
    if receive_depth is not None and receive_depth < 1:
        raise UsageError(f"--receive-depth is {receive_depth}; it must be a whole number of at least 1")
    from pipeloom.schedule import check
    from pipeloom.schedule.files import load

    schedule = load(file)
    check(schedule, receive_depth=receive_depth, transport=transport)
    if as_json:
        found = {"ok": True, "name": schedule.name, "ranks": schedule.ranks, "stages": schedule.stages}
        print(json.dumps(found | {"microbatches": schedule.microbatches, "actions": schedule.actions}))
    else:
        print(
            f"{file}: ok; ranks {schedule.ranks}, stages {schedule.stages}, micro-batches {schedule.microbatches}, "
            f"actions {schedule.actions}"
        )
