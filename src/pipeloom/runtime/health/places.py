"""Places in the code that communicate with other ranks, and that run no code of the user."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

_COMMUNICATES = (
    "parallel/collectives.py",
    "parallel/data.py",
    "parallel/dispatch.py",
    "parallel/exchange.py",
    "parallel/reduction.py",
    "parallel/shared_memory_sum.py",
    "parallel/dispatch_plan.py",
    "runtime/loss.py",
    "runtime/p2p/shared_memory.py",
    "runtime/tied_weights.py",
    "runtime/p2p/torch_p2p.py",
    "runtime/measured_timeline.py",
    "runtime/batch.py",
    "train/collect.py",
)
_PACKAGE = Path(__file__).parents[2]


def communicates(file: str) -> bool:
    """Return whether code of this file communicates with other ranks, so that an error there means the loss of one."""
    path = Path(file)
    if "torch/distributed/" in path.as_posix():
        return True
    return path.is_relative_to(_PACKAGE) and path.relative_to(_PACKAGE).as_posix() in _COMMUNICATES


def main_thread_communicates() -> bool:
    """Return whether this process's main thread is inside a communication now, by its innermost Python frame."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and communicates(frame.f_code.co_filename)
