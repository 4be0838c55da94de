"""Several processes on one device: messages and sums through host memory and gloo. With a GPU each, the same over NCCL."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gpu_setup import Row, Setup, at_most

import pipeloom as pl
from pipeloom.models import layers, token_loss
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.sharding import shardings_of
from pipeloom.parallel.tensor import TensorParallel
from pipeloom.runtime import Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape

ROOT = Path(__file__).resolve().parents[2]
MICROBATCHES, LENGTH = 4, 16


def _child(
    work: Callable[..., Any],
    rank: int,
    world: int,
    kind: str,
    port: int,
    results: Any,
    errors: str,
    rest: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    with open(f"{errors}/{rank}", "wb") as file:
        os.dup2(file.fileno(), 2)  # the watchdog ends a process without coming back here
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    device = torch.device("cpu")
    backend = "gloo"
    if kind == "cuda":
        own = torch.cuda.device_count() >= world
        device = torch.device("cuda", rank if own else 0)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if own else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=60))
        results.put((rank, True, work(rank, Setup(device), *rest)))
    except BaseException as error:
        results.put((rank, False, "".join(traceback.format_exception(error))))


def run_ranks(work: Callable[..., Any], world: int, setup: Setup, *rest: Any) -> list[tuple[bool, Any]]:
    """(whether it ended well, its result or traceback) of each rank; this process must not have used the GPU."""
    context: Any = multiprocessing.get_context("spawn" if setup.cuda else "fork")
    results: Any = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found: dict[int, tuple[bool, Any]] = {}
    with tempfile.TemporaryDirectory() as errors:
        common = (world, setup.device.type, port, results, errors, rest)
        workers = [context.Process(target=_child, args=(work, rank, *common), daemon=True) for rank in range(world)]
        for worker in workers:
            worker.start()
        end = time.monotonic() + 90
        while len(found) < world and time.monotonic() < end:
            running = any(worker.is_alive() for worker in workers)
            try:
                rank, well, value = results.get(timeout=0.5)
                found[rank] = well, value
            except queue.Empty:
                if not running:
                    break
        for worker in workers:
            worker.join(timeout=2)
            worker.kill()
        for rank in set(range(world)) - set(found):
            found[rank] = False, Path(errors, str(rank)).read_text() or "no answer within 90 seconds"
    return [found[rank] for rank in range(world)]


def pipeline_rank(rank: int, setup: Setup, family: str, transport: Any, pp: int, tp: int) -> float:
    """The largest error of this rank's gradients against the plain loop."""
    mesh = Mesh.of(MeshShape(pp=pp, tp=tp, dp=dist.get_world_size() // pp // tp))
    assert mesh is not None
    shape = setup.shape
    tensor = TensorParallel(mesh.tp, True) if tp > 1 else None
    x, y = setup.tokens(MICROBATCHES * mesh.dp.size, LENGTH, shape.vocab_size)
    want_loss, want = setup.plain(shape, x, y, [1] * len(x))
    built = layers(shape, 1, torch.float32, setup.device, tensor)
    schedule = pl.schedules.build(family, pp, MICROBATCHES)
    options = RuntimeOptions(transport=transport, monitor=False, device=setup.device, seed=1)
    pipeline = Pipeline(built, schedule, loss=token_loss(shape, tensor=tensor), mesh=mesh, options=options)
    part = slice(mesh.place.dp * MICROBATCHES, (mesh.place.dp + 1) * MICROBATCHES)
    loss = float(pipeline.step(x[part], y[part]))
    shards = {
        f"{name}.{inner}": sharding
        for name, m in pipeline.modules.items()
        for inner, sharding in shardings_of(m).items()
    }
    error = abs(loss - want_loss) / abs(want_loss)
    norm = torch.stack([gradient.double().norm() for gradient in want.values()]).norm()
    error = max(error, abs(float(pipeline.grad_norm()) / float(norm) - 1))
    error = max(error, abs(float(pipeline.evaluate(x[part], y[part])) - want_loss) / abs(want_loss))
    assert len(pipeline.timeline().starts) == pp
    for name, parameter in pipeline.named_parameters():
        gradient, whole = parameter.grad, want[name]
        assert gradient is not None
        sharding = shards.get(name)
        if sharding is not None and sharding.over("tp") is not None and tp > 1:
            from pipeloom.parallel.sharding import shard_of

            whole = shard_of(whole, sharding, {"tp": mesh.place.tp})
        error = max(error, ((gradient - whole).abs().max() / whole.abs().max().clamp_min(1e-30)).item())
    pipeline.close()
    return error


def one_device(setup: Setup) -> list[Row]:
    """Pipeline, data and tensor-parallel ranks as processes."""
    cases = [("1f1b", "individual", 2, 1, 2), ("interleaved", "batched", 2, 1, 2), ("zbv", "batched", 2, 1, 2)]
    cases += [("1f1b", "individual", 1, 1, 2), ("1f1b", "individual", 1, 2, 2)]
    rows = []
    for family, transport, pp, tp, world in cases:
        ended = run_ranks(pipeline_rank, world, setup, family, transport, pp, tp)
        name = f"{family}, {transport}: pp {pp}, tp {tp}, dp {world // pp // tp}"
        failed = [value for well, value in ended if not well]
        if failed:
            rows.append(Row(name, str(failed[0]).strip().splitlines()[-1], "ends", False))
        else:
            rows.append(at_most(name, max(value for _, value in ended), 1e-4))
    return rows


def failing_rank(rank: int, setup: Setup, fault: dict[str, Any], seconds: float) -> str:
    """What this rank's step says, and after how long."""
    shape = setup.shape
    x, y = setup.tokens(MICROBATCHES, LENGTH, shape.vocab_size)
    options = RuntimeOptions(
        transport="individual", device=setup.device, seed=1, timeout=seconds, fault=SimpleNamespace(**fault)
    )
    built = layers(shape, 1, torch.float32, setup.device)
    pipeline = Pipeline(built, pl.schedules.one_f_one_b(2, MICROBATCHES), loss=token_loss(shape), options=options)
    try:
        pipeline.step(x, y)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def faults(setup: Setup) -> list[Row]:
    """An exception on one rank stops the other; a lost message is named by the watchdog within its timeout."""
    from pipeloom.schedule.actions import Action

    rows = []
    cases = {
        "an injected exception": (
            {"kind": "raise", "rank": 1, "action": Action("B", 1, 1)},
            "B of stage 1 micro-batch 1",
        ),
        "a lost message": ({"kind": "drop-send", "rank": 0, "number": 1}, "stage 0 micro-batch"),
    }
    for name, (fault, words) in cases.items():
        begun = time.monotonic()
        ended = run_ranks(failing_rank, 2, setup, fault, 10.0)
        texts = [str(value) for _, value in ended]
        told = "no error" not in texts and any(words in text for text in texts)
        rows.append(
            Row(name, f"every rank stopped and named it: {told} ({time.monotonic() - begun:.0f} s)", "named", told)
        )
    return rows


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`pipeloom` with these arguments."""
    return subprocess.run([sys.executable, "-m", "pipeloom", *arguments], capture_output=True, text=True, timeout=140)


def layouts(setup: Setup) -> list[Row]:
    """Layouts of 4 workers on one device against one process, through the command."""
    text = (ROOT / "tests" / "data" / "verify_gpu.toml").read_text()
    with tempfile.TemporaryDirectory() as folder:
        matrix = Path(folder, "matrix.toml")
        matrix.write_text(text.replace('device = "cuda"', f'device = "{setup.device.type}"'))
        ended = command("verify", "--matrix", str(matrix), "--json")
    try:
        answers = json.loads(ended.stdout)["layouts"]
    except (ValueError, KeyError):
        return [Row("pipeloom verify", (ended.stderr or ended.stdout).strip()[-300:], "ends", False)]
    return [at_most(each["layout"], max(each["loss_error"], each["worst_error"]), 1e-5) for each in answers]


def train(setup: Setup) -> list[Row]:
    """A short training of 4 workers on one device: it ends well, and the loss falls."""
    with tempfile.TemporaryDirectory() as folder:
        keys = ("--train.device", setup.device.type, "--train.steps", "20", "--log.dir", folder)
        model = ("--parallel.pp", "4") if setup.cuda else ("tiny", "--parallel.pp", "2")
        ended = command("train", *model, *keys)
    losses = [float(each) for each in re.findall(r"held-out loss.*?([0-9]+\.[0-9]+) nats", ended.stdout)]
    if ended.returncode or len(losses) != 2:
        return [Row("pipeloom train", (ended.stderr or ended.stdout).strip()[-300:], "ends", False)]
    shared = not setup.cuda or torch.cuda.device_count() > 1 or "4 workers share 1 CUDA device" in ended.stderr
    measured = f"held-out loss {losses[0]:.2f} to {losses[1]:.2f} nats; says that a device is shared: {shared}"
    return [Row("pipeloom train, 20 steps", measured, "at least 1 less", shared and losses[1] < losses[0] - 1)]
