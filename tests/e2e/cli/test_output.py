"""Standard output that is closed, or full; a second signal; errors of the machine."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeloom.cli.failures import exit_code_of
from pipeloom.config import load
from pipeloom.errors import ConfigError
from pipeloom.train.report.report import Report
from pipeloom.train.workers.failures import record_failure
from pipeloom.train.workers.worker import describe

SCHEDULE = "schedule 1f1b --ranks 4 --microbatches 400 --csv"
PIPELOOM = f"{sys.executable} -m pipeloom"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    "line",
    [
        SCHEDULE,
        pytest.param("schedule 1f1b --ranks 4 --microbatches 400 --json", marks=pytest.mark.full),
        "compare 1f1b gpipe --ranks 4 --microbatches 8",
        "search --ranks 2 --microbatches 4 --iterations 0",
        "train --help",
        pytest.param("verify --help", marks=pytest.mark.full),
        pytest.param("--help", marks=pytest.mark.full),
    ],
)
def test_a_reader_that_goes_away_is_no_failure(line: str) -> None:
    for redirection in ("| head -c 1; exit ${PIPESTATUS[0]}", ">&-"):
        done = shell(f"{PIPELOOM} {line} {redirection}")
        assert (done.returncode, done.stderr) == (0, ""), redirection


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disc_is_one_sentence_and_exit_code_2() -> None:
    for line in (f"{SCHEDULE} >/dev/full", "train --help >/dev/full"):
        done = shell(f"{PIPELOOM} {line}")
        assert done.returncode == 2
        assert done.stderr == "pipeloom: cannot write to standard output: No space left on device\n"
    done = shell(f"{PIPELOOM} {SCHEDULE} --svg /dev/full")
    assert done.returncode == 2
    assert done.stderr == "pipeloom: cannot write /dev/full: No space left on device\n"


def test_no_file_becomes_standard_output(tmp_path: Path) -> None:
    """With descriptor 1 closed the next file that is opened would get its number, and what is printed."""
    drawing = tmp_path / "drawing.svg"
    assert shell(f"{PIPELOOM} {SCHEDULE} --svg {drawing} >&- 2>&- <&-").returncode == 0
    text = drawing.read_text()
    assert text.startswith("<svg")
    assert text.rstrip().endswith("</svg>")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError(), 4, "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), 4, "out of memory: CUDA out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 2, "cannot write /x/y: No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 2, "cannot write a file: Disk quota exceeded"),
    ],
)
def test_memory_and_discs_that_are_used_up_have_a_sentence(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        raise error

    assert exit_code_of(run, as_json=False) == code
    assert capsys.readouterr().err == f"pipeloom: {words}\n"
    assert describe(error) == (code, words)


def report(folder: Path) -> Report:
    return Report(load("tiny", {"log.dir": str(folder)}))


def test_a_run_goes_on_when_its_folder_is_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shutil import rmtree

    from pipeloom.schedule import simulate
    from pipeloom.schedules import gpipe

    with report(tmp_path) as run:
        rmtree(tmp_path)
        run.record("step", step=1)
        run.draw(simulate(gpipe(2, 2)), [])
        run.say_files()
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("cannot write ") == 4  # trace, timelines, drawing, page
    assert f"trace: {run.folder.trace} (gone)" in " ".join(said.split())


def test_a_run_goes_on_when_its_disc_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [10, 0, 0, 1000]

    def write(descriptor: int, data: bytes) -> int:
        if not os.path.samestat(os.fstat(descriptor), os.stat(run.folder.log)):
            return real(descriptor, data)
        left = room.pop(0)
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:left])

    with report(tmp_path) as run:
        monkeypatch.setattr(os, "write", write)
        for step in range(4):
            run.record("step", step=step)
        monkeypatch.undo()
        log = run.folder.log.read_text()
    assert log == '{"event": \n{"event": "step", "step": 3}\n'  # a torn line ends before the next begins
    said = capsys.readouterr().out
    assert said.count("No space left on device; training continues without it") == 1


def test_a_run_without_room_for_its_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        report(tmp_path)
    monkeypatch.setenv("PIPELOOM_FAILURES", str(tmp_path))
    record_failure(0, 1, "words")  # a note that cannot be left is no second failure


LAUNCHER = """
import sys, time
from pipeloom.train.workers.launch import launch, Patience
code = launch([sys.executable, "-c", {worker!r}], 2, patience=Patience(term=1.0))
time.sleep(0.5)  # a signal that comes now must not change the code either
sys.exit(code)
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGTERM, signal.SIGTERM), 75),
        ((signal.SIGTERM, signal.SIGINT), 75),
        ((signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGINT, signal.SIGTERM), 130),
    ],
)
def test_a_second_signal_does_not_change_the_exit_code(signals: tuple[int, int], code: int) -> None:
    words = [sys.executable, "-c", LAUNCHER.format(worker=STUBBORN)]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "up\n"
    run.send_signal(signals[0])
    for _ in range(40):  # until the end, and after the launcher has put its handlers away
        time.sleep(0.1)
        if run.poll() is not None:
            break
        run.send_signal(signals[1])
    _, err = run.communicate(timeout=600)
    assert run.returncode == code, err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "line",
    [
        "schedule 1f1b --ranks 2 --microbatches 2",
        "compare 1f1b gpipe --ranks 2 --microbatches 2",
        "compare 1f1b --ranks 2 --sweep microbatches=2..4",
        "search --ranks 2 --microbatches 2",
        "rehearse 1f1b --ranks 2 --microbatches 2",
    ],
)
@pytest.mark.parametrize("target", ["--svg absent/x.svg", "--html folder"])
def test_files_that_cannot_be_written_are_refused_before_the_work(
    pipeloom: Callable[[str], Any], line: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for work in ("schedule.simulate", "compare.simulate", "search.search", "rehearse._run"):
        monkeypatch.setattr(f"pipeloom.cli.{work}", lambda *_, **__: pytest.fail("the work has begun"))
    ended = pipeloom(f"{line} {target}")
    file, reason = target.split()[1], "it is a directory" if "folder" in target else "there is no directory absent"
    assert (ended.code, ended.out, ended.err) == (2, "", f"pipeloom: cannot write {file}: {reason}\n")
