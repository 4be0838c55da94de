"""The output layer spread over the pipeline, as a dry run predicts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.config import load_layout
from pipeloom.errors import UsageError
from pipeloom.plan.measured import MeasuredLayers
from pipeloom.plan.run import predicted

KEYS = {
    "parallel.pp": 2,
    "schedule.name": "1f1b",
    "schedule.microbatches": 4,
    "train.global_batch_size": 4,
    "train.seq_len": 64,
    "train.device": "cpu",
    "model.vocab_size": 4096,
    "model.tie_word_embeddings": False,
    "model.hidden_size": 64,
}


def run(**keys):
    return predicted(load_layout("tiny", KEYS | {key.replace("__", "."): value for key, value in keys.items()}))


@pytest.fixture(scope="module")
def spread():
    return run(parallel__vocabulary="pp")


def test_every_rank_has_its_share_of_the_weight(spread):
    whole = run()
    assert sum(each.parameters for each in spread.ranks) == sum(each.parameters for each in whole.ranks)
    sizes = spread.timeline.costs.bytes_in("device", 4)
    assert sizes["params"][2:] == (2 * 4096 // 2 * 64 * 4,) * 2  # of the embedding and of the output layer
    assert sizes["optimizer"][2:] == (2 * 4096 // 2 * 64 * 8,) * 2
    tied = run(parallel__vocabulary="pp", model__tie_word_embeddings=True).timeline.costs
    assert tied.bytes_in("device", 4)["params"][2:] == (4096 // 2 * 64 * 4,) * 2


def test_a_share_keeps_a_copy_its_logits_and_their_exponentials(spread):
    sizes = spread.timeline.costs.bytes_in("device", 4)
    assert sizes["hidden"] == (0, 0, 64 * 64 * 4, 64 * 64 * 4)
    assert sizes["scores"] == (0, 0, *[64 * 2048 * (4 + 4)] * 2)


def test_s_has_the_forward_and_with_one_reduction_the_input_gradient(spread):
    fused, two = (
        spread.timeline.costs,
        run(parallel__vocabulary="pp", schedule__transforms=["vocabulary=two"]).timeline.costs,
    )
    product = 2 * 64 * 2048 * 64 / (64 / (64 + 192))  # operations at the rate of 64 rows
    assert (fused.scores, fused.scores_grad) == (pytest.approx(2 * product), pytest.approx(product))
    assert (two.scores, two.scores_grad) == (pytest.approx(product), pytest.approx(2 * product))


def test_the_last_stage_keeps_its_norm_alone(spread):
    whole = run()
    times = [each.timeline.costs.forward[1] for each in (whole, spread)]
    assert times[1] < times[0]
    layers = spread.timeline.schedule
    assert spread.layout.stages == load_layout("tiny", KEYS | {"parallel.vocabulary": "pp"}).stage_layers
    assert len(layers.vocabulary) == 2


def test_t_has_the_weights_gradient_beside_its_sum(spread):
    """Both ranks are at their peaks in a T."""
    sizes = spread.timeline.costs.bytes_in("device", 4)
    there = [sizes["temporaries"][stage] + sum(sizes["grads"][s] for s in (stage, stage + 2)) for stage in (0, 1)]
    share = 4096 // 2 * 64 * 4
    assert max(there) >= share


def test_a_profile_of_the_whole_output_layer_does_not_apply():
    layout = load_layout("tiny", KEYS | {"parallel.vocabulary": "pp"})
    with pytest.raises(UsageError, match='nearest: "last"'):
        predicted(layout, measured_layers=MeasuredLayers({}, 64, 0.0, 1.0))


def test_the_step_on_a_device_counts_s_and_t(spread):
    from pipeloom.plan import load_device

    layout = load_layout("tiny", KEYS | {"parallel.vocabulary": "pp"})
    step = predicted(layout, load_device("h100")).step
    costs = predicted(layout, load_device("h100")).timeline.costs
    assert costs.broadcast == costs.combine > 0
    assert step.compute + step.exchange > 4 * (costs.scores + costs.scores_grad)
    assert replace(spread.layout, stages=()) == replace(predicted(layout).layout, stages=())
