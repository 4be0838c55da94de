"""The terminal drawing: to scale, at most as wide as asked, readable without colour."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeloom as pl
from paths import DATA
from pipeloom.draw import svg, terminal
from pipeloom.schedule.files import load

GOLDEN = DATA / "torch"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def _drawn(name: str, ranks: int, microbatches: int, costs: pl.Costs | None = None, width: int = 80) -> list[str]:
    timeline = pl.simulate(pl.schedules.build(name, ranks, microbatches), costs)
    return terminal(timeline, width=width, color=False).splitlines()


def test_wide_boxes_hold_letter_and_number() -> None:
    assert _drawn("gpipe", 2, 3)[3:6] == [
        "rank 0  F0─── F1─── F2─── ··················B0───────── B1───────── B2─────────",
        "rank 1  ······F0─── F1─── F2─── B0───────── B1───────── B2───────── ············",
        "        |0          |2          |4          |6          |8          |10",
    ]


def test_narrow_boxes_have_their_number_below() -> None:
    assert _drawn("1f1b", 4, 8)[3:5] == [
        "rank 0  F F F F ············B── F B── F B── F B── F B── ··B── ··B── ··B──",
        "        0 1 2 3             0   4 1   5 2   6 3   7 4     5     6     7",
    ]


def test_numbers_with_two_digits_stand_upright_when_boxes_are_narrow() -> None:
    lines = _drawn("gpipe", 2, 12)
    assert lines[3].startswith("rank 0  FFFFFFFFFFFF···B B B ")
    assert lines[4].startswith("                  11")
    assert lines[5].startswith("        012345678901   0 1 2 ")
    assert "digits downwards" in "\n".join(lines)


def test_columns_longer_than_actions_keep_the_proportion_of_letters() -> None:
    lines = _drawn("1f1b", 2, 200, pl.Costs(1, 1, 1))
    band = lines[3].removeprefix("rank 0  ")
    assert len(band) == 72
    assert band.count("F") == pytest.approx(24, abs=1)
    assert band.count("B") == pytest.approx(48, abs=1)
    assert "one column is" in "\n".join(lines)


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "looped-bfs"]),
    ranks=st.integers(1, 12),
    microbatches=st.integers(1, 40),
    costs=st.tuples(*[st.sampled_from([0.0, 0.3, 1.0, 2.5])] * 3).filter(any),
    width=st.integers(60, 120),
)
@settings(max_examples=60, deadline=None)
def test_no_line_is_wider_than_asked(
    name: str, ranks: int, microbatches: int, costs: tuple[float, ...], width: int
) -> None:
    forward, backward, p2p = costs
    if forward + backward == 0:
        return
    made = pl.Costs(forward, backward / 2, backward / 2, p2p)
    lines = _drawn(name, ranks, microbatches, made, width)
    drawing = lines[3 : next(at for at, line in enumerate(lines) if "|0" in line) + 1]
    assert max(map(len, drawing)) <= width
    if width >= 80:
        assert max(map(len, lines)) <= width


def test_figures_say_which_they_are() -> None:
    text = "\n".join(_drawn("1f1b", 4, 8))
    assert "makespan          33   lower bound 27, gap 22.2 %\nperiod            33  from step to step" in text
    assert "bubble ratio      0.3750  Σ idle / Σ busy (Megatron's figure)" in text
    assert "bubble rate       0.2727  Σ idle / (p · makespan)" in text
    assert "span bubble rate  0.2727  1 − busy / largest span" in text
    assert re.search(r"   0    24     9        6       0          3                 4\n", text)
    assert "peak memory" not in text
    heavy = "\n".join(_drawn("1f1b", 4, 8, pl.Costs(activation=2.5)))
    assert re.search(r"   0 .* 4           10\n", heavy)


def test_idle_by_phase_adds_up_in_the_table() -> None:
    lines = _drawn("interleaved", 4, 9)
    table = lines[next(at for at, line in enumerate(lines) if line.startswith("rank  busy")) + 1 :]
    for line in table[:4]:
        _, busy, idle, warmup, steady, cooldown, *_ = line.split()
        assert float(idle) == float(warmup) + float(steady) + float(cooldown)
        assert float(busy) + float(idle) == 63


def test_full_rank_units() -> None:
    assert any(line.rstrip().endswith("12 = 6 full-rank") for line in _drawn("interleaved", 4, 9))


def test_pairs_and_split_backward_are_drawn() -> None:
    text = terminal(pl.simulate(load(GOLDEN / "dualpipev.csv"), pl.Costs(all_to_all=0.3)), color=False)
    assert max(map(len, text.splitlines())) <= 80
    assert "a pair F|B is drawn as its F, then its backward" in text
    for word in ("F forward", "B backward", "I input gradient", "W weight gradient"):
        assert word in text


def test_colour_changes_no_character_of_a_band() -> None:
    timeline = pl.simulate(pl.schedules.interleaved(ranks=2, microbatches=4))
    colored, plain = terminal(timeline, color=True), terminal(timeline, color=False)
    assert ANSI.search(colored)
    assert not ANSI.search(plain)
    bare = [line.rstrip() for line in ANSI.sub("", colored).splitlines()]
    letters = [line.replace("─", " ").rstrip() for line in plain.splitlines()]
    assert bare[3:8] == letters[3:8]


def test_colour_only_on_a_terminal_and_not_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = pl.simulate(pl.schedules.gpipe(ranks=2, microbatches=2))
    assert "\x1b" not in terminal(timeline)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b" in terminal(timeline)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in terminal(timeline)


@pytest.mark.parametrize("color", [False, True])
def test_many_kinds_of_actions_have_a_legend_of_several_lines(color: bool) -> None:
    schedule = pl.schedules.transformed(pl.schedules.interleaved(ranks=4, chunks=3, microbatches=4), ["vocabulary"])
    for width in range(80, 110):
        text = re.sub(r"\x1b\[[\d;]*m", "", terminal(pl.simulate(schedule), width=width, color=color))
        lines = [line.rstrip() for line in text.splitlines()]
        assert sum(bool(re.search("BROADCAST|REDUCE|gradients of a share|· idle", line)) for line in lines) > 1
        assert max(map(len, lines)) <= width


def test_zero_costs_do_not_break_it() -> None:
    assert "makespan          0" in "\n".join(_drawn("gpipe", 2, 2, pl.Costs(0, 0, 0)))


def test_bytes_are_a_line_of_blocks_for_each_pool() -> None:
    costs = pl.Costs(bytes={"saved": 4.0, "params": 2.0, "copy": 8.0}, pools={"copy": "host"})
    lines = terminal(pl.simulate(pl.schedules.one_f_one_b(2, 2), costs), width=120, color=False).splitlines()
    first, last = [line.split()[1] for line in lines if line.startswith("device")]
    assert first[:: len(first) // 9] == "▅█████▅▅▅"
    assert {line.split()[1] for line in lines if line.startswith("host")} == {"█" * len(last)}
    assert lines[-2].split()[-4:] == ["10", "B", "8", "B"]
    narrow = terminal(pl.simulate(pl.schedules.one_f_one_b(2, 2), costs), width=60, color=False).splitlines()
    assert narrow[-3] == "rank  peak activations  bytes in device  bytes in host"
    assert narrow[-2].split()[-4:] == ["10", "B", "8", "B"]


def test_a_run_has_one_figure_for_its_bubble() -> None:
    """The rate, in the terminal and in the SVG; a schedule has all of them, by name."""
    simulated = pl.simulate(pl.schedules.one_f_one_b(4, 8))
    measured = replace(simulated, source="measured")
    for text in (terminal(measured, 80, color=False), svg([measured])):
        assert "bubble rate" in text
        assert "bubble ratio" not in text
        assert "span bubble" not in text
    for text in (terminal(simulated, 80, color=False), svg([simulated])):
        assert "bubble ratio" in text
    assert "bubble_rate=0.2727" in repr(measured)
