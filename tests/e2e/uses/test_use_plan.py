"""From a plan to a configuration, and from that to a dry run, which predicts the same step."""

from __future__ import annotations

import re

from uses import Use


def test_a_plan_becomes_a_configuration_whose_dry_run_agrees(use: Use) -> None:
    page = "planning.md"
    plan = use.run(page, "pipeloom plan --model llama3-8b --devices 8 --global-batch 64 --output run.toml")
    dry = " ".join(use.run(page, "pipeloom train run.toml --dry-run").split())
    best = re.search(r"^dp=(\d+),pp=(\d+),v=(\d+),m=(\d+):$", plan, re.MULTILINE)
    assert best is not None
    assert f"{best[2]} ranks of {best[3]} stages, {best[4]} micro-batches, {best[1]} data-parallel replicas" in dry
    step = re.search(r"step on h100: .*? host [\d.]+ s\)", " ".join(plan.split()))
    assert step is not None
    assert step[0] in dry
    assert use.pages == [page]
