"""Environment variables that affect a run: the number of threads of its workers, and the record in its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from pipeloom.cores import usable_cores
from pipeloom.errors import ConfigError, printable
from pipeloom.limits import MOST_THREADS

_STARTED_BY = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_NETWORK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PIPELOOM_ADDRESS", "PIPELOOM_NETWORK", "PIPELOOM_SECRET_FILE")
_THREADS = "OMP_NUM_THREADS"
_LIBRARIES = (_THREADS, "CUBLAS_WORKSPACE_CONFIG", "GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_")
_ALLOCATOR = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_FILES = ("XDG_CACHE_HOME", "TMPDIR", "WANDB_MODE", "PIPELOOM_DEBUG")
READ = (*_STARTED_BY, *_NETWORK, *_LIBRARIES, *_ALLOCATOR, *_FILES)
SECRET = ("PIPELOOM_SECRET",)  # listed without their values


def worker_threads(configured: int | Literal["auto"], local_workers: int) -> int:
    """Return the number of threads of one of this machine's `local_workers` workers: OMP_NUM_THREADS, or `train.threads`.

    Under torchrun a value of 1 counts as unset, because torchrun sets it itself where the user does not. Of a list for nested
    regions, such as `4,2`, the first number counts. Raises ConfigError for a value that is no number of threads.
    """
    text = os.environ.get(_THREADS, "").partition(",")[0].strip()
    if text and not (text == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MOST_THREADS):
            raise ConfigError(
                f"{_THREADS} is {text!r:.200} in the environment; it must be a whole number from 1 to {MOST_THREADS:,}"
            )
        return int(text)
    return max(1, usable_cores() // local_workers) if configured == "auto" else configured


def environment_lines(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return comments for the end of a configuration file: the variables that are set, and their values."""
    given = os.environ if environment is None else environment
    lines = [f"#   {name} = {printable(given[name])!r}" for name in READ if name in given]
    lines += [f"#   {name}: set" for name in SECRET if name in given]
    return ["# environment of rank 0:", *lines] if lines else []
