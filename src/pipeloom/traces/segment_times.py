"""Segment times of layers, as text: numbers, or a JSON file written by hand or from a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeloom.errors import UsageError, reason_of
from pipeloom.foreign import number_in
from pipeloom.limits import MOST_LAYERS, SCHEDULE_BYTES, read_json
from pipeloom.schedule.segments import LayerSegments, PhaseTimes

_COMPUTATIONS, _COMMUNICATIONS = (
    ("attention", "experts"),
    ("dispatch", "combine", "dispatch_backward", "combine_backward", "inside"),
)
_FORM = (
    'an object with "attention" and "experts": [F, I, W], "dispatch" and "combine": T, and optionally "dispatch_backward", '
    '"combine_backward" and "inside": T, "chunks" and "layers": N'
)
_MOST_CHUNKS = 1000


def read_segments(text: str) -> dict[str, tuple[LayerSegments, ...]]:
    """Return label -> the layers of a stage.

    Args:
        text: numbers separated by commas, each the time of every all-to-all of a layer with unit computation; or the path of a
            JSON file with the segments of a layer, and the number of such layers in a stage.

    Raises UsageError for a file that cannot be read, or whose content is something else.
    """
    try:
        numbers = {word.strip(): float(word) for word in text.split(",")}
    except ValueError:
        return {Path(text).stem: _of_file(Path(text))}
    return {word: (LayerSegments(dispatch=time, combine=time),) for word, time in numbers.items()}


def _of_file(path: Path) -> tuple[LayerSegments, ...]:
    try:
        content = read_json(path, SCHEDULE_BYTES, "segment times")
        content = content.get("segments", content)  # of a file of `pipeloom profile`
        if content is None:
            raise UsageError(f"{path} has no segment times: its model has no experts")
        layers: int = number_in(f"{path}: layers", content.get("layers", 1), 1, MOST_LAYERS, whole=True)
        chunks: int = number_in(f"{path}: chunks", content.get("chunks", 1), 1, _MOST_CHUNKS, whole=True)
        return (replace(_layer(content), chunks=chunks),) * layers
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason_of(error)}") from None
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path} is not a file of segment times ({error!r:.100}); it holds {_FORM}") from None


def _layer(content: Mapping[str, Any]) -> LayerSegments:
    if unknown := sorted(content.keys() - {*_COMPUTATIONS, *_COMMUNICATIONS, "chunks", "layers"}):
        raise KeyError(unknown[0])
    times: dict[str, Any] = {name: PhaseTimes(*map(float, content[name])) for name in _COMPUTATIONS}
    times |= {name: float(content[name]) for name in _COMMUNICATIONS if name in content}
    return LayerSegments(**times)
