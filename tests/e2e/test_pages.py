"""Every block of README.md and docs/ runs as it is printed: Python, commands and configurations."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipeloom as pl
from commands import FORKING
from documents import blocks, run_console, run_python
from paths import ROOT
from pipeloom.config import load_layout
from pipeloom.models import DecoderShape
from pipeloom.ops.segments import Compute
from pipeloom.parallel import tensor as linear
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import LocalPipeline, Pipeline
from pipeloom.shapes.mesh import MeshShape
from pipeloom.train.data import sources
from pipeloom.train.workers import launch
from processes import run_ranks

PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
RUN = [name for name, path in PAGES.items() if any(block.language and not block.skipped for block in blocks(path))]
BRIEF = [
    ("^pipeloom search", "--time-limit 0.5"),
    ("^pipeloom plan --model llama3-8b --devices", "--fixed tp=4"),
    (" train .*--schedule.name search", "--schedule.options.iterations 50"),
    (" train .*--train.steps 20", "--train.steps 5"),
    (" profile ", "--repeats 2"),
    (" rehearse ", "--steps 2"),
]
CHANGES = [
    (" train (?!.*--train.steps)", "--dry-run"),
    (" train .*--train.steps", "--train.steps 2 --train.seq_len 32 --train.eval_batches 1 --sample.tokens 2"),
    (" verify --parallel", "--train.seq_len 16 --train.global_batch_size 18"),
    ("^pipeloom generate", "--tokens 4"),
    *BRIEF,
]
"""(pattern, words added to the commands in which it is found), so that they end soon: a training command without a number of
steps is checked by a dry run."""
SHORTER = [
    (" train (?!.*--train.steps)", "--train.steps 4"),
    (" train ", "--train.eval_batches 1 --sample.tokens 2"),
    *BRIEF,
]
"""The same for the README, whose runs are of a few milliseconds a step."""
PRINTED = {
    "other_systems.md": [
        "training 70.6 B parameters: interleaved, rounds balanced, 4 ranks of 4",
        "training 8.03 B parameters: interleaved, rounds balanced, 4 ranks of 2",
        "step on h100: ",
        "one change away, as megatron takes it:",
        "change, which saves ",
        "  + --pipeline-model-parallel-layout 'Et",
    ],
    "from_papers.md": [
        "gpipe                2        27        3.5000 ",
        "gpipe                8        45        0.8750 ",
        "gpipe           21  0.7500  0.4286  0.4286      21     24   1x     4     4\n",
        "1f1b            21  0.7500  0.4286  0.4286      21     24   1x     4   2.5\n",
        "rank 0  F F F F F F ··B── F B── F B── F B── F B── ··B── ··B── B── B── B──\n"
        "        0 1 2 0 1 2   0   3 1   4 2   3 0   4 1     2     3   4   3   4\n",
        " E 0-1 | 8-9\n",
        "36 figures equal to four decimals, 0 better, 0 worse",
        "   0    36    12        0       8          4  11 = 5.5 full-rank\n",
        "   0    36    11        0       8          3  12 = 6 full-rank\n",
        "   0    36     6        0       2          4  12 = 6 full-rank\n",
        "rounds=paper        24  0.3333",
        "rounds=tail         21  0.1667",
        "v = 9 for p = 4, v = 7 for p = 8, v = 6.429 for p = 16",
        "GPT-175B       8   8             dualpipe       3       1            9     2 x",
        "interleaved-overlap   2.625   0.875        8.875     1 x",
        "\n1.5                          12           7                   6.5\n",
        "8 of 8 experts in this process",
        "\n0       15.0 ",
        "\n0        7.9 ",
        "\n1        7.1 ",
        "\n0        4.2 ",
        "\n1        3.7 ",
        "\n3        3.4 ",
        "\n0        2.6 ",
        "\n1        2.0 ",
        "no layout of llama3-70b fits into 79.1 GiB on 8 devices; the smallest needs 152.0 GiB",
        "  576 KiB in 90 ",
        "  720 KiB in 225 ",
        "sends 128 values per token as columns with gathered output, 160 as\n    rows",
    ],
    "README.md": ["63.0 0.16666666666666666 (12, 10, 8, 6)", "step 19 loss"],
    "search.md": ["(5, 5, 5, 2) 130.0 130.0"],
    "tutorial.md": ["eager:extra=2", "prediction: costs of", "the schedule deadlocks; the shortest cycle"],
}
MY_TOML = """
extends = "tiny"
model.num_hidden_layers = 8
schedule.name = "1f1b"
data.source = "code/weave.py"
"""
MY_EXPERTS = """
from pipeloom.models.gate import TopKGate
from pipeloom.parallel.expert import Experts

class SquaredExperts(Experts): pass
class NeighbourRouter(TopKGate): pass
"""


SHAPE = DecoderShape(2, 32, 4, 2, intermediate_size=64, vocab_size=16)
TOKENS = torch.randint(16, (8, 16), generator=torch.Generator().manual_seed(0))
BATCH = {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1), "mask": torch.ones_like(TOKENS)}


def own_model() -> dict[str, Any]:
    names = runpy.run_path(str(ROOT / "examples/own_model.py"))
    (words, topics), targets, mask = names["batch"](0)
    batch = dict(words=words, topics=topics, targets=targets, mask=mask, example_batch=torch.rand(4, 8))
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    parts = dict(model=model, layers=names["LAYERS"], tied=names["TIED"], BlockWithHead=names["EarlyHead"])
    return names | batch | parts | {"schedule": pl.schedules.zbv(ranks=2, microbatches=4)}


def checkpoints() -> dict[str, Any]:
    pipeline = Pipeline([nn.Linear(4, 4) for _ in range(2)], pl.schedules.gpipe(2, 2), loss=nn.functional.mse_loss)
    return {"pipeline": pipeline, "adam": torch.optim.Adam(pipeline.parameters()), "step": 3, "seen": 7}


def experts() -> dict[str, Any]:
    segmented = dict(nn=nn, Compute=Compute, Dispatch=object, Combine=object)
    return {"shape": SHAPE, "seed": 0, "spread": None} | segmented | runpy.run_path("my_experts.py")


def papers() -> dict[str, Any]:
    return {
        "model": nn.Linear(8, 1),
        "loss": nn.functional.mse_loss,
        "batches": [(torch.rand(3, 8), torch.rand(3, 1))],
        "dist": dist,
    }


def parallel() -> dict[str, Any]:
    sizes = dict(hidden=32, heads=4, kv_heads=2, width=8, inner=64, shape=SHAPE, seed=0, x=torch.rand(2, 8, 32))
    tensor = linear.TensorParallel(Mesh.of(MeshShape(pp=2, dp=2, tp=2)).tp)
    return vars(linear) | sizes | BATCH | {"tensor": tensor, "schedule": pl.schedules.one_f_one_b(2, 4)}


def unequal() -> dict[str, Any]:
    lengths, layers = [600, 80, 70, 60, 500, 400, 30, 20], [nn.Linear(4, 4) for _ in range(2)]
    plan = pl.plan_step(lengths, ranks=2, tokens=1000, families=[("zb-h1", 1)])
    pipeline = LocalPipeline(layers, pl.schedules.zb_h1(2, 4), loss=nn.functional.mse_loss)
    pack = lambda sequences, batch: (torch.cat([sequences[at] for at in batch])[None],) * 2  # noqa: E731
    return dict(plan=plan, pipeline=pipeline, pack=pack, sequences=[torch.rand(n, 4) for n in lengths])


PYTHON: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "README.md": (2, dict),
    "checkpoints.md": (2, checkpoints),
    "experts.md": (1, experts),
    "from_papers.md": (2, papers),
    "hugging_face.md": (4, lambda: dict(BATCH)),
    "long_sequences.md": (4, dict),
    "own_model.md": (2, own_model),
    "page.md": (1, lambda: {"pl": pl, "schedules": [pl.schedules.zbv(ranks=4, microbatches=8)]}),
    "parallel.md": (8, parallel),
    "transforms.md": (2, dict),
    "unequal.md": (1, unequal),
}
"""Page -> the processes that run its Python blocks, and the names that its blocks use and do not define."""


FIGURES = {"from_papers.md"}
"""Pages on which each command prints the numbers of its comment."""


def numbers(text: str) -> set[float]:
    return {float(number) for number in re.findall(r"(?<![A-Za-z\d.])\d+(?:\.\d+)?", re.sub(r"exit code \d", "", text))}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands of the pages name."""
    import pyarrow
    from pyarrow import parquet
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(launch, "subprocess", FORKING)
        shutil.copytree(ROOT / "examples", "examples")
        runpy.run_path("examples/tiny_llama.py")
        config = LlamaConfig.from_pretrained("tiny-llama", num_hidden_layers=8)
        shutil.copytree("tiny-llama", "my-llama")
        LlamaForCausalLM(config).save_pretrained("my-llama")
        for name in ("model", "llama", "hf-model"):
            shutil.copytree("my-llama", f"path/to/{name}")
        shutil.copy("my-llama/tokenizer.json", "tokenizer.json")
        shutil.copy("corpus.jsonl", "my.jsonl")
        said = [{"role": "user", "content": "What rests?"}, {"role": "assistant", "content": "The shuttle."}]
        Path("chat.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 100)
        for name in ("code", "runs"):
            Path(name).mkdir()
        Path("code/weave.py").write_text("weft = 1\n" * 500)
        parquet.write_table(pyarrow.table({"text": ["The warp is long."] * 500}), "wiki.parquet")
        Path("my.toml").write_text(MY_TOML)
        Path("my_experts.py").write_text(MY_EXPERTS)
        run_console("pipeloom schedule 1f1b --ranks 4 --microbatches 4 --csv > my_schedule.csv", [])
        shutil.copy("my_schedule.csv", "my.csv")
        run_console("pipeloom import path/to/llama runs/20260101-120000-zbv", [])
        run_console("pipeloom train my.toml --log.dir trained --train.steps 5", SHORTER)
        next(Path("trained").iterdir()).rename("runs/20260101-120000-1f1b")
        Path("runs/20260101-120000-1f1b/step-000005").rename("runs/20260101-120000-1f1b/step-000500")
    return folder


@pytest.mark.parametrize("name", RUN)
def test_the_blocks_of_a_page_run_in_order(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = name == "README.md"  # its commands need nothing that a fresh checkout does not have
    folder = tmp_path / "page"
    shutil.copytree(ROOT / "examples" if checkout else files, folder / "examples" if checkout else folder)
    if not checkout and "runs/20260101" not in PAGES[name].read_text("utf-8"):
        shutil.rmtree(folder / "runs")  # its patterns name the page's own runs
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(launch, "subprocess", FORKING)
    monkeypatch.setattr(sources, "stdlib_files", lambda root: sorted(root.glob("*.py"))[:50])  # of some thousand
    monkeypatch.setenv("COLUMNS", "80")
    printed = ""
    for block in blocks(PAGES[name]):
        if block.skipped:
            continue
        file = re.match(r"# (\w+\.py)\n", block.text)
        if file is not None:
            Path(file[1]).write_text(block.text, "utf-8")
        elif block.language == "python":
            world, prepare = PYTHON.get(name, (1, dict))
            printed += run_ranks(run_python, world, block.text, prepare)[0]
        elif block.language == "sh":
            for text in block.text.splitlines() if name in FIGURES else [block.text]:
                output = run_console(text, SHORTER if checkout else CHANGES)
                assert name not in FIGURES or numbers(text.partition("#")[2]) <= numbers(output), text
                printed += output
        elif block.language == "toml":
            Path("block.toml").write_text(block.text, "utf-8")
            load_layout("block.toml")
    for words in PRINTED.get(name, ()):
        assert words in printed


def test_few_blocks_do_not_run_and_each_says_why() -> None:
    every = [block for path in PAGES.values() for block in blocks(path)]
    assert sum(block.skipped for block in every) <= 15
    assert {block.language for block in every} == {"", "python", "sh", "toml"}
    assert not [block.text for block in every if not block.language and re.match("(pipeloom|python) ", block.text)]
    marks = sum(path.read_text("utf-8").count("<!-- not run: ") for path in PAGES.values())
    assert marks == sum(block.skipped for block in every), "a mark is right before its block"
