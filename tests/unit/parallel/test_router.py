"""Routers and gates against logits made by hand, and the auxiliary losses against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pipeloom.errors import ConfigError
from pipeloom.ops.layer import attach_loss
from pipeloom.parallel.router import (
    Gate,
    RouterNoise,
    capacity_of,
    drop_over_capacity,
    dropped_between,
    route,
    sample_noise,
    update_bias,
)


def log(rows: list[list[float]]) -> Tensor:
    """Logits whose softmax are these probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log()


WIDE = torch.empty(0, 8)  # of inputs of the router


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("k", "experts", "weights"),
    [
        (1, [[2], [0]], [[1.0], [1.0]]),
        (2, [[2, 1], [0, 3]], [[0.625, 0.375], [0.7, 0.3]]),
        (3, [[2, 1, 0], [0, 3, 1]], [[5 / 9, 3 / 9, 1 / 9], [7 / 11, 3 / 11, 1 / 11]]),
    ],
)
def test_softmax_takes_the_k_largest_and_renormalises(k: int, experts: list[list[int]], weights: list[Tensor]) -> None:
    found = route(Gate("softmax", 4, k), log([[0.1, 0.3, 0.5, 0.1], [0.63, 0.09, 0.01, 0.27]]))
    if k == 3:
        assert found.experts[0, :2].tolist() == [2, 1]  # experts 0 and 3 are equally likely
        assert found.experts[1].tolist() == experts[1]
    else:
        assert found.experts.tolist() == experts
    torch.testing.assert_close(found.weights, torch.tensor(weights, dtype=torch.float64))


def test_weights_are_probabilities_not_logits() -> None:
    """Adding a constant to a token's logits changes none of its probabilities, and no weight."""
    logits = torch.randn(16, 8, generator=generator())
    for router, k in (("softmax", 2), ("switch", 1), ("gshard", 2)):
        gate = Gate(router, 8, k)
        torch.testing.assert_close(route(gate, logits + 3).weights, route(gate, logits).weights)
        assert bool((route(gate, logits).weights >= 0).all())


def test_switch_weighs_its_one_expert_with_the_probability() -> None:
    found = route(Gate("switch", 4, 1), log([[0.1, 0.3, 0.4, 0.2], [0.7, 0.1, 0.1, 0.1]]))
    assert found.experts.tolist() == [[2], [0]]
    torch.testing.assert_close(found.weights, torch.tensor([[0.4], [0.7]], dtype=torch.float64))


def test_switch_jitters_its_inputs_within_bounds_and_by_seed() -> None:
    gate = Gate("switch", 4, 1, jitter=0.01)
    factors = sample_noise(gate, 100, WIDE, [generator(1)]).inputs
    assert factors is not None
    assert 0.99 <= float(factors.min()) < 0.992
    assert 1.008 < float(factors.max()) <= 1.01
    again = sample_noise(gate, 100, WIDE, [generator(1)]).inputs
    assert again is not None
    assert torch.equal(factors, again)


def test_gshard_takes_its_second_expert_by_chance() -> None:
    """Renormalised weights 0.8 and 0.2: the second is taken if a uniform number is below 2 · 0.2; 0.4 of 0.5: always."""
    logits = log([[0.6, 0.15, 0.125, 0.125]] * 3 + [[0.3, 0.3, 0.2, 0.2]])
    gate = Gate("gshard", 4, 2)
    found = route(gate, logits, RouterNoise(second=torch.tensor([0.39, 0.41, 0.99, 0.999])))
    torch.testing.assert_close(found.weights[0], torch.tensor([0.8, 0.2], dtype=torch.float64))
    assert found.kept is not None
    assert found.kept.tolist() == [[True, True], [True, False], [True, False], [True, True]]
    assert route(gate, logits).kept is None, "outside training both are taken"
    drawn = sample_noise(gate, 20000, WIDE, [generator()]).second
    assert drawn is not None
    taken = route(gate, logits[:1].expand(20000, 4), RouterNoise(second=drawn)).kept
    assert taken is not None
    assert abs(float(taken[:, 1].float().mean()) - 0.4) < 0.02


def test_noisy_adds_noise_of_the_trained_size_before_the_choice() -> None:
    gate, logits = Gate("noisy", 3, 1), torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    noise = torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 2.0]])
    scale = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -4.0]])  # softplus(0) = 0.693, softplus(-4) = 0.018
    found = route(gate, logits, RouterNoise(logits=noise), scale=scale)
    assert found.experts.tolist() == [[2], [0]]
    two = route(Gate("noisy", 3, 2), logits[:1], RouterNoise(logits=noise[:1]), scale=scale[:1])
    a = torch.exp(torch.tensor(2 * math.log(2)))
    b = torch.exp(torch.tensor(1.0))
    torch.testing.assert_close(two.weights, torch.stack([a / (a + b), b / (a + b)]).unsqueeze(0))


def test_noise_has_a_gradient_for_its_size() -> None:
    scale = torch.zeros(4, 8, requires_grad=True)
    drawn = sample_noise(Gate("noisy", 8, 2), 4, torch.empty(0, 16), [generator()])
    route(Gate("noisy", 8, 2), torch.randn(4, 8, generator=generator(3)), drawn, scale=scale).weights[
        :, 0
    ].sum().backward()
    assert scale.grad is not None
    assert bool(scale.grad.any())


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    gate, logits = Gate("sigmoid", 4, 2), torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain, moved = route(gate, logits), route(gate, logits, bias=torch.tensor([0.0, -1.0, 0.0, 0.5]))
    assert plain.experts.tolist() == [[0, 1]]
    assert moved.experts.tolist() == [[0, 3]]
    scores = logits[0].sigmoid()
    torch.testing.assert_close(plain.weights[0], scores[:2] / scores[:2].sum())
    torch.testing.assert_close(moved.weights[0], scores[[0, 3]] / scores[[0, 3]].sum())


def test_the_bias_rises_for_idle_experts_and_falls_for_busy_ones() -> None:
    bias = torch.zeros(4)
    update_bias(bias, torch.tensor([10, 2, 6, 6]), 0.001)
    torch.testing.assert_close(bias, torch.tensor([-0.001, 0.001, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("router", "k"), [("softmax", 1), ("softmax", 2), ("sigmoid", 3), ("switch", 1), ("gshard", 2)]
)
def test_the_balance_loss_is_1_when_all_is_even(router: str, k: int) -> None:
    """Even probabilities, and choices that go around: token t chooses t, t + 1, …"""
    experts = 6
    logits = torch.zeros(experts, experts, dtype=torch.float64)
    for token in range(experts):
        for choice in range(k):
            logits[token, (token + choice) % experts] = 1e-9 * (k - choice)
    tally = route(Gate(router, experts, k), logits).tally
    assert tally.counts.tolist() == [k] * experts
    assert abs(float(tally.balance_loss()) - 1) < 1e-6


def test_the_losses_are_their_formulas_and_add_up_over_tokens() -> None:
    gate, logits = Gate("softmax", 5, 2), torch.randn(12, 5, generator=generator(), dtype=torch.float64)
    whole = route(gate, logits).tally
    shares = torch.zeros(5, dtype=torch.float64)
    for row in logits.topk(2).indices:
        shares[row] += 1 / 24
    want = 5 * (shares * logits.softmax(-1).mean(0)).sum()
    torch.testing.assert_close(whole.balance_loss(), want)
    torch.testing.assert_close(whole.z_loss(), torch.log(logits.exp().sum(-1)).square().mean())
    parts = route(gate, logits[:7]).tally + route(gate, logits[7:]).tally
    torch.testing.assert_close(parts.balance_loss(), want)
    torch.testing.assert_close(parts.z_loss(), whole.z_loss())


def test_drops_come_in_order_of_choices_then_tokens() -> None:
    """All first choices before any second: token 2's first choice beats token 0's second."""
    experts = [[0, 1], [0, 1], [1, 0], [1, 0], [0, 2]]
    logits = torch.full((5, 3), -9.0)
    for token, (first, second) in enumerate(experts):
        logits[token, first], logits[token, second] = 2.0, 1.0
    found = drop_over_capacity(route(Gate("softmax", 3, 2), logits), capacity=3)
    assert found.experts.tolist() == experts
    assert found.kept is not None
    assert found.kept.tolist() == [[True, True], [True, False], [True, False], [True, False], [True, True]]


def test_a_second_choice_that_chance_refused_takes_no_place() -> None:
    logits = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
    routing = route(Gate("gshard", 2, 2), logits, RouterNoise(second=torch.tensor([0.99, 0.0, 0.0])))
    limited = drop_over_capacity(routing, capacity=1)
    assert limited.kept is not None
    assert limited.kept.tolist() == [[True, False], [False, True], [False, False]]
    dropped = dropped_between(routing, limited)
    assert dropped is not None
    assert dropped.item() == 3, "of six choices two fit, and chance refused one"
    assert dropped_between(routing, routing) is None


def test_capacity_is_the_factor_times_an_even_share_rounded_up() -> None:
    assert capacity_of(10, Gate("softmax", 4, 2), 1.0) == 5
    assert capacity_of(10, Gate("softmax", 4, 2), 1.25) == 7
    assert capacity_of(1, Gate("softmax", 64, 2), 1.0) == 1


def test_no_tokens_route_nowhere() -> None:
    for router, k in (("softmax", 2), ("noisy", 2), ("switch", 1), ("gshard", 2), ("sigmoid", 2)):
        gate = Gate(router, 4, k)
        found = drop_over_capacity(route(gate, torch.zeros(0, 4), sample_noise(gate, 0, WIDE, [generator()])), 1)
        assert found.experts.shape == (0, k)
        assert found.tally.balance_loss().item() == found.tally.z_loss().item() == 0


@pytest.mark.parametrize(
    ("router", "experts", "k", "words"),
    [
        ("softmx", 4, 2, "did you mean 'softmax'"),
        ("switch", 4, 2, "use 1"),
        ("gshard", 4, 1, "use 2"),
        ("softmax", 4, 5, "^choices=5 is not between 1 and 4 experts; nearest: 4$"),
    ],
)
def test_gates_that_cannot_be_are_refused(router: str, experts: int, k: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Gate(router, experts, k)


def test_a_carried_loss_changes_gradients_and_nothing_else() -> None:
    logits = torch.randn(3, 4, generator=generator(), requires_grad=True)
    x, z = logits.softmax(-1), logits.logsumexp(-1).square().mean()
    factor = 0.0  # known before the backward only
    out = attach_loss(x, lambda value: factor * value, z)
    assert torch.equal(out, x)
    factor = 0.25
    out[:, 0].sum().backward(retain_graph=True)
    assert logits.grad is not None
    found, logits.grad = logits.grad, None
    (x[:, 0].sum() + 0.25 * z).backward()
    torch.testing.assert_close(found, logits.grad)
    with torch.no_grad():
        assert attach_loss(x, torch.square, z) is x
