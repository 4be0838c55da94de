"""SQLite exports of Nsight Systems: NVTX ranges and the kernels that were launched inside them, as events of a Chrome trace."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

from pipeloom.errors import UsageError
from pipeloom.limits import open_file
from pipeloom.traces.inferred import KernelLaunch, on_device

RECORD_RANGES = (
    'with torch.cuda.nvtx.range(f"PP:{stage}F{microbatch}"): around each forward, and the same with B around each backward, '
    "and let nsys trace cuda and nvtx"
)
"""The line that gives an export the names of its actions, which kernels alone do not have."""

_ERA = 10**15  # ns: times since the epoch do not fit into a float
_HEAD = b"SQLite format 3\0"
_TABLES = "NVTX_EVENTS StringIds CUPTI_ACTIVITY_KIND_KERNEL CUPTI_ACTIVITY_KIND_RUNTIME TARGET_INFO_SESSION_START_TIME"
_PROCESS = "/ 16777216 % 16777216"  # of a globalTid or globalPid
_QUERIES = (
    "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME",
    f"SELECT n.globalTid {_PROCESS}, n.start, n.end, COALESCE(n.text, s.value) FROM NVTX_EVENTS n LEFT JOIN StringIds s "
    "ON n.textId = s.id WHERE n.end IS NOT NULL AND n.eventType IN (59, 60)",  # pushed and popped, started and ended
    f"SELECT r.globalTid {_PROCESS}, r.start, k.start, k.end FROM CUPTI_ACTIVITY_KIND_KERNEL k "
    "JOIN CUPTI_ACTIVITY_KIND_RUNTIME r "
    f"ON k.correlationId = r.correlationId AND k.globalPid {_PROCESS} = r.globalTid {_PROCESS} LEFT JOIN StringIds s "
    "ON k.shortName = s.id WHERE COALESCE(s.value, '') NOT LIKE 'nccl%'",
)


def is_export(path: Path) -> bool:
    """Return whether the file is an SQLite database with the name of one."""
    if path.suffix.lower() != ".sqlite" or not path.is_file():
        return False
    with open_file(path, "a trace") as file:
        return file.read(len(_HEAD)) == _HEAD


def read_trace(path: Path) -> dict[str, Any]:
    """Return the ranges of every process, in µs of one clock: on the device, from the first kernel launched inside to the end
    of the last, or on the host where none was.

    Raises UsageError for a file without the tables, or with ranges of several sessions.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            if missing := [name for name in _TABLES.split() if name not in names]:
                raise UsageError(f"{path} has no table {', '.join(missing)}; record: {RECORD_RANGES}")
            sessions, ranges, kernels = (database.execute(query).fetchall() for query in _QUERIES)
    except sqlite3.Error as error:
        raise UsageError(f"{path} is no export of Nsight Systems: {error}") from None
    if len(sessions) != 1:
        raise UsageError(f"{path} has {len(sessions)} sessions; export one session to a file")
    launches: dict[int, list[KernelLaunch]] = defaultdict(list)
    for process, *launch in sorted(kernels):
        launches[process].append(KernelLaunch(*launch))
    events = []
    for process, start, end, name in ranges:
        device = on_device(launches[process], start, end)
        begin, stop = device or (start, end)
        events.append({
            "ph": "X", "pid": process, "name": str(name), "cat": "gpu_user_annotation" if device else "user_annotation",
            "ts": (sessions[0][0] % _ERA + begin) / 1e3, "dur": (stop - begin) / 1e3,
        })  # fmt: skip
    return {"traceEvents": events}
