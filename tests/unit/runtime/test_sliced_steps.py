"""Sequence slices in the runtime, against the unsliced run: loss, every gradient, evaluation, own layers with state."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from models import gradients, worst
from pipeloom.errors import ArgumentError, ConfigError, UsageError, VerifyError
from pipeloom.models import DecoderShape, layers
from pipeloom.models.layers import cross_entropy
from pipeloom.ops.host_memory import HostBuffers
from pipeloom.ops.layer import SlicePlace
from pipeloom.ops.live_bytes import LiveBytes
from pipeloom.ops.slices import SequenceHistory, SliceState
from pipeloom.parallel.context import attend_in_blocks
from pipeloom.runtime import Layer, LocalPipeline, RuntimeOptions
from pipeloom.runtime.batch import SequenceSlices
from pipeloom.schedule import Schedule, transforms
from pipeloom.schedules import balanced_cuts, build, cut_sequences

pytestmark = pytest.mark.core

TOKENS = 8
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 0, 1, 0, 0, 1]])


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 12, (3, TOKENS + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:2, 3:6] = targets[2, :7] = -100  # all of some slices
    return tokens[:, :-1], targets


def decoder(experts: int = 0, dropout: float = 0.1) -> list[Layer]:
    shape = DecoderShape(
        num_hidden_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=8,
        vocab_size=12,
        num_experts=experts,
        dropout=dropout,
    )
    return layers(shape, seed=0, dtype=torch.float64)


def local(made: list[Layer], schedule: pl.Schedule, **options: Any) -> LocalPipeline:
    return LocalPipeline(made, schedule, loss=cross_entropy, options=RuntimeOptions(seed=1, **options))


SCHEDULES = {
    "1f1b": build("1f1b", 2, 2),
    "interleaved": build("interleaved", 2, 2, chunks=2),
    "zb-h1": build("zb-h1", 2, 2),
    "one rank": build("1f1b", 1, 2),
    "four ranks": build("1f1b", 4, 2),
    "two routes": build("chimera", 2, 2),
}


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("name", "slices", "experts", "options"),
    [
        ("1f1b", 4, 0, {}),
        ("1f1b", 2, 3, {"slice_tokens": (3, 5)}),
        ("1f1b", 8, 0, {"recompute": "full"}),
        ("interleaved", 2, 3, {"recompute": "full"}),
        ("zb-h1", 4, 3, {}),
        ("zb-h1", 2, 0, {"recompute": "full"}),
        ("one rank", 3, 3, {}),
        ("four ranks", 2, 0, {"shapes": "each"}),
        ("two routes", 2, 0, {}),
    ],
)
def test_a_sliced_step_equals_the_unsliced_one(
    name: str, slices: int, experts: int, options: dict[str, Any], packed: bool
) -> None:
    keywords = {"position_ids": POSITIONS} if packed else {}
    schedule = SCHEDULES[name]
    one, cut = local(decoder(experts), schedule), local(decoder(experts), cut_sequences(schedule, slices), **options)
    for pipeline in (one, cut):
        pipeline.next_step = 3  # dropout depends on it
    losses = [pipeline.step(*rows(), **keywords).item() for pipeline in (one, cut)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-7)  # returned in fp32
    assert worst(gradients(cut), gradients(one)) <= 1e-12


@pytest.mark.parametrize(
    ("name", "chunks", "slices"),
    [("1f1b", None, 4), ("interleaved", 2, 3), ("zb-h1", None, 4), ("interleaved-zb", 2, 2), ("dualpipev", None, 2)],
)
def test_a_step_in_the_order_of_the_slices_equals_the_unsliced_one(name: str, chunks: int | None, slices: int) -> None:
    """Backwards of a micro-batch's slices stand between forwards of the next one's, and slices have other numbers of tokens."""
    ends = balanced_cuts(TOKENS, slices, 0.9).positions
    tokens = tuple(end - start for start, end in pairwise(ends))
    plain, ordered = build(name, 2, 4, chunks), build(name, 2, 4, chunks, {"slices": slices})
    one, cut = local(decoder(3), plain), local(decoder(3), ordered, slice_tokens=tokens)
    x, y = (torch.cat((part, part.flip(0))) for part in rows())
    for pipeline in (one, cut):
        pipeline.step(x, y)
    assert worst(gradients(cut), gradients(one)) <= 1e-12


def test_tokens_of_slices_that_do_not_fit_the_sequences_of_a_step_are_refused() -> None:
    cut = local(decoder(), cut_sequences(SCHEDULES["1f1b"], 2), slice_tokens=(3, 6))
    with pytest.raises(
        UsageError, match=r"slice_tokens is \(3, 6\), with the sum 9; it must be 2 numbers with the sum 8"
    ):
        cut.step(*rows())
    cut.evaluate(*rows())


IN_HOST_MEMORY = ("recompute=whole", "offload=kept")


@pytest.mark.parametrize(
    ("name", "packed", "steps"), [("1f1b", False, 2), ("interleaved", True, 1), ("zb-h1", True, 1)]
)
def test_a_step_from_inputs_keys_and_values_in_host_memory_equals_the_unsliced_one(
    name: str, packed: bool, steps: int
) -> None:
    """A second step uses the buffers of the first again."""
    schedule = transforms.transformed(cut_sequences(SCHEDULES[name], 4), IN_HOST_MEMORY)
    assert sum("OKEPT" in str(cell) for program in schedule.programs for cell in program) >= 14
    one, cut = local(decoder(3), SCHEDULES[name]), local(decoder(3), schedule)
    for pipeline in (one, cut):
        for _ in range(steps):
            pipeline.step(*rows(), **({"position_ids": POSITIONS} if packed else {}))
    assert worst(gradients(cut), gradients(one)) <= 1e-12


def test_keys_and_values_in_host_memory_are_on_the_device_one_piece_at_a_time() -> None:
    """Of seven pieces of 8 kB, one is there with its gradient; where they stay on the device, all seven gradients."""
    buffers, generator = HostBuffers(torch.device("cpu")), torch.Generator().manual_seed(1)
    query, *pieces = (torch.randn(2, 1, 1, 64, 16, generator=generator, requires_grad=True) for _ in range(8))

    def attend(on_host: bool) -> tuple[int, list[Tensor | None]]:
        history = SequenceHistory()
        states = [SliceState(history, SlicePlace(at, 8, 64 * at, 64 * at + 64, 512)) for at in range(8)]
        with LiveBytes() as held:
            for state, piece in zip(states, pieces, strict=False):
                state.keep(piece.clone())
                if on_host:
                    history.pieces[state.place.index].to_host(buffers, lambda: None)
        assert held.now == (0 if on_host else 7 * 8192)
        leaves = [each.detach().clone().requires_grad_() for each in (query[0], *query)]
        with LiveBytes() as live:
            attend_in_blocks(*leaves, state=states[7]).square().sum().backward()
        assert all(torch.equal(a[0], b) for a, b in zip(states[7].earlier, pieces, strict=True))
        sums = [history.pieces[at].gradient(0) for at in range(7)]
        return live.peak, [*(leaf.grad for leaf in leaves), *sums]

    (resident, wanted), (streamed, values) = attend(False), attend(True)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(values, wanted, strict=True))
    assert resident - streamed >= 5 * 8192


@pytest.mark.parametrize("kind", ["R", "R:attention", "O", "parts of O"])
def test_slices_are_recomputed_whole_or_travel(kind: str) -> None:
    plain = build("1f1b", 2, 2)
    schedule = cut_sequences(plain, 4)
    if kind.startswith("R"):
        part = kind.partition(":")[2]
        schedule = transforms.recompute(schedule, whole=not part, part=part)
    else:
        part = ":1/2" if kind == "parts of O" else ""
        programs = [list(map(str, program)) for program in schedule.programs]
        for program in programs:  # the second slice of each micro-batch, on both stages
            for cell in [each for each in program if "F" in each and each.endswith(".1")]:
                at = program.index(cell)
                program.insert(at + 1, cell.replace("F", "O") + part)
                program.insert(program.index(cell.replace("F", "B")), cell.replace("F", "L") + part)
        schedule = schedule.with_programs(programs)
    one, cut = local(decoder(3), plain), local(decoder(3), schedule)
    for pipeline in (one, cut):
        pipeline.step(*rows())
    assert worst(gradients(cut), gradients(one)) <= 1e-12


class Holds(nn.Module):
    """Passes on its input, of which it saves a copy for the backward; counts the bytes of these copies that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.now = self.peak = 0

    def forward(self, x: Tensor) -> Tensor:
        copy = x.detach().clone()
        self.now += copy.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(copy.untyped_storage(), self.freed, copy.nbytes)
        return x + self.weight * copy  # the product saves it

    def freed(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize(("slices", "peak"), [(2, 4.64), (4, 3.03), (8, 2.16)])
def test_bytes_of_the_first_rank_at_balanced_cuts_are_the_simulated_ones(slices: int, peak: float) -> None:
    """8 ranks, attention 60 % of a sequence's time: in micro-batches, of whole sequences 8 would be held."""
    cuts = balanced_cuts(1000, slices, 0.6)
    tokens = tuple(end - start for start, end in pairwise(cuts.positions))
    schedule = build("1f1b", 8, 8, options={"slices": slices})
    stages = [Holds() for _ in range(8)]
    pipeline = LocalPipeline(
        [Layer(f"l{at}", lambda at=at: stages[at]) for at in range(8)],
        schedule,
        loss=mean_square,
        options=RuntimeOptions(slice_tokens=tokens),
    )
    pipeline.step(*torch.ones(2, 8, 1000))
    assert stages[0].peak / 4000 == pytest.approx(peak, abs=0.005)
    assert [each.peak / 4000 for each in stages] == pytest.approx(pl.simulate(schedule, cuts.costs()).peak_memory)
    assert all(each.now == 0 for each in stages)


def test_what_is_kept_is_copied_for_an_action_that_recomputes_alone() -> None:
    schedule = Schedule.of([["0F0", "0OKEPT0", "0LKEPT0", "(0R0;0B0)"]], placement=[0], microbatches=1)
    pl.check(schedule)
    with pytest.raises(ConfigError, match=r"0OKEPT0: what is kept .* there is no 0R0: .* \(recompute=whole\)"):
        local(decoder(), schedule)


def test_an_input_that_a_layer_changes_in_place_is_refused_before_it_is_copied() -> None:
    class Changes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    schedule = transforms.transformed(build("1f1b", 2, 4), IN_HOST_MEMORY)
    pipeline = LocalPipeline([lambda: nn.Linear(4, 4), lambda: Changes(4, 4)], schedule, loss=mean_square)
    with pytest.raises(RuntimeError, match="a layer changes the stage's input in place"):
        pipeline.step(torch.ones(4, 4), torch.ones(4, 4))


def test_evaluation_and_prediction_equal_the_unsliced_ones() -> None:
    plain = build("1f1b", 2, 2)
    one, cut = local(decoder(3), plain), local(decoder(3), cut_sequences(plain, 4))
    x, y = rows()
    for count in (3, 1):
        for pipeline in (one, cut):
            pipeline.eval()
        assert cut.evaluate(x[:count], y[:count]).item() == pytest.approx(one.evaluate(x[:count], y[:count]).item())
        assert torch.equal(cut.predict(x[:count]), one.predict(x[:count]))


class Decay(nn.Module):
    """x [rows, tokens, width] -> y_t = x_t w + y_(t-1) / 2: a layer of one's own with a state of one token."""

    def __init__(self, width: int = 4, declared: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, width + 1) / width)
        if not declared:
            self.forward = self.alone  # type: ignore[method-assign]

    def alone(self, x: Tensor) -> Tensor:
        return self.forward_from(x, torch.zeros_like(x[:, 0]))

    def forward(self, x: Tensor, slice_state: SliceState | None = None) -> Tensor:
        earlier = () if slice_state is None else slice_state.earlier
        y = self.forward_from(x, earlier[-1][0] if earlier else torch.zeros_like(x[:, 0]))
        if slice_state is not None:
            slice_state.keep(y[:, -1])
        return y

    def forward_from(self, x: Tensor, last: Tensor) -> Tensor:
        outs = []
        for token in x.unbind(1):
            last = token * self.weight + last / 2
            outs.append(last)
        return torch.stack(outs, 1)


def mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def verified(declared: bool, schedule: pl.Schedule) -> pl.Verified:
    x, y = torch.randn(2, 4, 6, 4, generator=torch.Generator().manual_seed(2)).unbind()
    made = [Layer(f"l{at}", lambda at=at: Decay(declared=declared or at != 1)) for at in range(3)]
    return pl.verify(made, schedule, x, y, loss=mean_square, steps=1)


def test_verify_accepts_a_layer_that_declares_its_state_and_names_one_that_does_not() -> None:
    schedule = cut_sequences(build("zb-h1", 2, 2), 3)
    assert max(verified(True, schedule).errors.values()) <= 1e-6
    assert max(verified(True, transforms.transformed(schedule, IN_HOST_MEMORY)).errors.values()) <= 1e-6
    words = r"the output of layer 'l1' of stage 0, micro-batch 0 slice 1, differs .*own_model.md, 'slices'"
    with pytest.raises(VerifyError, match=words):
        verified(False, schedule)


class Broadcast(nn.Module):
    """Adds the first slice's weight, in bf16, to every slice; the later slices' gradients of it are 256, 1, 1, …."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, x: Tensor, slice_state: SliceState | None = None) -> Tensor:
        assert slice_state is not None
        if slice_state.place.index:
            return x * slice_state.earlier[0][0]
        slice_state.keep(self.weight * 1)
        return x * 0


@pytest.mark.parametrize("words", [(), IN_HOST_MEMORY], ids=["device", "host"])
def test_gradients_of_a_piece_are_summed_in_fp32(words: tuple[str, ...]) -> None:
    """256 + 1 + 1 + 1 + 1 = 260 in bf16 only if it is rounded once."""
    schedule = transforms.transformed(cut_sequences(build("1f1b", 1, 1), 6), words)
    x = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0, 256.0]], dtype=torch.bfloat16)
    pipeline = LocalPipeline([Layer("l", Broadcast)], schedule, loss=lambda out, _: out.sum() * 6, weight=len)
    pipeline.step(x, x)
    (parameter,) = pipeline.parameters()
    assert parameter.grad is not None
    assert parameter.grad.item() == 260


def test_a_piece_is_freed_by_the_backward_of_its_slice() -> None:
    pieces: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Looks(Decay):
        def forward(self, x: Tensor, slice_state: SliceState | None = None) -> Tensor:
            assert slice_state is not None
            alive.append(sum(piece() is not None for piece in pieces))
            y = super().forward(x, slice_state)
            pieces.extend(weakref.ref(piece) for (piece,) in slice_state.earlier)
            return y

    x = torch.randn(2, 3, 4)
    LocalPipeline([Looks], cut_sequences(build("1f1b", 1, 2), 3), loss=mean_square).step(x, x)
    assert alive == [0, 0, 1, 0, 0, 1]  # a slice sees the earlier pieces: one, then two, of which the first again
    assert not any(piece() is not None for piece in pieces)


def test_a_piece_in_host_memory_is_gone_from_the_device_when_its_slice_is_recomputed() -> None:
    pieces: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Adds(nn.Linear):
        def forward(self, x: Tensor, slice_state: SliceState | None = None) -> Tensor:
            assert slice_state is not None
            alive.append(sum(piece() is not None for piece in pieces))
            piece = super().forward(x).sum(1)
            pieces.append(weakref.ref(piece.untyped_storage()))
            x = x + sum((earlier.sum() for (earlier,) in slice_state.earlier), torch.zeros(()))
            slice_state.keep(piece)
            return x

    schedule = transforms.transformed(cut_sequences(build("1f1b", 1, 1), 3), IN_HOST_MEMORY)
    x = torch.randn(2, 3, 4)
    LocalPipeline([lambda: Adds(4, 4)], schedule, loss=mean_square).step(x, x)
    assert alive[4:] == [0, 0]  # after the last one, which does not travel


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (torch.zeros(2), torch.zeros(2), "the inputs hold no tensor with a dimension of a sequence"),
        (torch.zeros(2, 3), torch.zeros(2, 3), "sequences of 3 tokens cannot be cut into 4 slices; nearest: 3"),
        (torch.zeros(2, 4), torch.zeros(2), r"targets hold a tensor \[rows\]: give one for each token, \[rows, 4, …\]"),
    ],
)
def test_a_batch_without_tokens_to_cut_is_refused(x: Tensor, y: Tensor, words: str) -> None:
    pipeline = LocalPipeline([lambda: nn.Linear(1, 1)], cut_sequences(build("1f1b", 1, 1), 4), loss=mean_square)
    with pytest.raises(UsageError, match=words):
        pipeline.step(x, y)


def test_even_slices_hold_multiples_of_the_tokens_that_ranks_share() -> None:
    slices = SequenceSlices.of(torch.zeros(1, 20), 2, (6, 2), multiple=4)  # which do not add up
    assert slices is not None
    assert [place.end - place.start for place in slices.places] == [12, 8]
    with pytest.raises(UsageError, match="20 tokens cannot be cut into 6 slices; nearest: 5"):
        SequenceSlices.of(torch.zeros(1, 20), 6, multiple=4)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"router": "switch", "num_experts_per_tok": 1}, 'router="switch" draws numbers for whole sequences'),
        ({"capacity_factor": 1.0}, "capacity_factor=1 counts choices of whole sequences"),
    ],
)
def test_a_router_of_whole_sequences_is_refused(option: dict[str, Any], words: str) -> None:
    shape = DecoderShape(1, 8, 1, 1, 8, vocab_size=12, num_experts=2, **option)
    pipeline = local(layers(shape, seed=0), cut_sequences(build("1f1b", 1, 1), 2))
    with pytest.raises(ArgumentError, match=words):
        pipeline.step(*rows())


def test_running_statistics_and_a_change_of_slices_are_refused() -> None:
    schedule = build("1f1b", 1, 2)
    with pytest.raises(ConfigError, match="running statistics"):
        local([Layer("norm", lambda: nn.BatchNorm1d(4))], cut_sequences(schedule, 2))
    with pytest.raises(ConfigError, match="cannot change its slices from 1 to 2"):
        local(decoder(), schedule).adopt(cut_sequences(schedule, 2))
