"""What `train` and `verify` know before any worker starts: devices, the text, the folder for logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeloom.cli import train, workers
from pipeloom.config import load_layout
from pipeloom.shapes.layers import parameter_count
from pipeloom.train.workers import preflight

Run = Callable[[str], Any]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 99 says that workers would have been started."""

    def start(*arguments: object) -> int:
        return 99

    for command in (train, workers):
        monkeypatch.setattr(command, "start_workers", start)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("command", ["train", "verify"])
def test_cuda_without_a_device(pipeloom: Run, command: str) -> None:
    ended = pipeloom(f"{command} tiny --parallel.pp 2 --train.device cuda")
    assert ended.code == 2
    assert ended.err == 'pipeloom: train.device = "cuda": this machine has no CUDA device for 2 workers; use "cpu"\n'


@pytest.mark.parametrize("key", ["source", "weights"])
def test_a_directory_without_safetensors(pipeloom: Run, tmp_path: Path, key: str) -> None:
    (tmp_path / "hub").mkdir()
    sizes = (
        '"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 8, "vocab_size": 256'
    )
    (tmp_path / "hub/config.json").write_text(f'{{"model_type": "llama", {sizes}}}')
    (tmp_path / "hub/pytorch_model.bin").write_text("")
    ended = pipeloom(f"train --model.{key} hub --train.device cpu --parallel.pp 2")
    assert ended.code == 2
    assert "the directory has no weights in safetensors, neither model.safetensors nor" in ended.err
    assert "(it has pytorch_model.bin); save the model again with save_pretrained" in ended.err
    (tmp_path / "hub/model.safetensors").write_text("")
    assert pipeloom(f"train --model.{key} hub --train.device cpu --parallel.pp 2").code == 99


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a" * 2000, "train.seq_len = 128: the held-out text has 100 tokens; use at most 99, or a larger data.source"),
        ("a" * 20, "train.seq_len = 128: the training text has 20 tokens; use at most 19, or a larger data.source"),
        ("a", "train.seq_len = 128: the training text has 2 tokens; use at most 1, or a larger data.source"),
        ("", 'data.source = "short.txt": it holds no text to train on'),
    ],
)
def test_a_text_that_is_too_short(pipeloom: Run, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "short.txt").write_text(text)
    ended = pipeloom("train tiny --train.seq_len 128 --data.source short.txt")
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err


def test_a_text_of_one_window_more_than_needed_starts(pipeloom: Run, tmp_path: Path) -> None:
    (tmp_path / "enough.txt").write_text("a" * 2580)  # 129 of them are held out
    assert pipeloom("train tiny --train.seq_len 128 --data.source enough.txt").code == 99


@pytest.mark.parametrize("folder", ["/proc/nope", "/dev/null/x", "x" * 300])
def test_a_folder_that_cannot_be_made(pipeloom: Run, folder: str) -> None:
    ended = pipeloom(f"train tiny --log.dir {folder}")
    assert (ended.code, ended.out) == (2, "")
    shown = folder if len(folder) < 200 else f"{folder[:170]}… ({len(folder)} characters)"
    assert f'log.dir = "{shown}": ' in ended.err


def test_all_of_them_at_once_and_nothing_is_left_behind(pipeloom: Run, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a" * 50)
    ended = pipeloom("train tiny --data.source short.txt --log.dir /proc/a/b")
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 2
    assert pipeloom("train tiny --log.dir new/folder").code == 99
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


@pytest.mark.parametrize(("room", "code"), [(1.1, 99), (0.9, 4)])
def test_dense_weights_are_held_by_every_replica_whatever_the_experts(
    pipeloom: Run, monkeypatch: pytest.MonkeyPatch, room: float, code: int
) -> None:
    """Weights, gradients and averages of 4 replicas, of which each holds half of the experts."""
    sections = {"model.num_hidden_layers": 4, "model.vocab_size": 20000, "model.num_experts": 4}
    model = load_layout("tiny", sections).config.model
    experts = 4 * 4 * 3 * model.hidden_size * model.expert_width
    need = 16 * (4 * (parameter_count(model.shape()) - experts) + 2 * experts)
    monkeypatch.setattr(preflight, "memory_of_machine", lambda: int(room * need))
    monkeypatch.setattr(preflight, "WORKER_BYTES", 1)
    flags = " ".join(f"--{key} {value}" for key, value in sections.items())
    ended = pipeloom(
        f"train tiny {flags} --train.device cpu --train.global_batch_size 40 --parallel.pp 2 --parallel.dp 4 --parallel.ep 2"
    )
    assert ended.code == code, ended.err
    assert ("weights, gradients and AdamW" in ended.err) == (code == 4)
