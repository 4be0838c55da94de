"""The launcher: environment, ports, first failure, signals, no orphans. Most workers here are one line of Python."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pipeloom.train.workers.failures import WorkerFailure, first_failure, read_failures, record_failure, write_exit
from pipeloom.train.workers.launch import Patience, launch
from processes import wait_for

LONG = Patience(reports=120.0, term=120.0)


def worker(code: str) -> list[str]:
    head = "import os, sys, time, signal, pathlib\nrank = int(os.environ['RANK'])\n"
    return [sys.executable, "-c", head + textwrap.dedent(code)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def start_launcher(code: str, world: int = 2, before: str = "") -> subprocess.Popen[str]:
    """A launcher in a process of its own, so that it can be sent signals."""
    command = worker(code)
    script = (
        f"import sys\nfrom pipeloom.train.workers.launch import Patience, launch\n{before}\n"
        f"sys.exit(launch({command!r}, {world}, patience=Patience(reports=120.0, term=120.0)))"
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_environment_is_torchruns(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE"
    code = f"""
    text = ' '.join(os.environ[name] for name in {names!r}.split())
    pathlib.Path({str(tmp_path)!r}, str(rank)).write_text(text)
    """
    assert launch(worker(code), 3) == 0
    seen = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert seen == [[str(r), str(r), "3", "3"] for r in range(3)]


def test_nothing_listens_and_the_folder_is_the_users_alone() -> None:
    code = """
    import stat
    folder = pathlib.Path(os.environ['PIPELOOM_STORE']).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert 'MASTER_PORT' not in os.environ
    """
    bare = {key: value for key, value in os.environ.items() if key != "MASTER_PORT"}
    assert launch(worker(code), 2, environment=bare) == 0


def test_neighbours_have_a_socket_pair_each_and_see_each_others_end() -> None:
    code = """
    import socket
    links = dict(map(int, pair.split(':')) for pair in os.environ['PIPELOOM_LINKS'].split(','))
    assert sorted(links) == [other for other in range(3) if other != rank]
    if rank == 1:
        os._exit(0)
    link = socket.socket(fileno=links[1])
    link.settimeout(120)
    assert link.recv(1) == b''
    """
    assert launch(worker(code), 3) == 0


def test_only_rank_0_writes_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(worker("print('hello from', rank); print('noise', rank, file=sys.stderr)"), 3) == 0
    out, err = capfd.readouterr()
    assert out == "hello from 0\n"
    assert err == "noise 0\n"


def test_the_first_failure_decides_and_is_summarised(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
    if rank == 2:
        print('wrong thing in stage 2', file=sys.stderr)
        sys.exit(3)
    time.sleep(600)
    sys.exit(6)
    """
    assert launch(worker(code), 4, patience=Patience(reports=1.0, term=1.0)) == 3
    err = capfd.readouterr().err
    assert "[rank 2] wrong thing in stage 2" in err
    assert "rank 2 (process " in err
    assert "failed first: exit code 3; the other 3 were stopped" in err


def test_ranks_that_agree_on_an_error_fail_together(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
    from pipeloom.train.workers.failures import record_failure
    record_failure(rank, 5, 'the checkpoint was not written')
    sys.exit(5)
    """
    assert launch(worker(code), 2, patience=LONG) == 5
    assert capfd.readouterr().err == "pipeloom: the ranks failed together: exit code 5\n"


def test_a_run_that_is_refused_has_no_rank_that_failed(capfd: pytest.CaptureFixture[str]) -> None:
    """The refusal says all; who printed it is of no use."""
    code = """
    print('the folder belongs to a run that is under way', file=sys.stderr)
    sys.exit(2)
    """
    assert launch(worker(code), 2, patience=LONG) == 2
    err = capfd.readouterr().err
    assert "the folder belongs to a run that is under way" in err
    assert "failed first" not in err


def test_a_worker_that_is_killed_is_named_and_ends_with_6(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    import socket
    link = socket.socket(fileno=int(dict(p.split(':') for p in os.environ['PIPELOOM_LINKS'].split(','))['1']))
    assert link.recv(1) == b''
    print('peer says: rank 1 is gone', file=sys.stderr)
    sys.exit(6)
    """
    assert launch(worker(code), 3, patience=LONG) == 6
    err = capfd.readouterr().err
    assert "failed first: killed by SIGKILL" in err
    assert "peer says: rank 1 is gone" in err  # its peers see it, and report
    assert err.count("peer says") == 1 + (err.count("[rank 2] peer says"))


def test_workers_that_ignore_sigterm_are_killed(tmp_path: Path) -> None:
    code = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path({str(tmp_path)!r}, str(rank)).write_text(str(os.getpid()))
    if rank == 0:
        while not pathlib.Path({str(tmp_path)!r}, '1').exists():
            time.sleep(0.01)
        sys.exit(2)
    time.sleep(600)
    """
    assert launch(worker(code), 2, patience=Patience(reports=0.3, term=0.3)) == 2
    assert not alive(int((tmp_path / "1").read_text()))


@pytest.mark.parametrize(
    ("end", "expected"),
    [("sys.exit(75)", 75), ("sys.exit(0)", 0), (None, 75)],
    ids=["stopped", "at its end", "before the workers listen"],
)
def test_sigterm_is_forwarded_and_waited_for(tmp_path: Path, end: str | None, expected: int) -> None:
    code = f"""
    def stop(number, frame):
        time.sleep(0.3)
        {end}
    signal.signal(signal.SIGTERM, {"stop" if end else "signal.SIG_DFL"})
    pathlib.Path({str(tmp_path)!r}, str(rank)).write_text('x')
    time.sleep(600)
    """
    launcher = start_launcher(code)
    assert wait_for(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"))
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=600)
    assert launcher.returncode == expected
    assert err == "" or end is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the workers on Linux")
def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    code = f"pathlib.Path({str(tmp_path)!r}, str(rank)).write_text(str(os.getpid())); time.sleep(600)"
    launcher = start_launcher(code)
    assert wait_for(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"))
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    launcher.kill()
    launcher.communicate(timeout=600)
    assert wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(
    ("origin", "seconds", "code", "fate"),
    [
        (1, 120.0, 1, "exit code 1"),
        (1, 0.3, 6, "it did not end, and was killed"),
        (0, 120.0, 6, "it was stuck, and was killed"),
    ],
)
def test_a_rank_that_told_the_others_of_its_failure_may_say_why(
    origin: int, seconds: float, code: int, fate: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A busy machine takes its time for a traceback; the peer has ended by then. A rank that is silent is killed at once."""
    text = f"""
    from pipeloom.train.workers.failures import record_failure
    folder = pathlib.Path(os.environ['PIPELOOM_FAILURES'])
    if rank == 0:
        while not (folder / 'listening').exists():
            time.sleep(0.01)
        record_failure(0, 6, 'stopped, because rank 1 failed', (1,), {origin})
        sys.exit(6)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / 'listening').touch()
    while not (folder / 'rank0.json').exists():
        time.sleep(0.01)
    time.sleep({2 if code == 1 else 600})
    print('the traceback', file=sys.stderr)
    sys.exit(1)
    """
    assert launch(worker(text), 2, patience=Patience(reports=seconds)) == code
    err = capfd.readouterr().err
    assert ("the traceback" in err) == (code == 1)
    assert f"failed first: {fate}; the other one was stopped" in err


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    launch(worker("pass"), 1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_who_failed_first() -> None:
    def note(rank: int, at: float, code: int, *blames: int) -> tuple[int, WorkerFailure]:
        return rank, WorkerFailure(rank, at, code, "", blames)

    assert first_failure({0: 6, 2: -9, 1: 6}, dict([note(0, 1.0, 6)])) == 2  # killed from outside
    assert first_failure({0: 6, 1: 6}, dict([note(0, 2.0, 6, 0), note(1, 1.0, 6, 1)])) == 1  # the earlier note
    assert first_failure({0: 6, 1: 6}, dict([note(0, 2.0, 6), note(1, 1.0, 6)])) is None  # a lost message
    assert first_failure({0: 6, 1: 3}, dict([note(0, 2.0, 6)])) == 1  # it left no note
    assert first_failure({0: 6, 1: 1}, dict([note(0, 1.0, 6), note(1, 2.0, 1)])) == 1  # 6 may be because of others
    assert first_failure({0: 0, 2: 6, 1: 6}, {}) == 2  # seen first
    assert first_failure({0: 6, 2: 6}, dict([note(0, 2.0, 6, 1), note(2, 1.0, 6, 1)])) == 1  # frozen: it never ended
    assert first_failure({3: 0, 0: 6}, dict([note(0, 2.0, 6, 3)])) == 3  # os._exit(0)
    assert first_failure({3: -6, 0: 6}, dict([note(0, 2.0, 6, 3)])) == 3  # abort
    assert first_failure({0: 6, 1: 1}, dict([note(0, 1.0, 6, 2), note(1, 2.0, 1, 1)])) == 1  # its own error
    assert first_failure({0: -6, 1: -11}, {}) == 1  # an abort may be because of others


@pytest.mark.parametrize("codes", [(6, 0, 75), (6, 1, 6), (1, 6), (1, 2)])
def test_the_first_to_say_how_a_run_ended_decides_unless_it_stopped_because_of_another(
    codes: tuple[int, ...], tmp_path: Path
) -> None:
    for rank, code in enumerate(codes):
        write_exit(str(tmp_path), code, "a reason", (rank,))
    rank = 1 if 1 in codes[1:] else 0
    expected = {"exit_code": codes[rank], "reason": "a reason", "ranks": [rank]}
    assert json.loads((tmp_path / "exit.json").read_text()) == expected


def test_a_record_of_the_end_that_does_not_fit_on_the_disk_leaves_room_for_a_later_one(tmp_path: Path) -> None:
    """An empty file stayed, which no rank with room replaced."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        write_exit(str(tmp_path), 5, "a reason")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    write_exit(str(tmp_path), 5, "a reason")
    assert json.loads((tmp_path / "exit.json").read_text())["exit_code"] == 5


def test_notes_are_left_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELOOM_FAILURES", str(tmp_path))
    record_failure(3, 2, "reason")
    assert (read_failures(tmp_path)[3].exit_code, read_failures(tmp_path)[3].text) == (2, "reason")
    record_failure(5, 6, "stopped", (1,))
    assert read_failures(tmp_path)[5].blames == (1,)
    record_failure(0, 75, "told to stop")
    monkeypatch.delenv("PIPELOOM_FAILURES")
    record_failure(4, 2, "nobody asks")
    assert set(read_failures(tmp_path)) == {3, 5}
