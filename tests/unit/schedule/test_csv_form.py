"""The CSV form: both ways, torch's own tables, and refusals that point at the place."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest

import pipeloom as pl
from paths import DATA
from pipeloom.errors import UsageError
from pipeloom.schedule.comms_form import to_torch_csv
from pipeloom.schedule.csv_form import from_csv, to_csv
from pipeloom.schedule.files import load, names_a_file
from pipeloom.schedule.model import parts

TORCH = DATA / "torch"
GOLDEN = ["interleaved", "looped-bfs", "zbv", "interleaved-zb", "dualpipev", "gpipe"]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 3), (4, 9), (3, 2)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
def test_round_trip(name: str, ranks: int, microbatches: int) -> None:
    made = pl.schedules.build(name, ranks, microbatches)
    read = from_csv(to_csv(made))
    assert (read.codes, read.placement, read.microbatches) == (made.codes, made.placement, microbatches)
    assert read.routes == made.routes


def test_split_backward_and_pairs_round_trip() -> None:
    text = "0F0,0F1,0I0,0W0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    read = from_csv(text)
    pl.check(read)
    assert to_csv(read) == text
    assert read.has_pairs
    assert read.splits_backward


def test_spaces_quotes_idle_cells_trailing_commas_and_line_ends_do_not_matter() -> None:
    plain = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    loose = '\ufeff 0F0 ,"0F1",,,0B0,0B1,,\r\n,, 1F0,1B0,1F1 ,1B1\r\n\r\n'
    assert from_csv(loose).codes == from_csv(plain).codes
    assert from_csv("0F0,(0F1 ; 0B0)OVERLAP_F_B,0B1").programs == from_csv("0F0,(0F1;0B0),0B1").programs


@pytest.mark.parametrize("name", GOLDEN)
def test_torch_tables_are_read_pass_check_and_are_written_back(name: str) -> None:
    schedule = load(TORCH / f"{name}.csv")
    pl.check(schedule)
    rows = (TORCH / f"{name}.csv").read_text().splitlines()
    assert to_csv(schedule).splitlines() == [",".join(filter(None, row.split(","))) for row in rows]
    assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, 4, 8)
    v_placed = name in ("zbv", "dualpipev")
    assert schedule.chunks == (1 if name == "gpipe" else 2)
    assert schedule.placement == ((0, 1, 2, 3, 3, 2, 1, 0) if v_placed else tuple(range(4)) * schedule.chunks)


@pytest.mark.parametrize("name", ["interleaved", "zbv", "dualpipev"])
def test_torchs_prepared_tables_are_read_and_written_back(name: str) -> None:
    """With gathers, reductions, sends and receives, byte for byte; what is left without them is torch's plain table."""
    schedule = load(TORCH / f"{name}-comms.csv")
    pl.check(schedule)
    assert to_torch_csv(schedule) == ((TORCH / f"{name}-comms.csv").read_text(), ())
    plain = [[cell for cell in p if parts(cell)[0].kind in "FBIW"] for p in schedule.programs]
    assert schedule.with_programs(plain).codes == load(TORCH / f"{name}.csv").codes


def test_what_torch_does_not_know_is_left_out() -> None:
    plain = pl.schedules.interleaved(2, 4)
    for word, letters in (("offload", ("O", "L")), ("recompute=whole", ("R",)), ("recompute", ("R",))):
        assert to_torch_csv(pl.schedules.transformed(plain, [word])) == (to_torch_csv(plain)[0], letters)
    for schedule in (
        pl.schedules.dualpipe(2, 4),
        *(pl.schedules.transformed(plain, [w]) for w in ("slices=2", "vocabulary")),
    ):
        with pytest.raises(pl.ScheduleError, match="which torch's runtime cannot execute"):
            to_torch_csv(schedule)
    with pytest.raises(pl.ScheduleError, match="deadlocks"):
        to_torch_csv(from_csv("0B0,0F0\n1F0,1B0"))


COMMS = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("1RECV_F0,1F0", "1F0,1RECV_F0", "x:2:1: 1F0 waits for 1RECV_F0, which is not before it"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "x:1:1: 0SEND_F0 is not behind an action that makes a message"),
        ("0F1,0SEND_F1", "0F1,0SEND_F0", "0SEND_F0 is not behind .* or is there twice"),
        (",0SEND_F1", "", "0SEND_F1 is missing on rank 0"),
        ("1RECV_F0", "1RECV_F0,1RECV_F0", "x:2:10: 1RECV_F0 receives nothing, or is there twice"),
        ("0F0,", "0F0,0RECV_F0,", "0RECV_F0 receives nothing"),
        ("1RECV_F1,1F1,1B1", "1F1,1B1,1RECV_F1", "1F1 waits for 1RECV_F1"),
        ("1B1,1SEND_B1", "1B1,1SEND_B1,1RECV_F1", "x:2:53: no action behind 1RECV_F1 waits for it"),
        ("0RECV_B0,0B0,0RECV_B1", "0RECV_B1,0RECV_B0,0B0", "rank 1 sends 1SEND_B0 where rank 0 receives 0RECV_B1"),
    ],
)
def test_sends_and_receives_are_checked(old: str, new: str, reason: str) -> None:
    assert from_csv(COMMS).programs == from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1").programs
    with pytest.raises(pl.ScheduleError, match=reason):
        from_csv(COMMS.replace(old, new), source="x")


def test_torch_interleaved_is_the_one_made_here() -> None:
    assert load(TORCH / "interleaved.csv").codes == pl.schedules.interleaved(ranks=4, microbatches=8).codes


def test_torch_1f1b_is_refused_with_the_reason() -> None:
    """torch 2.13 counts the last rank's micro-batches from 1: it runs a ninth one of eight and never the first."""
    with pytest.raises(pl.ScheduleError, match=r"1f1b\.csv:4:57: 3F8 names micro-batch 8 of 8 \(0\.\.7\)"):
        load(TORCH / "1f1b.csv")


@pytest.mark.torch_behaviour
@pytest.mark.parametrize("name", [*GOLDEN, "1f1b"])
def test_golden_files_are_what_torch_makes(name: str) -> None:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("make_golden", TORCH / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.text(name) == (TORCH / f"{name}.csv").read_text()
    if name in module.PREPARED:
        assert module.text(name, comms=True) == (TORCH / f"{name}-comms.csv").read_text()


@pytest.mark.torch_behaviour
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
def test_our_cells_pass_torch_own_reader_and_validator(name: str) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = pl.schedules.build(name, 4, 9)
    rows = to_csv(schedule).splitlines()
    table = {rank: [torch_schedules._Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)}
    placed = torch_schedules._validate_schedule(table, 4, schedule.stages, 9)
    assert placed == dict(enumerate(schedule.placement))


@pytest.mark.torch_behaviour
@pytest.mark.parametrize("name", ["interleaved", "zbv", "dualpipev"])
def test_gathers_by_torchs_rule_are_those_of_torch(name: str) -> None:
    """And torch reads and writes our cells; it frees several stages at a place in the order of a set."""
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

    def sorted_frees(cells: list[str]) -> list[list[str]]:
        return [sorted(run) for _, run in itertools.groupby(cells, lambda cell: cell.endswith("RESHARD") or cell)]

    schedule = pl.schedules.build(name, 4, 8)
    ours = to_csv(pl.schedules.transformed(schedule, ["shard-as-torch=2"])).splitlines()
    for row, sharded in zip(to_csv(schedule).splitlines(), ours, strict=True):
        actions = [torch_schedules._Action.from_str(cell) for cell in row.split(",")]
        theirs = [str(action) for action in torch_schedules._add_unshard_reshard(actions, 2)]
        cells = [str(torch_schedules._Action.from_str(cell)) for cell in sharded.split(",")]
        assert cells == sharded.split(",")
        assert sorted_frees([c for c in cells if "REDUCE" not in c]) == sorted_frees(theirs)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,0B0\n1F0garbage,1B0", r"^x:2:1: '1F0garbage' is not an action"),
        ("0F0, 0Z0", r"^x:1:6: '0Z0' is not an action"),
        ("0F0,0F7,0B0,0B7\n1F0,1F1,1B0,1B1", r"^x:1:5: 0F7 names micro-batch 7 of 2 \(0\.\.1\)"),
        ("0F0,0B0\n9F0,9B0", r"^x:2:1: 9F0 names stage 9 of 2 \(0\.\.1\)"),
        ("0F0,0SEND_F0,0B0", r"^x:1:5: 0SEND_F0 is not behind an action that makes a message to another rank"),
        ("0UNSHARD3,0F0,0B0", r"^x:1:1: '0UNSHARD3' is not an action"),
        ("0F0,0B0\n\n1F0,1B0", r"^x: rank 1 holds no stage"),
        ("0F" + "9" * 5000, r"^x:1:1: .* is not an action"),
    ],
)
def test_refusals_say_where(text: str, reason: str) -> None:
    with pytest.raises(pl.ScheduleError, match=reason):
        from_csv(text, source="x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "^x: the file contains no actions"),
        (",,\n,", "^x: the file contains no actions"),
        (
            "hello world",
            r"^x is not a schedule: none of its cells is an action, such as 0F0, .*the first cell is 'hello world'",
        ),
        ("date,price\n2024-01-01,3.5\n", "^x is not a schedule: .*the first cell is 'date'"),
        ("0REDUCE_GRAD", "^x is not a schedule"),
    ],
)
def test_a_text_without_a_single_action_is_no_schedule(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        from_csv(text, source="x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,0B0\n1F0,1B0,0F1,0B1\n2F0,2F1,2B0,2B1", None),
        ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1,0B1", "0B1 is on the wrong rank; stage 0 is placed on rank 0"),
        ("0F0,0F1,0B0,0B1,1B1\n1F0,1B0,1F1", "1B1 is on the wrong rank; stage 1 is placed on rank 1"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0", "stage 1 micro-batch 1 .* has no forward: 1F1 is missing"),
    ],
)
def test_what_check_says_of_a_file(text: str, reason: str | None) -> None:
    with pytest.raises(pl.ScheduleError, match=reason):
        pl.check(from_csv(text))


def test_two_routes_are_refused_and_json_is_named() -> None:
    schedule = pl.Schedule.of(
        [["0F0", "3F1", "0B0", "3B1"], ["1F0", "2F1", "1B0", "2B1"]],
        placement=[0, 1, 1, 0],
        microbatches=2,
        routes=[(0, 1), (2, 3)],
        route_of=[0, 1],
    )
    with pytest.raises(pl.ScheduleError, match=r"2 routes.*JSON"):
        to_csv(schedule)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def late(ranks): ...\ndef eager(ranks): ...\n")
    with pytest.raises(UsageError, match=r"is a function of a file; give .*my\.py:late or .*my\.py:eager"):
        load(tmp_path / "my.py")
    with pytest.raises(UsageError, match=r"cannot read .*none\.csv: No such file"):
        load(tmp_path / "none.csv")
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path)
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(UsageError, match=r"not a text file \(byte 0"):
        load(tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("name", "is_file"),
    [
        *[(name, True) for name in ("a.csv", "dir/a", "A.JSON", "my.txt", "my.py")],
        *[(name, False) for name in ("1f1b", "module.sub:function", "my.py:function")],
    ],
)
def test_what_names_a_file(name: str, is_file: bool) -> None:
    assert names_a_file(name) is is_file


def test_tensors_with_names_are_not_left_out() -> None:
    schedule = pl.schedules.one_f_one_b(3, 4).with_tensors([("skip", 0, [2])])
    with pytest.raises(
        pl.ScheduleError, match="passes tensor 'skip' by name between stages, which the CSV form cannot say"
    ):
        to_csv(schedule)
