"""`pipeloom schedule`: one schedule, simulated and drawn, or written in another form."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pipeloom.cli.options import CostFlags, FamilyFlags, Sizes, with_options
from pipeloom.cli.output import OutputFlags, figures_and_costs


@with_options()
def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A family, a CSV or JSON file, or module:function.")],
    sizes: Sizes,
    family: FamilyFlags,
    costs: CostFlags,
    output: OutputFlags,
) -> None:
    """Draw a schedule, or write it in another format.

    Costs are those of one stage: one number, or one number per stage, separated by commas.

    pipeloom schedule interleaved --ranks 4 --microbatches 9 --option rounds=tail
    """
    output.require()
    from pipeloom.schedule import simulate

    schedule, values = family.schedule(name, sizes, costs)
    timeline = simulate(schedule, values, overlap_p2p=costs.overlap_p2p)
    output.draw([timeline])
    if output.csv:
        from pipeloom.schedule.csv_form import to_csv

        sys.stdout.write(to_csv(schedule))
    elif output.as_json:
        from pipeloom.schedule.json_form import parts_of_json

        sys.stdout.writelines(parts_of_json(schedule, figures_and_costs(timeline)))
        print()
    else:
        output.print_timeline(timeline)
