"""Where others fail silently: which test of ours holds each case, and a check that the test is still there.

torch's own behaviour in the same cases is in tests/torch_behaviour.
"""

from __future__ import annotations

import importlib

import pytest

from paths import ROOT

ROWS = {
    "frozen leading layers with split backward": [
        "test_boundaries.test_what_crosses_a_boundary",
        "test_boundaries.TestOverGloo.test_everything_crosses",
    ],
    "two steps before zero_grad; evaluation between a step and the optimizer": [
        "test_local.test_gradients_add_up_over_steps",
        "test_pipeline.test_evaluation_between_steps_leaves_gradients_alone",
    ],
    "counters and buffers during shape discovery": [
        "test_boundaries.test_counters_advance_once_a_microbatch",
        "test_boundaries.TestOverGloo.test_counters_see_no_phantom_microbatch",
    ],
    "a batch that m does not divide; a later step of another size": [
        "test_local.test_step_equals_one_process",
        "test_local.test_a_batch_smaller_than_m_is_refused_for_training",
        "test_pipeline.test_evaluation_between_steps_leaves_gradients_alone",
    ],
    "stages out of order, ranks that disagree on m or on the schedule": [
        "test_failures.test_the_handshake_names_every_difference_on_every_rank",
        "test_failures.test_the_handshake_names_a_rank_that_does_not_come",
    ],
    "an exception in user code on one rank": ["test_failures.test_an_exception_stops_all_ranks_within_two_seconds"],
    "several tensors, masks, None, detached or aliased outputs, keyword arguments": [
        "test_boundaries.test_what_crosses_a_boundary",
        "test_boundaries.test_keyword_arguments_reach_every_stage",
        "test_boundaries.TestOverGloo.test_everything_crosses",
    ],
    "receive buffers are a pool": ["test_pipeline.test_buffers_do_not_grow"],
    "weights tied across a cut": [
        "test_ties.test_tied_weights_train_as_in_one_process",
        "test_cells.test_copies_of_a_tied_weight_have_one_gradient",
    ],
    "schedules that a validator should refuse": [
        "test_comparison.test_a_microbatch_or_a_backward_left_out_is_refused_and_seen"
    ],
}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_has_its_tests(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ROWS[row]:
        module, *path = name.split(".")
        file = next((ROOT / "tests").rglob(f"{module}.py"))
        monkeypatch.syspath_prepend(file.parent)  # as pytest does once it collects the file
        found = importlib.import_module(module)
        for part in path:
            found = getattr(found, part)
        assert callable(found)
