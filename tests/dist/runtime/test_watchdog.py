"""The control plane: links, how processes meet, and what the watchdog makes of messages, silence and ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeloom.errors import DistributedError
from pipeloom.runtime.health import links as linking
from pipeloom.runtime.health import status as health_status
from pipeloom.runtime.health import watchdog as watching
from pipeloom.runtime.health.links import Link, LinkClosed, RunStore, inherited, meet, neighbours, read_secret, within
from pipeloom.runtime.health.report import FailureReporter, PeerGone, lost_peer
from pipeloom.runtime.health.status import Limits, Status, thread_communicates
from pipeloom.runtime.health.watchdog import Failure, RankState, Watchdog, judge, printable
from pipeloom.schedule.actions import Action
from processes import wait_for


def linked() -> tuple[Link, Link]:
    one, two = socket.socketpair()
    return Link(1, one), Link(0, two)


def received(link: Link) -> list[dict[str, object]]:
    while not (messages := link.receive()):
        time.sleep(0.01)
    return messages


# -- links -------------------------------------------------------------------------------------------------------------------


def test_messages_arrive_in_order_and_the_end_after_them() -> None:
    one, two = linked()
    one.send({"kind": "a"})
    one.send({"kind": "b", "text": "line\nend"})
    one.close()
    assert received(two) == [{"kind": "a"}, {"kind": "b", "text": "line\nend"}]
    with pytest.raises(LinkClosed, match="its connection closed"):
        two.receive()


@pytest.mark.parametrize("body", [b"{", b"7", b"[" * 5000, b'"\xff"'])
def test_a_message_that_makes_no_sense_closes_the_link(body: bytes) -> None:
    one, two = socket.socketpair()
    link = Link(1, one)
    two.sendall(body + b"\n")
    with pytest.raises(LinkClosed, match="makes no sense"):
        wait_for(link.receive)


def test_a_neighbour_that_does_not_read_never_blocks() -> None:
    one, _two = linked()
    tracemalloc.start()
    for _ in range(3000):
        one.send({"text": "x" * 1000})
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2 << 20


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 16, 64, 1000])
def test_neighbours_reach_everyone_around_a_frozen_one(world: int) -> None:
    assert all(rank in neighbours(peer, world) for rank in range(world) for peer in neighbours(rank, world))
    frozen = {3, 4} if world > 7 else set()
    reached, fresh = {0}, {0}
    while fresh:
        fresh = {peer for rank in fresh for peer in neighbours(rank, world)} - reached - frozen
        reached |= fresh
    assert reached == set(range(world)) - frozen
    assert len(neighbours(0, world)) <= 6


def test_inherited_links_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = socket.socketpair()
    monkeypatch.setenv(linking.LINKS, f"3:{one.detach()}")
    found = inherited()
    assert found is not None
    assert [link.peer for link in found] == [3]
    assert inherited() is None
    Link(0, two).send({"kind": "hello"})
    assert received(found[0]) == [{"kind": "hello"}]
    assert not os.get_inheritable(found[0].fileno())


# -- meeting -----------------------------------------------------------------------------------------------------------------


class Addresses(RunStore):
    """A store in which everybody finds the addresses: only the handshake keeps those without the secret out."""

    def __init__(self, inner: Any, secret: bytes) -> None:
        super().__init__(inner, secret, 120.0)
        self.open = RunStore(inner, b"", 120.0)

    def set(self, key: str, text: str) -> None:
        self.open.set(key, text)

    def get(self, key: str, seconds: float | None = None) -> str:
        return self.open.get(key, seconds)

    def exchange(self, prefix: str, rank: int, ranks: int, value: Any, seconds: float | None = None) -> list[Any]:
        return self.open.exchange(prefix, rank, ranks, value, seconds)


def meet_all(world: int, secrets: Sequence[bytes], seconds: float = 120.0, store: Any = Addresses) -> list[list[Link]]:
    inner = dist.HashStore()
    with ThreadPoolExecutor(world) as threads:
        stores = [store(inner, secret) for secret in secrets]
        each = [threads.submit(meet, stores[rank], "run", rank, world, seconds) for rank in range(world)]
        return [one.result() for one in each]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_processes_meet(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "tcp":
        monkeypatch.setattr(linking, "machine", lambda *names: "")
        monkeypatch.setenv("PIPELOOM_ADDRESS", "127.0.0.1")
    found = meet_all(4, [b"secret"] * 4)
    assert [[link.peer for link in links] for links in found] == [neighbours(rank, 4) for rank in range(4)]
    found[0][0].send({"kind": "hello"})
    assert received(found[1][0]) == [{"kind": "hello"}]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_process_with_another_secret_does_not_get_in(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "tcp":
        monkeypatch.setattr(linking, "machine", lambda *names: "")
        monkeypatch.setenv("PIPELOOM_ADDRESS", "127.0.0.1")
    with pytest.raises(DistributedError, match="rank 0: rank 1 did not connect"):
        meet_all(2, [b"secret", b"another"], 5.0)


def test_a_recorded_handshake_is_not_taken() -> None:
    """A stranger who repeats what a rank once sent: its MAC is for the random number of another handshake."""
    store = RunStore(dist.HashStore(), b"secret", 120.0)

    def shake(end: socket.socket, rank: int) -> int:
        return linking.shake_hands(end, store, "run", rank, {1 - rank})

    def between(one: socket.socket, two: socket.socket) -> bytes:
        """Pass on what `one` sends until it has shaken hands; return it."""
        said = b""
        while len(said) < linking.HELLO.size + 32:
            said += (data := one.recv(100))
            two.sendall(data)
        return said

    with ThreadPoolExecutor(4) as threads:
        (one, left), (right, two) = socket.socketpair(), socket.socketpair()
        shaking = [threads.submit(shake, one, 0), threads.submit(shake, two, 1)]
        threads.submit(between, right, left)
        recorded = between(left, right)
        assert [each.result() for each in shaking] == [1, 0]
        again, stranger = socket.socketpair()
        stranger.sendall(recorded)
        with pytest.raises(OSError, match="its secret is another one"):
            shake(again, 1)


def test_the_secret_comes_from_the_environment_or_a_file_of_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELOOM_SECRET", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PIPELOOM_SECRET_FILE", raising=False)
    assert read_secret() is None
    file = tmp_path / ".config" / "pipeloom" / "secret"
    file.parent.mkdir(parents=True)
    file.write_text("from a file\n")
    file.chmod(0o644)
    with pytest.raises(DistributedError, match=r"can be read by others.*chmod 600"):
        read_secret()
    file.chmod(0o600)
    assert read_secret() == b"from a file"
    monkeypatch.setenv("PIPELOOM_SECRET", "from the environment")
    assert read_secret() == b"from the environment"
    monkeypatch.delenv("PIPELOOM_SECRET")
    monkeypatch.setenv("PIPELOOM_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(DistributedError, match="PIPELOOM_SECRET_FILE"):
        read_secret()
    os.mkfifo(tmp_path / "pipe", 0o600)  # to read it would wait for ever
    monkeypatch.setenv("PIPELOOM_SECRET_FILE", str(tmp_path / "pipe"))
    with pytest.raises(DistributedError, match="is no file"):
        read_secret()


# -- the store ---------------------------------------------------------------------------------------------------------------


def test_what_another_wrote_into_the_store_is_refused() -> None:
    inner = dist.HashStore()
    store = RunStore(inner, b"secret", 120.0)
    store.set("key", "text with spaces\n")
    assert store.get("key") == "text with spaces\n"
    assert b"secret" not in bytes(inner.get("key"))
    for forged in ("text", "x text", "0" * 64 + " text"):
        inner.set("key", forged)
        with pytest.raises(DistributedError, match="not written by a rank of this run"):
            store.get("key")
    RunStore(inner, b"another", 120.0).set("key", "text")
    with pytest.raises(DistributedError, match="not written by a rank of this run"):
        store.get("key")
    store.set("other", "text")  # a value that is moved to another key
    inner.set("key", bytes(inner.get("other")).decode())
    with pytest.raises(DistributedError, match="not written by a rank of this run"):
        store.get("key")


@pytest.mark.parametrize(
    "call", [lambda store: store.get("key"), lambda store: store.set("key", ""), lambda store: store.add("key", 1)]
)
def test_a_store_whose_process_has_exited_is_another_ranks_failure(call: Any) -> None:
    def gone(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer\nframes")

    with pytest.raises(
        DistributedError, match=r"the process that serves it, .*, has exited \(Connection reset by peer\)"
    ):
        call(RunStore(SimpleNamespace(check=gone, set=gone, add=gone), b"", 5.0))


def test_a_key_that_never_comes_has_a_deadline() -> None:
    store = RunStore(dist.HashStore(), b"", 0.3)
    with pytest.raises(DistributedError, match=r"no value arrived under key within 0\.3 s"):
        store.get("key")


def test_a_call_that_never_returns_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(DistributedError, match=r"no answer within 0\.2 s"):
        within(0.2, never.wait, "no answer")
    never.set()
    assert within(120.0, lambda: 3, "") == 3
    with pytest.raises(ZeroDivisionError):
        within(120.0, lambda: 1 // 0, "")


# -- the verdict -------------------------------------------------------------------------------------------------------------


def test_limits() -> None:
    automatic = Limits()
    assert [automatic.of("step", slowest) for slowest in (0.0, 1.0, 3.0, 100.0)] == [30.0, 30.0, 60.0, 300.0]
    assert automatic.of("first step", 0.0) == automatic.of("evaluation", 0.0) == automatic.of("start-up", 0.0) == 300.0
    assert automatic.of("save", 0.0) > 300.0
    assert Limits(12.0).of("save", 100.0) == Limits(12.0).of("step", 0.0) == 12.0


def test_a_wait_for_a_gpu_is_one_of_a_step_that_the_watchdog_sees() -> None:
    """Under NCCL a message that never comes holds up a stream, and the host where it reads a value of the device."""
    reporter = FailureReporter(Status(0))
    status = reporter.status
    status.step, status.phase = 3, "step"
    with reporter.waiting_for_device(torch.device("cuda", 0)):
        assert status.words.startswith("step 3, waits for its GPU")
        assert status.kind == "step"
        # The whole step may still be ahead of the device, whatever an action may take.
        assert Limits().of(status.phase, 0.1) == Limits(12.0).of(status.phase, 0.1) == 300.0
        assert Limits(900.0).of(status.phase, 0.1) == 900.0
    assert (status.waiting, status.phase) == (None, "step")
    with reporter.waiting_for_device(torch.device("cpu")):  # a CPU has computed what it is asked for
        assert status.waiting is None


def test_who_holds_up_a_run() -> None:
    waits, busy, idle = RankState("", True, 12.0), RankState("", False, 13.0), RankState("", False, 1.0)
    assert judge(range(3), {0: waits, 2: busy}, ()) == (1,)  # no answer
    assert judge(range(4), {0: waits}, (2,)) == (1, 3)
    assert judge(range(3), {0: waits, 1: busy}, (2,)) == (2,)  # it has left
    assert judge(range(3), {0: waits, 1: idle, 2: busy}, ()) == (2,)
    assert judge(range(2), {0: waits, 1: waits}, ()) == ()  # a lost message


def test_control_characters_are_shown_as_text() -> None:
    assert printable("a\x1b[31mb\nc\td\r\x9b") == "a\\x1b[31mb\nc\td\\x0d\\x9b"


def test_a_lost_peer_is_told_by_type_and_place_and_never_by_words() -> None:
    def users() -> None:
        raise RuntimeError("Connection reset by peer [gloo/transport/tcp/pair.cc] Connection closed")

    with pytest.raises(RuntimeError) as caught:
        users()
    assert not lost_peer(caught.value)
    assert lost_peer(PeerGone(1, "anything"))
    with pytest.raises(AttributeError) as other:
        dist.get_world_size("no group")  # type: ignore[arg-type]
    assert not lost_peer(other.value)
    with pytest.raises(RuntimeError) as inside:
        exec(compile("raise RuntimeError('no words')", dist.__file__, "exec"))
    assert lost_peer(inside.value)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_that_fails_inside_a_communication_is_no_lost_peer(kind: type[RuntimeError]) -> None:
    """Memory runs out where a receive makes room, and a failed kernel is reported where a count is read."""
    error = kind("CUDA error: device-side assert triggered")
    with pytest.raises(kind) as inside:
        exec(compile("raise error", dist.__file__, "exec"), {"error": error})
    assert not lost_peer(inside.value)


# -- the watchdog ------------------------------------------------------------------------------------------------------------


class Clock:
    """Stands for the module `time` in watchdogs and their statuses: its seconds pass only in `tick` and `sleep`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.readings: Counter[threading.Thread] = Counter()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        time.sleep(seconds)

    def monotonic(self) -> float:
        self.readings[threading.current_thread()] += 1
        return self.now

    def tick(self, seconds: float = 1.0) -> None:
        """Let seconds pass, and each watchdog go round at least twice: a round reads the clock ten times at most."""
        self.now += seconds
        before = self.readings.copy()
        for thread in threading.enumerate():
            if thread.name.startswith("pipeloom-watchdog-"):
                assert wait_for(lambda: not thread.is_alive() or self.readings[thread] > before[thread] + 20)  # noqa: B023

    def tick_until(self, true: Callable[[], bool]) -> bool:
        for _ in range(100):
            if true():
                return True
            self.tick()
        return False


class Run:
    """Watchdogs of several ranks in one process; `ends`: rank -> (words, exit code) of those that would have ended it."""

    def __init__(self, world: int, timeout: float | None = 6.0) -> None:
        self.ends: dict[int, tuple[str, int]] = {}
        self.at_end: dict[int, Callable[[str, int], None]] = {}
        self.sockets: dict[int, list[socket.socket]] = {rank: [] for rank in range(world)}
        self.failures: dict[int, Failure] = {}
        self.links: dict[int, dict[int, Link]] = {rank: {} for rank in range(world)}
        for rank in range(world):
            for peer in range(rank):
                one, two = socket.socketpair()
                self.links[rank][peer], self.links[peer][rank] = Link(peer, one), Link(rank, two)
                self.sockets[rank].append(one)
                self.sockets[peer].append(two)
        self.dogs = {rank: self._dog(rank, world, timeout) for rank in range(world)}
        self.started: list[Watchdog] = []
        RUNS.append(self)

    def _dog(self, rank: int, world: int, timeout: float | None) -> Watchdog:
        def record(failure: Failure, code: int, words: str) -> None:
            self.failures[rank] = failure

        def end(words: str, code: int) -> None:
            self.ends[rank] = words, code
            if rank in self.at_end:
                self.at_end[rank](words, code)

        status = Status(rank)
        status.step, status.phase = 3, "step"
        return Watchdog(list(self.links[rank].values()), status, world, Limits(timeout), record, end)

    def start(self, *ranks: int) -> None:
        for rank in ranks or self.dogs:
            self.dogs[rank].start()
            self.started.append(self.dogs[rank])


RUNS: list[Run] = []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(watching, "time", clock)
    monkeypatch.setattr(health_status, "time", clock)
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.002)
    yield clock
    for dog in [dog for run in RUNS for dog in run.started]:
        dog.close()
    RUNS.clear()


def test_threads_gather_the_values_of_all_ranks(clock: Clock) -> None:
    """Two keys at once, and each again."""
    world = 8
    run = Run(world)
    run.start()
    with ThreadPoolExecutor(2 * world) as threads:
        for turn in range(3):
            calls = [(key, rank) for key in "ab" for rank in range(world)]
            values = [threads.submit(run.dogs[rank].gather, key, [key, turn, rank]) for key, rank in calls]
            for (key, _), future in zip(calls, values, strict=True):
                assert future.result(timeout=60) == [[key, turn, rank] for rank in range(world)]


def test_a_failure_reaches_everyone(clock: Clock) -> None:
    run = Run(4)
    run.start()
    failure = run.dogs[2].failed("rank 2 failed: \x1b[2J", (2,))
    assert failure.origin == 2
    assert wait_for(lambda: len(run.ends) == 3)
    assert {code for _, code in run.ends.values()} == {6}
    assert all("stopped, because rank 2 failed: \\x1b[2J" in words for words, _ in run.ends.values())
    assert {failure.blames for failure in run.failures.values()} == {(2,)}
    assert run.dogs[2].failed("again").text.startswith("rank 2 failed")  # the first one stands


@pytest.mark.parametrize("character", ["x", "\U0001f9f5"])
def test_a_failure_of_many_characters_reaches_everyone(character: str, clock: Clock) -> None:
    run = Run(3)
    run.start()
    run.dogs[2].failed(f"rank 2 failed: {character * 1_000_000} at last", (2,), f"first {character * 1_000_000} last")
    assert wait_for(lambda: len(run.ends) == 2)
    for words, _ in run.ends.values():
        assert "stopped, because rank 2 failed: " in words
        assert " at last" in words
        assert len(words) < 25_000


def test_a_rank_inside_a_collective_waits_and_one_in_code_of_its_own_does_not(tmp_path: Path) -> None:
    """As the main thread's innermost frame says: tensor parallelism waits inside an action."""
    run = Run(2)
    run.dogs[0].status.enter(Action("F", 1, 2))
    states = []
    for place, communicates in (("torch/distributed/distributed_c10d.py", True), ("user.py", False)):
        done = threading.Lock()

        def look(communicates: bool = communicates, done: threading.Lock = done) -> None:
            wait_for(thread_communicates, 120.0 if communicates else 0.2)
            states.append(run.dogs[0].state())
            done.release()

        done.acquire()
        threading.Thread(target=look).start()
        exec(compile("acquire()", str(tmp_path / place), "exec"), {"acquire": done.acquire})  # C: no frame is inside
    assert [state.waits for state in states] == [True, False]


def test_a_closed_link_is_a_death_and_one_after_bye_is_not(clock: Clock) -> None:
    run = Run(3)
    run.start()
    run.dogs[1].close()
    clock.tick()
    assert not run.ends
    for connection in run.sockets[2]:
        connection.shutdown(socket.SHUT_RDWR)
    assert wait_for(lambda: 0 in run.ends)
    assert "stopped, because rank 2 is gone" in run.ends[0][0]
    assert run.failures[0].blames == (2,)


def test_a_rank_that_does_not_answer_is_blamed(clock: Clock) -> None:
    """Rank 1's thread never runs, as in a process that is frozen or holds the GIL."""
    run = Run(3)
    run.start(0, 2)
    for rank in (0, 2):
        run.dogs[rank].status.wait_between("the loss")
    assert clock.tick_until(lambda: len(run.ends) == 2)
    assert {failure.blames for failure in run.failures.values()} == {(1,)}
    assert all("the step stalls: rank 1 does not answer" in words for words, _ in run.ends.values())


def test_a_rank_that_is_busy_is_blamed_and_those_that_wait_are_not(clock: Clock) -> None:
    run = Run(3)
    run.start()
    run.dogs[1].status.enter(Action("F", 1, 2))
    for rank in (0, 2):
        run.dogs[rank].status.wait_between("the loss")
    assert clock.tick_until(lambda: len(run.ends) == 3)
    assert {failure.blames for failure in run.failures.values()} == {(1,)}
    assert all("is busy: step 3, in F of stage 1 micro-batch 2" in failure.text for failure in run.failures.values())


def test_progress_is_no_stall(clock: Clock) -> None:
    run = Run(2)
    run.start()
    for _ in range(25):
        for dog in run.dogs.values():
            dog.status.wait_between("the loss")
        clock.tick()
    for dog in run.dogs.values():
        dog.status.leave()
    for _ in range(15):  # between steps no limit holds
        clock.tick()
    assert not run.ends


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "is busy"])
def test_a_rank_that_comes_late_is_no_stall_and_ends_one_when_it_stops(waits: bool, clock: Clock) -> None:
    """Rank 0 waits for longer than the limit, and rank 1 gets on all the while: a start-up, or a chain of slow stages."""
    run = Run(2)
    run.start()
    run.dogs[0].status.wait_between("the other ranks at start-up")
    for _ in range(20):
        if waits:
            run.dogs[1].status.wait_between("the other ranks at start-up")
        else:
            run.dogs[1].status.enter(Action("F", 1, 2))
        clock.tick()
    assert not run.ends
    assert clock.tick_until(lambda: len(run.ends) == 2)
    assert {failure.blames for failure in run.failures.values()} == {() if waits else (1,)}


def test_a_suspended_process_blames_nobody(clock: Clock) -> None:
    """Its clock has run on, and nothing else."""
    run = Run(2, timeout=50.0)
    run.start()
    run.dogs[0].status.wait_between("the loss")
    clock.tick()
    clock.tick(100.0)
    for _ in range(5):
        clock.tick()
    assert not run.ends
    assert run.dogs[0].state().seconds == 5.0


@pytest.mark.parametrize("phase", ["search", "measurement", "data"])
def test_what_takes_long_is_no_stall(phase: str, capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    """A search, and a tokenizer, which may keep its process from answering."""
    run = Run(3, timeout=60.0)
    run.start(0, 2)
    for rank in (0, 2):
        run.dogs[rank].status.phase = phase
        run.dogs[rank].status.wait_between("what rank 0 does")
    for _ in range(25):
        clock.tick()
    assert "no progress" not in capsys.readouterr().err


def test_a_stall_is_reported_while_it_lasts(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    run = Run(3, timeout=60.0)
    run.start(0, 2)
    for rank in (0, 2):
        run.dogs[rank].status.wait_between("the loss")
    for _ in range(25):
        clock.tick()
    lines = [line for line in capsys.readouterr().err.splitlines() if "no progress" in line]
    assert 1 <= len(lines) <= 2
    assert re.match("pipeloom: no progress for 1[1-4] s: ", lines[0])
    assert "rank 1 does not answer" in lines[0]
    assert "waits for the loss" in lines[0]
    assert not run.ends


def test_the_folder_is_known_everywhere(clock: Clock) -> None:
    run = Run(3, timeout=60.0)
    run.start()
    run.dogs[0].share_folder("runs/now")
    assert wait_for(lambda: all(dog.folder == "runs/now" for dog in run.dogs.values()))


def test_a_lost_peer_waits_for_whoever_knows_why(clock: Clock) -> None:
    run = Run(2, timeout=60.0)
    run.start()
    assert run.dogs[0].cause(0.2) is None
    threading.Timer(0.3, run.dogs[1].failed, ("the reason", (1,))).start()
    cause = run.dogs[0].cause(120.0)
    assert cause is not None
    assert (cause.text, cause.origin) == ("the reason", 1)
    clock.tick()
    assert 0 not in run.ends  # whoever asked ends the process


def test_one_thread_reports_the_end(clock: Clock) -> None:
    """The main thread finds out while the watchdog's thread writes the report: it must not write a second one."""
    run = Run(2, timeout=60.0)
    writes, written, reports = threading.Event(), threading.Event(), []

    def end(words: str, code: int) -> None:
        writes.set()
        written.wait(120.0)

    run.at_end[0] = end
    run.start()
    run.dogs[1].failed("the reason", (1,))
    assert writes.wait(120.0)
    main = threading.Thread(target=lambda: reports.append(run.dogs[0].cause(0.2)), daemon=True)
    main.start()
    main.join(1.0)
    written.set()
    assert reports == []


SIGNALLED = """
import os, signal, sys, threading, time
from pipeloom.runtime.health import watchdog as watching
from pipeloom.runtime.health.status import Limits, Status
from pipeloom.runtime.health.watchdog import Watchdog
dog = Watchdog([], Status(0), 1, Limits(600.0))
dog.start()
signal.signal(signal.SIGTERM, lambda number, frame: None)
dog.guard_signals()
dog.status.wait_between("what never comes")
print("ready", flush=True)
lock = threading.Lock()
lock.acquire()
import ctypes
ctypes.CDLL(None).sleep(60)  # a call that gives up the GIL, and in which no handler of Python's runs
ctypes.CDLL(None).sleep(60)
"""


def test_sigterm_ends_a_call_that_never_returns() -> None:
    with subprocess.Popen([sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 75
        assert process.stderr is not None
        assert b"stopped by SIGTERM: start-up, waits for what never comes" in process.stderr.read()
