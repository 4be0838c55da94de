"""Traces of other programs: dumps with and without labels, clocks that do not agree, Chrome traces, damaged files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from pipeloom.errors import PipeloomError
from pipeloom.schedule.foreign import is_foreign, load_foreign
from pipeloom.schedule.model import parts

NAMES = {"F": "fwd", "B": "bwd", "I": "bwd", "W": "wgrad"}


def dump(folder: Path, timeline: pl.Timeline, *, labels: bool, seed: int = 0, old_keys: bool = False) -> Path:
    """The files that a dump of this step is: lists of ms for each rank, from its own start of the iteration."""
    rng = random.Random(seed)
    schedule = timeline.schedule
    folder.mkdir()
    keys = ("vpp_size", "micro_batches") if old_keys else ("vp_size", "num_mbs")
    sizes = {"pp_size": schedule.ranks, keys[0]: schedule.chunks, keys[1]: schedule.microbatches, "world_size": 8}
    (folder / "config.json").write_text(json.dumps(sizes))
    for rank, program in enumerate(schedule.programs):
        skew = rng.uniform(-0.5, 0) * timeline.starts[rank][0] if rank else 0.0
        lists: dict[str, Any] = {
            f"{name}_{what}": [] for name in ("fwd", "bwd", "wgrad") for what in ("start", "end", "minibatch", "chunk")
        }
        for cell, start, end in zip(program, timeline.starts[rank], timeline.ends[rank], strict=True):
            for action in parts(cell):
                name = NAMES[action.kind]
                lists[f"{name}_start"].append(1e3 * (start + skew))
                lists[f"{name}_end"].append(1e3 * (end + skew))
                if labels:
                    lists[f"{name}_minibatch"].append(action.microbatch)
                    lists[f"{name}_chunk"].append(schedule.stages_of[rank].index(action.stage))
        whole = {"total": 1e3 * timeline.makespan, "memory": 10 + 2.5 * timeline.peak_activations[rank], **lists}
        (folder / f"pp_rank_{rank}.json").write_text(json.dumps({"1": whole, "2": whole}))
    return folder


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
    timeline = _simulated(name, 8, 16)
    found = load_foreign(dump(tmp_path / "dump", timeline, labels=labels, old_keys=labels))
    assert len(found.timelines) == 2
    read = found.timelines[-1]
    assert read.schedule.programs == timeline.schedule.programs
    assert read.schedule.placement == timeline.schedule.placement
    assert read.source == "measured"
    for rank in range(8):
        taken = [end - start for start, end in zip(read.starts[rank], read.ends[rank], strict=True)]
        want = [end - start for start, end in zip(timeline.starts[rank], timeline.ends[rank], strict=True)]
        assert taken == pytest.approx(want)
    assert found.memory == tuple(10 + 2.5 * peak for peak in timeline.peak_activations)


def test_no_message_arrives_before_it_is_sent(tmp_path: Path) -> None:
    """Ranks whose clocks begin with their own first action are shifted behind what they wait for."""
    timeline = _simulated("1f1b", 4, 8)
    folder = dump(tmp_path / "dump", timeline, labels=False, seed=5)
    read = load_foreign(folder).timelines[0]
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
    assert is_foreign(tmp_path)
    (read,) = load_foreign(tmp_path).timelines
    assert read.schedule.programs == pl.schedules.one_f_one_b(2, 2).programs
    assert read.makespan == pytest.approx(9e-3)
    assert read.costs.forward == pytest.approx((1e-3, 1e-3))
    assert load_foreign(tmp_path).memory == (3.5, 2.5)


def test_chrome_traces_of_ours_and_of_torch(tmp_path: Path) -> None:
    from pipeloom.draw import trace

    timeline = _simulated("zbv", 4, 8)
    ours = tmp_path / "ours.json"
    ours.write_text(json.dumps(trace(timeline, 1e6)))
    read = load_foreign(ours).timelines[0]
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
    assert is_foreign(theirs)
    assert load_foreign(theirs).timelines[0].makespan == pytest.approx(65e-6)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", {"pp_size": None}, "the key pp_size is missing"),
        ("config.json", {"pp_size": -1}, "pp_size is -1; it is a whole number"),
        ("config.json", {"pp_size": 3}, r"pp_rank_2\.json is missing"),
        ("pp_rank_1.json", {"fwd_end": []}, "2 fwd_start and 0 fwd_end"),
        ("pp_rank_1.json", {"fwd_end": [0.5, 0.6]}, "fwd 0 runs from 1.0 to 0.5"),
        ("pp_rank_1.json", {"fwd_start": 5}, "fwd_start is 5; it is a list"),
        ("pp_rank_1.json", {"fwd_start": ["a", "b"]}, "fwd 0 runs from 'a'"),
        ("pp_rank_0.json", {"fwd_minibatch": ["a", -1]}, "fwd_minibatch holds other than whole numbers"),
        ("pp_rank_0.json", {"fwd_chunk": [0]}, "2 fwd_start and 1 fwd_chunk"),
        ("pp_rank_1.json", {"bwd_start": [0.0, 5.0], "bwd_end": [0.5, 6.0]}, "no schedule"),
    ],
)
def test_a_damaged_dump_is_refused(file: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    test_a_dump_written_by_hand(tmp_path)
    content = json.loads((tmp_path / file).read_text())
    (content if file == "config.json" else content["7"]).update(change)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(PipeloomError, match=words):
        load_foreign(tmp_path)


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        ({"traceEvents": 5}, "traceEvents is no list"),
        ({"traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 1}]}, "no event is called as an action"),
        ({"traceEvents": [{"ph": "X", "name": "0F0", "ts": "x", "dur": 1}]}, "has no ts and dur"),
        (
            {"traceEvents": [{"ph": "X", "name": "99999999F0", "ts": 1, "dur": 1}]},
            "cannot name stage or micro-batch 99999999",
        ),
        ({"traceEvents": [{"ph": "X", "name": "0F0", "ts": 1, "dur": 1}]}, "has no backward"),
    ],
)
def test_a_damaged_chrome_trace_is_refused(trace: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(trace))
    with pytest.raises(PipeloomError, match=words):
        load_foreign(file)
