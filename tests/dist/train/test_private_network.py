"""The workers' own network: they reach each other, nobody else reaches them, and nothing else of theirs changes."""

from __future__ import annotations

import ctypes
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeloom.errors import ConfigError
from pipeloom.train.workers import network as private_network
from pipeloom.train.workers.launch import Patience, launch

NOBODY = 65534
PORT = 4321  # below those that the kernel gives out, of which another test may have the same outside


def refusal() -> str:
    try:
        with private_network.private_network():
            return ""
    except OSError as error:
        return f"no private network here: {error.strerror}"


takes_a_network = pytest.mark.skipif(bool(refusal()), reason=refusal())
takes_root = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")


def here(name: str = "net") -> str:
    return os.readlink(f"/proc/self/ns/{name}")


def in_a_child(work: Callable[[], object]) -> None:
    """Runs `work` in a forked process; an error there is one here."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def seen_by_workers(folder: Path, names: str = "net user", **variables: str) -> list[list[str]]:
    """What each of two workers says of itself: its namespaces, its user, its capabilities."""
    looks = " ".join(f"$(readlink /proc/self/ns/{name})" for name in names.split())
    script = f'echo "{looks} $(id -u) $(id -g) $(grep CapEff /proc/self/status | cut -f2)" > {folder}/$RANK'
    code = launch(["/bin/sh", "-c", script], 2, environment={**os.environ, **variables}, patience=Patience(1.0, 1.0))
    assert code == 0
    return [(folder / str(rank)).read_text().split() for rank in range(2)]


@takes_a_network
def test_workers_share_a_network_of_their_own(tmp_path: Path) -> None:
    first, second = seen_by_workers(tmp_path)
    assert first == second
    assert first[0] != here()
    assert first[2:4] == [str(os.getuid()), str(os.getgid())]


@takes_a_network
@takes_root
def test_an_ordinary_users_workers_have_one_too_with_their_user_and_no_capabilities(tmp_path: Path) -> None:
    folder = tmp_path / "any"
    folder.mkdir()
    folder.chmod(0o777)
    outside = here(), here("user")

    def work() -> None:
        os.setgroups([])
        os.setresgid(NOBODY - 1, NOBODY - 1, NOBODY - 1)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        ctypes.CDLL(None).prctl(
            4, 1
        )  # PR_SET_DUMPABLE, as a program is that this user starts: else root owns /proc/self
        if refusal():
            (folder / "refused").write_text(refusal())
            return
        first, second = seen_by_workers(folder, TMPDIR="/tmp")
        assert first == second
        assert first[0] != outside[0]
        assert first[1] != outside[1]
        assert first[2:4] == [str(NOBODY), str(NOBODY - 1)]
        assert int(first[4], 16) == 0

    os.environ.pop("TMPDIR", None)
    for parent in folder.parents:
        if parent.owner() == "root" and parent != Path("/") and not parent.stat().st_mode & 1:
            parent.chmod(parent.stat().st_mode | 0o11)  # pytest's own folders, which only their owner may enter
    in_a_child(work)
    if (folder / "refused").exists():
        pytest.skip((folder / "refused").read_text())


@takes_a_network
def test_processes_in_the_network_reach_each_other_and_nobody_reaches_them() -> None:
    with private_network.private_network() as network, socket.create_server(("127.0.0.1", 0)) as outside:
        listening, theirs = os.pipe()
        done, over = os.pipe()
        serving = os.fork()
        if not serving:
            network.enter()
            with socket.create_server(("127.0.0.1", PORT)) as server:
                os.write(theirs, b".")
                server.settimeout(600.0)
                connection, _ = server.accept()
                connection.sendall(b"welcome")
                os.read(done, 1)
            os._exit(0)
        os.read(listening, 1)

        def connect() -> None:
            network.enter()
            assert [name for _, name in socket.if_nameindex()] == ["lo"]
            with pytest.raises(OSError):
                socket.create_connection(outside.getsockname(), timeout=5.0)
            with socket.create_connection(("127.0.0.1", PORT), timeout=600.0) as connection:
                assert connection.recv(16) == b"welcome"

        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", PORT), timeout=5.0)
        in_a_child(connect)
        os.write(over, b".")
        os.waitpid(serving, 0)
        for descriptor in (listening, theirs, done, over):
            os.close(descriptor)


def test_the_machines_network_on_request(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert [seen[0] for seen in seen_by_workers(tmp_path, PIPELOOM_NETWORK="host")] == [here()] * 2
    assert capfd.readouterr().err == ""


def test_a_refusal_is_one_line_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_network, "_NEW_NETWORK", 0x7F)  # no such flags: the kernel refuses them
    assert [seen[0] for seen in seen_by_workers(tmp_path)] == [here()] * 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "unshare: Invalid argument" in line
    assert "docs/security.md" in line


def test_an_unknown_network_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="PIPELOOM_NETWORK = 'none'; it must be 'private' or 'host'"):
        launch(["true"], 2, environment={"PIPELOOM_NETWORK": "none"})
