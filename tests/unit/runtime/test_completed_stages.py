"""The instruction that completes a stage's gradients: the last of its backwards, whatever its kind."""

from __future__ import annotations

import pytest

import pipeloom as pl
from pipeloom.runtime import RuntimeOptions
from pipeloom.runtime.program import lower
from pipeloom.schedule.model import Schedule
from pipeloom.schedule.transforms import transformed

SCHEDULES = [
    pl.schedules.build(name, 2, 4) for name in ("1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev")
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_a_stage_is_complete_with_the_last_b_i_or_w(schedule: Schedule) -> None:
    """A reduction that starts with the last I would run beside the W that still adds to the gradient."""
    for rank in range(schedule.ranks):
        instructions = lower(schedule, rank, RuntimeOptions()).instructions
        for stage in schedule.stages_of[rank]:
            backwards = [
                at
                for at, each in enumerate(instructions)
                if any(action.stage == stage and action.kind in ("B", "I", "W") for action in each.actions)
            ]
            completes = [at for at, each in enumerate(instructions) if stage in each.completes_stages]
            assert completes == [backwards[-1]]


def test_a_share_to_which_another_queue_adds_last_is_left_to_the_end_of_the_step() -> None:
    spread = transformed(pl.schedules.build("1f1b", 2, 4), ["vocabulary"])
    share = spread.vocabulary[0]
    for schedule, expected in ((spread, ["T"]), (transformed(spread, ["embedding"]), [])):
        instructions = lower(schedule, 0, RuntimeOptions()).instructions
        assert [each.cell.kind for each in instructions if share in each.completes_stages] == expected
