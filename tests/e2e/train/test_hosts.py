"""Two network namespaces as two hosts, with addresses of their own: the same losses as one host's, and what ends a run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

import faults
from commands import pipeloom
from faults import Hosts, ended, exit_file
from pipeloom.errors import ConfigError
from pipeloom.train.workers import network as interfaces
from pipeloom.train.workers.network import require_interface


def refusal() -> str:
    try:
        with Hosts():
            return ""
    except OSError as error:
        return f"no network namespaces here: {error}"


WHY_NOT = refusal()
two_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
LAYOUTS = {
    "pp 4": ["--parallel.pp", "4", "--schedule.name", "1f1b", "--schedule.microbatches", "4"],
    "pp 2 x dp 2": [
        "--parallel.pp",
        "2",
        "--parallel.dp",
        "2",
        "--schedule.name",
        "zb-h1",
        "--schedule.microbatches",
        "2",
    ],
}


def words(folder: Path, layout: str) -> list[str]:
    line = faults.command(folder, *LAYOUTS[layout])
    line[line.index("--train.steps") + 1] = "3"
    return line


def losses(folder: Path) -> list[tuple[int, float]]:
    (log,) = folder.glob("runs/*/log.jsonl")
    events = map(json.loads, log.read_text().splitlines())
    return [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


@two_hosts
@pytest.mark.parametrize("layout", [pytest.param("pp 4", marks=pytest.mark.full), "pp 2 x dp 2"])
def test_two_hosts_have_the_losses_of_one(layout: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    alone = pipeloom(*words(one, layout)[2:])
    assert alone.returncode == 0, alone.stderr
    with Hosts() as hosts:
        runs = [hosts.start(host, words(two, layout)) for host in range(2)]
        ends = [ended(run, time.monotonic(), 600.0) for run in runs]
    assert [end.code for end in ends] == [0, 0], ends
    assert len(losses(one)) == 3
    assert losses(two) == losses(one)


@two_hosts
@pytest.mark.full  # a cut link, which tests/e2e/train/test_faults.py makes, is a host that does not answer either
def test_a_host_that_is_frozen_is_named_by_the_other(tmp_path: Path) -> None:
    line = faults.command(tmp_path, *faults.LAYOUTS["gloo"])
    with Hosts() as hosts:
        runs = [hosts.start(host, line) for host in range(2)]
        frozen: list[int] = []
        try:
            faults.wait_for_steps(tmp_path, 3, runs[0])
            frozen += faults.children(runs[1].pid)
            assert len(frozen) == 2
            for number in frozen:
                os.kill(number, signal.SIGSTOP)
            outcome = ended(runs[0], time.monotonic(), 600.0)
        finally:
            for run in runs:
                run.kill()
            for number in frozen:  # SIGTERM, by which torchrun ends its workers, waits as long as they are frozen
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
    assert outcome.code == 1  # torchrun's own, whatever its workers' were
    found = exit_file(tmp_path)
    assert found["exit_code"] == 6
    assert set(found["ranks"]) <= {2, 3}
    assert found["ranks"]
    assert re.search(r"rank [23] ", outcome.words)


@two_hosts
def test_an_interface_that_the_other_host_cannot_reach_is_refused_on_each_host(tmp_path: Path) -> None:
    sentence = "127.0.0.1, which the other hosts of this run cannot reach; set GLOO_SOCKET_IFNAME=veth0"
    with Hosts() as hosts:
        runs = [hosts.start(host, words(tmp_path, "pp 4"), "lo") for host in range(2)]
        ends = [ended(run, time.monotonic(), 600.0) for run in runs]
    assert [end.code for end in ends] == [1, 1]
    assert [" ".join(end.words.split()).count(sentence) for end in ends] == [1, 1], ends


FOUND = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "down0": ""}


@pytest.mark.parametrize(
    ("chosen", "resolved", "sentence"),
    [
        (
            "eth1",
            "10.0.0.5",
            r"^GLOO_SOCKET_IFNAME = 'eth1' of \S+ has no IPv4 address \(here are lo 127.0.0.1, eth0 10.0.0.5\)",
        ),
        (
            "eth0,lo",
            "10.0.0.5",
            r"'lo' of \S+ resolves to 127.0.0.1, which the other hosts of this run cannot reach; set",
        ),
        ("down0", "10.0.0.5", "'down0' .* has no IPv4 address"),
        ("", "127.0.1.1", r"is not set, and the name of this host, \S+, resolves to 127.0.1.1, which the other hosts"),
        ("", "10.9.9.9", "resolves to 10.9.9.9, which the other hosts"),
        ("", "", "has no IPv4 address"),
    ],
)
def test_a_wrong_interface_is_said_in_words(
    chosen: str, resolved: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str) -> str:
        if not resolved:
            raise OSError
        return resolved

    monkeypatch.setattr(interfaces, "addresses", lambda: FOUND)
    monkeypatch.setattr("socket.gethostbyname", resolve)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match=sentence):
        require_interface(2, 4)
    require_interface(4, 4)  # one host: any interface does
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    require_interface(2, 4)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.0.0.5")
    require_interface(2, 4)


def test_interfaces_have_their_addresses() -> None:
    assert "127.0.0.1" in interfaces.addresses().values()
