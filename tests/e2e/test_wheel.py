"""The built package works without the checkout: what `python -m build` makes, installed into an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from checkpoint_runs import BRIEF, text_in
from paths import ROOT

COMMANDS = (
    "schedule zbv --ranks 4 --microbatches 8 --csv",
    "compare 1f1b zbv --ranks 4 --microbatches 8",
    "search --ranks 2 --microbatches 4 --iterations 200",
    "check schedule.csv",
    "plan --model llama3-8b --layout pp=2,tp=4,m=16",
    f"train tiny --data.source text.txt --train.steps 2 {' '.join(BRIEF)} --log.dir run",
    "show run",
    "export run exported",
    "generate exported --prompt def --tokens 4",
)


def test_every_command_of_a_wheel_runs_without_the_checkout(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=600,
    )
    (wheel,), (_,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    text_in(tmp_path)
    home = tmp_path / "environment"
    venv.create(home)
    bin_folder = home / ("Scripts" if os.name == "nt" else "bin")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{bin_folder}{os.pathsep}{environment['PATH']}"

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    run(sys.executable, "-m", "pip", "--python", str(home), "install", "--no-deps", "--no-index", str(wheel))
    # Its dependencies are those of this environment; a checkout that is installed there is not on the path.
    packages = next((home / "lib").glob("python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    place = Path(run("python", "-c", "import pipeloom; print(pipeloom.__file__)").strip())
    assert packages in place.parents
    for command in COMMANDS:
        printed = run("pipeloom", *command.split())
        (tmp_path / f"{command.split()[0]}.csv").write_text(printed)  # that of `schedule` is checked
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["architectures"]
