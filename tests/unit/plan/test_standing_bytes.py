"""Bytes that stages hold for the whole step, and at its end."""

from __future__ import annotations

from pipeloom.config import load_layout
from pipeloom.plan.memory import with_embedding
from pipeloom.plan.run import predicted, stage_parameters


def test_a_tied_output_layer_has_no_weight_of_its_own_beside_the_embedding() -> None:
    run = {"parallel.pp": 2, "schedule.name": "zbv", "model.tie_word_embeddings": True}
    vee, line = load_layout("tiny", run), load_layout("tiny", run | {"schedule.name": "1f1b"})
    table = vee.config.model.vocab_size * vee.config.model.hidden_size
    assert with_embedding(vee.schedule) == [3]
    assert with_embedding(line.schedule) == []
    assert sum(stage_parameters(line)) - sum(stage_parameters(vee)) == table
    apart = load_layout("tiny", run | {"model.tie_word_embeddings": False})
    assert stage_parameters(apart)[3] - stage_parameters(vee)[3] == table
    planned = [sum(each.parameters for each in predicted(layout).ranks) for layout in (apart, vee)]
    assert planned[0] - planned[1] == 4 * table


def test_sums_over_ranks_hold_a_copy_of_each_holder() -> None:
    """Of a tied weight those of the first and the last rank, in fp32; of two routes those of the larger stage,
    since ranks hold the two in another order; else nothing."""

    def sums(**changes):
        run = {"parallel.pp": 4, "schedule.microbatches": 8, "model.tie_word_embeddings": True} | changes
        layout = load_layout("tiny", run)
        return layout, list(dict(predicted(layout).timeline.costs.bytes)["end_sums"])

    layout, of_two = sums(**{"schedule.name": "1f1b"})
    table = layout.config.model.vocab_size * layout.config.model.hidden_size
    assert of_two == [2 * 4 * table, 0, 0, 2 * 4 * table]
    assert sums(**{"schedule.name": "1f1b", "train.dtype": "bfloat16"})[1] == of_two
    assert sums(**{"schedule.name": "zbv", "model.num_hidden_layers": 8})[1] == [0] * 8
    both = {"schedule.name": "dualpipe", "parallel.pp": 2, "schedule.microbatches": 4}
    layout, of_routes = sums(**both, **{"model.tie_word_embeddings": False})
    assert of_routes == [*[2 * 4 * max(stage_parameters(layout)[:2])] * 2, 0, 0]


def test_gradients_without_buffers_are_made_in_the_step() -> None:
    """Under gpipe the peak is at the first backward, and one of two replicas has buffers then."""
    run = {"schedule.name": "gpipe", "parallel.pp": 1, "train.seq_len": 256, "schedule.microbatches": 4}
    alone, two = (predicted(load_layout("tiny", run | {"parallel.dp": dp})).ranks[0] for dp in (1, 2))
    assert (alone.gradients, two.gradients) == (0.0, alone.parameters)
