"""A sample of the fuzzer's part `costs`, and cases that it has found."""

from __future__ import annotations

import pytest

import pipeloom as pl
from fuzz._brute_force import least
from fuzz._loop import smallest
from fuzz.costs import ENUMERATED, PROVED, Case, check_case, failure, main, random_case, simplifications
from pipeloom.schedule import Costs
from pipeloom.solver.exact import certify
from pipeloom.solver.instance import Instance

CHEAP_B = Costs(27, 9, 25, 1, backward=(31, 23))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_sample(seed: int) -> None:
    assert main(seed, 300, None) == 0


@pytest.mark.parametrize("kind", [ENUMERATED, PROVED])
def test_a_sample_of_enumerations_and_proofs(kind: int) -> None:
    if kind == PROVED:
        pytest.importorskip("ortools")
    for seed in range(10_000, 10_012):
        case = random_case(seed * PROVED * ENUMERATED + (0 if kind == PROVED else ENUMERATED))
        assert case.kind == ("proof" if kind == PROVED else "enumeration")
        assert failure(case) is None, case


def test_a_b_cheaper_than_its_halves_is_proved_right() -> None:
    pytest.importorskip("ortools")
    assert least((0, 1), 3, CHEAP_B, 1) == 288
    found = pl.search(2, 3, CHEAP_B, memory=1, prove=True, iterations=300)
    assert found.value == 288
    assert found.lower_bound <= 288
    check_case(Case("random", (0, 1), 3, CHEAP_B, kind="proof"))


@pytest.mark.parametrize(
    ("costs", "room"), [(CHEAP_B, 1.0), (Costs(3, 2, 1, microbatch=(0.5,) * 3), 1.0), (Costs(3, 2, 1, 0.75), 2.0)]
)
def test_a_solver_that_is_given_no_schedule_proves_no_more(costs: Costs, room: float) -> None:
    pytest.importorskip("ortools")
    optimum = least((0, 1), 3, costs, room)
    assert certify(Instance((0, 1), 3, costs, room), 1.03 * optimum, 600).bound <= optimum + 1e-6


@pytest.mark.parametrize(
    "case",
    [
        # a larger message of equal micro-batches
        Case("random", (0, 1, 2), 1, Costs(message=1.0, bandwidth=1.0, microbatch=(3.0,))),
        # spans of receivers that wait
        Case("random", (0, 1), 4, Costs(3, 2, 1, 2), overlap_p2p=False, kind="proof", room=2.0),
        # nothing takes any time
        Case("random", (0, 1, 1, 0), 2, Costs(0, 0, 0), kind="proof"),
        Case("random", (0, 1), 3, Costs(0, 0, 0, 2.0), kind="proof", room=3.0),
        # micro-batches alike that take half the memory
        Case("random", (0, 1), 4, Costs(3, 2, 1, microbatch=(0.5,) * 4), kind="proof", room=2.0),
        Case("random", (0, 1), 1, Costs(all_to_all=1.0, microbatch=(0.5,)), kind="proof"),
        # pairs that gain, in time or in memory, which the solver does not know
        Case("random", (0,), 2, Costs(activation=0.0, pair_split=1.0), kind="proof"),
        Case("random", (0, 1), 3, Costs(2, 2, 0, all_to_all=1.0), kind="proof", room=1.0),
        Case("random", (0, 1, 1, 0), 2, Costs(4, 4, 0, all_to_all=0.5), kind="proof", room=2.0),
        Case("random", (0, 1), 3, Costs(4, 4, 1, pair=5.0), kind="proof", room=2.0),
        Case("random", (0, 1), 4, Costs(4, 4, 3, pair_split=5.0, backward=5.0), kind="proof", room=2.0),
        # a copy that starts as another ends, but for rounding
        Case(
            *("random", (1, 0, 1, 0, 1, 1), 6, Costs(forward=7.0, bytes=(("kept", 2.0), ("saved", 10.0)))),
            seed=1371,
            again="whole",
            queues=("offload=3/3",),
        ),
        # a B for nothing
        Case("random", (0, 1, 0, 0), 1, Costs(backward=0.0), overlap_p2p=False, kind="proof"),
        # a B shorter than its own communication
        Case("random", (0,), 1, Costs(0, 5, 0, all_to_all=1.0, backward=1.0), kind="enumeration"),
    ],
)
def test_cases_that_failed(case: Case) -> None:
    if case.kind == "proof":
        pytest.importorskip("ortools")
    check_case(case)


def test_a_failing_case_is_shrunk() -> None:
    case = Case("random", (0, 1), 4, Costs(3, 2, 1, 5, message=2.0, microbatch=(3.0,) * 4), overlap_p2p=False)
    small = smallest(case, lambda one: one.costs.message > 0, simplifications)
    assert small == Case("random", (0, 1), 1, Costs(message=1.0))
    assert eval(repr(small), {"Case": Case, "Costs": Costs}) == small
