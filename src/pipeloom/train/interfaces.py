"""The network interface that gloo uses on several hosts; a wrong choice is refused before any worker waits for a connection."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

from pipeloom.errors import ConfigError, did_you_mean

_VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR, see netdevice(7)


def require_interface(local_workers: int, workers: int) -> None:
    """Raise ConfigError if the workers are on several hosts, and gloo would use an interface that other hosts cannot reach.

    gloo uses the interfaces in GLOO_SOCKET_IFNAME, or else the interface of the address that this host's name resolves to.
    """
    if local_workers >= workers:
        return
    host, local = socket.gethostname(), addresses()
    right = _towards(os.environ.get("MASTER_ADDR", ""), local)
    advice = f"set {_VARIABLE}={right}" if right else f"set {_VARIABLE} to the interface that the other hosts reach"
    setting = os.environ.get(_VARIABLE, "")
    for name in filter(None, setting.split(",")):
        if name not in local:
            near = f"; {advice}" if right else did_you_mean(name, local)
            raise ConfigError(f"{_VARIABLE} = {name!r}: {host} has no such interface, but {', '.join(local)}{near}")
        if local[name].startswith("127."):
            raise ConfigError(
                f"{_VARIABLE} = {name!r}: the other hosts of this run cannot reach {local[name]}, a loopback address; {advice}"
            )
        if not local[name]:
            raise ConfigError(f"{_VARIABLE} = {name!r}: that interface of {host} has no IPv4 address; {advice}")
    if setting:
        return
    try:
        address = socket.gethostbyname(host)
    except OSError:
        raise ConfigError(
            f"{_VARIABLE} is not set, and the name of this host, {host}, resolves to no address; {advice}"
        ) from None
    if address.startswith("127."):
        raise ConfigError(
            f"{_VARIABLE} is not set, and the name of this host, {host}, resolves to {address}, which the other hosts of this "
            f"run cannot reach; {advice}"
        )
    if address not in local.values():
        raise ConfigError(
            f"{_VARIABLE} is not set, and the name of this host, {host}, resolves to {address}, which no interface here has; "
            f"{advice}"
        )


def addresses() -> dict[str, str]:
    """Return the interfaces of this host and their IPv4 addresses, "" for those without one."""
    interfaces: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            interfaces[name] = ""
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                interfaces[name] = socket.inet_ntoa(answer[20:24])
    return interfaces


def _towards(target: str, interfaces: dict[str, str]) -> str:
    """Return the interface on the route to `target`; "" if there is none, or only a loopback interface. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((target, 9))
        address = probe.getsockname()[0]
        if address.startswith("127."):
            return ""
        return next((name for name, local in interfaces.items() if local == address), "")
    return ""
