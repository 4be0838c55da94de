"""torch's store, for text that the ranks of a run exchange at start-up.

A call of torch's store has no deadline if the process that serves it is frozen, so each call here runs on a thread that can
be abandoned. Values carry a MAC with the run's secret, which is in no key and no value, so that values of other writers are
refused.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pipeloom.errors import DistributedError

T = TypeVar("T")
_LOOKS_SECONDS = 0.05


def within(seconds: float, call: Callable[[], T], words: str) -> T:
    """Return the result of `call`, or raise its error. Raises DistributedError with `words` after `seconds`; the call is then
    abandoned.
    """
    box: list[Any] = []
    done = threading.Event()

    def run() -> None:
        try:
            box.append((True, call()))
        except BaseException as error:
            box.append((False, error))
        done.set()

    threading.Thread(target=run, name="pipeloom-store", daemon=True).start()
    if not done.wait(seconds):
        raise DistributedError(f"{words} within {seconds:g} s: the process that serves it is frozen or out of reach")
    good, value = box[0]
    if not good:
        raise value
    return value  # type: ignore[no-any-return]


def _answer(seconds: float, call: Callable[[], T], words: str) -> T:
    """Return the result of a call of torch's store as `within` does. Raises DistributedError if the call fails, too."""
    try:
        return within(seconds, call, words)
    except RuntimeError as error:  # torch's own errors: the process that serves the store has exited
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DistributedError(
            f"{words}: the process that serves it, rank 0 or a launcher, has exited ({first})"
        ) from error


class RunStore:
    """Text under keys, each call within `seconds`.

    Args:
        store: torch's store.
        secret: secret of the run; b"" if there is none.
    """

    def __init__(self, store: Any, secret: bytes, seconds: float) -> None:
        self._store = store
        self._secret = secret
        self._seconds = seconds

    def set(self, key: str, text: str) -> None:
        value = f"{self._mac(key, text)} {text}"
        _answer(self._seconds, lambda: self._store.set(key, value), "the store took no value")

    def get(self, key: str, seconds: float | None = None) -> str:
        """Return the text under `key` as soon as it is set.

        Raises DistributedError if it is not set in time, or was not written by a rank of this run.
        """
        patience = self._seconds if seconds is None else seconds
        give_up = time.monotonic() + patience
        while not _answer(patience, lambda: self._store.check([key]), "the store did not answer"):
            if time.monotonic() > give_up:
                raise DistributedError(f"no value arrived under {key} within {patience:g} s")
            time.sleep(_LOOKS_SECONDS)
        value = _answer(patience, lambda: self._store.get(key).decode(), "the store gave no value")
        mac, _, text = value.partition(" ")
        if not hmac.compare_digest(mac.encode(), self._mac(key, text).encode()):
            raise DistributedError(
                f"{key} in the store was not written by a rank of this run (PIPELOOM_SECRET differs?)"
            )
        return str(text)

    def add(self, key: str, amount: int) -> int:
        return int(_answer(self._seconds, lambda: self._store.add(key, amount), "the store did not count"))

    def _mac(self, key: str, text: str) -> str:
        return hmac.new(self._secret, f"{key}={text}".encode(), hashlib.sha256).hexdigest()


def run_store(seconds: float) -> RunStore:
    """Return the store of torch's default process group."""
    import torch.distributed as dist

    from pipeloom.runtime.health.links import read_secret

    return RunStore(dist.distributed_c10d._get_default_store(), read_secret() or b"", seconds)
