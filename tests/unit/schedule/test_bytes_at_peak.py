"""The most bytes of a rank, by what they consist of: micro-batches, gradients, messages, what actions need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipeloom.errors import CapacityError
from pipeloom.schedule import Costs, Schedule, simulate
from pipeloom.schedule.costs import activation_limit
from pipeloom.schedule.families import build
from pipeloom.schedule.timeline import Peak, Timeline
from pipeloom.schedule.transforms import recompute


def peaks(schedule: Schedule, messages: Sequence[Sequence[float]] = (), **sizes: Any) -> tuple[Peak, ...]:
    timeline = simulate(schedule, Costs(bytes=sizes))
    timeline = Timeline(schedule, timeline.costs, timeline.starts, timeline.ends, messages=tuple(map(tuple, messages)))
    return timeline.bytes_at_peak["device"]


def test_new_gradients_count_from_the_end_of_a_stages_first_weight_gradient() -> None:
    """Under gpipe none is there while all micro-batches are alive."""
    schedule = build("gpipe", 1, 4)
    (late,) = peaks(schedule, saved=10.0, backward=3.0, new_grads=100.0)
    assert late == (5, 133.0, {"activations": 30.0, "temporaries": 3.0, "grads": 100.0})
    assert [peak.total for peak in peaks(schedule, saved=10.0, backward=3.0, new_grads=9.0)] == [43.0]  # at 0B0
    assert [peak.total for peak in peaks(schedule, saved=10.0, backward=3.0, grads=9.0)] == [52.0]


def test_sums_at_the_steps_end_count_beside_all_gradients() -> None:
    schedule, sizes = build("gpipe", 1, 4), {"saved": 10.0, "backward": 3.0, "new_grads": 100.0}
    assert peaks(schedule, end_sums=10.0, **sizes)[0].total == 133.0
    (peak,) = peaks(schedule, end_sums=40.0, **sizes)
    assert (peak.at, peak.total, peak.bytes["temporaries"]) == (8, 140.0, 40.0)


@pytest.mark.parametrize(("name", "temporary"), [("1f1b", 3.0), ("zb-h1", 50.0)])
def test_an_i_holds_something_of_its_own(name: str, temporary: float) -> None:
    (peak,) = peaks(build(name, 1, 4), saved=10.0, pending=4.0, backward=3.0, input_grad=50.0)
    assert (peak.total, peak.bytes["temporaries"]) == (10.0 + temporary, temporary)


def test_smaller_micro_batches_hold_less_while_an_action_runs() -> None:
    costs = Costs(microbatch=(0.5, 0.5), bytes={"saved": 0.0, "backward": 30.0})
    assert simulate(build("gpipe", 1, 2), costs).peak_bytes["device"] == (15.0,)


@pytest.mark.parametrize(("sizes", "most"), [((0.75, 0.25), 17.0), ((0.25, 0.75), 19.0)])
def test_a_backward_of_a_slice_holds_its_share(sizes: tuple[float, ...], most: float) -> None:
    """The last slice's comes first, while all are there."""
    schedule = build("seq1f1b", 1, 1, None, {"slices": 2})
    costs = Costs(bytes={"saved": 16.0, "backward": 4.0}, slice_sizes=sizes)
    assert simulate(schedule, costs).peak_bytes["device"] == (most,)


def test_summed_gradients_of_keys_and_values_shrink_slice_by_slice() -> None:
    """3 slices of one stage: 2/3 are summed when the last one's backward ends, and are there until the second's does."""
    schedule = build("seq1f1b", 1, 1, None, {"slices": 3})
    for saved, most in (15.0, 10.0 + 8.0), (0.0, 8.0):
        costs = Costs(bytes={"saved": saved, "slice_grads": 12.0})
        timeline = simulate(schedule, costs)
        assert timeline.peak_bytes["device"] == (pytest.approx(most),)
        assert timeline.bytes_curves["device"][0][-1][1] == pytest.approx(0.0)


def test_messages_count_while_an_entry_runs() -> None:
    schedule = build("gpipe", 1, 1)
    assert [peak.total for peak in peaks(schedule, [(2.0, 4.0, 7.0)], saved=10.0)] == [14.0]
    (peak,) = peaks(schedule, [(2.0, 4.0, 17.0)], saved=10.0)
    assert peak == (2, 17.0, {"activations": 0.0, "messages": 17.0})


def test_the_action_of_the_peak() -> None:
    one, other = peaks(build("1f1b", 2, 4), saved=10.0, backward=(3.0, 50.0))
    assert [(peak.at, peak.bytes["activations"], peak.bytes["temporaries"]) for peak in (one, other)] == [
        (2, 20.0, 3.0),
        (1, 10.0, 50.0),
    ]
    again = recompute(build("1f1b", 2, 4), True, actions=[(0, 0)])
    assert str(again.programs[0][peaks(again, saved=1.0)[0].at]) == "0R0"


def test_a_limit_leaves_room_for_backwards_and_for_the_sum_at_the_end() -> None:
    sizes = {"saved": 10.0, "grads": 5.0, "backward": (3.0, 7.0), "input_grad": (4.0, 1.0), "forward": 6.0}
    costs, limits = activation_limit(Costs(bytes=sizes | {"end_sums": 20.0}), 30.0, (0, 1))
    assert limits == (21.0, 18.0)
    assert dict(costs.bytes)["forward"] == (2.0, 0.0)
    assert activation_limit(Costs(bytes=sizes, microbatch=(2.0, 1.0)), 30.0, (0, 1))[1] == (17.0, 11.0)
    with pytest.raises(CapacityError, match="whole step"):
        activation_limit(Costs(bytes=sizes | {"end_sums": 25.0}), 30.0, (0, 1))
