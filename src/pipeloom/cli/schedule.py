"""`pipeloom schedule`: one schedule, simulated and drawn, or written in another form."""

from __future__ import annotations

import json
from functools import partial

from pipeloom.cli.options import (
    CostFlags,
    FamilyFlags,
    LimitFlags,
    SendFlags,
    Sizes,
    SliceFlags,
    argument,
    families,
    family_rows,
    flag,
    with_options,
)
from pipeloom.cli.output import OutputFlags, as_dict, emit, require_one_form, write_csv
from pipeloom.draw import largest_gain, segment_lanes, segment_table
from pipeloom.draw.figures import in_columns
from pipeloom.schedule import simulate
from pipeloom.traces.segment_times import read_segments


@with_options()
def command(
    *,
    name: str | None = argument(
        None,
        "NAME",
        "A family (without a name they are listed, and NAME --help shows its options), a CSV or JSON file, or "
        "module:function.",
        autocompletion=families,
    ),
    sizes: Sizes,
    family: FamilyFlags,
    costs: CostFlags,
    cuts: SliceFlags,
    sending: SendFlags,
    limits: LimitFlags,
    output: OutputFlags,
    torch_csv: bool = flag(
        False,
        None,
        "Print the schedule as torch's runtime executes it (format compute_comms): with sends and receives, without "
        "recomputation and copies.",
        "--torch-csv",
    ),
) -> None:
    """Draw a schedule, or write it in another format.

    Costs are those of one stage: one number, or one number per stage, separated by commas. With --segments the drawing has a
    pair's segments before and after overlapping, of the number that gains most where there are several.

    pipeloom schedule interleaved --ranks 4 --microbatches 9 --option rounds=tail
    """
    output.require()
    require_one_form({"--json": output.as_json, "--csv": output.csv, "--torch-csv": torch_csv})
    if name is None:
        rows = family_rows()
        emit(
            output.as_json,
            lambda: {"families": [f"{name}  {text}" for name, text in rows]},
            lambda: in_columns(rows, ragged=True),
        )
        return
    table, below = [], None
    if costs.segments is not None:
        stages = read_segments(costs.segments)
        table, below = segment_table(stages), partial(segment_lanes, largest_gain(stages))
    schedule, values = family.schedule(name, sizes, costs, cuts, sending)
    timeline = simulate(schedule, values, overlap_p2p=costs.overlap_p2p)
    output.draw([timeline], below, limit=limits.of(values))
    if torch_csv or output.csv:
        write_csv(schedule, messages=torch_csv)
    elif output.as_json:
        more = {"segments": [dict(zip(table[0], row, strict=True)) for row in table[1:]]} if table else {}
        print(json.dumps(as_dict(timeline) | more, allow_nan=False))
    else:
        output.print_timeline(timeline)
        if table:
            print("\nA pair of layers, F of one micro-batch and B of another:")
            print("\n".join(in_columns(table)))
