"""The output layer spread over the ranks of a pipeline, against one process: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeloom.runtime import Layer, Pipeline
from pipeloom.runtime.spread_vocabulary import vocabulary_share
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families import build
from pipeloom.schedule.transforms import transformed
from processes import run_ranks

WIDTH, VOCABULARY, ROWS, LENGTH = 8, 11, 12, 3
COSTS = Costs(scores=0.5, scores_grad=0.5, combine=0.1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def model(blocks: int) -> tuple[list[nn.Module], torch.Tensor]:
    """The embedding and blocks, and the output weight."""
    torch.manual_seed(0)
    return [nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(blocks))], torch.randn(VOCABULARY, WIDTH)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets: one micro-batch (of 2 rows) has none that counts, and others have different numbers."""
    torch.manual_seed(1)
    tokens, targets = torch.randint(VOCABULARY, (2, ROWS, LENGTH))
    targets[2:4], targets[7, 1:] = -100, -100
    return tokens, targets


def on_one_rank(
    rank: int, name: str, ranks: int, chunks: int | None, slices: int, form: str, smoothing: float, tied: bool
) -> Any:
    plain = build(name, ranks, ROWS // 2, chunks, {"slices": slices})
    schedule = transformed(plain, [f"vocabulary={form}"], COSTS)
    layers, weight = model(schedule.positions - 1)
    names = [("layer0.weight", "head.weight")] if tied else []
    trunk = [Layer(f"layer{at}", lambda layer=layer: layer) for at, layer in enumerate(layers)]
    share = vocabulary_share("head", weight, rank, ranks, smoothing)
    pipeline = Pipeline([*trunk, share], schedule, loss=nn.functional.cross_entropy, tied=names)
    tokens, targets = batch()
    losses = [pipeline.step(tokens, targets).item() for _ in range(2)]
    gradients = {key: parameter.grad.tolist() for key, parameter in pipeline.named_parameters()}
    with torch.no_grad():
        losses.append(pipeline.evaluate(tokens, targets).item())
    logits = pipeline.predict(tokens)
    return losses, gradients, None if logits is None else logits.tolist()


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "slices", "form", "smoothing", "tied"),
    [
        ("1f1b", 2, None, 1, "fused", 0.0, True),
        ("1f1b", 4, None, 1, "two", 0.1, False),
        ("interleaved", 2, 2, 1, "two", 0.0, False),
        ("zbv", 4, 2, 1, "fused", 0.1, True),
        ("1f1b", 2, None, 3, "fused", 0.1, True),
        ("interleaved", 2, 2, 2, "two", 0.0, False),
    ],
)
def test_loss_and_gradients(
    name: str, ranks: int, chunks: int | None, slices: int, form: str, smoothing: float, tied: bool
) -> None:
    """A tied share follows the embedding, and its first values are that one's, whatever it was built with."""
    layers, weight = model(ranks * (chunks or 1) - 1)
    head: Any = layers[0].weight if tied else weight.requires_grad_()
    tokens, targets = batch()

    def loss(epsilon: float) -> torch.Tensor:
        logits = nn.Sequential(*layers)(tokens) @ head.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=epsilon)

    for _ in range(2):
        loss(smoothing).backward()
    expected = {f"layer{at}.{key}": p.grad for at, layer in enumerate(layers) for key, p in layer.named_parameters()}
    results = run_ranks(on_one_rank, ranks, name, ranks, chunks, slices, form, smoothing, tied)
    gradients = {key: torch.tensor(value) for _, part, _ in results for key, value in part.items()}
    if not tied:
        rows = [torch.tensor(part["head.weight"]) for _, part, _ in results]
        del gradients["head.weight"]
        torch.testing.assert_close(torch.cat(rows), head.grad, rtol=1e-5, atol=3e-6)
    assert gradients.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(gradients[key], value, rtol=1e-5, atol=3e-6)
    for losses, _, _ in results:
        assert losses == pytest.approx([loss(smoothing).item(), loss(smoothing).item(), loss(0.0).item()], rel=1e-6)
    last = build(name, ranks, ROWS // 2, chunks).placement[-1]
    with torch.no_grad():
        logits = nn.Sequential(*layers)(tokens) @ head.T
    for rank, (_, _, predicted) in enumerate(results):
        assert (predicted is None) == (rank != last)
    torch.testing.assert_close(torch.tensor(results[last][2]), logits, rtol=1e-5, atol=3e-6)
