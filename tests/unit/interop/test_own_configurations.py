"""Configurations of `train` as jobs: everything that they say is written again, predicted, or named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import pipeloom as pl
from pipeloom.cli import app
from pipeloom.cli.gains import gain_of, notes
from pipeloom.config import Config, load_layout
from pipeloom.errors import UsageError
from pipeloom.interop.systems import SYSTEMS, read_job, translated
from pipeloom.plan import load_device
from pipeloom.plan.run import predicted
from pipeloom.schedule.csv_form import to_csv
from pipeloom.schedule.json_form import to_json

RUN = """[model]
num_hidden_layers = 8
hidden_size = 512
num_attention_heads = 8
num_key_value_heads = 4
intermediate_size = 1024
vocab_size = 4096
dropout = 0.1
[parallel]
pp = 2
tp = 2
dp = 2
[schedule]
name = "interleaved"
chunks = 2
microbatches = 4
{schedule}
[schedule.options]
rounds = "tail"
[train]
seq_len = 256
global_batch_size = 16
steps = 70
device = "cuda"
{train}
[optimizer]
lr = 0.001
{optimizer}
[data]
source = "stdlib"
{data}
[log]
every = 7
"""
MORE = {
    "schedule": 'transforms = ["split-cooldown"]', "train": 'dtype = "float32"', "optimizer": 'name = "sgd"',
    "data": 'documents = "pack"\nheld_out = 0.2',
}  # fmt: skip


def text(**more: str) -> str:
    return RUN.format(**dict.fromkeys(MORE, "") | more)


def config_of(path: Path) -> Config:
    return load_layout(path, world_size=0).config


def run(*words: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, words, input=given)


def test_what_a_zero_level_stands_for_is_not_written_besides(tmp_path: Path) -> None:
    path, again = tmp_path / "run.toml", tmp_path / "again.toml"
    path.write_text(text().replace("dp = 2", 'dp = 2\nzero = 3\nvocabulary = "pp"').replace("chunks = 2", "chunks = 1"))
    path.write_text(path.read_text().replace('"interleaved"', '"1f1b"').replace('rounds = "tail"', ""))
    result = run("translate", str(path), "--to", "pipeloom", "--strict")
    assert not result.exit_code, result.exception
    assert "transforms" not in result.stdout
    again.write_text(result.stdout)
    assert config_of(again) == config_of(path)


@pytest.mark.parametrize("recompute", ['"none"', '"norms"', "[0, 2, 4, 6]"])
def test_what_is_written_is_the_same_configuration(recompute: str, tmp_path: Path) -> None:
    path, again = tmp_path / "run.toml", tmp_path / "again.toml"
    path.write_text(text(**MORE).replace("device =", f"recompute = {recompute}\ndevice ="))
    result = run("translate", str(path), "--to", "pipeloom", "--strict")
    assert not result.exit_code, result.exception
    again.write_text(result.stdout)
    assert config_of(again) == config_of(path)


def test_a_file_that_extends_another_is_written_whole(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(text(**MORE))
    path, again = tmp_path / "run.toml", tmp_path / "again.toml"
    path.write_text('extends = "base.toml"\ntrain.steps = 80\n[parallel]\nzero = 3\nunshard_slots = 3\n')
    again.write_text(translated(read_job(str(path)), "pipeloom")[0])
    assert config_of(again) == config_of(path)
    assert "shard" not in again.read_text().replace("unshard_slots", "")
    path.write_text('extends = "tiny"\ntrain.steps = 80\n[parallel]\ndp = 1\n')
    again.write_text(translated(read_job(str(path)), "pipeloom")[0])
    assert config_of(again) == config_of(path)


@pytest.mark.parametrize("system", ["megatron", "torchtitan", "automodel", "torch-csv"])
def test_what_another_system_does_not_get_is_named(system: str) -> None:
    given = text(**MORE).replace("dp = 2", "dp = 2\nsp = true\nzero = 1")
    (sentence,) = [
        each for each in translated(SYSTEMS["pipeloom"].read(given), system)[1] if each.startswith("not written")
    ]
    for key in ("optimizer.name", "train.dtype", "schedule.transforms", "schedule.options", "train.steps", "log.every"):
        assert f"{key} = " in sentence
    assert "model." not in sentence
    assert "parallel." not in sentence
    assert "--strict: " in str(run("translate", "-", "--to", system, "--strict", given=given).exception)


def test_a_changed_run_keeps_the_other_keys_and_names_those_of_its_former_schedule() -> None:
    job = SYSTEMS["pipeloom"].read(text(**MORE))
    written, losses = translated(replace(job, layout=replace(job.layout, schedule="zbv", stages=())), "pipeloom")
    assert "steps = 70\n" in written
    assert 'name = "zbv"' in written
    assert losses == [
        'not written for pipeloom: schedule.options = {"rounds" = "tail"}, schedule.transforms = ["split-cooldown"]'
    ]
    written, losses = translated(replace(job, layout=replace(job.layout, tp=1, dp=4, m=2)), "pipeloom")
    assert losses == []
    assert 'transforms = ["split-cooldown"]' in written


@pytest.mark.parametrize(
    "more", [{}, {"train": 'dtype = "float32"'}, {"optimizer": 'name = "sgd"'}, {"data": 'documents = "pack"'}]
)
def test_a_job_needs_the_bytes_of_its_dry_run(more: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text(**more).replace('rounds = "tail"', ""))
    device = load_device("h100")
    dry = predicted(load_layout(tmp_path / "run.toml", world_size=0), device)
    job = read_job(str(tmp_path / "run.toml"))
    assert gain_of(job, device).now.prediction.peak == dry.peak
    assert notes(job) == []


@pytest.mark.parametrize("part", ["norms", "attention", "mlp"])
def test_recomputing_a_part_takes_its_forward_alone(part: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text(train=f'recompute = "{part}"').replace('rounds = "tail"', ""))
    device = load_device("h100")
    dry = predicted(load_layout(tmp_path / "run.toml", world_size=0), device)
    job = read_job(str(tmp_path / "run.toml"))
    assert dry.step is not None
    assert dry.step.compute == pytest.approx(gain_of(job, device).now.prediction.step.compute, rel=1e-6)
    assert notes(job) == [f"recompute={part} is predicted block by block: a dry run has the bytes of a whole stage's"]


def test_a_preset_is_in_the_prediction_and_uneven_micro_batches_are_named(tmp_path: Path) -> None:
    toml = '[model]\npreset = "llama3-8b"\n[parallel]\npp = 2\ndp = 2\n[schedule]\nname = "1f1b"\nmicrobatches = 8\n'
    (tmp_path / "run.toml").write_text(f'{toml}[train]\nglobal_batch_size = 34\ndtype = "bfloat16"\ndevice = "cuda"\n')
    assert notes(read_job(str(tmp_path / "run.toml"))) == [
        "not understood: micro-batches of 3 and 2 sequences: all are read with 3"
    ]


def test_a_job_is_predicted_in_the_order_of_the_file_that_it_names(tmp_path: Path) -> None:
    """The file is longer than the schedule of the family whose name it has."""
    order = pl.schedules.v_min(2, 4)
    table, device = tmp_path / "zbv.csv", load_device("h100")
    table.write_text(to_csv(order))
    toml = text().replace('name = "interleaved"', f"name = '{table}'").replace('rounds = "tail"', "")
    (tmp_path / "run.toml").write_text(toml)
    dry = predicted(load_layout(tmp_path / "run.toml", world_size=0), device)
    job = read_job(str(tmp_path / "run.toml"))
    gain = gain_of(job, device)
    assert dry.step is not None
    assert gain.now.seconds == pytest.approx(dry.step.total, rel=1e-6)
    assert gain.now.prediction.peak == dry.peak
    assert gain.now.seconds > gain.space.run(replace(job, layout=replace(job.layout, schedule="zbv"))).seconds
    assert translated(job, "torch-csv")[0] == to_csv(order)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("interleaved", {}, ',vocabulary = "pp"'),
        ("1f1b", {"slices": 2}, ""),
        ("chimera", {}, ""),
    ],
)
def test_a_file_of_more_than_a_plain_order_is_predicted_as_its_family(
    family: str, options: dict[str, int], words: str, tmp_path: Path
) -> None:
    order = pl.schedules.build(family, 4, 8, options=options)
    (tmp_path / "order.json").write_text(to_json(order))
    toml = '[model]\npreset = "llama3-8b"\n[train]\nglobal_batch_size = 8\ndtype = "bfloat16"\ndevice = "cuda"\n'
    toml += f"[schedule]\nname = '{tmp_path / 'order.json'}'\n[parallel]\npp = 4\n{words[1:]}\n"
    (tmp_path / "run.toml").write_text(toml)
    job = read_job(str(tmp_path / "run.toml"))
    assert (job.layout.schedule, job.order) == (family, None)
    assert gain_of(job, load_device("h100")).now.seconds > 0


@pytest.mark.parametrize(("sizes", "words"), [((4, 4), "has pp=4, v=2, m=4, and the job pp=2"), (None, "cannot read")])
def test_a_file_that_is_no_order_of_the_job_is_refused(
    sizes: tuple[int, int] | None, words: str, tmp_path: Path
) -> None:
    table = tmp_path / "order.csv"
    if sizes is not None:
        table.write_text(to_csv(pl.schedules.zbv(*sizes)))
    titan = (
        "torchrun --nproc_per_node=2 -m torchtitan.train --module llama3 --config llama3_8b --training.local_batch_size 4 "
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule ZBVZeroBubble "
        f"--parallelism.pipeline_parallel_schedule_csv {table}"
    )
    job = replace(SYSTEMS["torchtitan"].read(titan), system="torchtitan")
    with pytest.raises(UsageError, match=words):
        gain_of(job, load_device("h100"))


def test_what_a_prediction_does_not_count_is_said() -> None:
    job = replace(SYSTEMS["pipeloom"].read(text(**MORE)), system="pipeloom")
    assert notes(job) == [
        'schedule.options = {"rounds" = "tail"} is not in the prediction',
        'schedule.transforms = ["split-cooldown"] is not in the prediction',
    ]


@pytest.mark.parametrize("flag", ["--lr 3e-4 --hidden-dropout 0.1", "--hidden-dropout 0.1 --lr 0.0003"])
def test_dropout_and_rate_of_another_system_are_written(flag: str) -> None:
    flags = (
        "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --vocab-size 4096 --seq-length 256 --swiglu --bf16 "
    )
    flags += "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --attention-dropout 0 "
    flags += "--untie-embeddings-and-output-weights --world-size 1 --global-batch-size 4 "
    written, losses = translated(SYSTEMS["megatron"].read(flags + flag), "pipeloom")
    assert losses == []
    assert "dropout = 0.1\n" in written
    assert "lr = 0.0003\n" in written


def test_rates_of_the_other_systems_are_read() -> None:
    titan = "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b --optimizer.lr 3e-4"
    recipe = (
        "distributed: {strategy: fsdp2, dp_size: 2}\noptimizer: {lr: 1e-5}\nstep_scheduler: {global_batch_size: 2}\n"
    )
    assert SYSTEMS["torchtitan"].read(titan).rate == 3e-4
    assert SYSTEMS["automodel"].read(recipe).rate == 1e-5
