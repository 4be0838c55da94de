"""A loop of one's own: the program of the README under torchrun, with the checkpoints of their page, and resumed from them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from uses import Use


def test_a_loop_trains_saves_and_resumes(use: Use) -> None:
    program = use.code("README.md", "pipeline = Pipeline(layers, schedule, loss=nn.functional.cross_entropy)")
    (command,) = set(re.findall(r"`(torchrun [^`]*train_mlp\.py)`", use.text("README.md")))
    saves, _, loads = use.code("checkpoints.md", "saver = checkpoint.Saver(").partition("loaded = ")
    end = "pipeline.close()\n"
    named = "adam, seen = optimizer, 800\n"
    begin = program.index("for step in range(20):")
    (use.folder / "train_mlp.py").write_text(program.replace(end, f"{named}{saves}{end}"))
    first = losses(use, command)
    resumed = f"{program[:begin]}{named}{saves.splitlines()[0]}\nloaded = {loads}{program[begin:]}"
    (use.folder / "train_mlp.py").write_text(resumed.replace("range(20)", "range(loaded.step + 1, 22)"))
    assert [step for step, _ in first] == list(range(20))
    assert first[-1][1] < first[0][1]
    second = losses(use, command)
    assert [step for step, _ in second] == [20, 21]
    assert second[0][1] < first[-1][1]
    assert use.pages == ["README.md", "checkpoints.md"]


def losses(use: Use, command: str) -> list[tuple[int, float]]:
    """Run the command as a process of its own, and return (step, loss) of each line."""
    use.commands.append(command)
    words = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    ended = subprocess.run(words, cwd=use.folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert not [line for line in ended.stdout.splitlines() if len(line) > 80]
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", ended.stdout)]
