"""A rank as the watchdogs see it: its name, its progress (written by the executor, read by the watchdog's thread), whether its
main thread communicates, and its process.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeloom.errors import add_note
from pipeloom.schedule.actions import Action
from pipeloom.schedule.channels import Message

if TYPE_CHECKING:
    from pipeloom.parallel.mesh import Mesh


@dataclass(frozen=True)
class Names:
    """Names of the ranks of a run; without a mesh, the number of the pipeline rank.

    Attributes:
        mesh: the run's processes, or None for one process with all ranks.
    """

    mesh: Mesh | None = None

    def place(self, number: int) -> str:
        """Return the place of a rank, by its number in the run: `"pp 1, dp 0, tp 1"`; empty if the run is a single pipeline."""
        if self.mesh is None or self.mesh.shape.world == self.mesh.shape.pp or number >= self.mesh.shape.world:
            return ""
        place, shape = self.mesh.shape.place(number), self.mesh.shape
        axes = (("pp", place.pp), ("dp", place.dp), ("cp", place.cp), ("tp", place.tp))
        return ", ".join(f"{axis} {index}" for axis, index in axes if getattr(shape, axis) > 1)

    def of(self, number: int) -> str:
        """Return `"rank 5 (pp 1, dp 0, tp 1)"` for a number in the run."""
        where = self.place(number)
        return f"rank {number} ({where})" if where else f"rank {number}"

    def on_line(self, rank: int) -> str:
        """Return the same for a rank of this process's pipeline."""
        return self.of(self.number(rank))

    def number(self, rank: int) -> int:
        """Return the number in the run of a rank of this process's pipeline."""
        if self.mesh is None:
            return rank
        return self.mesh.everyone.ranks.index(self.mesh.pipeline.ranks[rank])


_SLOWEST_STEPS = 20.0  # the limit of a step, as a multiple of the slowest one so far; within these bounds, in seconds
_SHORTEST_LIMIT = 30.0
_LONGEST_LIMIT = 300.0
_PHASES = {  # seconds; longer than any of them takes without a fault, also on a busy machine
    "start-up": 300.0,
    "data": 7200.0,  # of a corpus that is tokenized
    "first step": 300.0,
    "evaluation": 300.0,
    "search": 330.0,
    "measurement": 330.0,
    "save": 900.0,
    "load": 900.0,
    "device": 300.0,  # a GPU may lag behind its host by most of a step
}


@dataclass(frozen=True)
class Limits:
    """Longest time that a rank may go without progress.

    Attributes:
        timeout: seconds, in every phase ("device": at least that phase's constant); None: in steps 20 times the slowest measured
            one, at least 30 and at most 300 seconds, and in other phases a constant per phase.
    """

    timeout: float | None = None

    def of(self, phase: str, slowest: float) -> float:
        """Return the limit of a phase in seconds; `slowest`: seconds of the slowest step so far."""
        if self.timeout is not None:  # for one action, while a wait for the device may take the time of a whole step
            return max(self.timeout, _PHASES[phase]) if phase == "device" else self.timeout
        return _PHASES.get(phase, min(_LONGEST_LIMIT, max(_SHORTEST_LIMIT, _SLOWEST_STEPS * slowest)))


_PLACE_KEY = "__pipeloom_place__"  # in an error's __dict__, as that of `FailureReporter`


class Status:
    """The action that a rank is in and what it waits for; plain attributes, so that writing costs nothing.

    Attributes:
        number: number of the rank in the whole run.
        phase: "step", or a phase with its own limit (`Limits`).
        slowest: seconds of the slowest step so far, without the first.
        waiting: a message of the schedule, or the name of anything else.
        since: when the present wait, action or pause began (time.monotonic).
        threads: the status of each thread that runs an action beside the computation, by the thread's number.
        error: what an action beside the computation has raised, by itself and not for the loss of another rank.
    """

    def __init__(self, rank: int, names: Names | None = None) -> None:
        self.names = names or Names()
        self.number = self.names.number(rank)
        self.name = self.names.of(self.number)
        self.phase = "start-up"
        self.slowest = 0.0
        self.step = -1
        self.action: Action | None = None
        self.waiting: Message | str | None = None
        self.since = time.monotonic()
        self.threads: dict[int, Status] = {}
        self.error: BaseException | None = None

    @contextlib.contextmanager
    def beside(self) -> Iterator[Status]:
        """Return a context in whose thread an action runs beside the computation, with a status of its own."""
        status = copy.copy(self)
        status.leave()
        self.threads[threading.get_ident()] = status
        try:
            yield status
        finally:
            del self.threads[threading.get_ident()]

    def wait_for(self, action: Action, what: Message | str) -> None:
        self.action, self.waiting, self.since = action, what, time.monotonic()

    def enter(self, action: Action) -> None:
        self.action, self.waiting, self.since = action, None, time.monotonic()

    def wait_inside(self, what: str | None) -> None:
        """Note, inside the present action, that the rank waits for `what`; None: it does not any more."""
        self.waiting, self.since = what, time.monotonic()

    def wait_between(self, what: str) -> None:
        """Note, outside the schedule's actions, that the rank waits for `what` ("the loss")."""
        self.action, self.waiting, self.since = None, what, time.monotonic()

    def leave(self) -> None:
        """Note that the rank is between steps."""
        self.action, self.waiting, self.since = None, None, time.monotonic()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Return a context in which stalls are judged by the limit of `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @property
    def source(self) -> int | None:
        """The number in the run of the rank from which this one awaits a message."""
        if not isinstance(self.waiting, Message):
            return None
        return self.names.number(self.waiting.channel.source)

    @property
    def kind(self) -> str:
        """Return "evaluation" or "step", for the message about a stall."""
        return "evaluation" if self.phase == "evaluation" else "step"

    @property
    def doing(self) -> str:
        """Return `"step 3"`, or the name of the rank's phase outside of steps."""
        if self.phase not in ("step", "first step", "device"):
            return self.phase
        return f"step {self.step}" if self.step >= 0 else "start-up"

    @property
    def running(self) -> dict[int, Status]:
        """The threads that are inside an action beside the computation."""
        return {thread: each for thread, each in list(self.threads.items()) if each.action and not each.waiting}

    @property
    def busy(self) -> Status | None:
        """The status of a thread that waits for no other rank: of the main one, or of one beside it; None: all of them wait."""
        if self.waiting is None and not thread_communicates():
            return self
        return next((each for thread, each in self.running.items() if not thread_communicates(thread)), None)

    @property
    def words(self) -> str:
        """Return a clause: the present action, what the rank waits for and from which rank, and for how long; and the actions
        beside it.
        """
        return "; beside it, ".join([self.place, *(each.place.partition(", ")[2] for each in self.running.values())])

    @property
    def place(self) -> str:
        """Return the same clause of this thread alone."""
        for_seconds = f"for {time.monotonic() - self.since:.1f} s"
        step = self.doing
        waiting, action = self.waiting, self.action  # the executor continues while this is read
        if isinstance(waiting, str):
            where = f"{action.words}: " if action is not None else ""
            return f"{step}, {where}waits for {waiting} ({for_seconds})"
        if action is None:
            return f"start-up ({for_seconds})" if step == "start-up" else f"between actions, {step} ({for_seconds})"
        if waiting is not None:
            source = self.names.on_line(waiting.channel.source)
            return f"{step}, {action.words}: waits for {waiting.words} from {source} ({for_seconds})"
        return f"{step}, in {action.words} ({for_seconds})"

    def place_of(self, error: BaseException) -> str:
        """Return the clause of the action in which an error was raised, which another thread may have run; else `place`."""
        return str(error.__dict__.get(_PLACE_KEY, self.place))

    def failed(self, error: BaseException) -> None:
        """Give an error that is raised in the present action a note of it; one that has a note is another action's."""
        if self.action is not None and _PLACE_KEY not in error.__dict__:
            error.__dict__[_PLACE_KEY] = self.place
            add_note(error, f"({self.name}, {self.action.words})")

    def signed(self, text: str) -> str:
        """Return `text` after this rank's name, as every line of a report begins."""
        where = self.names.place(self.number)
        return f"[rank {self.number}] {f'({where}) ' if where else ''}{text}"


_COMMUNICATES = (
    "parallel/collectives.py",
    "parallel/data.py",
    "parallel/dispatch.py",
    "parallel/exchange.py",
    "parallel/shared_memory_sum.py",
    "parallel/zero.py",
    "runtime/loss.py",
    "runtime/p2p/shared_memory.py",
    "runtime/tied_weights.py",
    "runtime/p2p/torch_p2p.py",
    "runtime/actions/signals.py",
    "runtime/engine.py",
    "runtime/batch.py",
    "train/collect.py",
)
_PACKAGE = Path(__file__).parents[2]


def communicates(file: str) -> bool:
    """Return whether code of this file communicates with other ranks, so that an error there means the loss of one."""
    path = Path(file)
    if "torch/distributed/" in path.as_posix():
        return True
    return path.is_relative_to(_PACKAGE) and path.relative_to(_PACKAGE).as_posix() in _COMMUNICATES


def thread_communicates(thread: int | None = None) -> bool:
    """Return whether a thread of this process, or the main one, is inside a communication now, by its innermost Python frame."""
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    return frame is not None and communicates(frame.f_code.co_filename)


def identity() -> str:
    """Return an identity of this process that is never reused: machine, process namespace, number, start; "" if unknown."""
    return f"{_here()} {os.getpid()} {_stat(os.getpid())[1]}" if _here() else ""


def is_stopped(who: str) -> bool:
    """Return whether the process with this `identity` is known to be stopped (SIGSTOP, a debugger)."""
    place, _, process = who.partition(" ")
    if not place or place != _here():
        return False
    try:
        number, _, start = process.partition(" ")
        state, since = _stat(int(number))
        return since == start and state in "Tt"
    except OSError:
        return False


def seconds_running() -> float | None:
    """Return the seconds since the start of this process; None if the system does not provide it."""
    try:
        ticks = float(_stat(os.getpid())[1])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None


def machine(*namespaces: str) -> str:
    """Return an identity of this machine since its boot and of these namespaces of this process; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return "/".join([boot, *(str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in namespaces)])
    except OSError:
        return ""


def _here() -> str:
    return machine("pid")


def _stat(number: int) -> tuple[str, str]:
    """Return (state, start in clock ticks since boot) of a process (proc(5), /proc/PID/stat). Raises OSError if there is none."""
    text = Path(f"/proc/{number}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain any characters
    return fields[0], fields[19]
