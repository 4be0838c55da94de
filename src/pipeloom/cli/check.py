"""`pipeloom check`: the proof that a schedule in a file can run, or the reason why it cannot."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeloom.cli.options import CostFlags, SendFlags, argument, bytes_with, flag, with_options
from pipeloom.cli.output import emit, json_flag
from pipeloom.errors import ArgumentError, ScheduleError, UsageError
from pipeloom.schedule import Costs, Schedule, check, simulate
from pipeloom.schedule.channels import size_words
from pipeloom.schedule.check import CheckedTransport
from pipeloom.schedule.costs import DEVICE, HOST_MEMORY
from pipeloom.schedule.files import load
from pipeloom.schedule.simulate import worst_peaks


@with_options()
def command(
    *,
    file: str = argument(..., "FILE", "A schedule in CSV or JSON format."),
    receive_depth: int | None = flag(None, "N", "Check that N open receives per channel suffice."),
    transport: CheckedTransport | None = flag(
        None, None, "Without effect, and gone in 0.4: FILE runs with every transport."
    ),
    costs: Path | None = flag(None, "FILE", "Costs with bytes, for the limits of memory."),
    memory: str | None = flag(None, "GIB", "Check that 20 or 20GiB per device suffice."),
    host_memory: str | None = flag(
        None, "GIB", "Check that 64 or 64GiB of host memory per rank suffice for its copies."
    ),
    sending: SendFlags,
    as_json: bool = json_flag(),
) -> None:
    """Check that a schedule is complete and free of deadlock, and with --costs that it fits the memory.

    The exit code is 0 if every rank can run FILE to its end, 3 (with the reason) if not, and 2 if FILE cannot be read.
    """
    schedule = load(file)
    if transport is not None:
        print(
            "--transport has no effect and goes in 0.4; a file that passes runs with every transport", file=sys.stderr
        )
    check(schedule, receive_depth=receive_depth)
    sending.of(schedule)
    _require_memory(schedule, costs, sending, {"--memory": memory, "--host-memory": host_memory})
    peaks = worst_peaks(schedule)
    sizes = {name: getattr(schedule, name) for name in ("ranks", "stages", "microbatches", "actions")}
    words = ", ".join(f"{name.replace('microbatches', 'micro-batches')} {size}" for name, size in sizes.items())
    alive = " ".join(map(str, peaks))
    emit(
        as_json,
        lambda: {"ok": True, "name": schedule.name, **sizes, "worst_peaks": peaks},
        lambda: [f"{file}: ok; {words}; stage-micro-batches alive per rank, whatever the times: at most {alive}"],
    )


def _require_memory(
    schedule: Schedule, costs: Path | None, sending: SendFlags, limits: Mapping[str, str | None]
) -> None:
    """Raise ScheduleError where a rank holds more than the limit of a flag, on its device or in host memory."""
    values = sending.costs(Costs() if costs is None else CostFlags(costs=costs).values(), schedule)
    for pool, (option, text) in zip((DEVICE, HOST_MEMORY), limits.items(), strict=True):
        if text is None:
            continue
        limit = bytes_with(values, text, option)
        try:
            peaks = simulate(schedule, values).peak_bytes.get(pool, (0.0,))
        except ArgumentError as error:  # of a value in the file, which no flag gives
            raise UsageError(f"--costs {costs}: {error}") from None
        if max(peaks) > limit:
            raise ScheduleError(
                f"rank {peaks.index(max(peaks))} holds {size_words(max(peaks))} in pool {pool} at once, and {option} is "
                f"{text:.60}; nearest: {math.ceil(max(peaks))}B"
            )
