"""Bytes of messages along a rank's program: buffers of receives, and sends on their way."""

from __future__ import annotations

import pytest

from pipeloom.plan.messages import message_bytes
from pipeloom.schedule.families import build


def of_rank(rank, name, count, *, sizes=(1.0,) * 8, shared=True, depth=2):
    schedule = build(name, 2, count)
    rows = message_bytes(schedule, lambda each: sizes[each.microbatch], depth=depth, ahead=True, shared=shared)
    return [str(cell) for cell in schedule.programs[rank]], rows[rank]


def test_shared_memory_is_read_when_a_message_is_needed():
    cells, row = of_rank(1, "gpipe", 3)
    assert cells == ["1F0", "1F1", "1F2", "1B0", "1B1", "1B2"]
    assert (row.buffers, row.used, row.sent) == (3.0, (1.0, 2.0, 3.0, 3.0, 2.0, 1.0), (0.0,) * 6)
    _, first = of_rank(0, "gpipe", 3)
    assert (first.buffers, first.used) == (1.0, (0.0, 0.0, 0.0, 1.0, 1.0, 1.0))


def test_a_gradient_is_there_until_w():
    cells, row = of_rank(0, "zb-h1", 4)
    begun = [sum("I" in cell for cell in cells[: at + 1]) for at in range(len(cells))]
    ended = [sum("W" in cell for cell in cells[:at]) for at in range(len(cells))]
    assert row.used == tuple(float(one - other) for one, other in zip(begun, ended, strict=True))
    assert row.buffers == max(row.used)


def test_other_transports_open_receives_ahead_and_hold_what_they_send():
    _, last = of_rank(1, "gpipe", 3, shared=False)
    assert last.buffers == 3.0  # of all inputs that arrive
    cells, first = of_rank(0, "gpipe", 3, shared=False)
    assert (first.buffers, first.sent) == (2.0, (0, 1.0, 2.0, 0, 0, 0))  # the first gradient says that all have arrived
    assert cells == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]


def test_buffers_of_another_size_are_others():
    _, row = of_rank(0, "gpipe", 2, sizes=(4.0, 1.0))
    assert row.buffers == 5.0
    assert row.most == pytest.approx(1.0)
