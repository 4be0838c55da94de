"""The default learning rate of fine-tuning beside fixed ones: what is learned of a new text, and forgotten of the first.

    python benchmarks/fine_tuning.py

The model `tiny` is trained on Python's standard library, then fine-tuned from that checkpoint on these documents: once with
`optimizer.lr = "auto"`, and once at each of five rates. Every run is done twice, with held-out text of either source; runs
of one seed have the same weights. Prints a table; exits with 1 if the default's loss of the new text falls by less than
half of what the best rate reaches, or its loss of the first text rises as much as at the largest rate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RATES = ("auto", "3e-5", "1e-4", "3e-4", "1e-3", "3e-3")
FIRST_STEPS, STEPS = 600, 300


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, first_held_out = split(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), folder / "first")
        new, new_held_out = split(sorted((ROOT / "docs").glob("*.md")), folder / "new")
        base = folder / "base"
        train(base, FIRST_STEPS, first, first_held_out)
        print("| learning rate | new text | change | first text | change |\n| --- | --- | --- | --- | --- |")
        learned, forgotten = {}, {}
        for rate in RATES:
            flags = ("--model.weights", str(base), "--optimizer.lr", rate)
            new_losses = train(folder / f"new-{rate}", STEPS, new, new_held_out, *flags)
            first_losses = train(folder / f"first-{rate}", STEPS, new, first_held_out, *flags)
            learned[rate] = new_losses[0] - new_losses[1]
            forgotten[rate] = first_losses[1] - first_losses[0]
            row = f"{new_losses[1]:.3f} | {-learned[rate]:+.3f} | {first_losses[1]:.3f} | {forgotten[rate]:+.3f}"
            print(f"| {rate} | {row} |", flush=True)
    passed = learned["auto"] >= max(learned.values()) / 2 and forgotten["auto"] < forgotten[RATES[-1]]
    print("passed" if passed else "FAILED")
    return not passed


def split(files: list[Path], target: Path) -> tuple[Path, Path]:
    """Write every eighth file's text into one file, that of the others into another; return the others' and the eighths'."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    train_file, held_out_file = target.with_suffix(".txt"), target.with_suffix(".held-out.txt")
    train_file.write_text("\n".join(text for i, text in enumerate(texts) if i % 8), encoding="utf-8")
    held_out_file.write_text("\n".join(texts[::8]), encoding="utf-8")
    return train_file, held_out_file


def train(runs: Path, steps: int, source: Path, held_out: Path, *flags: str) -> tuple[float, float]:
    """Train `tiny` in one process; return the held-out losses before and after."""
    where = ("--data.source", str(source), "--data.validation", str(held_out), "--log.dir", str(runs))
    size = (
        "--train.steps",
        str(steps),
        "--train.seq_len",
        "64",
        "--train.global_batch_size",
        "16",
        "--train.eval_batches",
        "64",
    )
    place = ("--parallel.pp", "1", "--schedule.microbatches", "2", "--train.device", "cpu", "--sample.tokens", "0")
    command = [sys.executable, "-m", "pipeloom", "train", "tiny", *where, *size, *place, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    (log,) = runs.glob("*/log.jsonl")
    events = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    (losses,) = (event for event in events if event["event"] == "held-out")
    return losses["before"], losses["after"]


if __name__ == "__main__":
    sys.exit(main())
