"""The measurements of `pipeloom profile`: layers on the engine, a block's segments, and what follows from links by size."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from pipeloom.cli.profile import _form, _lines
from pipeloom.config import load_layout
from pipeloom.measure import layer_times as module
from pipeloom.measure import link_times as links
from pipeloom.measure.device_profile import DeviceProfile
from pipeloom.measure.layer_bytes import measured_layer
from pipeloom.measure.layer_times import (
    LayerTimes,
    Sample,
    SegmentTimes,
    kinds_of_layers,
    layer_times,
    layers_in_turn,
)
from pipeloom.measure.link_times import LinkTimes
from pipeloom.measure.rehearse import Clock, EmulatedLayer
from pipeloom.ops.deferred import WeightGradContext
from pipeloom.runtime import in_part
from pipeloom.schedule.segments import LayerSegments, PhaseTimes
from pipeloom.shapes.stage_bytes import LayerBytes

KINDS = ("F", "I", "W", "B", "R", "RB")


def test_layers_of_each_kind_run_every_action():
    keys = {"model.num_experts": 2, "model.moe_layer_freq": [0, 1, 1, 0], "model.tie_word_embeddings": True}
    measured = layer_times(load_layout("tiny", keys, world_size=0), torch.device("cpu"), 2, ("norms",))
    assert [each.layers for each in measured] == [(0,), (1, 4), (2, 3), (5,)]
    for each in measured:
        for times in (each.seconds, each.one):
            assert set(times) == {*KINDS, "R:norms"}
            assert all(sample.median > 0 for sample in times.values())
    embedding, block = (sum(sample.median for sample in each.seconds.values()) for each in measured[:2])
    assert block > embedding  # which is a look-up
    embedding, block = (each.seconds["R:norms"].median for each in measured[:2])
    assert block > 2 * embedding  # which has no norms


def test_small_layers_run_in_turn_so_that_none_stays_in_a_cache():
    tiny = {"model.num_hidden_layers": 6, "model.num_experts": 2, "model.moe_layer_freq": [0, 1, 1, 1, 1, 1]}
    small = load_layout("tiny", tiny, world_size=0)
    assert layers_in_turn(small, kinds_of_layers(small)) == [(0,), (1,), (2, 3, 4, 5), (7,)]
    large = load_layout("tiny", {"model.preset": "llama3-8b"}, world_size=0)  # 0.87 GB a block
    assert layers_in_turn(large, kinds_of_layers(large)) == [(0,), (1,), (33,)]


def test_a_sample_is_the_median_and_the_median_distance():
    assert Sample.of([4.0, 1.0, 2.0, 9.0, 3.0]) == (3.0, 1.0)


class Counted(Clock):
    """A clock whose computations take no time, and are counted."""

    now = 0.0

    def compute(self, name, kind, seconds):
        self.now += seconds


def test_segments_take_the_time_of_their_own_f_i_and_w(monkeypatch):
    times = {"attention": PhaseTimes(1.0, 2.0, 4.0), "experts": PhaseTimes(8.0, 16.0, 32.0)}
    clock, context = Counted(), WeightGradContext()
    monkeypatch.setattr(module, "now", lambda device: clock.now)
    layer = EmulatedLayer(clock, LayerSegments(times["attention"], times["experts"]))
    layer.set_weight_grad_context(context)
    computations = [segment for segment in layer.segments() if segment.name in times]
    steps = list(module.segments_one_by_one(computations, torch.ones(2), context, torch.device("cpu")))
    assert steps == [(name, *times[name]) for name in ("experts", "attention")]


def test_a_block_is_its_experts_and_the_rest_without_the_first_run(monkeypatch):
    factors = iter((100.0, 1.0, 3.0))

    def run(*_):
        factor = next(factors)
        return [(name, *(factor * n for n in (1, 2, 4))) for name in ("mixture", "experts", "attention")]

    monkeypatch.setattr(module, "segments_one_by_one", run)
    keys = {"model.num_experts": 4, "model.num_experts_per_tok": 2, "model.moe_layer_freq": [0, 1, 1, 0]}
    measured = module.segment_times(load_layout("tiny", keys, world_size=0), torch.device("cpu"), 2)
    assert measured.experts == ((2, 1), (4, 2), (8, 4))
    assert measured.attention == ((4, 2), (8, 4), (16, 8))
    assert (measured.layers, measured.rows) == (
        2,
        2 * 16 * 2 * 32 * 4,
    )  # 2 x 16 tokens, to 2 experts, of width 32 in fp32


def test_the_slowest_process_counts_and_pairs_are_apart(monkeypatch):
    def row(operation, ranks, *seconds):
        return LinkTimes("pp", operation, ranks, (1, 2), tuple(Sample(each, 0) for each in seconds))

    others = [row("send", (0, 1), 2, 5), row("send", (1, 2), 9, 9), row("all-gather", (2, 3), 1, 8)]
    mine = [row("send", (0, 1), 3, 4), row("all-gather", (0, 1), 2, 7)]
    monkeypatch.setattr(links, "all_gather_json", lambda rows, group: [rows, [asdict(each) for each in others]])
    assert links.slowest(mine) == [
        row("send", (0, 1), 3, 5),
        row("all-gather", (0, 1), 2, 8),
        row("send", (1, 2), 9, 9),
    ]


def test_a_link_has_a_latency_and_a_bandwidth():
    link = LinkTimes("pp", "send", (0, 1), (1_000, 1_001_000), (Sample(0.5, 0), Sample(2.5, 0)))
    assert (link.latency, link.bandwidth) == (0.5, 500_000)
    assert link.time(1_500_000) == 3.5


def profile_of(links):
    seconds = [{kind: Sample(10.0**at * (1 + n), 0) for n, kind in enumerate(KINDS)} for at in range(3)]
    layers = [
        LayerTimes(name, numbers, times, {kind: Sample(each.median / 2, 0) for kind, each in times.items()})
        for name, numbers, times in zip(("first", "block", "last"), ((0,), (1, 2, 3, 4), (5,)), seconds, strict=True)
    ]
    three = (Sample(1, 0), Sample(2, 0), Sample(3, 0))
    sizes = [LayerBytes(saved=10.0 * at, input=at, pending=100.0 * at) for at in range(6)]
    return DeviceProfile("here", layers, sizes, SegmentTimes(4, three, three[::-1], rows=4000.0), links)


def test_stage_costs_are_sums_over_their_layers_in_the_order_of_the_schedule():
    layout = load_layout("tiny", {"schedule.name": "zbv", "schedule.microbatches": 4}, world_size=0)
    slow, fast = (
        LinkTimes("pp", "send", (rank, rank + 1), (0, 100), (Sample(latency, 0), Sample(2 * latency, 0)))
        for rank, latency in enumerate((3.0, 1.0))
    )
    talk = LinkTimes("ep", "all-to-all", (0, 1), (0, 100), (Sample(0.5, 0), Sample(1.5, 0)))
    others = LinkTimes("dp", "all-to-all", (0, 1), (0, 100), (Sample(7, 0), Sample(8, 0)))
    form = _form(layout, profile_of([slow, fast, others, talk]))
    assert "W weight gradient, B both at once" in _lines(form)[-1]
    costs = form["costs"]
    assert layout.schedule.placement == (0, 1, 1, 0)
    assert costs["forward"] == (11, 10, 10, 110)
    assert [costs[name] for name in ("input_grad", "weight_grad", "backward", "recompute")] == [
        tuple(factor * each for each in (11, 10, 10, 110)) for factor in (2, 3, 4, 5)
    ]
    assert (costs["p2p"], costs["bandwidth"], costs["message"]) == (3.0, 100 / 3, 2 * 16 * 32 * 4)
    sizes = dict(costs["bytes"])
    assert sizes["pending"] == (100, 200, 300, 900)
    assert form["segments"] == {
        "attention": [1, 2, 3],
        "experts": [3, 2, 1],
        "dispatch": 40.5,
        "combine": 40.5,
        "chunks": 1,
        "layers": 1,
    }


def test_without_links_messages_and_all_to_alls_take_no_time():
    form = _form(load_layout("tiny", world_size=0), profile_of([]))
    assert (form["costs"]["p2p"], form["costs"]["bandwidth"], form["segments"]["dispatch"]) == (0, None, 0)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("deepseek-v3", "own decoder cannot compute this deepseek_v3"),
        ("llama3-405b", "layers, one of each kind, with their gradients take"),
    ],
)
def test_models_that_cannot_be_measured_are_refused(word, said, monkeypatch):
    from pipeloom.cli import app
    from pipeloom.errors import PipeloomError
    from pipeloom.train.workers import preflight

    monkeypatch.setattr(preflight, "memory_of_machine", lambda: 10**10)
    with pytest.raises(PipeloomError, match=said):
        app(["profile", word], standalone_mode=False)


def test_the_costs_of_parts_are_the_sums_over_a_stages_layers():
    layout = load_layout(
        "tiny", {"model.num_hidden_layers": 2, "parallel.pp": 2, "schedule.name": "1f1b"}, world_size=0
    )
    names = ("E", "block", "head")
    seconds = {kind: Sample(1.0, 0.0) for kind in KINDS}
    layers = [
        LayerTimes(name, numbers, seconds | {"R:norms": Sample(time, 0.0)}, seconds)
        for name, numbers, time in zip(names, ((0,), (1, 2), (3,)), (0.0, 2.0, 1.0), strict=True)
    ]
    sizes = [LayerBytes(0.0), *[LayerBytes(10.0, parts={"norms": 4.0})] * 2, LayerBytes(5.0, parts={"norms": 3.0})]
    costs = _form(layout, DeviceProfile("cpu", layers, sizes, None, []))["costs"]
    assert dict(costs["parts"]) == {"norms": (2.0, 3.0)}
    assert dict(costs["bytes"])["saved:norms"] == (4.0, 7.0)


def test_the_bytes_of_parts_are_those_that_no_one_else_holds():
    class Parted(torch.nn.Module):
        def forward(self, x):
            y = in_part("outer", self.outer, x.exp())  # saved by exp, and an argument of the part
            return in_part("other", lambda y: y * y, y).sin()  # the output of "outer" is the argument of this one

        def outer(self, x):
            return in_part("inner", torch.sigmoid, x * x.cos()).repeat(2)  # saved: x, x.cos(), its argument x, sigmoid

    x = torch.ones(25, requires_grad=True)  # 100 bytes
    measured, _ = measured_layer(Parted(), (x,), {})
    assert measured.saved == 100 + 2 * 100 + 200 + 200  # exp; cos and sigmoid; the outputs of both parts
    alone = {
        "outer": 200 + 200,
        "inner": 100 - 100,
        "other": 200,
    }  # the argument of inner is held, and nothing saves it
    # Together: what outer returns is held as the argument of other, and inner belongs to outer.
    together = {"inner+other": 200, "other+outer": 200 + 200, "inner+outer": 400, "inner+other+outer": 400}
    assert measured.parts == alone | together
