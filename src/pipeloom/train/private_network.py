"""Private network for the workers: a network namespace with a loopback interface only, which no other process can reach.

gloo and NCCL listen on TCP ports and do not authenticate their peers. On the machine's loopback interface every local user
can connect to them; in a network namespace shared by the workers, only the workers can. An unprivileged user may create one
inside a user namespace, in which the workers keep their user and group.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator

from pipeloom.errors import ConfigError

NETWORK = "PIPELOOM_NETWORK"  # "private" or "host"
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER and CLONE_NEWNET, see namespaces(7)
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS and IFF_UP, see netdevice(7)


class Network:
    """A network that processes can enter; `Network()` is the machine's own network."""

    def __init__(self, namespaces: tuple[int, ...] = ()) -> None:
        self._namespaces = namespaces
        self._library = _library()  # loaded before any fork

    def enter(self) -> None:
        """Move this process, which must be single-threaded, into the network. Raises OSError where the system refuses."""
        for namespace in self._namespaces:
            if self._library.setns(namespace, 0):
                raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def wanted(setting: str) -> bool:
    """Return whether PIPELOOM_NETWORK asks for a private network; "" is the default. Raises ConfigError for an unknown value."""
    if setting not in ("", "private", "host"):
        raise ConfigError(f"{NETWORK} = {setting!r}; it must be 'private' or 'host'")
    return setting != "host"


@contextlib.contextmanager
def private_network() -> Iterator[Network]:
    """Create a network that exists until this block and all processes in the network have ended.

    Raises OSError where the system refuses.
    """
    if sys.platform != "linux":
        raise OSError(0, f"{sys.platform} has no network namespaces")
    namespaces = _made_by_a_child()
    try:
        yield Network(namespaces)
    finally:
        for namespace in namespaces:
            os.close(namespace)


def _made_by_a_child() -> tuple[int, ...]:
    """Return descriptors of the namespaces to enter, in order.

    A forked child creates them, because only a single-threaded process may, and sends their descriptors.
    """
    here, there = socket.socketpair()
    library = _library()  # loaded before the fork
    with here:
        with there:
            child = os.fork()
            if not child:
                _make(library, there)
        try:
            words, namespaces, _, _ = socket.recv_fds(here, 1024, 2)
        finally:
            with contextlib.suppress(ChildProcessError):  # this process ignores SIGCHLD
                os.waitpid(child, 0)
    if not namespaces:
        number, _, call = words.decode().partition(" ")
        raise OSError(int(number or 0), f"{call or 'it ended early'}: {os.strerror(int(number or 0))}")
    return tuple(namespaces)


def _make(library: ctypes.CDLL, answer: socket.socket) -> None:
    """Create the namespaces in the child, send their descriptors or the name of the call that failed, and exit."""
    at = "unshare"
    try:
        user, group = os.geteuid(), os.getegid()
        names = ["net"] if user == 0 else ["user", "net"]  # root inside a user namespace would lose rights over files
        flags = _NEW_NETWORK if user == 0 else _NEW_USER | _NEW_NETWORK
        if library.unshare(flags):
            raise OSError(ctypes.get_errno(), "")
        if user:
            at = "mapping the user"
            _write("setgroups", "deny")
            _write("uid_map", f"{user} {user} 1")
            _write("gid_map", f"{group} {group} 1")
        at = "starting the loopback interface"
        _start_loopback()
        at = "opening the namespace"
        socket.send_fds(answer, [b"made"], [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in names])
    except OSError as error:
        answer.send(f"{error.errno or 0} {at}".encode())
    finally:
        os._exit(0)


def _write(name: str, text: str) -> None:
    file = os.open(f"/proc/self/{name}", os.O_WRONLY)
    os.write(file, text.encode())
    os.close(file)


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        _, flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
