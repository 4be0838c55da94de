"""A schedule of one's own: `pipeloom schedule examples/my_schedule.py:eager --ranks 4 --microbatches 8`."""

from pipeloom import Action, Schedule


def eager(ranks: int, microbatches: int, extra: int = 1) -> Schedule:
    """1F1B that starts `extra` more forwards than it must, to hide slow links behind them."""
    programs = []
    for rank in range(ranks):
        warmup = min(microbatches, ranks - rank - 1 + extra)
        program = [Action("F", rank, mb) for mb in range(warmup)]
        for mb in range(microbatches):
            program += [Action("F", rank, mb + warmup)] if mb + warmup < microbatches else []
            program.append(Action("B", rank, mb))
        programs.append(program)
    return Schedule.of(programs, placement=range(ranks), microbatches=microbatches, name="eager")
