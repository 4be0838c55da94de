"""`pipeloom check` against limits of bytes: what copies free on the device stands in host memory."""

from __future__ import annotations

import json

import pytest

import pipeloom as pl
from pipeloom.cli import app
from pipeloom.errors import ScheduleError, UsageError
from pipeloom.schedule.json_form import to_json
from pipeloom.schedule.transforms import recompute
from pipeloom.traces.timelines import costs_dict

COSTS = pl.Costs(bytes={"saved": 90, "kept": 10, "params": 1000}, host_bandwidth=90.0, recompute=1.0)


@pytest.fixture
def words(tmp_path):
    """1F1B, of which some micro-batches are recomputed and others copied."""
    mixed = pl.schedules.offload(recompute(pl.schedules.one_f_one_b(2, 8), True, [(0, 0), (0, 5)]), COSTS)
    assert {cell.kind for cell in mixed.programs[0]} >= {"R", "O", "L"}
    file, costs = tmp_path / "schedule.json", tmp_path / "costs.json"
    file.write_text(to_json(mixed))
    costs.write_text(json.dumps(costs_dict(COSTS)))
    return ["check", str(file), "--costs", str(costs)]


def test_a_limit_of_either_pool(words, capsys):
    app([*words, "--memory", "1200B", "--host-memory", "90B"], standalone_mode=False)
    assert ": ok; " in " ".join(capsys.readouterr().out.split())
    with pytest.raises(
        ScheduleError, match="rank 0 holds 90 B in pool host at once, and --host-memory is 89B; nearest: 90B"
    ):
        app([*words, "--host-memory", "89B"], standalone_mode=False)
    with pytest.raises(ScheduleError, match="in pool device at once, and --memory is 1KiB"):
        app([*words, "--memory", "1KiB"], standalone_mode=False)


def test_a_schedule_without_copies_needs_no_host_memory(words, tmp_path):
    (tmp_path / "schedule.json").write_text(to_json(pl.schedules.one_f_one_b(2, 8)))
    app([*words, "--host-memory", "1B"], standalone_mode=False)


def test_limits_are_in_bytes(words):
    app([*words, "--memory", "6"], standalone_mode=False)  # GiB
    with pytest.raises(UsageError, match="--host-memory is 'much'; give GiB, such as 20, or a size, such as 20GiB"):
        app([*words, "--host-memory", "much"], standalone_mode=False)
    with pytest.raises(
        UsageError, match="--memory is '1GiB', and the costs have no bytes to compare: add --costs FILE"
    ):
        app([*words[:2], "--memory", "1GiB"], standalone_mode=False)


def test_costs_of_other_stages_are_refused_by_their_file(words, tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps(costs_dict(COSTS) | {"forward": [1, 1, 1]}))
    with pytest.raises(
        UsageError,
        match=r"^--costs \S+costs.json: forward has 3 values and the schedule 2 stages: give one number or 2$",
    ):
        app([*words, "--memory", "6"], standalone_mode=False)
