"""Connections between the processes of a run for the control plane: links of neighbouring ranks, and the store at start-up.

`inherited`: the launcher of a run on one machine makes a socket pair for each two neighbours before it starts them, so
that nothing listens and a death is seen from the first instruction on. `meet`: processes that someone else started listen
(a unix socket in a folder of mode 0700 where all are on one machine, else TCP) and prove to each other that they know the
run's secret.

`RunStore` is torch's store. A call of torch's store has no deadline if the process that serves it is frozen, so each call here
runs on a thread that can be abandoned. Values carry a MAC with the run's secret, which is in no key and no value, so that
values of other writers are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pipeloom.errors import DistributedError
from pipeloom.runtime.health.status import machine

LINKS = "PIPELOOM_LINKS"  # rank:descriptor,… of the sockets that the launcher made
_MAC_BYTES = 16
_LONGEST_FRAME = 1 << 18
_LARGEST_BACKLOG = 1 << 20  # bytes queued for a neighbour that does not read, because it is frozen
_NONCE_BYTES = 16
_MOST_STRANGERS = 64  # handshakes of connections that run at once
_HANDSHAKE_SECONDS = 10.0
_LONGEST_SECRET = 4096  # bytes


class LinkClosed(Exception):
    """The neighbour has closed its end, or received data is not from it."""


def neighbours(rank: int, world: int) -> list[int]:
    """Return the ranks at a distance of 1, 2 and about √world on a ring; for small runs, all ranks.

    A message that every rank forwards then reaches all ranks in O(√world) hops, also around several frozen ones.
    """
    distances = (1, 2, max(3, round(world**0.5)))
    return sorted({(rank + sign * d) % world for d in distances for sign in (1, -1)} - {rank})


class Link:
    """Messages to and from one neighbour. No call blocks: for a neighbour that does not read, at most 1 MiB is queued."""

    def __init__(self, rank: int, peer: int, connection: socket.socket, key: bytes) -> None:
        self.peer = peer
        self.heard = time.monotonic()
        self._connection = connection
        self._key = key
        self._names = f"{rank}>{peer}", f"{peer}>{rank}"
        self._sent = self._received = 0
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._closed: str | None = None
        connection.setblocking(False)
        os.set_inheritable(connection.fileno(), False)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message, and send as much as the socket accepts."""
        if len(self._outgoing) < _LARGEST_BACKLOG:
            body = json.dumps(message).encode()
            self._outgoing += self._mac(self._names[0], self._sent, body) + b" " + body + b"\n"
            self._sent += 1
        self.flush()

    def flush(self) -> bool:
        """Send as much as the socket accepts; return whether the queue is empty."""
        while self._outgoing:
            try:
                count = self._connection.send(self._outgoing)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:  # `receive` reports the end of the link
                self._outgoing.clear()
                return True
            del self._outgoing[:count]
        return True

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages received. Raises LinkClosed after the last one if the neighbour has closed its end."""
        if self._closed is not None:
            raise LinkClosed(self._closed)
        try:
            while chunk := self._connection.recv(1 << 16):
                self._incoming += chunk
                if len(self._incoming) > _LONGEST_FRAME:
                    break
            else:
                self._closed = "its connection closed"
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._closed = f"its connection broke: {error.strerror}"
        messages = []
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        for line in lines:
            mac, _, body = bytes(line).partition(b" ")
            if not hmac.compare_digest(mac, self._mac(self._names[1], self._received, body)):
                self._closed = "its connection brought a message that it did not write"
                break
            try:
                message = json.loads(body)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self._closed = "its connection brought a message that makes no sense"
                break
            self._received += 1
            self.heard = time.monotonic()
            messages.append(message)
        if len(self._incoming) > _LONGEST_FRAME:
            self._closed = "its connection brought a message without an end"
        if self._closed is not None and not messages:
            raise LinkClosed(self._closed)
        return messages

    def close(self) -> None:
        self._connection.close()

    def _mac(self, name: str, count: int, body: bytes) -> bytes:
        text = f"{name} {count} ".encode() + body
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()[: 2 * _MAC_BYTES].encode()


def inherited(rank: int) -> list[Link] | None:
    """Return the links whose sockets the launcher passed in the environment, at the first call; None without a launcher."""
    text = os.environ.pop(LINKS, None)
    if text is None:
        return None
    pairs = [pair.split(":") for pair in text.split(",") if pair]
    return [Link(rank, int(peer), socket.socket(fileno=int(descriptor)), b"") for peer, descriptor in pairs]


def meet(store: Any, prefix: str, rank: int, world: int, secret: bytes, seconds: float) -> list[Link]:
    """Return links to this rank's neighbours; collective. `store`: has `set` and `get` of text, both with deadlines.

    Raises DistributedError that names a rank that did not join within `seconds`.
    """
    if world == 1:
        return []
    deadline = time.monotonic() + seconds
    here = f"{machine('net', 'mnt')} {os.getuid()}"
    store.set(f"{prefix}/machine/{rank}", here)
    machines = {store.get(f"{prefix}/machine/{other}") for other in range(world)}
    folder = None
    try:
        if len(machines) == 1 and machine() and hasattr(socket, "AF_UNIX"):
            folder = tempfile.mkdtemp(prefix="pipeloom-")  # of mode 0700
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"{folder}/control")
            address: Any = f"{folder}/control"
        else:
            listener = socket.socket()
            listener.bind((_own_address(), 0))
            address = list(listener.getsockname())
        listener.listen(128)
        store.set(f"{prefix}/control/{rank}", json.dumps(address))
        return _Meeting(store, prefix, rank, world, secret, deadline).links(listener)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class _Meeting:
    """Connections to the neighbours: threads connect to those with lower numbers and accept those with higher ones."""

    def __init__(self, store: Any, prefix: str, rank: int, world: int, secret: bytes, deadline: float) -> None:
        self._store, self._prefix, self._rank, self._secret, self._deadline = store, prefix, rank, secret, deadline
        self._wanted = set(neighbours(rank, world))
        self._found: dict[int, Link] = {}
        self._change = threading.Condition()
        self._errors: list[str] = []

    def links(self, listener: socket.socket) -> list[Link]:
        """Return all links, and close `listener`."""
        lower = [peer for peer in self._wanted if peer < self._rank]
        addresses = {peer: json.loads(self._store.get(f"{self._prefix}/control/{peer}")) for peer in lower}
        for peer, address in addresses.items():
            self._in_thread(self._connect, peer, address)
        self._in_thread(self._accept, listener)
        with self._change:
            self._change.wait_for(
                lambda: self._found.keys() >= self._wanted, timeout=max(0.0, self._deadline - time.monotonic())
            )
            missing = sorted(self._wanted - self._found.keys())
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the accepting thread
        listener.close()
        if missing:
            why = f" ({self._errors[-1]})" if self._errors else ""
            raise DistributedError(f"rank {self._rank}: rank {missing[0]} has not opened its control connection{why}")
        return [self._found[peer] for peer in sorted(self._found)]

    def _in_thread(self, work: Any, *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="pipeloom-meet", daemon=True).start()

    def _connect(self, peer: int, address: Any) -> None:
        while time.monotonic() < self._deadline:
            connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
            connection.settimeout(_HANDSHAKE_SECONDS)
            try:
                connection.connect(address if isinstance(address, str) else tuple(address))
                if isinstance(address, str) and _uid_of(connection) not in (None, os.getuid()):
                    raise OSError(0, "a process of another user listens there")
                nonce = secrets.token_bytes(_NONCE_BYTES)
                connection.sendall(struct.pack("<i", self._rank) + nonce)
                answer = _exactly(connection, _NONCE_BYTES + 32)
                key = self._key(self._rank, peer, nonce, answer[:_NONCE_BYTES])
                if not hmac.compare_digest(answer[_NONCE_BYTES:], _sign(key, b"accepted")):
                    raise OSError(0, "its secret is another one")
                connection.sendall(_sign(key, b"connected"))
                self._add(peer, connection, key)
                return
            except OSError as error:
                connection.close()
                self._errors.append(f"{error.strerror or error}")
                time.sleep(0.1)

    def _accept(self, listener: socket.socket) -> None:
        slots = threading.Semaphore(_MOST_STRANGERS)
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            slots.acquire()
            self._in_thread(self._greet, connection, slots)

    def _greet(self, connection: socket.socket, slots: threading.Semaphore) -> None:
        try:
            if connection.family == socket.AF_UNIX and _uid_of(connection) not in (None, os.getuid()):
                raise OSError(0, "a process of another user connected")
            connection.settimeout(_HANDSHAKE_SECONDS)
            first = _exactly(connection, 4 + _NONCE_BYTES)
            (peer,) = struct.unpack("<i", first[:4])
            nonce = secrets.token_bytes(_NONCE_BYTES)
            key = self._key(peer, self._rank, first[4:], nonce)
            connection.sendall(nonce + _sign(key, b"accepted"))
            if not hmac.compare_digest(_exactly(connection, 32), _sign(key, b"connected")):
                raise OSError(0, "its secret is another one")
            if peer not in self._wanted or peer < self._rank:
                raise OSError(0, f"rank {peer} is not a neighbour")
            self._add(peer, connection, key)
        except OSError:
            connection.close()
        finally:
            slots.release()

    def _add(self, peer: int, connection: socket.socket, key: bytes) -> None:
        with self._change:
            if peer in self._found:
                connection.close()
                return
            self._found[peer] = Link(self._rank, peer, connection, key)
            self._change.notify_all()

    def _key(self, connects: int, accepts: int, first: bytes, second: bytes) -> bytes:
        return _sign(self._secret, f"{self._prefix} {connects}>{accepts} ".encode() + first + second)


def _sign(key: bytes, text: bytes) -> bytes:
    return hmac.new(key, text, hashlib.sha256).digest()


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise OSError(0, "it closed the connection")
        data += chunk
    return data


def _uid_of(connection: socket.socket) -> int | None:
    """Return the user at the other end of a unix socket; None if the system does not provide it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def _own_address() -> str:
    """Return this machine's address on the route to MASTER_ADDR; if that is this machine itself, the address that others use.

    PIPELOOM_ADDRESS overrides it.
    """
    configured = os.environ.get("PIPELOOM_ADDRESS")
    if configured:
        return configured
    for target in (
        os.environ.get("MASTER_ADDR", ""),
        "192.0.2.1",
    ):  # the second address is unassigned; no packet is sent
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((target, 9))
            address = str(probe.getsockname()[0])
            if not address.startswith("127.") and address != "0.0.0.0":
                return address
    return "127.0.0.1"


def read_secret() -> bytes | None:
    """Return the secret of the user's runs: PIPELOOM_SECRET, or the file PIPELOOM_SECRET_FILE, or ~/.config/pipeloom/secret.

    Raises DistributedError for a file that others can read, or that is not a regular file of at most 4 KiB.
    """
    text = os.environ.get("PIPELOOM_SECRET")
    if text:
        return text.encode()
    named = os.environ.get("PIPELOOM_SECRET_FILE")
    path = Path(named) if named else Path.home() / ".config" / "pipeloom" / "secret"
    try:
        status = path.stat()
        mode = status.st_mode
        if not stat.S_ISREG(mode) or status.st_size > _LONGEST_SECRET:
            raise DistributedError(
                f"{path} is not a regular file of at most {_LONGEST_SECRET} bytes: no secret is read from it"
            )
        if mode & 0o077:
            raise DistributedError(f"{path} can be read by others (mode {mode & 0o777:o}): chmod 600 {path}")
        return path.read_bytes().strip() or None
    except OSError as error:
        if named:
            raise DistributedError(f"PIPELOOM_SECRET_FILE = {named}: {error.strerror}") from None
        return None


T = TypeVar("T")
_LOOKS_SECONDS = 0.05


def within(seconds: float, call: Callable[[], T], words: str) -> T:
    """Return the result of `call`, or raise its error. Raises DistributedError with `words` after `seconds`; the call is then
    abandoned.
    """
    box: list[Any] = []
    done = threading.Event()

    def run() -> None:
        try:
            box.append((True, call()))
        except BaseException as error:
            box.append((False, error))
        done.set()

    threading.Thread(target=run, name="pipeloom-store", daemon=True).start()
    if not done.wait(seconds):
        raise DistributedError(f"{words} within {seconds:g} s: the process that serves it is frozen or out of reach")
    good, value = box[0]
    if not good:
        raise value
    return value  # type: ignore[no-any-return]


def _answer(seconds: float, call: Callable[[], T], words: str) -> T:
    """Return the result of a call of torch's store as `within` does. Raises DistributedError if the call fails, too."""
    try:
        return within(seconds, call, words)
    except RuntimeError as error:  # torch's own errors: the process that serves the store has exited
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DistributedError(
            f"{words}: the process that serves it, rank 0 or a launcher, has exited ({first})"
        ) from error


class RunStore:
    """Text under keys, each call within `seconds`.

    Args:
        store: torch's store.
        secret: secret of the run; b"" if there is none.
    """

    def __init__(self, store: Any, secret: bytes, seconds: float) -> None:
        self._store = store
        self._secret = secret
        self._seconds = seconds

    def set(self, key: str, text: str) -> None:
        value = f"{self._mac(key, text)} {text}"
        _answer(self._seconds, lambda: self._store.set(key, value), "the store took no value")

    def get(self, key: str, seconds: float | None = None) -> str:
        """Return the text under `key` as soon as it is set.

        Raises DistributedError if it is not set in time, or was not written by a rank of this run.
        """
        patience = self._seconds if seconds is None else seconds
        give_up = time.monotonic() + patience
        while not _answer(patience, lambda: self._store.check([key]), "the store did not answer"):
            if time.monotonic() > give_up:
                raise DistributedError(f"no value arrived under {key} within {patience:g} s")
            time.sleep(_LOOKS_SECONDS)
        value = _answer(patience, lambda: self._store.get(key).decode(), "the store gave no value")
        mac, _, text = value.partition(" ")
        if not hmac.compare_digest(mac.encode(), self._mac(key, text).encode()):
            raise DistributedError(
                f"{key} in the store was not written by a rank of this run (PIPELOOM_SECRET differs?)"
            )
        return str(text)

    def add(self, key: str, amount: int) -> int:
        return int(_answer(self._seconds, lambda: self._store.add(key, amount), "the store did not count"))

    def _mac(self, key: str, text: str) -> str:
        return hmac.new(self._secret, f"{key}={text}".encode(), hashlib.sha256).hexdigest()


def run_store(seconds: float) -> RunStore:
    """Return the store of torch's default process group."""
    import torch.distributed as dist

    return RunStore(dist.distributed_c10d._get_default_store(), read_secret() or b"", seconds)
