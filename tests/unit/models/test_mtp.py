"""Multi-token prediction against the formulas of the paper, place by place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeloom.config import load
from pipeloom.models import DecoderShape, ahead, layers, tied, token_loss
from pipeloom.runtime import LocalPipeline
from pipeloom.schedules import build
from pipeloom.shapes.layers import layer_sizes
from pipeloom.train.step import Outcome

DEPTHS, COEFFICIENT, VOCABULARY = 2, 0.5, 24
SHAPE = DecoderShape(
    2, 16, 2, 1, 24, VOCABULARY, num_nextn_predict_layers=DEPTHS, mtp_loss_coef=COEFFICIENT, tie_word_embeddings=True
)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and positions of three rows: two documents in the last, and targets that do not count."""
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(0, VOCABULARY, (2, 3, 10), generator=generator)
    targets[0, 2:4] = targets[2, 5] = -100
    positions = torch.arange(10).repeat(3, 1)
    positions[2, 6:] = torch.arange(4)
    return tokens, targets, positions


def test_tokens_and_targets_ahead() -> None:
    tokens, targets = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[2, 3, -100, 5, 6]])
    keywords = ahead(tokens, targets, 2, torch.tensor([[0, 1, 2, 0, 1]]))
    assert keywords["mtp_tokens"].unbind(-1)[0].tolist() == [[2, 3, 4, 5, 0]]
    assert keywords["mtp_tokens"].unbind(-1)[1].tolist() == [[3, 4, 5, 0, 0]]
    assert keywords["mtp_targets"].unbind(-1)[0].tolist() == [[3, -100, -100, 6, -100]]
    assert (keywords["mtp_targets"].unbind(-1)[1] == -100).all()


def test_a_row_shorter_than_the_depth() -> None:
    keywords = ahead(torch.tensor([[1]]), torch.tensor([[2]]), 2)
    assert keywords["mtp_tokens"].tolist() == [[[0, 0]]]
    assert keywords["mtp_targets"].tolist() == [[[-100, -100]]]


def by_hand(modules: dict[str, nn.Module]) -> Tensor:
    """The loss of the batch: each place of each row on its own, with the blocks as given."""
    tokens, targets, positions = batch()
    embedding, head = modules["model.embed_tokens"].weight, modules["head"]
    count, total = int((targets != -100).sum()), torch.zeros(())
    for row, wanted, places in zip(tokens, targets, positions, strict=True):
        hidden = embedding[row][None]
        for number in range(SHAPE.num_hidden_layers):
            hidden = modules[f"model.layers.{number}"](hidden, None, places[None])
        for at in range(10):
            if wanted[at] != -100:
                total = total - torch.log_softmax(head.lm_head(head.norm(hidden[0, at])), -1)[wanted[at]] / count
        for depth in range(1, DEPTHS + 1):
            module = modules[f"model.layers.{SHAPE.num_hidden_layers + depth - 1}"]
            later = torch.stack([embedding[row[at + depth] if at + depth < 10 else 0] for at in range(10)])[None]
            hidden = module.eh_proj(torch.cat((module.enorm(later), module.hnorm(hidden)), -1))
            hidden = module.block(hidden, None, places[None])
            for at in range(10 - depth):
                inside = places[at + depth] == places[at] + depth
                if inside and wanted[at] != -100 and wanted[at + depth] != -100:
                    logits = head.lm_head(head.mtp_norms[depth - 1](hidden[0, at]))
                    nats = -torch.log_softmax(logits, -1)[wanted[at + depth]] / count
                    total = total + nats * COEFFICIENT / DEPTHS
    return total


@pytest.fixture(scope="module")
def pipeline() -> LocalPipeline:
    schedule = build("zb-h1", 2, 3)
    return LocalPipeline(layers(SHAPE, 7), schedule, loss=token_loss(SHAPE), tied=tied(SHAPE))


def test_loss_and_gradients_are_those_of_the_formulas(pipeline: LocalPipeline) -> None:
    tokens, targets, positions = batch()
    pipeline.zero_grad()
    loss = pipeline.step(tokens, targets, position_ids=positions, **ahead(tokens, targets, DEPTHS, positions))
    gradients = {name: parameter.grad.clone() for name, parameter in pipeline.named_parameters()}
    pipeline.zero_grad()
    want = by_hand(dict(pipeline.modules))
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
    pipeline.zero_grad()


def test_evaluation_skips_the_predictions(pipeline: LocalPipeline) -> None:
    tokens, targets, _ = batch()
    plain = layers(DecoderShape(2, 16, 2, 1, 24, VOCABULARY, tie_word_embeddings=True), 7)
    x = tokens
    for layer in plain:
        module = layer()
        module.load_state_dict(pipeline.modules[layer.name].state_dict(), strict=False)
        x = module(x)
    torch.testing.assert_close(pipeline.evaluate(tokens, targets), token_loss(SHAPE)(x, targets).detach())


def test_the_output_layer_runs_once_for_each_depth_too() -> None:
    plain, predicting = (
        layer_sizes(load("tiny", {"model.num_nextn_predict_layers": depths}).model.shape(), 16) for depths in (0, 2)
    )
    assert [size.letter for size in predicting] == [*(size.letter for size in plain[:-1]), "m", "m", "L"]
    assert predicting[-1].flops == 3 * plain[-1].flops
    assert predicting[0].flops == 3 * plain[0].flops


def test_the_loss_that_is_logged_is_the_models_own() -> None:
    total = Outcome(2.5, 1.0, 0.1, terms={"mtp_1": 3.0, "mtp_2": 5.0})
    assert total.without_terms(0.25).loss == pytest.approx(1.5)
    assert Outcome(2.5, 1.0, 0.1).without_terms(0.25).loss == 2.5
