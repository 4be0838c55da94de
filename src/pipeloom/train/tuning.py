"""Process-wide settings that make training faster: the C library's heap, the library of matrix products, garbage collection.

The library itself leaves its process as it is; only the trainer's workers change these settings.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from functools import cache

from pipeloom.ops import use_onednn_linear

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
_KEEP = 2**30  # bytes free at the heap's end before the system gets some back
_LARGEST = 2**25  # the largest threshold that glibc accepts; larger allocations always get their own mapping
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def tune_process() -> None:
    """Keep freed memory, and multiply with oneDNN where that is faster, in this process from now on.

    Call it before pipelines are constructed, since their layers are prepared for one library of products, and on every rank,
    since oneDNN's results differ in the last bits.
    """
    keep_freed_memory()
    use_onednn_linear()


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep up to 1 GiB of freed memory in this process. Return whether it does.

    By default it returns the memory of activations and gradients to the system and requests it again a micro-batch later,
    with a page fault for every 4 KiB. Does nothing with another C library, or if the environment configures malloc.
    """
    configured = any(name in os.environ for name in _USERS_OWN) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if not sys.platform.startswith("linux") or configured:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    # setting a threshold also fixes it: by default both grow with the largest mapping freed so far
    return all([library.mallopt(_MMAP_THRESHOLD, _LARGEST), library.mallopt(_TRIM_THRESHOLD, _KEEP)])


def trim_freed_memory() -> None:
    """Return free memory to the system, if `keep_freed_memory` has kept it.

    Allocations that stay leave holes into which later ones do not fit, so the heap would grow for thousands of steps.
    """
    if keep_freed_memory.cache_info().currsize and keep_freed_memory():  # called before, successfully
        ctypes.CDLL(None).malloc_trim(0)


EVERY_STEPS = 100


class GarbageCollection:
    """Full collections after the same steps on every rank, so that all of them pause together.

    A context manager around a training loop, which calls `collect` after its first step and every EVERY_STEPS steps. A worker
    holds about half a million long-lived objects when training starts. To traverse them takes a tenth of a second, at a moment
    of Python's choice, while the other ranks wait; `gc.freeze` excludes them. The automatic collections stay enabled.

    Args:
        trim: called after each collection but the first.
    """

    def __init__(self, trim: Callable[[], None] | None = None) -> None:
        self._frozen = False
        self._of_others = gc.get_freeze_count() > 0
        self._trim = trim

    def __enter__(self) -> GarbageCollection:
        return self

    def __exit__(self, *_: object) -> None:
        if self._frozen and not self._of_others:  # a fork that froze what it inherited must never collect it
            gc.unfreeze()

    def collect(self) -> None:
        """Collect after a step; after the first step, exclude all objects that are left from later collections."""
        gc.collect()
        if not self._frozen:
            gc.freeze()
            self._frozen = True
        elif self._trim is not None:
            self._trim()
