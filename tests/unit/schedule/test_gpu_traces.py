"""Traces of GPUs: Kineto's without names of actions, and exports of Nsight Systems, recovered or refused in a sentence."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from pipeloom.errors import PipeloomError, UsageError
from pipeloom.schedule.model import parts
from pipeloom.traces import reader_of
from pipeloom.traces.measured import MeasuredSteps

LATE = 3000.0  # µs from the launch of an action on the host to its start on the device


def load(path: Path) -> MeasuredSteps:
    reader = reader_of(path)
    assert reader is not None
    return reader.read(path)


def measured(schedule: pl.Schedule) -> pl.Timeline:
    """Uneven stages, in µs."""
    stages = schedule.stages
    rows = [[1000.0 + 300 * at for at in range(stages)], [900.0] * stages, [1100.0] * stages]
    return pl.simulate(schedule, pl.Costs(*map(tuple, rows), p2p=50.0))


def kineto(timeline: pl.Timeline, rank: int, *, steps: int = 1, skew: float = 0.0, host: bool = True) -> dict[str, Any]:
    """A trace as torch's profiler writes it of a loop on a GPU: operators and launches on the host, kernels later."""
    schedule, events, number = timeline.schedule, list[dict[str, Any]](), 0

    def event(cat: str, name: str, start: float, dur: float, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": start + skew, "dur": dur, "tid": 1, "pid": rank, "args": args}
        )

    for step in range(steps):
        now = begun = step * 1e5
        for cell, start, end in zip(schedule.programs[rank], timeline.starts[rank], timeline.ends[rank], strict=True):
            (action,) = parts(cell)
            forward = action.kind == "F"
            if host and (action.stage if forward else action.stage < schedule.stages - 1):
                event("cpu_op", "c10d::recv_", now, 1.0)
            now += 2.0
            for at in range(2):  # two operators with a kernel each, and a gap of the device between them
                name = "aten::mm" if forward else "autograd::engine::evaluate_function: MmBackward0"
                number += 1
                if host:
                    event("cpu_op", name, now, 2.0)
                event("cuda_runtime", "cudaLaunchKernel", now + 0.5, 0.2, correlation=number)
                half = (end - start) / 2
                event(
                    "kernel", "sm90_gemm", begun + LATE + start + at * half, half - 5.0 * (at == 0), correlation=number
                )
                now += 2.5
            if host and (action.stage < schedule.stages - 1 if forward else action.stage):
                event("cpu_op", "c10d::send", now, 0.5)
            now += 1.0
            number += 1
            event(
                "cuda_runtime", "cudaLaunchKernel", now - 2.0, 0.2, correlation=number
            )  # by a hook of the last operator
            event("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgs)", begun + LATE + end, 400.0, correlation=number)
            now += 2.0
        event("user_annotation", f"ProfilerStep#{step}", begun, now - begun)
    return {"distributedInfo": {"rank": rank, "world_size": schedule.ranks}, "traceEvents": events}


def folder(path: Path, timeline: pl.Timeline, ranks: int | None = None, skew: float = 0.0, **more: Any) -> Path:
    path.mkdir()
    for rank in range(timeline.schedule.ranks if ranks is None else ranks):
        (path / f"rank{rank}.json").write_text(json.dumps(kineto(timeline, rank, skew=skew * rank, **more)))
    return path


def require_recovered(steps: MeasuredSteps, timeline: pl.Timeline, count: int = 1) -> None:
    assert len(steps.timelines) == count
    for step in steps.timelines:
        assert step.schedule.programs == timeline.schedule.programs
        assert step.makespan == pytest.approx(timeline.makespan * 1e-6, rel=1e-6)
        for mine, theirs in zip(step.starts, timeline.starts, strict=True):
            assert mine == pytest.approx([each * 1e-6 for each in theirs], abs=1e-6)


SCHEDULE = pl.schedules.one_f_one_b(ranks=4, microbatches=6)
TIMELINE = measured(SCHEDULE)


@pytest.mark.parametrize("schedule", [SCHEDULE, pl.schedules.build("gpipe", 2, 4)], ids=["1f1b", "gpipe"])
def test_actions_are_timed_by_the_kernels_that_their_operators_launched(schedule: pl.Schedule, tmp_path: Path) -> None:
    timeline = measured(schedule)
    require_recovered(load(folder(tmp_path / "trace", timeline)), timeline)


def test_several_steps_whose_kernels_end_behind_the_hosts_mark(tmp_path: Path) -> None:
    require_recovered(load(folder(tmp_path / "trace", TIMELINE, steps=3)), TIMELINE, 3)


def durations(timeline: pl.Timeline, kind: str) -> list[float]:
    rows = zip(timeline.schedule.programs, timeline.starts, timeline.ends, strict=True)
    return [end - start for row in rows for cell, start, end in zip(*row, strict=True) if parts(cell)[0].kind == kind]


def test_clocks_that_differ_are_aligned(tmp_path: Path) -> None:
    steps = load(folder(tmp_path / "trace", TIMELINE, skew=5e4))
    (step,) = steps.timelines
    assert step.schedule.programs == SCHEDULE.programs
    for kind in "FB":
        mine, theirs = (durations(each, kind) for each in (step, TIMELINE))
        assert mine == pytest.approx([each * 1e-6 for each in theirs], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 3}, "holds the traces of 3 of 4 processes"),
        ({"host": False}, "no event has the name of an action"),
    ],
    ids=["a missing rank", "kernels alone"],
)
def test_what_does_not_say_which_action_ran_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        load(folder(tmp_path / "trace", TIMELINE, **options))


def test_two_stages_a_rank_are_refused_without_names(tmp_path: Path) -> None:
    timeline = measured(pl.schedules.interleaved(ranks=2, chunks=2, microbatches=4))
    with pytest.raises(UsageError, match="not those of one stage per rank"):
        load(folder(tmp_path / "trace", timeline))


def export(
    path: Path, timeline: pl.Timeline, ranks: list[int], *, steps: int = 1, late: int = 0, without: str = ""
) -> Path:
    """An export of Nsight Systems of the processes of some ranks; `late`: ns by which the session started later."""
    tables = {
        "TARGET_INFO_SESSION_START_TIME": "utcEpochNs",
        "StringIds": "id, value",
        "NVTX_EVENTS": "start, end, eventType, text, textId, globalTid",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId",
        "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, globalPid, correlationId, shortName",
    }
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in tables}
    rows["TARGET_INFO_SESSION_START_TIME"] = [(1_790_000_000_000_000_000 + late,)]
    strings = {"sm90_gemm": 1, "ncclDevKernel_SendRecv": 2}
    number = 0
    for rank in ranks:
        pid = (1 << 56) + (100 + rank) * 2**24
        for step in range(steps):
            begun = now = step * 10**8 - late
            for cell, start, end in zip(
                timeline.schedule.programs[rank], timeline.starts[rank], timeline.ends[rank], strict=True
            ):
                name = f"PP:{cell}"
                strings.setdefault(name, len(strings) + 1)
                text, ident = (name, None) if rank % 2 else (None, strings[name])
                rows["NVTX_EVENTS"].append((now, now + 9000, 59, text, ident, pid + 1))
                for at, kernel in enumerate(("sm90_gemm", "ncclDevKernel_SendRecv")):
                    number += 1
                    device = [int(1e3 * (LATE + each)) + begun for each in ((start, end), (end, end + 300))[at]]
                    rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append((now + 100, now + 200, pid + 2, number))
                    rows["CUPTI_ACTIVITY_KIND_KERNEL"].append((*device, pid, number, strings[kernel]))
                now += 10_000
    rows["StringIds"] = [(ident, value) for value, ident in strings.items()]
    with closing(sqlite3.connect(path)) as database:
        for name, columns in tables.items():
            if name != without:
                database.execute(f"CREATE TABLE {name} ({columns})")
                database.executemany(
                    f"INSERT INTO {name} VALUES ({','.join('?' * len(columns.split(',')))})", rows[name]
                )
        database.commit()
    return path


def test_an_export_of_nsight_systems_with_all_processes(tmp_path: Path) -> None:
    require_recovered(load(export(tmp_path / "all?mode=rwc#1 %41.sqlite", TIMELINE, [0, 1, 2, 3])), TIMELINE)


def test_an_export_with_two_stages_a_rank_and_several_steps(tmp_path: Path) -> None:
    timeline = measured(pl.schedules.interleaved(ranks=2, chunks=2, microbatches=4))
    require_recovered(load(export(tmp_path / "all.sqlite", timeline, [0, 1], steps=3)), timeline, 3)


def test_exports_of_sessions_that_started_at_other_times(tmp_path: Path) -> None:
    for rank in range(4):
        export(tmp_path / f"rank{rank}.sqlite", TIMELINE, [rank], late=10**9 * (rank % 3))
    require_recovered(load(tmp_path), TIMELINE)


def test_an_export_without_a_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipeloomError):
        load(export(tmp_path / "all.sqlite", TIMELINE, [0, 1, 3]))


@pytest.mark.parametrize("table", ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL", "TARGET_INFO_SESSION_START_TIME"])
def test_missing_tables_are_named(table: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"has no table {table}; record: with torch.cuda.nvtx.range\("):
        load(export(tmp_path / "all.sqlite", TIMELINE, [0, 1, 2, 3], without=table))


@pytest.mark.parametrize("apart", [False, True])
def test_an_export_whose_ranges_name_no_action_says_what_to_record(apart: bool, tmp_path: Path) -> None:
    for ranks in [[0], [1], [2], [3]] if apart else [[0, 1, 2, 3]]:
        path = export(tmp_path / f"{ranks[0]}.sqlite", TIMELINE, ranks)
        with closing(sqlite3.connect(path)) as database:
            database.execute("UPDATE NVTX_EVENTS SET text = 'step', textId = NULL")
            database.commit()
    with pytest.raises(UsageError, match=r"the name of an action.*torch.cuda.nvtx.range.*trace cuda and nvtx"):
        load(tmp_path if apart else tmp_path / "0.sqlite")


def test_a_file_of_several_sessions_and_one_that_is_no_export_are_refused(tmp_path: Path) -> None:
    path = export(tmp_path / "all.sqlite", TIMELINE, [0, 1, 2, 3])
    with closing(sqlite3.connect(path)) as database:
        database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (5)")
        database.commit()
    with pytest.raises(UsageError, match="has 2 sessions; export one session to a file"):
        load(path)
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(path.read_bytes()[:600])
    with pytest.raises(UsageError, match="is no export of Nsight Systems"):
        load(damaged)


def test_actions_in_two_events_each_are_refused(tmp_path: Path) -> None:
    def trace(name: str) -> Path:
        apart = [{"ph": phase, "name": name, "pid": 0, "tid": 0, "ts": at} for at, phase in enumerate("BE")]
        whole = [{"ph": "X", "name": each, "pid": 0, "ts": at, "dur": 1} for at, each in enumerate(("0F0", "0B0"))]
        (path := tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*apart, *whole]}))
        return path

    with pytest.raises(UsageError, match=r"the action 'PP:0F1' begins and ends in events of their own \(ph 'B'\)"):
        load(trace("PP:0F1"))
    assert load(trace("step")).timelines[0].schedule.microbatches == 1
