"""Process-wide settings: what `tune_process` does, that the trainer's workers alone call it, and that the library never does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAP = """
import ctypes, pathlib, resource
from pipeloom.train.tuning import keep_freed_memory, trim_freed_memory
print(keep_freed_memory() if %r else False)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def written(count, size):
    pieces = [libc.malloc(size) for _ in range(count)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    return pieces

def step():
    for piece in reversed(written(8, 2**22)):
        libc.free(piece)

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
pieces = written(64, 2**20)
pages = [libc.malloc(2**12) for _ in range(64)]  # behind them, and kept
for piece in pieces:
    libc.free(piece)
before = resident()
trim_freed_memory()
print(before - resident() > 2**25)
"""


def heap(tuned: bool = True, **environment: str) -> tuple[str, int, str]:
    """Of a fresh process: whether it keeps memory, its page faults in five steps, and whether a trim gives memory back."""
    usual = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    command = [sys.executable, "-c", HEAP % tuned]
    ran = subprocess.run(command, env=usual | environment, capture_output=True, text=True, timeout=600, check=True)
    kept, count, trimmed = ran.stdout.split()
    return kept, int(count), trimmed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap")
def test_freed_memory_is_used_again_and_goes_back_when_it_is_trimmed() -> None:
    """Only where it is kept: the library changes nothing about a process that the trainer has not tuned."""
    kept, count, trimmed = heap()
    if kept == "False":
        pytest.skip("not glibc")
    assert count < 500
    assert trimmed == "True"
    off, usual, trimmed = heap(tuned=False)
    assert (off, trimmed) == ("False", "False")
    assert usual > 5_000
    chosen, usual, _ = heap(MALLOC_TRIM_THRESHOLD_=str(2**17))  # the user's word holds, and shows what it is without
    assert chosen == "False"
    assert usual > 5_000


LIBRARY = """
import ctypes, os, resource, signal, sys, threading
import torch
from torch import nn
from torch.nn import functional as F
before = (list(sys.path), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), torch.get_num_threads(),
          torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled(), F.linear, nn.Linear.forward)
loaded = ctypes.CDLL
def refuse(name, *rest, **more):
    if name is None:
        raise AssertionError("the library reaches for the C library")
    return loaded(name, *rest, **more)
ctypes.CDLL = refuse
import pipeloom as pl
from pipeloom.ops import products
from pipeloom.runtime import LocalPipeline, Pipeline
products.machine_prefers_onednn = lambda: True
calls = []
onednn = products.onednn_operation()
products.onednn_operation = lambda: lambda *arguments: (calls.append(1), onednn(*arguments))[1]
for asked in (False, True):
    if asked:
        assert products.use_onednn_linear()
    layers = [nn.Linear(128, 128) for _ in range(2)]
    for pipeline in (LocalPipeline(layers, pl.schedules.gpipe(2, 2), loss=F.mse_loss),
                     Pipeline([nn.Linear(128, 128)], pl.schedules.gpipe(1, 2), loss=F.mse_loss)):
        pipeline.step(torch.randn(256, 128), torch.randn(256, 128))
    after = (list(sys.path), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), torch.get_num_threads(),
             torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled(), F.linear, nn.Linear.forward)
    print(before == after, bool(calls) == asked, any("forward" in vars(layer) for layer in layers) == asked)
"""


def test_a_pipeline_changes_nothing_about_its_process() -> None:
    """Neither the allocator nor signals, threads, switches or modules; products go through oneDNN where the user asks for it."""
    from pipeloom.ops import products

    if products.onednn_operation() is None:
        pytest.skip("this PyTorch has no oneDNN")
    ran = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["True"] * 6


WORKER = """
import sys
from pipeloom.config import load_layout
from pipeloom.ops import products
from pipeloom.train import tuning
from pipeloom.train.workers import worker
products.machine_prefers_onednn = lambda: True
kept = []
tuning.keep_freed_memory = lambda: kept.append(True)
def body(context):
    print(products.uses_onednn(), bool(kept))
    return 0
layout = load_layout("tiny", {"parallel.pp": 1, "train.device": "cpu", "train.tune_cpu": False})
sys.exit(worker.main(layout, body))
"""


def test_a_worker_tunes_its_process() -> None:
    """Also where a former key says not to."""
    usual = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ran = subprocess.run([sys.executable, "-c", WORKER], env=usual, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["True", "True"]
