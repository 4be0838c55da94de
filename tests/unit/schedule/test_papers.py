"""The zero-bubble paper's table comes out to four decimals from its own profile."""

from __future__ import annotations

import pytest

from pipeloom.schedule import simulate
from pipeloom.schedule.families.zb_auto import zb_auto
from pipeloom.schedule.papers import ZERO_BUBBLE_PROFILES, Profile, zero_bubble_rates


@pytest.mark.parametrize("profile", ZERO_BUBBLE_PROFILES, ids=lambda p: f"{p.model.name}-{p.microbatches}")
def test_table_of_record(profile: Profile) -> None:
    rates = [round(rate, 4) for rate in zero_bubble_rates(profile)]
    assert rates[:5] == list(profile.published[:5])
    assert rates[5] <= profile.published[5]


@pytest.mark.parametrize("profile", ZERO_BUBBLE_PROFILES[:2], ids=lambda p: f"{p.model.name}-{p.microbatches}")
@pytest.mark.parametrize("share", [0.5, 1, 1.5, 2])
def test_automatic_schedule_keeps_to_its_memory(profile: Profile, share: float) -> None:
    memory = share * profile.ranks
    timeline = simulate(zb_auto(profile.ranks, profile.microbatches, memory, profile.costs, "span"), profile.costs)
    assert max(timeline.peak_memory) <= memory + 1e-9
