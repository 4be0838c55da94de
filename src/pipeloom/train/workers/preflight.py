"""Checks that the launcher makes on this machine before it starts workers: memory, devices, weights, text and output folders."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pipeloom.config import Config, Layout
from pipeloom.config.sections import TrainSection
from pipeloom.errors import CapacityError, ConfigError, printable
from pipeloom.limits import MOST_LOCAL_WORKERS, MOST_THREADS, WORKER_BYTES, expanded, usable_cores
from pipeloom.shapes.hub import is_directory
from pipeloom.shapes.layers import held_parameters, parameter_count
from pipeloom.train.data.sources import BYTES, find, require_no_tokens, tokenizer_name

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


def environment_lines() -> list[str]:
    """Return comments for the end of a configuration file: the variables that are set, and their values."""
    lines = [f"#   {name} = {printable(os.environ[name])!r}" for name in READ if name in os.environ]
    lines += [f"#   {name}: set" for name in SECRET if name in os.environ]
    return ["# environment of rank 0:", *lines] if lines else []


# -- checks ------------------------------------------------------------------------------------------------------------

# About the bytes that a short run writes into its folder: configuration, log, trace and drawing.
_PROBE_BYTES = 2**18
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")


def require_machine(layout: Layout) -> None:
    """Raise ConfigError with every reason why `train` could not run `layout` on this machine."""
    require_room(layout.world_size)
    require_memory(layout)
    _raise_all(
        lambda: require_cuda(layout.config.train, layout.world_size),
        lambda: require_files(layout),
    )


def as_packed(layout: Layout, packed: bool) -> Layout:
    """Return the layout with `data.documents` as "auto" means it for the data."""
    if not packed:
        return layout
    config = layout.config
    data = config.data.model_copy(update={"documents": "pack"})
    return replace(layout, config=config.model_copy(update={"data": data}))


def require_files(layout: Layout) -> Layout:
    """Return the layout `as_packed` for its data.

    Raises ConfigError with every reason why weights or text cannot be read, or output folders not written.
    """
    config, packed = layout.config, list[bool]()
    _raise_all(
        lambda: _require_weights(config),
        lambda: packed.append(_has_packed_text(config, layout.mesh.dp)),
        lambda: _require_folder("log.dir", config.log.dir),
        *([lambda: _require_folder("checkpoint.dir", config.checkpoint.dir)] if config.checkpoint.dir else []),
    )
    return as_packed(layout, packed == [True])


def require_room(workers: int, what: str = "parallel.pp x dp x tp") -> None:
    """Raise CapacityError where this machine cannot start `workers` workers; `what` names the settings that give their number."""
    if workers > MOST_LOCAL_WORKERS:
        raise CapacityError(
            f"{workers:,} workers ({what}) are more than one machine starts; at most {MOST_LOCAL_WORKERS:,}: use "
            "fewer, or torchrun on several machines"
        )
    fit = memory_of_machine() // WORKER_BYTES
    require_bytes(
        workers * WORKER_BYTES,
        f"{workers:,} workers ({what}), before they hold any weights,",
        f"at most {fit:,} workers fit",
    )


def require_memory(layout: Layout) -> None:
    """Raise CapacityError where weights, gradients and AdamW's moments of a run on the CPU exceed the memory of this machine."""
    config = layout.config
    shape = config.model.shape()
    if config.train.device == "cpu" or (config.train.device == "auto" and not Path("/dev/nvidiactl").exists()):
        need = 16 * held_parameters(shape, layout.mesh.replicas, config.parallel.ep)
        what = f"weights, gradients and AdamW's averages of {parameter_count(shape):,} parameters"
        require_bytes(need, what, "use a smaller model, or several machines")


def require_bytes(need: float, what: str, advice: str) -> None:
    """Raise CapacityError where `what` needs more memory than this machine has."""
    if need > (memory := memory_of_machine()):
        raise CapacityError(
            f"{what} take about {need / 1e9:,.0f} GB, and this machine has {memory / 1e9:,.0f} GB; {advice}"
        )


def memory_of_machine() -> int:
    """Return the bytes of memory of this machine, or those that its control group allows if fewer."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max": no limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def require_cuda(train: TrainSection, workers: int) -> None:
    """Call `usable_devices` if `train.device` is "cuda"; otherwise return without importing torch."""
    if train.device == "cuda":
        usable_devices(train, workers)


def usable_devices(train: TrainSection, workers: int) -> list[int]:
    """Return the numbers of the CUDA devices for `workers` workers, those of `train.devices` if given; [] if they run on the CPU.

    With "cuda", workers share devices where there are fewer devices than workers; with "auto" they then run on the CPU.
    Raises ConfigError where `train.device` is "cuda" and there is no device, or not one that `train.devices` names.
    """
    if train.device == "cpu":
        return []
    count = cuda_devices()
    devices = list(train.devices) or list(range(count))
    if train.device == "auto" and (count == 0 or len(devices) < workers):
        return []
    if not count:
        raise ConfigError(
            f'train.device = "{train.device}": this machine has no CUDA device for {workers} worker{"s" * (workers > 1)}; '
            'use "cpu"'
        )
    if max(devices) >= count:
        raise ConfigError(f"train.devices = {devices}: this machine has {count} CUDA devices, numbered from 0")
    return devices


def cuda_devices() -> int:
    """Return the number of CUDA devices of this machine."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _require_weights(config: Config) -> None:
    """Refuse a Hugging Face directory without weights in safetensors."""
    for key in ("source", "weights"):
        name = getattr(config.model, key)
        folder = expanded(name)
        if not name or not is_directory(name) or any((folder / file).is_file() for file in _SAFETENSORS):
            continue
        others = sorted(
            file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".safetensors")
        )
        there = f" (it has {', '.join(others[:3])})" if others else ""
        raise ConfigError(
            f'model.{key} = "{name}": the directory has no weights in safetensors, neither {" nor ".join(_SAFETENSORS)}{there}; '
            "save the model again with save_pretrained"
        )


def _has_packed_text(config: Config, replicas: int) -> bool:
    """Prepare the data, unless it is plain text that is clearly long enough: the workers read that, and this needs no torch.
    Return whether its rows hold several documents."""
    train, data = config.train, config.data
    name = tokenizer_name(data.tokenizer, config.model.source or config.model.weights)
    if name == BYTES:
        require_no_tokens(data.bos, data.eos)
    if name == BYTES and data.batching == "equal" and data.sampling in ("auto", "anywhere"):
        sources = [find(name, data.format) for name in (*data.source, *([data.validation] if data.validation else []))]
        sizes = [sum(file.stat().st_size for file in source.files if file.exists()) for source in sources]
        enough = 2 * train.seq_len / data.held_out
        if min(sizes) > enough and all(source.kind == "text" for source in sources):
            return False
    from pipeloom.train.data.prepare import require_data

    return require_data(config, replicas).packed


def _require_folder(key: str, name: str) -> None:
    """Try to create folders and a file as a run would, below the nearest existing folder; remove them again.

    Raises ConfigError where that fails.
    """
    folder = expanded(name).absolute()
    base = next(
        path for path in (folder, *folder.parents) if os.path.exists(path)
    )  # False, not an error, for a name that is too long
    try:
        with tempfile.TemporaryDirectory(prefix=".pipeloom-", dir=base) as probe:
            run = Path(probe, folder.relative_to(base), "run")
            run.mkdir(parents=True)
            (run / "probe").write_bytes(b"\0" * _PROBE_BYTES)
    except OSError as error:
        raise ConfigError(f'{key} = "{name}": cannot write there: {error.strerror or error}') from None


def _raise_all(*checks: Callable[[], object]) -> None:
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
