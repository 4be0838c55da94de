"""`--costs FILE` and limits in bytes: costs that a plan writes, read by `search`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import pipeloom as pl
from pipeloom.cli import app
from pipeloom.cli.options import CostFlags, memory_of
from pipeloom.errors import CapacityError, UsageError
from pipeloom.schedule.costs import activation_limit
from pipeloom.solver.in_bytes import search_in_bytes
from pipeloom.traces.timelines import costs_dict, costs_of_dict

GIB = 2**30
COSTS = pl.Costs(
    forward=2.0, bytes={"saved": 3.0 * GIB, "pending": 1.0 * GIB, "params": 4.0 * GIB, "optimizer": 1.5 * GIB}
)


@pytest.fixture
def costs_file(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs_dict(COSTS)))
    return str(path)


def run(capsys, *words):
    app(list(words), standalone_mode=False)
    return capsys.readouterr().out


def test_costs_are_read_as_they_are_written():
    assert costs_of_dict(json.loads(json.dumps(costs_dict(COSTS))), "x") == COSTS


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ([], "costs are an object"),
        ({"foward": 1}, "no cost 'foward'; did you mean 'forward'"),
        ({"p2p": -1}, "p2p is -1"),
        ({"bytes": {"saved": 10**400}}, "bytes['saved'] is a number of about 401 digits; the largest cost is 1e+18"),
        ({"bytes": {"saved": float("nan")}}, "bytes['saved'] is nan; a cost is a finite number"),
        ({"bytes": {"saved": float("inf")}}, "bytes['saved'] is inf; a cost is a finite number"),
        ({"activation": 1e30}, "activation is 1e+30; the largest cost is 1e+18"),
        ({"message": 1e30}, "message is 1e+30; the largest cost is 1e+18"),
        ({"bandwidth": 10**400}, "bandwidth is a number of about 401 digits; the largest cost is 1e+100"),
        ({"bandwidth": 1e-300}, "bandwidth is 1e-300; it must be above 1e-30"),
        ({"pools": {"saved": ["device"]}}, "pools['saved'] is ('device',); it must be the name of a pool"),
        ({"pools": {"saved": "a\x1b[31m"}}, "it must be the name of a pool"),
        ({"bytes": {"a\x1b[31m": 5}}, "it must give each name its value"),
    ],
)
def test_other_files_are_refused(form, words):
    with pytest.raises(UsageError) as error:
        costs_of_dict(form, "x")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "amount"), [("6", (6.0, False)), ("20GiB", (20.0 * GIB, True)), ("1.5 mib", (1.5 * 2**20, True))]
)
def test_a_limit_is_in_activations_or_in_bytes(text, amount):
    assert memory_of(text, plain_is_gib=False) == amount


@pytest.mark.parametrize(("text", "amount"), [("6", 6 * GIB), ("0.5", GIB / 2), ("20GiB", 20 * GIB), ("512 B", 512)])
def test_a_plain_number_is_in_gib_where_there_are_bytes(text, amount):
    assert memory_of(text) == (amount, True)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "20XB", ""])
def test_other_limits_are_refused(text):
    with pytest.raises(UsageError, match=r"--memory is .*; give GiB, such as 20, or a size, such as 20GiB or 512MiB"):
        memory_of(text)


def test_what_stands_is_taken_off_a_limit_in_bytes():
    costs, limit = activation_limit(COSTS, 14.5 * GIB, (0, 1, 2, 3))
    assert limit == (9 * GIB,) * 4  # 5.5 stand on each rank
    assert (costs.activation, costs.held) == (3 * GIB, 1 / 3)
    costs, limit = activation_limit(COSTS, 20 * GIB, (0, 1, 1, 0))
    assert limit == (9 * GIB,) * 2  # and twice as many with two stages
    uneven = replace(COSTS, bytes={"saved": GIB, "params": (1.0 * GIB, 2.0 * GIB, 3.0 * GIB, 5.0 * GIB)})
    assert activation_limit(uneven, 10 * GIB, (0, 1, 0, 1))[1] == (6 * GIB, 3 * GIB)
    assert activation_limit(uneven, 10 * GIB, (0, 1, 1, 0))[1] == (4 * GIB, 5 * GIB)
    with pytest.raises(CapacityError, match="take 11 GiB on the fullest rank, and there are 10 GiB"):
        activation_limit(COSTS, 10 * GIB, (0, 1, 0, 1))
    with pytest.raises(UsageError, match="no 'saved'"):
        activation_limit(pl.Costs(), GIB, (0, 1))


def test_each_placement_has_the_limit_of_its_own_ranks():
    """In a V, rank 0 would hold the embedding and the head, which exceed the limit together."""
    costs = replace(COSTS, bytes={"saved": GIB, "params": (6.0 * GIB, GIB, GIB, 6.0 * GIB)})
    found = search_in_bytes(2, 4, costs, 10 * GIB, chunks=2, iterations=20)
    assert found.schedule.placement == (0, 1, 0, 1)
    assert max(found.timeline.peak_bytes["device"]) <= 10 * GIB
    loop = search_in_bytes(2, 4, costs, 10 * GIB, placement="loop", iterations=20)
    assert (found.value, found.lower_bound) == (loop.value, loop.lower_bound)
    with pytest.raises(CapacityError, match="take 12 GiB on the fullest rank"):
        search_in_bytes(2, 4, costs, 10 * GIB, placement="vee", iterations=20)


def test_a_refusal_names_the_limit_in_bytes_and_the_fullest_rank():
    costs = replace(
        COSTS,
        bytes={"saved": (GIB, 2.0 * GIB, GIB, GIB), "input_grad": GIB / 2, "params": (GIB, 4.0 * GIB, 2.0 * GIB, GIB)},
    )
    words = r"memory is 6 GiB; .* rank 1 has 1\.5 GiB, and one micro-batch in all of its stages takes 2 GiB$"
    with pytest.raises(CapacityError, match=words):
        search_in_bytes(4, 4, costs, 6 * GIB, placement="linear", iterations=20)
    found = search_in_bytes(4, 4, costs, 6.5 * GIB, placement="linear", iterations=20)
    assert max(found.timeline.peak_bytes["device"]) == 6.5 * GIB


def test_a_search_stays_below_a_limit_in_bytes(capsys, costs_file):
    words = ("search", "--ranks", "3", "--microbatches", "6", "--iterations", "300", "--costs", costs_file)
    found = json.loads(run(capsys, *words, "--memory", "12GiB", "--json"))
    assert max(found["peak_bytes"]["device"]) <= 12 * GIB
    roomy = json.loads(run(capsys, *words, "--memory", "30GiB", "--json"))
    assert roomy["makespan"] < found["makespan"]
    assert 12 * GIB < max(roomy["peak_bytes"]["device"]) <= 30 * GIB
    assert "bytes in device" in run(capsys, *words, "--memory", "12GiB")


def test_flags_replace_costs_of_the_file(capsys, costs_file):
    words = ("schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--costs", costs_file, "--json")
    assert json.loads(run(capsys, *words))["costs"]["forward"] == 2.0
    assert json.loads(run(capsys, *words, "--forward", "3"))["costs"]["forward"] == 3.0


def test_a_plan_writes_costs_that_a_search_reads(capsys, tmp_path):
    path = tmp_path / "plan.json"
    run(capsys, "plan", "--model", "llama3-8b", "--layout", "pp=4,m=8", "--json", "--costs-to", str(path))
    words = ("search", "--ranks", "4", "--microbatches", "8", "--iterations", "100", "--placement", "linear", "--json")
    found = json.loads(run(capsys, *words, "--costs", str(path), "--memory", "72GiB"))
    assert max(found["peak_bytes"]["device"]) <= 72 * GIB
    with pytest.raises(CapacityError, match="stands for the whole step"):
        run(capsys, *words, "--costs", str(path), "--memory", "8GiB")


def test_a_comparison_counts_gib_on_the_worst_rank(costs_file, capsys):
    """1F1B: 5.5 GiB of weights and 3 of each of 4 micro-batches on rank 0; a stage of half the size has half of each."""
    sizes = ("--ranks", "4", "--microbatches", "8", "--costs", costs_file, "--memory", "17.5GiB")
    text = run(capsys, "compare", "1f1b", "gpipe", *sizes).split("\n\n")[
        1
    ]  # the columns that do not fit beside the others
    rows = [line.split() for line in text.splitlines()]
    assert rows[0][-3:] == ["device", "17.5", "GiB"]
    assert rows[1][-3:] == ["GiB", "rank", "fits"]
    assert [row[-3:] for row in rows[2:4]] == [["17.5", "0", "yes"], ["29.5", "0", "no"]]


def test_a_limit_without_bytes_is_refused(capsys):
    for words in (["--memory", "20GiB"], ["--memory", "6"]):
        with pytest.raises(UsageError, match=r"--memory is .* the costs have no bytes to compare: add --costs FILE"):
            run(capsys, "schedule", "1f1b", "--ranks", "2", "--microbatches", "2", *words)


def test_a_schedule_is_drawn_under_its_limit(costs_file, capsys, tmp_path):
    words = ("--ranks", "2", "--microbatches", "2", "--costs", costs_file, "--memory", "20GiB")
    text = run(capsys, "schedule", "1f1b", *words, "--svg", str(tmp_path / "x.svg"))
    assert "11.5 GiB" in text
    assert "the limit 20 GiB" in (tmp_path / "x.svg").read_text()


def test_compare_takes_costs_of_each_pth_of_the_model(capsys, tmp_path):
    """Four stages: B of a stage is half of that of its half of the model, as F; each rank has a stage of each half."""
    file = tmp_path / "costs.json"
    times = {"forward": (2.0, 4.0), "backward": (6.0, 8.0), "recompute": (2.0, 2.0)}
    file.write_text(json.dumps({"costs": costs_dict(pl.Costs(**times))}))
    words = f"compare interleaved --ranks 2 --microbatches 2 --costs {file} --json"
    (row,) = json.loads(run(capsys, *words.split()))["schedules"]
    assert row["busy"] == [2 * (1.0 + 3.0 + 2.0 + 4.0)] * 2


def test_segments_replace_only_the_times_that_they_give(capsys, costs_file, tmp_path):
    """`profile --output` writes costs and segments into one file, which both flags read."""
    words = (
        "schedule",
        "1f1b",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--costs",
        costs_file,
        "--segments",
        "0.5",
        "--json",
    )
    costs = json.loads(run(capsys, *words, "--p2p", "3"))["costs"]
    assert costs["bytes"] == json.loads(json.dumps(costs_dict(COSTS)))["bytes"]
    assert (costs["p2p"], costs["pair"] is None) == (3.0, False)
    assert costs["forward"] != COSTS.forward


def test_flags_that_are_not_given_are_the_defaults_of_costs():
    assert CostFlags().values() == pl.Costs()


def test_the_largest_sizes_and_the_least_rates_give_times_and_peaks():
    costs = pl.Costs(activation=1e18, message=1e18, bandwidth=1e-30, held=0.7)
    for name in ("1f1b", "zb-h1", "v-half", "zbv"):
        timeline = pl.simulate(pl.schedules.build(name, 4, 8), costs)
        assert min(timeline.peak_memory) > 0
        assert timeline.makespan < 1e50
