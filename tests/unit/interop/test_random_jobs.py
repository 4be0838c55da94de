"""Random runs, written in the words of each system and read back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from jobs import UNHELD, broken_job, random_job
from pipeloom.errors import PipeloomError, UsageError
from pipeloom.interop.systems import SYSTEMS, translated
from pipeloom.plan import load_model
from pipeloom.plan.job import Job, differences, normal
from pipeloom.plan.layout import parse

SEEDS = range(100)
FAST = 20


def written(seeds: range, system: str) -> list[tuple[Job, str, list[str]]]:
    """(Job, text, losses) of those that the system takes."""
    jobs, reasons = [], list[str]()
    for seed in seeds:
        job = random_job(seed, system)
        try:
            jobs.append((job, *translated(job, system)))
        except PipeloomError as error:
            reasons.append(str(error))
    beyond = [reason for reason in reasons if not reason.startswith(f"{system} does not take this run: ")]
    assert system == "pipeloom" or not beyond  # a text that its own reader refuses
    return jobs


def require_what_losses_say(jobs: list[tuple[Job, str, list[str]]], system: str) -> None:
    for job, text, losses in jobs:
        assert "#" not in text
        read = normal(SYSTEMS[system].read(text))
        lost = {sentence.partition("=")[0] for sentence in losses}
        assert lost == set(differences(job, read))
        assert lost <= UNHELD[system], (job.layout.text(), losses)


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_read_back_is_the_run_without_what_was_said_to_be_lost(system: str) -> None:
    require_what_losses_say(written(SEEDS[:FAST], system), system)


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_most_random_runs_are_written_and_read_back(system: str) -> None:
    jobs = written(SEEDS, system)
    assert len(jobs) >= 70
    require_what_losses_say(jobs, system)


@pytest.mark.parametrize("system", ["megatron", "torchtitan", "automodel"])
def test_every_refusal_of_a_broken_run_names_the_file_that_refuses_it(system: str) -> None:
    for seed in range(60):
        with pytest.raises(PipeloomError) as caught:
            translated(broken_job(seed, system), system)
        for sentence in str(caught.value).partition("take this run: ")[2].split("; nearest: ")[:-1]:
            assert re.search(r"\w\.py\)", sentence), sentence


@pytest.mark.parametrize("system", ["megatron", "torchtitan", "automodel"])
@pytest.mark.parametrize(
    ("field", "value", "nearest"), [("slices", 2, "slices=1"), ("vocabulary", "pp", "vocabulary=last")]
)
def test_what_no_other_system_has_is_refused(system: str, field: str, value: Any, nearest: str) -> None:
    job = random_job(1, system)
    with pytest.raises(UsageError, match=f"{field}={value}: .*; nearest: {nearest}"):
        translated(replace(job, layout=replace(job.layout, **{field: value})), system)


def test_parts_in_another_order_are_not_lost() -> None:
    layout = parse("m=4,recompute=attention+norms,offload=core_attn+attn_norm")
    assert translated(Job(load_model("qwen3-30b-a3b"), layout), "megatron")[1] == []
