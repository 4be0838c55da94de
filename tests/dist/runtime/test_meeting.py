"""Ranks of one machine connect with each other and with nobody else, whoever else tries."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeloom.errors import DistributedError
from pipeloom.runtime.health import links
from pipeloom.runtime.health.links import RunStore, connect

SocketOfPeer = dict[int, socket.socket]
MAGIC_AND_RANK = b"pipeloom" + (1).to_bytes(4, "little")
Strangers = Callable[[Path], None]


class Store(RunStore):
    """A store in which rank 1 finds rank 0's folder only after strangers have been there."""

    def __init__(self, strangers: Strangers) -> None:
        super().__init__(dist.HashStore(), b"secret", 20.0)
        self.strangers = strangers

    def get(self, key: str, seconds: float | None = None) -> str:
        value = super().get(key, seconds)
        if key.endswith("/0"):
            self.strangers(Path(json.loads(value)))
        return value


def meet(store: RunStore, rank: int, peers: list[int], seconds: float) -> SocketOfPeer:
    return connect(store, "test", rank, peers, seconds, local=True, kind=socket.SOCK_SEQPACKET)


def stranger_in(folder: Path) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(str(folder / "socket"))  # without a timeout: with one it fails while the queue is full
    return stranger


def meet_among(strangers: Strangers, timeout: float = 120.0) -> tuple[SocketOfPeer, SocketOfPeer]:
    """(rank 0's connections, rank 1's connections)"""
    store = Store(strangers)
    with ThreadPoolExecutor(2) as threads:
        zero = threads.submit(meet, store, 0, [1], timeout)
        one = threads.submit(meet, store, 1, [0], timeout)
        return zero.result(), one.result()


def close(*sides: SocketOfPeer) -> None:
    for side in sides:
        for connection in side.values():
            connection.close()


def check_they_talk(strangers: Strangers) -> None:
    zero, one = meet_among(strangers)
    zero[1].send(b"from rank 0")
    one[0].setblocking(True)
    assert one[0].recv(100) == b"from rank 0"
    close(zero, one)


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"x",
        b"\x80\x04cposix\nsystem\n.",
        MAGIC_AND_RANK + b"\0" * 16,
        MAGIC_AND_RANK + b"\0" * 15,
        b"\xff" * 60_000,
    ],
    ids=["closes", "garbage", "pickle", "no secret", "short", "long"],
)
def test_a_stranger_is_sent_away(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the latest when it has been given time enough to say the rest."""
    open_ones: list[socket.socket] = []

    def strangers(folder: Path) -> None:
        with stranger_in(folder) if not words else contextlib.nullcontext(stranger_in(folder)) as stranger:
            if words:
                stranger.send(words)
                stranger.send(b"\0" * 32)  # where a MAC is expected
                open_ones.append(stranger)

    monkeypatch.setattr(links, "_HANDSHAKE_SECONDS", 4.0)
    check_they_talk(strangers)
    for stranger in open_ones:
        stranger.settimeout(120.0)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(100):
                pass
        stranger.close()


def test_strangers_who_say_nothing_are_waited_for_by_nobody() -> None:
    silent: list[socket.socket] = []

    def strangers(folder: Path) -> None:
        silent.extend(stranger_in(folder) for _ in range(200))

    check_they_talk(strangers)
    for each in silent:
        each.close()


def test_the_folder_is_private_and_gone_afterwards() -> None:
    seen: list[tuple[Path, int]] = []
    check_they_talk(lambda folder: seen.append((folder, os.stat(folder).st_mode & 0o777)))
    ((folder, mode),) = seen
    assert mode == 0o700
    assert not folder.exists()


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_another_user_cannot_reach_the_socket() -> None:
    tries = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"
    answers: list[str] = []

    def stranger(folder: Path) -> None:
        words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/env", "python3", "-c"]
        done = subprocess.run([*words, tries, str(folder / "socket")], capture_output=True, text=True, timeout=600)
        answers.append(done.stderr)

    check_they_talk(stranger)
    assert "PermissionError" in answers[0], answers


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_process_of_another_user_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's connection is known by the address that it binds."""
    address = "\0pipeloom-test-stranger"

    def strangers(folder: Path) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.bind(address)
            stranger.connect(str(folder / "socket"))
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(10) == b""  # not even a hello

    def user(connection: socket.socket) -> int:
        return 65534 if connection.getpeername() == address.encode() else os.getuid()

    monkeypatch.setattr(links, "_user", user)
    check_they_talk(strangers)


def test_a_rank_that_does_not_connect_is_named(tmp_path: Path) -> None:
    store = RunStore(dist.HashStore(), b"", 5.0)
    with pytest.raises(DistributedError, match=r"rank 0: rank 1, rank 2 did not connect \(within 0\.2 s\)"):
        meet(store, 0, [1, 2], 0.2)
    with pytest.raises(DistributedError, match=r"rank 3: rank 0 did not connect: .* \(within 0\.2 s\)"):
        meet(store, 3, [0], 0.2)
    with pytest.raises(DistributedError, match=r"rank 5: rank 4 did not connect: no value"):
        meet(store, 5, [4], 0.2)


def test_a_long_temporary_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    close(*meet_among(lambda folder: None))
    assert list(deep.iterdir()) == []
