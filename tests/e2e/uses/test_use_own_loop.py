"""A loop of one's own under torchrun: loader, schedule of rates, checkpoint; then on replicas, from where it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from uses import COLUMNS, Use


def test_a_loop_trains_in_stages_and_goes_on_in_replicas(use: Use) -> None:
    page = "own_model.md"
    program = use.code(page, "loader = DataLoader(")
    (command,) = re.findall(r"Saved as `loop\.py`, `(torchrun [^`]*)` trains it in two stages", use.text(page))
    assert "with `DP = 2` in two replicas" in use.text(page)
    (use.folder / "loop.py").write_text(program)
    first = epochs(use, command)
    sizes = "DP, BATCH, EPOCHS, FOLDER = 1, 16, 3,"
    assert sizes in program
    (use.folder / "loop.py").write_text(program.replace(sizes, "DP, BATCH, EPOCHS, FOLDER = 2, 16, 4,"))
    second = epochs(use, command)
    assert [number for number, _ in first] == [1, 2, 3]
    assert [number for number, _ in second] == [4]
    assert first[-1][1] < first[0][1]
    assert second[0][1] < first[0][1]
    assert use.pages == [page]


def epochs(use: Use, command: str) -> list[tuple[int, float]]:
    """Run the command as a process of its own, and return (epoch, held-out loss) of each line."""
    use.commands.append(command)
    words = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": str(COLUMNS)}
    ended = subprocess.run(words, cwd=use.folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert not [line for line in ended.stdout.splitlines() if len(line) > COLUMNS]
    found = re.findall(r"epoch (\d+): loss .*, held out ([\d.]+)", ended.stdout)
    return [(int(number), float(loss)) for number, loss in found]
