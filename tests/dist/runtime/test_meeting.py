"""Ranks of one machine connect with each other and with nobody else, whoever else tries."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeloom.errors import DistributedError
from pipeloom.runtime.p2p import local_sockets as meeting
from pipeloom.runtime.p2p.local_sockets import SocketOfPeer, meet

MAGIC_AND_RANK = b"pipeloom" + (0).to_bytes(4, "little")
Strangers = Callable[[Path], None]


class Store:
    """A store in which rank 0 finds rank 1's folder only after strangers have been there."""

    def __init__(self, strangers: Strangers) -> None:
        self.inner = dist.HashStore()
        self.strangers = strangers

    def set(self, key: str, value: str) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        value = bytes(self.inner.get(key))
        if key.endswith("/1"):
            self.strangers(Path(value.decode()))
        return value


def connect(folder: Path) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(str(folder / "socket"))  # without a timeout: with one it fails while the queue is full
    return stranger


def meet_among(strangers: Strangers, timeout: float = 20.0) -> tuple[SocketOfPeer, SocketOfPeer]:
    """(rank 1's senders, rank 0's receivers), where rank 0 sends to rank 1."""
    store = Store(strangers)
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(meet, store, "test", 1, [0], [], timeout)
        zero = threads.submit(meet, store, "test", 0, [], [1], timeout)
        sending = zero.result()[1]
        return one.result()[0], sending


def close(*sides: SocketOfPeer) -> None:
    for side in sides:
        for connection in side.values():
            connection.close()


def check_they_talk(strangers: Strangers) -> None:
    receiving, sending = meet_among(strangers)
    sending[1].send(b"from rank 0")
    receiving[0].setblocking(True)
    assert receiving[0].recv(100) == b"from rank 0"
    close(receiving, sending)


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"x",
        b"\x80\x04cposix\nsystem\n.",
        MAGIC_AND_RANK + b"\0" * 32,
        MAGIC_AND_RANK + b"\0" * 31,
        b"\xff" * 60_000,
    ],
    ids=["closes", "garbage", "pickle", "wrong token", "short", "long"],
)
def test_a_stranger_who_says_something_is_sent_away(words: bytes) -> None:
    told: list[bytes] = []

    def strangers(folder: Path) -> None:
        with connect(folder) as stranger:
            if words:
                stranger.send(words)
                try:
                    told.append(stranger.recv(10))
                except ConnectionError:
                    told.append(b"")

    check_they_talk(strangers)
    assert told == ([b""] if words else [])


def test_strangers_who_say_nothing_are_waited_for_by_nobody() -> None:
    silent: list[socket.socket] = []

    def strangers(folder: Path) -> None:
        silent.extend(connect(folder) for _ in range(200))

    check_they_talk(strangers)
    for each in silent:
        each.close()


def test_a_flood_goes_on_while_they_connect() -> None:
    stop = threading.Event()
    count = [0]

    def flood(folder: Path) -> None:
        while not stop.is_set():
            try:
                with connect(folder) as stranger:
                    count[0] += 1
                    stranger.send(b"\0" * 44)
            except OSError:
                return  # the folder is gone: they have met

    threads: list[threading.Thread] = []

    def strangers(folder: Path) -> None:
        threads.extend(threading.Thread(target=flood, args=(folder,)) for _ in range(4))
        for thread in threads:
            thread.start()
        while count[0] < 50:
            stop.wait(0.01)

    check_they_talk(strangers)
    stop.set()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_the_folder_is_private_and_gone_afterwards() -> None:
    seen: list[tuple[Path, int, int]] = []

    def look(folder: Path) -> None:
        seen.append((folder, os.stat(folder).st_mode & 0o777, os.stat(folder / "token").st_mode & 0o777))

    check_they_talk(look)
    ((folder, mode, token),) = seen
    assert (mode, token) == (0o700, 0o600)
    assert not folder.exists()


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_another_user_cannot_reach_the_socket() -> None:
    tries = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"
    answers: list[str] = []

    def stranger(folder: Path) -> None:
        words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/env", "python3", "-c"]
        done = subprocess.run([*words, tries, str(folder / "socket")], capture_output=True, text=True, timeout=30)
        answers.append(done.stderr)

    check_they_talk(stranger)
    assert "PermissionError" in answers[0], answers


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_process_of_another_user_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's connection is known by the address that it binds; whatever else it knows does not help it."""
    address = "\0pipeloom-test-stranger"

    def strangers(folder: Path) -> None:
        token = (folder / "token").read_bytes()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.bind(address)
            stranger.connect(str(folder / "socket"))
            with contextlib.suppress(ConnectionError):  # it may be sent away before it has said a word
                stranger.send(MAGIC_AND_RANK + token)
                assert stranger.recv(10) == b""

    def user(connection: socket.socket) -> int:
        return 65534 if connection.getpeername() == address.encode() else os.getuid()

    monkeypatch.setattr(meeting, "_user", user)
    check_they_talk(strangers)


def test_a_folder_that_others_may_enter_is_refused() -> None:
    def forge(folder: Path) -> None:
        os.chmod(folder, 0o711)

    with pytest.raises(DistributedError, match="not a private folder of this user"):
        meet_among(forge, timeout=1.0)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_folder_of_another_user_is_refused() -> None:
    def forge(folder: Path) -> None:
        os.chown(folder, 65534, 65534)

    with pytest.raises(DistributedError, match="not a private folder of this user"):
        meet_among(forge, timeout=1.0)


def test_a_rank_that_does_not_connect_is_named(tmp_path: Path) -> None:
    store = dist.HashStore()
    with pytest.raises(DistributedError, match=r"rank 1: rank 0, rank 2 did not connect within 0\.2 s"):
        meet(store, "test", 1, [0, 2], [], 0.2)


def test_a_long_temporary_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    receiving, sending = meet_among(lambda folder: None)
    close(receiving, sending)
    assert list(deep.iterdir()) == []


def test_no_socket_is_in_the_abstract_namespace() -> None:
    names = Path("/proc/net/unix")
    if sys.platform != "linux" or not names.exists():
        pytest.skip("needs /proc/net/unix")
    before = names.read_text().count("@")
    during: list[int] = []
    check_they_talk(lambda folder: during.append(names.read_text().count("@")))
    assert during[0] <= before
