"""The network of the workers: a private one on one machine, its listening sockets, and the interface between machines."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from pipeloom.errors import ConfigError

NETWORK = "PIPELOOM_NETWORK"  # "private" or "host"
_INTERFACE = "GLOO_SOCKET_IFNAME"
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
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        at = "starting the loopback interface"
        _start_loopback()
        at = "opening the namespace"
        socket.send_fds(answer, [b"made"], [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in names])
    except OSError as error:
        answer.send(f"{error.errno or 0} {at}".encode())
    finally:
        os._exit(0)


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        _, flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


# -- listening sockets -------------------------------------------------------------------------------------------------

_SO_ATTACH_FILTER = 26  # socket(7); Python has no name for it
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET 0: a program that drops every packet
_DESCRIPTORS = 65536


def refuse_connections() -> int:
    """Make every listening TCP socket of this process drop incoming packets. Return the number of these sockets.

    gloo listens on a TCP port for the lifetime of each process group, accepts every connection, and keeps those that it cannot
    assign: any user of the machine could exhaust this process's descriptors. A group connects only once, when it is created, so
    its socket needs no further connections; existing ones are not affected. Without socket filters nothing changes.
    """
    program = ctypes.create_string_buffer(_DROP)
    listening = [each.fd for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    for descriptor in listening:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    return len(listening)


def allow_descriptors(count: int = _DESCRIPTORS) -> None:
    """Raise this process's soft limit of open files to `count`, as far as the system allows it.

    While a process group is created, each connection of a stranger takes a descriptor, hence the default.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


# -- several machines --------------------------------------------------------------------------------------------------


def require_interface(local_workers: int, workers: int) -> None:
    """Raise ConfigError if the workers are on several hosts, and gloo would use an interface that other hosts cannot reach.

    gloo uses the interfaces in GLOO_SOCKET_IFNAME, or else the interface of the address that this host's name resolves to.
    """
    if local_workers >= workers:
        return
    host, local = socket.gethostname(), addresses()
    route = _towards(os.environ.get("MASTER_ADDR", ""), local)
    advice = f"set {_INTERFACE}={route}" if route else f"set {_INTERFACE} to the interface that the other hosts reach"
    for name in os.environ.get(_INTERFACE, "").split(","):
        address, whose = local.get(name, ""), f"{_INTERFACE} = {name!r} of {host}"
        if not name:
            with contextlib.suppress(OSError):
                address = socket.gethostbyname(host)
            whose = f"{_INTERFACE} is not set, and the name of this host, {host},"
        if not address:
            others = ", ".join(f"{name} {local[name]}" for name in local if local[name])
            raise ConfigError(f"{whose} has no IPv4 address (here are {others}); {advice}")
        if address.startswith("127.") or address not in local.values():
            raise ConfigError(
                f"{whose} resolves to {address}, which the other hosts of this run cannot reach; {advice}"
            )


def addresses() -> dict[str, str]:
    """Return the interfaces of this host and their IPv4 addresses, "" for those without one."""
    return {
        name: next((each.address for each in known if each.family == socket.AF_INET), "")
        for name, known in psutil.net_if_addrs().items()
    }


def _towards(target: str, interfaces: dict[str, str]) -> str:
    """Return the interface on the route to `target`; "" if there is none, or only a loopback interface. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((target, 9))
        address = probe.getsockname()[0]
        if address.startswith("127."):
            return ""
        return next((name for name, local in interfaces.items() if local == address), "")
    return ""
