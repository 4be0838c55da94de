"""Everything that a registered kind must work in, run in a process of its own: a kind cannot be taken back."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import note_kind
import pipeloom as pl
from models import batch, blocks, mse
from pipeloom.draw import svg, terminal
from pipeloom.draw.trace import trace
from pipeloom.errors import UsageError
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import LocalPipeline, Pipeline
from pipeloom.schedule.actions import Need
from pipeloom.schedule.csv_form import from_csv, to_csv
from pipeloom.schedule.json_form import from_json, to_json
from pipeloom.shapes.mesh import MeshShape
from pipeloom.traces.measured import hops
from processes import free_port, run_ranks


def work(rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    pipeline = Pipeline(blocks(4), note_kind.noted(2, 3), loss=mse)
    loss = pipeline.step(*batch(6)).item()
    results.put((rank, loss, list(note_kind.SEEN)))
    pipeline.close()
    dist.destroy_process_group()


STEPPED: dict[int, Any] = {}


def step_weights(modules: tuple[Any, ...], microbatch: int) -> None:
    """Step and drop the gradients of a stage, in a bubble behind its last backward."""
    torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1).step()
    for module in modules:
        STEPPED[id(module)] = all(p.grad is not None for p in module.parameters())
        module.zero_grad()


def stepped(rank: int, kind: bool) -> list[Any]:
    """Two steps of two replicas; the weights of a stage are stepped by an action, or afterwards."""
    mesh = Mesh.of(MeshShape(dp=2))
    cells = ["0F0", "1F0", "0F1", "1F1", "1B0", "1B1", *["1STEP1"] * kind, "0B0", "0B1", *["0STEP1"] * kind]
    schedule = pl.Schedule.of([cells], placement=(0, 0), microbatches=2)
    pipeline = Pipeline(blocks(4), schedule, loss=mse, mesh=mesh)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        losses.append(pipeline.step(*batch(4, seed=2 * step + rank)).item())
        if not kind:
            optimizer.step()
            optimizer.zero_grad()
    assert all(STEPPED.values())
    assert len(STEPPED) == 4 * kind
    weights = [p.tolist() for p in pipeline.parameters()]
    pipeline.close()
    return [losses, weights]


def gradients_are_there() -> None:
    """The gradients that an action reads are the sums over the replicas."""
    pl.register_kind(pl.Kind("STEP", "step", time=0.1), execute=step_weights)
    (losses, weights), *others = run_ranks(stepped, 2, True)
    want_losses, want_weights = run_ranks(stepped, 2, False)[0]
    assert losses == want_losses
    assert weights == want_weights
    assert others[0][1] == weights


def check_values() -> None:
    """A value is there when it is needed, made once, and freed where it can be; also across stages and queues."""
    pl.register_kind(pl.Kind("D", "drop", needs=(Need("saved"),), makes=("kept apart",), frees=("saved",)))
    pl.register_kind(pl.Kind("LOAD", "load", makes=("saved",), frees=("kept apart",), time=2.0))
    pl.register_kind(
        pl.Kind("HASH", "hash of gradients", (Need("weight gradient"),), ("hash",), queue="host", time=4.0)
    )
    pl.register_kind(pl.Kind("TELL", "next stage's hash", (Need("hash", 1),), queue="host", time=1.0))

    def checked(*cells: str, microbatches: int = 1) -> pl.Timeline:
        schedule = pl.Schedule.of([list(cells)], placement=[0], microbatches=microbatches)
        pl.check(schedule)
        return pl.simulate(schedule)

    with pytest.raises(
        pl.ScheduleError, match=r"action 1: 0D0 needs what is saved of stage 0 micro-batch 0, .*0F0 or 0R0 or 0L0"
    ):
        checked("0F0", "0D0", "0LOAD0", "0B0")  # 0LOAD0 makes what is saved, so 0F0 does not leave it
    with pytest.raises(pl.ScheduleError, match="0B0 needs what is saved"):
        checked("0F0", "0D0", "0B0")
    pl.register_kind(pl.Kind("MARK", "mark", makes=("kept apart",)))
    with pytest.raises(
        pl.ScheduleError, match="nothing frees what is kept apart of stage 0 micro-batch 0, which 0MARK0 leaves"
    ):
        checked("0F0", "0MARK0", "0B0")
    pl.register_kind(pl.Kind("SEAL", "seal", needs=(Need("saved"),)))
    checked("0F0", "0SEAL0", "0O0:1/2", "0L0:1/2", "0B0")
    for cells in (("0F0", "0O0:1/2", "0SEAL0", "0L0:1/2", "0B0"), ("0F0", "0SEAL0", "0R0:mlp", "0B0")):
        with pytest.raises(pl.ScheduleError, match=r"0SEAL0 needs .* which is not there"):  # a part of it
            checked(*cells)
    pl.register_kind(pl.Kind("PROBE", "probe", time="forward"), execute=lambda modules, microbatch: None)
    probed = pl.Timeline.measured(checked("0F0", "0PROBE0", "0B0").schedule, ((0, 2, 3),), ((2, 3, 5),))
    assert probed.costs.forward == (2,)  # without the probe's, whose time is that of a forward in a simulation
    # The hash of micro-batch 0 begins when the gradients exist and computation goes on beside it; the next one waits for it.
    timeline = checked("0F0", "0F1", "0B0", "0HASH0", "0B1", "0HASH1", microbatches=2)
    assert timeline.starts == ((0, 1, 2, 4, 4, 8),)
    assert (timeline.makespan, timeline.busy, timeline.spans) == (12, (6,), (12,))
    # One that needs nothing is issued when the computation before it in the program starts.
    assert checked("0F0", "0F1", "0TELL0", "0B0", "0B1", microbatches=2).starts == ((0, 1, 1, 2, 4),)
    cells = [["0F0", "0TELL0", "0B0", "0HASH0"], ["1F0", "1B0", "1HASH0"]]
    across = pl.Schedule.of(cells, placement=[0, 1], microbatches=1)
    pl.check(across)
    assert pl.simulate(across, pl.Costs(p2p=0.5)).starts == ((0, 9, 5, 10), (1.5, 2.5, 4.5))
    cells = [["0F0", "0B0", "0HASH0"], ["1TELL0", "1F0", "1B0", "1HASH0"], ["2HASH0", "2F0", "2B0"]]
    with pytest.raises(pl.ScheduleError, match="2HASH0 needs what is weight gradient"):
        pl.check(pl.Schedule.of(cells, placement=[0, 1, 2], microbatches=1))


def draw_queues() -> None:
    """An action beside computation is in a lane, a line and a thread of its queue, and the computation stays where it was."""
    pl.register_kind(pl.Kind("SEND", "send", (Need("output"),), ("copy",), ("copy",), queue="link", time=3.0))
    cells = ["0F0", "0SEND0", "0F1", "0SEND1", "0B0", "0B1"]
    costs = pl.Costs(all_to_all=0.5, bytes={"copy": 5.0}, pools={"copy": "far"})
    timeline = pl.simulate(pl.Schedule.of([cells], placement=[0], microbatches=2), costs)
    document = svg(timeline)
    assert ">link<" in document
    assert ">far<" in document
    heights = [
        float(re.findall(r'height="([\d.]+)"', line)[0])
        for line in document.splitlines()
        if "<rect" in line and "<title>" in line
    ]
    assert heights == [24] * 4 + [15] * 2
    lines = terminal(timeline, width=60, color=False).splitlines()
    link = next(line for line in lines if line.startswith("link")).split()[1]
    assert link == "·" * (len(link) // 7) + "S" * (len(link) - len(link) // 7)
    events = trace(timeline)["traceEvents"]
    assert [(e["ts"], e["dur"], e["tid"]) for e in events if e.get("cat") == "send"] == [
        (1000, 3000, 2),
        (4000, 3000, 2),
    ]
    assert {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"} == {"simulated": 0, "link": 2}


HASHES: list[tuple[int, int, bool]] = []  # micro-batch, hash of the gradients, whether on the thread of the computation


def hash_gradients(modules: tuple[Any, ...], microbatch: int) -> None:
    time.sleep(1.0)
    values = [p.grad.flatten().tolist() for module in modules for p in module.parameters()]
    HASHES.append((microbatch, hash(str(values)), threading.current_thread() is threading.main_thread()))


def run_beside() -> None:
    """A kind on a queue of its own runs in a thread beside the computation, after what it needs and before what changes that."""
    pl.register_kind(
        pl.Kind("SUM", "hash", (Need("weight gradient"),), queue="hashing", time=1.0), execute=hash_gradients
    )
    cells = ["0F0", "0F1", "1F0", "1B0", "1F1", "1B1", "1SUM1", "0B0", "0B1", "0SUM1"]
    schedule = pl.Schedule.of([cells], placement=[0, 0], microbatches=2)
    pl.check(schedule)
    pipeline = LocalPipeline(blocks(2), schedule, loss=mse)
    pipeline.step(*batch(4))
    assert [alone for _, _, alone in HASHES] == [False, False]
    hash_gradients((dict(pipeline.modules)["block1"],), 1)
    assert HASHES[2][1] == HASHES[0][1] != HASHES[1][1]
    starts, ends = pipeline.timeline().starts[0], pipeline.timeline().ends[0]
    assert ends[5] <= starts[6]  # the gradients of stage 1 were there
    assert (
        ends[8] < ends[6] <= starts[9]
    )  # both backwards of stage 0 ran beside its hash; the other hash came behind it
    pipeline.close()


BROKEN: list[str] = []


def late(modules: tuple[Any, ...], microbatch: int) -> None:
    time.sleep(1.0)
    if BROKEN:
        raise RuntimeError(BROKEN[0])


def across() -> pl.Schedule:
    """Rank 0 waits for what rank 1 makes on another queue: 0THEN0 on a queue, 0NEXT0 for that, 0STOP1 with its computation."""
    cells = [
        ["0F0", "0F1", "0THEN0", "0NEXT0", "0B0", "0STOP1", "0B1"],
        ["1F0", "1B0", "1LATE0", "1F1", "1B1", "1LATE1"],
    ]
    schedule = pl.Schedule.of(cells, placement=[0, 1], microbatches=2)
    pl.check(schedule)
    return schedule


def waited(timeline: pl.Timeline) -> bool:
    """Whether the actions of rank 0 began when those of rank 1 had ended, in whose second the clocks may differ little."""
    starts, ends = timeline.starts[0], timeline.ends[1]
    return starts[2] > ends[2] - 0.05 and starts[5] > ends[5] - 0.05


def wait_in_processes(rank: int) -> list[bool]:
    pipeline = Pipeline(blocks(2), across(), loss=mse)
    rows = []
    for _ in range(2):
        pipeline.step(*batch(4))
        rows.append(waited(pipeline.timeline()))
    pipeline.close()
    return rows


def run_across() -> None:
    """An action waits for a value that another rank makes, in one process and in several, and fails with its maker."""
    pl.register_kind(
        pl.Kind("LATE", "late", (Need("weight gradient"),), ("late",), queue="late", time=2.0), execute=late
    )
    pl.register_kind(pl.Kind("THEN", "then", (Need("late", 1),), ("then",), queue="then", time=1.0))
    pl.register_kind(pl.Kind("NEXT", "next", (Need("then"),), time=0.0))
    pl.register_kind(pl.Kind("STOP", "stop", (Need("late", 1),), time=1.0))
    assert waited(pl.simulate(across()))
    pipeline = LocalPipeline(blocks(2), across(), loss=mse)
    for _ in range(2):
        pipeline.step(*batch(4))
        assert waited(pipeline.timeline())
    BROKEN.append("no hash today")
    with pytest.raises(RuntimeError, match="no hash today"):
        pipeline.step(*batch(4))
    BROKEN.clear()
    assert run_ranks(wait_in_processes, 2) == [[True, True]] * 2


def main() -> None:
    schedule = note_kind.noted(2, 3)
    plain = pl.schedules.one_f_one_b(2, 3)
    pl.check(schedule)
    assert pl.simulate(schedule).makespan > pl.simulate(plain).makespan
    assert pl.simulate(schedule).busy[0] == pl.simulate(plain).busy[0] + 3 * 0.5
    assert from_csv(to_csv(schedule)).programs == schedule.programs
    assert from_json(to_json(schedule)) == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    timeline = pl.simulate(schedule)
    assert "N note" in svg([timeline])
    assert "N note" in terminal(timeline, color=False)
    assert {event.get("cat") for event in trace(timeline)["traceEvents"]} >= {"note", "forward"}
    noted_last = [
        [t for cell in map(str, p) for t in dict.fromkeys((cell, cell.replace("B", "N")))] for p in plain.programs
    ]
    late = pl.simulate(pl.Schedule.of(noted_last, placement=range(2), microbatches=3), pl.Costs(p2p=0.25))
    assert hops(late.schedule, late.starts, late.ends) == [0.25] * 2  # of the actions, not of the notes behind them
    twice = [[*map(str, program), "0N0"] if not rank else program for rank, program in enumerate(schedule.programs)]
    with pytest.raises(pl.ScheduleError, match="0N0 appears twice"):
        pl.check(pl.Schedule.of(twice, placement=range(2), microbatches=3))
    refused: dict[str, dict[str, Any]] = {
        "'N' exists already": {"letter": "N"},
        "'n': its letter is 1 to 16 capital letters": {"letter": "n"},
        "time is a number of at least 0, or one of forward, backward": {"time": "furlong"},
        "time is a number of at least 0.*time=-1": {"time": -1},
        "times and colours are finite": {"time": float("inf")},
        "colour is .1.0,.; it must be a tuple.float, float, float.": {"colour": (1.0,)},
        "needs is .'output',.; it must be a tuple.Need, .*.": {"needs": ("output",)},
        "the step of a Need is -1, 0 or 1": {"needs": (pl.Need("output", 2),)},
        "output cannot be made by a registered kind": {"makes": ("output",)},
        "values and queues are names": {"queue": ""},
    }
    for words, values in refused.items():
        with pytest.raises(UsageError, match=words):
            pl.register_kind(pl.Kind(**{"letter": "X", "words": "x", **values}))
    check_values()
    draw_queues()
    run_beside()
    run_across()
    local = LocalPipeline(blocks(4), plain, loss=mse).step(*batch(6)).item()
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    workers = [context.Process(target=work, args=(rank, port, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    seen = sorted(results.get(timeout=600) for _ in workers)
    for worker in workers:
        worker.join(30)
    assert [loss for _, loss, _ in seen] == [local, local]
    assert all(notes == [("Block", mb) for mb in range(3) for _ in range(2)] for _, _, notes in seen)
    gradients_are_there()
    print("a registered kind works everywhere")


if __name__ == "__main__":
    main()
