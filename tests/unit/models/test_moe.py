"""The block with experts in one process: against naive formulas, and the losses that it carries."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from layouts import worst
from moe_steps import model, serial
from pipeloom.errors import UsageError
from pipeloom.models import cross_entropy, layers
from pipeloom.models.gate import GateShape, TopKGate, balance, take_loads
from pipeloom.models.moe import MoELayer, SparseBlock
from pipeloom.ops.layer import MicrobatchContext
from pipeloom.runtime import LocalPipeline, RuntimeOptions


def block_of(**changes: Any) -> SparseBlock:
    built = layers(model(**changes), 3, torch.float64)[1]()
    assert isinstance(built, SparseBlock)
    return built


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_mixture(
    mlp: MoELayer, tokens: Tensor, k: int, capacity: float, router: str, renormalise: bool = True
) -> Tensor:
    """Token by token and expert by expert, first choices of all tokens before second ones."""
    logits = tokens @ mlp.gate.weight.t()
    scores = logits.sigmoid() if router == "sigmoid" else logits.softmax(-1)
    ranks = [sorted(range(scores.shape[1]), key=lambda e: -float(row[e].detach()))[:k] for row in scores]
    room = [math.ceil(capacity * len(tokens) * k / scores.shape[1]) if capacity else len(tokens)] * scores.shape[1]
    out = []
    kept = set()
    for choice in range(k):
        for token, chosen in enumerate(ranks):
            if room[chosen[choice]]:
                room[chosen[choice]] -= 1
                kept.add((token, choice))
    gate, up, down = (part.weight for part in (mlp.experts.gate_proj, mlp.experts.up_proj, mlp.experts.down_proj))
    for token, chosen in enumerate(ranks):
        x = tokens[token]
        total = torch.zeros_like(x)
        for choice, e in enumerate(chosen):
            weight = scores[token, e]
            if router != "switch" and renormalise:
                weight = weight / scores[token, chosen].sum()
            if (token, choice) in kept:
                total = total + weight * (down[e] @ (F.silu(gate[e] @ x) * (up[e] @ x)))
        if mlp.shared_expert is not None:
            shared = mlp.shared_expert
            inner = F.silu(shared.gate_proj.weight @ x) * (shared.up_proj.weight @ x)
            total = total + (mlp.shared_expert_gate.weight @ x).sigmoid() * (shared.down_proj.weight @ inner)
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize(
    ("changes", "k"),
    [
        ({"router": "softmax"}, 2),
        ({"router": "softmax", "num_experts_per_tok": 3}, 3),
        ({"router": "switch", "num_experts_per_tok": 1}, 1),
        ({"router": "sigmoid", "num_shared_experts": 2}, 2),
        ({"router": "softmax", "capacity_factor": 0.6}, 2),
        ({"router": "gshard", "capacity_factor": 1.0, "num_shared_experts": 1}, 2),
        ({"router": "softmax", "norm_topk_prob": False}, 2),
        ({"router": "softmax", "norm_topk_prob": False, "num_experts_per_tok": 1, "capacity_factor": 0.6}, 1),
        ({"router": "sigmoid", "norm_topk_prob": False, "num_experts_per_tok": 3}, 3),
        ({"router": "gshard", "norm_topk_prob": False}, 2),
        ({"router": "switch", "num_experts_per_tok": 1, "norm_topk_prob": False}, 1),
        ({"router": "softmax", "qkv_bias": True, "head_dim": 12, "rms_norm_eps": 0.1}, 2),
    ],
)
def test_the_block_is_its_formula_with_every_gradient(changes: dict[str, Any], k: int) -> None:
    block = block_of(**changes).eval()
    x = normal(2, 8, 32).requires_grad_()
    seed = normal(2, 8, 32, seed=1)
    block(x).backward(seed)
    found = {name: p.grad for name, p in block.named_parameters()} | {"x": x.grad}
    block.zero_grad()
    x.grad = None
    attended = x + block.self_attn(block.input_layernorm(x))
    tokens = block.post_attention_layernorm(attended).flatten(0, 1)
    capacity = changes.get("capacity_factor", 0.0)
    mixture = naive_mixture(block.mlp, tokens, k, capacity, changes["router"], changes.get("norm_topk_prob", True))
    out = attended + mixture.view_as(attended)
    torch.testing.assert_close(block(x), out)
    out.backward(seed)
    for name, gradient in found.items():
        want = x.grad if name == "x" else block.get_parameter(name).grad
        torch.testing.assert_close(gradient, want, msg=lambda text, name=name: f"{name}: {text}")


def test_names_are_those_of_hugging_face_where_they_exist() -> None:
    block = block_of(num_shared_experts=1, router="sigmoid")
    names = {name for name, _ in block.mlp.named_parameters()} | {name for name, _ in block.mlp.named_buffers()}
    shared = {f"shared_expert.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")}
    stacked = {f"experts.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")}
    assert names == {"gate.weight", "gate.e_score_correction_bias", "shared_expert_gate.weight"} | shared | stacked


SIZES = (1, 2, 3, 4)
STRONG = {"aux_loss_coef": 0.7, "z_loss_coef": 0.3}


def uneven() -> tuple[Tensor, Tensor]:
    """Ten sequences, to be cut into micro-batches of SIZES: shares 0.1 to 0.4."""
    both = torch.randint(0, 256, (2, 10, 8), generator=torch.Generator().manual_seed(7))
    return both[0], both[1]


def losses_added(shape: Any) -> dict[str, Tensor]:
    """Gradients of the plain sum: shares of the cross entropies, and of each micro-batch's auxiliary losses."""
    built = {
        layer.name: layer() for layer in layers(shape.model_copy(update={"aux_loss_coef": 0, "z_loss_coef": 0}), 5)
    }
    total = torch.zeros(())
    for tokens, targets in zip(*(part.split(SIZES) for part in uneven()), strict=True):
        share, x = len(tokens) / 10, tokens
        for module in built.values():
            if isinstance(module, SparseBlock):
                attended = x + module.self_attn(module.input_layernorm(x))
                logits = module.post_attention_layernorm(attended).flatten(0, 1) @ module.mlp.gate.weight.t()
                chosen = logits.topk(shape.num_experts_per_tok).indices
                fractions = F.one_hot(chosen, shape.num_experts).sum((0, 1)) / chosen.numel()
                even = shape.num_experts * (fractions * logits.softmax(-1).mean(0)).sum()
                z = logits.logsumexp(-1).square().mean()
                total = total + share * (shape.aux_loss_coef * even + shape.z_loss_coef * z)
            x = module(x)
        total = total + share * cross_entropy(x, targets)
    total.backward()
    return {f"{name}.{inner}": p.grad for name, m in built.items() for inner, p in m.named_parameters()}


def found_under(family: str, shape: Any) -> dict[str, Tensor]:
    schedule = pl.schedules.build(family, ranks=2, microbatches=len(SIZES))
    options = RuntimeOptions(microbatch_sizes=SIZES)
    pipeline = LocalPipeline(layers(shape, 5), schedule, loss=cross_entropy, options=options)
    pipeline.step(*uneven())
    return {name: p.grad for name, p in pipeline.named_parameters()}


@pytest.mark.parametrize("family", ["interleaved", "zbv", "dualpipe", "1f1b-overlap"])
def test_auxiliary_losses_belong_to_their_micro_batch_under_any_schedule(family: str) -> None:
    """Micro-batches weigh 0.1 to 0.4 and several are in flight: one scale for all, or a late one, would mix them up."""
    shape = model(**STRONG, num_hidden_layers=4)
    assert worst(found_under(family, shape), losses_added(shape)) < 1e-5


def test_auxiliary_losses_show_in_gradients_not_in_the_loss_and_not_in_evaluation() -> None:
    strong, none = model(**STRONG), model(aux_loss_coef=0, z_loss_coef=0)
    (a, strongly), (b, plainly) = (serial(shape, 1)[:2] for shape in (strong, none))
    assert a == b
    gate = "model.layers.1.mlp.gate.weight"
    assert float((strongly[gate] - plainly[gate]).abs().max()) > 1e-3
    block = layers(strong, 5)[1]().eval()
    before = block_gradient(block)
    block.mlp.gate.balance = block.mlp.gate.z = 0.0
    assert torch.equal(before, block_gradient(block))


def block_gradient(block: nn.Module) -> Tensor:
    block.zero_grad()
    block(normal(1, 8, 32).float()).sum().backward()
    gradient = block.get_parameter("mlp.gate.weight").grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize(("router", "k"), [("switch", 1), ("noisy", 2), ("gshard", 2)])
def test_what_a_router_draws_depends_on_the_place_alone(router: str, k: int) -> None:
    """Recomputation and any order of micro-batches draw the same; another step, micro-batch or layer draws anew."""
    built = layers(model(router=router, num_experts_per_tok=k, num_experts=8), 5)
    block, other = built[1](), built[2]()
    x, here = normal(4, 8, 32).float(), MicrobatchContext(step=1, first=12, samples=4)
    first = block.mlp.gate.draw(x.flatten(0, 1), here)
    block(x, microbatch=MicrobatchContext(step=1, first=8, samples=4))

    def same(gate: TopKGate, place: MicrobatchContext) -> bool:
        again = gate.draw(x.flatten(0, 1), place)
        pairs = zip((first.inputs, first.logits, first.second), (again.inputs, again.logits, again.second), strict=True)
        return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)

    assert same(block.mlp.gate, here)
    for place in (MicrobatchContext(2, 0, 1.0, 12, 4), MicrobatchContext(1, 0, 1.0, 16, 4)):
        assert not same(block.mlp.gate, place)
    assert not same(other.mlp.gate, here)
    with pytest.raises(UsageError, match="has a `source`, so it needs the keyword argument `microbatch`"):
        block(x)
    block.eval()
    block(x)


def layer_of(router: str = "softmax", k: int = 2, **more: Any) -> MoELayer:
    torch.manual_seed(2)
    gate = TopKGate(GateShape(8, 4, k, router=router, **more))
    return MoELayer(gate, lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("router", "k"), [("switch", 1), ("noisy", 2), ("gshard", 2)])
def test_without_a_source_torchs_generator_draws_and_torchs_recomputation_replays_it(
    router: str, k: int, reentrant: bool
) -> None:
    none = {"aux_loss_coef": 0.0, "z_loss_coef": 0.0} if reentrant else {}
    layer = layer_of(router, k, **none)
    x = normal(3, 40, 8).float().requires_grad_()

    def gradients(seed: int, recompute: bool) -> list[Tensor]:
        layer.zero_grad()
        torch.manual_seed(seed)
        out = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        (out.square().mean() + layer.aux_loss).backward()
        return [p.grad for p in layer.parameters() if p.grad is not None]

    want = gradients(1, False)
    assert all(torch.equal(a, b) for a, b in zip(want, gradients(1, True), strict=True))
    assert not torch.equal(want[0], gradients(2, False)[0])


def test_losses_are_left_to_a_loop_of_ones_own_and_attached_with_a_micro_batch() -> None:
    layer, x = layer_of(), normal(3, 5, 8).float()
    assert layer.aux_loss.item() == 0
    out = layer(x)
    assert layer.aux_loss.requires_grad
    out.sum().backward(retain_graph=True)
    alone = layer.gate.weight.grad.clone()
    copied = copy.deepcopy(layer)  # torch refuses to copy a tensor with a graph
    assert copied.aux_loss.item() == 0
    (out.sum() + 0.25 * layer.aux_loss).backward()
    both = layer.gate.weight.grad - alone
    layer.zero_grad()
    layer(x, MicrobatchContext(share=0.25)).sum().backward()
    assert layer.aux_loss.item() == 0
    torch.testing.assert_close(layer.gate.weight.grad, both)
    assert not torch.allclose(both, alone)
    layer(x)
    layer.eval()(x)
    assert layer.aux_loss.item() == 0


def test_loads_count_choices_and_drops_of_the_last_step_in_training() -> None:
    block = block_of(capacity_factor=0.5, num_experts=4)
    block(normal(2, 8, 32))
    loads = take_loads(block.mlp.gate)
    assert int(loads[:4].sum()) == 2 * 16
    assert int(loads[4]) == sum(max(0, int(count) - 4) for count in loads[:4]), "16 · 2 / 4 · 0.5 places each"
    assert not take_loads(block.mlp.gate).any()
    block.eval()
    block(normal(2, 8, 32))
    with torch.no_grad():
        block.train()(normal(2, 8, 32))
    assert not take_loads(block.mlp.gate).any()


def test_loads_of_a_step_that_nobody_took_are_gone_after_the_next() -> None:
    block = block_of(num_experts=4)
    for number in range(3):
        block(normal(2, 8, 32), microbatch=MicrobatchContext(step=1, index=number))
    for number in (1, 4, 4):  # the last is computed again
        block(normal(2, 8, 32), microbatch=MicrobatchContext(step=2, index=number))
    assert int(take_loads(block.mlp.gate).sum()) == 2 * (2 * 16)


def test_only_a_sigmoid_gate_has_a_bias_and_it_is_fp32() -> None:
    sigmoid, softmax = (layers(model(router=router), 5, torch.bfloat16)[1]() for router in ("sigmoid", "softmax"))
    bias = sigmoid.mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32
    assert bias.tolist() == [0.0] * 4
    balance(sigmoid.mlp.gate, torch.tensor([9, 1, 5, 5]))
    torch.testing.assert_close(bias, torch.tensor([-0.001, 0.001, 0.0, 0.0]))
    balance(softmax.mlp.gate, torch.tensor([9, 1, 5, 5]))
    assert not any(True for _ in softmax.mlp.gate.buffers())


def test_no_tokens_go_through() -> None:
    block = block_of(num_shared_experts=1, capacity_factor=1.0)
    out = block(normal(0, 8, 32).requires_grad_())
    out.sum().backward()
    assert out.shape == (0, 8, 32)
    assert all(p.grad is not None and not p.grad.any() for p in block.mlp.experts.parameters())
