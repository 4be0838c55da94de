"""A kind of action that a user adds: N writes down which layers it saw, and takes half a unit of time."""

import pipeloom as pl

SEEN: list[tuple[str, int]] = []


def note(modules: tuple[object, ...], microbatch: int) -> None:
    SEEN.extend((type(module).__name__, microbatch) for module in modules)


NOTE = pl.register_kind(pl.Kind("N", "note", time=0.5, colour=(150.0, 0.1, 0.0)), execute=note)


def noted(ranks: int, microbatches: int) -> pl.Schedule:
    """1F1B with a note behind every forward."""
    base = pl.schedules.one_f_one_b(ranks, microbatches)
    cells = [[[str(cell), str(cell).replace("F", "N")] for cell in program] for program in base.programs]
    programs = [[text for pair in program for text in dict.fromkeys(pair)] for program in cells]
    return pl.Schedule.of(programs, placement=range(ranks), microbatches=microbatches, name="noted")
