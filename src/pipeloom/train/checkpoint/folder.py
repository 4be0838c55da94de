"""A folder of checkpoints: one directory per step, complete when its manifest is there."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.files import sync_directory
from pipeloom.train.checkpoint.manifest import MANIFEST

_STEP = re.compile(r"step-(\d{6,15})")
_REPLACED = re.compile(r"\.(step-\d+)\.replaced")
_LEFTOVER = re.compile(r"\.step-\d+\.(partial|replaced|deleted)")


def step_path(folder: Path, step: int) -> Path:
    """`FOLDER/step-000010`."""
    return folder / f"step-{step:06d}"


def partial_path(folder: Path, step: int) -> Path:
    """Return where a checkpoint is while it is written: hidden, so that nobody takes it for one."""
    return folder / f".step-{step:06d}.partial"


def complete(folder: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every complete checkpoint in `folder`, newest first; none where there is no such folder.

    One that was about to be replaced when its process ended counts where the new one has not got its name.
    """
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            replaced = _REPLACED.fullmatch(path.name)
            match = _STEP.fullmatch(path.name if replaced is None else replaced[1])
            hidden = replaced is not None and (folder / replaced[1]).exists()
            if match is not None and not hidden and (path / MANIFEST).is_file():
                found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def newest_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest complete one of a folder. Raises CheckpointError where there is none."""
    directory = path if (path / MANIFEST).is_file() else next((found for _, found in complete(path)), None)
    if directory is None:
        raise CheckpointError(f"{path} holds no complete checkpoint")
    return directory


def restore_replaced(folder: Path) -> None:
    """Gives a checkpoint its name back that was about to be replaced when its process ended, before the new one had it."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            match = _REPLACED.fullmatch(path.name)
            if match is not None and not (folder / match[1]).exists():
                path.rename(folder / match[1])


def remove_leftovers(folder: Path) -> None:
    """Removes what an interrupted save or deletion has left."""
    restore_replaced(folder)
    for path in list(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def publish(partial: Path, final: Path) -> None:
    """Gives a finished directory its name, in one atomic step unless one of that name is replaced."""
    sync_directory(partial)
    old = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def superseded(found: Sequence[tuple[int, Path]], keep: int, keep_every: int) -> list[Path]:
    """The directories to delete: all but the `keep` newest (0: all stay) and each whose step `keep_every` divides."""
    if keep == 0:
        return []
    return [path for step, path in found[keep:] if not keep_every or step % keep_every]


def prune(folder: Path, step: int, keep: int, keep_every: int) -> None:
    """Deletes superseded checkpoints; each is renamed first, so that no half-deleted one is ever found.

    Args:
        step: of the checkpoint just written. Later ones are left alone and do not count: a run that goes on from an earlier step
            has passed them over, because they are damaged.
    """
    until = [(number, path) for number, path in complete(folder) if number <= step]
    for path in superseded(until, keep, keep_every):
        hidden = path.with_name(f".{path.name}.deleted")
        with contextlib.suppress(OSError):
            path.rename(hidden)
            shutil.rmtree(hidden)
