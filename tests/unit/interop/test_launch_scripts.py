"""Launch scripts and recipes (`tests/data/interop`): what is read from them, and from 30 changed copies of each."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from pathlib import Path

import pytest

from pipeloom.errors import PipeloomError
from pipeloom.interop.systems import read_job, translated
from pipeloom.interop.torch_runtime import known_model
from pipeloom.plan import load_model
from pipeloom.plan.job import Job
from pipeloom.plan.layout import PlannedLayout

FOLDER = Path(__file__).parents[2] / "data/interop"
SCRIPTS = sorted(FOLDER.iterdir())
# What each says, by hand: axes, chunks, micro-batches, tokens, and other fields.
SAID = {
    "gpt3_175b.sh": "dp=8,tp=8,pp=16,m=192,micro_batch=1,seq=2048,zero=0",
    "deepseek_v3.sh": "dp=64,pp=16,ep=64,etp=1,v=2,m=128,seq=4096,zero=1,recompute=norms+activation+latent_up,"
    "schedule=interleaved-overlap",
    "mixtral_srun.sh": "dp=16,tp=1,pp=4,ep=8,v=2,m=16,seq=4096,zero=1,schedule=interleaved",
    "llama70b_split.sh": "dp=2,tp=4,cp=2,pp=4,m=64,seq=8192,zero=1,recompute=full,grads=bf16",
    "qwen3_moe.sh": "dp=4,tp=2,pp=4,ep=4,etp=1,v=3,m=64,zero=1,group=8,schedule=interleaved",
    "flags.txt": "dp=2,tp=2,pp=2,m=16,micro_batch=2,zero=3,recompute=attention",
    "torchtitan_llama3.sh": "dp=2,tp=8,pp=4,v=2,m=8,micro_batch=2,seq=8192,zero=2,recompute=full,schedule=interleaved",
    "torchtitan_zbv.sh": "dp=2,pp=8,ep=2,v=2,m=32,seq=4096,zero=2,schedule=zbv",
    "torchtitan_2025.toml": "dp=2,pp=4,m=8,seq=8192,zero=2",
    "automodel_llama.yaml": "tp=2,pp=2,v=4,m=8,seq=4096,recompute=full,schedule=interleaved",
    "automodel_moe.yaml": "dp=8,pp=2,ep=8,m=4,seq=2048,zero=2",
    "slurm_sizes.sh": "dp=4,tp=4,pp=4,m=16,micro_batch=2,seq=4096,zero=1,recompute=none",
    "deepspeed_older.sh": "dp=4,tp=2,pp=4,m=16,micro_batch=4,seq=2048,zero=1,recompute=full",
    "megatron_table.yaml": "dp=2,tp=2,pp=2,ep=4,etp=1,v=4,m=8,recompute=norms+activation,schedule=interleaved",
    "torchtitan_variables.sh": "dp=8,pp=2,m=4,seq=8192,zero=2,recompute=full",
    "automodel_older.yaml": "dp=4,tp=2,pp=4,ep=8,v=2,m=4,seq=8192,zero=3,recompute=full,schedule=interleaved",
    "pipeloom.toml": "dp=2,pp=2,v=2,m=4,seq=1024,zero=1,schedule=interleaved",
}
STAGES = {
    "deepseek_v3.sh": (4, *(2,) * 29, 1, 1),
    "llama70b_split.sh": (19, 22, 22, 19),
    "torchtitan_llama3.sh": (11, 11, 10, 10, 10, 10, 10, 10),
    "torchtitan_2025.toml": (9, 9, 8, 8),
    "automodel_llama.yaml": (5, 4, 4, 4, 4, 4, 4, 5),
    "slurm_sizes.sh": (11, 10, 10, 11),
    "megatron_table.yaml": (4, *(2,) * 7),
    "torchtitan_variables.sh": (17, 17),
    "automodel_older.yaml": (7, *(6,) * 6, 7),
}
UNKNOWN = {
    "deepseek_v3.sh": {"$SLURM_JOB_ID", "--moe-router-enable-expert-bias: it is neither written nor predicted"},
    "mixtral_srun.sh": {"$HOSTNAME", "$TOKENIZER_MODEL", "ARGS is set under a condition"},
    "gpt3_175b.sh": {"$1", "$2", "--fp16: bf16 is read"},
    "torchtitan_llama3.sh": {"the arguments of the script, $@"},
    "torchtitan_2025.toml": {"a TOML of before February 2026", "'selective' keeps the outputs of chosen operations"},
    "automodel_llama.yaml": {"the number of devices is not in the text", "gradients of 4 passes"},
    "automodel_moe.yaml": {"gradients of 2 passes"},
    "slurm_sizes.sh": {"--optimizer lion: the state of adam is read"},
    "deepspeed_older.sh": {"$(pwd)", "--deepspeed_config is not known", "alibi: rope is read", "--fp16: bf16 is read"},
    "megatron_table.yaml": {"one replica is assumed"},
    "automodel_older.yaml": {"common is not known", "tokens is not known", "gradients of 4 passes"},
}


def read(path: Path, shape: str | None = None) -> Job:
    return read_job(str(path), None if shape is None else load_model(shape))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_is_read(path: Path) -> None:
    job = read(path)
    for word in SAID[path.name].split(","):
        key, _, value = word.partition("=")
        assert str(getattr(job.layout, key)) == value, key
    assert job.layout.stages == STAGES.get(path.name, job.layout.stages)
    expected = UNKNOWN.get(path.name, set())
    assert len(job.unknown) == len(expected), job.unknown
    assert all(any(part in sentence for sentence in job.unknown) for part in expected), job.unknown


def with_an_unknown_word(path: Path, draw: random.Random) -> str:
    """The text with one more flag or key, at a random place where there may be one."""
    text = path.read_text()
    if path.suffix == ".toml":
        return re.sub(r"(\[parallel(ism)?\]\n)", r"\1invented_word = 7\n", text)
    if path.name == "megatron_table.yaml":
        return text.replace("MODEL_ARGS:\n", "MODEL_ARGS:\n  --invented-word: 7\n")
    if path.suffix == ".yaml":
        return text.replace("\ndistributed:\n", "\ndistributed:\n  invented_word: 7\n")
    flag = "--parallelism.invented_word 7 " if "torchtitan" in text else "--invented-word 7 "
    places = [match.start() for match in re.finditer(r"(?<=[ (\"])--(?=[\w.-]+[ =][\w.]+)(?!.*#)", text)]
    at = draw.choice([place for place in places if "#" not in text[text.rfind("\n", 0, place) : place]])
    return text[:at] + flag + text[at:]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_unknown_word_is_listed(path: Path, tmp_path: Path) -> None:
    before = read(path)
    for seed in range(10):
        (copy := tmp_path / path.name).write_text(with_an_unknown_word(path, random.Random(seed)))
        if path.name == "pipeloom.toml":
            with pytest.raises(PipeloomError, match="invented_word"):
                read(copy)
            continue
        job = read(copy)
        assert any("invented" in sentence for sentence in job.unknown), copy.read_text()
        assert job.layout == before.layout


def mutation(text: str, draw: random.Random) -> str:
    """The text with a character, a word or a line that is left out, put twice, or replaced."""
    pieces = re.split(draw.choice([r"( )", r"(\n)", r"()"]), text)
    at = draw.randrange(len(pieces))
    pieces[at] = draw.choice(
        ["", pieces[at] * 2, "--", "$X", "'", '"', "0", "-1", "1e9", "999999999999", "\\", "(", "{", "é"]
    )
    return "".join(pieces)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_changed_texts_are_read_or_refused_in_words(path: Path, tmp_path: Path) -> None:
    for seed in range(30):
        (copy := tmp_path / path.name).write_text(mutation(path.read_text(), random.Random(seed)))
        with suppress(PipeloomError):
            translated(read(copy, "llama3-8b"), "megatron")


@pytest.mark.parametrize(
    ("old", "new", "system"),
    [
        ("--config llama3_8b", '--config llama3_8b "$@"', "torchtitan"),
        ("--seq-length 4096", "--seq-length 4096 $EXTRA", "megatron"),
    ],
)
def test_words_of_the_caller_behind_a_value_leave_it(old: str, new: str, system: str, tmp_path: Path) -> None:
    titan = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --training.seq_len 4096 --config llama3_8b"
    text = titan if system == "torchtitan" else (FOLDER / "flags.txt").read_text()
    (tmp_path / "run.sh").write_text(text.replace(old, new))
    job = read(tmp_path / "run.sh")
    assert job.layout.seq == 4096
    assert job.shape is not None
    assert any("$" in sentence for sentence in job.unknown)


def test_a_key_of_an_unknown_section_is_listed_and_not_taken(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b "
    (tmp_path / "run.sh").write_text(text + "--paralelism.tensor_parallel_degree 2")
    job = read(tmp_path / "run.sh")
    assert job.layout.tp == 1
    assert job.unknown == ("paralelism.tensor_parallel_degree is not known; did you mean 'parallelism'?",)


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ("", (17, 17)),
        ("--mtp-num-layers 1", (17, 18)),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", (17, 17)),
        ("--decoder-last-pipeline-num-layers 12", (21, 13)),
        ("--num-layers-per-virtual-pipeline-stage 4", (5, 4, 4, 4, 4, 4, 4, 5)),
        ("--pipeline-model-parallel-layout 'Et*10|t*11|t*10|tL'", (11, 11, 10, 2)),
    ],
)
def test_every_way_to_divide_layers_in_megatron_is_read(flags: str, stages: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text((FOLDER / "flags.txt").read_text() + flags)
    job = read(tmp_path / "run.sh")
    assert job.layout.stages == stages
    assert job.unknown == ()


def read_text(text: str, tmp_path: Path) -> Job:
    (tmp_path / "run.sh").write_text(text)
    return read(tmp_path / "run.sh")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--position-embedding-type alibi", "--position-embedding-type alibi: rope is read"),
        ("--optimizer sgd", "--optimizer sgd: the state of adam is read"),
        ("--fp16", "--fp16: bf16 is read"),
        ("--fp8-format e4m3", "--fp8-format e4m3: hybrid is read"),
        ("--rotary-percent 0.5", "--rotary-percent 0.5: 1.0 is read"),
        ("--moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type sinkhorn: aux_loss is read"),
        ("--attention-backend unfused", "--attention-backend unfused: fused attention, which keeps no scores, is read"),
        ("--transformer-impl local", "--transformer-impl local: fused attention, which keeps no scores, is read"),
        ("--moe-flex-dispatcher-backend hybridep", "--moe-flex-dispatcher-backend hybridep: deepep is read"),
        ("--use-rope-scaling", "--use-rope-scaling: it is neither written nor predicted"),
        ("--use-tp-pp-dp-mapping", "--use-tp-pp-dp-mapping: it is neither written nor predicted"),
        ("--no-bias-swiglu-fusion", "--no-bias-swiglu-fusion: it is neither written nor predicted"),
        ("--use-checkpoint-args", "sizes of the checkpoint would replace these"),
        ("--mtp-num-layers $AHEAD", "--mtp-num-layers $AHEAD: its value is not in the text"),
    ],
)
def test_a_value_that_is_read_as_another_is_listed(flags: str, sentence: str, tmp_path: Path) -> None:
    job = read_text((FOLDER / "flags.txt").read_text().strip() + f" {flags}\n", tmp_path)
    assert any(sentence in each for each in job.unknown)


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16",
        "--fp8-format hybrid",
        "--rotary-percent 1.0",
        "--attention-backend flash",
        "--transformer-impl transformer_engine",
    ],
)
def test_a_value_that_is_written_too_is_not_listed(flags: str, tmp_path: Path) -> None:
    assert read_text((FOLDER / "flags.txt").read_text().strip() + f" {flags}\n", tmp_path).unknown == ()


def test_megatron_s_flexible_dispatcher_is_deepep_by_default(tmp_path: Path) -> None:
    flags = (FOLDER / "flags.txt").read_text().strip()
    assert read_text(f"{flags} --moe-token-dispatcher-type flex\n", tmp_path).dispatcher == "deepep"


@pytest.mark.parametrize(
    ("flags", "share"), [("", 0.1), (" --attention-dropout 0.2", 0.2), (" --attention-dropout 0", 0.0)]
)
def test_the_dropout_of_attention_is_kept_or_named(flags: str, share: float, tmp_path: Path) -> None:
    job = read_text(
        re.sub(r" --attention-dropout \S+", "", (FOLDER / "flags.txt").read_text()).strip() + flags, tmp_path
    )
    assert f"--attention-dropout {share} " in translated(job, "megatron")[0]
    lost = f"attention_dropout={share}: automodel has no word for it"
    assert bool(share) == any(each.startswith(lost) for each in translated(job, "automodel")[1])


def test_a_text_that_starts_two_jobs_says_which_is_read(tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node 8 pretrain_gpt.py " + " ".join((FOLDER / "flags.txt").read_text().split())
    job = read_text(f"{line}\n{line} --seq-length 2048\n{line}\n", tmp_path)
    assert job.layout.seq == 2048
    assert job.unknown == ("the text starts 2 jobs: the one with the most flags is read, or the first of them",)
    tokenizer = "python preprocess_data.py --tokenizer-type GPT2BPETokenizer --merge-file a --seq-length 8192"
    assert read_text(f"{tokenizer}\n{line}\n", tmp_path).unknown == ()


def test_one_job_that_is_started_in_two_ways_is_one(tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node 8 pretrain_gpt.py " + " ".join((FOLDER / "flags.txt").read_text().split())
    ways = f'if [ -n "$SLURM_JOB_ID" ]; then srun bash -c "{line}"; else {line}; fi\n'
    assert not [words for words in read_text(ways, tmp_path).unknown if "jobs" in words]


def test_a_length_that_is_not_in_the_text_is_that_of_the_positions(tmp_path: Path) -> None:
    text = (FOLDER / "flags.txt").read_text()
    text = text.replace("--seq-length 4096 --max-position-embeddings 4096", "--max-position-embeddings 1024")
    job = read_text(text, tmp_path)
    assert job.layout.seq == 1024
    assert "--seq-length is not in the text: 1,024 tokens are assumed" in job.unknown


@pytest.mark.parametrize(
    ("flags", "nearest"),
    [
        ("--pipeline-model-parallel-size 3", "nearest: 2 or 4, or a --pipeline-model-parallel-layout"),
        ("--num-layers-per-virtual-pipeline-stage 3", "nearest: 4 or 8 chunks"),
        ("--pipeline-model-parallel-layout 'Et*16|t*8|t*8L'", "3 stages, no multiple of 2 ranks; nearest: 2"),
        ("--world-size 25", "25 devices are no multiple of tp x pp x cp = 4 (arguments.py); nearest: 24 or 28"),
        ("--micro-batch-size -1", "--micro-batch-size -1: it must be a whole number of at least 1"),
        ("--tensor_model_parallel_size 0", "--tensor_model_parallel_size 0: it must be a whole number of at least 1"),
    ],
)
def test_a_division_that_megatron_refuses_names_the_nearest(flags: str, nearest: str, tmp_path: Path) -> None:
    with pytest.raises(PipeloomError, match=re.escape(nearest)):
        read_text(
            (FOLDER / "flags.txt").read_text().strip() + f" --world-size 24 --global-batch-size 96 {flags}", tmp_path
        )


def test_older_names_of_recomputation_are_read(tmp_path: Path) -> None:
    text = (FOLDER / "flags.txt").read_text()
    older = "--activations-checkpoint-method block --activations-checkpoint-num-layers 3"
    layout = read_text(text.replace("--recompute-activations", older), tmp_path).layout
    assert (layout.recompute, layout.recompute_layers) == ("full", 3)


def test_devices_that_are_not_in_the_text_are_as_few_as_the_axes_need(tmp_path: Path) -> None:
    text = re.sub(r"slurm:\n.*\n.*\n", "", (FOLDER / "automodel_older.yaml").read_text())
    job = read_text(text, tmp_path)
    assert job.layout.world == 32  # 4 pipeline ranks of 8 for the experts, of which tp takes 2
    assert any("as few as the axes need are assumed, 32" in each for each in job.unknown)


def test_a_global_batch_that_replicas_do_not_share_is_refused(tmp_path: Path) -> None:
    text = (FOLDER / "torchtitan_variables.sh").read_text()
    text = text.replace(
        "--training.local_batch_size 4", "--training.local_batch_size 4 --training.global_batch_size 48"
    )
    with pytest.raises(
        PipeloomError, match="a global batch of 48 is no multiple of local batch x replicas = 32; nearest: 32"
    ):
        read_text(text, tmp_path)


def test_a_file_that_a_script_of_torchtitan_names_is_not_read_and_named(tmp_path: Path) -> None:
    job = read_text("CONFIG_FILE=a/b.toml NGPU=4 ./run_train.sh --parallelism.tensor_parallel_degree 2", tmp_path)
    assert job.layout.world == 4
    assert any("what the file a/b.toml says is not read" in each for each in job.unknown)


def test_converted_layers_of_torchtitan_are_listed(tmp_path: Path) -> None:
    text = (FOLDER / "torchtitan_2025.toml").read_text().replace("[model]\n", '[model]\nconverters = ["float8"]\n')
    assert "model.converters = ['float8']: converted layers are not priced" in read_text(text, tmp_path).unknown


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("meta-llama/Llama-3.2-1B", None),
    ],
)
def test_tuned_versions_of_a_model_have_its_sizes(name: str, preset: str | None) -> None:
    assert known_model(name) == (None if preset is None else known_model(preset))


@pytest.mark.parametrize(
    ("script", "nearest"),
    [
        (
            "# --num-layers 8\npip install --upgrade torch\nsbatch --nodes=4 pretrain_gpt.sh",
            "sbatch --nodes=4 pretrain_gpt.sh",
        ),
        ("python pretrain_gpt.py model.tensor_model_parallel_size=4", "python pretrain_gpt.py model.tensor"),
        ("docker run --gpus all --ipc=host megatron bash pretrain_gpt.sh", "docker run --gpus all"),
    ],
)
def test_a_script_without_the_system_s_flags_names_the_nearest_command(
    script: str, nearest: str, tmp_path: Path
) -> None:
    with pytest.raises(PipeloomError, match="no command in this text has flags of it") as caught:
        read_text(script, tmp_path)
    assert nearest in str(caught.value)


def test_flags_of_a_container_are_not_those_of_a_launcher(tmp_path: Path) -> None:
    flags = (FOLDER / "flags.txt").read_text().strip().replace("--world-size 8 ", "")
    text = f"docker run --gpus all --shm-size 8g image torchrun --nproc-per-node 8 --odd 1 pretrain_gpt.py {flags}"
    job = read_text(text.replace("\n", " "), tmp_path)
    assert job.layout.world == 8
    assert job.unknown == ("--odd is not known",)


def test_the_command_in_a_script_that_another_one_writes_and_submits_is_found(tmp_path: Path) -> None:
    flags = (FOLDER / "flags.txt").read_text().strip().replace("--world-size 8 ", "").replace("\n", " ")
    text = f"cat > job.sh <<'EOF'\nsrun -l python pretrain_gpt.py {flags} 2>&1 | tee -a log.txt\nEOF\n"
    job = read_text(text + "sbatch -N 2 --ntasks-per-node=8 job.sh", tmp_path)
    assert job.layout.world == 16
    assert job.unknown == ()


def test_a_bracket_that_a_shell_would_refuse_is_text(tmp_path: Path) -> None:
    flags = (FOLDER / "flags.txt").read_text().strip().replace("\n", " ")
    experts = "--num-experts 8 --moe-router-topk 2 --moe-layer-freq ([0]*2+[1]*30)"
    shape = read_text(f"C='python pretrain_gpt.py {experts} {flags}'\neval $C", tmp_path).shape
    assert shape is not None
    assert shape.moe_layer_freq == (0, 0, *(1,) * 30)


def test_the_words_of_a_function_reach_another_host(tmp_path: Path) -> None:
    flags = (FOLDER / "flags.txt").read_text().strip().replace("\n", " ")
    on = 'on() (\n  host=$1; shift\n  ssh "$host" "torchrun --nproc-per-node 8 pretrain_gpt.py $*"\n)'
    job = read_text(f'{on}\nset -- {flags}\non a "$@" &', tmp_path)
    assert (job.layout.m, job.unknown) == (16, ())


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama3-70b", ("--rotary-base 500000.0", "--norm-epsilon 1e-05")),
        ("qwen3-30b-a3b", ("--rotary-base 1000000.0", "--moe-aux-loss-coeff 0.001")),
        ("deepseek-v3", ("--moe-router-score-function sigmoid", "--norm-epsilon 1e-06")),
    ],
)
def test_a_known_model_has_its_own_numbers_in_megatron_s_flags(name: str, flags: tuple[str, ...]) -> None:
    text = translated(Job(load_model(name), PlannedLayout(dp=8)), "megatron")[0]
    assert all(f"{flag} " in text for flag in flags)
    assert "--moe-z-loss-coeff 0.001" not in text


@pytest.mark.parametrize(
    ("name", "softmax_first"),
    [("qwen3-30b-a3b", False), ("qwen3-235b-a22b", False), ("deepseek-v2", True), ("deepseek-v3", False)],
)
def test_the_weights_of_a_known_model_s_experts_sum_to_one_as_its_own_do(name: str, softmax_first: bool) -> None:
    text = translated(Job(load_model(name), PlannedLayout(dp=8)), "megatron")[0]
    assert ("--moe-router-pre-softmax" in text) == softmax_first


@pytest.mark.parametrize(
    ("flags", "size", "sentence"),
    [
        ("--vocab-file $3 --merge-file $4", 50257, "50,257 is assumed"),
        ("--tokenizer-type Llama2Tokenizer", 32000, "32,000 is assumed"),
        ("--tokenizer-model x", 128_256, "128,256 is assumed"),
    ],
)
def test_words_of_a_tokenizer_say_its_vocabulary(flags: str, size: int, sentence: str, tmp_path: Path) -> None:
    text = (FOLDER / "flags.txt").read_text().replace("--vocab-size 32000", flags)
    job = read_text(text.strip() + " --make-vocab-size-divisible-by 1 --tensor-model-parallel-size 1", tmp_path)
    assert job.shape is not None
    assert job.shape.vocab_size == size
    assert any(sentence in each for each in job.unknown)


def test_the_batch_behind_a_ramp_is_read(tmp_path: Path) -> None:
    job = read_text((FOLDER / "flags.txt").read_text().strip() + " --rampup-batch-size 16 16 5859375", tmp_path)
    assert job.layout.sequences == 64
    assert job.unknown == ("--rampup-batch-size: steps behind the ramp are read",)
