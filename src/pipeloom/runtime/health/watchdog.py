"""The watchdog: a thread of every rank that ends the rank, even inside a wait, when any rank fails, dies or stalls.

It learns about the others over the links (see the package), and needs nothing from the main thread but the GIL. A rank whose
main thread never releases the GIL, or whose process is frozen, does not answer a call, and is blamed for that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeloom.errors import printable
from pipeloom.runtime.health.links import Link, LinkClosed
from pipeloom.runtime.health.status import Limits, Status, identity, is_stopped, machine
from pipeloom.schedule.channels import Message

POLL_SECONDS = 0.25  # a failure is seen at most this late, and the thread takes the GIL four times a second
SUSPENDED_SECONDS = 3.0  # after a longer pause of this thread the process counts as suspended
ROLL_CALL_SECONDS = 2.0  # wait for answers to a call; a process that is frozen or holds the GIL gives none
NOTICE_SECONDS = 10.0  # without progress, until a line is printed
LAST_WORDS_SECONDS = 0.5  # for the last messages to leave a process that ends
OWN_WORDS_SECONDS = 0.75  # for the main thread to report by itself a failure that it meets too
EXIT_CODE = 6  # of a worker that lost another one or stalled, as docs/failures.md lists it
# characters of a failure: at most 12 bytes each in a message, and a link reads 256 KiB
_LONGEST_TEXT, _LONGEST_TRACE = 4096, 16384
_EXIT_CODE_OF_SIGNAL = {signal.SIGTERM: 75, signal.SIGINT: 130}
NOTICE = "pipeloom: "  # prefix of a line that the launcher prints at once, whichever rank wrote it


@dataclass(frozen=True)
class Failure:
    """Reason for the end of the run.

    Attributes:
        origin: the rank that announced it.
        text: message for the user.
        blames: the ranks at fault, as far as known.
        trace: the traceback of the origin's exception; "" without one.
        output: identity of the origin's standard error, if its program prints the traceback there.
    """

    origin: int
    text: str
    blames: tuple[int, ...] = ()
    trace: str = ""
    output: str = ""

    def shown_on(self, output: str) -> str:
        """Return the text, with the traceback if `output` is not that of the origin."""
        return f"{self.text}\n{self.trace}" if self.trace and output != self.output else self.text


@dataclass(frozen=True)
class RankState:
    """A rank's answer to a call.

    Attributes:
        words: its present action.
        waits: whether it waits for another rank.
        seconds: seconds since its last progress.
        between: whether it is between steps.
    """

    words: str
    waits: bool
    seconds: float
    between: bool = False


@dataclass
class _WatchedCall:
    """A call by this rank that awaits answers; `limit` None: only to print a line."""

    number: int
    limit: float | None
    until: float
    states: dict[int, RankState] = field(default_factory=dict)


def judge(ranks: Sequence[int], states: Mapping[int, RankState], left: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that stall a run: those that do not answer; else those that have left it; else the one that waits for no
    other and has made no progress for the longest time; else none: a message is lost, or ranks wait for each other.
    """
    silent = tuple(rank for rank in ranks if rank not in states and rank not in left)
    if silent:
        return silent
    if left:
        return tuple(left)
    busy = [rank for rank in states if not states[rank].waits]
    return (max(busy, key=lambda rank: states[rank].seconds),) if busy else ()


def _cut(text: str, most: int) -> str:
    """Return a text of more than `most` characters without its middle."""
    if len(text) <= most:
        return text
    words = f" [… {len(text) - most:,} characters …] "
    half = (most - len(words)) // 2
    return f"{text[:half]}{words}{text[-half:]}"


def _received(origin: int, text: str, blames: Sequence[int], trace: str, output: str) -> Failure:
    return Failure(origin, printable(text), tuple(blames), printable(trace), output)


def output_identity() -> str:
    """Return an identity of the file, pipe or terminal behind this process's standard error: equal if it is the same one."""
    try:
        target = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object without a file
        return f"process {identity()}"
    return f"{machine('mnt')} {target.st_dev} {target.st_ino}"


def end_process(report: str, code: int = EXIT_CODE) -> None:
    """Print the report and end the process at once: the main thread may be inside a wait that cannot be interrupted."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{printable(report)}\n" if report else "")
        sys.stderr.flush()
    os._exit(code)


_RUNNING: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _forget_in_child() -> None:
    for watchdog in list(_RUNNING):
        watchdog.forget()


os.register_at_fork(after_in_child=_forget_in_child)


class Watchdog:
    """The watchdog of one rank. `failed` reports to the others; the thread ends this process after a report of another rank.

    Args:
        links: connections to the neighbours.
        status: status of this rank; a pipeline replaces it by its own.
        ranks: number of ranks of the run.
        limits: the limits for stalls.
        record: called with the failure, the exit code and this rank's message before the thread ends the process.
        end: ends the process: `end(report, code)`.
        output: identity of the destination of this process's standard error; default: the file behind it.
    """

    def __init__(
        self,
        links: Sequence[Link],
        status: Status,
        ranks: int,
        limits: Limits,
        record: Callable[[Failure, int, str], None] | None = None,
        end: Callable[[str, int], None] = end_process,
        output: str | None = None,
    ) -> None:
        self.output = output_identity() if output is None else output
        self.status = status
        self.number = status.number
        self.ranks = ranks
        self.limits = limits
        self.folder: str | None = None
        self._links = {link.peer: link for link in links}
        self._record = record or (lambda failure, code, words: None)
        self._end = end
        self._stop = threading.Event()
        self._known = threading.Event()  # a failure is
        self._flushed = threading.Event()
        self._failure: Failure | None = None
        self._lock = threading.Lock()  # the first failure is kept, whichever thread finds it
        self._outbox: deque[dict[str, Any]] = deque()
        self._seen: dict[int, int] = {}  # rank -> id of its newest message here; messages of one rank arrive in order
        self._values: dict[str, dict[int, Any]] = {}  # key -> rank -> value, until `gather` returns them
        self._change = threading.Condition()  # of `_values`
        self._count = 0
        self._identities: dict[int, tuple[str, int, str]] = {}
        self._left: set[int] = set()
        self._gone: dict[int, str] = {}
        self._floor = time.monotonic()
        self._call: _WatchedCall | None = None
        self._next_call = 0.0  # the earliest moment for one
        self._noticed = 0.0  # the `since` of the stall about which a line was printed
        self._heard_notice = -1e9
        self._reporting = False
        self._leaving = False
        self._waited = 0.0
        self._signal: signal.Signals | None = None  # SIGTERM or SIGINT, once received
        self._signalled = 0.0  # when
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        for pipe_end in (self._wake, self._waker):
            pipe_end.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        for link in self._links.values():
            self._selector.register(link, selectors.EVENT_READ, link)
        self._thread = threading.Thread(target=self._run, name=f"pipeloom-watchdog-{self.number}", daemon=True)

    # -- for the main thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._post({"kind": "who", "rank": self.number, "who": [identity(), os.getpid(), socket.gethostname()]})
        self._thread.start()
        atexit.register(self.close)
        _RUNNING.add(self)

    def guard_signals(self) -> None:
        """From now on a SIGTERM during a call that never returns ends the process too. Call it in the main thread."""
        # Python's handlers run only between instructions of the main thread, but the number of a signal is written here at once:
        # to a copy that stays open, so that it is never written to another file.
        signal.set_wakeup_fd(os.dup(self._waker.fileno()), warn_on_full_buffer=False)

    def close(self) -> None:
        """End the thread; the other ranks do not report this rank as lost."""
        if self._stop.is_set():
            return
        self._post({"kind": "bye", "rank": self.number})
        if self._thread.is_alive():
            self._flushed.wait(LAST_WORDS_SECONDS)
        self._stop.set()
        self._wake_up()
        self._thread.join(timeout=2)
        atexit.unregister(self.close)
        for link in self._links.values():
            link.close()

    def failed(self, text: str, blames: Sequence[int] = (), trace: str = "") -> Failure:
        """Report to all ranks that the run has failed, unless another rank did so before; return the first failure.

        The thread ends this process no longer: the caller does.
        """
        self._report_in_caller()
        return self._fail(text, tuple(blames), trace, wait=True)

    def cause(self, seconds: float) -> Failure | None:
        """Return the failure of the run, or the loss of a rank, as soon as it is known; None after `seconds` without one.

        The thread ends this process no longer: the caller does.
        """
        self._report_in_caller()
        if not self._known.wait(seconds) and not self._left:
            self._reporting = False
            return None
        if self._failure is None:
            rank = min(self._left)
            return Failure(self.number, f"{self._name(rank)} is gone: it has ended its part", (rank,))
        return self._failure

    def _report_in_caller(self) -> None:
        """Leave the report and the exit to the calling thread; if this thread has begun to report, wait for the exit."""
        with self._lock:
            self._reporting = not self._leaving
        if self._leaving:
            threading.Event().wait(LAST_WORDS_SECONDS + 60.0)

    def _report_in_thread(self) -> bool:
        """Return whether this thread, and not the main one, reports the failure and ends the process."""
        with self._lock:
            self._leaving = not self._reporting
        return self._leaving

    def share_folder(self, folder: str) -> None:
        """Send the folder of the run's files to all ranks."""
        self.folder = folder
        self._post({"kind": "folder", "folder": folder})

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return the values that all ranks give under `key`, in rank order, as JSON holds them.

        Every rank calls it, in any thread: no process group takes part, so it runs beside a step. A key may be used again once
        all ranks have returned. After a failure it does not return: the process ends, as in any other wait.
        """
        self._post({"kind": "value", "key": key, "value": value})
        with self._change:
            values = self._values.setdefault(key, {})
            values[self.number] = value
            self._change.wait_for(lambda: len(values) == self.ranks)
            del self._values[key]
        return [values[rank] for rank in range(self.ranks)]

    # -- sending -----------------------------------------------------------------------------------------------------------

    def _post(self, message: dict[str, Any]) -> None:
        self._flushed.clear()
        self._outbox.append(message)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")  # no signal has this number

    def _flood(self, message: dict[str, Any], but: int | None = None) -> None:
        if "id" not in message:
            self._count += 1
            message = {**message, "from": self.number, "id": self._count}
        self._seen[message["from"]] = message["id"]
        for peer, link in self._links.items():
            if peer != but and peer not in self._gone:
                link.send(message)

    def _fail(self, text: str, blames: tuple[int, ...], trace: str = "", wait: bool = False) -> Failure:
        text, trace = _cut(text, _LONGEST_TEXT), _cut(trace, _LONGEST_TRACE)
        with self._lock:
            first = self._failure is None
            if self._failure is None:
                self._failure = Failure(self.number, text, blames, trace, self.output if trace else "")
            failure = self._failure
        if first:
            self._post({"kind": "failed", "failure": asdict(failure)})
            self._known.set()
            if wait and self._thread.is_alive():
                self._flushed.wait(LAST_WORDS_SECONDS)
        return failure

    # -- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            self._send_posted()
            ready = self._selector.select(POLL_SECONDS)
            now = time.monotonic()
            if now - last > SUSPENDED_SECONDS:  # no rank is blamed for time in which this process did not run
                self._floor = now
                if self._call is not None:
                    self._call.until = now + ROLL_CALL_SECONDS
            last = now
            for key, _ in ready:
                if isinstance(key.data, Link):
                    self._read(key.data)
                else:
                    self._read_signals()
            if self._failure is not None:
                self._send_posted()
                if not self._reporting and not self._fails_too() and self._report_in_thread():
                    self._leave(self._failure)
                    return
                continue
            self._look_for_an_error()
            self._look_for_a_stall(now)
            self._look_at_the_call(now)
            self._look_at_sigterm(now)
        self._send_posted()

    def _send_posted(self) -> None:
        while self._outbox:
            self._flood(self._outbox.popleft())
        if all([link.flush() for link in self._links.values()]):
            self._flushed.set()

    def _read_signals(self) -> None:
        with contextlib.suppress(OSError):
            for number in self._wake.recv(4096):
                if number in _EXIT_CODE_OF_SIGNAL and self._signal is None:
                    self._signal, self._signalled = signal.Signals(number), time.monotonic()

    def _read(self, link: Link) -> None:
        try:
            while messages := link.receive():
                for message in messages:
                    if message["id"] > self._seen.get(message["from"], 0):
                        self._flood(message, but=link.peer)
                        self._take(message)
        except (LinkClosed, KeyError, TypeError, ValueError) as error:
            why = error if isinstance(error, LinkClosed) else "its connection brought a message that makes no sense"
            self._selector.unregister(link)
            self._gone[link.peer] = str(why)
            if link.peer not in self._left:
                self._fail(f"{self._name(link.peer)} is gone: {self._process(link.peer)}{why}", (link.peer,))

    def _take(self, message: Mapping[str, Any]) -> None:
        kind, origin = message["kind"], message["from"]
        if kind == "failed":
            with self._lock:
                self._failure = self._failure or _received(**message["failure"])
            self._known.set()
        elif kind == "who":
            self._identities[origin] = tuple(message["who"])
        elif kind == "folder":
            self.folder = message["folder"]
        elif kind == "bye":
            self._left.add(origin)
        elif kind == "value":
            with self._change:
                self._values.setdefault(message["key"], {})[origin] = message["value"]
                self._change.notify_all()
        elif kind == "call":
            if message["notice"]:
                self._heard_notice = time.monotonic()
            self._flood({"kind": "here", "call": [origin, message["call"]], "state": asdict(self.state())})
        elif kind == "here" and self._call is not None and message["call"] == [self.number, self._call.number]:
            self._call.states[origin] = RankState(**message["state"])

    def _look_for_an_error(self) -> None:
        """Report an error of an action beside the computation while the main thread waits for a message, which may need it."""
        if (error := self.status.error) is not None and isinstance(self.status.waiting, Message):
            trace = "".join(traceback.format_exception(error)).rstrip()
            self._fail(f"{self.status.name} failed: {self.status.place_of(error)}: {trace}", (self.number,))

    # -- stalls ------------------------------------------------------------------------------------------------------------

    def state(self) -> RankState:
        """Return this rank's answer to a call."""
        busy = self.status.busy
        words = self.status.words if busy is None else busy.place
        return RankState(words, busy is None, self._elapsed(busy), busy is not None and busy.action is None)

    def _elapsed(self, status: Status | None = None) -> float:
        """Seconds without progress, of this rank or of one of its threads, in which this process could run."""
        threads = [self.status, *self.status.running.values()] if status is None else [status]
        return time.monotonic() - max(self._floor, *(each.since for each in threads))

    def _look_for_a_stall(self, now: float) -> None:
        status = self.status
        if self._call is not None or now < self._next_call or (status.waiting is None and status.action is None):
            return
        elapsed, limit = self._elapsed(), self.limits.of(status.phase, status.slowest)
        if elapsed > limit:
            self._begin_call(now, limit)
        elif (
            elapsed > NOTICE_SECONDS
            and limit > NOTICE_SECONDS
            and status.phase
            not in ("search", "measurement", "data")  # take long, and a tokenizer may hold Python's global lock
            and self._noticed != status.since
            and now - self._heard_notice > NOTICE_SECONDS
        ):
            self._noticed = status.since
            self._begin_call(now, None)

    def _begin_call(self, now: float, limit: float | None) -> None:
        self._count += 1
        number = self._count
        self._call = _WatchedCall(number, limit, now + ROLL_CALL_SECONDS, {self.number: self.state()})
        self._flood({"kind": "call", "call": number, "notice": limit is None})

    def _look_at_the_call(self, now: float) -> None:
        call = self._call
        if call is None or (now < call.until and not self._complete(call)):
            return
        self._call = None
        if self._elapsed() < (NOTICE_SECONDS if call.limit is None else call.limit):
            return  # the awaited message has arrived
        blames = judge(range(self.ranks), call.states, sorted(self._left))
        if call.limit is not None:
            awaited = [call.states[rank].seconds for rank in blames or call.states if rank in call.states]
            if awaited and min(awaited) < min(call.limit - 1.0, 0.9 * call.limit):
                self._next_call = now + ROLL_CALL_SECONDS
                return  # the awaited rank has made progress since
            this_rank = f"{self.status.name}, {self.status.words} (timeout {call.limit:g} s)"
            self._fail(f"the {self.status.kind} stalls: {self._blame(blames, call.states)}{this_rank}", blames)
            return
        still = [s for rank, s in call.states.items() if rank != self.number and s.seconds < NOTICE_SECONDS / 2]
        if [s for s in still if not s.between] and self._signal is None:
            return  # others make progress
        late = {rank: state for rank, state in call.states.items() if rank not in blames and state.waits}
        waits = "; ".join(f"{self._name(rank)}, {state.words}" for rank, state in sorted(late.items()))
        words = f"no progress for {self._elapsed():.0f} s: {self._blame(blames, call.states)}{waits}"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{NOTICE}{printable(words)}\n")
            sys.stderr.flush()

    def _complete(self, call: _WatchedCall) -> bool:
        """Return whether no more answers can arrive: a stopped process of this machine gives none."""
        missing = set(range(self.ranks)) - call.states.keys() - self._left
        return all(map(self._stopped, missing))

    def _stopped(self, rank: int) -> bool:
        return rank in self._identities and is_stopped(self._identities[rank][0])

    def _blame(self, blames: Sequence[int], states: Mapping[int, RankState]) -> str:
        """Return a clause about the ranks that stall the run, with a semicolon; "" for none."""
        words = []
        for rank in blames:
            if rank in states:
                doing = f"is busy: {states[rank].words}"
            elif rank in self._left:
                doing = "has ended its part"
            elif self._stopped(rank):
                doing = "is stopped (SIGSTOP)"
            else:
                doing = "does not answer: it is frozen, holds Python's global lock, or its machine cannot be reached"
            words.append(f"{self._name(rank)} {self._process(rank)}{doing}; ")
        return "".join(words)

    def _look_at_sigterm(self, now: float) -> None:
        """End a process that was signalled to stop and cannot, because what it waits for does not arrive."""
        if self._signal is None or self.status.waiting is None or self.status.busy is not None:
            return
        phase = self.status.phase
        patience = 2.0 if phase == "start-up" else NOTICE_SECONDS
        if phase in ("save", "load"):  # other ranks may write for long, and a checkpoint is worth the wait
            patience = self.limits.of(phase, 0.0)
        if now - self._signalled > patience and self._elapsed() > patience and self._report_in_thread():
            words = self.status.signed(f"stopped by {self._signal.name}: {self.status.words}")
            self._record(Failure(self.number, words), _EXIT_CODE_OF_SIGNAL[self._signal], words)
            self._end(words, _EXIT_CODE_OF_SIGNAL[self._signal])

    def _fails_too(self) -> bool:
        """Return whether the main thread, before the first step or in a checkpoint, will report the same failure by itself, with
        a better message."""
        phase, idle = self.status.phase, self.status.waiting is None
        if (phase in ("save", "load") or (phase == "start-up" and idle)) and self._waited < OWN_WORDS_SECONDS:
            self._waited += POLL_SECONDS
            return not self._stop.wait(POLL_SECONDS)
        return self._reporting

    # -- the end -----------------------------------------------------------------------------------------------------------

    def _leave(self, failure: Failure) -> None:
        status = self.status
        words = f"{status.signed(status.words)}\n{status.signed(f'stopped, because {failure.shown_on(self.output)}')}"
        until = time.monotonic() + LAST_WORDS_SECONDS
        while not all([link.flush() for link in self._links.values()]) and time.monotonic() < until:
            time.sleep(0.01)
        self._record(failure, EXIT_CODE, words)
        self._end(words, EXIT_CODE)

    def forget(self) -> None:
        """Close the sockets in a forked child, whose copies would hide the parent's death."""
        atexit.unregister(self.close)
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.close()

    def _name(self, rank: int) -> str:
        return self.status.names.of(rank)

    def _process(self, rank: int) -> str:
        known = self._identities.get(rank)
        if known is None:
            return ""
        host = "" if known[2] == socket.gethostname() else f" on {known[2]}"
        return f"(process {known[1]}{host}) "
