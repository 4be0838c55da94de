"""Golden programs: every family on ten committed shapes makes, action by action, what it made when they were written.

`python tests/unit/schedule/families/test_golden.py` writes the table anew: only for a change that is meant to change schedules.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest

from paths import DATA
from pipeloom.errors import UsageError
from pipeloom.schedule import Costs
from pipeloom.schedule.families import FAMILIES, build
from pipeloom.schedule.json_form import to_dict

TABLE = DATA / "golden" / "families.txt"
SHAPES = 180
COSTS = {"unit": None, "measured": Costs(10, 12, 8, 1, held=0.6)}


def digest(name: str, ranks: int, microbatches: int, chunks: int | None, costs: str) -> str:
    """The first 16 digits of the SHA-256 of the programs' cells, or of the sentence that refuses the sizes."""
    try:
        made = to_dict(build(name, ranks, microbatches, chunks, costs=COSTS[costs]))
        text = "\n".join(",".join(program) for program in made["programs"]) + str((made["placement"], made["route_of"]))
    except UsageError:
        text = "refused"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rows() -> list[list[str]]:
    return [line.split() for line in TABLE.read_text().splitlines()] if TABLE.exists() else []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_makes_what_it_made(name: str) -> None:
    mine = [row for row in rows() if row[0] == name]
    for _, ranks, microbatches, chunks, costs, want in mine:
        got = digest(name, int(ranks), int(microbatches), None if chunks == "-" else int(chunks), costs)
        assert got == want, f"{name}: {ranks} ranks, {microbatches} micro-batches, chunks {chunks}, {costs} costs"


def test_the_table_has_ten_shapes_a_family() -> None:
    assert Counter(row[0] for row in rows()) == dict.fromkeys(FAMILIES, SHAPES // len(FAMILIES))


def main() -> None:
    draw = random.Random(15)
    chosen: dict[tuple[str, int, int, int | None, str], None] = {}
    while len(chosen) < SHAPES:
        name = list(FAMILIES)[len(chosen) % len(FAMILIES)]
        ranks, microbatches = draw.choice([2, 3, 4, 4, 5, 6, 8, 8]), draw.randint(1, 34)
        if name in ("dualpipe", "dualpipev", "chimera"):
            ranks, microbatches = draw.choice([2, 4, 6, 8]), 2 * ranks + 2 * draw.randint(0, 9)
        looped = name in ("interleaved", "gis", "looped-bfs", "interleaved-zb", "interleaved-overlap")
        chosen[
            name, ranks, microbatches, draw.choice([None, 2, 3, 4]) if looped else None, draw.choice(list(COSTS))
        ] = None
    lines = [" ".join(["-" if part is None else str(part) for part in shape] + [digest(*shape)]) for shape in chosen]
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
