"""The fuzzer of gradients finds what is planted, shrinks it, and repeats itself; a sample of its cases finds nothing."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fuzz import gradients
from fuzz._cases import FAMILIES, Case, draw_case, is_valid
from fuzz._crew import Crew, Hang
from fuzz._layers import FROZEN, HOOKS, KINDS, STATEFUL, Layout
from fuzz._runs import Observation, observed, reference
from pipeloom.runtime.stage import InputGradients, Stage


def cases(seed: int, count: int) -> list[Case]:
    return [draw_case(random.Random(f"{seed} {number}")) for number in range(count)]


def test_cases_repeat_and_survive_their_text() -> None:
    drawn = cases(7, 200)
    assert drawn == cases(7, 200)
    assert [Case.from_json(case.to_json()) for case in drawn] == drawn
    assert all(map(is_valid, drawn))


def test_everything_is_drawn() -> None:
    drawn = cases(8, 600)
    layouts = [layout for case in drawn for layout in case.layouts]
    assert {layout.kind for layout in layouts} >= KINDS.keys() - {"compiled"}
    assert {layout.frozen for layout in layouts} == {"", *FROZEN}
    assert {hook for layout in layouts for hook in layout.hooks} == set(HOOKS)
    assert {case.schedule for case in drawn} == set(FAMILIES)
    assert {case.world for case in drawn if case.dp} == {1, 2, 3, 4}
    assert any(case.ties and case.one_object and case.dp for case in drawn)


LAYOUTS: dict[str, dict[str, Any]] = {
    "split": {"schedule": "zb-h1", "ranks": 2, "microbatches": 4, "rows": (2, 1, 2, 2)},
    "recomputed": {"schedule": "1f1b", "ranks": 2, "microbatches": 4, "rows": (2, 1, 2, 2), "recompute": "full"},
    "two routes": {"schedule": "dualpipe", "ranks": 2, "microbatches": 4, "rows": (2, 1, 2, 2)},
    "replicas": {
        **{"schedule": "1f1b", "cooldown": True, "ranks": 2, "microbatches": 2, "rows": (1, 2), "dp": 2},
        **{"main_gradients": True, "transport": "shared"},
    },
}
REFUSED = {("functional gradient", "recomputed")}


@pytest.fixture(scope="module")
def runner() -> Iterator[gradients.Runner]:
    runner = gradients.Runner()
    yield runner
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("names", [("split", "replicas"), ("recomputed", "two routes")], ids=lambda names: names[0])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_trains_as_in_one_process(
    kind: str, names: tuple[str, ...], runner: gradients.Runner
) -> None:
    """Between two linear layers; a gradient is None where that of one process is, and hooks and buffers are the same."""
    layers = ("linear", *(("open",) if kind in ("join", "drop") else ()), kind, "linear")
    for name in names:
        if name != "two routes" or kind not in STATEFUL:
            outcome = runner.outcome(Case(layers=layers, steps=2, **LAYOUTS[name]))
            assert outcome.sort == ("refused" if (kind, name) in REFUSED else "equal"), (name, outcome.lines)


@pytest.mark.core
@pytest.mark.parametrize("kind", ["stop", "detached output", "unused", "sometimes", "one micro-batch"])
def test_weights_that_some_replicas_do_not_use_train_as_in_one_process(kind: str, runner: gradients.Runner) -> None:
    """Two of four steps are under no_sync; gradients are whole, summed in place, or sharded; nothing decays without a use."""
    case = Case(
        ("linear", kind, "linear"), microbatches=4, rows=(2, 1, 1, 2), dp=2, steps=2, accumulate=2, unsynced=True
    )
    for changes in (
        {"transport": "individual"},
        {"schedule": "zb-h1", "ranks": 2, "transport": "shared"},
        {"main_gradients": True},
        {"ranks": 2, "shard_gradients": True},
    ):
        outcome = runner.outcome(dataclasses.replace(case, **changes))
        assert outcome.sort == "equal", (changes, outcome.lines)


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        *(("mlp", hook) for hook in HOOKS),
        *(("segmented", f"{hook}@layer") for hook in ("forward", "forward_pre", "backward", "backward_pre")),
    ],
)
def test_every_hook_fires_as_in_one_process(kind: str, hook: str, runner: gradients.Runner) -> None:
    """Those on a layer that declares segments belong to its call, also in a pair."""
    layers = ("linear", str(Layout(kind, hooks=(hook,))), "linear")
    for name, layout in LAYOUTS.items():
        outcome = runner.outcome(Case(layers=layers, steps=2, **layout))
        assert outcome.sort == "equal", (name, outcome.lines)


@pytest.mark.core
@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_fires_in_one_process(hook: str) -> None:
    case = Case(layers=("linear", str(Layout("mlp", hooks=(hook,)))), microbatches=2, rows=(1, 2))
    seen = observed(reference, case)
    assert seen.error is None, seen.error
    assert seen.counts == ({} if hook == "keep" else {f"l1 {hook}": 2})
    assert (seen.kept != 0) == (hook == "keep")


@pytest.mark.core
def test_a_planted_defect_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that cross a boundary are too large."""
    right = Stage.backward

    def wrong(self: Stage, *arguments: Any, **keywords: Any) -> InputGradients:
        gradients = right(self, *arguments, **keywords)
        return tuple(tuple(None if value is None else value * 1.01 for value in values) for values in gradients)

    monkeypatch.setattr(Stage, "backward", wrong)
    monkeypatch.setattr(gradients, "SHRINK_SECONDS", 600.0)
    case = Case(
        layers=("mlp", "layer norm|hooks=output", "conv", "linear"),
        schedule="interleaved",
        ranks=2,
        microbatches=3,
        rows=(2, 1, 2),
        recompute="full",
        steps=2,
    )
    runner = gradients.Runner()
    try:
        outcome = runner.outcome(case)
        assert outcome.sort == "gradient"
        small = gradients.shrunk(runner, case, outcome, None, 0, 0.0).case
    finally:
        runner.close()
    assert small in (
        Case(layers=("linear", "linear"), ranks=2),
        Case(layers=("linear", "linear"), schedule="interleaved"),
    )


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _number(argument: int) -> int:
    return argument + 1


@pytest.mark.core
def test_a_hang_is_reported_and_the_crew_goes_on() -> None:
    crew = Crew(2)
    try:
        with pytest.raises(Hang, match=r"processes \[0, 1\] do not end within 1 s"):
            crew.run(_sleep, 60.0, 1.0, lambda result: False)
        assert crew.run(_number, 4, 600.0, lambda result: False) == [5, 5]
    finally:
        crew.stop()


@pytest.mark.parametrize("hangs", [1, 2])
def test_a_case_counts_as_a_hang_only_if_it_hangs_again(hangs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def run(*_: object) -> list[object]:
        calls.append("run")
        if len(calls) <= hangs:
            raise Hang("processes [0] do not end within 60 s")
        return [(Observation(), Observation())]

    monkeypatch.setattr(Crew, "run", run)
    outcome = gradients.Runner().outcome(Case(("linear",)))
    assert outcome.sort == ("equal" if hangs == 1 else "hang")
    assert len(calls) == 2


def test_a_sample_of_cases_finds_nothing() -> None:
    said: list[str] = []
    findings = gradients.fuzz(seed=13, cases=40, deadline=None, say=said.append)
    assert not findings, "\n".join(said)
    assert said[-1].startswith("gradients: seed 13, 40 cases in ")
