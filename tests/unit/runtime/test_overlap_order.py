"""The order of a pair's segments, of an action's alone, and what they hold while a communication is under way."""

from __future__ import annotations

from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import mse
from pair_schedules import data, split
from pipeloom.ops.segments import Compute, Done, Pending, Segment, Values, in_order
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions
from pipeloom.runtime.pipeline import call_before_layers
from pipeloom.schedule.actions import Action, Pair
from pipeloom.schedule.model import Schedule, parts
from segmented import WIDTH, Noted, NotedMove


def noted_run(schedule: Schedule, layers: int) -> list[str]:
    log: list[str] = []
    pipeline = LocalPipeline([Layer(str(at), partial(Noted, str(at), log)) for at in range(layers)], schedule, loss=mse)
    pipeline.step(*data(0, schedule.microbatches))
    return log


PAIR = """start B.combine0  F.attention0  start F.dispatch0  wait B.combine0  B.experts0  start B.dispatch0  W.experts0
          wait F.dispatch0  F.experts0  start F.combine0  wait B.dispatch0  B.attention0  W.attention0  wait F.combine0"""


def words(text: str) -> list[str]:
    return [" ".join(word.split()) for word in text.split("  ") if word.strip()]


def test_a_pair_runs_its_segments_in_the_order_of_the_specification() -> None:
    log = noted_run(pl.schedules.build("1f1b-overlap", 1, 3), 1)
    first = log.index("start B.combine0")
    length = len(words(PAIR))
    assert log[first : first + length] == words(PAIR)
    assert log[first + length : first + 2 * length] == words(PAIR)


def test_layers_of_a_pair_follow_one_another_and_hide_each_others_communication() -> None:
    """Two layers: the all-to-all between two layer pairs starts before the weight gradient and the forward beside it."""
    log = noted_run(pl.schedules.build("1f1b-overlap", 1, 2), 2)
    pair = log[log.index("start B.combine1") :][:28]
    wanted = """start B.combine1  F.attention0  start F.dispatch0  wait B.combine1  B.experts1  start B.dispatch1  W.experts1
        wait F.dispatch0  F.experts0  start F.combine0  wait B.dispatch1  B.attention1  start B.combine0  W.attention1
        wait F.combine0  F.attention1  start F.dispatch1  wait B.combine0  B.experts0  start B.dispatch0  W.experts0
        wait F.dispatch1  F.experts1  start F.combine1  wait B.dispatch0  B.attention0  W.attention0  wait F.combine1"""
    assert pair == words(wanted)


def test_a_backward_alone_hides_its_communication_behind_its_weight_gradients() -> None:
    log = noted_run(pl.schedules.build("1f1b", 1, 1), 1)
    assert log[log.index("start B.combine0") :] == words(
        """start B.combine0  wait B.combine0  B.experts0  start B.dispatch0  W.experts0
           wait B.dispatch0  B.attention0  W.attention0"""
    )


def test_weights_of_a_stage_with_communications_are_waited_for_before_it_runs() -> None:
    log: list[str] = []
    layers = [Layer(str(at), partial(Noted, str(at), log)) for at in range(2)]
    pipeline = LocalPipeline(layers, pl.schedules.build("1f1b", 1, 1), loss=mse)
    call_before_layers(pipeline, lambda layer, action: log.append(f"{action} reads {layer}"))
    pipeline.step(*data(0, 1))
    assert log[:3] == ["0F0 reads 0", "0F0 reads 1", "F.attention0"]


def test_the_turn_of_a_pair_divides_its_time_as_its_two_actions_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances when it is read: once for each of 3 and of 5 turns, and twice for each of 2 and of 4 waits."""
    cells = ["0F0", "1F0", "(0F1;1B0)OVERLAP_F_B", "0B0", "1F1", "1B1", "0B1"]
    schedule = Schedule.of([cells], placement=[0, 0], microbatches=2)
    layers = [Layer(str(at), partial(Noted, str(at), [])) for at in range(3)]
    pipeline = LocalPipeline(layers, schedule, loss=mse, stages=[1, 2])
    monkeypatch.setattr("pipeloom.runtime.overlap.time", SimpleNamespace(perf_counter=count().__next__))
    pipeline.step(*data(0, 2))
    (stats,) = pipeline.stats
    share = (stats.turns[2] - stats.starts[2]) / (stats.ends[2] - stats.starts[2])
    assert share == pytest.approx(7 / 20, rel=1e-3)


def test_an_input_gradient_leaves_all_weight_gradients_to_w() -> None:
    log = noted_run(split(pl.schedules.build("1f1b-overlap", 1, 2)), 1)
    pair = [word for word in words(PAIR) if word[0] != "W"]
    first = log.index("start B.combine0")
    assert log[first : first + len(pair) + 2] == [*pair, "W.attention0", "W.experts0"]


def test_a_quick_communication_is_waited_for_on_the_spot() -> None:
    """Inside a machine: the turn is kept, and passes at the communication that is worth hiding."""
    log: list[str] = []

    class TwoLevels(Noted):
        def segments(self) -> Any:
            attention, dispatch, experts, *rest = super().segments()
            inside = NotedMove("inside", log, quick=True)
            fan_out = Compute("fan out", lambda values: tuple(v * 1.0 for v in values))
            return (attention, dispatch, fan_out, inside, experts, *rest)

    LocalPipeline([Layer("0", partial(TwoLevels, "0", log))], pl.schedules.build("1f1b-overlap", 1, 2), loss=mse).step(
        *data(0, 2)
    )
    pair = log[log.index("start B.combine0") :]
    assert pair[: pair.index("wait F.combine0") + 1] == words(
        """start B.combine0  F.attention0  start F.dispatch0  wait B.combine0  B.experts0  start B.inside  W.experts0
           wait B.inside  start B.dispatch0
           wait F.dispatch0  start F.inside  wait F.inside  F.experts0  start F.combine0
           wait B.dispatch0  B.attention0  W.attention0  wait F.combine0"""
    )


def test_actions_of_unsegmented_pairs_keep_their_order() -> None:
    """A pair of stages without communications runs F, then B: what F made is sent before B computes."""
    log: list[str] = []

    class Plain(Noted):
        segments = None  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return self._noted("attention", x)

    schedule = pl.schedules.build("1f1b-overlap", 1, 2)
    LocalPipeline([Layer("0", partial(Plain, "0", log))], schedule, loss=mse).step(*data(0, 2))
    assert log == ["F.attention0", "F.attention0", "B.attention0", "B.attention0"]
    assert Action("F", 0, 1) in parts(schedule.programs[0][1])


@pytest.mark.parametrize(("segmented", "transport"), [("0", "auto"), ("", "auto"), ("0", "batched")])
def test_a_pair_runs_apart_where_nothing_overlaps(segmented: str, transport: Any) -> None:
    """Neither of its actions waits for the other's message."""
    schedule = pl.schedules.build("dualpipev", 2, 5)  # stages 0 and 3 on rank 0

    def layer(name: str) -> Layer:
        return Layer(name, partial(Noted, name, []) if name in segmented else partial(nn.Linear, WIDTH, WIDTH))

    options = RuntimeOptions(transport=transport)
    pipeline = LocalPipeline([layer(str(at)) for at in range(4)], schedule, loss=mse, options=options)
    pipeline.step(*data(0, 5))
    kept = [sum(isinstance(cell, Pair) for cell in program) for program in pipeline.schedule.programs]
    both = [sum(isinstance(cell, Pair) for cell in program) for program in schedule.programs]
    assert kept == {"0": [both[0], 0], "": [0, 0]}[segmented]
    assert pipeline.peak_activations == pl.simulate(schedule).peak_activations


class Forwarding:
    """A communication that hands on what it gets, and takes no None for the gradient of a place that carries."""

    name, quick = "forwarding", False

    def start(self, values: Values) -> Pending:
        return Done(values)

    def start_backward(self, gradients: Values, saved: Values) -> Pending:
        assert all(isinstance(gradient, Tensor) for gradient in gradients), gradients
        return Done(gradients)


class Dropping(nn.Module):
    """What comes of the first place of its communication is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = (nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)) for _ in range(2))

    def segments(self, **keywords: Any) -> tuple[Segment, ...]:
        return (
            Compute("before", lambda values: (values[0] * self.unused, values[0] * self.used)),
            Forwarding(),
            Compute("after", lambda values: (torch.tanh(values[1]),)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return in_order(self.segments(), (x,))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "1f1b-overlap"])
def test_every_place_of_a_communication_gets_a_gradient_in_the_backward(name: str) -> None:
    """Zeros where nothing used it: the other ranks of its group count on the tensor."""
    x, y = data(0, 4)
    pipeline = LocalPipeline([Dropping(), Dropping()], pl.schedules.build(name, 2, 4), loss=mse)
    pipeline.step(x, y)
    for parameter in (p for n, p in pipeline.named_parameters() if n.endswith("unused")):
        assert parameter.grad is not None
        assert not parameter.grad.any()


class Alone(nn.Linear):
    """A layer whose segments have no communication."""

    def segments(self) -> list[Compute]:
        return [Compute("first", self.refuse), Compute("second", self.refuse)]

    def refuse(self, values: Any) -> Any:
        raise AssertionError("each segment would be recomputed on its own, from inputs that are kept")


def test_a_layer_without_communications_runs_as_a_whole() -> None:
    layers = [Layer(f"layer{at}", lambda: Alone(WIDTH, WIDTH)) for at in range(2)]
    options = RuntimeOptions(recompute="full")
    pipeline = LocalPipeline(layers, pl.schedules.one_f_one_b(2, 4), loss=mse, options=options)
    pipeline.step(*data(0, 4))
    assert all(parameter.grad is not None for parameter in pipeline.parameters())


class Stopping(list[str]):
    """A log that raises where a word comes to it for the given time."""

    def __init__(self, word: str, times: int) -> None:
        super().__init__()
        self.word, self.times = word, times

    def append(self, word: str) -> None:
        super().append(word)
        if self.count(self.word) == self.times:
            raise ValueError(word)


@pytest.mark.parametrize(
    ("word", "times", "action"),
    [("W.experts0", 1, "B of stage 0 micro-batch 0"), ("F.experts0", 2, "F of stage 0 micro-batch 1")],
)
def test_an_error_in_a_pair_is_that_of_the_action_whose_segment_raised(word: str, times: int, action: str) -> None:
    layers = [Layer("0", partial(Noted, "0", Stopping(word, times)))]
    pipeline = LocalPipeline(layers, pl.schedules.build("1f1b-overlap", 1, 3), loss=mse)
    with pytest.raises(ValueError, match=word) as raised:
        pipeline.step(*data(0, 3))
    assert any(action in note for note in raised.value.__notes__), raised.value.__notes__
