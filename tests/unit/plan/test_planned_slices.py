"""Slices of sequences in the planner: time, memory, the search, and what refuses them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.config import load_layout
from pipeloom.errors import UsageError
from pipeloom.interop.systems import written
from pipeloom.plan import OFFERED, RUNTIMES, PlannedLayout, Planner, PlanRequest, load_device, load_model, search
from pipeloom.plan.layout import problems
from pipeloom.plan.predict import built
from pipeloom.plan.run import predicted
from pipeloom.schedule import simulate

LAYOUT = PlannedLayout(pp=4, tp=2, m=4, seq=32768)


@pytest.fixture(scope="module")
def planner():
    return Planner(load_model("llama3-8b"), load_device("h100"), RUNTIMES["pipeloom"])


def sliced(count):
    return replace(LAYOUT, slices=count)


def test_the_ramps_and_the_activations_of_the_first_rank_shrink(planner):
    whole, four = planner.predict(LAYOUT), planner.predict(sliced(4))
    assert four.step.idle < 0.5 * whole.step.idle
    assert four.ranks[0].activations < 0.6 * whole.ranks[0].activations
    assert four.step.compute == pytest.approx(whole.step.compute, rel=0.03)
    assert four.step.compute > whole.step.compute  # products of fewer rows are slower
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(four.ranks[0], name) == getattr(whole.ranks[0], name)
    assert four.ranks[0].buffers < whole.ranks[0].buffers  # messages of a slice


def test_cuts_give_every_slice_the_same_time(planner):
    cuts = planner.cuts(sliced(4))
    assert cuts.times == pytest.approx((0.25,) * 4, rel=0.01)
    assert cuts.sizes[0] > 1.3 * cuts.sizes[3]  # later tokens attend to more
    assert all(end % 4 == 0 for end in cuts.positions)  # 2 cp tp
    assert planner.cuts(LAYOUT) is None


def test_memory_along_the_program_is_that_of_the_simulation(planner):
    """What is held of each rank, of a prediction and of costs in bytes."""
    layout = replace(sliced(4), stages=(9, 8, 8, 9))
    costs, schedule = planner.stage_costs(layout), built(layout)
    kept = replace(costs, bytes={name: costs.bytes_in("device", 4)[name] for name in ("kept", "saved")})
    peaks = simulate(schedule, kept).peak_bytes["device"]
    assert [rank.activations for rank in planner.predict(layout).ranks] == pytest.approx(peaks, rel=0.02)


def test_the_search_slices_long_sequences_and_only_if_it_may(planner):
    request = PlanRequest(
        16, 3e11, 8, 32768, OFFERED["pipeloom"], recompute=("none",), fixed={"tp": 2, "cp": 1, "pp": 8}
    )
    whole, best = (search(planner, replace(request, slices=slices)).best for slices in ((1,), (1, 4)))
    assert (whole.layout.slices, best.layout.slices) == (1, 4)
    assert best.tokens > whole.tokens


def test_short_slices_and_capacities_are_not_searched(planner):
    request = PlanRequest(8, 80e9, 8, 2048, ("1f1b",), slices=(1, 2, 4), fixed={"pp": 4, "dp": 2})
    assert {each.layout.slices for each in search(planner, request).space.every()} == {1, 2}
    assert (
        "capacity=1.0: it counts choices of whole sequences, which slices or context parallelism cut; nearest: 0"
        in problems(load_model("mixtral-8x7b"), replace(sliced(2), capacity=1.0))[0]
    )
    with pytest.raises(UsageError, match="slices=4: 30 tokens cannot be cut into 4 slices of multiples of 4"):
        planner.predict(replace(sliced(4), seq=30))


def test_only_our_trainer_runs_them(planner):
    prediction = planner.predict(sliced(2))
    assert "slices = 2\n" in written(prediction, planner, "pipeloom")[0]
    for system in ("megatron", "torchtitan", "automodel", "torch-csv"):
        with pytest.raises(UsageError, match="slices=2: sequences are not cut into slices; nearest: slices=1"):
            written(prediction, planner, system)


def test_copies_to_the_host_take_the_time_of_the_devices_link():
    """Of a dry run; on a CPU, whose link is not known, they are free."""
    model = {"hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32, "intermediate_size": 11008}
    keys = {f"model.{key}": value for key, value in model.items()} | {
        "train.seq_len": 8192, "train.global_batch_size": 16, "train.dtype": "bfloat16", "parallel.pp": 4,
        "schedule.microbatches": 16, "schedule.name": "1f1b",
    }  # fmt: skip
    plain, copied = (load_layout("tiny", keys | {"schedule.transforms": words}) for words in ([], ["offload"]))
    h100 = load_device("h100")
    quick, slow = (predicted(copied, replace(h100, host_link=rate)).step for rate in (1e15, 1e10))
    assert quick.total == pytest.approx(predicted(plain, h100).step.total, rel=0.02)
    assert predicted(plain, replace(h100, host_link=1e10)).step == predicted(plain, h100).step
    assert slow.total > 2 * quick.total
    assert slow.compute == pytest.approx(quick.compute)
    assert predicted(copied).timeline.makespan == pytest.approx(predicted(plain).timeline.makespan, rel=0.02)
