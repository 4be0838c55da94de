"""How far it is from the training loop to a layer: what a newcomer has to read on the way."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipeloom
from paths import ROOT
from pipeloom.config import load_layout
from pipeloom.measure.build import build_pipeline
from pipeloom.models.decoder import Block
from pipeloom.train.loop import Trainer

OURS = Path(pipeloom.__file__).parent
DOCUMENT = ROOT / "docs" / "architecture.md"


def test_from_the_loop_to_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 8 frames of ours in 4 files, the loop itself counted and torch's own frames not."""
    overrides = {"parallel.pp": 1, "schedule.microbatches": 2, "schedule.name": "1f1b", "train.steps": 1}
    overrides |= {"train.global_batch_size": 2, "train.seq_len": 8, "model.num_hidden_layers": 2}
    layout = load_layout(None, overrides)
    pipeline = build_pipeline(layout, torch.device("cpu"))
    context: Any = SimpleNamespace(flags=0, rank=0, device=torch.device("cpu"), watchdog=None)
    stacks: list[list[tuple[str, str]]] = []
    forward = Block.forward

    def noted(block: Block, *arguments: Any, **keywords: Any) -> Any:
        frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(OURS)]
        stacks.append([(str(Path(frame.filename).relative_to(OURS)), frame.name) for frame in frames])
        return forward(block, *arguments, **keywords)

    monkeypatch.setattr(Block, "forward", noted)
    Trainer(layout.config, pipeline, context, None).train(torch.arange(2000) % 250)
    pipeline.close()
    assert len(stacks) == 4  # two blocks, two micro-batches
    for stack in stacks:
        assert stack[0] == ("train/loop.py", "train")
        assert len(stack) <= 8, stack
        assert len({file for file, _ in stack}) <= 4, stack
    assert stacks[0] == documented()


def documented() -> list[tuple[str, str]]:
    """(file, function) of the frames that docs/architecture.md names."""
    rows = re.findall(r"^\| `\w+\.(\w+)` \| `(\S+\.py)` \|", DOCUMENT.read_text(), re.MULTILINE)
    return [(file, function) for function, file in rows]


def test_what_the_document_names_exists() -> None:
    """Every file and folder that docs/architecture.md names, from the root, the package, or one of its packages."""
    names = re.findall(r"`([\w/.]+(?:\.py|\.md|\.toml|/))`", DOCUMENT.read_text())
    roots = [DOCUMENT.parents[1], OURS, *(path for path in OURS.rglob("*") if path.is_dir())]
    assert len(names) > 80
    assert [name for name in names if not any((root / name).exists() for root in roots) and "NAME" not in name] == []


DEFINED = re.compile(r"^ *(?:(?:def|class) (\w+)|(?:self\.)?(\w+)(?:: [^=\n]*)?(?: =|$))", re.MULTILINE)


def test_functions_and_classes_that_the_document_names_exist() -> None:
    """`name` is defined somewhere in our source; `Class.name` in the file of that class."""
    files = [(path, path.read_text()) for path in OURS.rglob("*.py")]
    names = {path: {path.stem, path.parent.name}.union(*DEFINED.findall(text)) for path, text in files}
    words = set(re.findall(r"`(_?[A-Za-z]\w*(?:\.\w+)*)(?:\([^`]*\))?`", DOCUMENT.read_text()))
    words = {word for word in words if not word.endswith((".py", ".md", ".toml"))} - {"nn.Module", "torchrun"}
    words = {word.removeprefix("pipeloom.").removeprefix("runtime.") for word in words}
    assert len(words) > 60
    assert [word for word in words if not any(set(word.split(".")[-2:]) <= defined for defined in names.values())] == []
