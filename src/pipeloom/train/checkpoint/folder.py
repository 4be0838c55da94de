"""A folder of checkpoints: one directory per step, complete when its manifest is there."""

from __future__ import annotations

import contextlib
import re
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pipeloom.errors import CheckpointError, UsageError
from pipeloom.limits import CONFIG_BYTES, expanded, read_file
from pipeloom.train.checkpoint.files import sync_directory
from pipeloom.train.checkpoint.manifest import MANIFEST

_STEP = re.compile(r"step-(\d{6,15})")
_REPLACED = re.compile(r"\.(step-\d+)\.replaced")
_LEFTOVER = re.compile(r"\.step-\d+\.(partial|replaced|deleted)")


def step_path(folder: Path, step: int) -> Path:
    """Return the directory of a checkpoint, such as `FOLDER/step-000010`."""
    return folder / f"step-{step:06d}"


def partial_path(folder: Path, step: int) -> Path:
    """Return the directory in which a checkpoint is written: hidden, so that it is not taken for a complete one."""
    return folder / f".step-{step:06d}.partial"


def complete(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of every complete checkpoint in `folder`, newest first; [] if there is no such folder.

    A save that replaces a checkpoint renames the old one before the new one. If the process ended between the two, the old
    checkpoint counts.
    """
    checkpoints = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            replaced = _REPLACED.fullmatch(path.name)
            match = _STEP.fullmatch(path.name if replaced is None else replaced[1])
            hidden = replaced is not None and (folder / replaced[1]).exists()
            if match is not None and not hidden and (path / MANIFEST).is_file():
                checkpoints.append((int(match[1]), path))
    return sorted(checkpoints, reverse=True)


def newest_checkpoint(path: Path) -> Path:
    """Return the checkpoint at `path`, or the newest complete one in a folder.

    In the folder of a run that saved elsewhere it is the newest one in the `checkpoint.dir` of its `config.toml`.

    Raises CheckpointError if there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    elsewhere = _folder_in_config(path)
    for _, newest in complete(path) or (complete(elsewhere) if elsewhere is not None else []):
        return newest
    raise CheckpointError(
        f"{path} holds no complete checkpoint"
        + (f", nor does {elsewhere}, the checkpoint.dir of that run" if elsewhere is not None else "")
    )


def _folder_in_config(run: Path) -> Path | None:
    """Return the `checkpoint.dir` of a run; None: it has none, or `run` is not the folder of a run."""
    try:
        text = read_file(run / "config.toml", CONFIG_BYTES, "a configuration").decode()
        folder = tomllib.loads(text)["checkpoint"]["dir"]
        return expanded(folder).absolute() if folder else None
    except (OSError, UsageError, ValueError, KeyError, TypeError, AttributeError):
        return None


def restore_replaced(folder: Path) -> None:
    """Restore the name of each old checkpoint whose replacement was interrupted before the new one had that name."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            match = _REPLACED.fullmatch(path.name)
            if match is not None and not (folder / match[1]).exists():
                path.rename(folder / match[1])


def remove_leftovers(folder: Path) -> None:
    """Restore interrupted replacements, and remove the directories that an interrupted save or deletion left behind."""
    restore_replaced(folder)
    for path in list(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def publish(partial: Path, final: Path) -> None:
    """Rename a finished directory to its final name: atomically, unless it replaces a checkpoint of that name."""
    sync_directory(partial)
    old = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def superseded(checkpoints: Sequence[tuple[int, Path]], keep: int, keep_every: int) -> list[Path]:
    """Return the directories to delete from `checkpoints` (newest first).

    The `keep` newest stay (0: all of them), and those whose step is a multiple of `keep_every` (0: no others).
    """
    if keep == 0:
        return []
    return [path for step, path in checkpoints[keep:] if not keep_every or step % keep_every]


def prune(folder: Path, step: int, keep: int, keep_every: int) -> None:
    """Delete superseded checkpoints; each is renamed first, so that one deleted in part is not taken for complete.

    Args:
        step: step of the checkpoint just written. Later ones are neither deleted nor counted: a run that continues from an
            earlier step has skipped them, because they are damaged.
    """
    until = [(number, path) for number, path in complete(folder) if number <= step]
    for path in superseded(until, keep, keep_every):
        hidden = path.with_name(f".{path.name}.deleted")
        with contextlib.suppress(OSError):
            path.rename(hidden)
            shutil.rmtree(hidden)
