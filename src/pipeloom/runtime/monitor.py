"""The watchdog: a thread on every rank that ends the rank, even inside a wait, when any rank fails, dies or stalls.

Keys in the store, under one prefix a run (all pipelines that stand side by side): `failure` (the first failure, as text),
`seen` (how many ranks have reported it), `process/R` (rank R's), `beat/R` (a counter that rank R's thread raises).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pipeloom.runtime.life import identity, is_there
from pipeloom.runtime.status import Status

POLL_SECONDS = 0.2
BEAT_SECONDS = 1.0
DEAD_AFTER_SECONDS = 8.0
REPORT_SECONDS = 1.0
EXIT_CODE = 6


def end_process(report: str) -> None:
    """Prints the report and ends the process at once: the main thread may be inside a wait that nothing can interrupt."""
    sys.stderr.write(f"{report}\n" if report else "")
    sys.stderr.flush()
    os._exit(EXIT_CODE)


class Monitor:
    """Watches for one rank. `failed` tells the others; the thread ends this process when another has told.

    Args:
        peers: numbers of the ranks whose signs of life this one watches.
        ranks: how many ranks the run has.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        status: Status,
        peers: Sequence[int],
        ranks: int,
        timeout: float,
        notice: Callable[[], str | None] | None = None,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._status = status
        self._ranks = ranks
        self._timeout = timeout
        self._notice = notice
        self._end = end
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._beats: dict[int, tuple[bytes, float]] = {peer: (b"", time.monotonic()) for peer in peers}
        self._processes: dict[int, str] = {}
        store.set(f"{prefix}/process/{status.number}", identity())
        self._thread = threading.Thread(target=self._watch, name=f"pipeloom-monitor-{status.number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops the thread; other ranks do not take it for a death."""
        self._stop.set()
        self._thread.join(timeout=2)
        with self._lock, contextlib.suppress(RuntimeError):  # the store is gone: so are the others
            self._store.set(f"{self._prefix}/beat/{self._status.number}", b"closed")

    def failed(self, text: str) -> str:
        """Tells all ranks that this one has failed, unless another did so before, and waits until they have reported it.

        Returns the text of the first failure, this one's or another's.
        """
        self._stop.set()
        try:
            with self._lock:
                cause = self._announce(text)
                self._wait_for_reports()
                return cause
        except RuntimeError:
            return f"{text}\n(the store's host, global rank 0, is gone)"

    def cause(self) -> str | None:
        """The failure that some rank has told of, or that a process is known to be dead; None while nothing is known."""
        with contextlib.suppress(RuntimeError), self._lock:
            if self._store.check([f"{self._prefix}/failure"]):
                return str(self._store.get(f"{self._prefix}/failure").decode())
        return self._notice() if self._notice is not None else None

    def _announce(self, text: str) -> str:
        """Sets the failure unless there is one already; returns the one that stands."""
        return str(self._store.compare_set(f"{self._prefix}/failure", "", text).decode())

    def _wait_for_reports(self) -> None:
        """Counts this rank's report, and gives the others time for theirs: they need its connections, and the store."""
        reports = int(self._store.add(f"{self._prefix}/seen", 1))
        deadline = time.monotonic() + REPORT_SECONDS
        while reports < self._ranks and time.monotonic() < deadline:
            time.sleep(0.05)
            reports = int(self._store.add(f"{self._prefix}/seen", 0))

    def _watch(self) -> None:
        beat = 0
        next_beat = 0.0
        while not self._stop.wait(POLL_SECONDS):
            try:
                with self._lock:
                    if self._stop.is_set():
                        return
                    if self._store.check([f"{self._prefix}/failure"]):
                        self._report(self._store.get(f"{self._prefix}/failure").decode())
                        return
                    if time.monotonic() >= next_beat:
                        beat += 1
                        next_beat = time.monotonic() + BEAT_SECONDS
                        self._store.set(f"{self._prefix}/beat/{self._status.number}", str(beat))
                        self._look_for_the_dead()
                    self._look_for_a_stall()
                    notice = self._notice() if self._notice is not None else None
                    if notice is not None:
                        self._announce(notice)
            except RuntimeError as error:  # torch's DistStoreError and DistNetworkError are RuntimeErrors
                if not self._stop.is_set():
                    self._end(
                        self._own_words(f"the store's host (global rank 0) is gone: {str(error).splitlines()[0]}")
                    )
                return

    def _look_for_the_dead(self) -> None:
        """Who shows no sign of life is dead, except a process of this machine that is still there: it only gets no time."""
        now = time.monotonic()
        for peer, (last, since) in self._beats.items():
            key = f"{self._prefix}/beat/{peer}"
            value = self._store.get(key) if self._store.check([key]) else b""
            if value != last or value == b"closed":
                self._beats[peer] = (value, now)
            elif now - since > DEAD_AFTER_SECONDS and not is_there(self._process(peer)):
                self._announce(f"{self._status.names.of(peer)} is dead: no sign of life for {now - since:.0f} s")

    def _process(self, peer: int) -> str:
        key = f"{self._prefix}/process/{peer}"
        if peer not in self._processes and self._store.check([key]):
            self._processes[peer] = self._store.get(key).decode()
        return self._processes.get(peer, "")

    def _look_for_a_stall(self) -> None:
        status = self._status
        waiting, since = status.waiting, status.since
        if waiting is not None and time.monotonic() - since > self._timeout:
            self._announce(f"the step stalls: {status.name}, {status.words} (timeout {self._timeout:g} s)")

    def _report(self, failure: str) -> None:
        words = self._own_words(failure)
        with contextlib.suppress(RuntimeError):  # the store may go away while the others end
            sys.stderr.write(words + "\n")
            self._wait_for_reports()
        self._end("")

    def _own_words(self, cause: str) -> str:
        status = self._status
        return f"{status.signed(status.words)}\n{status.signed(f'stopped, because {cause}')}"
