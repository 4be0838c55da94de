"""Memory that a step frees is there for the next one, without a page fault for every 4 KiB."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource
from pipeloom.runtime.memory import keep_freed_memory
print(keep_freed_memory())
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def step():  # eight pieces of 4 MiB, written to and freed
    pieces = [libc.malloc(2**22) for _ in range(8)]
    for piece in pieces:
        ctypes.memset(piece, 1, 2**22)
    for piece in reversed(pieces):
        libc.free(piece)

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[str, int]:
    """Whether memory is kept, and the page faults of five steps in a fresh process."""
    usual = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS], env=usual | environment, capture_output=True, text=True, timeout=60, check=True
    )
    kept, count = ran.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap")
def test_freed_memory_is_used_again() -> None:
    kept, count = faults()
    if kept == "False":
        pytest.skip("not glibc")
    assert count < 500
    chosen, usual = faults(MALLOC_TRIM_THRESHOLD_=str(2**17))  # the user's word holds, and shows what it is without
    assert chosen == "False"
    assert usual > 5_000
