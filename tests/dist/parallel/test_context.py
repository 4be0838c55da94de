"""Context parallelism: attention over the tokens of several ranks, against one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeloom.errors import UsageError
from pipeloom.models import DecoderShape
from pipeloom.models.decoder import Attention, attend
from pipeloom.parallel.context import ContextParallel, Exchange, attend_in_blocks, share_tokens
from pipeloom.parallel.mesh import ALONE, Axis, Mesh
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

pytestmark = pytest.mark.core

BATCH, HEADS, GROUPS, TOKENS, WIDTH = 2, 4, 2, 24, 8
DOCUMENTS = {"whole": None, "packed": [[5, 6, 13], [24]], "short": [[1, 2, 3, 4, 5, 6, 2, 1], [23, 1]]}


def positions(lengths: list[list[int]] | None) -> Tensor | None:
    return None if lengths is None else torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = [(BATCH, heads, TOKENS, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def gradients(*tensors: Tensor, out: Tensor, upstream: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, tensors, upstream))


def on_ranks(rank: int, exchange: Exchange, documents: str) -> list[list[float]]:
    """The errors of this rank's output and gradients of queries, keys, values."""
    size = torch.distributed.get_world_size()
    context = ContextParallel(Axis(tuple(range(size)), rank, torch.distributed.group.WORLD), exchange)
    *qkv, upstream = operands()
    ids = positions(DOCUMENTS[documents])
    whole = [each.clone().requires_grad_() for each in qkv]
    right = attend(*whole, torch.arange(TOKENS).expand(BATCH, -1) if ids is None else ids)
    wanted = [right, *gradients(*whole, out=right, upstream=upstream)]
    held = [context.own_tokens(each, 2).clone().requires_grad_() for each in qkv]
    out = attend_in_blocks(*held, position_ids=ids, context=context)
    got = [out, *gradients(*held, out=out, upstream=context.own_tokens(upstream, 2))]
    return [[float((context.own_tokens(a, 2) - b).abs().max())] for a, b in zip(wanted, got, strict=True)]


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("ranks", "exchange"), [(2, "gather"), (2, "ring"), (4, "ring")])
def test_attention_over_ranks_is_that_of_one_process(ranks: int, exchange: Exchange, documents: str) -> None:
    for errors in run_ranks(on_ranks, ranks, exchange, documents):
        assert max(each[0] for each in errors) < 1e-12


def layer_on_ranks(rank: int) -> list[float]:
    """The errors of a layer's output and input gradient, with its rotary positions and norms of heads, packed and not."""
    context = ContextParallel(Axis((0, 1), rank, torch.distributed.group.WORLD))
    shape = DecoderShape(
        vocab_size=9,
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=8,
        qk_norm=True,
    )
    torch.manual_seed(1)
    one = Attention(shape).double()
    spread = share_tokens(Attention(shape), context).double()
    spread.load_state_dict(one.state_dict())
    x = torch.randn(BATCH, TOKENS, 32, dtype=torch.float64)
    errors = []
    for ids in (None, positions(DOCUMENTS["packed"])):
        whole, here = x.clone().requires_grad_(), context.own_tokens(x).requires_grad_()
        want, got = one(whole, ids), spread(here, ids)
        want.square().sum().backward()
        got.square().sum().backward()
        assert whole.grad is not None
        assert here.grad is not None
        for a, b in ((want, got), (whole.grad, here.grad)):
            errors.append(float((context.own_tokens(a) - b).abs().max()))
    return errors


def test_an_attention_layer_over_ranks_is_that_of_one_process() -> None:
    assert max(max(errors) for errors in run_ranks(layer_on_ranks, 2)) < 1e-12


def test_each_rank_holds_two_mirrored_pieces() -> None:
    parts = [ContextParallel(Axis((0, 1), rank, None)).own_tokens(torch.arange(8), 0).tolist() for rank in range(2)]
    assert parts == [[0, 1, 6, 7], [2, 3, 4, 5]]
    with pytest.raises(UsageError, match="2 x cp = 4 must divide the 6 tokens"):
        ContextParallel(Axis((0, 1), 0, None)).own_tokens(torch.arange(6), 0)


def test_a_mesh_puts_context_ranks_next_to_each_other() -> None:
    shape = MeshShape(pp=2, dp=2, cp=2, ep=4, tp=2)
    assert shape.world == 16
    assert shape.context_groups()[:3] == ((0, 2), (4, 6), (1, 3))
    assert [(shape.place(rank).dp, shape.place(rank).cp) for rank in (0, 2, 4, 6)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def axes(rank: int) -> list[int]:
    mesh = Mesh.of(MeshShape(dp=2, cp=2))
    assert mesh is not None
    return [mesh.place.dp, mesh.cp.index, mesh.dp.index, mesh.dp.size, *mesh.cp.ranks]


def test_gradients_are_summed_over_data_and_context_ranks() -> None:
    assert run_ranks(axes, 4) == [[0, 0, 0, 4, 0, 1], [0, 1, 1, 4, 0, 1], [1, 0, 2, 4, 2, 3], [1, 1, 3, 4, 2, 3]]
    assert Mesh.of(MeshShape()).cp == ALONE  # type: ignore[union-attr]
