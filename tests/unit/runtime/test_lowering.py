"""Lowering: what the programs of all ranks are derived from is computed once for the ranks of a process."""

from __future__ import annotations

from collections import Counter

import pytest

import pipeloom as pl
from models import Block, batch, mse
from pipeloom.runtime import LocalPipeline, RuntimeOptions, program
from pipeloom.runtime.program import ProgramsOfRanks, lower
from pipeloom.schedule.transforms import transformed

SCHEDULE = transformed(pl.schedules.build("1f1b", 4, 4), ["offload=2/2"])


def test_ranks_of_one_process_share_traffic_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    for name in ("traffic", "entry_waits", "signals_of"):
        function = getattr(program, name)
        monkeypatch.setattr(program, name, lambda s, n=name, f=function: (calls.update([n]), f(s))[1])
    pipeline = LocalPipeline([Block(seed) for seed in range(4)], SCHEDULE, loss=mse)
    pipeline.step(*batch(4, 0))
    assert calls == {"traffic": 1, "entry_waits": 1, "signals_of": 1}
    for _ in range(2):
        pipeline.evaluate(*batch(4, 0))  # forwards alone, without copies, lowered once for both
    assert calls == {"traffic": 2, "entry_waits": 2, "signals_of": 2}


@pytest.mark.parametrize("transport", ["batched", "individual"])
def test_a_rank_lowered_beside_others_has_the_program_that_it_has_alone(transport: str) -> None:
    options = RuntimeOptions(transport=transport)  # type: ignore[arg-type]
    for schedule in (SCHEDULE, pl.schedules.interleaved(4, 8), pl.schedules.dualpipev(4, 8)):
        together = ProgramsOfRanks(schedule, range(4), options)
        for rank in range(4):
            assert together.of_rank(rank) == lower(schedule, rank, options)
