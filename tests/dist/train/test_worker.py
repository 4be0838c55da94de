"""Workers with torch: process group, exit codes, threads, and the same under torchrun."""

from __future__ import annotations

import signal
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeloom.config import load, load_layout
from pipeloom.errors import ConfigError, DistributedError, Preempted, ScheduleError
from pipeloom.train.workers import worker
from pipeloom.train.workers.context import INTERRUPT, SAVE, STOP, Requests
from pipeloom.train.workers.launch import Patience, launch
from pipeloom.train.workers.preflight import usable_devices, worker_threads

SCRIPT = """
import os, signal, sys, time, pathlib
import torch, torch.distributed as dist
from pipeloom.config import load_layout
from pipeloom.errors import Preempted, ScheduleError
from pipeloom.train.workers.worker import leave, main

def body(context):
    total = torch.tensor([context.rank + 1.0])
    dist.all_reduce(total)
    context.store.set(f"seen/{context.rank}", "yes")
BODY

leave(main(load_layout("tiny"), body))
"""


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "work.py"
    path.write_text(SCRIPT.replace("BODY", textwrap.indent(textwrap.dedent(body), "    ")), encoding="utf-8")
    return path


def run(path: Path, world: int = 2) -> int:
    return launch([sys.executable, str(path)], world, patience=Patience(reports=5.0, term=1.0))


def test_workers_meet_sum_and_share_a_store_and_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    body = f"""
    context.store.wait(["seen/0", "seen/1"])
    cores = len(os.sched_getaffinity(0))
    facts = (context.world_size, context.device.type, total.item(), torch.get_num_threads() == max(1, cores // 2))
    pathlib.Path({str(tmp_path)!r}, str(context.rank)).write_text(repr(facts))
    """
    assert run(script(tmp_path, body)) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [repr((2, "cpu", 3.0, True))] * 2


@pytest.mark.core
@pytest.mark.parametrize(
    ("variable", "torchrun", "configured", "threads"),
    [
        (None, False, "auto", 4),
        (None, False, 7, 7),
        ("1", False, 7, 1),
        ("1", True, "auto", 4),
        ("1", True, 7, 7),
        ("2,1", True, 7, 2),
    ],
)
def test_the_variable_replaces_the_key_unless_torchrun_set_it(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, torchrun: bool, configured: Any, threads: int
) -> None:
    monkeypatch.setattr("pipeloom.train.workers.preflight.usable_cores", lambda: 9)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert worker_threads(configured, 2) == threads


@pytest.mark.core
@pytest.mark.parametrize("value", ["many", "0", "-2", "1.5", "9" * 5000, "1025"])
def test_a_variable_that_is_no_number_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(ConfigError, match=r"OMP_NUM_THREADS is .* it must be a whole number from 1 to 1,024"):
        worker_threads(2, 1)


def test_a_bug_ends_with_1_and_its_traceback_and_peers_say_that_they_lost_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
    if context.rank == 1:
        raise ValueError("a bug of the test")
    dist.all_reduce(total)
    """
    assert run(script(tmp_path, body)) == 1
    err = capfd.readouterr().err
    assert "[rank 1] ValueError: a bug of the test" in err
    assert "lost another worker: " in err
    assert "rank 1 (process " in err


def test_pipeloom_errors_keep_their_code_and_are_written_as_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(script(tmp_path, "raise ScheduleError('the same on every rank')")) == 3
    err = capfd.readouterr().err
    assert err.count("the same on every rank") == 1
    assert "Traceback" not in err


@pytest.mark.core
def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def claimed(rank: int, workers: int, device: str, *devices: int) -> tuple[str, int | None]:
        train = load("tiny", {"train.device": device, "train.devices": list(devices)}).train
        claim = worker.claim_device(usable_devices(train, workers), rank)
        return claim.type, claim.index

    with pytest.raises(ConfigError, match=r'train.device = "cuda": this machine has no CUDA device for 4 workers'):
        claimed(0, 4, "cuda")
    assert claimed(0, 4, "auto") == claimed(0, 1, "auto", 1) == ("cpu", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert [claimed(rank, 4, "cuda")[1] for rank in range(4)] == [0, 1, 2, 0]
    assert [claimed(rank, 4, "cuda", 2, 1)[1] for rank in range(4)] == [2, 1, 2, 1]
    assert claimed(3, 4, "auto") == ("cpu", None)
    assert [claimed(rank, 2, "auto", 1, 2)[1] for rank in range(2)] == [1, 2]
    with pytest.raises(ConfigError, match=r"train.devices = \[1, 3\]: this machine has 3 CUDA devices"):
        claimed(0, 2, "cuda", 1, 3)


@pytest.mark.core
def test_nccl_takes_a_device_for_each_worker() -> None:
    assert [worker.backend_for(devices, 4) for devices in (0, 1, 3, 4, 8)] == ["gloo"] * 3 + ["cpu:gloo,cuda:nccl"] * 2
    assert worker.shared_devices(4, 1).startswith("4 workers share 1 CUDA device: ")
    assert worker.shared_devices(4, 3).startswith("4 workers share 3 CUDA devices: ")


@pytest.mark.core
def test_the_first_signal_that_ends_a_run_decides_how() -> None:
    both = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)
    for signals, flags in zip(both, (SAVE | INTERRUPT, STOP), strict=True):
        requests = Requests()
        for number in signals:
            requests.note(number)
        assert requests.flags == flags


@pytest.mark.core
def test_exit_codes_and_texts() -> None:
    assert worker.describe(KeyboardInterrupt()) == (130, "interrupted")
    assert worker.describe(Preempted("stopped")) == (75, "stopped")
    assert worker.describe(ScheduleError("wrong")) == (3, "wrong")
    assert worker.describe(DistributedError("gone")) == (6, "gone")
    assert worker.describe(SystemExit(4)) == (4, "")
    code, text = worker.describe(ZeroDivisionError("nothing there"))
    assert code == 1
    assert text.endswith("ZeroDivisionError: nothing there")


@pytest.mark.core
def test_a_port_that_is_in_use_is_named_by_a_worker_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("PIPELOOM_FAILURES", raising=False)
        with pytest.raises(DistributedError, match=rf"127\.0\.0\.1:{port} .*in use"):
            worker.start(load_layout("tiny"))


@pytest.mark.core
@pytest.mark.parametrize("text", ["two", "-1", "1.0", "²", "٣", ""])
def test_an_environment_without_numbers_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is .* in the environment; it must be a whole number"):
        worker.world_size_given()
    monkeypatch.delenv("RANK")
    assert worker.world_size_given() is None
    assert not worker.is_worker()


@pytest.mark.core
def test_a_restarted_worker_finds_nothing_of_the_attempt_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun may serve one store for all restarts: the address of a dead worker's socket would still be in it."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        first, second = (worker.workers_store(rank, 2, timedelta(seconds=20)) for rank in (0, 1))
        assert not second.check(["address of rank 0"])
        first.set("address of rank 0", f"of attempt {attempt}")
        assert second.get("address of rank 0") == f"of attempt {attempt}".encode()
