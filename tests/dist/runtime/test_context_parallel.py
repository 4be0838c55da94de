"""Context parallelism from Python: whole sequences in, loss and every gradient of one process out, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import ArgumentError, DistributedError, UsageError
from pipeloom.models import DecoderShape, GateShape, MoELayer, TopKGate, ahead, cross_entropy, layers
from pipeloom.ops.layer import MicrobatchContext, SharesTokens
from pipeloom.parallel.context import ContextParallel
from pipeloom.parallel.dispatch import ExpertParallel
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.sharding import shard_of
from pipeloom.runtime import Layer, LocalPipeline, Pipeline, RuntimeOptions
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

ROWS, TOKENS, MICROBATCHES, HIDDEN = 6, 16, 3, 8
MOE: dict[str, Any] = {"num_experts": 4, "aux_loss_coef": 0.3}
POSITIONS = torch.stack([torch.cat((torch.arange(at + 3), torch.arange(TOKENS - at - 3))) for at in range(ROWS)])


def batch() -> tuple[Tensor, Tensor]:
    """Other tokens in every micro-batch; one row and some slices have few targets."""
    rows = torch.randint(0, 12, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    targets = rows[:, 1:].clone()
    targets[0, :11] = targets[3, 5:9] = -100
    return rows[:, :-1], targets


def decoder(keys: dict[str, Any]) -> DecoderShape:
    return DecoderShape(2, HIDDEN, 2, 1, HIDDEN, vocab_size=12, dropout=0.2, **keys)


def against_one_process(
    rank: int, keys: dict[str, Any], pp: int, ep: int, exchange: str, slices: int, slice_tokens: Any, packed: bool
) -> tuple[float, float, float]:
    """The relative errors of the loss, of the worst gradient, and of a loss and outputs without gradients."""
    shape, (tokens, targets) = decoder(keys), batch()
    keywords = {"position_ids": POSITIONS} if packed else {}
    if depth := shape.num_nextn_predict_layers:
        keywords |= ahead(tokens, targets, depth, keywords.get("position_ids"))
    made = layers(shape, 0, torch.float64)
    one = LocalPipeline(
        made, pl.schedules.one_f_one_b(1, MICROBATCHES), loss=cross_entropy, options=RuntimeOptions(seed=1)
    )
    mesh = Mesh.of(MeshShape(pp=pp, cp=2, ep=ep))
    assert mesh is not None
    context = ContextParallel(mesh.cp, "ring") if exchange == "ring" else None  # else the pipeline sets it
    experts = ExpertParallel(mesh.ep) if ep > 1 else None
    schedule = pl.schedules.one_f_one_b(pp, MICROBATCHES)
    schedule = pl.schedules.cut_sequences(schedule, slices) if slices > 1 else schedule
    options = RuntimeOptions(seed=1, slice_tokens=slice_tokens, monitor=False)
    spread = layers(shape, 0, torch.float64, expert=experts, context=context)
    pipeline = Pipeline(spread, schedule, loss=cross_entropy, mesh=mesh, options=options)
    losses, predicted = [], []
    for each in (one, pipeline):
        losses.append(each.step(tokens, targets, **keywords).item())
        each.eval()
        losses.append(each.evaluate(tokens, targets, **keywords).item())
        predicted.append(each.predict(tokens, **({"position_ids": POSITIONS} if packed else {})))
    loss, evaluated = (abs(losses[2 + at] - losses[at]) / losses[at] for at in range(2))
    outputs = 0.0 if predicted[1] is None else float((predicted[1] - predicted[0]).abs().max())
    right, worst = dict(one.named_parameters()), 0.0
    for name, parameter in pipeline.named_parameters():
        want, got = right[name].grad, parameter.grad
        assert want is not None, name
        assert got is not None, name
        want = shard_of(want, pipeline.layouts[name], {"ep": mesh.place.ep})
        worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    pipeline.close()
    return loss, worst, evaluated + outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ({}, 1, 1, "set by the pipeline", 1, None, True),
        (MOE, 1, 1, "ring", 1, None, False),
        (MOE, 1, 2, "set by the pipeline", 3, None, True),
        (MOE, 1, 1, "ring", 2, (4, 12), False),
        ({**MOE, "router": "sigmoid"}, 1, 1, "set by the pipeline", 2, None, False),
        ({"num_nextn_predict_layers": 2}, 1, 1, "set by the pipeline", 2, None, True),
        (MOE, 2, 1, "set by the pipeline", 2, (12, 4), False),
        (MOE, 2, 2, "set by the pipeline", 1, None, False),
    ],
)
def test_a_step_of_whole_sequences_is_that_of_one_process(case: tuple[Any, ...]) -> None:
    for loss, gradient, evaluated in run_ranks(against_one_process, 2 * case[1], *case):
        assert loss < 1e-6  # in fp32
        assert gradient < 1e-12
        assert evaluated < 1e-6


class Own(SharesTokens, nn.Module):
    """A layer of one's own: places, which are given whole, and a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.places = nn.Embedding(TOKENS, HIDDEN)
        self.moe = MoELayer(TopKGate(GateShape(HIDDEN, 4, aux_loss_coef=0.5)), lambda: nn.Linear(HIDDEN, HIDDEN))
        self.double()

    def forward(self, x: Tensor, place: Tensor, microbatch: MicrobatchContext | None = None) -> Tensor:
        own = place if self.context is None else self.context.own_tokens(place)
        out: Tensor = x + self.moe(x + self.places(own), microbatch)
        return out


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def own_layers(rank: int, slices: int) -> float:
    x, y = torch.randn(2, ROWS, TOKENS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    schedule, made = pl.schedules.one_f_one_b(1, MICROBATCHES), [Layer("own", Own)]
    one = LocalPipeline(made, schedule, loss=square)
    mesh, options = Mesh.of(MeshShape(cp=2)), RuntimeOptions(monitor=False)
    schedule = pl.schedules.cut_sequences(schedule, slices) if slices > 1 else schedule
    pipeline = Pipeline(made, schedule, loss=square, mesh=mesh, options=options)
    for each in (one, pipeline):
        each.step(x, y, place=torch.arange(TOKENS).expand(ROWS, -1))
    pairs = zip(one.parameters(), pipeline.parameters(), strict=True)
    errors = [float((a.grad - b.grad).abs().max() / a.grad.abs().max()) for a, b in pairs]  # type: ignore[union-attr,operator]
    pipeline.close()
    return max(errors)


def test_a_mixture_of_experts_in_a_layer_of_ones_own_balances_all_ranks_tokens() -> None:
    assert max(run_ranks(own_layers, 2, 1)) < 1e-12


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "capacity": ({"capacity_factor": 1.5}, "capacity_factor=1.5 counts choices of whole sequences"),
    "gshard": ({"router": "gshard"}, 'router="gshard" draws numbers for whole sequences'),
    "switch": ({"router": "switch", "num_experts_per_tok": 1}, 'router="switch" draws numbers for whole sequences'),
    "noisy": ({"router": "noisy"}, 'router="noisy" draws numbers for whole sequences'),
    "blocks": ({}, "ep_blocks=2 needs whole sequences"),
}


def refusals(rank: int, slices: int) -> list[str]:
    """What a step says of each of `REFUSED`."""
    mesh, words = Mesh.of(MeshShape(cp=2, ep=2)), []
    assert mesh is not None
    schedule = pl.schedules.one_f_one_b(1, 2)
    schedule = pl.schedules.cut_sequences(schedule, slices) if slices > 1 else schedule
    for name, (keys, _) in REFUSED.items():
        spread = ExpertParallel(mesh.ep, blocks=2 if name == "blocks" else 1)
        made = layers(decoder({**MOE, **keys}), 0, expert=spread)
        pipeline = Pipeline(made, schedule, loss=cross_entropy, mesh=mesh, options=RuntimeOptions(monitor=False))
        with pytest.raises(ArgumentError) as refused:
            pipeline.step(*batch())
        words.append(str(refused.value))
    return words


@pytest.mark.parametrize("slices", [1, 2])
def test_what_is_about_whole_sequences_is_refused_where_ranks_share_them(slices: int) -> None:
    for words in run_ranks(refusals, 2, slices):
        for sentence, (_, expected) in zip(words, REFUSED.values(), strict=True):
            assert expected in sentence


def other_problems(rank: int) -> Sequence[str]:
    """Targets without a dimension of tokens, an odd number of tokens, and ranks with other batches."""
    mesh, words = Mesh.of(MeshShape(cp=2)), []
    x = torch.randn(2, 8, HIDDEN)
    for inputs, targets in ((x, x[:, 0, 0]), (x[:, :6], x[:, :6]), (x + rank, x)):
        options = RuntimeOptions(monitor=False)
        pipeline = Pipeline(
            [nn.Linear(HIDDEN, HIDDEN)], pl.schedules.one_f_one_b(1, 2), loss=square, mesh=mesh, options=options
        )
        with pytest.raises((UsageError, DistributedError)) as refused:
            pipeline.step(inputs, targets)
        words.append(str(refused.value))
    return words


def test_batches_that_ranks_cannot_share_are_refused() -> None:
    for targets, tokens, batches in run_ranks(other_problems, 2):
        assert "sequences of 8 tokens are cut into ranks, and the targets hold a tensor [rows]" in targets
        assert "2 x cp = 4 must divide the 6 tokens" in tokens
        assert "pass the same batch on all ranks of a replica" in batches
