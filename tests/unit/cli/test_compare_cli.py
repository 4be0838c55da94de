"""`pipeloom compare`: the same work for all, one table, and what refuses the sizes is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from pipeloom.cli.options import parse_spec
from pipeloom.draw.tables import shared_costs
from pipeloom.errors import UsageError
from pipeloom.schedule.families import FAMILIES

Run = Callable[[str], Any]


def test_costs_are_shared_by_the_chunks(pipeloom: Run) -> None:
    """The AFAB and 1F1B literals, and interleaved's bubble of 1/v of theirs."""
    line = "compare gpipe 1f1b interleaved:chunks=4 --ranks 4 --microbatches 8 --input-grad 1 --weight-grad 1 --json"
    whole = json.loads(pipeloom(line).out)
    found = whole["schedules"]
    assert whole["costs"]["of"] == "1/p of the model"
    assert [(one["costs"]["of"], one["costs"]["forward"]) for one in found] == [
        ("a stage", cost) for cost in (1, 1, 0.25)
    ]
    assert [one["makespan"] for one in found] == [33, 33, 24 + 9 / 4]
    assert [one["bubble_ratio"] for one in found] == [0.375, 0.375, 0.375 / 4]
    assert [sum(one["busy"]) for one in found] == [96, 96, 96]
    assert found[2]["full_rank_activations"] == [peak / 4 for peak in found[2]["peak_activations"]]
    assert found[2]["label"] == "interleaved:chunks=4"


def test_other_names_of_the_families_are_taken(pipeloom: Run) -> None:
    sizes = "--ranks 4 --microbatches 8 --chunks 2 --forward 10 --input-grad 12 --weight-grad 8"
    found = json.loads(pipeloom(f"compare Schedule1F1B VPP:rounds=tail ZBVZeroBubble {sizes} --json").out)
    named = json.loads(pipeloom(f"compare 1f1b interleaved:rounds=tail zbv {sizes} --json").out)
    assert [one["label"] for one in found["schedules"]] == ["Schedule1F1B", "VPP:rounds=tail", "ZBVZeroBubble"]
    assert [one["makespan"] for one in found["schedules"]] == [one["makespan"] for one in named["schedules"]]
    ended = pipeloom("schedule AFAB --ranks 2 --microbatches 2")
    assert (ended.code, ended.out.splitlines()[0]) == (0, "gpipe, 2 ranks, 2 micro-batches")


def test_all_is_every_family_in_a_readable_table(pipeloom: Run) -> None:
    ended = pipeloom("compare all --ranks 4 --microbatches 8")
    assert ended.code == 0
    for name in FAMILIES:
        assert re.search(rf"\n({name}[ \n]|  {name}: )", ended.out)
    table = ended.out.split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "costs of 1/p of the model: F 1, I 1, W 1; p2p 0" in ended.out
    assert "1/v" in ended.out


def test_two_routes_hold_the_parameters_twice(pipeloom: Run) -> None:
    found = json.loads(pipeloom("compare dualpipe dualpipev zbv --ranks 4 --microbatches 8 --json").out)["schedules"]
    assert [one["parameters"] for one in found] == [2, 1, 1]


def test_computation_beside_communication_is_slowed_down(pipeloom: Run) -> None:
    """Pairs with computation 3(1 - x) = 2.1 and communication 2x = 0.6 take 2.1 + 0.6 (1 - 1/X), other actions as before."""
    line = "compare 1f1b-overlap dualpipe 1f1b --ranks 8 --microbatches 32 --weight-grad 0.7 --all-to-all 0.3 --json"
    plain, same, slow = (
        {row["label"]: row["makespan"] for row in json.loads(pipeloom(line + flag).out)["schedules"]}
        for flag in ("", " --slowdown 1", " --slowdown 1.2")
    )
    assert plain == same
    assert slow["1f1b"] == plain["1f1b"]
    assert slow["1f1b-overlap"] == pytest.approx(plain["1f1b-overlap"] + 31 * 0.6 * (1 - 1 / 1.2))  # 31 pairs on rank 0
    assert slow["dualpipe"] > plain["dualpipe"]


def test_schedule_and_search_slow_computation_down_as_compare_does(pipeloom: Run) -> None:
    work = "--ranks 4 --microbatches 8 --weight-grad 0.7 --all-to-all 0.3 --slowdown 1.2 --json"
    compared = json.loads(pipeloom(f"compare 1f1b-overlap {work}").out)["schedules"][0]["makespan"]
    assert json.loads(pipeloom(f"schedule 1f1b-overlap {work}").out)["makespan"] == compared
    searched = json.loads(pipeloom(f"search --pairs --iterations 0 {work}").out)
    assert searched["costs"]["pair"] == pytest.approx(2.1 + 0.6 * (1 - 1 / 1.2))
    each = json.loads(pipeloom(f"schedule 1f1b-overlap --forward 1,1,1,2 {work}").out)["costs"]["pair"]
    assert [row[0] for row in each] == pytest.approx([2.2, 2.2, 2.2, 2.95])  # 0.9 of communication, 2.8 of the rest


def test_slowdown_and_the_time_of_a_pair_exclude_each_other(pipeloom: Run) -> None:
    ended = pipeloom("schedule 1f1b-overlap --ranks 2 --microbatches 4 --pair 3 --slowdown 1.5")
    assert ended.code == 2
    assert "--slowdown 1.5 computes the time of pairs, and --pair gives it" in ended.err


def test_families_that_refuse_are_listed_with_the_reason(pipeloom: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def even_only(ranks: int, microbatches: int) -> pl.Schedule:
        raise UsageError(f"even-only needs an even number of ranks; nearest to {ranks}: {ranks + 1}")

    monkeypatch.setitem(FAMILIES, "even-only", even_only)
    ended = pipeloom("compare all --ranks 3 --microbatches 6")
    assert ended.code == 0
    assert "\nskipped (sizes not supported):\n" in ended.out
    assert "\n  even-only: even-only needs an even number of ranks; nearest to 3: 4" in ended.out
    found = json.loads(pipeloom("compare all --ranks 3 --microbatches 6 --json").out)
    assert {"name": "even-only", "reason": "even-only needs an even number of ranks; nearest to 3: 4"} in found[
        "refused"
    ]
    assert pipeloom("compare even-only 1f1b --ranks 3 --microbatches 6").code == 2


def test_families_that_order_by_costs_get_those_of_their_stages(pipeloom: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def costly(ranks: int, microbatches: int, costs: pl.Costs | None = None) -> pl.Schedule:
        seen.append(costs)
        return pl.schedules.interleaved(ranks=ranks, microbatches=microbatches)

    monkeypatch.setitem(FAMILIES, "costly", costly)
    assert pipeloom("compare costly --ranks 2 --microbatches 4 --forward 3").code == 0
    assert isinstance(seen[-1], pl.Costs)
    assert seen[-1].forward == 1.5


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ("1f1b", ("1f1b", {})),
        ("interleaved:chunks=4,rounds=tail", ("interleaved", {"chunks": 4, "rounds": "tail"})),
        ("module:function", ("module:function", {})),
        ("module:function:x=1.5,y=true", ("module:function", {"x": 1.5, "y": True})),
    ],
)
def test_specs(spec: str, parsed: tuple[str, dict[str, object]]) -> None:
    assert parse_spec(spec) == parsed


def test_values_for_each_part_of_the_model() -> None:
    schedule = pl.schedules.interleaved(ranks=2, microbatches=4, chunks=2)
    shared = shared_costs(pl.Costs(forward=(1.0, 3.0), activation=2.0), schedule)
    assert shared.forward == (0.5, 0.5, 1.5, 1.5)
    assert shared.activation == 1.0
    with pytest.raises(UsageError, match=r"^forward has 3 values; .* one number, or 2"):
        shared_costs(pl.Costs(forward=(1.0, 2.0, 3.0)), schedule)


def test_messages_are_counted_and_sized(pipeloom: Run) -> None:
    line = "compare 1f1b zbv --ranks 4 --microbatches 8"
    assert "size" not in pipeloom(line).out
    rows = [row.split() for row in pipeloom(f"{line} --message 4MiB").out.splitlines()]
    head = rows[1].index("count") - len(rows[1])
    assert [row[head - 1] for row in rows[2:4]] == ["48", "96"]  # the size has two words
    assert [row[head : head + 2] for row in rows[2:4]] == [["192", "MiB"], ["384", "MiB"]]
    found = json.loads(pipeloom(f"{line} --message 4MiB --json").out)
    assert found["schedules"][0]["messages"]["by_kind"]["gradient"] == {"count": 24, "size": 24 * 2**22}


def test_a_model_sends_more_as_tensor_parallel_ranks_than_as_a_pipeline(pipeloom: Run) -> None:
    """The tiny model over 2: 3 boundaries of 2 chunks there and back, against all-reduces in every block; 3 do not divide."""
    found = json.loads(pipeloom("compare --volume tiny --ranks 2 --json").out)["layouts"]
    (pipeline,), (tensor,), (spread,) = (layout["volumes"] for layout in found)
    assert (pipeline["kind"], tensor["kind"], spread["kind"]) == ("pipeline", "tensor", "tensor")
    assert pipeline["bytes"] < tensor["bytes"] < spread["bytes"]
    text = " ".join(pipeloom("compare --volume default --ranks 3").out.split())
    assert "of 128 inputs and 344 outputs, whole on each of 3 ranks" in text
    assert "sends 1,200 values per token as columns with gathered output, 1,632 as rows" in text  # 2(o + 2i), 2(2o + i)
    assert "skipped: tensor parallel: parallel.tp = 3: it must divide" in text
    assert "pipeline, interleaved" in text


def test_a_plan_of_lengths_stands_beside_simple_packings(pipeloom: Run, tmp_path: Path) -> None:
    file, lengths = tmp_path / "lengths.txt", [900, 80, 70, 60, 500, 400, 30, 20, 310, 95]
    file.write_text(", ".join(map(str, lengths)) + "\n", "utf-8")
    line = f"compare --lengths {file} --ranks 2 --replicas 2 --tokens 1000 --attention-tokens 8192"
    whole = json.loads(pipeloom(f"{line} --json").out)
    found = whole["plans"]
    assert [(row["label"], row["schedule"]) for row in found[1:]] == [
        (label, name) for label in ("as they come", "by tokens") for name in ("1f1b", "interleaved")
    ]
    for row in found:
        assert sum(sum(each["tokens"]) for each in row["replicas"]) == sum(lengths)
        assert max(max(each["tokens"]) for each in row["replicas"]) <= 1000
        assert whole["bound"] <= found[0]["makespan"] <= row["makespan"] == max(r["makespan"] for r in row["replicas"])
    assert json.loads(pipeloom(f"{line.partition(' --att')[0]} --json").out)["bound"] < whole["bound"]
    assert found[1]["replicas"][0]["tokens"] == [900 + 70, 500 + 30 + 310]  # the even ones in turn
    text = pipeloom(line).out
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(map(str, found[0]["replicas"][1]["tokens"])) in text


def test_the_replicas_of_a_plan_are_drawn_under_each_other_with_their_tokens(pipeloom: Run, tmp_path: Path) -> None:
    file, page, drawing = tmp_path / "lengths.txt", tmp_path / "plan.html", tmp_path / "plan.svg"
    file.write_text("900 80 70 60 500 400 30 20", "utf-8")
    line = f"compare --lengths {file} --ranks 2 --replicas 2 --tokens 1000 --html {page} --svg {drawing} --json"
    plan = json.loads(pipeloom(line).out)["plans"][0]
    for text in (page.read_text("utf-8"), drawing.read_text("utf-8")):
        assert text.index("replica 0: zbv, 2 ranks") < text.index("replica 1: zbv, 2 ranks")
        for at, replica in enumerate(plan["replicas"]):
            tokens = " ".join(f"{number}:{tokens}" for number, tokens in enumerate(replica["tokens"]))
            assert f"replica {at}: {tokens}</text>" in text


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        ("900 long", "--ranks 2", "'long' is no number of tokens; give whole numbers"),
        ("", "--ranks 2", "the file is empty"),
        ("900", "", "--lengths needs --ranks"),
        ("900 80", "--ranks 2 --tokens 500", "sequence 0 has 900; nearest: tokens=900"),
    ],
)
def test_lengths_that_cannot_be_planned_are_refused(
    pipeloom: Run, tmp_path: Path, content: str, flags: str, words: str
) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(content, "utf-8")
    ended = pipeloom(f"compare --lengths {file} {flags}")
    assert ended.code == 2
    assert words in " ".join(ended.err.split())
