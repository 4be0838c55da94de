"""The recipe of docs/hugging_face.md runs as it is printed: own text, own tokenizer, a model from disk, adapters, text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

PAGE = ROOT / "docs" / "hugging_face.md"


@pytest.mark.full
def test_the_recipe_from_a_corpus_to_text_runs_as_it_is_printed(tmp_path: Path) -> None:
    recipe = PAGE.read_text("utf-8").partition("## A recipe, from a corpus to generated text")[2].partition("\n## ")[0]
    (commands,) = re.findall(r"```bash\n(.*?)```", recipe, re.DOTALL)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    printed = {}
    for line in commands.strip().splitlines():
        done = subprocess.run(
            ["bash", "-euc", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        printed[line] = done.stdout
    trained = next(text for line, text in printed.items() if line.startswith("pipeloom train"))
    losses = re.search(r"held-out loss: ([\d.]+) nats per token \(before training ([\d.]+);", trained)
    assert losses is not None, trained
    assert float(losses[1]) < float(losses[2])
    texts = [text for line, text in printed.items() if line.startswith("pipeloom generate")]
    assert len(texts) == 2
    assert all(text.strip() for text in texts)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "merged" / "model.safetensors").is_file()
