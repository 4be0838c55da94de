"""Connections between ranks of one machine, through sockets that no other user can reach or disturb.

Each rank listens on a socket in a private folder that only its user may enter, beside a token that only its user may read.
The folder's path goes through the store, the token does not. Both ends check the peer: the folder and the socket's process
must belong to this user, and the first message must contain the token. Other connections are closed, and no rank waits for
them. The folder is removed as soon as the ranks are connected.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeloom.errors import DistributedError

_HELLO_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<8sI{_HELLO_TOKEN_BYTES}s")
_MAGIC = b"pipeloom"
_CREDENTIALS = struct.Struct("3i")  # process, user, group: unix(7), SO_PEERCRED
_MOST_PENDING = 32  # connections that have not identified themselves; the oldest is closed for the next
_RETRY_SECONDS = 0.01

SocketOfPeer = dict[int, socket.socket]


def meet(
    store: Any, prefix: str, rank: int, senders: Sequence[int], receivers: Sequence[int], timeout: float
) -> tuple[SocketOfPeer, SocketOfPeer]:
    """Connect with the ranks that send to this one and with those that receive from it. Collective over the ranks.

    Returns:
        (sender -> connection, receiver -> connection), all non-blocking.
    Raises:
        DistributedError: a rank did not connect within `timeout` seconds, or a folder belongs to another user.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as cleanup:
        door = _Door(rank, senders)
        cleanup.callback(door.close)
        store.set(f"{prefix}/socket/{rank}", str(door.folder))
        outgoing: SocketOfPeer = {}
        left = {peer: Path(os.fsdecode(store.get(f"{prefix}/socket/{peer}"))) for peer in receivers}
        while left or door.missing:
            for peer, folder in list(left.items()):
                connection = _knock(folder, rank, peer)
                if connection is not None:
                    outgoing[peer] = connection
                    del left[peer]
            door.wait(_RETRY_SECONDS if left else 1.0)
            if (left or door.missing) and time.monotonic() > deadline:
                for connection in (*outgoing.values(), *door.known.values()):
                    connection.close()
                absent = sorted({*left, *door.missing})
                raise DistributedError(
                    f"rank {rank}: {', '.join(f'rank {peer}' for peer in absent)} did not connect within {timeout:g} s"
                )
        return door.known, outgoing


class _Door:
    """The listening end of one rank.

    Attributes:
        folder: the folder of its socket.
        missing: ranks that have not connected yet.
        known: rank -> connection, of those that have connected.
    """

    def __init__(self, rank: int, senders: Sequence[int]) -> None:
        self.missing = set(senders)
        self.known: SocketOfPeer = {}
        self.folder = Path(tempfile.mkdtemp(prefix="pipeloom-"))  # of mode 0700
        self._token = secrets.token_bytes(_HELLO_TOKEN_BYTES)
        self._pending: OrderedDict[int, socket.socket] = OrderedDict()
        descriptor = os.open(self.folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(self._token)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        with _short(self.folder) as path:
            self._listener.bind(path)
        self._listener.listen(128)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Handle connections and their first messages, for up to `seconds`; return after the first."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._pending:
                self._identify(self._forget(descriptor))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # closed again, or no descriptor is free for it
            return
        if _user(connection) != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        while len(self._pending) >= _MOST_PENDING:
            self._forget(next(iter(self._pending))).close()
        self._pending[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _forget(self, descriptor: int) -> socket.socket:
        self._poll.unregister(descriptor)
        return self._pending.pop(descriptor)

    def _identify(self, connection: socket.socket) -> None:
        try:
            magic, peer, token = _HELLO.unpack(connection.recv(_HELLO.size + 1))
        except (OSError, struct.error):
            connection.close()
            return
        if magic == _MAGIC and hmac.compare_digest(token, self._token) and peer in self.missing:
            self.missing.discard(peer)
            self.known[peer] = connection
        else:
            connection.close()

    def close(self) -> None:
        for connection in self._pending.values():
            connection.close()
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _knock(folder: Path, rank: int, peer: int) -> socket.socket | None:
    """Connect to the rank that listens in `folder`; return None while its queue is full."""
    where = f"rank {peer} is said to listen in {str(folder)!r}"
    try:
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise DistributedError(
                f"{where}, which is not a private folder of this user: another process has written to the store"
            )
        token = (folder / "token").read_bytes()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        with _short(folder) as path:
            connection.connect(path)
    except BlockingIOError:
        connection.close()
        return None
    except OSError as error:
        raise DistributedError(f"{where}, and it cannot be reached: {error.strerror}") from None
    if _user(connection) != os.getuid():
        raise DistributedError(f"{where}, where a process of user {_user(connection)} listens")
    connection.send(_HELLO.pack(_MAGIC, rank, token))
    return connection


def _user(connection: socket.socket) -> int:
    """Return the user of the process at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


@contextlib.contextmanager
def _short(folder: Path) -> Any:
    """Yield a path of the folder's socket that fits into an address, which takes 107 bytes."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)
