"""Connections between the processes of a run, and what they need to find each other: torch's store and the run's secret.

`inherited`: the launcher of a run on one machine makes a socket pair for each two neighbours before it starts them, so
that nothing listens and a death is seen from the first instruction on. `connect`: processes that someone else started listen
(a unix socket in a folder of mode 0700 where all are on one machine, else TCP), and prove to each other that they know the
run's secret. After that a connection is trusted: only the two processes at its ends can write to it, unless someone controls
the network between their machines.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipeloom.errors import DistributedError, first_line
from pipeloom.runtime.health.status import machine

LINKS = "PIPELOOM_LINKS"  # rank:descriptor,… of the sockets that the launcher made
_LONGEST_MESSAGE = 1 << 18  # bytes; the watchdog cuts texts so that its messages stay below, so a longer one is damaged
_LARGEST_BACKLOG = 1 << 20  # bytes queued for a neighbour that does not read, because it is frozen

_MAGIC = b"pipeloom"
_NONCE_BYTES, _MAC_BYTES = 16, 32  # too many numbers to record all; a whole SHA-256
HELLO = struct.Struct(f"<{len(_MAGIC)}si{_NONCE_BYTES}s")
_HANDSHAKE_SECONDS = 10.0  # a rank answers at once; a stranger's thread ends after this
_RETRY_SECONDS = 0.02  # a listener with a full queue takes the next connection within milliseconds
_POLL_SECONDS = 0.05  # between two looks into the store

T = TypeVar("T")


class LinkClosed(Exception):
    """The neighbour has closed its end, or has sent data that are no message."""


def neighbours(rank: int, world: int) -> list[int]:
    """Return the ranks at a distance of 1, 2 and about √world on a ring; for small runs, all ranks.

    A message that every rank forwards then reaches all ranks in O(√world) hops, also around several frozen ones.
    """
    distances = (1, 2, max(3, round(world**0.5)))
    return sorted({(rank + sign * d) % world for d in distances for sign in (1, -1)} - {rank})


class Link:
    """Messages to and from one neighbour. No call blocks: for a neighbour that does not read, at most 1 MiB is queued."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self._connection = connection
        self._incoming = b""
        self._outgoing = bytearray()
        self._closed: str | None = None
        connection.setblocking(False)
        os.set_inheritable(connection.fileno(), False)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message, and send as much as the socket accepts."""
        if len(self._outgoing) < _LARGEST_BACKLOG:
            self._outgoing += json.dumps(message).encode() + b"\n"
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
        try:
            while self._closed is None and len(self._incoming) <= _LONGEST_MESSAGE:
                chunk = self._connection.recv(1 << 16)
                self._incoming += chunk
                if not chunk:
                    self._closed = "its connection closed"
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._closed = f"its connection broke: {error.strerror}"
        *lines, self._incoming = self._incoming.split(b"\n")
        messages = []
        try:
            messages = [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):
            self._closed = "its connection brought a message that makes no sense"
        if len(self._incoming) > _LONGEST_MESSAGE:
            self._closed = "its connection brought a message without an end"
        if self._closed is not None and not messages:
            raise LinkClosed(self._closed)
        return messages

    def close(self) -> None:
        self._connection.close()


def inherited() -> list[Link] | None:
    """Return the links whose sockets the launcher passed in the environment, at the first call; None without a launcher."""
    text = os.environ.pop(LINKS, None)
    if text is None:
        return None
    pairs = [pair.split(":") for pair in text.split(",") if pair]
    return [Link(int(peer), socket.socket(fileno=int(descriptor))) for peer, descriptor in pairs]


def meet(store: RunStore, prefix: str, rank: int, world: int, seconds: float) -> list[Link]:
    """Return links to this rank's neighbours. Collective. Raises DistributedError as `connect` does."""
    if world == 1:
        return []
    machines = set(store.exchange(f"{prefix}/machine", rank, world, f"{machine('net', 'mnt')} {os.getuid()}"))
    local = len(machines) == 1 and bool(machine())
    connections = connect(store, f"{prefix}/control", rank, neighbours(rank, world), seconds, local=local)
    return [Link(peer, connection) for peer, connection in sorted(connections.items())]


# -- meeting ---------------------------------------------------------------------------------------------------------------


def connect(
    store: RunStore,
    prefix: str,
    rank: int,
    peers: Collection[int],
    seconds: float,
    *,
    local: bool,
    kind: socket.SocketKind = socket.SOCK_STREAM,
) -> dict[int, socket.socket]:
    """Return a non-blocking connection to each of `peers`. Collective: every rank has this one among its peers.

    A rank connects to those with lower numbers, and is connected to by those with higher ones.

    Args:
        local: whether all ranks are processes of one user on this machine, and use unix sockets in private folders.
        kind: SOCK_SEQPACKET for sockets that keep the boundaries of messages; `local` only.

    Raises DistributedError that names a rank which did not connect within `seconds`.
    """
    deadline = time.monotonic() + seconds
    door = _Door(store, prefix, rank, {peer for peer in peers if peer > rank}, kind, local)
    try:
        store.set(f"{prefix}/{rank}", json.dumps(door.address))
        for peer in sorted(peer for peer in peers if peer < rank):
            door.connections[peer] = _call(store, prefix, rank, peer, kind, deadline)
        with door.change:
            door.change.wait_for(lambda: not door.missing, timeout=max(0.0, deadline - time.monotonic()))
            if door.missing:
                raise DistributedError(f"{', '.join(f'rank {peer}' for peer in sorted(door.missing))} did not connect")
            connections = dict(door.connections)
    except (OSError, DistributedError) as error:
        door.close()
        for connection in door.connections.values():
            connection.close()
        raise DistributedError(f"rank {rank}: {error} (within {seconds:g} s)") from None
    door.close()
    for connection in connections.values():
        connection.setblocking(False)
    return connections


class _Door:
    """The listening end of one rank. A thread accepts connections, and each is greeted in a thread of its own, so that strangers
    who say nothing hold up nobody.

    Attributes:
        address: the private folder of its unix socket, or its (host, port).
        missing: ranks that have not connected yet.
        connections: rank -> connection.
        change: condition of `missing` and `connections`.
    """

    def __init__(
        self, store: RunStore, prefix: str, rank: int, missing: set[int], kind: socket.SocketKind, local: bool
    ) -> None:
        self.missing = missing
        self.connections: dict[int, socket.socket] = {}
        self.change = threading.Condition()  # each connection is accepted in a thread of its own
        self._store, self._prefix, self._rank = store, prefix, rank
        self._socket = socket.socket(socket.AF_UNIX if local else socket.AF_INET, kind)
        if local:
            self.address: Any = tempfile.mkdtemp(prefix="pipeloom-")  # of mode 0700
            with _short(self.address) as path:
                self._socket.bind(path)
        else:
            self._socket.bind((_own_address(), 0))
            self.address = list(self._socket.getsockname())
        self._socket.listen(128)
        _in_thread(self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was shut down
            while True:
                connection, _ = self._socket.accept()
                _in_thread(self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HANDSHAKE_SECONDS)
            peer = shake_hands(connection, self._store, self._prefix, self._rank, self.missing)
        except OSError:
            connection.close()
            return
        with self.change:
            if peer in self.missing:
                self.missing.discard(peer)
                self.connections[peer] = connection
                self.change.notify_all()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the accepting thread
        self._socket.close()
        if isinstance(self.address, str):
            shutil.rmtree(self.address, ignore_errors=True)


def _in_thread(work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, name="pipeloom-meet", daemon=True).start()


def _call(
    store: RunStore, prefix: str, rank: int, peer: int, kind: socket.SocketKind, deadline: float
) -> socket.socket:
    """Return a connection to a rank that listens. Raises DistributedError with the reason at `deadline`."""
    try:
        address = json.loads(store.get(f"{prefix}/{peer}", max(0.0, deadline - time.monotonic())))
    except DistributedError as error:
        raise DistributedError(f"rank {peer} did not connect: {error}") from None
    local = isinstance(address, str)
    while True:
        connection = socket.socket(socket.AF_UNIX if local else socket.AF_INET, kind)
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            with _short(address) if local else contextlib.nullcontext(tuple(address)) as target:
                connection.connect(target)
            shake_hands(connection, store, prefix, rank, {peer})
            return connection
        except OSError as error:  # a full queue of the listener among them
            connection.close()
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise DistributedError(f"rank {peer} did not connect: {error}") from None
            time.sleep(_RETRY_SECONDS)


def shake_hands(connection: socket.socket, store: RunStore, prefix: str, rank: int, expected: Collection[int]) -> int:
    """Return the rank at the other end, once both ends have proved that they know the run's secret; raises OSError otherwise.

    Each end sends its rank and a random number, then a MAC of both ends' numbers and its own rank: a recorded or reflected MAC
    fits no other handshake.
    """
    if connection.family == socket.AF_UNIX and _user(connection) != os.getuid():
        raise OSError("a process of another user is there")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(HELLO.pack(_MAGIC, rank, nonce))
    magic, peer, other_nonce = HELLO.unpack(_exactly(connection, HELLO.size))
    if magic != _MAGIC or peer not in expected:
        raise OSError("it is not a rank that is expected there")
    ends = b"".join(number for _, number in sorted([(rank, nonce), (peer, other_nonce)]))
    connection.sendall(store.sign(f"{prefix} {rank} ".encode() + ends))
    if not hmac.compare_digest(_exactly(connection, _MAC_BYTES), store.sign(f"{prefix} {peer} ".encode() + ends)):
        raise OSError("its secret is another one")
    return int(peer)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise OSError("it closed the connection")
        data += chunk
    return data


def _user(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a unix socket; this user where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return os.getuid()
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


@contextlib.contextmanager
def _short(folder: str) -> Iterator[str]:
    """Yield a path of the folder's socket that fits into an address, which takes 107 bytes."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


def _own_address() -> str:
    """Return this machine's address on the route to MASTER_ADDR; if that is this machine itself, the address that others use.

    PIPELOOM_ADDRESS overrides it.
    """
    if configured := os.environ.get("PIPELOOM_ADDRESS"):
        return configured
    # The second target is an unassigned address (RFC 5737), behind the default route. No packet is sent to either.
    for target in (os.environ.get("MASTER_ADDR", ""), "192.0.2.1"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((target, 9))
            address = str(probe.getsockname()[0])
            if not address.startswith("127.") and address != "0.0.0.0":
                return address
    return "127.0.0.1"


def read_secret() -> bytes | None:
    """Return the secret of the user's runs: PIPELOOM_SECRET, or the file PIPELOOM_SECRET_FILE, or ~/.config/pipeloom/secret.

    Raises DistributedError for a file that others can read.
    """
    text = os.environ.get("PIPELOOM_SECRET")
    if text:
        return text.encode()
    named = os.environ.get("PIPELOOM_SECRET_FILE")
    path = Path(named) if named else Path.home() / ".config" / "pipeloom" / "secret"
    try:
        mode = path.stat().st_mode
        if mode & 0o077 or not stat.S_ISREG(mode):
            raise DistributedError(
                f"{path} can be read by others (mode {mode & 0o777:o}) or is no file: chmod 600 {path}"
            )
        return path.read_bytes().strip() or None
    except OSError as error:
        if named:
            raise DistributedError(f"PIPELOOM_SECRET_FILE = {named}: {error.strerror}") from None
        return None


# -- torch's store -----------------------------------------------------------------------------------------------------------


def within(seconds: float, call: Callable[[], T], words: str) -> T:
    """Return the result of `call`, or raise its error. Raises DistributedError with `words` after `seconds`; the call is then
    abandoned.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="pipeloom-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise DistributedError(f"{words} within {seconds:g} s: the process that serves it is frozen or out of reach")
    return results[0]


def _answer(seconds: float, call: Callable[[], T], words: str) -> T:
    """Return the result of a call of torch's store as `within` does. Raises DistributedError if the call fails, too."""
    try:
        return within(seconds, call, words)
    except RuntimeError as error:  # torch's own errors: the process that serves the store has exited
        raise DistributedError(
            f"{words}: the process that serves it, rank 0 or a launcher, has exited ({first_line(error)})"
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
        if self._await([key], seconds):
            raise DistributedError(
                f"no value arrived under {key} within {self._seconds if seconds is None else seconds:g} s"
            )
        return self._read([key])[0]

    def exchange(self, prefix: str, rank: int, ranks: int, value: Any, seconds: float | None = None) -> list[Any]:
        """Return the values (as JSON carries them) that ranks 0 .. ranks - 1 give under this prefix; every one of them calls it.

        The calls of the store per rank do not grow with the number of ranks.

        Raises DistributedError that names a rank that does not call it in time.
        """
        self.set(f"{prefix}/{rank}", json.dumps(value))
        keys = [f"{prefix}/{other}" for other in range(ranks)]
        if absent := self._await(keys, seconds):
            patience = self._seconds if seconds is None else seconds
            raise DistributedError(
                f"rank {rank}: rank {keys.index(absent)} did not join the handshake within {patience:g} s"
            )
        return [json.loads(text) for text in self._read(keys)]

    def _await(self, keys: Sequence[str], seconds: float | None) -> str | None:
        """Wait until all keys are set; return one that is not in time, or None."""
        patience = self._seconds if seconds is None else seconds
        give_up = time.monotonic() + patience

        def absent(among: Sequence[str]) -> bool:
            return not _answer(patience, lambda: self._store.check(list(among)), "the store did not answer")

        while absent(keys):
            if time.monotonic() > give_up:
                return next((key for key in keys if absent([key])), keys[-1])
            time.sleep(_POLL_SECONDS)
        return None

    def _read(self, keys: Sequence[str]) -> list[str]:
        values = _answer(self._seconds, lambda: self._store.multi_get(list(keys)), "the store gave no value")
        texts = []
        for key, value in zip(keys, values, strict=True):
            mac, _, text = value.decode().partition(" ")
            if not hmac.compare_digest(mac.encode(), self._mac(key, text).encode()):
                raise DistributedError(
                    f"{key} in the store was not written by a rank of this run (PIPELOOM_SECRET differs?)"
                )
            texts.append(text)
        return texts

    def add(self, key: str, amount: int) -> int:
        return int(_answer(self._seconds, lambda: self._store.add(key, amount), "the store did not count"))

    def sign(self, data: bytes) -> bytes:
        """Return a MAC of `data` with the run's secret."""
        return hmac.new(self._secret, data, hashlib.sha256).digest()

    def _mac(self, key: str, text: str) -> str:
        return self.sign(f"{key}={text}".encode()).hex()


def run_store(seconds: float) -> RunStore:
    """Return the store of torch's default process group."""
    import torch.distributed as dist

    # The group's own store, under whose prefix no key of another run is found; torch has no public name for it.
    return RunStore(dist.distributed_c10d._get_default_store(), read_secret() or b"", seconds)
