"""Settings of a whole process that make training on CPUs faster: the C library's heap, and the library of matrix products.

The library changes nothing about the process that it runs in; a worker of the trainer is ours (`[train] tune_cpu`).
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

from pipeloom.ops import use_onednn_linear

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
_KEEP = 2**30  # bytes free at the heap's end before the system gets some back
_LARGEST = 2**25  # the largest threshold that glibc takes; a larger piece is always mapped for itself
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def tune_process() -> None:
    """Keep freed memory, and multiply through oneDNN where that is faster, in this process from now on.

    Call it before pipelines are constructed: their layers are prepared for the products that are chosen then. On every rank
    alike: oneDNN's results differ in the last bits.
    """
    keep_freed_memory()
    use_onednn_linear()


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, in this process, up to 1 GiB. Returns whether it does.

    It gives activations and gradients back to the system when they are freed and asks for them again a micro-batch later, at
    a page fault for every 4 KiB. Does nothing on another C library, or where the environment already says what malloc
    should do.
    """
    configured = any(name in os.environ for name in _USERS_OWN) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if not sys.platform.startswith("linux") or configured:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    # a threshold that is set stays: by default it, and with it the other, grows with the largest piece freed so far
    return all([library.mallopt(_MMAP_THRESHOLD, _LARGEST), library.mallopt(_TRIM_THRESHOLD, _KEEP)])


def trim_freed_memory() -> None:
    """Give the system back what is free now, where `keep_freed_memory` keeps it.

    Between pieces that stay, the heap has holes that later pieces do not fit, and it would grow for thousands of steps.
    """
    if keep_freed_memory.cache_info().currsize and keep_freed_memory():  # called before, and with success
        ctypes.CDLL(None).malloc_trim(0)
