"""Draws docs/img: every family (p = 4, m = 8, unit costs), one of slices, the README's picture, searched ones.

Run: python docs/draw.py

Families that take costs or options are drawn with their defaults; one that refuses these sizes is named and left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pipeloom as pl
from pipeloom.schedules import FAMILIES, build

IMAGES = Path(__file__).parent / "img"


def main() -> int:
    """Writes the drawings; returns how many families were refused."""
    IMAGES.mkdir(exist_ok=True)
    refused = 0
    for name in FAMILIES:
        try:
            timeline = pl.simulate(build(name, 4, 8))
        except pl.PipeloomError as error:
            print(f"{name}: {error}", file=sys.stderr)
            refused += 1
            continue
        (IMAGES / f"{name}.svg").write_text(pl.draw.svg(timeline, tooltips=False), encoding="utf-8")
    cooled = pl.simulate(build("1f1b", 4, 8, None, {"cooldown": "split"}))
    (IMAGES / "1f1b-cooldown.svg").write_text(pl.draw.svg(cooled, tooltips=False), encoding="utf-8")
    sliced = pl.simulate(pl.schedules.seq1f1b(4, 4, slices=2))
    (IMAGES / "seq1f1b.svg").write_text(pl.draw.svg(sliced, tooltips=False), encoding="utf-8")
    picture = pl.simulate(pl.schedules.interleaved(ranks=4, chunks=2, microbatches=9))
    (IMAGES / "pipeline.svg").write_text(pl.draw.svg(picture, tooltips=False), encoding="utf-8")
    searched = pl.search(4, 8, memory=3, iterations=4000)
    (IMAGES / "search.svg").write_text(pl.draw.svg(searched.timeline, tooltips=False), encoding="utf-8")
    body = (1.0,) * 6
    uneven = pl.Costs((2.0, *body, 3.0), (1.0, *body, 3.0), (1.0, *body, 2.0), p2p=0.1)
    usual = pl.simulate(pl.schedules.interleaved(ranks=4, microbatches=8, chunks=2), uneven)
    fitted = pl.search(4, 8, uneven, 6, chunks=2, iterations=6000).timeline
    (IMAGES / "search-costs.svg").write_text(pl.draw.svg([usual, fitted], tooltips=False), encoding="utf-8")
    (IMAGES / "pairs.svg").write_text(pl.draw.svg(behind_pairs(0.3), tooltips=False), encoding="utf-8")
    return refused


def behind_pairs(share: float) -> list[pl.Timeline]:
    """dualpipe, interleaved-overlap and a searched schedule within its memory; p = 8, m = 32, `share` of F and I all-to-all."""
    full = pl.Costs(1, 1, 1 - share, all_to_all=share)
    overlap = pl.simulate(build("interleaved-overlap", 8, 32, 4), full.resized(1 / 4))
    memory = max(overlap.peak_memory)
    searched = pl.search(8, 32, full.resized(1 / 4), memory, placement="loop", chunks=4, pairs=True)
    return [pl.simulate(build("dualpipe", 8, 32), full), overlap, searched.timeline]


if __name__ == "__main__":
    sys.exit(main())
