"""Figures and how numbers are printed."""

from __future__ import annotations

import pytest

import pipeloom as pl
from pipeloom.draw.boxes import nice_step
from pipeloom.draw.figures import cost_words, figures, heading, in_columns, message_words, messages, number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (33, "33"),
        (0.0, "0"),
        (36.6, "36.6"),
        (1 / 3, "0.3333"),
        (123456.7, "123457"),
        (0.00012346, "0.0001235"),
        (2e-9, "0.000000002"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("span", "most", "step"), [(63, 8, 10), (12, 8, 2), (0.9, 4, 0.5), (0, 4, 1), (1000, 10, 100)])
def test_steps_are_round(span: float, most: int, step: float) -> None:
    assert nice_step(span, most) == pytest.approx(step)


def test_figures_are_the_timelines() -> None:
    timeline = pl.simulate(pl.schedules.one_f_one_b(ranks=4, microbatches=8))
    found = figures(timeline)
    assert list(found) == [
        "makespan",
        "busy",
        "idle",
        "idle_by_cause",
        "spans",
        "bubble_ratio",
        "bubble_rate",
        "span_bubble_rate",
        "period",
        "peak_activations",
        "peak_memory",
        "messages",
        "lower_bound",
        "gap",
    ]
    assert (found["makespan"], found["bubble_ratio"]) == (33, 0.375)
    assert found["bubble_rate"] == pytest.approx(0.2727, abs=1e-4)
    assert found["gap"] == pytest.approx(33 / 27 - 1)
    assert found["peak_activations"] == [4, 3, 2, 1]
    assert found["messages"]["count"] == 2 * 3 * 8
    assert found["messages"]["sent"] == [8, 16, 16, 8]
    channel = {"source": 1, "destination": 0, "kind": "gradient", "count": 8, "size": 0}
    assert channel in found["messages"]["channels"]


def test_words() -> None:
    timeline = pl.simulate(pl.schedules.interleaved(ranks=2, microbatches=1), pl.Costs(forward=(1, 2, 2, 1.5)))
    assert heading(timeline) == "interleaved, 2 ranks, 2 chunks, 1 micro-batch, rounds=balanced"
    assert cost_words(timeline) == "costs of a stage: F 1..2, I 1, W 1; p2p 0"


def test_sizes_of_messages_are_those_of_their_micro_batches() -> None:
    """Two micro-batches of 1 and 3 times 10 bytes, from rank 0 to 1 and back."""
    schedule = pl.schedules.one_f_one_b(ranks=2, microbatches=2)
    found = messages(schedule, pl.Costs(message=10, microbatch=(1, 3)))
    assert found["by_kind"] == {kind: {"count": 2, "size": 40} for kind in ("activation", "gradient")}
    assert (found["count"], found["size"], found["sent"]) == (4, 80, [2, 2])
    assert [channel["size"] for channel in found["channels"]] == [40, 40]
    assert message_words(found) == "4 between ranks, 80 B"
    assert message_words(messages(schedule, pl.Costs())) == "4 between ranks"


def test_a_long_last_column_is_broken_at_its_commas_or_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    rows = [["GiB", "layout"], ["67.8", "dp=4,pp=2,m=2,seq=131072,slices=32"], ["4", "E 0-1 | 5-7 | 11-13 | 17-19"]]
    rows.append(["1", "with --attention --lora-rank 8"])
    assert in_columns(rows, left=0, ragged=True) == [
        " GiB  layout",
        "67.8  dp=4,pp=2,m=2,",
        "      seq=131072,slices=32",
        "   4  E 0-1 | 5-7 | 11-13 |",
        "      17-19",
        "   1  with --attention",
        "      --lora-rank 8",
    ]
