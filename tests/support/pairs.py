"""Every pair of features on one schedule, checked, simulated and compared with one process: the table of docs/memory.md.

python tests/support/pairs.py              verify all of them on up to 4 processes, and print the table
python tests/support/pairs.py --write      and write it into docs/memory.md
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

import pipeloom as pl
from paths import ROOT
from pipeloom.config import Layout, load_layout
from pipeloom.errors import PipeloomError, ScheduleError
from pipeloom.parallel.mesh import Mesh
from pipeloom.schedule import Costs, Schedule
from pipeloom.schedule.json_form import to_json
from pipeloom.schedule.model import parts
from pipeloom.schedule.transforms import half_split, recompute, transformed
from pipeloom.train.report.verify import ComparedStep, compare, pipeline_step, serial_step
from processes import run_ranks

FEATURES = ("R", "R:norms", "(R;B)", "O, L", "UNSHARD", "I, W", "F|B", "two routes", "uneven", "experts", "tp")
"""Actions of the schedule, two of its forms, and four properties of batch, model and layout."""
TOLERANCE = 1e-5
COSTS = Costs(bytes={"saved": 100, "kept": 10, "saved:norms": 20, "params": 50}, host_bandwidth=1000.0)
SAVING = {"R", "R:norms", "(R;B)", "O, L"}
APART = {
    frozenset(pair)
    for pair in (("R", "R:norms"), ("R", "(R;B)"), ("R:norms", "(R;B)"), ("R", "O, L"), ("(R;B)", "O, L"))
}
"""Pairs of which each micro-batch has one: the first kind on micro-batches with even numbers, the second on the others."""
LETTERS = {"R": "R", "R:norms": "R:norms", "(R;B)": "RB RI", "O, L": "O L", "UNSHARD": "UNSHARD", "I, W": "I RI"}
MODEL = {
    "num_hidden_layers": 6,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
BASES: dict[tuple[bool, bool, bool], Callable[[int, int], Schedule]] = {  # by I and W, pairs, two routes
    (False, False, False): lambda ranks, m: pl.schedules.interleaved(ranks, m, 2),
    (True, False, False): lambda ranks, m: pl.schedules.build("interleaved-zb", ranks, m),
    (False, True, False): lambda ranks, m: pl.schedules.build("interleaved-overlap", ranks, m, 3),
    (True, True, False): lambda ranks, m: pl.schedules.build("dualpipev", ranks, m),
    (False, False, True): lambda ranks, m: pl.schedules.build("chimera", ranks, m),
    (True, False, True): lambda ranks, m: half_split(pl.schedules.build("chimera", ranks, m)),
    (False, True, True): lambda ranks, m: pl.schedules.build("dualpipe", ranks, m),
    (True, True, True): lambda ranks, m: half_split(pl.schedules.build("dualpipe", ranks, m)),
}


@dataclass(frozen=True)
class Combination:
    """Some features together.

    Attributes:
        features: names of FEATURES.
        microbatches: of each replica.
        seed: of the stages and micro-batches with each of `SAVING`; 0: all, or in turn where they need some of their own.
    """

    features: tuple[str, ...]
    microbatches: int = 4
    seed: int = 0

    @property
    def ranks(self) -> int:
        """Pipeline ranks: 2, or 1 where tensor-parallel layers are sharded too, so that 4 processes suffice."""
        return 1 if {"UNSHARD", "tp"} <= {*self.features} else 2

    @property
    def replicas(self) -> int:
        """Data-parallel replicas: experts of 2 exchange tokens, so that pairs have something to overlap."""
        both = "tp" not in self.features and not {"F|B", "experts"}.isdisjoint(self.features)
        return 2 if both or "UNSHARD" in self.features else 1

    @property
    def processes(self) -> int:
        return self.ranks * self.replicas * (1 + ("tp" in self.features))

    def schedule(self, together: bool = False) -> Schedule:
        """Return the schedule of its features.

        Args:
            together: each micro-batch has all of them, also those that `APART` gives micro-batches of their own.
        """
        names = {*self.features}
        schedule = BASES["I, W" in names, "F|B" in names, "two routes" in names](self.ranks, self.microbatches)
        # Copies are placed last, for what the others leave.
        saving = sorted(names & SAVING, key=lambda name: ((name == "O, L") != together, FEATURES.index(name)))
        apart = any(pair <= {*saving} for pair in APART) and not together
        random = Random(self.seed)
        owner = {
            (stage, unit): random.randrange(len(saving) + 1) if self.seed else unit % max(len(saving), 1)
            for stage in range(schedule.stages)
            for unit in range(schedule.units)
        }
        for at, name in enumerate(saving):
            chosen = [place for place, number in owner.items() if number == at or not (apart or self.seed)]
            if name == "O, L":
                schedule = transformed(schedule, ["offload"], COSTS)
            else:
                schedule = recompute(schedule, name == "R", chosen, "norms" if name == "R:norms" else "")
        slots = 2 if schedule.has_pairs else 1  # fewer than a rank's stages
        return transformed(schedule, [f"shard={slots}"], COSTS) if "UNSHARD" in names else schedule

    def layout(self, folder: Path) -> Layout:
        """Return the trainer's layout, with the schedule as a file in `folder`."""
        path = folder / "schedule.json"
        path.write_text(to_json(self.schedule()))
        experts = not {"experts", "F|B"}.isdisjoint(self.features)
        tp, dp = 1 + ("tp" in self.features), self.replicas
        rows = (2 * self.microbatches + 2 * ("uneven" in self.features)) * dp
        settings: dict[str, Any] = {f"model.{key}": value for key, value in MODEL.items()}
        settings |= {"model.intermediate_size": 24, "model.num_experts": 4 * experts, "model.num_experts_per_tok": 2}
        settings |= {"parallel.pp": self.ranks, "parallel.dp": dp, "parallel.tp": tp, "parallel.sp": tp > 1}
        settings |= {"parallel.ep": dp if experts else 1, "optimizer.zero1": "UNSHARD" in self.features}
        settings |= {"train.seq_len": 8, "train.global_batch_size": rows, "train.device": "cpu"}
        settings |= {"schedule.name": str(path), "schedule.microbatches": self.microbatches}
        return load_layout("tiny", settings)

    def refusal(self) -> str:
        """Return what `check` says of a micro-batch with two that `APART` separates; empty for others."""
        if frozenset({*self.features} & SAVING) not in APART:
            return ""
        try:
            pl.check(self.schedule(together=True))
        except ScheduleError as error:
            return str(error).partition(": ")[2]
        return ""


def pairs() -> list[Combination]:
    """Return every pair of features, each with itself among them."""
    return [
        Combination((first,) if first == second else (first, second))
        for first, second in combinations_with_replacement(FEATURES, 2)
    ]


def lacking(combination: Combination) -> list[str]:
    """Return the features of a schedule that are not in it."""
    schedule = combination.schedule()
    letters = {action.kind for program in schedule.programs for cell in program for action in parts(cell)}
    there = {name: not letters.isdisjoint(text.split()) for name, text in LETTERS.items()}
    there |= {"F|B": schedule.has_pairs, "two routes": len(schedule.routes) == 2}
    return [name for name in combination.features if not there.get(name, True)]


def errors(rank: int, combinations: Sequence[Combination]) -> list[float | str]:
    """Check, simulate and run each; return on rank 0 the largest difference of its loss and gradients from one process's, or
    the sentence with which it is refused. On as many processes as the largest needs.
    """
    warnings.simplefilter("ignore")  # of gradients that are sharded
    meshes: dict[Any, Mesh | None] = {}
    references: dict[Any, ComparedStep] = {}
    found: list[float | str] = []
    for combination in combinations:
        with TemporaryDirectory() as folder:
            try:
                layout = combination.layout(Path(folder))
                pl.check(layout.schedule)
                assert pl.simulate(layout.schedule, COSTS).makespan > 0
            except PipeloomError as error:
                found.append(str(error))
                continue
        if layout.mesh not in meshes:
            meshes[layout.mesh] = Mesh.of(layout.mesh, range(layout.mesh.world))
        mesh = meshes[layout.mesh]
        if mesh is None:
            continue
        steps = pipeline_step(layout, torch.device("cpu"), mesh)
        if rank == 0:
            key = layout.config.model, layout.microbatch_sizes, layout.mesh.dp
            if key not in references:
                references[key] = serial_step(layout, torch.device("cpu"))
            verdict = compare(steps, references[key], (), TOLERANCE)
            found.append(max(verdict.loss_error, *verdict.errors.values()))
    return found


def table(results: dict[Combination, float | str]) -> Iterator[str]:
    """Yield the lines of the table in Markdown, and the sentences below it."""
    notes: list[str] = []

    def noted(text: str) -> str:
        if text not in notes:
            notes.append(text)
        return f"{notes.index(text) + 1}"

    heads = [name.replace("|", "\\|") for name in FEATURES]
    yield f"| | {' | '.join(heads)} |"
    yield "|---" * (len(FEATURES) + 1) + "|"
    for at, first in enumerate(FEATURES):
        cells = []
        for second in FEATURES[: at + 1]:
            combination = Combination((first,) if first == second else (second, first))
            result, refusal = results[combination], combination.refusal()
            marks = f" ({noted(refusal)})" if refusal else ""
            equal = isinstance(result, float) and result <= TOLERANCE
            cells.append(f"{combination.processes}{marks}" if equal else f"no ({noted(str(result))})")
        yield f"| {heads[at]} | {' | '.join(cells)}{' |' * (len(FEATURES) - at)}"
    yield ""
    for number, note in enumerate(notes, 1):
        yield f"({number}) {note}  "


PAGE = ROOT / "docs" / "memory.md"
BEGIN, END = "<!-- pairs -->\n", "<!-- end of pairs -->\n"


def main(arguments: Sequence[str]) -> int:
    every = pairs()
    found = dict(zip(every, run_ranks(errors, 4, every, timeout=900.0)[0], strict=True))
    lines = "\n".join(table(found)) + "\n"
    print(lines)
    if "--write" in arguments:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(before + BEGIN + lines + END + rest.split(END)[1], encoding="utf-8")
    return int(any(not isinstance(error, float) or error > TOLERANCE for error in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
