"""CSV files that are written for other systems run on torch's own runtime, with stages placed as the words beside them say."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, schedules

from models import batch, blocks, mse, serial, worst
from pipeloom.interop.systems import translated
from pipeloom.plan.job import Job
from pipeloom.plan.layout import parse
from processes import run_ranks

RANKS, MICROBATCHES = 4, 8
LAYOUTS = {
    "linear": "pp=4,m=8",
    "loop": "pp=4,m=8,v=2,schedule=interleaved",
    "vee": "pp=4,m=8,v=2,schedule=zbv",
}


def placed(name: str, rank: int, chunks: int) -> list[int]:
    """The stages of a rank under a schedule's name, as torchtitan's `_get_pp_rank_to_stage_indices_mapping` has them."""
    if schedules.get_schedule_class(name) in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV):
        return [rank, 2 * RANKS - 1 - rank]
    return [rank + chunk * RANKS for chunk in range(chunks)]


def work(rank: int, folder: Path) -> dict[str, Any]:
    reports = {}
    for placement, words in LAYOUTS.items():
        layout = parse(words)
        text, notes = translated(Job(None, layout), "torch-csv")
        names = [match[1] for note in notes if (match := re.search(r"pipeline-parallel-schedule (\w+)", note))]
        held = placed(names[0] if names else "1F1B", rank, layout.v)
        layers = blocks(RANKS * layout.v)
        modules = {stage: layers[stage]() for stage in held}
        ran, seen = list[tuple[int, int]](), Counter[int]()

        def note(stage: int, ran: Any = ran, seen: Any = seen) -> Any:
            def hook(*_: Any) -> None:
                ran.append((stage, seen[stage]))
                seen[stage] += 1

            return hook

        stages = []
        for stage, module in modules.items():
            stages.append(PipelineStage(module, stage, RANKS * layout.v, torch.device("cpu")))
            module.register_forward_pre_hook(note(stage))
        runtime = schedules._PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=mse)
        (path := folder / f"{placement}-{rank}.csv").write_text(text)
        runtime._load_csv(str(path))
        x, y = batch(2 * MICROBATCHES)
        last = RANKS * layout.v - 1 in modules
        runtime.step(*([x] if 0 in modules else []), **({"target": y, "losses": []} if last else {}))
        _, want = serial(layers, x, y, [2] * MICROBATCHES)
        got = {
            f"block{stage}.{key}": p.grad for stage, module in modules.items() for key, p in module.named_parameters()
        }
        cells = re.findall(r"(\d+)F(\d+)", text.splitlines()[rank])
        reports[placement] = {
            # The first call of each stage infers its shapes, before the step.
            "as planned": ran[len(held) :] == [(int(stage), int(microbatch) + 1) for stage, microbatch in cells],
            "worst": worst(got, {key: want[key] for key in got}),
            "parameters": len(got),
        }
    return reports


@pytest.mark.torch_behaviour
def test_files_run_as_planned_with_the_stages_that_their_words_place(tmp_path: Path) -> None:
    for reports in run_ranks(work, RANKS, tmp_path):
        for placement, report in reports.items():
            assert report["as planned"], placement
            assert report["worst"] <= 1e-6, placement
            assert report["parameters"] == (4 if placement == "linear" else 8)
