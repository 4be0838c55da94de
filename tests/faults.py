"""Faults made in real runs of `pipeloom train`: frozen, looping and killed ranks, a cut link between two hosts.

`python -m tests.faults freeze loop cut kill strangers alarm` runs these parts, all without a name, and prints a line per fault.
The hosts of `cut` are two network namespaces, which takes root; it is skipped with the reason where the kernel refuses them.
tests/e2e/train/test_faults.py runs a few of each.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "support"))

from checkpoint_runs import BRIEF
from commands import Command
from pipeloom.runtime import flight
from pipeloom.train import loop
from pipeloom.train.workers.network import private_network

TIMEOUT = 30.0  # a worker that starts on a busy core may stand still for some seconds
MARGIN = 5.0
LAYOUTS = {
    "shared memory": ["--parallel.pp", "4", "--schedule.transport", "shared"],
    "gloo": ["--parallel.pp", "4", "--schedule.transport", "individual"],
    "tp": ["--parallel.pp", "2", "--parallel.tp", "2"],
    "dp": ["--parallel.pp", "2", "--parallel.dp", "2", "--train.global_batch_size", "16"],
}
SHORT_RUN = 25  # steps of a run that is compared loss by loss
_TEXT = "".join(
    f"line {n}: the loom weaves thread {n * 7919 % 10007} over thread {n * 31 % 997}\n" for n in range(3000)
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended after a fault.

    Attributes:
        code: the exit code.
        seconds: from the fault to the end.
        words: what it wrote to stderr.
        ends: host or rank -> seconds from the fault, where they were watched one by one.
    """

    code: int
    seconds: float
    words: str
    ends: dict[int, float]


def command(folder: Path, *flags: str, timeout: float | None = TIMEOUT) -> list[str]:
    """`pipeloom train` on a small text, for very many steps."""
    text = folder / "text.txt"
    text.write_text(_TEXT, encoding="utf-8")
    limit = [] if timeout is None else ["--train.timeout", f"{timeout:g}"]
    words = [
        "tiny",
        "--model.num_hidden_layers",
        "8",
        "--data.source",
        str(text),
        "--log.dir",
        str(folder / "runs"),
        "--train.device",
        "cpu",
    ]
    return ["-m", "pipeloom", "train", *words, "--train.steps", "1000000", *limit, *BRIEF, *flags]


def workers_of(launcher: int, count: int, seconds: float = 600.0) -> dict[int, int]:
    """rank -> process of the launcher's workers, once all are there."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found: dict[int, int] = {}
        for process in children(launcher):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{process}/comm").read_text()
                if name.startswith("rank "):
                    found[int(name[5:])] = process
        if len(found) == count:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{count} workers did not start")


def wait_for_steps(folder: Path, steps: int, run: Command | subprocess.Popen[str], seconds: float = 600.0) -> None:
    """Returns when the run's log has so many steps."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if any(path.read_text().count('"grad_norm"') >= steps for path in folder.rglob("log.jsonl")):
            return
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.05)
    run.kill()
    raise AssertionError(f"no {steps} steps in {seconds} s: {run.communicate()[1]}")


def start(words: list[str], prepare: Callable[[], None] | None = None) -> Command:
    return Command(words[2:], prepare=prepare)


def ended(run: Command | subprocess.Popen[str], since: float, seconds: float) -> Outcome:
    try:
        _, words = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        run.kill()
        _, words = run.communicate()
        return Outcome(-1, time.monotonic() - since, words, {})
    return Outcome(run.returncode, time.monotonic() - since, words, {})


def signal_rank(folder: Path, rank: int, flags: list[str], number: int, timeout: float | None = TIMEOUT) -> Outcome:
    """A run of four workers in which one gets a signal after some steps."""
    run = start(command(folder, *flags, timeout=timeout))
    victims = workers_of(run.pid, 4)
    wait_for_steps(folder, 3, run)
    os.kill(victims[rank], number)
    return ended(run, time.monotonic(), 600.0)


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def exit_file(folder: Path) -> dict[str, object]:
    (path,) = folder.rglob("exit.json")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def problem(outcome: Outcome, rank: int, limit: float = math.inf) -> str:
    """What is wrong with the end of a run in which `rank` is at fault; "" when nothing is."""
    wrong = []
    if outcome.code != 6:
        wrong.append(f"exit code {outcome.code}")
    if outcome.seconds > limit:
        wrong.append(f"late: {outcome.seconds:.1f} s, and {limit:g} s are allowed")
    last = outcome.words.strip().splitlines()[-1] if outcome.words.strip() else ""
    if f"rank {rank} (process" not in last:
        wrong.append(f"last line: {last!r}")
    return "; ".join(wrong)


def freezes() -> Iterator[tuple[str, Callable[[], str]]]:
    for name, flags in LAYOUTS.items():
        for rank in range(4):

            def fault(flags: list[str] = flags, rank: int = rank) -> str:
                with tempfile.TemporaryDirectory() as folder:
                    outcome = signal_rank(Path(folder), rank, flags, signal.SIGSTOP)
                    wrong = problem(outcome, rank, TIMEOUT + MARGIN)
                    if not wrong and exit_file(Path(folder))["exit_code"] != 6:
                        wrong = "exit.json"
                    return wrong or f"{outcome.seconds:.1f} s"

            yield f"freeze rank {rank}, {name}", fault


LOOPS = {
    "in Python": "while True: pass",
    "holding the GIL": "import ctypes; ctypes.PyDLL(None).sleep(600)",
    "os._exit(0)": "os._exit(0)",
    "abort": "os.abort()",
}


@contextlib.contextmanager
def planted(rank: int, code: str, place: str) -> Iterator[None]:
    """Within it, runs that start have `code` run on one rank.

    place: "step" (after a forward of some step), or "start-up" (before the corpus is read).
    """
    owner, name, after = (flight, "boundary_of", 40) if place == "step" else (loop, "open_data", 0)
    inner, calls = getattr(owner, name), 0

    def faulty(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == str(rank) and calls > after:
            exec(code, {"os": os})
        return inner(*arguments, **keywords)

    setattr(owner, name, faulty)
    try:
        yield
    finally:
        setattr(owner, name, inner)


def loops() -> Iterator[tuple[str, Callable[[], str]]]:
    for kind, code in LOOPS.items():
        for place in ("step", "start-up"):
            for rank in (0, 1):

                def fault(code: str = code, place: str = place, rank: int = rank) -> str:
                    with tempfile.TemporaryDirectory() as folder:
                        outcome = misbehave(Path(folder), rank, code, place)
                        return problem(outcome, rank) or f"{outcome.seconds:.1f} s with the start"

                yield f"rank {rank} {kind} in {place}", fault


def misbehave(folder: Path, rank: int, code: str, place: str, flags: list[str] | None = None) -> Outcome:
    """A run in which `code` runs on one rank; its seconds count from the start."""
    with planted(rank, code, place):
        run = start(command(folder, *(flags or LAYOUTS["shared memory"])))
    return ended(run, time.monotonic(), 600.0)


def kills(count: int = 30, seed: int = 0) -> Iterator[tuple[str, Callable[[], str]]]:
    draw = random.Random(seed)
    for _ in range(count):
        rank, delay = draw.randrange(4), draw.uniform(0.1, 12.0)
        name = draw.choice(sorted(LAYOUTS))

        def fault(rank: int = rank, delay: float = delay, name: str = name) -> str:
            with tempfile.TemporaryDirectory() as folder:
                begun = time.monotonic()
                run = start(command(Path(folder), *LAYOUTS[name]))
                victim = workers_of(run.pid, 4)[rank]
                time.sleep(max(0.0, begun + delay - time.monotonic()))
                os.kill(victim, signal.SIGKILL)
                outcome = ended(run, time.monotonic(), 60.0)
                load = os.getloadavg()[0]
                busy = load > (os.cpu_count() or 1) + len(LAYOUTS)  # the run itself has four workers
                wrong = problem(outcome, rank, 2.0 + MARGIN * busy)
                return f"{wrong or f'{outcome.seconds:.1f} s'} (load {load:.0f})"

        yield f"kill rank {rank} after {delay:.1f} s, {name}", fault


# -- two hosts ---------------------------------------------------------------------------------------------------------------


class Hosts:
    """Two network namespaces with a link between them; use it in a `with` block. Raises OSError where it cannot be."""

    def __init__(self) -> None:
        self.names = [f"loom{os.getpid()}a", f"loom{os.getpid()}b"]

    def __enter__(self) -> Hosts:
        first, second = self.names
        try:
            for name in self.names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("link", "add", "veth0", "netns", first, "type", "veth", "peer", "name", "veth0", "netns", second)
            for at, name in enumerate(self.names, 1):
                ip("-n", name, "address", "add", f"10.77.0.{at}/24", "dev", "veth0")
                ip("-n", name, "link", "set", "veth0", "up")
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def cut(self, host: int) -> None:
        ip("-n", self.names[host], "link", "set", "veth0", "down")

    def start(self, host: int, words: list[str], interface: str = "veth0") -> subprocess.Popen[str]:
        """torchrun with two workers on a host; gloo on an interface, "": on the one of the host's name."""
        torchrun = "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --master-addr 10.77.0.1 --master-port 29511"
        line = ["ip", "netns", "exec", self.names[host], sys.executable, *torchrun.split(), "--node-rank", str(host)]
        variables = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        variables |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        return subprocess.Popen(
            [*line, *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PIPELOOM_SECRET": "for this test", **variables},
        )


def ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise OSError("there is no `ip` command") from None
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def cut_link(folder: Path, host: int, flags: list[str]) -> tuple[Outcome, Outcome]:
    """Both hosts' ends of a run whose link is cut at `host`, after some steps."""
    words = command(folder, *flags)
    with Hosts() as hosts:
        runs = [hosts.start(each, words) for each in range(2)]
        try:
            wait_for_steps(folder, 3, runs[0])
            workers = [children(run.pid) for run in runs]
            hosts.cut(host)
            since = time.monotonic()
            ends: list[dict[int, float]] = [{}, {}]
            while any(run.poll() is None for run in runs) and time.monotonic() < since + 600.0:
                for at in range(2):
                    for number in workers[at] - ends[at].keys():
                        if not running(number):
                            ends[at][number] = time.monotonic() - since
                time.sleep(0.1)
            found = [ended(run, since, 1.0) for run in runs]
            first, second = (replace(found[at], ends=ends[at]) for at in range(2))
            return first, second
        finally:
            for run in runs:
                run.kill()


def words_of_cut(outcomes: tuple[Outcome, Outcome], folder: Path) -> str:
    """What is wrong with the workers' end. torchrun exits with 1, and takes its own time for it."""
    wrong = []
    for host, outcome in enumerate(outcomes):
        other = (2, 3) if host == 0 else (0, 1)
        if not all(f"rank {rank} " in outcome.words and "does not answer" in outcome.words for rank in other):
            wrong.append(f"host {host} names nobody: {outcome.words[-600:]}")
        if len(outcome.ends) < 2 or max(outcome.ends.values()) > TIMEOUT + MARGIN:
            wrong.append(f"host {host}: its workers ended after {outcome.ends} s")
    if not wrong and exit_file(folder)["exit_code"] != 6:
        wrong.append("exit.json")
    return "; ".join(wrong)


def cuts() -> Iterator[tuple[str, Callable[[], str]]]:
    for name in ("gloo", "dp"):
        for host in range(2):

            def fault(name: str = name, host: int = host) -> str:
                with tempfile.TemporaryDirectory() as folder:
                    outcomes = cut_link(Path(folder), host, LAYOUTS[name])
                    seconds = ", ".join(f"{max(outcome.ends.values(), default=0):.1f} s" for outcome in outcomes)
                    return words_of_cut(outcomes, Path(folder)) or seconds

            yield f"link cut at host {host}, {name}", fault


# -- strangers ---------------------------------------------------------------------------------------------------------------

FLOOD = """
import os, socket, sys, time
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
open_ones, tried, taken = [], 0, 0
while True:
    try:
        places = [line.split() for line in open(sys.argv[1])]
    except OSError:
        break
    for kind, where in places:
        for data in (b"", bytes(8), (1).to_bytes(8, "little"), os.urandom(64), b'{"kind": "failed"}\\n'):
            one = socket.socket(socket.AF_INET if kind == "tcp" else socket.AF_UNIX)
            one.settimeout(0.05)
            tried += 1
            try:
                one.connect(("127.0.0.1", int(where)) if kind == "tcp" else where.replace("@", "\\0"))
                taken += one.getsockname() != one.getpeername()  # a port may connect to itself
                one.send(data)
            except OSError:
                pass
            open_ones.append(one)
    for one in open_ones[:-500]:
        one.close()
    del open_ones[:-500]
    time.sleep(0.005)
print(tried, taken)
"""


def listening(processes: set[int]) -> set[tuple[str, str]]:
    """("tcp", port) or ("unix", path) of the sockets that these processes listen on."""
    inodes = set()
    for process in processes:
        for entry in Path(f"/proc/{process}/fd").glob("*"):
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for process in processes:  # each may be in a network of its own, and the other user tries the ports in its own one
        with contextlib.suppress(OSError):
            network = Path(f"/proc/{process}/net")
            for line in "".join((network / name).read_text() for name in ("tcp", "tcp6")).splitlines():
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.add(("tcp", str(int(fields[1].rpartition(":")[2], 16))))
            for line in (network / "unix").read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[3], 16) & 0x10000 and fields[6] in inodes and len(fields) > 7:
                    found.add(("unix", fields[7]))
    return found


def losses(folder: Path) -> list[str]:
    """The losses of a run as they were written, so that equal means bitwise equal."""
    (log,) = folder.rglob("log.jsonl")
    rows = [json.loads(line, parse_float=str) for line in log.read_text().splitlines()]
    return [row["loss"] for row in rows if row["event"] == "step"]


def trained_among_strangers(folder: Path, flags: list[str], user: int = 65534) -> tuple[Outcome, list[str], str]:
    """A short run that another user's process connects to and floods: (its end, its losses, "TRIED TAKEN" connections).

    A run whose sockets were all found too late, as on a busy machine, is repeated, three times at most. Raises OSError where
    this process cannot start one of another user.
    """
    if os.getuid() != 0:
        raise OSError("starting a process of another user takes root")
    for attempt in range(3):
        run = folder / f"attempt-{attempt}"
        run.mkdir()
        outcome, found, flooded = _among_strangers(run, flags, user)
        if int(flooded.split()[0]):
            return outcome, found, flooded
    raise AssertionError("nothing was tried in three runs: no socket was found while it listened")


def _among_strangers(folder: Path, flags: list[str], user: int) -> tuple[Outcome, list[str], str]:
    places = Path(tempfile.mkdtemp())  # where the other user can read
    places.chmod(0o755)
    file = places / "places"
    file.write_text("")
    words = [sys.executable, "-I", "-S", "-c", FLOOD, str(file), str(user)]  # it becomes that user once Python is read
    with contextlib.ExitStack() as alone:  # nobody else listens there, whom the stranger could reach by mistake
        enter = alone.enter_context(private_network()).enter
        flood = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
        begun = time.monotonic()
        run = start([*command(folder, *flags), "--train.steps", str(SHORT_RUN)], enter)
    while run.poll() is None and time.monotonic() < begun + 600.0:
        fresh = listening({run.pid, *children(run.pid)})
        (places / "next").write_text("".join(f"{kind} {where}\n" for kind, where in sorted(fresh)))
        (places / "next").rename(file)
        time.sleep(0.02)
    outcome = ended(run, begun, 10.0)
    file.unlink(missing_ok=True)
    flooded = flood.communicate(timeout=600)[0].strip()
    return outcome, losses(folder) if outcome.code == 0 else [], flooded


def children(process: int) -> set[int]:
    text = ""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            text += path.read_text()
    return {int(number) for number in text.split()}


def undisturbed(folder: Path, flags: list[str]) -> list[str]:
    """The losses of the same run without strangers."""
    outcome = ended(start([*command(folder, *flags), "--train.steps", str(SHORT_RUN)]), time.monotonic(), 600.0)
    assert outcome.code == 0, outcome.words
    return losses(folder)


def strangers(count: int = 10) -> Iterator[tuple[str, Callable[[], str]]]:
    expected: dict[str, list[str]] = {}
    for number in range(count):
        name = sorted(LAYOUTS)[number % len(LAYOUTS)]

        def fault(name: str = name) -> str:
            with tempfile.TemporaryDirectory() as folder:
                if name not in expected:
                    (Path(folder) / "alone").mkdir()
                    expected[name] = undisturbed(Path(folder) / "alone", LAYOUTS[name])
                (Path(folder) / "flooded").mkdir()
                outcome, found, taken = trained_among_strangers(Path(folder) / "flooded", LAYOUTS[name])
                if outcome.code or found != expected[name]:
                    return f"exit code {outcome.code}, equal losses: {found == expected[name]}: {outcome.words[-500:]}"
                return f"{taken.replace(' ', ' connections tried, taken: ')}, {outcome.seconds:.1f} s"

        yield f"strangers flood {name}, run {number}", fault


# -- nothing ------------------------------------------------------------------------------------------------------------------


def alarms(seconds: float = 600.0) -> Iterator[tuple[str, Callable[[], str]]]:
    """A run without a fault and with the default limits, on a machine that is busy: start the load yourself."""

    def quiet() -> str:
        with tempfile.TemporaryDirectory() as folder:
            run = start(command(Path(folder), *LAYOUTS["gloo"], timeout=None))
            wait_for_steps(Path(folder), 1, run)
            begun, loads = time.monotonic(), [os.getloadavg()[0]]
            while time.monotonic() < begun + seconds and run.poll() is None:
                time.sleep(5.0)
                loads.append(os.getloadavg()[0])
            steps = len(losses(Path(folder)))
            run.send_signal(signal.SIGTERM)
            outcome = ended(run, begun, 60.0)
            if outcome.code != 75 or "no progress" in outcome.words:
                return f"exit code {outcome.code}: {outcome.words[-800:]}"
            return f"{steps} steps at load {min(loads):.0f} to {max(loads):.0f}, {outcome.seconds:.1f} s"

    yield "no false alarm", quiet


PARTS = {"freeze": freezes, "loop": loops, "cut": cuts, "kill": kills, "strangers": strangers, "alarm": alarms}


def main(names: list[str]) -> int:
    """Run the parts; return 1 where a fault did not end as it should, else 0."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(__doc__ if "--help" in unknown else f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
        return int("--help" not in unknown)
    bad = count = 0
    for part in names or list(PARTS):
        for words, fault in PARTS[part]():
            try:
                found = fault()
            except AssertionError as error:
                found = f"no run: {error}"
            except OSError as error:
                print(f"skipped  {words}: {error}", flush=True)
                continue
            good = found[:1].isdigit()
            bad, count = bad + (not good), count + 1
            print(f"{'ok' if good else 'WRONG':7}  {words}: {found}", flush=True)
    print(f"{count - bad} of {count} as they should be")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
