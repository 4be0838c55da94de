"""`pipeloom translate`, and `plan --as` and `--layout` in the words of other systems."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipeloom.cli import app

MEGATRON = """\
TP=4
ARGS=(--tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP:-2})
ARGS+=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu --vocab-size 128256)
ARGS+=(--group-query-attention --num-query-groups 8 --disable-bias-linear --untie-embeddings-and-output-weights)
ARGS+=(--normalization RMSNorm --position-embedding-type rope --seq-length 8192 --micro-batch-size 1 --global-batch-size 32)
ARGS+=(--hidden-dropout 0 --norm-epsilon 1e-5 --use-distributed-optimizer --bf16)
torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py "${ARGS[@]}"
"""


def run(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, words, input=text)


def plan(layout: str, *words: str, model: str = "llama3-8b") -> Result:
    return run("plan", "--model", model, "--layout", layout, *words)


def test_experts_of_megatron_have_their_own_tensor_axis() -> None:
    layout = "tp=4,pp=2,dp=2,ep=2,m=32,micro_batch=4,etp=1"
    words = ("--global-batch", "256", "--runtime", "megatron", "--as", "megatron")
    assert "--expert-tensor-parallel-size 1" in plan(layout, *words, model="qwen3-30b-a3b").stdout


def test_the_overlap_of_experts_of_megatron_names_a_dispatcher_that_it_takes() -> None:
    layout = "pp=4,dp=4,ep=4,v=2,m=16,schedule=interleaved-overlap"
    words = plan(layout, "--runtime", "megatron", "--as", "megatron", model="qwen3-30b-a3b").stdout.split()
    assert "--overlap-moe-expert-parallel-comm" in words
    assert words[words.index("--moe-token-dispatcher-type") + 1] == "alltoall"


def test_micro_batches_that_megatron_refuses_are_refused() -> None:
    result = plan("pp=4,v=2,m=9,schedule=interleaved", "--as", "megatron")
    assert result.exit_code
    assert "m=9 leaves 1 micro-batches over groups of 4" in str(result.exception)
    assert "(pipeline_parallel/schedules.py); nearest: m=8" in str(result.exception)


def test_a_csv_says_what_it_drops_and_what_it_needs_beside_it() -> None:
    result = plan("pp=4,v=2,m=8,schedule=zbv,recompute=full,dp=2", "--as", "torch-csv")
    assert result.stdout.startswith("0F0,0F1")
    for lost in ("recompute=full", "zero=1", "stages=5,5,4,4,4,4,4,4"):
        assert f"{lost}: torch-csv has no word for it" in result.stderr
    assert "--parallelism.pipeline-parallel-schedule ZBVZeroBubble" in result.stderr


def test_torchtitan_gets_flags_with_the_layers_of_eight_chunks() -> None:
    words = plan("pp=4,v=8,m=8,schedule=interleaved,dp=2", "--as", "torchtitan").stdout.split()
    start = words.index("--parallelism.module-fqns-per-model-part") + 1
    assert words[start] == "tok_embeddings,layers.0"
    assert words[start + 31] == "norm,lm_head"
    assert words[words.index("--training.local-batch-size") + 1] == "8"


@pytest.mark.parametrize("to", ["megatron", "torchtitan", "automodel", "pipeloom"])
def test_a_script_in_the_words_of_each_system(to: str) -> None:
    result = run("translate", "-", "--to", to, text=MEGATRON)
    assert result.exit_code == 0
    again = run("translate", "-", "--to", "megatron", "--model", "llama3-8b", text=result.stdout)
    words = again.stdout.split()
    for flag, value in (("tensor", "4"), ("pipeline", "2")):
        assert words[words.index(f"--{flag}-model-parallel-size") + 1] == value
    assert words[words.index("--global-batch-size") + 1] == "32"
    assert words[words.index("--seq-length") + 1] == "8192"


def test_strict_refuses_what_is_lost_and_what_is_not_understood(tmp_path: Path) -> None:
    (script := tmp_path / "run.sh").write_text(MEGATRON.replace("--bf16", "--bf16 --turbo-mode 3"))
    assert not run("translate", str(script), "--to", "megatron").exit_code
    result = run("translate", str(script), "--to", "megatron", "--strict")
    assert "--strict: not understood: --turbo-mode is not known" in str(result.exception)
    script.write_text(MEGATRON)
    assert not run("translate", str(script), "--to", "megatron", "--strict").exit_code
    result = run("translate", str(script), "--to", "torchtitan", "--strict")
    assert "zero=1: torchtitan has no word for it" in str(result.exception)


def test_what_is_not_understood_is_said_before_a_refusal_that_it_causes() -> None:
    result = run("translate", "-", "--to", "pipeloom", text=MEGATRON.replace("--swiglu", "--swigluu"))
    assert "cannot describe feed-forward parts without a gate" in str(result.exception)
    assert "not understood: --swigluu is not known; did you mean 'swiglu'?" in result.stderr


def test_a_text_of_no_system_is_refused(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("The loom runs.")
    result = run("translate", str(tmp_path / "poem.txt"), "--to", "megatron")
    assert "it has none of their words" in str(result.exception)
    assert "cannot read" in str(run("translate", str(tmp_path / "none"), "--to", "megatron").exception)


def test_an_older_toml_of_torchtitan_is_read_and_said_to_be_old() -> None:
    toml = '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\npipeline_parallel_degree = 4\nfuture_option = 3\n'
    toml += "[training]\nlocal_batch_size = 8\nseq_len = 4096\n"
    result = run("translate", "-", "--to", "torchtitan", text=toml)
    assert "--parallelism.pipeline-parallel-degree 4" in result.stdout
    assert "this is a TOML of before February 2026" in result.stderr
    assert "parallelism.future_option is not known" in result.stderr


@pytest.mark.parametrize(
    "word", ["etp=1", "grads=bf16", "capacity=1.5", "cut=even", "offload=core_attn", "group=8", "ep_chunks=2"]
)
def test_layout_takes_the_words_and_lists_them(word: str) -> None:
    layout = f"tp=2,pp=4,v=2,m=8,ep=2,dp=2,schedule=interleaved,{word}"
    runtime = "pipeloom" if word == "ep_chunks=2" else "megatron"
    result = plan(layout, "--runtime", runtime, "--json", "--memory", "100", model="qwen3-30b-a3b")
    assert result.exit_code == 0, result.exception
    assert word.partition("=")[0] in run("plan", "--help").stdout


def test_stages_of_single_layers_and_nodes_without_devices() -> None:
    layout = "tp=8,pp=16,v=8,m=32,schedule=interleaved"
    words = ("--runtime", "megatron", "--nodes", "16", "--stages", "E|(t|)*126L", "--json", "--memory", "100")
    assert plan(layout, *words, model="llama3-405b").exit_code == 0


@pytest.mark.parametrize("command", ["schedule", "search"])
@pytest.mark.parametrize(("placement", "word"), [("loop", "Interleaved1F1B"), ("vee", "ZBVZeroBubble"), ("linear", "")])
def test_every_csv_of_a_schedule_names_the_words_that_place_its_stages(command: str, placement: str, word: str) -> None:
    family = {"loop": "interleaved", "vee": "zbv", "linear": "1f1b"}[placement]
    words = (family,) if command == "schedule" else ("--placement", placement, "--time-limit", "0.1")
    result = run(command, *words, "--ranks", "2", "--microbatches", "4", "--csv")
    assert result.stdout.startswith("0F0,")
    assert result.stderr.endswith(f"--parallelism.pipeline-parallel-schedule {word}\n" if word else "")
    assert bool(word) == ("torchtitan places" in result.stderr)


def test_rows_padded_to_a_capacity_are_kept() -> None:
    more = "--num-experts 8 --moe-router-topk 2 --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity"
    more += " --sequence-parallel"
    script = MEGATRON.replace("--bf16", f"--bf16 {more}")
    again = run("translate", "-", "--to", "megatron", text=script)
    assert "--moe-pad-expert-input-to-capacity" in again.stdout.split()
    ours = run("translate", "-", "--to", "pipeloom", text=script).stdout
    assert {"capacity_factor = 1.25", "pad_to_capacity = true"} <= {*ours.splitlines()}
    plain = run("translate", "-", "--to", "pipeloom", text=script.replace("--moe-pad-expert-input-to-capacity", ""))
    assert "pad_to_capacity" not in plain.stdout


def test_experts_without_a_width_are_no_division_by_zero() -> None:
    script = MEGATRON.replace("--bf16", "--bf16 --num-experts 8 --moe-ffn-hidden-size 0")
    result = run("translate", "-", "--to", "megatron", text=script)
    assert not isinstance(result.exception, ZeroDivisionError)
