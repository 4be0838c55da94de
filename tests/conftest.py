"""Set-up of all tests: their own modules on the path, one thread per process, and a budget of CPU time for each tier.

The folder below `tests/` is the tier: `unit` (no processes), `dist` (processes on loopback), `e2e` (the command, a browser).
`make test` runs `unit` and what is marked `core` in the others, but nothing marked `slow`; `make test-all` runs the rest.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pytest

TESTS = Path(__file__).parent
BUDGETS = {
    "unit": 0.3,
    "dist": 5.0,
    "e2e": 30.0,
}  # CPU seconds of one call, its processes included; what takes more is counted at the end, and fails nothing
WHOLE, SHARE = 8, 3  # cells of a slow matrix that `make test-all` runs whole; of a larger one it runs one in three

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "XDG_CACHE_HOME", os.path.join(tempfile.gettempdir(), f"pipeloom-tests-{os.getuid()}")
)  # of tokens
sys.path[:0] = [str(TESTS), str(TESTS / "support")]
gc.disable()  # until all tests are imported: what that makes stays
_thaw, _thawed = gc.unfreeze, [True]


def _note_thaw() -> None:
    _thaw()
    _thawed.append(True)


gc.unfreeze = _note_thaw  # at the end of a training loop


def tier_of(path: Path) -> str:
    """Return the name of the folder of `tests/` that holds a test: its tier, or `gpu`."""
    return path.relative_to(TESTS).parts[0]


def pytest_configure(config: pytest.Config) -> None:
    for tier in BUDGETS:
        config.addinivalue_line("markers", f"{tier}: of tests/{tier}, set by the folder")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier, and put the slow tiers first: one worker of `pytest -n 2` must not wait for the other.

    Of a slow matrix of more than `WHOLE` cells, those that the checksums of their names choose are left to `make full`.
    """
    cost: dict[Path, float] = defaultdict(float)
    cells = Counter(item.nodeid.partition("[")[0] for item in items if item.get_closest_marker("slow"))
    for item in items:
        if cells[item.nodeid.partition("[")[0]] > WHOLE and crc32(item.nodeid.encode()) % SHARE:
            item.add_marker("full")
        tier = tier_of(item.path)
        if tier in BUDGETS:
            item.add_marker(tier)
            cost[item.path] += BUDGETS[tier]
    items.sort(key=lambda item: (-cost[item.path], str(item.path)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import what torch puts off until a first backward or optimizer: once here, not in a test's call or every forked rank."""
    if "torch" in sys.modules and session.items:
        import torch._dynamo
        import torch.fx.experimental.symbolic_shapes  # noqa: F401
    gc.enable()


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Measure a call."""
    before = _cpu_seconds()
    yield
    item.user_properties.append(("cpu", _cpu_seconds() - before))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the CPU time of each tier, its ten slowest calls, and how many are above its budget."""
    calls: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, seconds in getattr(report, "user_properties", ()):
                if name == "cpu" and report.when == "call":
                    tier = report.nodeid.split("/")[1]
                    calls[tier].append((seconds, report.duration, report.nodeid))
    for tier, rows in calls.items():
        rows.sort(reverse=True)
        total, wall = sum(row[0] for row in rows), sum(row[1] for row in rows)
        terminalreporter.section(f"{tier}: {len(rows)} calls, {total:.0f} s of CPU, {wall:.0f} s of wall time", sep="-")
        for seconds, _, name in rows[:10]:
            terminalreporter.line(f"{seconds:7.2f} s  {name}")
        budget = BUDGETS.get(tier, math.inf)
        if above := sum(row[0] > budget for row in rows):
            terminalreporter.line(f"{above} above the tier's {budget:g} s")


@pytest.fixture(autouse=True)
def _untuned() -> None:
    """Undo what a worker that a test started in this process tuned: more threads wait for each other on busy cores.

    And set aside the million objects that are there, unless they are: a full collection goes through them for a second.
    """
    if _thawed:
        _thawed.clear()
        gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "pipeloom.ops.products" in sys.modules:
        sys.modules["pipeloom.ops.products"].use_onednn_linear(False)


class Ended(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def pipeloom(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Ended]:
    """Runs `pipeloom` with the words of one line, 80 columns wide."""
    from pipeloom.cli import main

    monkeypatch.setenv("COLUMNS", "80")

    def run(line: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(line.split())
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, out, err)

    return run
