"""The cool-down with its input gradients first: the formula, and what stays as it is. Memory and work: test_transforms."""

from __future__ import annotations

import pytest

from pipeloom import schedules
from pipeloom.errors import UsageError
from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.families import build

SPLIT = {"cooldown": "split"}


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (1, 2, 1), (10, 12, 8), (2, 3, 2)])
def test_idle_is_that_of_input_gradients(p: int, f: float, b: float, w: float) -> None:
    """(p-1)(f+b) where it was (p-1)(f+B); in stage units with chunks."""
    for m in {p, p + 1, 2 * p + 1, 3 * p}:
        costs = Costs(f, b, w)
        for name, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("looped-bfs", 3)):
            work_of_a_rank = m * chunks * (f + b + w)
            asked = None if chunks == 1 else chunks
            whole = simulate(build(name, p, m, asked), costs)
            split = simulate(build(name, p, m, asked, SPLIT, costs), costs)
            assert whole.makespan - work_of_a_rank == pytest.approx((p - 1) * (f + b + w)), (name, m)
            assert split.makespan - work_of_a_rank == pytest.approx((p - 1) * (f + b)), (name, m)
            assert split.peak_activations == whole.peak_activations


def test_only_what_another_rank_waits_for_is_split() -> None:
    split = schedules.split_cooldown(schedules.one_f_one_b(4, 8))
    assert not any("W" in str(cell) for cell in split.programs[0])
    assert [str(cell) for cell in split.programs[3][-3:]] == ["3F7", "3I7", "3W7"]
    assert [str(cell) for cell in split.programs[1][-6:]] == ["1I5", "1W5", "1I6", "1W6", "1I7", "1W7"]
    assert dict(split.options) == {"cooldown": "split"}


def test_what_gains_nothing_stays_as_it_is() -> None:
    for made in (schedules.one_f_one_b(1, 4), schedules.zb_h1(4, 8), schedules.interleaved(1, 4, 2)):
        assert schedules.split_cooldown(made).codes == made.codes


def test_a_last_backward_left_whole_costs_time() -> None:
    """Mutation: then W is in the way of what other ranks wait for. In a wait, one W more or less in front is nothing."""
    split = schedules.split_cooldown(schedules.one_f_one_b(4, 8))
    mutated = [list(program) for program in split.programs]
    at = [str(cell) for cell in mutated[2]].index("2I7")
    assert str(mutated[2][at - 1]) == "2W6"
    mutated[2][at - 1 : at + 1] = [mutated[2][at], mutated[2][at - 1]]
    late = Schedule.of(mutated, placement=split.placement, microbatches=8)
    assert simulate(late).makespan == simulate(split).makespan  # there is a gap: here W may come later
    mutated[3].remove(mutated[3][-1])
    mutated[3][-1] = "3B7"
    whole = Schedule.of(mutated, placement=split.placement, microbatches=8)
    assert simulate(whole).makespan == simulate(split).makespan + 1


def test_refused() -> None:
    with pytest.raises(UsageError, match="cooldown is 'splti'; did you mean 'split'"):
        build("1f1b", 2, 4, None, {"cooldown": "splti"})
    with pytest.raises(UsageError, match="has no option 'cooldwn'; did you mean 'cooldown'"):
        build("1f1b", 2, 4, None, {"cooldwn": "split"})
