"""gloo's listening sockets, closed to strangers as soon as a process group is connected.

gloo listens on a TCP port for the lifetime of each process group, accepts every connection, and keeps those that it cannot
assign: any user of the machine could exhaust this process's descriptors. A group connects only once, when it is created, so its
socket needs no further connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
from collections.abc import Iterator

_SO_ATTACH_FILTER = 26  # socket(7); Python has no name for it
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET 0: a program that drops every packet
_DESCRIPTORS = 65536


def refuse_connections() -> int:
    """Make every listening TCP socket of this process drop incoming packets. Return the number of these sockets.

    Existing connections are not affected. On systems without socket filters nothing changes.
    """
    program = ctypes.create_string_buffer(_DROP)
    count = 0
    for listener in _listeners():
        with listener, contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
            count += 1
    return count


def allow_descriptors() -> None:
    """Raise the soft limit of open files: while a process group is created, each connection of a stranger takes a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listeners() -> Iterator[socket.socket]:
    """Yield this process's listening TCP sockets, each as a duplicate that the caller closes."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for name in names:
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        try:
            listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:
            listens = 0
        if listens and duplicate.family in (socket.AF_INET, socket.AF_INET6):
            yield duplicate
        else:
            duplicate.close()
