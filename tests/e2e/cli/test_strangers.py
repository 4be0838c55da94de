"""Another user connects to everything that a run listens on, again and again: the run gives the losses that it gives alone.

What the stranger says is random, or the number of a pair of gloo's, which gloo believes: the first are 0, 1, 2. Where the
workers have a network of their own nothing of it arrives.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom.train.workers.network import Network, private_network

pytestmark = pytest.mark.timeout(600)

FLOOD = """
import os, socket, sys, time
held, count, through = [], 0, 0
while os.getppid() == int(sys.argv[2]):
    for target in open(sys.argv[1]).read().split():
        for words in (b"", os.urandom(4096), *(number.to_bytes(8, "little") for number in range(3))):
            try:
                if target.startswith("@"):
                    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    stranger.setblocking(False)
                    stranger.connect(chr(0) + target[1:])
                else:
                    stranger = socket.create_connection(("127.0.0.1", int(target)), timeout=0.05)
                through += stranger.family == socket.AF_UNIX or stranger.getsockname() != stranger.getpeername()
                held.append(stranger)
                stranger.send(words)
            except OSError:
                pass
            count += 1
    if len(held) > 900:
        for stranger in held[:450]:
            stranger.close()
        del held[:450]
    print(count, through, flush=True)
    time.sleep(0.005)
"""


def listening(processes: list[int]) -> set[str]:
    """The TCP ports and abstract unix sockets that these processes listen on."""
    inodes: set[str] = set()
    for process in processes:
        try:
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                link = os.readlink(f"/proc/{process}/fd/{descriptor}")
                if link.startswith("socket:["):
                    inodes.add(link[8:-1])
        except OSError:
            continue
    found: set[str] = set()
    for process in processes:  # each may be in a network of its own
        try:
            network = Path(f"/proc/{process}/net")
            for line in ((network / "tcp").read_text() + (network / "tcp6").read_text()).splitlines():
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.add(str(int(fields[1].rpartition(":")[2], 16)))
            for line in (network / "unix").read_text().splitlines()[1:]:
                fields = line.split()
                if len(fields) > 7 and fields[6] in inodes and fields[7].startswith("@"):
                    found.add(fields[7])
        except OSError:
            continue
    return found


def train(folder: Path, flags: list[str], targets: Path | None, network: Network) -> list[str]:
    """The losses of a run, as they were written; what it listens on is in `targets` while it runs."""
    words = [sys.executable, "-m", "pipeloom", "train", "tiny", "--train.device", "cpu", "--train.steps", "12"]
    run = subprocess.Popen(
        [*words, "--log.dir", str(folder), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=network.enter,
    )
    seen: set[str] = set()
    while True:
        try:
            _, err = run.communicate(timeout=0.05)
            break
        except subprocess.TimeoutExpired:
            children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            now = listening([run.pid, *map(int, children)])
            seen |= now
            if targets is not None:
                targets.write_text(" ".join(now))
    assert run.returncode == 0, err
    assert not any(name.startswith("@") for name in seen), seen
    (log,) = folder.rglob("log.jsonl")
    rows = [json.loads(line, parse_float=str) for line in log.read_text().splitlines()]
    return [row["loss"] for row in rows if row["event"] == "step"]


@pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--parallel.pp", "2"], id="shared memory", marks=pytest.mark.full),
        pytest.param(["--parallel.pp", "2", "--schedule.transport", "individual"], id="gloo"),
    ],
)
def test_a_flood_of_another_user_changes_no_loss(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the loom weaves thread over thread\n" * 3000)
    flags = [*flags, "--data.source", str(tmp_path / "text.txt")]
    alone = train(tmp_path / "alone", flags, None, Network())
    shared = Path("/tmp") / f"pipeloom-targets-{os.getpid()}"  # where another user can read
    shared.write_text("")
    shared.chmod(0o644)
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/env", "-i"]
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")
    if python is None:
        pytest.skip("no Python that another user may run")
    with contextlib.ExitStack() as stack:
        try:  # a network in which nobody else listens, whom the stranger could reach by mistake
            network = stack.enter_context(private_network())
        except OSError as error:
            pytest.skip(f"no private network here: {error.strerror}")
        flood = subprocess.Popen(
            [*user, python, "-c", FLOOD, str(shared), str(os.getpid())],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=network.enter,
        )
        try:
            flooded = train(tmp_path / "flooded", flags, shared, network)
        finally:
            flood.kill()
            out, err = flood.communicate()
            shared.unlink()
    assert flooded == alone
    assert len(alone) == 12
    tried, through = map(int, out.split()[-2:])
    assert tried > 100, err
    assert through == 0
