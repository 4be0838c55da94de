"""Dropout as a function of its place: no state, the same mask in every layout and when recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layouts import model
from pipeloom.errors import UsageError
from pipeloom.models import layers
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.ops.random_state import Dropout, RandomSource, TokenPart, set_sources, stable_seed

CONTEXT = MicrobatchContext(step=3, index=2, first=4, samples=2)


def dropout(probability: float = 0.25, part: TokenPart | None = None, name: str = "layer", seed: int = 0) -> Dropout:
    module = Dropout(probability, part)
    module.source = RandomSource(seed, name)
    return module


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def test_the_share_that_is_kept_and_its_scale() -> None:
    out = dropout()(ones(4, 100, 64), MicrobatchContext(samples=4))
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_the_gradient_has_the_same_mask() -> None:
    x = ones(2, 8, 4).requires_grad_()
    out = dropout()(x, CONTEXT)
    out.sum().backward()
    assert torch.equal(x.grad, out)


def test_a_mask_depends_on_seed_step_sample_and_name_alone() -> None:
    first = dropout()(ones(2, 16, 8), CONTEXT)
    torch.manual_seed(1)
    assert torch.equal(first, dropout()(ones(2, 16, 8), MicrobatchContext(3, 7, 0.5, 4, 2)))
    others = [
        dropout(seed=1)(ones(2, 16, 8), CONTEXT),
        dropout(name="other")(ones(2, 16, 8), CONTEXT),
        dropout()(ones(2, 16, 8), MicrobatchContext(4, 2, 1.0, 4, 2)),
        dropout()(ones(2, 16, 8), MicrobatchContext(3, 2, 1.0, 6, 2)),
    ]
    assert not any(torch.equal(first, other) for other in others)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("sizes", [(6,), (2, 2, 2), (3, 3), (1, 5)])
def test_micro_batches_of_any_size_get_the_masks_of_their_samples(sizes: tuple[int, ...]) -> None:
    whole = dropout()(ones(6, 16, 8), MicrobatchContext(1, 0, 1.0, 10, 6))
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    parts = [
        dropout()(ones(size, 16, 8), MicrobatchContext(1, at, 1.0, 10 + start, size))
        for at, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("count", [2, 4])
def test_parts_of_the_tokens_get_parts_of_the_mask(count: int) -> None:
    x = ones(2, 16, 8)
    whole = dropout()(x, CONTEXT)
    parts = [dropout(part=TokenPart(at, count))(x.chunk(count, 1)[at], CONTEXT) for at in range(count)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert not torch.equal(parts[0], parts[1])


def test_evaluation_drops_nothing() -> None:
    x = ones(2, 16, 8)
    assert dropout().eval()(x, None) is x
    assert Dropout(0.0)(x, None) is x


def test_without_its_place_or_with_other_rows_it_refuses() -> None:
    for layer, rows, context in ((dropout(), 1, None), (Dropout(0.5), 2, CONTEXT), (dropout(), 3, CONTEXT)):
        with pytest.raises(UsageError, match=rf"Dropout of \[{rows}, 16, 8\] needs `source`, and `microbatch`"):
            layer(ones(rows, 16, 8), context)


def test_every_dropout_of_a_module_has_a_source_of_its_own() -> None:
    module = nn.Sequential(Dropout(0.1), nn.Sequential(Dropout(0.1)))
    set_sources(module, 7, "block")
    assert [part.source for part in module.modules() if isinstance(part, Dropout)] == [
        RandomSource(7, "block.0"),
        RandomSource(7, "block.1.0"),
    ]


def test_recomputation_replays_the_mask_bitwise() -> None:
    """Two micro-batches in flight, the first one's backward after the second one's forward."""

    def gradients(recompute: bool) -> list[Tensor]:
        block = layers(model(dropout=0.3), 5)[1]()
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
        outs = []
        for index in range(2):
            context = MicrobatchContext(index=index, first=2 * index, samples=2)
            if recompute:
                outs.append(checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, microbatch=context))
            else:
                outs.append(block(x, microbatch=context))
        assert not torch.equal(outs[0], outs[1])
        for out in outs:
            out.square().sum().backward()
        return [p.grad for p in block.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_the_seed_of_a_place_never_changes() -> None:
    """A run that goes on with another version of the program goes on with the same masks."""
    generators = RandomSource(1, "model.layers.0.mlp_dropout").generators(CONTEXT, torch.device("cpu"))
    seeds = [generator.initial_seed() for generator in generators]
    assert seeds == [stable_seed("random", 1, 3, sample, "model.layers.0.mlp_dropout") for sample in (4, 5)]
    assert stable_seed("random", 1, 3, 2, "x") == 4820000269182593835
