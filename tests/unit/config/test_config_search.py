"""`[schedule] name = "search"`: typed options, refused all at once; memory and first schedule where none is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from pipeloom.config import load, load_layout, to_toml
from pipeloom.errors import ConfigError


def layout(**overrides: Any) -> Any:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_layout(None, {"schedule.name": "search", **dotted})


def problems(**overrides: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        layout(**overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("overrides", "first", "memory", "memory_of"),
    [
        ({}, "1f1b", 4, "1f1b"),
        ({"schedule__chunks": 2}, "interleaved", 11, "interleaved"),
        ({"schedule__options__placement": "vee"}, "zbv", 8, "zbv"),
        ({"schedule__chunks": 2, "schedule__microbatches": 8, "schedule__options__memory": 8}, "interleaved-zb", 8, ""),
        ({"schedule__options__placement": "vee", "schedule__options__memory": 5}, "v-min", 5, ""),
        ({"schedule__chunks": 2, "schedule__options__memory": 3}, "list scheduling", 3, ""),
        ({"schedule__options__memory": 1}, "list scheduling", 1, ""),
        ({"schedule__options__placement": [0, 1, 2, 3, 1, 0]}, "list scheduling", 8, "1f1b"),
    ],
)
def test_memory_and_the_first_schedule(overrides: dict[str, Any], first: str, memory: float, memory_of: str) -> None:
    made = layout(**overrides)
    request = made.search
    assert (request.first.name, request.memory, request.memory_of) == (first, memory, memory_of)
    assert made.schedule is request.first
    pl.check(request.first)
    assert max(pl.simulate(request.first).peak_activations) <= memory
    assert request.family.name == first
    kinds = {cell.kind for program in request.first.programs for cell in program}
    assert kinds == {"F", "B", "I", "W"}
    assert f"{memory:g} stage-micro-batches per rank" in made.notes[-1]
    assert request.placement == request.first.placement


def test_costs_given_leave_the_placement_open() -> None:
    costs = {"forward": [1, 2, 3, 4], "input_grad": 1, "weight_grad": 2.5, "p2p": 0.5, "held": 1.5}
    request = layout(schedule__options__costs=costs, train__steps=1).search
    assert request.placement is None
    assert request.costs == pl.Costs((1.0, 2.0, 3.0, 4.0), 1.0, 2.5, 0.5, held=1.5)
    assert layout(schedule__options__costs=costs, schedule__options__placement="loop").search.placement == (0, 1, 2, 3)


def test_a_limit_in_bytes_is_searched_before_the_first_step() -> None:
    resolved = layout(schedule__options__memory="1.5MiB", schedule__chunks=2, train__steps=1)
    request = resolved.search
    assert (request.memory, request.in_bytes, request.before_start) == (1.5 * 2**20, True, True)
    assert (request.family.name, request.placement) == ("interleaved", None)  # whatever it needs
    assert "within 1.5 MiB per device, with recomputation and copies" in resolved.notes[-1]
    assert not layout(schedule__options__memory="6").search.before_start
    assert layout(schedule__options__memory="6").search.memory == 6


def test_the_objective_follows_the_barrier() -> None:
    assert layout().search.objective == "makespan"
    assert layout(optimizer__barrier=False).search.objective == "span"
    assert layout(optimizer__barrier=False, schedule__options__objective="makespan").search.objective == "makespan"


def test_wrong_options_are_refused_all_at_once() -> None:
    found = problems(
        schedule__options={
            "memori": 3,
            "time_limit": 0,
            "objective": "makespn",
            "measure": 2,
            "placement": "veee",
            "iterations": 1.5,
            "reuse": 1,
            "costs": {"forward": [1, 2, 3], "input_grad": -1, "weight_grad": "x", "p2p": -0.5, "fwd": 1},
        },
        train__seq_len=16,
        optimizer__min_lr=1.0,
    )
    start = "schedule.options."
    expected = {
        "memori = 3: there is no such option; did you mean 'memory'?",
        "time_limit = 0: it must be above 0",
        "objective = \"makespn\": it must be 'makespan' or 'span'; did you mean 'makespan'?",
        "measure = 2: it must be at least 3; nearest: 3",
        "placement = \"veee\": it must be 'linear', 'loop', 'vee' or the rank of every stage, as in [0, 1, 1, 0]",
        "iterations = 1.5: it must be a whole number",
        "reuse = 1: it must be true or false",
        "costs.input_grad = -1: it must be a number of at least 0, or a list with one for each stage",
        'costs.weight_grad = "x": it must be a number of at least 0',
        "costs.p2p = -0.5: it must be at least 0",
        "costs.fwd = 1: there is no such option; did you mean 'forward'?",
    }
    missing = [words for words in expected if not any(problem.startswith(start + words) for problem in found)]
    assert missing == []
    assert any(problem.startswith("optimizer.min_lr") for problem in found)
    assert len(found) == len(expected) + 1


def test_the_options_survive_a_file(tmp_path: Path) -> None:
    options = {
        "memory": 3,
        "placement": [0, 1, 2, 3],
        "costs": {"forward": [1, 2, 3, 4.5], "input_grad": 1, "weight_grad": 0},
    }
    config = load(None, {"schedule.name": "search", "schedule.options": options})
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config))
    assert load(path) == config
    assert (
        load_layout(path).search == load_layout(None, {"schedule.name": "search", "schedule.options": options}).search
    )


def test_one_cost_is_overridden_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[schedule]\nname = "search"\n[schedule.options.costs]\nforward = 1\ninput_grad = 2\nweight_grad = 3\n'
    )
    found = load_layout(path, {"schedule.options.costs.forward": [1, 2, 3, 4]}).search
    assert found is not None
    assert found.costs == pl.Costs((1.0, 2.0, 3.0, 4.0), 2.0, 3.0)
