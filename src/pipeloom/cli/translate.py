"""`pipeloom translate`: a job of one training system in the words of another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from pipeloom.cli.options import argument, flag, with_options
from pipeloom.errors import UsageError
from pipeloom.interop.systems import read_job, translated
from pipeloom.plan import load_model


@with_options()
def command(
    job: str = argument(
        ..., "JOB", "A launch script, flags, a TOML or YAML file of one of the systems, or - for standard input."
    ),
    to: Literal["megatron", "torchtitan", "automodel", "torch-csv", "pipeloom"] = flag(
        ..., "SYSTEM", "megatron, torchtitan, automodel, torch-csv or pipeloom."
    ),
    model: str | None = flag(None, "MODEL", "The model, where JOB does not describe it: as for `plan`."),
    strict: bool = flag(False, None, "Refuse where something was not understood, or is lost."),
) -> None:
    """Write a job of one training system in the words of another.

    pipeloom translate train.sh --to torchtitan

    Nothing in JOB is executed. What was not understood, and what the words of the other system do not hold, is printed on
    standard error, a sentence each. What the other system would refuse is refused, with the nearest that it takes.
    """
    read = read_job(job, None if model is None else load_model(model))
    _report([f"not understood: {each}" for each in read.unknown], strict)  # before a refusal, whose cause they may be
    text, losses = translated(read, to)
    _report(losses, strict)
    sys.stdout.write(text)


def _report(sentences: Sequence[str], strict: bool) -> None:
    if strict and sentences:
        raise UsageError(f"--strict: {'; '.join(sentences)}")
    print("".join(f"{each}\n" for each in sentences), end="", file=sys.stderr)
