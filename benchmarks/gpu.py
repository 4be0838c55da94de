"""Proves and measures Pipeloom on a GPU: `make gpu`, or `make gpu PART=overlap`.

Uses this machine's Python and torch with PYTHONPATH=src and no network. Each part runs in a process of its own, with a limit
of time, so that one that fails or hangs leaves the others; the results are one table, benchmarks/RESULTS-gpu.md and .json.
A part that is run alone replaces its own rows there, if the machine and its software are the same.
Without a GPU it lists what it would run. `--device cpu` runs the parts' logic with tiny sizes, and writes no results.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "gpu"
RESULTS = ROOT / "benchmarks" / "RESULTS-gpu"
TOTAL_SECONDS = 8 * 60
SIDE_BY_SIDE = 4  # parts that measure no time run beside each other: most of theirs goes into starting processes


@dataclass(frozen=True)
class Part:
    """A function of a module in tests/gpu, and how it is run.

    Attributes:
        seconds: after which its process is ended.
        environment: variables that its process is started with.
        needs_gpu: whether it says nothing on a CPU.
        alone: whether it measures times, so that nothing may run beside it.
    """

    module: str
    function: str
    words: str
    seconds: int = 90
    environment: tuple[tuple[str, str], ...] = ()
    needs_gpu: bool = False
    alone: bool = False


_REPEATABLE = (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),)
PARTS = {
    "families": Part(
        "gpu_correctness", "families", "gradients of every family against a plain loop, fp32 and bf16", 120
    ),
    "split": Part("gpu_correctness", "split", "split backward against fused"),
    "pairs": Part("gpu_correctness", "overlapped", "overlapped pairs on real streams"),
    "recompute": Part("gpu_correctness", "recompute", "recompute and random state, bit for bit"),
    "main-gradients": Part("gpu_correctness", "main_gradients", "bf16 factors, fp32 sums in one product"),
    "targets": Part("gpu_correctness", "ignored_and_nan", "ignored targets, a NaN"),
    "memory": Part("gpu_correctness", "memory", "bytes alive against the simulated alive set", needs_gpu=True),
    "races": Part("gpu_races", "stress", "each stream delayed, 50 seeds, bitwise", 120, _REPEATABLE),
    "blocking": Part(
        "gpu_races",
        "blocking",
        "the same with CUDA_LAUNCH_BLOCKING=1",
        60,
        (*_REPEATABLE, ("CUDA_LAUNCH_BLOCKING", "1")),
    ),
    "waits": Part("gpu_races", "without_waits", "each wait taken away must show", 60, _REPEATABLE, needs_gpu=True),
    "processes": Part("gpu_processes", "one_device", "pp, dp and tp ranks as processes on one device", 150),
    "layouts": Part("gpu_processes", "layouts", "dp, tp and ep layouts of `pipeloom verify` on one device", 150),
    "train": Part("gpu_processes", "train", "`pipeloom train` with 4 workers on one device", 120),
    "faults": Part("gpu_processes", "faults", "an injected exception, a lost message, the watchdog", 90),
    "engine": Part(
        "gpu_measurements",
        "engine",
        "tokens/s, MFU and memory of 1.2 B parameters against a plain loop",
        150,
        alone=True,
    ),
    "actions": Part("gpu_measurements", "per_action", "engine time an action", alone=True),
    "split-cost": Part("gpu_measurements", "split_cost", "I + W against B", 120, alone=True),
    "overlap": Part(
        "gpu_measurements", "overlap", "an all-to-all on the copy engines, hidden in pairs", 120, alone=True
    ),
    "offload": Part("gpu_measurements", "offload", "copies to pinned memory beside compute", alone=True),
    "fusion": Part("gpu_measurements", "fusion", "fused accumulation against a product and a sum", alone=True),
    "compile": Part(
        "gpu_measurements", "compiled", "torch.compile per block under split backward", 150, needs_gpu=True, alone=True
    ),
}


def run_part(name: str, device: str) -> list[dict[str, Any]]:
    """The rows of a part, run in this process."""
    import torch

    sys.path.insert(0, str(TESTS))
    part = PARTS[name]
    setup = importlib.import_module("gpu_setup").Setup(torch.device(device))
    return [asdict(row) for row in getattr(importlib.import_module(part.module), part.function)(setup)]


def _wheels() -> list[str]:
    """Where `make gpu WHEELS=DIR` has put packages that this machine lacks."""
    folder = ROOT / ".gpu-wheels"
    return [str(folder)] if folder.is_dir() else []


def start_part(name: str, device: str, seconds: float, logs: Path | None = None) -> list[dict[str, Any]]:
    """The rows of a part, run in a process of its own; a failure is a row too.

    Args:
        logs: an existing folder, which gets the output of the process as NAME.log.
    """
    part = PARTS[name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *_wheels()])} | dict(part.environment)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        command = [sys.executable, __file__, name, "--device", device, "--rows", str(answer)]
        # A session of its own, so that its processes end with it.
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            _log(logs, name, output)
            return [_row(name, f"no end within {seconds:.0f} s", False)]
        _log(logs, name, output)
        if process.returncode == 0 and answer.exists():
            rows: list[dict[str, Any]] = json.loads(answer.read_text())
            return rows
    spoken = [line for line in output.strip().splitlines() if line.strip()]
    missing = next((line for line in spoken if line.startswith("ModuleNotFoundError")), None)
    if missing:
        return [_row(name, f"not run: {missing.partition(': ')[2]}", None)]
    return [_row(name, f"ended with {process.returncode}: {spoken[-1] if spoken else 'no output'}", False)]


def _log(folder: Path | None, name: str, output: str) -> None:
    if folder is not None:
        (folder / f"{name}.log").write_text(output)


def _row(name: str, measured: str, passed: bool | None) -> dict[str, Any]:
    return {"name": name, "measured": measured, "target": "", "passed": passed}


def verdict(row: dict[str, Any]) -> str:
    if row["measured"].startswith("not run"):
        return "not run"
    return {True: "passed", False: "FAILED", None: "" if row["target"] == "" else "not run"}[row["passed"]]


def machine(device: str) -> dict[str, str]:
    """What the results were measured on."""
    import torch

    found = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "python": sys.version.split()[0]}
    found["commit"] = _printed("git", "rev-parse", "--short", "HEAD")
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name(0)
        found["driver"] = _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def _printed(*command: str) -> str:
    """The first line that a command prints, or "unknown"."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown"


HEADER = "| part | what | measured | target | |\n| --- | --- | --- | --- | --- |"


def lines(part: str, rows: list[dict[str, Any]]) -> str:
    """A part's lines of the table."""
    cells = ([part, row["name"], row["measured"], row["target"], verdict(row)] for row in rows)
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in cells)


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    return "\n".join([HEADER, *(lines(part, rows) for part, rows in results.items())])


def with_others(results: dict[str, list[dict[str, Any]]], about: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """The results of a few parts, and those that the last run on this kind of machine has of the others."""
    file = RESULTS.with_suffix(".json")
    last = json.loads(file.read_text()) if file.exists() else {"machine": {}, "results": {}}
    when = {"date": "", "commit": ""}
    if {**last["machine"], **when} != {**about, **when}:
        return results
    known = last["results"] | results
    return {name: known[name] for name in PARTS if name in known}


def write_results(results: dict[str, list[dict[str, Any]]], about: dict[str, str], path: Path = RESULTS) -> None:
    words = ", ".join(f"{key} {value}" for key, value in about.items())
    path.with_suffix(".md").write_text(f"# Pipeloom on a GPU\n\n`make gpu`: {words}.\n\n{table(results)}\n")
    path.with_suffix(".json").write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")


def run_parts(chosen: list[str], device: str, logs: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Run parts, those that measure no time first and beside each other; print the table's lines as they end."""
    end = time.monotonic() + TOTAL_SECONDS

    def run(name: str) -> list[dict[str, Any]]:
        part, left = PARTS[name], end - time.monotonic()
        if device == "cpu" and part.needs_gpu:
            return [_row(part.words, "not run on a GPU", None)]
        if left < 5:
            return [_row(part.words, f"not run: {TOTAL_SECONDS // 60} minutes are over", None)]
        begun = time.monotonic()
        rows = start_part(name, device, min(part.seconds, left), logs)
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        return rows

    results = {}
    print(HEADER, flush=True)
    for workers, names in (
        (min(SIDE_BY_SIDE, os.cpu_count() or 1), [name for name in chosen if not PARTS[name].alone]),
        (1, [name for name in chosen if PARTS[name].alone]),
    ):
        with ThreadPoolExecutor(workers) as pool:
            for name, rows in zip(names, pool.map(run, names), strict=True):
                results[name] = rows
                print(lines(name, rows), flush=True)
    return results


def has_gpu() -> bool:
    """Asked in a process of its own: one that has used CUDA cannot fork others that do."""
    if importlib.util.find_spec("torch") is None:
        return False
    command = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(command, capture_output=True).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="all without a name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=Path, help="run one part in this process and write its rows here")
    parser.add_argument("--logs", type=Path, help="write the whole output of every part into this folder")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    chosen = arguments.parts or list(PARTS)
    if arguments.rows is not None:
        arguments.rows.write_text(json.dumps(run_part(chosen[0], arguments.device)))
        return 0
    if arguments.device == "cuda" and not has_gpu():
        print("no CUDA device here: nothing is run; on a GPU `make gpu` runs:")
        for name in chosen:
            print(f"  {name:16} {PARTS[name].words}")
        return 0
    if arguments.logs is not None:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    results = run_parts(chosen, arguments.device, arguments.logs)
    if arguments.device == "cuda":
        about = machine("cuda")
        write_results(with_others(results, about) if arguments.parts else results, about)
    return int(any(row["passed"] is False for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
