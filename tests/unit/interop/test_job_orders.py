"""The order of a job on torch's runtime: what `improve --job --csv` prints, writes and predicts is one object."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pipeloom as pl
from pipeloom.cli import app
from pipeloom.cli.gains import gain_of
from pipeloom.interop.systems import read_job
from pipeloom.plan import RUNTIMES, Planner, load_device
from pipeloom.schedule.files import load
from pipeloom.schedule.transforms import merge_backward
from pipeloom.solver.order import search_order

TITAN = """torchrun --nproc_per_node 32 -m torchtitan.train --module llama3 --config llama3_8b --training.local_batch_size 8
  --training.seq_len 4096 --parallelism.pipeline_parallel_degree 4 --parallelism.data_parallel_shard_degree 8
  --parallelism.pipeline_parallel_schedule 1F1B activation-checkpoint:full""".replace("\n", " ")


def improve(tmp_path: Path, job: str, *flags: str) -> tuple[int, str]:
    (tmp_path / "job.sh").write_text(job)
    table = str(tmp_path / "order.csv")
    words = ["improve", "--job", str(tmp_path / "job.sh"), "--csv", table, "--time-limit", "0.5", *flags]
    result = CliRunner().invoke(app, words)
    return result.exit_code, str(result.exception) if result.exit_code else result.stdout


def test_the_gain_and_the_files_are_of_one_schedule(tmp_path: Path) -> None:
    code, text = improve(tmp_path, TITAN, "--split", "--output", str(tmp_path / "new.sh"), "--json")
    assert code == 0, text
    best = json.loads(text)["best"]
    schedule, job = load(str(tmp_path / "order.csv")), read_job(str(tmp_path / "new.sh"))
    assert job.layout.schedule == str(tmp_path / "order.csv")
    assert "--parallelism.pipeline-parallel-schedule ZBVZeroBubble \\" in (tmp_path / "new.sh").read_text().splitlines()
    assert job.shape is not None
    planner = Planner(job.shape, load_device("h100"), RUNTIMES["torchtitan"])
    predicted = planner.with_schedule(replace(job.layout, schedule="zbv"), schedule)
    assert predicted.step.total == pytest.approx(best["step_seconds"], rel=1e-9)
    assert best["layout"].endswith(",schedule=zbv,cut=balanced (own order)")
    assert predicted.step.total < planner.predict(replace(job.layout, schedule="zbv")).step.total
    assert predicted.peak <= load_device("h100").memory


def test_where_no_order_is_faster_none_is_written(tmp_path: Path) -> None:
    job = TITAN.replace("pipeline_parallel_degree 4", "pipeline_parallel_degree 1").replace("32", "8")
    code, text = improve(tmp_path, job)
    assert code == 0, text
    assert "no order is faster than that of 1f1b" in " ".join(text.split())
    assert not (tmp_path / "order.csv").exists()


def test_a_system_with_orders_of_its_own_is_refused(tmp_path: Path) -> None:
    flags = (Path(__file__).parents[2] / "data/interop/flags.txt").read_text()
    code, text = improve(tmp_path, flags)
    assert code != 0
    assert text.startswith("--csv: megatron runs its own orders alone; nearest: --output FILE")


def test_a_search_with_whole_backwards_splits_none_and_is_faster() -> None:
    costs, start = pl.Costs(forward=1, input_grad=1, weight_grad=1), merge_backward(pl.schedules.zbv(4, 8))
    order = search_order(8, costs, (8,) * 4, start.placement, 0.2, whole=True, start=start)
    assert not order.splits_backward
    assert pl.simulate(order, costs).makespan < pl.simulate(start, costs).makespan
    assert search_order(8, costs, (8,) * 4, start.placement, 0.2).splits_backward


def test_backwards_stay_whole_without_being_asked(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(TITAN)
    gain = gain_of(read_job(str(tmp_path / "job.sh")), load_device("h100"), axes=False)
    as_it_is = replace(gain, ordered=gain.now)
    whole, split = (as_it_is.in_order(tmp_path / "order.csv", 0.5, each).ordered for each in (False, True))
    assert whole is not None
    assert not whole.prediction.schedule.splits_backward
    assert split is not None
    assert split.prediction.schedule.splits_backward
    assert split.seconds < whole.seconds
