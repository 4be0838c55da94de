"""Traces of other programs: Chrome traces, CSV with durations, damaged files, and timer dumps, which an example converts."""

from __future__ import annotations

import gzip
import json
import random
import runpy
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from paths import ROOT
from pipeloom.errors import PipeloomError, UsageError
from pipeloom.schedule import Costs, simulate
from pipeloom.schedule.transforms import transformed
from pipeloom.traces import reader_of
from pipeloom.traces.measured import MeasuredSteps
from primus_dump import converted, dump


def load(path: Path) -> MeasuredSteps:
    reader = reader_of(path)
    assert reader is not None
    return reader.read(path)


def load_dump(folder: Path) -> MeasuredSteps:
    return load(converted(folder))


def _simulated(name: str, ranks: int, microbatches: int) -> pl.Timeline:
    """Stages of different costs, in seconds, with hops."""
    schedule = pl.schedules.build(name, ranks, microbatches)
    rng = random.Random(3)
    times = [tuple(round(rng.uniform(0.9, 1.1), 4) * 1e-2 for _ in range(schedule.stages)) for _ in range(3)]
    return pl.simulate(schedule, pl.Costs(*times, p2p=1e-4))


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", "zb-h1", "interleaved", "looped-bfs", "interleaved-zb", "zbv", "1f1b-overlap"]
)
def test_the_schedule_of_a_dump_is_found(name: str, labels: bool, tmp_path: Path) -> None:
    timeline = _simulated(name, 4, 8)
    found = load_dump(dump(tmp_path / "dump", timeline, labels=labels, old_keys=labels))
    assert len(found.timelines) == 2
    read = found.timelines[-1]
    assert read.schedule.programs == timeline.schedule.programs
    assert read.schedule.placement == timeline.schedule.placement
    assert read.source == "measured"
    for rank in range(4):
        taken = [end - start for start, end in zip(read.starts[rank], read.ends[rank], strict=True)]
        want = [end - start for start, end in zip(timeline.starts[rank], timeline.ends[rank], strict=True)]
        assert taken == pytest.approx(want)
    assert found.memory == tuple(10 + 2.5 * peak for peak in timeline.peak_activations)


def test_no_message_arrives_before_it_is_sent(tmp_path: Path) -> None:
    """Ranks whose clocks begin with their own first action are shifted behind what they wait for."""
    timeline = _simulated("1f1b", 4, 8)
    folder = dump(tmp_path / "dump", timeline, labels=False, seed=5)
    read = load_dump(folder).timelines[0]
    graph = {
        (a.kind, a.stage, a.microbatch): read.ends[r][i]
        for r, p in enumerate(read.schedule.programs)
        for i, a in enumerate(p)
    }
    for rank, program in enumerate(read.schedule.programs):
        for at, action in enumerate(program):
            stage, kind, mb = action.stage, action.kind, action.microbatch
            source = ("F", stage - 1, mb) if kind == "F" else ("B", stage + 1, mb)
            if source in graph:
                assert read.starts[rank][at] >= graph[source] - 1e-9
    assert read.makespan == pytest.approx(timeline.makespan, rel=0.05)


def test_a_dump_written_by_hand(tmp_path: Path) -> None:
    """Two ranks, two micro-batches, no labels: F0 F1 B0 B1 and F0 B0 F1 B1."""
    (tmp_path / "config.json").write_text('{"pp_size": 2, "vp_size": 1, "num_mbs": 2, "train_iters": 1}')
    (tmp_path / "pp_rank_0.json").write_text(
        '{"7": {"total": 12.0, "memory": 3.5, "fwd_start": [0.0, 1.0], "fwd_end": [1.0, 2.0],'
        ' "bwd_start": [4.0, 7.0], "bwd_end": [6.0, 9.0]}}'
    )
    (tmp_path / "pp_rank_1.json").write_text(
        '{"7": {"total": 12.0, "memory": 2.5, "fwd_start": [1.0, 4.0], "fwd_end": [2.0, 5.0],'
        ' "bwd_start": [2.0, 5.0], "bwd_end": [4.0, 7.0]}}'
    )
    assert reader_of(tmp_path) is None
    (read,), memory, _ = load_dump(tmp_path)
    assert read.schedule.programs == pl.schedules.one_f_one_b(2, 2).programs
    assert read.makespan == pytest.approx(9e-3)
    assert read.costs.forward == pytest.approx((1e-3, 1e-3))
    assert memory == (3.5, 2.5)


def test_chrome_traces_of_ours_and_of_torch(tmp_path: Path) -> None:
    from pipeloom.draw import trace

    timeline = _simulated("zbv", 4, 8)
    ours = tmp_path / "ours.json"
    ours.write_text(json.dumps(trace(timeline, 1e6)))
    read = load(ours).timelines[0]
    assert read.schedule.programs == timeline.schedule.programs
    assert read.makespan == pytest.approx(timeline.makespan)
    theirs = tmp_path / "theirs.json"
    events = [
        {"ph": "X", "name": "PP:0F0", "pid": 11, "ts": 5, "dur": 10},
        {"ph": "X", "name": "aten::mm", "pid": 11, "ts": 5, "dur": 1},
    ]
    events += [
        {"ph": "X", "name": "PP:1F0", "pid": 12, "ts": 20, "dur": 10},
        {"ph": "X", "name": "PP:1B0", "pid": 12, "ts": 30, "dur": 10},
    ]
    events += [{"ph": "X", "name": "PP:0B0", "pid": 11, "ts": 50, "dur": 20}]
    theirs.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    assert reader_of(theirs)
    assert load(theirs).timelines[0].makespan == pytest.approx(65e-6)


@pytest.mark.parametrize("word", ["offload", "offload=2/2", "shard=2", "shard-as-torch=2", "reduce-gradients=1"])
def test_a_trace_with_queues_is_read_back(word: str, tmp_path: Path) -> None:
    """Copies and gathers run beside the computation, and a stage is gathered more than once in a step."""
    costs = Costs(host_bandwidth=1, gather=0.5, reduce=0.5)
    timeline = simulate(transformed(pl.schedules.interleaved(2, 4), [word], costs), costs)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(pl.draw.trace(timeline)))
    (back,) = load(path).timelines
    assert back.schedule.codes == timeline.schedule.codes
    for rows, wanted in ((back.starts, timeline.starts), (back.ends, timeline.ends)):
        assert [list(row) for row in rows] == [pytest.approx([time / 1e3 for time in row]) for row in wanted]


def test_events_that_form_no_schedule_are_refused(tmp_path: Path) -> None:
    test_a_dump_written_by_hand(tmp_path)
    file = tmp_path / "pp_rank_1.json"
    content = json.loads(file.read_text())
    content["7"].update({"bwd_start": [0.0, 5.0], "bwd_end": [0.5, 6.0]})
    file.write_text(json.dumps(content))
    with pytest.raises(PipeloomError, match="do not form a schedule"):
        load_dump(tmp_path)


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        ({"traceEvents": 5}, "traceEvents is not a list"),
        ({"traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 1}]}, "no event has the name of an action"),
        ({"traceEvents": [{"ph": "X", "name": "0F0", "ts": "x", "dur": 1}]}, "has no ts and dur"),
        (
            {"traceEvents": [{"ph": "X", "name": "99999999F0", "ts": 1, "dur": 1}]},
            "do not name a valid stage or micro-batch 99999999",
        ),
        ({"traceEvents": [{"ph": "X", "name": "0F0", "ts": 1, "dur": 1}]}, "has no backward"),
        ({"traceEvents": [{"ph": "X", "name": "0F0", "ts": 10**400, "dur": 1}]}, "has no ts and dur"),
        (
            {"traceEvents": [], "distributedInfo": {"world_size": "2"}},
            'world_size = "2": it must be a whole number from 1',
        ),
        ({"traceEvents": [], "distributedInfo": {"world_size": 2}}, "holds the traces of 1 of 2 processes"),
    ],
)
def test_a_damaged_chrome_trace_is_refused(trace: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(trace))
    with pytest.raises(PipeloomError, match=words):
        load(file)


def kineto(rank: int, cells: list[tuple[str, float, float]], **more: Any) -> dict[str, Any]:
    """A trace of one rank as torch's profiler writes it; (name, start, duration) in µs."""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 40 + rank, "tid": 2, "ts": 3.5, "dur": 1.0},
        {"ph": "X", "cat": "user_annotation", "name": "PP:0SEND_F0", "pid": 40 + rank, "tid": 1, "ts": 4.0, "dur": 9.0},
        {"ph": "i", "name": "Iteration Start: PyTorch Profiler", "ts": 1.0},
    ]
    events += [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 40 + rank, "tid": 1, "ts": start, "dur": took}
        for name, start, took in cells
    ]
    info = {"backend": "nccl", "rank": rank, "world_size": 2}
    return {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events, **more}


FIRST = [("PP:0F0", 0, 10), ("PP:0F1", 10, 10), ("PP:0B0", 40, 20), ("PP:0B1", 70, 20)]
SECOND = [("PP:1F0", 10, 10), ("PP:1B0", 20, 20), ("PP:1F1", 40, 10), ("PP:1B1", 50, 20)]


def later(cells: list[tuple[str, float, float]], by: float) -> list[tuple[str, float, float]]:
    return [(name, start + by, took) for name, start, took in cells]


def folder_of(folder: Path, traces: dict[str, dict[str, Any]]) -> Path:
    folder.mkdir()
    for name, trace in traces.items():
        data = json.dumps(trace).encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder


def test_a_folder_of_kineto_traces(tmp_path: Path) -> None:
    """One file for each rank, on clocks that do not agree, one of them compressed; files of replicas are left out."""
    traces = {
        "host-a_41.1.pt.trace.json": kineto(0, FIRST),
        "host-a_42.1.pt.trace.json.gz": kineto(2, later(SECOND, 1e6)),
        "host-b_43.1.pt.trace.json": kineto(1, later(FIRST, 5)),
        "host-b_44.1.pt.trace.json": kineto(3, later(SECOND, 7)),
    }
    folder = folder_of(tmp_path / "traces", traces)
    assert reader_of(folder)
    found = load(folder)
    (read,) = found.timelines
    assert read.schedule.programs == pl.schedules.one_f_one_b(2, 2).programs
    assert read.makespan == pytest.approx(90e-6)
    assert "2 of 4 files hold the stages of another one" in found.notes[1]


def test_steps_of_the_profiler_and_times_of_the_device(tmp_path: Path) -> None:
    """`ProfilerStep#N` cuts the files into steps, a step that is not whole is left out, and the GPU's times count."""
    step = [("ProfilerStep#3", 0, 95), ("ProfilerStep#4", 100, 95), ("ProfilerStep#5", 200, 50)]
    traces = {
        f"rank{rank}_trace.json": kineto(
            rank, [*step, *cells, *later(cells, 100), *(later(cells, 200)[:1] if rank else [])]
        )
        for rank, cells in enumerate((FIRST, SECOND))
    }
    found = load(folder_of(tmp_path / "steps", traces))
    assert [timeline.makespan for timeline in found.timelines] == pytest.approx([90e-6, 90e-6])
    assert "1 of 3 steps" in found.notes[-1]
    for rank, cells in enumerate((FIRST, SECOND)):
        on_gpu = [
            {"ph": "X", "cat": "gpu_user_annotation", "name": name, "pid": 0, "ts": 3 * start, "dur": 3 * took}
            for name, start, took in cells
        ]
        traces[f"rank{rank}_trace.json"]["traceEvents"] += on_gpu
    found = load(folder_of(tmp_path / "device", traces))
    assert [timeline.makespan for timeline in found.timelines] == pytest.approx([270e-6])


def test_steps_without_marks_are_cut_where_an_action_repeats(tmp_path: Path) -> None:
    """Also where stages are gathered before the first action of a step, and steps have different numbers of micro-batches."""
    costs = Costs(forward=1e-3, input_grad=1e-3, weight_grad=1e-3, gather=1e-4, reduce=1e-4)
    for name, words, counts in (("1f1b", [], (4, 6, 4)), ("zbv", [], (4, 4)), ("interleaved", ["shard=2"], (4, 4, 4))):
        steps = [transformed(pl.schedules.build(name, 2, count), words, costs) for count in counts]
        events = []
        for at, schedule in enumerate(steps):
            for event in pl.draw.trace(simulate(schedule, costs), 1e6)["traceEvents"]:
                if event["ph"] == "X":
                    events.append({**event, "ts": event["ts"] + at * 1e6})
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"traceEvents": events}))
        assert [timeline.schedule.programs for timeline in load(file).timelines] == [each.programs for each in steps]


def test_steps_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    """The recording begins in the middle of a step."""
    cells = [
        (rank, cell)
        for rank, row in enumerate((FIRST, SECOND))
        for cell in [*row[-2:], *later(row, 100), *later(row, 300)]
    ]
    events = [{"ph": "X", "name": name, "pid": rank, "ts": start, "dur": took} for rank, (name, start, took) in cells]
    (tmp_path / "cut.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(UsageError, match=r"cut\.json: cannot tell its steps apart: record ProfilerStep marks"):
        load(tmp_path / "cut.json")


def test_a_counter_that_is_no_number_counts_as_none(tmp_path: Path) -> None:
    thread = {"pid": [0], "tid": {"x": 1}}
    events = [{"ph": "X", "name": name, **thread, "ts": at, "dur": 1} for at, name in enumerate(("0F0", "0B0"))]
    levels = [10**400, "x", float("nan"), True, 2.5]
    events += [{"ph": "C", "name": "memory", **thread, "ts": 0, "args": {"GB": level}} for level in levels]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    assert load(tmp_path / "a.json").memory == (2.5,)


def test_a_pipeline_without_the_trace_of_a_process_is_refused(tmp_path: Path) -> None:
    """Rank 0 alone forms a schedule of one rank, which nobody ran."""
    alone = [("PP:0F0", 0, 10), ("PP:0B0", 40, 20)]
    with pytest.raises(UsageError, match="half holds the traces of 1 of 2 processes; give a folder with those of all"):
        load(folder_of(tmp_path / "half", {"rank0.json": kineto(0, alone)}))
    with pytest.raises(UsageError, match="rank = -1: it must be a whole number from 0"):
        load(folder_of(tmp_path / "odd", {"a.json": kineto(-1, alone), "b.json": kineto(1, SECOND)}))


def test_a_trace_of_ours_without_its_last_rank_is_refused(tmp_path: Path) -> None:
    trace = pl.draw.trace(_simulated("1f1b", 4, 8))
    (tmp_path / "t.json").write_text(
        json.dumps(trace | {"traceEvents": [event for event in trace["traceEvents"] if event.get("pid") != 3]})
    )
    with pytest.raises(UsageError, match="holds the traces of 3 of 4 processes"):
        load(tmp_path / "t.json")


def test_a_rank_that_a_trace_lacks_is_named(tmp_path: Path) -> None:
    path, events = tmp_path / "trace.json", pl.draw.trace(_simulated("1f1b", 4, 8))["traceEvents"]
    path.write_text(json.dumps({"traceEvents": [event for event in events if event.get("pid") != 2]}))
    with pytest.raises(
        UsageError, match=r"json has ranks 0, 1, 3, and none has an action of stage 2: rank 2 is missing$"
    ):
        load(path)
    unnamed = [event for event in events if event["ph"] == "X" and event["pid"] != 2]
    path.write_text(json.dumps({"traceEvents": unnamed}))
    with pytest.raises(
        UsageError, match="has ranks 0, 1, 2, and none has an action of stage 2; give the traces of all"
    ):
        load(path)


def test_folders_that_hold_no_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PipeloomError, match="half holds the traces of 1 of 2 processes"):
        load(folder_of(tmp_path / "half", {"rank1.json": kineto(1, SECOND)}))
    with pytest.raises(PipeloomError, match="two files are of rank 1"):
        load(folder_of(tmp_path / "twice", {"a.json": kineto(1, SECOND), "b.json": kineto(1, SECOND)}))
    with pytest.raises(PipeloomError, match="no event has the name of an action"):
        load(folder_of(tmp_path / "none", {"a.json": kineto(0, []), "b.json": kineto(1, [])}))
    overlapping = [*FIRST[:1], ("PP:0F1", 5, 10), *FIRST[2:]]
    with pytest.raises(PipeloomError, match=r"rank 0 begins 0F1 0\.005 ms before 0F0 ends"):
        load(folder_of(tmp_path / "both", {"a.json": kineto(0, overlapping), "b.json": kineto(1, SECOND)}))


CSV = "0F0:1:1,0F1:1:1,,0B0:2:4, 0B1:2:4\n1F0:1:1,1B0:2.5:2,1F1:1:1,1B1:2:2\n"


def test_a_csv_with_durations(tmp_path: Path) -> None:
    """Two steps of 1F1B by hand: 0F0 to 1; 1F0 to 2, 1B0 to 4.5, 0B0 to 6.5; 1F1 to 5.5, 1B1 to 7.5, 0B1 to 9.5."""
    file = tmp_path / "order.csv"
    file.write_text(CSV)
    assert reader_of(file)
    first, second = load(file).timelines
    assert first.schedule.programs == pl.schedules.one_f_one_b(2, 2).programs
    assert first.makespan == pytest.approx(9.5e-3)
    assert first.starts[1] == pytest.approx((1e-3, 2e-3, 4.5e-3, 5.5e-3))
    assert second.makespan == pytest.approx(12e-3)
    assert first.costs.forward == pytest.approx((1e-3, 1e-3))


@pytest.mark.parametrize("name", ["interleaved", "zbv", "zb-h1", "1f1b-overlap", "looped-bfs"])
def test_durations_of_a_simulation_give_it_back(name: str, tmp_path: Path) -> None:
    timeline = pl.simulate(pl.schedules.build(name, 4, 8), pl.Costs(1.1, 0.9, 0.7))
    rows = [
        ",".join(
            f"{cell}:{end - start}"
            for cell, start, end in zip(program, timeline.starts[rank], timeline.ends[rank], strict=True)
        )
        for rank, program in enumerate(timeline.schedule.programs)
    ]
    (tmp_path / "x.csv").write_text("\n".join(rows))
    (read,) = load(tmp_path / "x.csv").timelines
    for rank in range(4):
        assert read.starts[rank] == pytest.approx([1e-3 * start for start in timeline.starts[rank]])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            (f"{cells}\n", f"'{cells.rpartition(',')[2]}' is not an action with its milliseconds")
            for cells in ("0F0", "0F0:1,0B0:x", "0F0:1,0B0:nan", "0F0:1,0B0:-1", "0F0:1,0B0:1:2", "0F0:1,:2")
        ),
        ("", "contains no actions"),
        ("0B0:1,0F0:1\n", "waits for F of stage 0"),
    ],
)
def test_a_damaged_csv_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text(text)
    with pytest.raises(PipeloomError, match=words):
        load(file)


def test_without_arguments_the_converter_says_how_to_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["timer_dumps.py"])
    with pytest.raises(SystemExit, match=r"timer_dumps.py DUMP_FOLDER trace.json"):
        runpy.run_path(str(ROOT / "examples" / "timer_dumps.py"), run_name="__main__")


def waiting(folder: Path, timeline: pl.Timeline, shards: bool = False) -> Path:
    """A folder of traces as torch's runtime writes them: an action's event begins with the wait for its message, and the last
    one ends with the wait for its send."""
    for rank, program in enumerate(timeline.schedule.programs):
        events: list[dict[str, Any]] = []

        def add(category: str, name: str, start: float, end: float, tid: int = 1, rank: int = rank) -> None:
            times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            events.append({"ph": "X", "cat": category, "name": name, "pid": rank, "tid": tid, **times})  # noqa: B023

        for step in range(2):
            before = origin = 100.0 * step
            add("user_annotation", f"PP:{rank}UNSHARD", before - 2e-5, before - 1e-5)
            if shards:  # FSDP's own events are beside them
                add("user_annotation", "FSDP::all_gather", before, before + 1e-5)
            for action, begin, stop in zip(program, timeline.starts[rank], timeline.ends[rank], strict=True):
                start, end = origin + begin, origin + stop
                sent = end + 1e-3 * (stop == timeline.ends[rank][-1])
                add("user_annotation", f"PP:{action}", before, sent)
                add("cpu_op", "c10d::recv_", before, before + 1e-5)
                add("cpu_op", "aten::record_of_another_thread", before, before + 2e-5, tid=2)
                add("cpu_op", "aten::mm", start + 1e-6, (start + end) / 2)
                add("cpu_op", "aten::add", (start + end) / 2, end)
                before = sent
            add("user_annotation", f"PP:{rank}RESHARD", before, before + 1e-5)
        folder.mkdir(exist_ok=True)
        (folder / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events}))
    return folder


def test_a_wait_for_a_message_is_no_part_of_an_action_of_torch(tmp_path: Path) -> None:
    timeline = _simulated("1f1b", 3, 4)
    (read, _) = load(waiting(tmp_path / "trace", timeline)).timelines
    assert read.schedule.programs == timeline.schedule.programs  # without gathers that do nothing
    for rank in range(3):
        for at in range(8):
            took = read.ends[rank][at] - read.starts[rank][at]
            assert took == pytest.approx(timeline.ends[rank][at] - timeline.starts[rank][at], abs=5e-6)
    assert read.makespan == pytest.approx(timeline.makespan, abs=1e-5)


def test_gathers_of_sharded_stages_are_read(tmp_path: Path) -> None:
    timeline = _simulated("1f1b", 2, 2)
    folder = waiting(tmp_path / "trace", timeline, shards=True)
    for path in folder.iterdir():  # one step: the ends of the next are ambiguous without ProfilerStep
        trace = json.loads(path.read_text())
        trace["traceEvents"] = [event for event in trace["traceEvents"] if event["ts"] < 50e6]
        path.write_text(json.dumps(trace))
    (read,) = load(folder).timelines
    assert [str(program[0]) for program in read.schedule.programs] == ["0UNSHARD", "1UNSHARD"]
