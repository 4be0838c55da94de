"""`pipeloom compare --volume`: bytes that a step of one model sends with pipeline and with tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeloom.errors import ConfigError, PipeloomError

if TYPE_CHECKING:
    from pipeloom.config.volume import Volume

_VOLUME_KINDS = ("pipeline", "tensor", "data", "experts")


class LayoutVolume(NamedTuple):
    """Bytes that one layout of the model sends in a step, or the reason why the model cannot have that layout."""

    label: str
    workers: int
    volumes: tuple[Volume, ...] = ()
    refused: str = ""


def of(config: str, ranks: int | None, microbatches: int | None) -> list[LayoutVolume]:
    """Return the volumes of the model of `config` on `ranks` ranks (None: as configured), as a pipeline and tensor-parallel.

    `refused` holds the reason for a layout that the model cannot have. Raises ConfigError if it can have none of them, or if
    `config` cannot be read.
    """
    from pipeloom.config import load, load_layout
    from pipeloom.config.volume import volumes

    config_of_file = load(config)
    count = ranks if ranks is not None else max(config_of_file.parallel.pp, config_of_file.parallel.tp, 2)
    m = microbatches if microbatches is not None else config_of_file.schedule.microbatches
    line = {"parallel.pp": count, "parallel.tp": 1, "parallel.sp": False}
    alone = {"parallel.pp": 1, "parallel.tp": count, "schedule.name": "gpipe"}
    rows = []
    for label, axes in (
        (f"pipeline, {config_of_file.schedule.name}", line),
        ("tensor parallel", alone | {"parallel.sp": False}),
        ("tensor and sequence parallel", alone | {"parallel.sp": True}),
    ):
        try:
            layout = load_layout(config, {"schedule.microbatches": m, **axes})
        except PipeloomError as error:
            rows.append(LayoutVolume(label, count, refused=str(error).splitlines()[0]))
        else:
            rows.append(LayoutVolume(label, layout.world_size, volumes(layout)))
    if all(row.refused for row in rows):
        raise ConfigError([f"{row.label}: {row.refused}" for row in rows])
    return rows


def as_dict(rows: Sequence[LayoutVolume]) -> dict[str, Any]:
    return {
        "layouts": [
            {"label": row.label, "workers": row.workers, "volumes": [asdict(each) for each in row.volumes]}
            for row in rows
            if not row.refused
        ],
        "refused": [{"label": row.label, "reason": row.refused} for row in rows if row.refused],
    }


def table(rows: Sequence[LayoutVolume]) -> str:
    """Return a line for each layout: bytes, and messages or collective operations, by kind, of all workers in a step."""
    from pipeloom.schedule.channels import size_words

    kinds = [kind for kind in _VOLUME_KINDS if any(volume.kind == kind for row in rows for volume in row.volumes)]
    lines = [["layout", "workers", *kinds, "total"]]
    for row in rows:
        if row.refused:
            continue
        by_kind = {volume.kind: f"{size_words(volume.bytes)} in {volume.count:,}" for volume in row.volumes}
        total = size_words(sum(volume.bytes for volume in row.volumes))
        lines.append([row.label, str(row.workers), *(by_kind.get(kind, "-") for kind in kinds), total])
    wide = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    text = [
        "  ".join([f"{line[0]:<{wide[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:], wide[1:], strict=True))])
        for line in lines
    ]
    text += ["", "bytes that all workers send in a step, and the number of messages or collective operations"]
    return "\n".join([*text, *(f"skipped: {row.label}: {row.refused}" for row in rows if row.refused)])
