"""The vocabulary spread over the ranks of a pipeline, against one process: loss and every gradient."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from pipeloom.errors import ConfigError
from pipeloom.parallel import Mesh, MeshShape, data
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.runtime.spread_vocabulary import vocabulary_share
from pipeloom.schedule import Schedule
from pipeloom.schedule.costs import Costs
from pipeloom.schedule.families import build
from pipeloom.schedule.transforms import of_zero, transformed
from processes import run_ranks

WIDTH, ROWS, LENGTH = 8, 12, 3
COSTS = Costs(scores=0.5, scores_grad=0.5, combine=0.1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(x, (0, WIDTH - x.shape[-1]))
        return x + torch.tanh(self.linear(x))


def model(blocks: int, embedding: str, vocabulary: int) -> tuple[list[Any], torch.Tensor]:
    """The embedding (a "spread" one is narrower than the blocks) and blocks, and the output weight."""
    torch.manual_seed(0)
    rows = nn.Embedding(vocabulary, WIDTH - 2 * (embedding == "spread"), 2 * vocabulary // 3)
    return [rows, *(Block() for _ in range(blocks))], torch.randn(vocabulary, WIDTH)


def batch(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets: one micro-batch (of 2 rows) has none that counts, and others have different numbers."""
    torch.manual_seed(1)
    tokens, targets = torch.randint(vocabulary, (2, ROWS, LENGTH))
    targets[2:4], targets[7, 1:] = -100, -100
    return tokens, targets


def pipeline_of(
    rank: int, words: list[str], embedding: str, plain: Schedule, smoothing: float, vocabulary: int, **options: Any
) -> Pipeline:
    """A pipeline whose embedding is that of the first layer, spread like the output layer, or tied to it."""
    layers, weight = model(plain.positions - 1, embedding, vocabulary)
    trunk = [Layer(f"layer{at}", lambda layer=layer: layer) for at, layer in enumerate(layers)]
    shares = [vocabulary_share("head", weight, rank, plain.ranks, smoothing)]
    if embedding != "whole":
        trunk[0] = Layer("rows", nn.Identity)
        rows = layers[0].weight.detach()
        first = vocabulary_share("layer0", rows, rank, plain.ranks, smoothing, embeds=True, padding=2 * vocabulary // 3)
        shares = [first] if embedding == "tied" else [first, *shares]
    return Pipeline([*trunk, *shares], transformed(plain, words, COSTS), loss=nn.functional.cross_entropy, **options)


def on_one_rank(
    rank: int,
    name: str,
    ranks: int,
    chunks: int | None,
    slices: int,
    form: str,
    smoothing: float,
    embedding: str,
    vocabulary: int,
) -> Any:
    plain = build(name, ranks, ROWS // 2, chunks, {"slices": slices})
    words = [f"vocabulary={form}", *(["embedding"] if embedding != "whole" else [])]
    pipeline = pipeline_of(rank, words, embedding, plain, smoothing, vocabulary)
    tokens, targets = batch(vocabulary)
    losses = [pipeline.step(tokens, targets).item() for _ in range(2)]
    gradients = {key: parameter.grad.tolist() for key, parameter in pipeline.named_parameters()}
    with torch.no_grad():
        losses.append(pipeline.evaluate(tokens, targets).item())
    logits = pipeline.predict(tokens)
    return losses, gradients, None if logits is None else logits.tolist()


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "slices", "form", "smoothing", "embedding", "vocabulary"),
    [
        ("1f1b", 2, None, 1, "fused", 0.0, "tied", 11),
        ("1f1b", 4, None, 1, "two", 0.1, "spread", 11),
        ("interleaved", 2, 2, 1, "two", 0.0, "whole", 11),
        ("zbv", 4, 2, 1, "fused", 0.1, "tied", 11),
        ("1f1b", 2, None, 3, "fused", 0.1, "tied", 11),
        ("interleaved", 2, 2, 2, "two", 0.0, "spread", 11),
        ("1f1b", 4, None, 1, "fused", 0.1, "spread", 3),
        ("1f1b", 4, None, 1, "two", 0.1, "tied", 3),
        ("zbv", 4, 2, 1, "two", 0.0, "whole", 2),
    ],
)
def test_loss_and_gradients(
    name: str,
    ranks: int,
    chunks: int | None,
    slices: int,
    form: str,
    smoothing: float,
    embedding: str,
    vocabulary: int,
) -> None:
    layers, weight = model(ranks * (chunks or 1) - 1, embedding, vocabulary)
    head: Any = layers[0].weight if embedding == "tied" else weight.requires_grad_()
    tokens, targets = batch(vocabulary)

    def loss(epsilon: float) -> torch.Tensor:
        logits = nn.Sequential(*layers)(tokens) @ head.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=epsilon)

    for _ in range(2):
        loss(smoothing).backward()
    expected = {f"layer{at}.{key}": p.grad for at, layer in enumerate(layers) for key, p in layer.named_parameters()}
    expected |= {} if embedding == "tied" else {"head.weight": head.grad}
    results = run_ranks(on_one_rank, ranks, name, ranks, chunks, slices, form, smoothing, embedding, vocabulary)
    shares = {"tied": ["layer0.weight"], "whole": ["head.weight"], "spread": ["layer0.weight", "head.weight"]}[
        embedding
    ]
    gradients = {key: torch.tensor(value) for _, part, _ in results for key, value in part.items()}
    for key in shares:
        gradients[key] = torch.cat([torch.tensor(part[key]).view(-1, expected[key].shape[1]) for _, part, _ in results])
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


def in_late_replicas(rank: int, level: int) -> tuple[list[float], Any]:
    """Losses of two steps and an evaluation, and logits, where one of two replicas is late to send the weights it has stepped."""
    mesh = Mesh.of(MeshShape(pp=2, dp=2))
    assert mesh is not None
    words = ["vocabulary", "embedding", *of_zero(level, spread=True)]
    options = RuntimeOptions(monitor=False, shard_gradients=True)
    pipeline = pipeline_of(
        mesh.place.pp, words, "spread", build("1f1b", 2, ROWS // 2), 0.0, 11, mesh=mesh, options=options
    )
    sgd = torch.optim.SGD(pipeline.parameters(), lr=0.5)
    start = data.start_gather_slices

    def late(*arguments: Any) -> Any:
        time.sleep(0.1 * mesh.place.dp)
        return start(*arguments)

    data.start_gather_slices = late
    tokens, targets = batch(11)
    losses = []
    for method in (pipeline.step, pipeline.step, pipeline.evaluate):
        losses.append(method(tokens, targets).item())
        if method == pipeline.step:
            sgd.step()
            sgd.zero_grad()
    logits = pipeline.predict(tokens)
    return losses, None if logits is None else logits.tolist()


@pytest.mark.parametrize("level", [1, 3])
def test_lookups_read_the_weights_that_all_replicas_have_stepped(level: int) -> None:
    layers, weight = model(1, "spread", 11)
    head = weight.requires_grad_()
    tokens, targets = batch(11)
    sgd = torch.optim.SGD([head, *nn.Sequential(*layers).parameters()], lr=0.5)
    losses = []
    for _ in range(3):
        sgd.zero_grad()
        logits = nn.Sequential(*layers)(tokens) @ head.T
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        if len(losses) < 3:
            loss.backward()
            sgd.step()
    for found, predicted in run_ranks(in_late_replicas, 4, level):
        assert found == pytest.approx(losses, rel=1e-5)
        if predicted is not None:
            torch.testing.assert_close(torch.tensor(predicted), logits.detach(), rtol=1e-4, atol=1e-5)


def refusals(rank: int) -> list[str]:
    plain, words = build("1f1b", 2, ROWS // 2), []
    for transforms, embedding in ((["vocabulary"], "spread"), (["vocabulary", "embedding"], "whole")):
        with pytest.raises(ConfigError) as refused:
            pipeline_of(rank, transforms, embedding, plain, 0.0, 11, options=RuntimeOptions(monitor=False))
        words.append(str(refused.value))
    return words


def test_schedule_and_shares_agree_on_who_looks_tokens_up() -> None:
    for first, second in run_ranks(refusals, 2):
        assert "it lacks the transform embedding" in first
        assert "the model's first layer does" in second
