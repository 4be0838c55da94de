"""`pipeloom verify --hf-families`: models of Hugging Face families in pipelines, compared with a single process."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeloom.cli.workers import be_worker, require_torch, start_workers
from pipeloom.errors import UsageError

FLAG = "--hf-families"
TOLERANCE = 1e-5
VERDICTS = "PIPELOOM_VERDICTS"


def command(arguments: Sequence[str]) -> int:
    """Run `verify --hf-families`; return 0, 1 if an error exceeds the tolerance, or the exit code of failed workers.

    Args:
        arguments: the words after `verify`, including `--hf-families`.
    """
    from pipeloom.config import load_layout

    require_torch("verify")
    as_json = "--json" in arguments
    names = [word for word in arguments if word not in (FLAG, "--json")]
    for word in names:
        if word.startswith("-"):
            raise UsageError(f"verify {FLAG} has no option {word!r:.200}; it takes names of families and --json")
    from pipeloom.train.families import MICROBATCHES, RANKS, chosen
    from pipeloom.train.workers.worker import is_worker

    families = chosen(names)
    layout = load_layout(
        None,
        {"parallel.pp": RANKS, "schedule.name": "1f1b", "schedule.microbatches": MICROBATCHES, "train.device": "cpu"},
    )
    if is_worker():
        return _work(layout, families, as_json)
    from pipeloom.models.hf.library import transformers

    transformers()  # reports a missing or unsupported version before any process starts
    with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
        verdicts = Path(folder) / "verdicts.json"
        os.environ[VERDICTS] = str(verdicts)
        try:
            code = start_workers("verify", arguments, RANKS)
        finally:
            del os.environ[VERDICTS]
        if code:
            return code
        return summarise(json.loads(verdicts.read_text(encoding="utf-8")), as_json)


def _work(layout: Any, families: Sequence[str], as_json: bool) -> int:
    verdicts: list[dict[str, Any]] = []

    def verify(context: Any) -> None:
        from dataclasses import asdict

        from pipeloom.train.families import run

        for result in run(families, context, TOLERANCE):
            if result is not None:  # only rank 0 has it
                verdicts.append(asdict(result))
                if not as_json:
                    print(row(verdicts[-1]), flush=True)

    code = be_worker(layout, verify)
    if int(os.environ["RANK"]) == 0:
        if VERDICTS not in os.environ:
            return code or summarise(verdicts, as_json)
        Path(os.environ[VERDICTS]).write_text(json.dumps(verdicts), encoding="utf-8")
    return code


def row(verdict: dict[str, Any]) -> str:
    """Return one line of the table."""
    state = "PASS" if verdict["passed"] else "FAIL"
    worst = f"{verdict['worst_error']:.1e} {verdict['worst_parameter']}" if verdict["worst_error"] else "0"
    return (
        f"{state}  {verdict['family']:<12} {verdict['schedule']:<23} W {verdict['separate']:4.0%}  "
        f"loss {verdict['loss_error']:.1e}  worst {worst}"
    )


def summarise(verdicts: Sequence[dict[str, Any]], as_json: bool) -> int:
    """Print the number that passed, or everything as JSON; return 0 if all passed, otherwise 1."""
    failed = [verdict for verdict in verdicts if not verdict["passed"]]
    if as_json:
        finite = [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in each.items()}
            for each in verdicts
        ]
        print(json.dumps({"passed": not failed, "tolerance": TOLERANCE, "verdicts": finite}, indent=1))
    else:
        families = len({verdict["family"] for verdict in verdicts})
        print(
            f"{len(verdicts) - len(failed)} of {len(verdicts)} pass at {TOLERANCE:g}: {families} families, fp32, eager "
            "attention, ||a-b|| / ||b|| of each gradient; W: share of the parameters whose weight gradient can be computed in W"
        )
    return int(bool(failed))
