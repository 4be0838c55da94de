"""Environment variables that affect a run, for the record in its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pipeloom.errors import printable

_STARTED_BY = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_NETWORK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PIPELOOM_ADDRESS", "PIPELOOM_NETWORK", "PIPELOOM_SECRET_FILE")
_LIBRARIES = ("OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_")
_ALLOCATOR = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_FILES = ("XDG_CACHE_HOME", "TMPDIR", "WANDB_MODE", "PIPELOOM_DEBUG")
READ = (*_STARTED_BY, *_NETWORK, *_LIBRARIES, *_ALLOCATOR, *_FILES)
SECRET = ("PIPELOOM_SECRET",)  # listed without their values


def environment_lines(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return comments for the end of a configuration file: the variables that are set, and their values."""
    given = os.environ if environment is None else environment
    lines = [f"#   {name} = {printable(given[name])!r}" for name in READ if name in given]
    lines += [f"#   {name}: set" for name in SECRET if name in given]
    return ["# environment of rank 0:", *lines] if lines else []
