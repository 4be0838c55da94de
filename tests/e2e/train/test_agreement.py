"""Workers that are about to train different things are refused before the first step, and told what differs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pipeloom
from pipeloom.config import load_layout
from pipeloom.errors import DistributedError
from pipeloom.runtime.health import handshake
from pipeloom.runtime.health.handshake import differences, source_digests, source_facts
from pipeloom.schedule.csv_form import to_csv
from pipeloom.train.workers.context import fingerprint, require_agreement
from processes import free_port, run_ranks

SAME = {"parallel.pp": 2, "train.device": "cpu"}
TEXT = b"the loom weaves thread over thread\n" * 500, b"over thread\n" * 500  # to train on, held out
# key, what it is on rank 1, how rank 1's value is written
OTHERS: list[tuple[str, Any, str]] = [
    ("optimizer.clip_norm", 0.25, "0.25"),
    ("optimizer.betas", [0.5, 0.75], "[0.5, 0.75]"),
    ("train.seed", 12345, "12345"),
    ("train.dtype", "float64", "float64"),
    ("data.sampling", "split-then-shuffle", "split-then-shuffle"),
]


def refusal(layouts: list[Any], rank: int, corpus: tuple[bytes, bytes] | None) -> str:
    data = None
    if corpus is not None:
        data = dict(zip(("data, to train on", "data, held out"), map(fingerprint, corpus), strict=True))
    context: Any = SimpleNamespace(world_size=2, rank=rank, waiting=lambda what, phase: nullcontext())
    try:
        require_agreement(layouts, context, data)
    except DistributedError as error:
        return str(error)
    return ""


def disagreements(rank: int) -> dict[str, str]:
    def layout(**more: Any) -> Any:
        return load_layout("tiny", SAME | {key: value for key, value in more.items() if rank == 1})

    def text(train: bytes = TEXT[0], held_out: bytes = TEXT[1]) -> tuple[bytes, bytes]:
        return (train, held_out) if rank == 1 else TEXT

    found = {key: refusal([layout(**{key: value})], rank, TEXT) for key, value, _ in OTHERS}
    may_differ = {"log.dir": "elsewhere", "train.timeout": 123.0, "data.source": __file__}
    flipped = bytearray(TEXT[0])
    flipped[-1] ^= 1
    found |= {
        "may differ": refusal([layout(**may_differ)], rank, text()),
        "a bit of the data": refusal([layout()], rank, text(train=bytes(flipped))),
        "held out": refusal([layout()], rank, text(held_out=b"short")),
        "several": refusal([layout(), layout(**{"train.seed": 9})], rank, None),
        "two at once": refusal([layout(**{"train.seed": 9, "optimizer.clip_norm": 0.5})], rank, TEXT),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "source_digests", lambda root: {"source of pipeloom/train": "abc" if rank else "def"})
        found["source"] = refusal([layout()], rank, TEXT)
    return found


def test_what_differs_is_named_by_key_rank_and_value() -> None:
    zero, one = run_ranks(disagreements, 2)
    assert zero == one
    for key, _, shown in OTHERS:
        (head, line) = zero[key].splitlines()
        assert head == "the ranks disagree:"
        assert line.startswith(f"  {key}: ")
        assert line.endswith(f"on rank 0, {shown} on rank 1"), line
    assert zero["may differ"] == ""
    assert "data, to train on: 17500 bytes, SHA-256 " in zero["a bit of the data"]
    assert "data, held out: " in zero["held out"]
    assert zero["held out"].endswith(f"{fingerprint(b'short')} on rank 1")
    assert "layout 1, train.seed: " in zero["several"]
    assert len(zero["two at once"].splitlines()) == 3
    assert "source of pipeloom/train: def on rank 0, abc on rank 1" in zero["source"]


def by_other_names(rank: int, folder: Path) -> str:
    keys = {"schedule.name": str(folder / f"{rank}.csv"), "schedule.microbatches": 4, "schedule.chunks": 1}
    return refusal([load_layout("tiny", SAME | keys)], rank, TEXT)


def test_a_schedule_is_the_same_from_a_file_of_another_name(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.csv").write_text(to_csv(pipeloom.schedules.build("1f1b", 2, 4)))
    assert run_ranks(by_other_names, 2, tmp_path) == ["", ""]
    first = {"schedule": "Schedule(0, ranks=2) abc"}
    assert differences([first, {"schedule": "Schedule(1, ranks=2) abc"}]) == []
    (line,) = differences([first, first, {"schedule": "Schedule(0, ranks=2) abd"}])
    assert line == "schedule: Schedule(0, ranks=2) abc on rank 0, Schedule(0, ranks=2) abd on rank 2"


def test_a_long_text_is_sampled_at_fixed_offsets() -> None:
    size = 66 * 2**20
    data = bytearray(size)
    plain = fingerprint(bytes(data))
    for at in (0, size - 1, 2**20 - 1):
        data[at] ^= 1
        assert fingerprint(bytes(data)) != plain
        data[at] ^= 1
    data[2**20] ^= 1  # between two samples, of which 66 MiB leave 32 KiB
    assert fingerprint(bytes(data)) == plain
    assert fingerprint(bytes(data[:-1])) != plain


def test_the_source_of_every_package_counts(tmp_path: Path) -> None:
    source, same, other = Path(pipeloom.__file__).parent, tmp_path / "same", tmp_path / "other"
    for copy in (same, other):
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = source_digests(source)
    assert before == source_digests(same)
    assert before.items() <= source_facts().items()
    with (other / "ops" / "rows.py").open("a") as file:
        file.write("# another line\n")
    after = source_digests(other)
    assert [name for name in before if before[name] != after[name]] == ["source of pipeloom/ops"]


def test_workers_that_differ_do_not_train(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(TEXT[0])
    shutil.copytree(
        Path(pipeloom.__file__).parent, tmp_path / "copy/pipeloom", ignore=shutil.ignore_patterns("__pycache__")
    )
    with (tmp_path / "copy/pipeloom/parallel/mesh.py").open("a") as file:
        file.write("# another line\n")
    flags = [
        "--parallel.pp=2",
        "--train.device=cpu",
        "--train.steps=3",
        f"--log.dir={tmp_path / 'log'}",
        f"--data.source={tmp_path / 'text.txt'}",
    ]
    port = str(free_port())
    workers = []
    for rank in range(2):
        words, environment = list(flags), {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        if rank == 1:
            words.append("--optimizer.clip_norm=0.25")
            environment["PYTHONPATH"] = str(tmp_path / "copy")
        command = [sys.executable, "-m", "pipeloom", "train", "tiny", *words]
        workers.append(
            subprocess.Popen(
                command, env=os.environ | environment | {"MASTER_ADDR": "127.0.0.1"}, stdout=-1, stderr=-1, text=True
            )
        )
    ends = [worker.communicate(timeout=600) for worker in workers]
    for worker, (out, err) in zip(workers, ends, strict=True):
        assert worker.returncode == 6, out + err
        assert err.count("the ranks disagree:") == 1
        assert ", 0.25 on rank 1" in err
        assert "source of pipeloom/parallel: " in err
        assert "step:" not in out
