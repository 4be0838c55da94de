"""Tables of schedules and layouts for Python: values, text and HTML."""

from __future__ import annotations

import pytest

import pipeloom as pl
from pipeloom.errors import CapacityError, UsageError

PLAIN, CHUNKS = pl.schedules.one_f_one_b(4, 8), pl.schedules.interleaved(4, 8)


def test_schedules_do_the_same_work() -> None:
    """A stage of two chunks a rank costs half; a timeline is not simulated again."""
    table = pl.compare([PLAIN, CHUNKS, pl.simulate(PLAIN, pl.Costs(2, 2, 2))])
    assert [row["schedule"] for row in table] == ["1f1b", "interleaved", "1f1b"]
    assert [row["makespan"] for row in table] == [33, 28.5, 66]
    assert table[1]["bubble_rate"] == pytest.approx(1 - 24 / 28.5)
    assert len(table) == 3


def test_a_table_prints_within_80_columns_and_shows_its_labels() -> None:
    text = str(pl.compare({"mine": PLAIN, "<chunks>": CHUNKS}))
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[2].split()[:2] == ["mine", "33"]
    assert "bubble rate: Σ idle / (p · makespan)" in text
    html = pl.compare({"mine": PLAIN, "<chunks>": CHUNKS})._repr_html_()
    assert "<td>&lt;chunks&gt;</td><td>28.5</td>" in html
    assert html.count("<tr><th>") == 2


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^schedules is \['1f1b'\]; it must be an Iterable\[Schedule \| Timeline\]"):
        pl.compare(["1f1b"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"^schedules: there are none"):
        pl.compare([])
    with pytest.raises(UsageError, match=r"^forward has 3 values"):
        pl.compare([PLAIN], pl.Costs(forward=(1, 2, 3)))


def test_layouts_are_those_of_plan() -> None:
    best = pl.best_layouts("llama3-8b", 4, sequences=64, fixed={"micro_batch": 1, "cp": 1})
    rates = [row["tokens_per_second_per_device"] for row in best]
    assert rates == sorted(rates, reverse=True)
    assert [row["peak_bytes"] for row in best] == sorted((row["peak_bytes"] for row in best), reverse=True)
    assert str(best).splitlines()[1].split()[0] == best[0]["layout"]
    with pytest.raises(
        CapacityError, match=r"no layout of llama3-8b fits into 2\.0 GiB on 1 devices; the smallest needs"
    ):
        pl.best_layouts("llama3-8b", 1, sequences=1, memory=2**31)
    with pytest.raises(UsageError, match="runtime is 'megatorn'; did you mean 'megatron'"):
        pl.best_layouts("llama3-8b", 1, runtime="megatorn")
    with pytest.raises(UsageError, match="h1000"):
        pl.best_layouts("llama3-8b", 1, "h1000")
